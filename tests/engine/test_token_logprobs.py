"""Log-probabilities are kept as numbers, and become objects when they are read."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from dataclasses import asdict, replace

import numpy as np
import pytest

from ridgeline.engine.client.answer_stream import AnswerStream, only_new, so_far
from ridgeline.engine.client.outputs import CompletionOutput, RequestOutput, bytes_of
from ridgeline.engine.client.processor import RequestState
from ridgeline.engine.token_logprobs import Logprob, PromptLogprobs, TokenLogprobs
from ridgeline.messages import Logprobs, Request, TokenDelta
from ridgeline.sampling_params import MAX_LOGPROBS, SamplingParams


def known_of(*tokens: int, width: int = 2) -> Logprobs:
    """Each token is its position's second choice; the first is the token 100 above it."""
    ids = np.array(tokens, np.int32)
    tops = np.stack([ids + 100, ids, *(ids + 200 + each for each in range(width))], 1)[:, :width]
    values = np.tile(-0.5 * np.arange(1, width + 1, dtype=np.float32), (len(tokens), 1))
    return Logprobs(ids, np.full(len(tokens), -1.0, np.float32), np.full(len(tokens), 2, np.int32), tops, values)


def at(token: int) -> dict[int, Logprob]:
    return {token + 100: Logprob(-0.5, 1, f"<{token + 100}>"), token: Logprob(-1.0, 2, f"<{token}>")}


def word(token: int) -> str:
    return f"<{token}>"


def test_positions_of_a_prompt_are_made_when_they_are_read() -> None:
    made: list[int] = []

    def noted(token: int) -> str:
        made.append(token)
        return word(token)

    known = PromptLogprobs(known_of(*range(1000)), noted)
    assert len(known) == 1001 and known[0] is None and made == []
    assert known[1] == at(0) and known[-1] == at(999) and known[:2] == [None, at(0)]
    assert set(made) == {0, 100, 999, 1099}
    assert known == list(known) and len(list(known)) == 1001
    with pytest.raises(IndexError):
        known[1001]


def test_an_answers_positions_are_the_same_however_they_came() -> None:
    whole, parts = TokenLogprobs(word), TokenLogprobs(word)
    assert whole.add(known_of(*range(10)), 7) == -7.0    # a stop string came before the last three
    for token in range(3):
        parts.add(known_of(token), 1)
    rest = parts.empty()
    rest.add(known_of(3, 4, 5, 6), 4)
    parts.extend(rest)
    assert whole == parts == [at(token) for token in range(7)] and len(whole) == 7
    assert whole[-1] == at(6) and whole[2:4] == [at(2), at(3)] and repr(whole) == repr(list(parts))
    kept = whole.copy()
    whole.clear()
    assert not whole and whole == [] and kept == parts


def test_without_alternatives_there_is_the_token_alone_and_listed_ones_have_no_rank() -> None:
    alone = TokenLogprobs(lambda token: None)
    alone.add(known_of(4, 5, width=0), 2)
    assert alone == [{4: Logprob(-1.0, 2)}, {5: Logprob(-1.0, 2)}]
    listed = TokenLogprobs(lambda token: None, listed=True)
    listed.add(known_of(4), 1)
    assert listed == [{104: Logprob(-0.5, None), 4: Logprob(-1.0, 2)}]


def test_a_copy_for_other_programs_is_a_plain_list() -> None:
    known = TokenLogprobs(word)
    known.add(known_of(1, 2), 2)
    answer = CompletionOutput(0, logprobs=known)
    for plain in (pickle.loads(pickle.dumps(answer)).logprobs, copy.deepcopy(known), asdict(answer)["logprobs"]):
        assert type(plain) is list and plain == [at(1), at(2)]
    assert known + [at(3)] == [at(1), at(2), at(3)] and [at(3)] + known == [at(3), at(1), at(2)]
    assert known + known == [at(1), at(2)] * 2


def state_of(**fields: int) -> RequestState:
    params = SamplingParams(max_tokens=2000, logprobs=MAX_LOGPROBS, detokenize=False, **fields)  # type: ignore[arg-type]
    return RequestState(Request("0", [7], params), None, None)


def test_an_answers_tokens_take_little_more_memory_than_their_numbers() -> None:
    """As objects, a token with twenty alternatives took 3 KB."""
    state = state_of()
    chunks = [TokenDelta("0", 0, [token], [known_of(token, width=MAX_LOGPROBS)]) for token in range(1000)]
    tracemalloc.start()
    try:
        for chunk in chunks:
            state.take(chunk)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    numbers = 1000 * (3 + 2 * MAX_LOGPROBS) * 4
    assert numbers <= taken < 2 * numbers
    answer = state.output.outputs[0]
    assert answer.cumulative_logprob == -1000.0 and answer.logprobs is not None and len(answer.logprobs) == 1000
    assert numbers <= bytes_of(state.output) < 2 * numbers


def test_deltas_that_wait_for_their_reader_are_counted_and_joined() -> None:
    state, stream = state_of(), AnswerStream(lambda wire_id: None)
    stream.add("0", state)
    before, sizes = stream.num_bytes(), []
    for token in range(200):
        new, _ = state.take(TokenDelta("0", 0, [token], [known_of(token, width=MAX_LOGPROBS)]))
        stream.push(0, new)
        sizes.append(stream.num_bytes())
    numbers = 200 * (3 + 2 * MAX_LOGPROBS) * 4
    assert sizes == sorted(sizes) and sizes[-1] - before > 2 * numbers       # in the output, and in what waits
    joined = stream._new[-1][1]
    assert joined.logprobs is not None and len(joined.logprobs) == len(joined.token_ids) > 100


def test_what_streams_are_given_of_an_output_are_its_own_positions() -> None:
    state = state_of()
    first, _ = state.take(TokenDelta("0", 0, [1], [known_of(1)]))
    copied = so_far(state.output)
    second, _ = state.take(TokenDelta("0", 0, [2], [known_of(2)]))
    plain = [{token + 100: Logprob(-0.5, 1), token: Logprob(-1.0, 2)} for token in (1, 2)]
    assert copied.outputs[0].logprobs == plain[:1] and state.output.outputs[0].logprobs == plain
    assert only_new(state.output, [(0, first), (0, second)]).outputs[0].logprobs == plain
    assert only_new(state.output, [(0, second)]).outputs[0].logprobs == plain[1:]


def test_a_prompts_numbers_count_as_held() -> None:
    output = RequestOutput("0", None, [7] * 100, [CompletionOutput(0)])
    before = bytes_of(output)
    told = replace(output, prompt_logprobs=PromptLogprobs(known_of(*range(99), width=MAX_LOGPROBS), word))
    assert bytes_of(told) - before == 99 * (3 + 2 * MAX_LOGPROBS) * 4
