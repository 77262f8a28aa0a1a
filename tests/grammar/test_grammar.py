"""Grammars without an engine: what is refused and when, what a matcher allows, what is remembered, and what it costs."""

from __future__ import annotations

import asyncio
import collections
import copy
import ctypes
import faulthandler
import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from counted_work import work_of
from llguidance import LLExecutor
from served_model import write_model
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from ridgeline import sampling_params
from ridgeline.engine.client import grammar_check
from ridgeline.engine.client.grammar_check import GrammarChecker, vocabulary_of
from ridgeline.engine.core.grammars import Compiled
from ridgeline.engine.ipc import TO_ENGINE, Add
from ridgeline.errors import BadRequest, Overloaded, TryAgain
from ridgeline.grammar import background, compile_worker, llguidance_backend
from ridgeline.grammar.compiler import compile_grammar, make_backend
from ridgeline.grammar.frames import Question
from ridgeline.grammar.grammar_cache import ByteLimitedCache
from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary, Pieces
from ridgeline.grammar.llguidance_backend import LLGuidance
from ridgeline.grammar.masks import Masks
from ridgeline.grammar.matcher import Matcher
from ridgeline.messages import Request
from ridgeline.process import framed_child
from ridgeline.sampling_params import MAX_GRAMMAR_BYTES, SamplingParams, StructuredOutputs
from ridgeline.text.tokenizer import Tokenizer

