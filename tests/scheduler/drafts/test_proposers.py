"""Proposers without an engine: what they offer, and that their memory and work stay bounded."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest

from ridgeline.messages import Request
from ridgeline.ops.cpu import native
from ridgeline.sampling_params import SamplingParams
from ridgeline.scheduler.drafts import gram_index, suffix
from ridgeline.scheduler.drafts.forced import Forced
from ridgeline.scheduler.drafts.gram_index import SEPARATOR, GramIndex
from ridgeline.scheduler.drafts.ngram import Ngram
from ridgeline.scheduler.drafts.ngram_table import NgramTable
from ridgeline.scheduler.drafts.offer import EVIDENCE, Paths, grade
from ridgeline.scheduler.drafts.predicted import Predicted
from ridgeline.scheduler.drafts.suffix import AnswerLog, Suffix
from ridgeline.scheduler.sequence import Sequence, Turn


def sequence(prompt: list[int], answer: list[int] | None = None, predicted: list[int] | None = None, salt: str = "") -> Sequence:
    request = Request("r", prompt, SamplingParams(), cache_salt=salt, predicted_token_ids=predicted or [])
    made = Sequence(request, 0, Turn(0, 0, 0), 10_000, 0, frozenset())
    made.tokens.extend(answer or [])
    return made


def longest_by_hand(tokens: list[int], fewest: int, longest: int) -> tuple[int, int]:
    """The newest of the longest earlier matches of the end of `tokens`, found by looking everywhere."""
    best = (0, 0)
    for position in range(len(tokens) - 1, 0, -1):
        matched = 0
        while matched < min(longest, position) and tokens[position - 1 - matched] == tokens[-1 - matched]:
            matched += 1
        if matched >= fewest and matched > best[1]:
            best = position, matched
    return best


@pytest.mark.parametrize("step", [1, 3, 90])
def test_the_index_finds_the_longest_and_newest_match(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram_index, "_CANDIDATES", 10**6)
    rng = random.Random(step)
    tokens = array("i")
    index = GramIndex(tokens, 2)
    for _ in range(0, 900, step):
        tokens.extend(rng.randrange(6) for _ in range(step))
        index.catch_up()
        assert index.longest_match(tokens[-8:], 8) == longest_by_hand(tokens.tolist(), 2, 8)


def test_a_search_looks_at_a_bounded_number_of_places() -> None:
    index = GramIndex(array("i", [7] * 50_000 + [8] + [7] * 3), 2)
    index.catch_up()
    assert len(index.candidates(array("i", [9, 7, 7]), 8)) <= 24


def test_an_index_costs_few_bytes_a_token() -> None:
    index = GramIndex(array("i"), 3)
    for number in range(20_000):
        index.tokens.append(number * 7919 % 30_000)
        index.catch_up()
    assert index.num_bytes <= 16 * 20_000 * 1.1


def test_ngram_offers_what_followed_before() -> None:
    row = sequence([1, 2, 3, 4, 5, 6, 9, 9, 2, 3, 4])
    offer = Ngram(2, 5).propose(row, 3)
    assert offer is not None and offer.tokens == [5, 6, 9] and offer.evidence == grade(3)
    assert Ngram(4, 5).propose(row, 3) is None


def test_ngram_follows_its_match_and_leaves_it() -> None:
    text = list(range(40, 60))
    row = sequence([*text, 1, *text[:8]])
    proposer = Ngram(2, 5)
    for place in range(8, 12):
        offer = proposer.propose(row, 4)
        assert offer is not None and offer.tokens == text[place : place + 4]
        row.tokens.append(text[place])
    row.tokens.append(99)
    assert proposer.propose(row, 4) is None
    row.tokens.extend(text[2:4])
    offer = proposer.propose(row, 2)
    assert offer is not None and offer.tokens == text[4:6]


def test_ngram_continues_a_circle_beyond_the_end() -> None:
    offer = Ngram(2, 5).propose(sequence([1, 2, 3] * 4), 7)
    assert offer is not None and offer.tokens == [1, 2, 3, 1, 2, 3, 1]


def test_ngram_forgets_a_sequence_that_ended() -> None:
    row, proposer = sequence([1, 2, 1, 2]), Ngram(2, 5)
    proposer.propose(row, 2)
    proposer.ended(row)
    assert not proposer._states


def test_prediction_is_followed_from_its_beginning() -> None:
    predicted = [10, 11, 12, 13, 14, 15, 16, 17]
    row, proposer = sequence([1, 2], predicted=predicted), Predicted()
    first = proposer.propose(row, 3)
    assert first is not None and first.tokens == [10, 11, 12] and first.evidence == EVIDENCE - 1
    row.tokens.extend([10, 11, 12, 13])
    then = proposer.propose(row, 9)
    assert then is not None and then.tokens == [14, 15, 16, 17]
    row.tokens.extend([14, 15, 16, 17])
    assert proposer.propose(row, 9) is None


def test_prediction_is_found_again_after_an_edit() -> None:
    predicted = [10, 11, 12, 13, 14, 15, 16, 17]
    row, proposer = sequence([1, 2], predicted=predicted), Predicted()
    row.tokens.extend([10, 11, 90, 91])
    assert proposer.propose(row, 9) is None
    row.tokens.extend([14, 15])
    offer = proposer.propose(row, 9)
    assert offer is not None and offer.tokens == [16, 17]


def test_prediction_prefers_the_place_that_skips_least() -> None:
    predicted = [1, 2, 50, 1, 2, 51, 1, 2, 52]
    row, proposer = sequence([9], predicted=predicted), Predicted()
    row.tokens.extend([1, 2, 50, 60, 1, 2])
    offer = proposer.propose(row, 1)
    assert offer is not None and offer.tokens == [51]


def test_prediction_reads_an_answer_that_is_already_there() -> None:
    """After a preemption or a restart the state is new and the answer is not."""
    offer = Predicted().propose(sequence([9], [1, 2, 3], predicted=[1, 2, 3, 4, 5]), 4)
    assert offer is not None and offer.tokens == [4, 5]


def test_no_prediction_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    without, proposer, most = sequence([1, 2, 3]), Predicted(), np.array([4, 4])
    assert proposer.propose(without, 4) is None
    paths = proposer.propose_all([without, sequence([9], [1], predicted=[1, 2])], most)
    assert paths is not None and paths.places.tolist() == [1] and paths.tokens.tolist() == [[2]]
    monkeypatch.setattr(proposer, "propose", None)       # rows are not looked at one by one
    assert proposer.propose_all([without, without], most) is None


def ended(proposer: Suffix, answer: list[int], salt: str = "") -> None:
    row = sequence([1], answer, salt=salt)
    row.finished = True
    proposer.ended(row)


def test_suffix_offers_what_earlier_answers_said() -> None:
    proposer = Suffix(1 << 20)
    ended(proposer, [5, 6, 7, 8, 9, 10])
    offer = proposer.propose(sequence([3, 5, 6, 7]), 8)
    assert offer is not None and offer.tokens == [8, 9, 10]              # and not beyond the end of that answer


def test_suffix_takes_the_majority() -> None:
    proposer = Suffix(1 << 20)
    for last in ([8, 1], [8, 2], [9, 1]):
        ended(proposer, [5, 6, 7, *last])
    offer = proposer.propose(sequence([5, 6, 7]), 8)
    assert offer is not None and offer.tokens == [8, 2]                  # two of three said 8; of two, the newest said 2


def test_suffix_keeps_salts_apart() -> None:
    proposer = Suffix(1 << 20)
    ended(proposer, [5, 6, 7, 8], salt="mine")
    assert proposer.propose(sequence([5, 6, 7], salt="yours"), 4) is None
    assert proposer.propose(sequence([5, 6, 7]), 4) is None
    assert proposer.propose(sequence([5, 6, 7], salt="mine"), 4) is not None


def test_suffix_ignores_answers_that_only_wait_again() -> None:
    proposer = Suffix(1 << 20)
    proposer.ended(sequence([1], [5, 6, 7, 8]))
    assert proposer.propose(sequence([5, 6, 7]), 4) is None


def test_suffix_memory_is_bounded_and_the_oldest_go_first() -> None:
    rng, most = random.Random(1), 40_000
    proposer = Suffix(most)
    for number in range(400):
        ended(proposer, [number, *(rng.randrange(1000) for _ in range(60)), -2 - number], salt=f"salt {number % 7}")
        assert proposer.num_bytes <= most + 7 * 1024
    log = AnswerLog(100)
    for number in range(20):
        log.add(array("i", [number] * 20))
    assert len(log) <= 100
    assert log.continuation(array("i", [19] * 5), 4)[0]
    assert not log.continuation(array("i", [1] * 5), 4)[0]


def test_suffix_keeps_a_bounded_number_of_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "_SALTS", 3)
    proposer = Suffix(1 << 20)
    for number in range(5):
        ended(proposer, [5, 6, 7, 8], salt=f"salt {number}")
    offers = [proposer.propose(sequence([5, 6, 7], salt=f"salt {number}"), 4) for number in range(5)]
    assert [offer is not None for offer in offers] == [False, False, True, True, True]


def test_no_match_runs_across_two_answers() -> None:
    log = AnswerLog(1000)
    log.add(array("i", [1, 2]))
    log.add(array("i", [3, 4, 5, 6]))
    assert SEPARATOR not in log.continuation(array("i", [3, 4, 5]), 9)[0]
    assert log.continuation(array("i", [1, 2, 3]), 9) == ([], 0)


class ForcedText:
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def forced(self, most: int) -> list[int]:
        return self.tokens[:most]


def test_grammar_offers_what_its_matcher_forces() -> None:
    row = sequence([1])
    assert Forced().propose(row, 4) is None
    row.matcher = ForcedText([])                         # type: ignore[assignment]
    assert Forced().propose(row, 4) is None
    row.matcher = ForcedText([4, 5, 6])                  # type: ignore[assignment]
    offer = Forced().propose(row, 2)
    assert offer is not None and offer.tokens == [4, 5]


def library() -> Any:
    return native.library() or pytest.skip("no C compiler")


def native_ngrams(fewest: int, longest: int) -> NgramTable:
    return NgramTable(fewest, longest, library().ngram_drafts)


def check_same(one: Paths | None, other: Paths | None) -> int:
    """How many rows have drafts, which must be the same."""
    assert (one is None) == (other is None)
    if one is None or other is None:
        return 0
    for name in ("places", "tokens", "ends", "evidence"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist(), name
    return len(one.places)


@pytest.mark.parametrize(("fewest", "longest"), [(1, 1), (1, 8), (2, 8), (3, 5)])
def test_all_rows_at_once_have_the_drafts_of_each_row(fewest: int, longest: int) -> None:
    """Text of few and of many tokens, rows that grow by one token or a hundred, rows that end and come back."""
    rng = random.Random(longest)
    alone, together = Ngram(fewest, longest), native_ngrams(fewest, longest)
    rows = [sequence([rng.randrange(kinds) for _ in range(length)])
            for kinds, length in ((2, 1), (2, 70), (6, 5), (6, 63), (50, 64), (50, 300), (900, 2000))]
    said = 0
    for _ in range(120):
        most = np.array([rng.choice([0, 1, 4, 15]) for _ in rows])
        said += check_same(alone.propose_all(rows, most), together.propose_all(rows, most))
        for row in rows:
            kinds = 1 + max(row.tokens[:64])
            new = rng.choice([0, 2, 3, 100]) if rng.random() < 0.1 else 1
            row.tokens.extend(rng.randrange(kinds) for _ in range(new))
        if rng.random() < 0.1:
            place = rng.randrange(len(rows))
            alone.ended(rows[place])
            together.ended(rows[place])
            rows = [*rows[:place], sequence([1, 2, 3, 1, 2]), *rows[place + 1 :]]
    assert said > 200


@pytest.mark.parametrize("border", [128, 256, 512, 1024])
def test_an_index_has_the_same_size_however_its_row_grew(border: int) -> None:
    """A row that copies is not searched, so one of the indices grows later than the other. With other sizes other hashes
    collide, and a search that looks at few candidates looks at others: drafts of the two would differ."""
    rng = random.Random(border)
    alone, together = Ngram(2, 4), native_ngrams(2, 4)
    circle = [rng.randrange(40) for _ in range(30)]
    row = sequence((circle * border)[: border // 2 - 4])

    def ask() -> None:
        assert check_same(alone.propose_all([row], np.array([15])), together.propose_all([row], np.array([15])))

    ask()
    for length in (border - 30, border - 1):
        row.tokens.extend((circle * border)[len(row.tokens) : length])
        if length == border - 1:
            row.tokens[-3:] = array("i", [99, *circle[:2]])              # it goes on otherwise: now both search
        ask()
    heads = len(alone._states[row].index._heads)
    assert heads == int(together._table[together._slots[row], 3]) + 1 == border


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_have_the_same_drafts_in_both_indices(seed: int) -> None:
    """Few kinds of tokens, so that searches end at their limit, and growth by copies, by new tokens, and up to powers of two."""
    rng, said = random.Random(seed), 0
    alone, together = Ngram(2, 8), native_ngrams(2, 8)
    rows = [sequence([rng.randrange(kinds) for _ in range(rng.randrange(1, 70))]) for kinds in (2, 3, 4, 5, 8, 40)]
    while min(len(row.tokens) for row in rows) < 700:
        most = np.full(len(rows), 15)
        said += check_same(alone.propose_all(rows, most), together.propose_all(rows, most))
        for row in rows:
            if rng.random() < 0.6:
                begin = rng.randrange(len(row.tokens))
                row.tokens.extend(row.tokens[begin : begin + rng.randrange(1, 90)])
            else:
                new = rng.choice([1, 2, 127 - len(row.tokens) % 128])
                row.tokens.extend(rng.randrange(1 + max(row.tokens[:64])) for _ in range(new))
    assert said > 50


@pytest.mark.parametrize("tokens", [50, 400, 5000])
def test_earlier_answers_are_found_for_all_rows_at_once(tokens: int) -> None:
    """Logs that are full and lose their older half, several salts, and one that has no log."""
    rng, said = random.Random(tokens), 0
    alone, together = Suffix(16 * tokens), Suffix(16 * tokens, library().suffix_drafts)
    for _ in range(80):
        kinds = rng.choice([2, 4, 30])
        answer = sequence([1], [rng.randrange(kinds) for _ in range(rng.choice([2, 10, 100]))], salt=rng.choice(["", "x"]))
        answer.finished = True
        alone.ended(answer)
        together.ended(answer)
        rows = [sequence([rng.randrange(kinds) for _ in range(length)], salt=salt)
                for length, salt in ((1, ""), (2, "x"), (10, "y"), (40, ""), (40, "x"))]
        rows.append(sequence(answer.tokens.tolist()[1:20], salt=answer.request.cache_salt))
        most = np.array([rng.choice([0, 1, 5, 15]) for _ in rows])
        said += check_same(alone.propose_all(rows, most), together.propose_all(rows, most))
    assert said > 20


def test_many_rows_at_once_keep_little_and_forget() -> None:
    together, rows = native_ngrams(2, 8), [sequence([number, 1, 2, 3, number, 1]) for number in range(10, 210)]
    found = together.propose_all(rows, np.full(200, 2))
    assert found is not None and found.tokens.tolist() == [[2, 3]] * 200 and found.evidence.tolist() == [grade(2)] * 200
    rows[0].tokens.extend(range(5000, 25_000))
    assert together.propose_all(rows[:1], np.full(1, 2)) is None
    assert together.num_bytes <= 16 * 20_006 * 1.1 + 200 * 1024
    for row in rows:
        together.ended(row)
    assert not together.num_bytes and not together._slots
