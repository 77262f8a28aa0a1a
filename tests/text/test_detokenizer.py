"""TextStream: any chunks give the text of decoding at once, no half character, no stop string leaks."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from counted_work import is_linear
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ridgeline.sampling_params import SamplingParams
from ridgeline.text.detokenizer import StopFinder, StopStrings, TextStream
from ridgeline.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"

# A vocabulary that makes trouble: parts of characters, bytes that are never valid, letters that overlap stop strings.
PIECES = [b"a", b"b", b"ab", b"aba", b" ", b" a", b"\n", b"<", b"<e", b"nd>", b"", "é".encode(), "你".encode(), "🙂".encode(),
          *(bytes([byte]) for byte in "é你🙂".encode()), b"\xff", b"\xc0", b"\xed\xa0", b"\xf0\x9f", b"<s>", b"<b>"]
SPECIAL = (len(PIECES) - 2, len(PIECES) - 1)

tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=24)
stops = st.lists(
    st.one_of(st.sampled_from(["a", "ab", "aba", "bab", "<end>", "\n\n", "é", "你a", "\ufffd", " a", "abab"]),
              st.text("ab<é \n", min_size=1, max_size=5)),
    max_size=4,
)

# Two letters only: stop strings that overlap each other and themselves come up all the time.
narrow = st.tuples(
    st.lists(st.integers(0, 3), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)
)
answers = st.one_of(st.tuples(tokens, stops), narrow)


class Pieces:
    """As much of a Tokenizer as a TextStream needs."""

    decodes_alone, has_first_pieces = True, False

    def __init__(self, has_prefix_space: bool = False) -> None:
        self.has_prefix_space = has_prefix_space

    def token_pieces(self, skip_special_tokens: bool) -> list[bytes]:
        return [b"" if skip_special_tokens and place in SPECIAL else piece for place, piece in enumerate(PIECES)]


def joined(ids: Sequence[int], skip: bool) -> bytes:
    return b"".join(b"" if skip and token in SPECIAL else PIECES[token] for token in ids)


def whole_text(ids: Sequence[int], skip: bool = True) -> str:
    return joined(ids, skip).decode("utf-8", "replace")


def earliest_stop(text: str, stops: Sequence[str], after: int = 0) -> tuple[int, int] | None:
    """By the definition: the smallest start, then the first listed, among matches that end behind `after`."""
    found = [
        (start, index)
        for index, stop in enumerate(stops)
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > after
    ]
    return min(found, default=None)


def chunked(ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    """The ids cut into pieces of the given sizes, over and over; sizes of 0 give empty pieces."""
    chunks, place, turn = [], 0, 0
    while place < len(ids):
        size = sizes[turn % len(sizes)] if sizes else 1
        chunks.append(ids[place : place + size])
        place, turn = place + size, turn + 1
        if not any(sizes):
            sizes = (1,)
    return chunks


@pytest.mark.reliability("P-12")
@settings(max_examples=150, deadline=None)
@given(tokens, st.lists(st.integers(0, 5), max_size=4), st.booleans(), st.booleans())
def test_any_chunks_give_the_whole_text(ids: list[int], sizes: list[int], skip: bool, at_start: bool) -> None:
    stream = TextStream(Pieces(has_prefix_space=True), skip_special_tokens=skip, at_start=at_start)
    shown = "".join(stream.feed(chunk) for chunk in chunked(ids, sizes)) + stream.finish()
    expected = whole_text(ids, skip)
    assert shown == stream.text == (expected.removeprefix(" ") if at_start else expected)
    assert stream.num_tokens == len(ids)


@settings(max_examples=120, deadline=None)
@given(tokens)
def test_never_half_a_character_and_nothing_late(ids: list[int]) -> None:
    """After every token exactly the complete characters have been shown."""
    stream = TextStream(Pieces())
    shown = ""
    for count, token in enumerate(ids, start=1):
        shown += stream.feed([token])
        assert shown == codecs.utf_8_decode(joined(ids[:count], skip=True), "replace", False)[0]


@pytest.mark.reliability("C-09", "P-12")
@settings(max_examples=250, deadline=None)
@given(answers, st.lists(st.integers(0, 5), max_size=4), st.booleans(), st.integers(0, 4))
@example(([0, 1], ["abab", "b"]), [1], False, 0)          # over before the earlier one could complete
@example(([0, 1, 0, 1], ["b", "abab"]), [1], True, 0)
@example(([2], ["ab", "a"]), [], False, 0)
@example(([0, 0, 0], ["aa"]), [1], False, 2)              # overlaps a match that came too early to count
def test_stops_cut_where_the_whole_text_would_be_cut(
    answer: tuple[list[int], list[str]], sizes: list[int], include: bool, min_tokens: int
) -> None:
    ids, stops = answer
    stream = TextStream(Pieces(), stop=StopStrings(stops), include_stop_str_in_output=include, min_tokens=min_tokens)
    pieces = [stream.feed(chunk) for chunk in chunked(ids, sizes)]
    pieces.append(stream.finish())
    text = whole_text(ids)
    unchecked = len(codecs.utf_8_decode(joined(ids[:min_tokens], skip=True), "replace", len(ids) <= min_tokens)[0])
    stop = earliest_stop(text, stops, after=unchecked)
    if stop is None:
        assert "".join(pieces) == stream.text == text
        assert stream.stopped_by is None and stream.num_tokens == len(ids)
    else:
        start, index = stop
        assert "".join(pieces) == stream.text == text[: start + (len(stops[index]) if include else 0)]
        assert stream.stopped_by == stops[index]


@settings(max_examples=120, deadline=None)
@given(answers.filter(lambda answer: bool(answer[1])))
def test_holds_back_only_what_could_begin_a_stop(answer: tuple[list[int], list[str]]) -> None:
    ids, stops = answer
    stream = TextStream(Pieces(), stop=StopStrings(stops))
    for count, token in enumerate(ids, start=1):
        stream.feed([token])
        text = codecs.utf_8_decode(joined(ids[:count], skip=True), "replace", False)[0]
        if earliest_stop(text, stops) is not None:
            break
        openings = [size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])]
        assert stream.text == text[: len(text) - max(openings)]


@settings(max_examples=120, deadline=None)
@given(answers, st.lists(st.integers(0, 5), max_size=4))
def test_token_count_at_a_stop_does_not_depend_on_chunks(answer: tuple[list[int], list[str]], sizes: list[int]) -> None:
    ids, stops = answer
    one_by_one, in_chunks = TextStream(Pieces(), stop=StopStrings(stops)), TextStream(Pieces(), stop=StopStrings(stops))
    for token in ids:
        one_by_one.feed([token])
    for chunk in chunked(ids, sizes):
        in_chunks.feed(chunk)
    assert one_by_one.num_tokens == in_chunks.num_tokens
    assert one_by_one.text_offsets == in_chunks.text_offsets


@settings(max_examples=100, deadline=None)
@given(tokens)
def test_text_offsets_cut_the_text_into_the_tokens(ids: list[int]) -> None:
    stream = TextStream(Pieces())
    stream.feed(ids)
    lengths = [len(codecs.utf_8_decode(joined(ids[:count], skip=True), "replace", False)[0]) for count in range(len(ids))]
    assert stream.text_offsets == lengths


def test_waits_while_an_earlier_match_may_still_complete() -> None:
    stream = TextStream(Pieces(), stop=StopStrings(["abab", "b"]))
    assert stream.feed([0]) == "" and stream.feed([1]) == ""             # "b" is found, but "abab" starts before it
    assert stream.stopped_by is None
    assert stream.feed([4]) == "a" and stream.stopped_by == "b"          # now it cannot complete


def test_after_a_stop_nothing_more_comes() -> None:
    stream = TextStream(Pieces(), stop=StopStrings(["b"]))
    assert stream.feed([0, 1, 0]) == "a"
    assert (stream.stopped_by, stream.num_tokens) == ("b", 2)
    assert stream.feed([0]) == "" and stream.finish() == "" and stream.text == "a" and stream.num_tokens == 2


def test_a_stop_token_is_counted_but_hidden() -> None:
    """With skip_special_tokens=False too: the end-of-sequence token is not part of the answer."""
    for include, expected in ((False, "a"), (True, "a<s>")):
        stream = TextStream(Pieces(), skip_special_tokens=False, include_stop_str_in_output=include)
        assert stream.feed([0, SPECIAL[0]], ends_with_stop_token=True) + stream.finish() == expected
        assert stream.num_tokens == 2 and stream.text_offsets == [0, 1]


def test_padding_ids_have_no_text() -> None:
    stream = TextStream(Pieces())
    assert stream.feed([0, len(PIECES), 10**6, 1]) == "ab" and stream.num_tokens == 4


def test_from_sampling_params() -> None:
    params = SamplingParams(stop="b", min_tokens=1, include_stop_str_in_output=True, skip_special_tokens=False)
    (stream,) = TextStream.for_answers(Pieces(), params)
    assert stream.feed([1, SPECIAL[0], 0, 1]) == "b<s>ab" and stream.stopped_by == "b"


def test_the_answers_of_a_request_share_what_never_changes() -> None:
    """32 long stop strings and 128 answers: the tables are there once, and no answer sees another's text."""
    first, second, *others = TextStream.for_answers(Pieces(), SamplingParams(stop=["ab", "b" * 1024], n=128))
    assert len(others) == 126
    assert first._finder is not None and second._finder is not None
    assert first._finder is not second._finder and first._finder.stop is second._finder.stop
    assert first.feed([0]) == "" and second.feed([1]) == ""              # "a" and "b" may both begin a stop string
    assert first.feed([1]) == "" and first.stopped_by == "ab"
    assert second.feed([4]) == "b " and second.stopped_by is None