XGRAMMAR = pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed")
BACKENDS = ["llguidance", pytest.param("xgrammar", marks=XGRAMMAR)]
PADDED = 300                         # the model's ids; its tokenizer has 260
EOS = 257


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_model(tmp_path_factory.mktemp("grammar") / "tiny"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return vocabulary_of(tokenizer, PADDED, tokenizer.eos_token_ids)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The library; what a matcher allows must not depend on it."""
    return str(request.param)


@pytest.fixture(scope="module")
def checker(tokenizer: Tokenizer) -> Iterator[GrammarChecker]:
    made = GrammarChecker(tokenizer)
    yield made
    made.close()


def matcher(vocabulary: GrammarVocabulary, params: SamplingParams, backend: str = "llguidance") -> Matcher:
    assert params.structured_outputs is not None
    made = make_backend(backend, vocabulary)
    return Matcher(compile_grammar(made, params.structured_outputs), params, vocabulary.end_ids, made.spell)


def allowed(mask: np.ndarray) -> list[int]:
    """Ids, by the definition of the packing and nothing else."""
    return [token for token in range(32 * len(mask)) if (int(mask[token // 32]) >> (token % 32)) & 1]


def nexts(masks: Masks, at: Matcher) -> list[int]:
    return allowed(masks.fill([(0, at)], 1)[0])


# -- what a request may ask for ----------------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def circular() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    return schema


@pytest.mark.reliability("B-04")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "needs exactly one of json, json_object"), ({"json_object": False}, "exactly one"),
        ({"regex": "a", "choice": ["a"]}, "got regex and choice"), ({"json": {}, "json_object": True}, "json and json_object"),
        ({"json": nested(10_000)}, "nested more than 64 deep"), ({"json": "[" * 10_000}, "nested more than 64 deep"),
        ({"json": '{"a":' * 10_000}, "nested more than 64 deep"), ({"json": circular()}, "nested more than 64 deep"),
        ({"json": {"enum": list(range(1001))}}, "an enum of 1001 values; at most 1000"),
        ({"json": {"properties": {str(n): {} for n in range(1001)}}}, "1001 properties; at most 1000"),
        ({"json": {"description": "x" * MAX_GRAMMAR_BYTES}}, "at most 65536 are allowed"),
        ({"json": "nonsense"}, "json is not JSON"), ({"json": "[1]"}, "must be a JSON object"),
        ({"json": 3}, "must be an object"),
        ({"json": {"const": float("nan")}}, "is not JSON"), ({"json": {"const": "\ud800"}}, "valid Unicode"),
        ({"regex": "a" * 5000}, "regex has 5000 bytes; at most 4096"), ({"regex": ""}, "not blank"),
        ({"regex": "\ud800"}, "valid Unicode"), ({"grammar": 7}, "grammar must be a text"),
        ({"choice": []}, "must be a list of texts"), ({"choice": "ab"}, "must be a list of texts"),
        ({"choice": ["a"] * 1001}, "choice has 1001 entries"), ({"choice": ["x" * 60_000] * 2}, "choice is larger"),
        ({"choice": ["a", 1]}, "must be a text"), ({"json_object": "yes"}, "json_object must be true or false"),
        ({"jsom": {}}, "has no field 'jsom'"), ("json", "structured_outputs must be an object"),
        ({"regex": "a", "disable_any_whitespace": True}, "goes with json"),
    ],
)
def test_what_is_refused_at_once_and_by_name(given: Any, words: str) -> None:
    """However deep or large: nothing looks at all of it before it is refused."""

    def ask() -> None:
        with pytest.raises(BadRequest, match=r"^structured_outputs") as refused:
            SamplingParams(structured_outputs=given)
        assert words in str(refused.value) and "\n" not in str(refused.value)

    work = work_of(ask)
    assert work.lines < 50_000 and work.allocated < 20 * MAX_GRAMMAR_BYTES, work


def test_it_crosses_the_wire_and_equal_schemas_are_equal() -> None:
    schema = {"type": "object", "properties": {"ß": {"enum": [1, None]}}}
    params = SamplingParams(structured_outputs={"json": schema})  # type: ignore[arg-type]
    assert params == SamplingParams(structured_outputs=StructuredOutputs(json=json.dumps(schema, indent=3)))
    for each in (params, SamplingParams(structured_outputs=StructuredOutputs(choice=["a", "b"]))):
        sent = TO_ENGINE.decode(TO_ENGINE.encode(Add(Request("r", [1], each))))
        assert isinstance(sent, Add) and sent.request.params == each
    assert params.structured_outputs is not None and params.structured_outputs.kind == "json"
    tight = StructuredOutputs(json=schema, disable_any_whitespace=True)
    assert tight.key != params.structured_outputs.key


# -- what a matcher allows ---------------------------------------------------------------------------------------------


def test_masks_are_packed_and_hold_only_ids_of_the_tokenizer(vocabulary: GrammarVocabulary, backend: str) -> None:
    masks = Masks(PADDED)
    at = matcher(vocabulary, SamplingParams(structured_outputs=StructuredOutputs(choice=["ab", "ac", "b"])), backend)
    free = matcher(vocabulary, SamplingParams(structured_outputs=StructuredOutputs(regex=r"[^\x00]*")), backend)
    spelled = vocabulary.pieces.index
    filled = masks.fill([(2, at), (0, free)], 3)
    assert filled.shape == (3, -(-PADDED // 32)) and filled.dtype == np.int32
    assert allowed(filled[2]) == sorted([spelled(b"a"), spelled(b"b")])
    assert (filled[1] == -1).all()                       # a row without a grammar
    everything = allowed(filled[0])
    assert EOS in everything and spelled(b"z") in everything
    assert not [token for token in everything if token >= 260]           # padding ids are no text
    assert not {256, 258, 259} & set(everything)                         # nor are control tokens
    assert at.accept(spelled(b"a")) and nexts(masks, at) == sorted([spelled(b"b"), spelled(b"c")]) and not at.ended
    assert at.accept(spelled(b"c")) and at.ended
    assert not at.accept(spelled(b"c")) and at.error.startswith("the grammar of structured_outputs failed")
    assert (masks.fill([(0, at)], 1) == -1).all()        # it failed: what is sampled is not read


@pytest.mark.parametrize(("rows", "threads"), [(3, 2), (40, 1), (40, 2)])        # one after the other; in threads
def test_many_rows_get_the_masks_they_would_get_alone(
    vocabulary: GrammarVocabulary, backend: str, rows: int, threads: int
) -> None:
    masks, alone = Masks(PADDED, threads), Masks(PADDED)
    params = SamplingParams(structured_outputs=StructuredOutputs(json={"type": "array", "items": {"type": "integer"}}))
    text = b"[12, 345, 6,7 , 8]"
    made = [matcher(vocabulary, params, backend) for _ in range(rows)]
    for number, at in enumerate(made):
        assert all(at.accept(vocabulary.pieces.index(text[n : n + 1])) for n in range(number % len(text)))
    together = masks.fill([(row, at) for row, at in enumerate(made)], rows).copy()
    for row, at in enumerate(made):
        assert np.array_equal(together[row], alone.fill([(0, at)], 1)[0])
    assert masks.filled == rows and masks.seconds > 0


def test_forced_tokens_spell_the_only_text_and_nothing_is_consumed(vocabulary: GrammarVocabulary, backend: str) -> None:
    asked = SamplingParams(structured_outputs=StructuredOutputs(regex=r"hello world(!|\?)"))
    made = matcher(vocabulary, asked, backend)
    forced = made.forced(64)
    if backend == "xgrammar":
        assert forced == [] and made.allowed([EOS, EOS]) == 2            # it is not asked: masks will tell
        return
    assert forced and b"hello world".startswith(b"".join(vocabulary.pieces[token] for token in forced))
    assert made.forced(1) == forced[:1]
    assert made.allowed(forced) == len(forced) and made.allowed([*forced[:1], EOS]) == 1
    assert made.forced(64) == forced and all(made.accept(token) for token in forced)


def test_forced_text_is_drafted_to_its_end(backend: str) -> None:
    """llguidance holds the last token back, since what follows may become a part of it. Drafts are verified, so they need not."""
    if backend == "xgrammar":
        return
    pieces = [*(bytes([byte]) for byte in range(256)), b"ld", b"ld!", b"<end>"]
    small = GrammarVocabulary.of(pieces, frozenset({258}), frozenset({258}), len(pieces))
    asked = SamplingParams(structured_outputs=StructuredOutputs(regex=r"world(!|\?)x{40}"))
    made = make_backend(backend, small)
    compiled = compile_grammar(made, asked.structured_outputs)
    assert Matcher(compiled, asked, [258]).forced(8) == [*b"wor"]
    whole = Matcher(compiled, asked, [258], made.spell)
    assert whole.forced(8) == [*b"wor", 256] and whole.forced(2) == [*b"wo"]
    assert all(whole.accept(token) for token in (*b"wor", 257)) and whole.forced(5) == [*b"x" * 5]
    assert made.spell(b"wor") is made.spell(b"wor")      # a schema forces the same texts again and again
    whole._matcher = SimpleNamespace(compute_ff_bytes=lambda: b"wo\xff[258]rld")         # type: ignore[assignment]
    assert whole.forced(8) == [*b"wo"]                   # not what spells the name of a special token


@pytest.mark.parametrize("threads", [1, 2])
def test_a_matcher_that_fails_in_a_batch_fails_alone(vocabulary: GrammarVocabulary, backend: str, threads: int) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    made = [matcher(vocabulary, params, backend) for _ in range(8)]
    made[3]._matcher.consume_token(vocabulary.pieces.index(b"z"))
    filled = Masks(PADDED, threads).fill(list(enumerate(made)), 8)
    assert [bool(at.error) for at in made] == [number == 3 for number in range(8)]
    assert all(allowed(filled[row]) == [vocabulary.pieces.index(b"a")] for row in range(8) if row != 3)


@pytest.mark.parametrize("threads", [1, 2])
def test_matchers_are_told_together_what_they_would_be_told_alone(
    vocabulary: GrammarVocabulary, backend: str, threads: int
) -> None:
    masks, spelled = Masks(PADDED, threads), vocabulary.pieces.index
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="ab{2,4}c"), min_tokens=3)
    made = [matcher(vocabulary, params, backend) for _ in range(9)]
    for letters in (b"aaaaaaaaa", b"bbbbzbbbb", b"bbbbbbbbb", b"cccccbbbb"):
        said = [(at, spelled(letters[row : row + 1])) for row, at in enumerate(made) if not at.error]
        masks.advance(said)
        assert [at.accept(token) for at, token in said] == [token != spelled(b"z") for _, token in said]
    assert [bool(at.error) for at in made] == [row == 4 for row in range(9)]
    assert [at.ended for at in made] == [row < 4 for row in range(9)]
    assert nexts(masks, made[8]) == sorted([spelled(b"b"), spelled(b"c")])
    assert not made[4].accept(spelled(b"b")) and "failed on this answer" in made[4].error


def test_masks_that_are_filled_ahead_are_those_that_would_be_filled(vocabulary: GrammarVocabulary, backend: str) -> None:
    """Together with accepting the tokens before them; also for answers that end, fail or begin meanwhile, or did not accept."""
    params = SamplingParams(structured_outputs=StructuredOutputs(json={"type": "array", "items": {"type": "integer"}}))
    spelled = vocabulary.pieces.index
    at, same = ([matcher(vocabulary, params, backend) for _ in range(20)] for _ in range(2))
    for ours in (at, same):
        assert all(each.accept(spelled(b"[")) for each in ours[:17])
    masks, alone = Masks(PADDED, 2), Masks(PADDED, 1)
    said = [(number, spelled({3: b"]", 5: b"x"}.get(number, b"7"))) for number in range(17)]
    told = [each for each in said if each[0] != 7]
    wanted = [(19 - number, number) for number in range(20) if number != 11]             # 17 to 19 begin only now
    masks.advance([(at[number], token) for number, token in told], [(row, at[number]) for row, number in wanted], 20)
    for ours in (at, same):
        assert [ours[number].accept(token) for number, token in said] == [number != 5 for number, _ in said]
    stay = [(row, number) for row, number in wanted if number not in (3, 5, 9)]          # 9 has been aborted
    filled = masks.fill([(row, at[number]) for row, number in stay], 20)
    for row, number in stay:
        assert np.array_equal(filled[row], alone.fill([(0, same[number])], 1)[0]), number
    assert (filled[[19 - 3, 19 - 5, 19 - 9, 19 - 11]] == -1).all()
    again = masks.fill([(row, at[number]) for row, number in stay[:9]], 20)              # nothing is taken for ahead twice
    assert (again[[row for row, _ in stay[9:]]] == -1).all()
    masks.close()


def test_masks_that_were_begun_are_not_those_of_another_step(vocabulary: GrammarVocabulary) -> None:
    """The step was not launched, or an answer with guesses has ended meanwhile."""
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="ab{2,5}c?"))
    made, a, b = [matcher(vocabulary, params) for _ in range(6)], *map(vocabulary.pieces.index, (b"a", b"b"))
    masks, alone = Masks(PADDED, 2), Masks(PADDED, 1)
    masks.begin([(2 * row, at) for row, at in enumerate(made)], 12, {2 * row: [a] for row in range(6)})
    masks.forget()
    assert all(at.accept(a) for at in made)
    masks.begin([(2 * row, at) for row, at in enumerate(made)], 12, {2 * row: [b] for row in range(6)})
    filled = masks.fill([(2 * row, at) for row, at in enumerate(made[:5])], 12, {2 * row: [b] for row in range(5)})
    assert filled is not None and (filled[10:] == -1).all()
    for row, at in enumerate(made[:5]):
        assert np.array_equal(filled[2 * row], alone.fill([(0, at)], 1)[0])
        assert at.accept(b)
        assert np.array_equal(filled[2 * row + 1], alone.fill([(0, at)], 1)[0])
    masks.close()


@pytest.mark.parametrize(("threads", "begun"), [(1, False), (2, False), (2, True)])
def test_masks_along_guesses_are_those_of_tokens_one_by_one(
    vocabulary: GrammarVocabulary, backend: str, threads: int, begun: bool
) -> None:
    """Of answers with guesses of other lengths, one of which its grammar refuses, one that the answer ends with, and of some
    without. End tokens are held back for as long as min_tokens says, and no matcher has moved."""
    spelled = vocabulary.pieces.index
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="ab{2,5}c?"), min_tokens=4)
    texts = [b"abbb", b"a", b"", b"abzb", b"abbbbbc", b"", b"abb"]
    made, guesses, first = [matcher(vocabulary, params, backend) for _ in texts], dict[int, list[int]](), list[int]()
    num_rows = 0
    for text in texts:
        first.append(num_rows)
        if text:
            guesses[num_rows] = [spelled(text[place : place + 1]) for place in range(len(text))]
        num_rows += 1 + len(text)
    masks = Masks(PADDED, threads)
    if begun:
        masks.begin(list(zip(first, made, strict=True)), num_rows, guesses)
        assert masks.busy == (backend == "llguidance")
    filled = masks.fill(list(zip(first, made, strict=True)), num_rows, guesses)
    assert filled is not None
    for row, text in zip(first, texts, strict=True):
        alone = matcher(vocabulary, params, backend)
        for place in range(1 + len(text)):
            assert np.array_equal(filled[row + place], Masks(PADDED, 1).fill([(0, alone)], 1)[0]), (text, place)
            if place == len(text) or not alone.accept(spelled(text[place : place + 1])) or alone.ended:
                break
    assert [nexts(Masks(PADDED, 1), each) for each in made] == [[spelled(b"a")]] * len(made) and not any(at.error for at in made)
    masks.close()


def test_a_matcher_is_copied_once_for_all_of_its_guesses(vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a*"))
    made = matcher(vocabulary, params)
    monkeypatch.setattr(made, "_matcher", kept := Held(made._matcher))
    assert Masks(PADDED, 1).fill([(0, made)], 9, {0: [vocabulary.pieces.index(b"a")] * 8}) is not None
    assert kept.asked == ["deep_copy"]


def test_the_tokens_of_a_step_with_drafts_are_followed_in_one_call(vocabulary: GrammarVocabulary) -> None:
    spelled = vocabulary.pieces.index
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="ab{2,3}c"))

    def run(text: bytes) -> tuple[Matcher, list[int]]:
        return matcher(vocabulary, params), [spelled(text[place : place + 1]) for place in range(len(text))]

    at, tokens = run(b"abb")
    assert at.follow_run(tokens) and not at.ended
    at.passed()                                          # accept() is not called for them
    assert at.accept(spelled(b"c")) and at.ended
    at, tokens = run(b"abbc")
    assert not at.follow_run(tokens)                     # it ends, with the last of them and not before
    assert [(at.accept(token), at.ended) for token in tokens] == [(True, False)] * 3 + [(True, True)]
    at, tokens = run(b"abz")
    assert not at.follow_run(tokens)
    assert [at.accept(token) for token in tokens] == [True, True, False] and "failed on this answer" in at.error
    assert not at.follow_run(tokens) and not run(b"")[0].follow_run([])


class Limited:
    """A library's matcher: it takes tokens from 1 on, and fails at its mask behind a token 9. Masks behind any take that long."""

    def __init__(self, clock: Clock | None = None, seconds: float = 0.0, raises: bool = False) -> None:
        self.clock, self.seconds, self.raises, self.taken, self.error = clock, seconds, raises, list[int](), ""

    def deep_copy(self) -> Limited:
        made = copy.copy(self)
        made.taken = [*self.taken]
        return made

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        if self.clock is not None and self.taken:
            self.clock.now += self.seconds
        if self.taken[-1:] == [9]:
            self.error = "too many states"
            if self.raises:
                raise ValueError(self.error)
            return
        ctypes.memset(address, 1 + len(self.taken), size)

    def unsafe_compute_mask_ptr_with_draft_token(self, address: int, size: int, guesses: list[int]) -> None:
        for place in range(1 + len(guesses)):
            self.unsafe_compute_mask_ptr(address + place * size, size)
            if self.error or (guesses[place:] and not self.consume_token(guesses[place])):
                break

    def consume_token(self, token: int) -> bool:
        if token:
            self.taken.append(token)
        return bool(token) and not self.error

    def try_consume_tokens(self, tokens: list[int]) -> int:
        return [self.consume_token(token) for token in tokens].count(True)

    def validate_tokens(self, tokens: list[int]) -> int:
        return len(tokens)

    def compute_ff_bytes(self) -> bytes:
        return b"x"

    def is_stopped(self) -> bool:
        return bool(self.error)

    def is_error(self) -> bool:
        return bool(self.error)

    def get_error(self) -> str:
        return self.error


def limited(*given: Any, guided: bool = True) -> Matcher:
    library: Any = Limited(*given)
    made = Matcher(library, SamplingParams(structured_outputs=StructuredOutputs(regex="limited")), [EOS], lambda _: [1])
    made._guided = guided
    return made


@pytest.mark.parametrize("guided", [True, False], ids=["llguidance", "xgrammar"])
@pytest.mark.parametrize("raises", [False, True])
def test_a_mask_along_guesses_that_fails_fails_only_an_answer_that_gets_there(raises: bool, guided: bool) -> None:
    """The masks before it are those of tokens one by one. Behind it the answer fails as it does without drafts."""
    for said, fails in (([1, 2], False), ([1, 9], False), ([1, 9, 3], True), ([1, 9, 3, 3], True)):
        masks, at = Masks(PADDED, 1), limited(None, 0.0, raises, guided=guided)
        filled = masks.fill([(0, at)], 4, {0: [1, 9, 3]})
        assert filled is not None and not at.error, at.error
        assert [row.view(np.uint8)[0] for row in filled[:3]] == [1, 2, 255]
        followed = at.follow_run(said)
        assert [followed or at.accept(token) for token in said] == [number < 2 or not fails for number in range(len(said))]
        assert ("too many states" in at.error) == fails
        if not fails:
            assert at.forced(4) == [] and at.allowed([1, 1]) == 0            # the next step has no drafts
            masks.fill([(0, at)], 1)
            assert bool(at.error) == (said[-1] == 9)
        if said == [1, 2]:
            assert at.accept(3) and at.accept(3)         # more tokens than there were masks for: that step is over


@pytest.mark.parametrize("guided", [True, False], ids=["llguidance", "xgrammar"])
def test_slow_masks_along_guesses_cost_the_drafts_and_not_the_answer(clock: Clock, guided: bool) -> None:
    """One that takes longer than a mask may; and many that together take longer than a step may, again and again."""
    for seconds, answers in ((0.6, 1), (0.06, 8)):
        masks, made = Masks(PADDED, 1), [limited(clock, seconds, guided=guided) for _ in range(answers)]
        wanted = [(2 * number, at) for number, at in enumerate(made)]
        for _ in range(3):
            masks.fill(wanted, 2 * answers, {row: [1] for row, _ in wanted})
        assert not any(at.error for at in made) and all(at.allowed([1]) == 0 for at in made)
        assert all(at.accept(1) for at in made)
        for _ in range(3):
            masks.fill(list(enumerate(made)), answers)   # without drafts such masks are too slow
        assert all(at.error for at in made)


def test_masks_that_were_filled_ahead_for_answers_that_ended_are_not_the_next_steps(vocabulary: GrammarVocabulary) -> None:
    """All answers of a step end at once, and the next step has other rows, fewer of them, some without a grammar."""
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="ab"))
    made, a, b = [matcher(vocabulary, params) for _ in range(8)], vocabulary.pieces.index(b"a"), vocabulary.pieces.index(b"b")
    masks = Masks(PADDED, 2)
    masks.advance([(at, a) for at in made], list(enumerate(made)), 8)
    assert masks.fill([], 8) is None                     # none of them goes on
    other = matcher(vocabulary, params)
    assert other.accept(a)
    filled = masks.fill([(1, other)], 3)
    assert filled is not None and allowed(filled[1]) == [b] and (filled[[0, 2]] == -1).all()
    masks.close()


