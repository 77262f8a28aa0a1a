"""Arrival times and prompts of the load generator: their statistics, with seeds, and what files may hold."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from ridgeline.bench.load.arrivals import Arrivals, Ramp, checked
from ridgeline.bench.load.prompts import (
    HASHED_BLOCK,
    Length,
    PromptSource,
    Words,
    common_words,
    known_words,
    match_tokens,
    parse_length,
    read_rows,
)
from ridgeline.errors import ConfigError

MANY = 20_000


def gaps(process: Arrivals, seed: int = 1) -> list[float]:
    times = list(process.times(MANY, random.Random(seed)))
    assert times[0] == 0.0 and times == sorted(times)
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize(
    ("burstiness", "deviation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)],
    ids=["poisson", "bursty", "steady", "equal"],
)
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float, deviation: float) -> None:
    """A gamma process of shape k has gaps whose deviation is the mean over the root of k."""
    found = gaps(Arrivals(50.0, burstiness))
    mean = statistics.mean(found)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(deviation, rel=0.05, abs=1e-6)


def test_poisson_counts_are_poisson() -> None:
    """The number of arrivals in a second has its mean as variance; gaps do not know of each other."""
    found = gaps(Arrivals(20.0))
    times = list(itertools.accumulate(found))
    counts = [0] * int(times[-1])
    for when in times:
        if when < len(counts):
            counts[int(when)] += 1
    assert statistics.variance(counts) / statistics.mean(counts) == pytest.approx(1.0, abs=0.15)
    assert abs(statistics.correlation(found[:-1], found[1:])) < 0.03


def test_the_same_seed_gives_the_same_times() -> None:
    assert gaps(Arrivals(5.0), 3) == gaps(Arrivals(5.0), 3) != gaps(Arrivals(5.0), 4)


def test_without_a_rate_all_come_at_once() -> None:
    assert list(Arrivals().times(3, random.Random(0))) == [0.0] * 3 and Arrivals().name == "all at once"


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
@pytest.mark.parametrize(("start", "end"), [(10.0, 90.0), (90.0, 10.0), (30.0, 30.0)])
def test_a_ramp_goes_from_its_start_to_its_end(strategy: str, start: float, end: float) -> None:
    ramp = Ramp(start, end, strategy)
    times = list(Arrivals(ramp=ramp).times(MANY, random.Random(2)))
    duration = ramp.duration(MANY)
    assert times[-1] == pytest.approx(duration, rel=0.05)

    def rate(share: float) -> float:
        middle, width = share * duration, duration / 20
        return sum(middle - width <= when < middle + width for when in times) / (2 * width)

    along = {share: start + (end - start) * share if strategy == "linear" else start * (end / start) ** share
             for share in (0.1, 0.5, 0.9)}
    for share, wanted in along.items():
        assert rate(share) == pytest.approx(wanted, rel=0.1)


def test_a_trace_is_its_own_times() -> None:
    process = Arrivals(trace=(3.0, 0.0, 0.5))
    assert list(process.times(2, random.Random(0))) == [0.0, 0.5] and process.name == "trace"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.0, 1.0, None, ()), "--request-rate must be above 0"), ((1.0, 0.0, None, ()), "--burstiness must be above 0"),
        ((math.inf, 1.0, Ramp(0.0, 5.0), ()), "must be above 0"), ((math.inf, 1.0, Ramp(1.0, 5.0), (1.0,)), "its own times"),
        ((1.0, 1.0, None, (-1.0,)), "must not be negative"),
    ],
)
def test_impossible_arrivals_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        checked(*values)


# -- lengths -----------------------------------------------------------------------------------------------------------


def test_lengths_follow_their_distribution() -> None:
    rng = random.Random(0)

    def drawn(spec: str) -> list[int]:
        length = parse_length(spec)
        return [length.tokens(rng) for _ in range(5000)]

    assert set(drawn("256")) == {256}
    uniform = drawn("uniform:10:20")
    assert set(uniform) == set(range(10, 21)) and statistics.mean(uniform) == pytest.approx(15, abs=0.2)
    normal = drawn("normal:100:10:80:200")
    assert min(normal) >= 80 and statistics.mean(normal) == pytest.approx(100, abs=1)
    lognormal = drawn("lognormal:5.2:1.0:16:2048")
    assert min(lognormal) >= 16 and max(lognormal) <= 2048
    assert statistics.median(lognormal) == pytest.approx(math.exp(5.2), rel=0.1)
    assert statistics.mean(drawn("exponential:50")) == pytest.approx(50, rel=0.1)
    assert {parse_length("100").widened(0.1).tokens(rng) for _ in range(500)} == set(range(90, 111))


@pytest.mark.parametrize(
    "spec", ["0", "-3", "x", "uniform:5", "uniform:9:3", "normal:5:0", "lognormal:1:2:3", "gauss:1:2", "nan"]
)
def test_what_is_no_length_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="is not a length; use 256, uniform"):
        parse_length(spec)
    with pytest.raises(ConfigError, match="has its own width"):
        parse_length("uniform:1:5").widened(0.5)


# -- words and conversations -------------------------------------------------------------------------------------------


def test_words_have_the_tokens_that_the_tokenizer_gave_them() -> None:
    words = common_words()[:40]
    pieces, ids = ["<s>"], [0]
    for number, word in enumerate(words):                # every fourth word is two tokens
        cut = 2 if number % 4 == 0 else len(word)
        for piece in filter(None, ("Ġ" + word[:cut], word[cut:])):
            pieces.append(piece)
            ids.append(len(ids))
    found = known_words(match_tokens(words, ids, pieces), "server tokenizer")
    assert found.exact and len(found.words) == 30 and all(len(found.ids[word]) == 1 for word in found.words)
    drawn = found.draw(100, random.Random(0))
    assert len(found.tokens(drawn)) == 100 and found.text(drawn).count(" ") == 100
    with pytest.raises(ConfigError, match="could not be matched"):
        known_words(match_tokens(words, [1], ["Ġelse"]), "")


def test_words_of_several_tokens_come_as_close_as_they_can() -> None:
    words = Words(["aa", "bbb"], {"aa": [1, 2, 3], "bbb": [1, 2, 3, 4]})
    for tokens in range(3, 60):
        assert tokens - 2 <= len(words.tokens(words.draw(tokens, random.Random(tokens)))) <= tokens


def first(source: PromptSource, count: int, seed: str = "0") -> list[Any]:
    return list(itertools.islice(source.conversations(seed), count))


def test_shared_prefixes_are_shared_and_prompts_are_not() -> None:
    source = PromptSource(Words(common_words()), Length("fixed", (8.0,)), Length("fixed", (4.0,)), prefix_len=20, num_prefixes=3)
    texts = [conversation.turns[0].text.split() for conversation in first(source, 60)]
    assert all(len(text) == 28 for text in texts)
    assert len({tuple(text[:20]) for text in texts}) == 3 and len({tuple(text[20:]) for text in texts}) == 60
    other = [conversation.turns[0].text.split() for conversation in first(source, 60, "1")]
    assert {tuple(text[:20]) for text in other} == {tuple(text[:20]) for text in texts}      # a warm server knows them
    assert not {tuple(text) for text in other} & {tuple(text) for text in texts}


def test_conversations_have_turns_and_pauses() -> None:
    source = PromptSource(
        Words(common_words()), Length("fixed", (5.0,)), Length("fixed", (4.0,)), turns=Length("uniform", (2.0, 4.0)),
        think=Length("fixed", (1.5,), 0.0),
    )
    found = first(source, 50)
    assert {len(conversation.turns) for conversation in found} == {2, 3, 4}
    assert all(turn.think == (1.5 if number else 0.0) for each in found for number, turn in enumerate(each.turns))
    assert [each.turns[0].text for each in found] == [each.turns[0].text for each in first(source, 50)]


def test_a_file_of_requests(tmp_path: Path) -> None:
    rows = [
        {"prompt": "hello", "output_tokens": 3, "timestamp": 2500},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "timestamp": 1000},
        {"prompt": [1, 2, 3], "timestamp": 1500},
        {"input_length": 1200, "output_length": 7, "hash_ids": [4, 5, 6], "timestamp": 2000},
        {"input_length": 1100, "output_length": 7, "hash_ids": [4, 9, 8], "timestamp": 2000},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    read = read_rows(str(path), 1e-3)
    assert [row["timestamp"] for row in read] == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.5])    # sorted, from the first one on
    source = PromptSource(Words(common_words()), Length("fixed", (8.0,)), Length("fixed", (40.0,)), rows=read)
    turns = [conversation.turns[0] for conversation in source.conversations("0")]
    assert [turn.tokens_out for turn in turns] == [5, 40, 7, 7, 3] and turns[0].messages and turns[1].ids == [1, 2, 3]
    one, other = (turn.text.split() for turn in turns[2:4])
    assert len(one) == 1200 and len(other) == 1100
    assert one[:HASHED_BLOCK] == other[:HASHED_BLOCK] and one[HASHED_BLOCK:1024] != other[HASHED_BLOCK:1024]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1"), ("[]", "must be an object"), ("{}", "exactly one of prompt, messages and input_length"),
        ('{"prompt": 3}', "a text or a list of token ids"), ('{"messages": "x"}', "a list of objects"),
        ('{"prompt": "x", "output_tokens": 0}', "above 0"), ('{"prompt": "x", "timestamp": "now"}', "must be a number"),
        ("", "holds no requests"), ('{"prompt": "x", "timestamp": 1}\n{"prompt": "y"}', "every line needs a timestamp, or none"),
    ],
)
def test_a_file_with_a_fault_names_it(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=message):
        read_rows(str(path))