def test_continuation_keeps_the_space_and_a_start_loses_it() -> None:
    tokenizer = Tokenizer.load(GOLDEN / "llama-spm-small.gguf")
    ids = tokenizer.encode("the world", add_special_tokens=False)
    for at_start, expected in ((True, "the world"), (False, " the world")):
        stream = TextStream(tokenizer, at_start=at_start)
        assert stream.feed(ids) + stream.finish() == expected == tokenizer.decode(ids, at_start=at_start)


@pytest.mark.reliability("R-20")
@pytest.mark.parametrize("count", [1, 32])
def test_work_is_linear(count: int) -> None:
    """Eight times the text takes eight times the work, with stop strings that keep the finder busy."""
    stops = StopStrings(["a" * 40 + str(number) for number in range(count)])

    def find(pieces: int) -> None:
        finder = StopFinder(stops)
        for _ in range(pieces):
            finder.advance("aaaaaaaa")

    good, few, many = is_linear(find, 6)
    assert good, (few, many)


@pytest.mark.parametrize("remembered", [1, 8192])
def test_what_one_answer_has_looked_up_the_others_need_not(remembered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 answers that keep 26 stop strings open took half of the event loop's time, 80 ms of a step: each of them advanced each
    string for each character. With too little room to remember, only that is lost."""
    computed: list[str] = []
    made = StopStrings._computed

    def noted(self: StopStrings, matched: tuple[int, ...], character: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        computed.append(character)
        return made(self, matched, character)

    monkeypatch.setattr(StopStrings, "_computed", noted)
    monkeypatch.setattr("ridgeline.text.detokenizer._STEPS", remembered)
    stops = StopStrings(["#" * 30 + chr(97 + each) for each in range(26)] + ["#x"])
    finders = [StopFinder(stops) for _ in range(20)]
    for finder in finders:
        for _ in range(10):
            finder.advance("#" * 50)
        assert finder.settled == 500 - 30 and not finder.decided
        finder.advance("e")
        assert finder.decided and finder.best == (470, 4)
    assert len(computed) <= 32 or remembered == 1


def random_ids(rng: random.Random, tokenizer: Tokenizer, partial: list[int]) -> list[int]:
    special = sorted(tokenizer.special_ids)
    choices = (range(tokenizer.vocab_size), partial, special, range(tokenizer.vocab_size))
    return [rng.choice(rng.choice(choices)) for _ in range(rng.randrange(1, 16))]


@pytest.mark.parametrize("turns", [1_500, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("vocabulary", ["embedded", "llama-spm-small", "llama-bpe-small"])
def test_real_vocabularies(vocabulary: str, turns: int, request: pytest.FixtureRequest) -> None:
    """Random token sequences: split characters, emoji, special tokens; stops taken from the text."""
    path = request.getfixturevalue("embedded_model") if vocabulary == "embedded" else GOLDEN / f"{vocabulary}.gguf"
    tokenizer = Tokenizer.load(path)
    partial = [token for token in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.token_text(token)]
    emoji = tokenizer.encode("👩‍💻🏳️‍🌈🇩🇪é你好", add_special_tokens=False)
    assert len(partial) > 100 and len(emoji) > 10
    rng = random.Random(len(vocabulary))
    stopped = 0
    for turn in range(turns):
        ids = random_ids(rng, tokenizer, partial) + rng.sample(emoji, 4)
        skip = turn % 2 == 0
        text = tokenizer.decode(ids, skip_special_tokens=skip, at_start=False)
        places = [rng.randrange(len(text)) for _ in range(turn % 3)]
        stops = [text[place : place + rng.randrange(1, 6)] for place in places] + ["</never>"]
        stream = TextStream(tokenizer, stop=StopStrings(stops), skip_special_tokens=skip)
        bounds = [0, *sorted(rng.randrange(len(ids) + 1) for _ in range(4)), len(ids)]
        shown = ""
        for start, end in pairwise(bounds):
            shown += stream.feed(ids[start:end])
            assert text.startswith(shown)
        shown += stream.finish()
        stop = earliest_stop(text, stops)
        assert shown == stream.text == (text if stop is None else text[: stop[0]])
        assert not any(found in shown for found in stops)
        stopped += stream.stopped_by is not None
    assert stopped > turns / 5