def test_masks_are_filled_while_the_result_is_taken_in(vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's threads need no Python: until they have filled the masks, the host says what was sampled, and what ended."""
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="ab?"))
    made, a, b = [matcher(vocabulary, params) for _ in range(8)], vocabulary.pieces.index(b"a"), vocabulary.pieces.index(b"b")
    taken_in, seen = threading.Event(), list[bool]()

    class Slow:
        pool = LLExecutor(2)
        consume_token_par = pool.consume_token_par

        def unsafe_compute_mask_ptr(self, *given: Any) -> None:
            seen.append(taken_in.wait(20))               # fails where advance() waits for this
            self.pool.unsafe_compute_mask_ptr(*given)

    masks = Masks(PADDED, 2)
    monkeypatch.setattr(masks, "_pool", Slow())
    masks.advance([(at, a) for at in made], list(enumerate(made)), 8)
    for at in made:
        monkeypatch.setattr(at, "_matcher", kept := Held(at._matcher))
        assert at.accept(a) and not at.ended and not kept.asked, "the library's matcher is in use"
        monkeypatch.undo()
    monkeypatch.setattr(masks, "_pool", Slow())
    taken_in.set()
    filled = masks.fill(list(enumerate(made)), 8)
    assert seen == [True] and filled is not None and all(allowed(row) == [b, EOS] for row in filled)
    assert all(at.accept(b) and at.ended for at in made), "later tokens are told one by one again"
    masks.close()


class Held:
    """In the place of a library's matcher while other threads have it."""

    def __init__(self, matcher: Any) -> None:
        self.matcher, self.asked = matcher, list[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self.matcher, name)


def test_masks_that_cannot_be_filled_ahead_are_filled_one_by_one(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        pool = LLExecutor(2)
        consume_token_par = pool.consume_token_par

        def unsafe_compute_mask_ptr(self, *given: Any) -> None:
            raise ValueError("no threads")

    params = SamplingParams(structured_outputs=StructuredOutputs(regex="ab"))
    made, a, b = [matcher(vocabulary, params) for _ in range(8)], vocabulary.pieces.index(b"a"), vocabulary.pieces.index(b"b")
    masks = Masks(PADDED, 2)
    monkeypatch.setattr(masks, "_pool", Broken())
    for _ in range(2):                                   # the thread goes on after an error
        masks.advance([(at, a) for at in made], list(enumerate(made)), 8)
        filled = masks.fill(list(enumerate(made)), 8)
        assert filled is not None and all(allowed(row) == [b] for row in filled)
        made = [matcher(vocabulary, params) for _ in range(8)]
    masks.close()


class Clock:
    """Replaces the time module. Work moves all clocks, waiting for a CPU moves only those of wall-clock time."""

    def __init__(self) -> None:
        self.now = 1000.0                                # CPU time
        self.waited = 0.0

    def __getattr__(self, name: str) -> Callable[[], float]:
        return {
            "thread_time": lambda: self.now, "process_time": lambda: self.now,
            "perf_counter": lambda: self.now + self.waited, "monotonic": lambda: self.now + self.waited,
        }[name]


class Taking:
    """A library's matcher whose masks take this much CPU time, after waiting for a CPU; it allows everything."""

    def __init__(self, clock: Clock, seconds: float, waits: float, error: str) -> None:
        self.clock, self.seconds, self.waits, self.error, self.filled = clock, seconds, waits, error, 0

    def deep_copy(self) -> Taking:
        return Taking(self.clock, self.seconds, self.waits, self.error)

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        self.clock.now += self.seconds
        self.clock.waited += self.waits
        self.filled += 1

    def is_error(self) -> bool:
        return bool(self.error)

    def get_error(self) -> str:
        return self.error


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("ridgeline.grammar.masks.time", made)
    return made


def taking(clock: Clock, seconds: float, text: str, waits: float = 0.0, error: str = "") -> Matcher:
    made: Any = Taking(clock, seconds, waits, error)
    return Matcher(made, SamplingParams(structured_outputs=StructuredOutputs(regex=text)), [EOS])


def test_a_mask_that_takes_too_long_fails_its_own_request(clock: Clock) -> None:
    made = [taking(clock, 0.26, "heavy"), taking(clock, 0.001, "light"), taking(clock, 0.26, "bad", error="no such token")]
    Masks(PADDED, 1).fill(list(enumerate(made)), 3)
    assert "a mask took more than 0.25 s of CPU time" in made[0].error and not made[1].error
    assert "no such token" in made[2].error              # the library's own reason says more


@pytest.mark.parametrize("threads", [1, 2])
def test_a_busy_machine_makes_no_grammar_slow(clock: Clock, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wall-clock time leaps, CPU time does not: nothing fails, and masks stay with the threads."""
    masks = Masks(PADDED, threads)
    monkeypatch.setattr(masks, "_fill_others", lambda listed, _: [each.unsafe_compute_mask_ptr(0, 0) for each, _ in listed])
    many = [taking(clock, 0.0005, "same", waits=0.3) for _ in range(64)]
    for _ in range(6):
        masks.fill(list(enumerate(many)), 64)
        assert not masks._look_for_slow
    assert not any(at.error for at in many) and masks.seconds > 100


def test_a_busy_machine_keeps_tokens_with_the_threads(
    vocabulary: GrammarVocabulary, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where threads accept tokens and fill masks ahead; much work in one step does lead to a look at each grammar."""
    masks, pool, seven = Masks(PADDED, 2), LLExecutor(2), vocabulary.pieces.index(b"7")

    class Waiting:
        unsafe_compute_mask_ptr = pool.unsafe_compute_mask_ptr

        def consume_token_par(self, listed: Any) -> list[bool]:
            clock.waited, clock.now = clock.waited + takes[0], clock.now + takes[1]
            return pool.consume_token_par(listed)

    monkeypatch.setattr(masks, "_workers", Waiting)
    made = [matcher(vocabulary, SamplingParams(structured_outputs=StructuredOutputs(regex="[0-9]+"))) for _ in range(8)]
    for waits, works in ((9.0, 0.01), (0.0, 0.11)):
        takes = waits, works
        masks.advance([(at, seven) for at in made], list(enumerate(made)), 8)
        assert masks._look_for_slow == (works > 0.1) and all(at.accept(seven) for at in made)


@pytest.mark.parametrize(("count", "seconds", "drafts"), [(64, 0.02, 0), (4, 0.02, 15), (32, 0.003, 16)])
def test_masks_behind_drafts_are_those_of_later_steps(clock: Clock, count: int, seconds: float, drafts: int) -> None:
    """Some answers take less than a step may, with one mask each. With drafts a step stands for many; without, it is too much."""
    masks = Masks(PADDED, 1)
    answers = [taking(clock, seconds, "usual") for _ in range(count)]
    wanted = []
    for answer in answers:
        copies = [copy.copy(answer) for _ in range(drafts)]
        for each in copies:
            each.origin = answer
        wanted += [answer, *copies]
    for _ in range(4):
        masks.fill(list(enumerate(wanted)), len(wanted))
    assert any(each.error for each in wanted) == (drafts == 0)


@pytest.mark.reliability("S-09c")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_grammar_whose_masks_take_most_of_the_steps_fails_alone(
    clock: Clock, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 answers of it, each mask within the limit for one, beside others: a step may take a tenth of a second thrice."""
    masks = Masks(PADDED, threads)
    monkeypatch.setattr(masks, "_fill_others", lambda listed, _: [each.unsafe_compute_mask_ptr(0, 0) for each, _ in listed])
    heavy = [taking(clock, 0.16, "heavy") for _ in range(64)]
    light = [taking(clock, 0.001, f"light{number}") for number in range(8)]
    steps = list[float]()
    for _ in range(6):
        began, alive = clock.now, [at for at in [*light[:4], *heavy, *light[4:]] if not at.error]
        masks.fill(list(enumerate(alive)), len(alive))
        steps.append(clock.now - began)
        assert masks.left_out == {at for at in alive if not at.error and not at._matcher.filled}
        for at in alive:
            at._matcher.filled = 0                       # type: ignore[attr-defined]
    looked = steps[1:] if threads > 1 else steps         # with threads it is seen one step later whose fault it is
    assert all("again and again; use a simpler grammar" in at.error for at in heavy) and not any(at.error for at in light)
    assert all(each < 0.2 for each in looked[:3]) and all(each < 0.01 for each in looked[3:]), steps
    for _ in range(3):                                   # and again: known by now
        again = [taking(clock, 0.04, "heavy") for _ in range(64)]
        began, both = clock.now, list(enumerate([*light, *again]))
        masks._look_for_slow = True
        masks.fill(both, len(both))
        assert clock.now - began < 0.2 and all(at.error for at in again) and not any(at.error for at in light)


def test_answers_that_a_step_leaves_out_are_first_in_the_next(clock: Clock) -> None:
    masks = Masks(PADDED, 1)
    each = [taking(clock, 0.03, f"each{number}") for number in range(12)]
    wanted = list(enumerate(each))
    for filled in (each[:4], each[4:8], each[8:]):       # 0.12 s each
        found = masks.fill([each for each in wanted if each[1]._matcher.filled == 0], 12)    # type: ignore[attr-defined]
        assert found is not None and masks.left_out.isdisjoint(filled)
        assert all(at._matcher.filled == 1 for at in filled)             # type: ignore[attr-defined]
        assert all((found[row] == -1).all() for row, at in wanted if at in masks.left_out)
    assert not masks.left_out and not any(at.error for at in each)
    masks.fill(wanted, 12)
    late = masks.left_out
    masks.fill(wanted, 12)
    assert late == {*each[4:]} and masks.left_out == {*each[:4], *each[8:]}


def test_an_answer_outgrows_a_matcher_whose_masks_are_slow_and_does_not_fail(clock: Clock) -> None:
    slow, harder, light = taking(clock, 0.011, "slow"), taking(clock, 0.3, "harder"), taking(clock, 0.009, "light")
    refused, masks = taking(clock, 0.001, "refused", error="Too many items"), Masks(PADDED, 1)
    made = [slow, light, refused, harder]
    for each in made:
        each.family.in_step = True
    masks.fill(list(enumerate(made)), 4)
    assert [each.outgrown for each in made] == [True, False, True, True] and not any(each.error for each in made)
    assert masks.left_out == {refused}                   # the others have their masks
    again = [taking(clock, 0.05, "again") for _ in range(9)]
    for each in again:
        each.family.in_step = True
    for _ in range(3):
        masks.fill(list(enumerate(again)), 9)            # warnings: the last one is for all answers with this grammar
    assert all(each.outgrown for each in again) and not any(each.error for each in again)


def test_masks_that_are_filled_ahead_are_taken_as_they_are(clock: Clock) -> None:
    first, second = taking(clock, 0.001, "first"), taking(clock, 0.001, "second")
    second.family.ahead_of_steps = True
    assert first.is_ready and not second.is_ready
    masks, second.mask = Masks(PADDED, 1), np.full(-(-PADDED // 32), 5, np.int32)
    found = masks.fill([(0, first), (1, second)], 3)
    assert found is not None and (found[1] == 5).all() and (found[2] == -1).all() and second.is_ready
    assert [at._matcher.filled for at in (first, second)] == [1, 0]      # type: ignore[attr-defined]
    second.passed()
    second.was_told(False)
    assert not second.is_ready                           # its newest token makes it another one


def test_one_slow_mask_among_many_in_threads_is_looked_for_now_and_then(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = Masks(PADDED, 2)
    monkeypatch.setattr(masks, "_fill_others", lambda listed, _: [each.unsafe_compute_mask_ptr(0, 0) for each, _ in listed])
    usual = [taking(clock, 0.0009, f"usual{number}") for number in range(20)]
    slow = taking(clock, 0.03, "slow")
    slow.family.in_step = True
    looked = list[bool]()
    for _ in range(200):
        masks.fill(list(enumerate([*usual, slow])), 21)
        looked.append(masks._look_for_slow)
    assert slow.outgrown and looked[:2] == [True, False]     # seen in the first step, told in the second
    assert 2 <= sum(looked) <= 4
    masks = Masks(PADDED, 2)
    monkeypatch.setattr(masks, "_fill_others", lambda listed, _: [each.unsafe_compute_mask_ptr(0, 0) for each, _ in listed])
    for _ in range(100):
        masks.fill(list(enumerate(usual)), 20)
        assert not masks._look_for_slow


def test_a_step_that_takes_long_now_and_then_fails_nobody(clock: Clock) -> None:
    masks = Masks(PADDED, 1)
    many = [taking(clock, 0.002, "many") for _ in range(60)]
    for _ in range(5):
        masks.fill(list(enumerate(many)), 60)            # 0.12 s: one warning …
        clock.now += 61.0                                # … which is forgotten
    assert not any(at.error for at in many)
    apart = [taking(clock, 0.0015, f"each{number}") for number in range(60)]
    for _ in range(100):
        masks.fill(list(enumerate(apart)), 60)           # 0.09 s, all the time
    assert not any(at.error for at in apart)


def test_many_answers_with_a_usual_regex_are_no_heavy_grammar(clock: Clock) -> None:
    """128 answers of one request whose masks take as long as those of [a-z ]{200,400} on a slow core."""
    masks = Masks(PADDED, 1)
    many = [taking(clock, 0.001, "many") for _ in range(128)]
    for _ in range(10):
        masks.fill(list(enumerate(many)), 128)
    assert not any(at.error for at in many)
    heavier = [taking(clock, 0.003, "heavier") for _ in range(128)]
    for _ in range(10):
        masks.fill(list(enumerate(heavier)), 128)
    assert all(at.error for at in heavier)


def test_grammars_that_are_too_much_together_fail_until_they_are_not(clock: Clock) -> None:
    masks = Masks(PADDED, 1)
    each = [taking(clock, 0.01 + number / 1e5, f"each{number}") for number in range(40)]
    for _ in range(120):
        alive = [at for at in each if not at.error]
        began = clock.now
        masks.fill(list(enumerate(alive)), len(alive))
        last = clock.now - began
    assert last <= 0.11 and 5 <= sum(not at.error for at in each) <= 10


def test_ends_come_when_the_grammar_and_the_request_allow_them(vocabulary: GrammarVocabulary, backend: str) -> None:
    masks, a = Masks(PADDED), vocabulary.pieces.index(b"a")
    regex = StructuredOutputs(regex="a{1,3}")

    def followed(**params: Any) -> list[list[int]]:
        at, seen = matcher(vocabulary, SamplingParams(structured_outputs=regex, max_tokens=99, **params), backend), []
        while not at.ended:
            seen.append(nexts(masks, at))
            assert at.accept(a)
        assert EOS in nexts(masks, at)                   # complete: only an end is left, whatever else was asked
        return seen

    either = sorted([a, EOS])
    assert followed() == [[a], either, either]
    assert followed(ignore_eos=True) == [[a], [a], [a]]
    assert followed(min_tokens=2) == [[a], [a], either]
    assert followed(min_tokens=50) == [[a], [a], [a]]    # three is the most there can be
    ended = matcher(vocabulary, SamplingParams(structured_outputs=regex), backend)
    assert ended.accept(a) and ended.accept(EOS) and ended.ended


def test_stop_token_ids_are_held_back_before_min_tokens(vocabulary: GrammarVocabulary, backend: str) -> None:
    a, b = vocabulary.pieces.index(b"a"), vocabulary.pieces.index(b"b")
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="[ab]{1,3}"), min_tokens=2, stop_token_ids=[b])
    at, masks = matcher(vocabulary, params, backend), Masks(PADDED)
    assert nexts(masks, at) == [a] and at.accept(a)
    assert nexts(masks, at) == [a] and at.accept(a)
    assert nexts(masks, at) == sorted([a, b, EOS])


def test_texts_that_are_spelled_again_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Pieces(GrammarVocabulary([b"a", b"b", b"ab", b"abc", b"<end>"], [4], [4]))
    assert pieces("abcab") == [3, 2] == pieces(b"abcab") and pieces("ba<end>?") == [1, 0]
    spelled, spell = list[bytes](), pieces._spell
    monkeypatch.setattr(pieces, "_spell", lambda data: spelled.append(data) or spell(data))
    assert pieces("abcab") == [3, 2] and not spelled
    assert [pieces("aaa"), pieces("aaa")] == [[0] * 3] * 2 and spelled == [b"aaa"]
    for number in range(5_000):
        pieces(f"{number}")
    assert len(pieces._spelled) <= 4096
    spelled.clear()
    long = "abc?" + "abcab" * 100                        # of long ones the rests, too: an answer asks for one at every token
    assert pieces(long) == [3, *[3, 2] * 100] == pieces(long) and pieces(long[3:]) == pieces(long[4:]) == [3, 2] * 100
    assert pieces(long[9:]) == [3, 2] * 99 and pieces(long[12:]) == [2, *[3, 2] * 98]
    assert len(spelled) == 2                             # long[3:] begins with what no token says
    assert pieces(long[5:]) == [1, 2, *[3, 2] * 99]      # within a token: spelled anew
    assert pieces("b" + long[5:]) == [1, 1, 2, *[3, 2] * 99] and len(spelled) == 4
    for number in range(50):
        pieces("abc" * 100 + "a" * number)
    assert len(pieces._long) <= 16


def test_a_special_token_can_be_named_by_a_grammar(vocabulary: GrammarVocabulary) -> None:
    at = matcher(vocabulary, SamplingParams(structured_outputs=StructuredOutputs(grammar='start: "a" <|im_start|> "b"')))
    masks = Masks(PADDED)
    assert at.accept(vocabulary.pieces.index(b"a")) and nexts(masks, at) == [258]
    assert at.accept(258) and at.accept(vocabulary.pieces.index(b"b")) and at.ended


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        (StructuredOutputs(grammar='root ::= "x" [0-9]+'), "x12", "xy"),                         # GBNF
        (StructuredOutputs(grammar='start: "x" /[0-9]+/'), "x12", "xy"),                         # Lark
        (StructuredOutputs(json_object=True), '{"a": [1]}', "[1]"),
        (StructuredOutputs(json={"type": "array"}, disable_any_whitespace=True), "[12,3]", "[ 12]"),
        (StructuredOutputs(json={"type": "array"}), "[\n    12,\r\n\t3 ]", "[" + "\n" * 50),      # indented, not lost
        (StructuredOutputs(choice=['say "hi"\n', "ü"]), 'say "hi"\n', "say hi"),
        (StructuredOutputs(structural_tag={
            "triggers": ["<f="],
            "structures": [{"begin": "<f=go>", "schema": {"type": "array", "items": {"type": "null"}}, "end": "</f>"}],
        }), "free text <f=go>[null]</f> more", "text <f=go>[1]"),
    ],
)
def test_every_kind(vocabulary: GrammarVocabulary, backend: str, asked: StructuredOutputs, good: str, bad: str) -> None:
    if backend == "xgrammar" and asked.disable_any_whitespace:
        good = good.replace(",", ", ")                   # always so, where llguidance has none

    def fits(text: str) -> bool:
        at = matcher(vocabulary, SamplingParams(structured_outputs=asked), backend)
        data = text.encode()
        return all(at.accept(vocabulary.pieces.index(data[n : n + 1])) for n in range(len(data))) and not at.error

    assert fits(good) and not fits(bad)


def test_vocabularies_without_an_end_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="needs a model with an end token"):
        vocabulary_of(tokenizer, PADDED, frozenset())


class Listed:
    """The library's pool, and what it was given."""

    def __init__(self) -> None:
        self.pool = LLExecutor(2)
        self.said, self.rows = list[Any](), list[Any]()

    def consume_token_par(self, listed: list[Any]) -> list[bool]:
        self.said.append(listed)
        return self.pool.consume_token_par(listed)

    def unsafe_compute_mask_ptr(self, listed: list[Any], *given: Any) -> None:
        self.rows.append(listed)
        self.pool.unsafe_compute_mask_ptr(listed, *given)


def test_copies_of_one_grammar_stand_beside_each_other(vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for each other: one thread should get them."""
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    assert params.structured_outputs is not None
    prototypes = [compile_grammar(LLGuidance(vocabulary), params.structured_outputs) for _ in range(3)]
    made = [Matcher(prototypes[number % 3], params, vocabulary.end_ids) for number in range(12)]
    masks, pool, a = Masks(PADDED, 2), Listed(), vocabulary.pieces.index(b"a")
    monkeypatch.setattr(masks, "_pool", pool)
    masks.fill(list(enumerate(made)), 12)
    masks.advance([(at, a) for at in made], list(enumerate(made)), 12)
    families = {id(at._matcher): at.family.number for at in made}
    for listed in (pool.said[0], *pool.rows):
        order = [families[id(each)] for each, _ in listed]
        assert len(order) == 12 and [len(list(group)) for _, group in itertools.groupby(order)] == [4, 4, 4]


def test_a_grammar_whose_answers_have_used_up_its_states_is_compiled_again(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies share the lexer's states. Where there are no more of them, all of these copies fail, and no new one does."""
    monkeypatch.setitem(llguidance_backend._LIMITS, "max_lexer_states", 300)
    asked, spelled = StructuredOutputs(regex="(a|b)*a(a|b){11}z|x+y"), vocabulary.pieces.index
    backend, params = make_backend("llguidance", vocabulary), SamplingParams(structured_outputs=asked)
    compiled = Compiled(lambda: compile_grammar(backend, asked), 1)
    masks, letters = Masks(len(vocabulary.pieces), 1), random.Random(0)
    for _ in range(3):
        first = compiled.start(params, vocabulary.end_ids, None)
        assert compiled.has_room(1) and masks.fill([(0, first)], 1) is not None and first.accept(spelled(b"x")), first.error
        greedy = compiled.start(params, vocabulary.end_ids, None)
        while not greedy.error and greedy.accept(spelled(letters.choice([b"a", b"b"]))):
            masks.fill([(0, greedy)], 1)
        assert "too many states" in greedy.error and not compiled.has_room(1)        # else it is not compiled in the thread


def test_where_threads_cannot_tell_each_is_told_alone(vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def consume_token_par(self, listed: list[Any]) -> list[bool]:
            raise ValueError("no threads")

        def unsafe_compute_mask_ptr(self, *given: Any) -> None:
            raise ValueError("no threads")

    params = SamplingParams(structured_outputs=StructuredOutputs(regex="ab"))
    made, a, b = [matcher(vocabulary, params) for _ in range(6)], vocabulary.pieces.index(b"a"), vocabulary.pieces.index(b"b")
    masks = Masks(PADDED, 2)
    monkeypatch.setattr(masks, "_pool", Broken())
    masks.advance([(at, a) for at in made], list(enumerate(made)), 6)
    assert all(at.accept(a) for at in made)
    assert [allowed(row) for row in masks.fill(list(enumerate(made)), 6)] == [[b]] * 6


# -- how forced text is spelled ----------------------------------------------------------------------------------------


def worded(*words: bytes) -> GrammarVocabulary:
    """All bytes, these words, and an end."""
    pieces = [*(bytes([byte]) for byte in range(256)), *words, b"<end>"]
    return GrammarVocabulary(pieces, [len(pieces) - 1], [len(pieces) - 1])


def test_the_library_spells_forced_text_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would have to be asked under its lock, by every thread that fills masks."""
    monkeypatch.setattr(Pieces, "__call__", lambda self, text: pytest.fail("Python was asked"))
    vocabulary = worded(b"an", b"ana", b"na", "ü".encode())
    at = matcher(vocabulary, SamplingParams(structured_outputs=StructuredOutputs(regex="banana <end>ü!")))
    masks, said = Masks(len(vocabulary.pieces)), list[bytes]()
    while not at.ended:
        (token,) = nexts(masks, at)
        assert at.accept(token)
        said.append(vocabulary.pieces[token])
    assert said == [b"b", b"an", b"ana", *(bytes([byte]) for byte in b" <end>"), "ü".encode(), b"!"]


SAMPLES = [
    '{"name": "Anna Maria", "age": 42, "tags": ["red", "green"]}', '"description": "', "I cannot answer this question.",
    '{"type": "function", "parameters": {"location": "Paris, France", "unit": "celsius"}}', "don't they've O'Neil's it'll",
    "https://www.example.com/a/b?c=d&e=f#top", "2026-11-15T18:44:03.123456Z", "user@example.org", "+49 (0) 30 123456-78",
    "def main(argv):\n    return sum(x ** 2 for x in argv)\n", "snake_case_name camelCaseName SCREAMING_CASE",
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>', "Größe, naïve café – œuvre",
    "Привет, мир! Как дела?", "你好，世界。今天天气很好。", "emoji 🙂👍🏽 done", "  two spaces   three\t\ttabs",
    'SELECT * FROM users WHERE id >= 10 AND name != "x";', "0x1F 3.14159 1,000,000 1e-9", '{\n  "a": [\n    1,\n    2\n  ]\n}',
    "the quick brown fox jumps over the lazy dog; extraordinary internationalization",
]
SINCE_GPT_4 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS = {
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "Llama 3": SINCE_GPT_4.replace("DIGITS", "{1,3}"),
    "Qwen": SINCE_GPT_4.replace("DIGITS", ""),
}


@pytest.mark.parametrize("cut", CUTS)
def test_forced_text_is_spelled_as_the_usual_tokenizers_do(cut: str, tmp_path: Path) -> None:
    """With vocabularies that were learnt under their ways to cut a text."""
    whole = HFTokenizer(models.BPE())
    whole.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(CUTS[cut]), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    whole.decoder = decoders.ByteLevel()
    learner = trainers.BpeTrainer(
        vocab_size=4_000, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), special_tokens=["</s>"],
        show_progress=False,
    )
    learnt = [path.read_text() for path in sorted((Path(__file__).parents[2] / "ridgeline" / "grammar").glob("*.py"))]
    whole.train_from_iterator([*learnt, *SAMPLES, *SAMPLES], learner)
    whole.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = Tokenizer.load(tmp_path)
    spell = LLGuidance(vocabulary_of(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)).tokenizer.tokenize_str
    for text in [*SAMPLES, *learnt]:
        assert [*spell(text)] == tokenizer.encode(text, False), text


@pytest.mark.real_model
def test_forced_text_is_spelled_as_the_embedded_model_does(embedded_model: Path) -> None:
    """But for blanks before a digit: it cuts between all digits before anything else."""
    tokenizer = Tokenizer.load(embedded_model)
    spell = LLGuidance(vocabulary_of(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)).tokenizer.tokenize_str
    assert [text for text in SAMPLES if [*spell(text)] != tokenizer.encode(text, False)] == ['{\n  "a": [\n    1,\n    2\n  ]\n}']


LONG: dict[str, Callable[[int], dict[str, Any]]] = {     # a grammar with a text of this many letters
    "const": lambda size: {"json": {"const": "abcdefgh" * (size // 8)}},
    "one letter": lambda size: {"json": {"const": "a" * size}},
    "blanks": lambda size: {"json": {"const": " " * size}},
    "choice": lambda size: {"choice": ["x" + "abcd " * (size // 5), "y" + "9" * size]},
    "enum": lambda size: {"json": {"enum": ["x" + "abcd " * (size // 5), "x" + "y" * size]}},
    "literal": lambda size: {"grammar": f'start: "{"(ab) " * (size // 5)}"'},
    "pattern": lambda size: {"regex": f"(abcdefgh){{{size // 8}}}"},
}


def long_texts(what: str, spelled_by: str, sizes: tuple[int, ...]) -> tuple[list[Matcher], Masks]:
    words = [b"aa", b"ab", b"cd", b"ef", b"gh", b"abcd", b"99", b"  ", b"((", b".get"]
    vocabulary = worded(*words, *([b"ab"] if spelled_by == "Python" else []))
    assert (vocabulary.ranks() is None) == (spelled_by == "Python")
    backend, made = LLGuidance(vocabulary), list[Matcher]()
    for size in sizes:
        asked = SamplingParams(structured_outputs=LONG[what](size))  # type: ignore[arg-type]
        assert asked.structured_outputs is not None
        made.append(Matcher(compile_grammar(backend, asked.structured_outputs), asked, vocabulary.end_ids))
    return made, Masks(len(vocabulary.pieces), 1)


@pytest.mark.reliability("R-20c")
@pytest.mark.parametrize("what", ["const", "one letter", "blanks", "choice", "enum"])   # the library asks nothing for the others
def test_twice_the_forced_text_is_twice_the_work_of_python(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """[R-20] Bytes that are spelled for the masks of an answer: a text once, and not its rest again for every token."""
    spelled, spell = list[int](), Pieces._spell
    monkeypatch.setattr(Pieces, "_spell", lambda self, data: spelled.append(len(data)) or spell(self, data))
    sizes = (5_000, 10_000, 20_000)
    following, masks = long_texts(what, "Python", sizes)
    for size, at in zip(sizes, following, strict=True):
        spelled.clear()
        for _ in range(15):
            assert at.accept(nexts(masks, at)[-1]), at.error
        assert size - 10 <= sum(spelled) <= 2 * size + 10, (spelled, size)       # an enum has two texts


@pytest.mark.reliability("R-20c")
@pytest.mark.parametrize("mark", [b"", b".get"], ids=["as GPT-2", "as since GPT-4"])
@pytest.mark.parametrize("text", ["a", "9", "(", " ", "\n", "é"])
def test_the_library_merges_within_short_pieces_only(text: str, mark: bytes) -> None:
    """[R-20] Merging is quadratic in the length of a piece, so a long text is cut into pieces, of 129 characters at most: there
    are tokens of every power of two, and none that is longer is used."""
    unit = text.encode()
    powers = (unit * 2**power for power in range(1, 10))
    vocabulary = worded(*([unit] if len(unit) > 1 else []), *powers, *([mark] if mark else []))
    assert vocabulary.ranks() is not None
    ids = LLGuidance(vocabulary).tokenizer.tokenize_str(text * 4_096)
    pieces = [vocabulary.pieces[token] for token in ids]
    assert b"".join(pieces) == unit * 4_096
    assert max(len(piece.decode()) for piece in pieces) <= 129


@pytest.mark.slow                                        # it measures CPU time
@pytest.mark.reliability("R-20c")
@pytest.mark.parametrize("spelled_by", ["the library", "Python"])
@pytest.mark.parametrize("what", LONG)
def test_twice_the_forced_text_takes_about_twice_the_time(what: str, spelled_by: str) -> None:
    """[R-20] Of a mask: its CPU time, the least of many."""
    following, masks = long_texts(what, spelled_by, (5_000, 10_000, 20_000))
    least = [float("inf")] * len(following)

    def is_linear() -> bool:
        return all(twice <= 2.3 * once + 2e-5 for once, twice in itertools.pairwise(least))

    for number in range(100):
        if number >= 15 and is_linear():
            break
        for place, at in enumerate(following):
            began = time.thread_time()
            masks.fill([(0, at)], 1)
            if number > 4:                               # one text only is left
                least[place] = min(least[place], time.thread_time() - began)
            assert at.accept(nexts(masks, at)[-1]), at.error
    assert is_linear(), least
    assert least[-1] < 0.06                              # it was 0.16 s, spelled in one piece, and is 0.01 to 0.02 s


def test_a_text_that_no_token_can_say_fails_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the library takes to say so."""
    monkeypatch.setattr("ridgeline.grammar.masks._allowed", lambda wanted, along: float("inf"))
    vocabulary = GrammarVocabulary([b"a", b"b", b"ab", b"<end>"], [3], [3])
    assert vocabulary.ranks() == {b"a": 0, b"b": 1, b"ab": 2}
    asked = [StructuredOutputs(regex=regex) for regex in ("a(a|bc)", "aab")]
    at, other = (matcher(vocabulary, SamplingParams(structured_outputs=each)) for each in asked)
    masks = Masks(len(vocabulary.pieces))
    assert at.accept(0) and at.accept(1) and other.accept(0)     # now "c" is all that could follow
    filled = masks.fill([(0, at), (1, other)], 2)
    assert "no token can say" in at.error and allowed(filled[1]) == [2] and not other.error
    with pytest.raises(BadRequest, match="cannot be used: no token can say"):
        matcher(vocabulary, SamplingParams(structured_outputs=StructuredOutputs(regex="acb")))


@pytest.mark.parametrize(
    ("vocabulary", "why"),
    [
        (GrammarVocabulary([b"a", b"b", "ü".encode(), b"<end>"], [3], [3]), "a byte is only part of a letter"),
        (worded(b"an", b"an"), "two ids say the same"),
        (GrammarVocabulary([*worded().pieces, b"\xff\xfe"], [256, 257], [256]), "a special token has no name"),
    ],
)
def test_other_vocabularies_are_spelled_by_python(vocabulary: GrammarVocabulary, why: str) -> None:
    assert vocabulary.ranks() is None, why
    at = matcher(vocabulary, SamplingParams(structured_outputs=StructuredOutputs(regex="(ab){3}")))
    masks = Masks(len(vocabulary.pieces))
    for letter in b"ababab":
        assert nexts(masks, at) == [vocabulary.pieces.index(bytes([letter]))] and at.accept(nexts(masks, at)[0])
    assert at.ended and not at.error


def test_an_engine_takes_the_front_ends_word_for_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is sent is text that was checked; to do it again would stand between two steps."""
    frame = TO_ENGINE.encode(Add(Request("a", [1], SamplingParams(structured_outputs=StructuredOutputs(json={"type": "null"})))))
    looked: list[str] = []
    monkeypatch.setattr(sampling_params, "_check_shape", lambda name, _: looked.append(name))
    TO_ENGINE.decode(frame)
    assert looked == ["structured_outputs.json"]
    monkeypatch.setattr(sampling_params, "_are_checked", False)   # and back, after this test
    sampling_params.take_params_as_checked()
    decoded = TO_ENGINE.decode(frame)
    assert len(looked) == 1 and TO_ENGINE.encode(decoded) == frame
    StructuredOutputs(json={"type": "null"})                             # what is no text yet is looked at
    assert len(looked) == 2


# -- the compiler's process --------------------------------------------------------------------------------------------

HOSTILE = {
    "exponential regex": {"regex": "(a|b)*a(a|b){20}"},
    "nested repetition": {"regex": "((a{1,300}){1,300}){1,300}"},
    "wide repetition": {"regex": ".{0,400}x.{0,400}y.{0,400}z"},
    "huge repetition": {"regex": "(a{1,100000}){1,100000}"},
    "parentheses": {"regex": "(" * 2000 + ")" * 2000},
    "unbounded": {"json": {"type": "string", "maxLength": 10**9, "minLength": 10**8}},
    "huge array": {"json": {"type": "array", "minItems": 10**7, "items": {"type": "array", "minItems": 10**7}}},
    "wide union": {"json": {"anyOf": [
        {"type": "object", "properties": {f"{chr(97 + n)}{m}": {} for n in range(26)}} for m in range(180)
    ]}},
    "many properties": {"json": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}},
    "large enum": {"json": {"enum": [f"value {n}" for n in range(1000)]}},
    "reference to itself": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "reference outside": {"json": {"$ref": "http://127.0.0.1:1/schema.json"}},
    "file reference": {"json": {"$ref": "file:///etc/passwd"}},
    "left recursion": {"grammar": 'start: start "a" | "a"'},
    "no end": {"grammar": 'start: "a" start'},
    "empty cycle": {"grammar": 'start: b\nb: c\nc: b | "x"'},
    "ambiguous": {"grammar": 'start: s\ns: s s s | s s | "a"'},
    "deep lark": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "long const": {"json": {"const": "a" * 65_000}},
    "long choices": {"choice": ["ab" * 16_000, "ab" * 16_000 + "c"]},
    "long enum": {"json": {"enum": [letter + "word " * 6_000 for letter in "xy"]}},
    "long literal": {"grammar": f'start: "{"(ab) " * 13_000}"'},
    "doubling": {"grammar": "start: r0\n" + "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(60)) + '\nr60: "a"'},
}


@pytest.fixture(scope="module")
def other_checker(tokenizer: Tokenizer) -> Iterator[GrammarChecker]:
    made = GrammarChecker(tokenizer, "xgrammar")
    yield made
    made.close()


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
AB = {"type": "object", "properties": {"a": TEXT, "b": TEXT}}
TAGGED = [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in "xy"]
UNKEPT: list[tuple[dict[str, Any], str, Any]] = [        # with an answer that the library would allow, against the schema
    (AB | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, "beside anyOf", None),
    (AB | {"required": ["c"]}, 'required property that properties does not list, "c"', {"a": "x"}),
    ({"type": "array", "items": {"type": "object", "required": ["c"]}}, "does not list", [{}]),
    ({"oneOf": [WHOLE, {"type": "number"}]}, "oneOf of which an answer could fit two", 1),
    ({"oneOf": [AB, AB | {"required": ["a"]}]}, "oneOf of which", {"a": "x"}),
    ({"allOf": [AB | {"required": ["a"]}, AB | {"required": ["b"]}]}, "allOf of several", {"a": "x"}),
    ({"type": "string", "not": {"const": "a"}}, "not", "a"),
    (AB | {"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if", {"a": "x"}),
    (AB | {"dependentRequired": {"a": ["b"]}}, "dependentRequired", {"a": "x"}),
    ({"type": "array", "items": TEXT, "uniqueItems": True}, "uniqueItems", ["b", "b"]),
    ({"type": "array", "items": TEXT, "contains": {"const": "a"}}, "contains", ["b"]),
    ({"minimum": 5}, "minimum without type", 3),
    ({"minLength": 5}, "minLength without type", "a"),
    ({"type": "string", "enum": [5, "a"]}, "type beside enum", 5),
    ({"enum": ["a", "bbb"], "minLength": 2}, "minLength beside enum", "a"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "maxLength beside pattern", "aaa"),
    ({"$defs": {"d": AB}, "$ref": "#/$defs/d", "required": ["a"]}, "required beside $ref", {}),
    ({"$defs": {"d": AB | {"required": ["c"]}}, "type": "array", "items": {"$ref": "#/$defs/d"}}, "does not list", [{"a": "x"}]),
    ({"type": "integer", "multipleOf": 2, "minimum": 4}, "multipleOf", 5),
    (AB | {"patternProperties": {"^c": WHOLE}}, "patternProperties beside properties", {"c": "x"}),
]
KEPT: list[tuple[dict[str, Any], Any]] = [
    (AB | {"required": ["a"], "title": "T", "description": "D", "additionalProperties": False}, {"a": "x"}),
    ({"$defs": {"d": TEXT}, "anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}], "default": None}, None),
    ({"oneOf": [TEXT, WHOLE]}, 1),
    ({"oneOf": TAGGED}, {"kind": "y"}),
    ({"oneOf": [{"const": "a"}, {"enum": ["b", "c"]}]}, "c"),
    ({"allOf": [WHOLE]}, 1),
    ({"type": "string", "enum": ["a", "b"]}, "b"),
    ({"type": ["integer", "null"], "minimum": 3}, 4),
    ({"type": "object", "properties": {"not": TEXT, "if": WHOLE}, "required": ["if"]}, {"if": 1}),
    ({"properties": {"a": {"$ref": "#"}}, "type": "object"}, {"a": {}}),
]


@XGRAMMAR
def test_schemas_that_the_other_compiler_would_not_keep_to_are_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ridgeline.grammar import xgrammar_backend

    backend = make_backend("xgrammar", vocabulary_of(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids))

    def accepts(schema: Any, answer: Any) -> bool:
        matcher = compile_grammar(backend, StructuredOutputs(json=json.dumps(schema)))
        return all(matcher.consume_token(token) for token in tokenizer.encode(json.dumps(answer), False))

    for schema, answer in KEPT:
        assert accepts(schema, answer), schema
    for schema, says, answer in UNKEPT:
        with pytest.raises(BadRequest, match="default backend") as refused:
            accepts(schema, answer)
        assert says in str(refused.value) and "\n" not in str(refused.value)
        tag = {"triggers": ["<"], "structures": [{"begin": "<", "schema": schema, "end": ">"}]}
        with pytest.raises(BadRequest, match="default backend"):
            compile_grammar(backend, StructuredOutputs(structural_tag=json.dumps(tag)))
    monkeypatch.setattr(xgrammar_backend, "require_what_is_kept", lambda schema: None)
    for schema, _, answer in UNKEPT:                     # the library has learnt some of them: no longer refuse these
        assert accepts(schema, answer), schema


@XGRAMMAR
@pytest.mark.slow                                        # it imports torch, again after every grammar that ended it
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_no_more_than_the_other_compiler(other_checker: GrammarChecker, name: str) -> None:
    """The library has no limits of its own; those of its process must do."""
    with bounded_work(other_checker, name):
        refused = try_hostile(other_checker, name)
    assert "/" not in refused.replace("$defs/", "") or "reference" in name, "a path of the library's sources"


@contextmanager
def bounded_work(checker: GrammarChecker, name: str) -> Iterator[None]:
    """CPU time of the compiler's process; wall-clock time depends on the machine's load."""
    checker.check(StructuredOutputs(choice=[name]))      # a new one: afterwards the process is there
    assert checker._compiler is not None
    process = psutil.Process(checker._compiler.process.pid)
    began = sum(process.cpu_times()[:4])
    yield
    if process.is_running():                             # it was ended if it did not answer in time
        assert sum(process.cpu_times()[:4]) - began < 1.5 + 0.5


@pytest.mark.reliability("S-09", "B-04")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_or_taken(checker: GrammarChecker, name: str) -> None:
    """Each within the limits of CPU time and memory that its compiler has (see the test of the copy with limits)."""
    try_hostile(checker, name)
    checker.check(StructuredOutputs(regex="[0-9]+"))     # other requests notice nothing


@pytest.mark.slow                                        # it measures CPU time
@pytest.mark.reliability("S-09", "B-04")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_take_bounded_cpu_time(checker: GrammarChecker, name: str) -> None:
    with bounded_work(checker, name):
        try_hostile(checker, name)


def try_hostile(checker: GrammarChecker, name: str) -> str:
    """Why it was refused; "" if it was not, or for want of time."""
    try:
        params = SamplingParams(structured_outputs=HOSTILE[name])  # type: ignore[arg-type]
        assert params.structured_outputs is not None
        checker.check(params.structured_outputs)
    except BadRequest as refused:
        assert str(refused).startswith("structured_outputs") and "\n" not in str(refused)
        return str(refused)
    except Overloaded as refused:                        # other processes have the CPUs
        assert "too busy" in str(refused)
    return ""


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (StructuredOutputs(regex="(a"), "regex cannot be used: .*unclosed group"),
        (StructuredOutputs(regex="(?!a)b"), "regex cannot be used: .*look-around"),
        (StructuredOutputs(json={"type": "wrong"}), "json cannot be used"),
        (StructuredOutputs(json={"type": "integer", "minimum": 5, "maximum": 3}), "json cannot be used: Unsatisfiable"),
        (StructuredOutputs(json={"type": "array", "uniqueItems": True}), "json cannot be used: uniqueItems .*leave it out"),
        (StructuredOutputs(grammar="no grammar at all"), "grammar cannot be used"),
        (StructuredOutputs(json={"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no text can ever match it"),
        (StructuredOutputs(structural_tag={"triggers": []}), "structural_tag needs triggers and structures"),
        (StructuredOutputs(structural_tag={"triggers": ["<a>"], "structures": [{"begin": "<b>", "schema": {}, "end": ""}]}),
         "no trigger begins '<b>'"),
    ],
)
def test_what_is_no_grammar_is_refused_in_one_line(checker: GrammarChecker, asked: StructuredOutputs, words: str) -> None:
    for _ in range(2):                                   # compiled; remembered
        with pytest.raises(BadRequest, match=words) as refused:
            checker.check(asked)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


class Fake:
    """A library that does something else."""

    def __init__(self, does: Callable[[], object]) -> None:
        self._does = does

    def compile(self, asked: StructuredOutputs, in_step: bool = False) -> Any:
        self._does()
        raise ValueError("it is only a fake")


def out_of_memory() -> None:
    raise MemoryError


def abort() -> None:
    faulthandler.disable()               # or pytest's would print the stack of this copy among the results
    os.kill(os.getpid(), signal.SIGABRT)


def spin() -> None:
    collections.deque(itertools.repeat(0), 0)


@pytest.mark.reliability("S-09")
@pytest.mark.parametrize(
    ("does", "seconds", "cpu_seconds", "verdict"),
    [
        (spin, 60.0, 0.1, "late"),                       # for ever, inside a library
        (spin, 0.3, 60.0, "busy"),                       # its time was up before its CPU time, however much it had of it
        (lambda: time.sleep(60), 0.3, 0.2, "busy"),      # it had no CPU
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 60.0, 60.0, "killed"),
        (abort, 60.0, 60.0, "memory"),
        (out_of_memory, 60.0, 60.0, "memory"),
        (lambda: None, 60.0, 60.0, "refused"),
    ],
    ids=["spins", "spins beside others", "waits", "is killed", "aborts", "raises", "says no"],
)
def test_each_grammar_is_compiled_in_a_copy_with_limits(
    does: Callable[[], object], seconds: float, cpu_seconds: float, verdict: str
) -> None:
    question = Question(StructuredOutputs(regex="a"), seconds, cpu_seconds)
    found = compile_worker._in_a_copy(Fake(does), question)  # type: ignore[arg-type]
    assert found.verdict == verdict and ("only a fake" in found.reason) == (verdict == "refused")


@pytest.mark.reliability("S-09")
def test_the_compiler_steps_back(checker: GrammarChecker) -> None:
    checker.check(StructuredOutputs(regex="steps?back"))
    assert checker._compiler is not None
    child = checker._compiler.process.pid
    lowered = min(background.LOWEST, os.getpriority(os.PRIO_PROCESS, 0) + background.NICE)
    assert os.getpriority(os.PRIO_PROCESS, child) == lowered
    group = Path(f"/proc/{child}/autogroup")
    if group.exists() and Path("/proc/sys/kernel/sched_autogroup_enabled").read_text().strip() == "1":
        assert group.read_text().endswith(f"nice {lowered}\n")


@pytest.mark.reliability("S-09")
@pytest.mark.parametrize(("own", "allowed", "set_to"), [(0, True, [10, 10]), (15, True, [19, 19]), (15, False, [])])
def test_a_compiler_of_a_server_with_a_low_priority_steps_back_too(
    own: int, allowed: bool, set_to: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only root may raise a priority: to set nice 10 under `nice -n 15` failed, and no grammar was ever compiled."""
    seen: list[int] = []

    def set_priority(which: int, thread: int, nice: int) -> None:
        if not allowed or nice < own:
            raise PermissionError(13, "Permission denied")
        seen.append(nice)

    monkeypatch.setattr(background.os, "getpriority", lambda which, thread: own)
    monkeypatch.setattr(background.os, "setpriority", set_priority)
    monkeypatch.setattr(background, "_take_short_slices", lambda *given: None)
    monkeypatch.setattr(background.Path, "write_text", lambda *given: 0)
    background.process_steps_back()
    background.thread_steps_back()
    assert seen == set_to


@pytest.mark.reliability("S-09")
@pytest.mark.parametrize("name", ["grammar-patience", "grammar-try"])
def test_a_grammar_for_which_there_was_no_thread_holds_up_no_other(
    name: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept its place: those that take long waited for it until they were refused, and so did all others in the end."""
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    checker = GrammarChecker(tokenizer)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        with pytest.raises(RuntimeError, match="start new thread"):
            checker.check_soon(StructuredOutputs(regex="a")).result(60)
    assert not checker._pending.untried and not checker._pending._bytes
    checker.check_soon(StructuredOutputs(regex="b")).result(60)


def test_what_is_late_is_refused_for_a_while_and_what_had_no_processor_is_not(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = GrammarChecker(tokenizer)
    checker.check(StructuredOutputs(regex="a"))
    assert checker._compiler is not None
    process, ask = checker._compiler.process, checker._compiler.ask

    def answering(verdict: str) -> None:
        def answer(*given: Any) -> bytes:
            return msgspec.msgpack.encode((verdict,)) if verdict else ask(*given)

        monkeypatch.setattr(checker._compiler, "ask", answer)

    answering("late")
    with pytest.raises(BadRequest, match=r"regex takes more than 1\.5 s of CPU time to compile; use a simpler grammar"):
        checker.check(StructuredOutputs(regex="b"))
    answering("")
    checker.check(StructuredOutputs(regex="c"))
    assert process.poll() is None                        # the same one
    with pytest.raises(BadRequest, match=r"more than 1\.5 s"):
        checker.check(StructuredOutputs(regex="b"))      # refused without a look …
    monkeypatch.setattr(grammar_check.time, "monotonic", lambda now=time.monotonic: now() + 100)
    checker.check(StructuredOutputs(regex="b"))          # … for a while
    answering("busy")
    with pytest.raises(Overloaded, match="too busy to compile a grammar"):
        checker.check(StructuredOutputs(regex="d"))
    answering("")
    checker.check(StructuredOutputs(regex="d"))          # at once
    checker.close()


@pytest.mark.reliability("S-09e")
@pytest.mark.parametrize(("busy", "turns"), [(1, [2.0, 4.0]), (2, [2.0, 4.0, 8.0]), (9, [2.0, 4.0, 8.0])])
def test_a_grammar_that_had_no_processor_gets_longer_turns(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, busy: int, turns: list[float]
) -> None:
    """Beside processes that leave a tenth of a CPU, two seconds are too short for a large grammar, however often it is tried."""
    checker, asked = GrammarChecker(tokenizer, seconds=2.0), list[float]()

    def compiled(given: StructuredOutputs, seconds: float, try_seconds: float = 0.0) -> Any:
        if try_seconds:
            return None
        asked.append(seconds)
        if len(asked) <= busy:
            raise grammar_check._NoProcessor("the machine is too busy to compile a grammar", 2.0)
        return grammar_check._Verdict("")

    monkeypatch.setattr(checker, "_compile", compiled)
    outcome = checker.check_soon(StructuredOutputs(regex="b"))
    if busy < len(turns):
        outcome.result(60)
    else:
        with pytest.raises(Overloaded, match="too busy"):
            outcome.result(60)
    assert asked[1:] == turns[1:] and asked[0] <= turns[0]       # of the first, what it has waited is taken off
    checker.close()


class Asleep:
    """Replaces the time module where threads wait for their turn: only sleeping takes time, a millisecond at least."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 1e-3)


@pytest.mark.reliability("S-09e")
def test_grammars_that_take_long_are_paced_while_others_generate(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the share is used up, a grammar waits for its turn, or is refused for now if that takes too long. It does not wait
    when no request generates, when its verdict is known, or when a short try is enough."""
    checker = GrammarChecker(tokenizer)
    spent, long = 0.0, True

    def answer(frame: bytes, seconds: float) -> bytes:
        tried = msgspec.msgpack.decode(frame, type=Question).cpu_seconds == grammar_check.TRY_SECONDS
        return msgspec.msgpack.encode(("late", "", 0.0) if tried and long else ("good", "", 0.0 if tried else spent))

    checker.check(StructuredOutputs(regex="a"))
    assert checker._compiler is not None
    monkeypatch.setattr(checker._compiler, "ask", answer)
    asleep = Asleep()
    monkeypatch.setattr(grammar_check, "time", asleep)
    checker._allowance = grammar_check._Allowance(0.1, 0.02, 1.0)
    checker._try_allowance = grammar_check._Allowance(1.0, 1.0, 1.0)

    def seconds(text: str, others: bool = True, ends: float | None = None) -> float:
        began = asleep.now
        checker.check_soon(StructuredOutputs(regex=text), lambda: others, ends).result(60)
        return asleep.now - began

    spent = 0.05
    assert seconds("b") == 0                             # out of what was saved: 0.03 s are missing now, a tenth of 0.3
    assert seconds("c") == pytest.approx(0.3, abs=0.06)
    spent = 5.0
    assert seconds("d", others=False) == 0
    long = False
    assert seconds("short") == 0
    long = True
    assert seconds("e") == pytest.approx(1.0, abs=0.06)  # however much one has taken, its turn comes
    assert seconds("e") == 0
    with pytest.raises(Overloaded, match="too many new grammars are waiting"):
        seconds("f", ends=asleep.now + 0.3)
    checker.close()


@pytest.mark.reliability("S-09e")
def test_grammars_that_are_tried_are_paced_too(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A little CPU time, taken very often, is much of it."""
    checker = GrammarChecker(tokenizer)
    checker.check(StructuredOutputs(regex="a"))
    assert checker._compiler is not None
    monkeypatch.setattr(checker._compiler, "ask", lambda *_: msgspec.msgpack.encode(("good", "", 0.02)))
    asleep = Asleep()
    monkeypatch.setattr(grammar_check, "time", asleep)
    checker._try_allowance = grammar_check._Allowance(0.1, 0.02, 1.0)
    waiting = [checker.check_soon(StructuredOutputs(regex=f"b{n}"), lambda: True) for n in range(6)]
    for each in waiting:
        each.result(60)
    assert asleep.now - 1000.0 == pytest.approx(0.8, abs=0.06)   # 0.12 s of CPU time: 0.02 were saved, the last is not paid yet
    checker.close()


@pytest.mark.reliability("S-09f")
def test_hundreds_of_small_grammars_at_once_are_all_compiled(
    cold_start: None, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as the request queue lets in, also while other requests generate. Seconds on a quiet machine; how long a client
    waits on a busy one is not what this is about. Each is compiled in a fork, and a process that was started is a small one."""
    monkeypatch.setattr(grammar_check, "_PATIENCE_SECONDS", 600.0)
    checker = GrammarChecker(tokenizer)
    choices = [StructuredOutputs(choice=[f"yes {n}", f"no {n}"]) for n in range(90)]
    schemas = [StructuredOutputs(json=json.dumps({"properties": {f"p{n}": {"type": "integer"}}})) for n in range(90)]
    waiting = [checker.check_soon(each) for each in choices + schemas]
    beside = [checker.check_soon(StructuredOutputs(choice=[f"a{n}", "b"]), lambda: True) for n in range(30)]
    for each in waiting + beside:
        assert each.result(600) is None
    checker.close()


@pytest.mark.reliability("S-09f")
def test_small_grammars_do_not_wait_behind_those_that_take_long(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = GrammarChecker(tokenizer)
    checker.check(StructuredOutputs(regex="a"))
    assert checker._compiler is not None
    may_end = threading.Semaphore(0)

    def answer(frame: bytes, seconds: float) -> bytes:
        question = msgspec.msgpack.decode(frame, type=Question)
        bomb, tried = "bomb" in str(question.asked.regex), question.cpu_seconds == grammar_check.TRY_SECONDS
        if bomb and not tried:
            assert may_end.acquire(timeout=60)
        return msgspec.msgpack.encode(("late" if bomb and tried else "good",))

    monkeypatch.setattr(checker._compiler, "ask", answer)
    bombs = [checker.check_soon(StructuredOutputs(regex=f"bomb{n}")) for n in range(6)]
    for number in range(3):
        small = checker.check_soon(StructuredOutputs(regex=f"b{number}"))
        may_end.release()                                # one of them, at most, before it
        small.result(60)
    assert not bombs[-1].done()
    assert bombs[-1].cancel()                            # whose client has left is not compiled
    may_end.release(6)
    for each in bombs[:-1]:
        each.result(60)
    checker._turns.shutdown()
    assert checker._verdicts.get(StructuredOutputs(regex="bomb5").key) is None
    checker.close()


def test_what_takes_long_is_given_up_after_a_short_try(tokenizer: Tokenizer) -> None:
    checker = GrammarChecker(tokenizer)
    checker.check(StructuredOutputs(regex="a"))
    pattern = {"type": "string", "pattern": "a{1,40}"}
    bomb = StructuredOutputs(json=json.dumps({"type": "object", "properties": {f"p{n}": pattern for n in range(200)}}))
    assert not checker._is_through(bomb, 60.0, 0.001)    # its CPU time was up, long before its wall-clock time
    checker.close()


def test_a_compiler_that_does_not_answer_is_ended(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker(tokenizer)
    checker.check(StructuredOutputs(regex="a"))
    assert checker._compiler is not None
    process = checker._compiler.process
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(checker, "_seconds", 0.0)
    with pytest.raises(Overloaded, match="too busy"):
        checker.check(StructuredOutputs(regex="b"))
    assert process.poll() is not None
    monkeypatch.setattr(checker, "_seconds", 2.0)
    checker.check(StructuredOutputs(regex="b"))          # a new one
    checker.close()


@pytest.mark.reliability("R-13")
def test_another_compiler_answers_for_one_that_was_stopped(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker(tokenizer, seconds=60.0)
    checker.check(StructuredOutputs(regex="a"))
    old = checker._compiler
    assert old is not None
    monkeypatch.setattr(framed_child, "LOOK_SECONDS", 0.01)
    old.process.send_signal(signal.SIGSTOP)
    checker.check(StructuredOutputs(regex="b"))
    assert checker._compiler is not old and old.process.poll() == -signal.SIGKILL
    checker.close()


@pytest.mark.reliability("R-13")
def test_compilers_that_are_all_stopped_are_not_taken_for_a_busy_machine(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker = GrammarChecker(tokenizer, seconds=60.0)
    start = grammar_check._Compiler.__init__

    def stopped(self: grammar_check._Compiler, *given: Any) -> None:
        start(self, *given)
        self.process.send_signal(signal.SIGSTOP)

    monkeypatch.setattr(framed_child, "LOOK_SECONDS", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_check._Compiler, "__init__", stopped)
        with pytest.raises(TryAgain, match="was stopped by a signal; try again later"):
            checker.check(StructuredOutputs(regex="b"))
    checker.check(StructuredOutputs(regex="b"))
    checker.close()


def test_a_compiler_that_dies_costs_one_try(tokenizer: Tokenizer) -> None:
    checker = GrammarChecker(tokenizer)
    checker.check(StructuredOutputs(regex="a"))
    assert checker._compiler is not None
    compiler = checker._compiler

    class Dying:
        alive = True

        def ask(self, frame: bytes, seconds: float) -> bytes:
            compiler.process.kill()
            compiler.process.wait()
            return compiler.ask(frame, seconds)

    checker._compiler = Dying()  # type: ignore[assignment]
    with pytest.raises(TryAgain, match="was killed"):    # no fault of the grammar, …
        checker.check(StructuredOutputs(regex="b"))
    checker.check(StructuredOutputs(regex="b"))          # … which is not remembered
    checker.close()


def test_an_interrupt_does_not_end_the_compiler(tokenizer: Tokenizer) -> None:
    checker = GrammarChecker(tokenizer)
    checker.check(StructuredOutputs(regex="a"))
    assert checker._compiler is not None
    compiler = checker._compiler
    compiler.process.send_signal(signal.SIGINT)
    checker.check(StructuredOutputs(regex="b"))
    assert checker._compiler is compiler and compiler.alive
    checker.close()


@pytest.mark.reliability("R-13")
def test_a_stopped_compiler_and_a_question_larger_than_a_pipe(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker(tokenizer)
    checker.check(StructuredOutputs(regex="a"))
    assert checker._compiler is not None
    checker._compiler.process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(checker, "_seconds", 0.0)
    with pytest.raises(Overloaded, match="too busy"):
        checker.check(StructuredOutputs(choice=[f"{n:03}" * 21 for n in range(990)]))
    checker.close()


@pytest.mark.reliability("R-13")
def test_waiting_grammars_are_told_in_time_whatever_holds_up_the_compiler(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checker, go_on = GrammarChecker(tokenizer), threading.Event()
    monkeypatch.setattr(GrammarChecker, "_compile", lambda *_: go_on.wait(60) and grammar_check._Verdict(""))
    monkeypatch.setattr(grammar_check, "_PATIENCE_SECONDS", 0.1)
    waiting = [checker.check_soon(StructuredOutputs(regex=f"a{n}")) for n in range(3)]
    try:
        for each in waiting:
            with pytest.raises(Overloaded):
                each.result(60)
    finally:
        go_on.set()


@pytest.mark.reliability("B-04")
def test_too_many_waiting_grammars_are_turned_away(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    checker, go_on = GrammarChecker(tokenizer), threading.Event()
    monkeypatch.setattr(GrammarChecker, "_compile", lambda *_: go_on.wait(60) and grammar_check._Verdict(""))
    monkeypatch.setattr(grammar_check, "_PENDING_BYTES", 60_000)

    async def ask() -> list[Any]:
        asked = [StructuredOutputs(regex=f"a{n}" + "b" * 4_000) for n in range(3)]
        waiting = []
        for each in asked[:-1]:
            waiting.append(asyncio.wrap_future(checker.check_soon(each)))
        with pytest.raises(Overloaded, match="waiting to be compiled"):
            checker.check_soon(asked[-1])
        go_on.set()
        await asyncio.gather(*waiting)
        assert checker.check_soon(asked[0]).done()       # known by now
        return [await asyncio.wrap_future(checker.check_soon(asked[-1]))]

    assert asyncio.run(ask()) == [None]


def test_a_compiler_that_cannot_start_says_so(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    start = framed_child.start_child
    monkeypatch.setattr(framed_child, "start_child", lambda module, *rest, **options: start("ridgeline.version", **options))
    with pytest.raises(TryAgain, match="could not be started"):
        GrammarChecker(tokenizer).check(StructuredOutputs(regex="a"))


def test_the_worker_ends_with_its_parent(checker: GrammarChecker) -> None:
    made = GrammarChecker(checker._tokenizer)
    made.check(StructuredOutputs(regex="a"))
    assert made._compiler is not None
    process = made._compiler.process
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


# -- what is remembered ------------------------------------------------------------------------------------------------


def test_the_cache_holds_so_many_bytes_and_forgets_the_least_used() -> None:
    cache: ByteLimitedCache[str] = ByteLimitedCache(100)
    for key in "abc":
        cache.put(key, key.upper(), 30)
    assert cache.get("a") == "A"                         # used: b is the oldest now
    cache.put("d", "D", 30)
    assert [cache.get(key) for key in "abcd"] == ["A", None, "C", "D"] and cache.num_bytes == 90
    cache.put("huge", "H", 101)
    assert cache.get("huge") is None and len(cache) == 3
    cache.put("e", "E", 95)
    assert [cache.get(key) for key in "acde"] == [None, None, None, "E"] and cache.num_bytes == 95
    cache.put("e", "F", 10)
    assert cache.get("e") == "F" and cache.num_bytes == 10


def test_neither_front_end_nor_engine_imports_the_library_before_a_grammar_comes() -> None:
    modules = "ridgeline.engine.client.processor, ridgeline.engine.core.grammars"
    code = f"import sys, {modules}; sys.exit(bool({{'llguidance', 'xgrammar'}} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
