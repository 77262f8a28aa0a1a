"""What SamplingParams takes, what it turns it into, and the one line it says about each value it cannot take."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from ridgeline import sampling_params
from ridgeline.engine import ipc
from ridgeline.errors import BadRequest, Unsupported
from ridgeline.messages import Request
from ridgeline.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_ID,
    RequestOutputKind,
    SamplingParams,
)

NAN, INFINITY = math.nan, math.inf
NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
FLAGS = (
    "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output",
)

OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("n", 0), ("n", -1), ("n", MAX_N + 1),
    ("temperature", -0.1), ("temperature", 101),
    ("top_k", -2), ("top_k", 2**31),
    ("top_p", -0.5), ("top_p", 1.01),
    ("min_p", -0.01), ("min_p", 1.5),
    ("typical_p", 0.0), ("typical_p", 2),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1), ("repetition_penalty", 1000), ("repetition_penalty", 3e-292),
    ("presence_penalty", -2.5), ("presence_penalty", 2.5),
    ("frequency_penalty", -2.1), ("frequency_penalty", 3),
    ("seed", 2**63), ("seed", -(2**63) - 1),
    ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 2**31),
    ("min_tokens", -1),
    ("logprobs", -1), ("logprobs", MAX_LOGPROBS + 1),
    ("prompt_logprobs", -1), ("prompt_logprobs", MAX_LOGPROBS + 1),
    ("stop", [""]), ("stop", ["fine", 3]), ("stop", 7), ("stop", ["x"] * (MAX_STOP_STRINGS + 1)), ("stop", [None]),
    ("stop_token_ids", 5), ("stop_token_ids", [-1]), ("stop_token_ids", ["7"]), ("stop_token_ids", [1.0]),
    ("stop_token_ids", [True]),
    ("bad_words", "word"), ("bad_words", [""]), ("bad_words", ["  "]), ("bad_words", [4]),
    ("allowed_token_ids", []), ("allowed_token_ids", [-3]), ("allowed_token_ids", ["a"]), ("allowed_token_ids", 5),
    ("logit_bias", {1: NAN}), ("logit_bias", {1: INFINITY}), ("logit_bias", {"one": 1.0}), ("logit_bias", {1: None}),
    ("logit_bias", {-1: 1.0}), ("logit_bias", [1, 2]), ("logit_bias", {1: 10**400}), ("logit_bias", {None: 1.0}),
    ("stop", ["x" * (MAX_STOP_CHARACTERS + 1)]), ("stop", ["\ud800"]), ("bad_words", ["\ud800"]),
    ("bad_words", ["x"] * (MAX_BAD_WORDS + 1)), ("bad_words", ["x" * (MAX_BAD_WORD_CHARACTERS + 1)]),
    ("stop_token_ids", [1] * (MAX_STOP_TOKEN_IDS + 1)), ("stop_token_ids", [MAX_TOKEN_ID + 1]), ("stop_token_ids", [2**70]),
    ("stop_token_ids", [10**5000]),
    ("allowed_token_ids", [1] * (MAX_ALLOWED_TOKEN_IDS + 1)), ("allowed_token_ids", [1, MAX_TOKEN_ID + 1]),
    ("allowed_token_ids", [1, True]),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES + 1), 1.0)), ("logit_bias", {MAX_TOKEN_ID + 1: 1.0}),
    ("logit_bias", {"9" * 30: 1.0}),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", 1.5),
    ("output_kind", 1), ("output_kind", "delta"), ("output_kind", None),
]
WRONG_TYPE = [
    *((name, value) for name in NUMBERS for value in (NAN, INFINITY, -INFINITY, 10**400, "1", True, None, [1.0], 1j)),
    *((name, value) for name in INTEGERS for value in (1.0, NAN, "1", True, [1])),
    *((name, value) for name in ("n", "top_k", "min_tokens") for value in (None,)),
    *((name, value) for name in FLAGS for value in (None, 1, "true")),
]


def short_name(value: Any) -> str:
    return "huge" if value == [10**5000] else ascii(value)[:24]          # Python refuses to print that many digits


@pytest.mark.reliability("B-03")
@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE + WRONG_TYPE, ids=short_name)
def test_a_bad_value_is_one_line_that_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(BadRequest) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert message.startswith(name)
    assert "\n" not in message and len(message) < 250
    assert "must" in message or "at most" in message


LIMITS = [
    ("n", 1), ("n", MAX_N), ("temperature", 0), ("temperature", 100.0), ("top_k", 0), ("top_k", 2**31 - 1),
    ("top_p", 1e-9), ("top_p", 1), ("min_p", 0), ("min_p", 1.0), ("typical_p", 1e-9), ("typical_p", 1.0),
    ("repetition_penalty", 1e-3), ("repetition_penalty", 100), ("presence_penalty", -2), ("presence_penalty", 2.0),
    ("frequency_penalty", -2.0), ("frequency_penalty", 2), ("seed", None), ("seed", 0), ("seed", 2**63 - 1),
    ("seed", -(2**63)), ("max_tokens", None), ("max_tokens", 1), ("logprobs", 0), ("logprobs", MAX_LOGPROBS),
    ("prompt_logprobs", 0), ("min_tokens", 16), ("stop", ["a"] * MAX_STOP_STRINGS), ("stop_token_ids", [0]),
    ("allowed_token_ids", [0]), ("bad_words", [" a"]), ("stop", ["x" * MAX_STOP_CHARACTERS]),
    ("stop_token_ids", [MAX_TOKEN_ID] * MAX_STOP_TOKEN_IDS), ("bad_words", ["x" * MAX_BAD_WORD_CHARACTERS] * MAX_BAD_WORDS),
    ("allowed_token_ids", [MAX_TOKEN_ID] * MAX_ALLOWED_TOKEN_IDS),
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIASES), 1.0)), ("truncate_prompt_tokens", 1),
]


@pytest.mark.parametrize(("name", "value"), LIMITS, ids=lambda value: ascii(value)[:24])
def test_the_limits_themselves_are_allowed(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_fields_that_contradict_each_other() -> None:
    with pytest.raises(BadRequest, match=r"min_tokens \(5\) must not be greater than max_tokens \(4\)"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(BadRequest, match="stop strings need detokenize=True"):
        SamplingParams(stop="x", detokenize=False)
    SamplingParams(min_tokens=10**6, max_tokens=None)
    SamplingParams(stop_token_ids=[4], detokenize=False)


def test_what_is_taken_is_made_plain() -> None:
    """Numbers of numpy, tuples and JSON's string keys become what a wire can carry; shorthands become the long form."""
    params = SamplingParams(
        n=np.int64(3), temperature=np.float32(0.5), top_k=-1, seed=-1, stop="end", stop_token_ids=(4, 5),
        bad_words=None, allowed_token_ids={7}, logit_bias={"42": 1, 43: 1000, 44: -1e9},
    )  # type: ignore[arg-type]
    assert (params.n, type(params.n)) == (3, int)
    assert (params.temperature, type(params.temperature)) == (0.5, float)
    assert params.top_k == 0 and params.seed is None
    assert params.stop == ["end"] and params.stop_token_ids == [4, 5] and params.bad_words == []
    assert params.allowed_token_ids == [7]
    assert params.logit_bias == {42: 1.0, 43: 100.0, 44: -100.0}


def test_lists_are_copied() -> None:
    stops, ids = ["a"], [1]
    params = SamplingParams(stop=stops, stop_token_ids=ids, allowed_token_ids=ids)
    stops.append("b")
    ids.append(2)
    assert params.stop == ["a"] and params.stop_token_ids == [1] and params.allowed_token_ids == [1]
    assert SamplingParams().stop is not SamplingParams().stop


def test_the_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert params.detokenize and params.skip_special_tokens and not params.ignore_eos


def test_fields_have_names_only() -> None:
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[misc]


def test_a_clone_shares_nothing() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, allowed_token_ids=[3], top_k=-1, output_kind=RequestOutputKind.DELTA)
    clone = params.clone()
    assert clone == params and clone is not params
    clone.stop.append("b")
    clone.logit_bias[2] = 1.0  # type: ignore[index]
    clone.allowed_token_ids.append(4)  # type: ignore[union-attr]
    assert params.stop == ["a"] and params.logit_bias == {1: 2.0} and params.allowed_token_ids == [3]


@pytest.mark.parametrize(
    ("name", "neutral", "other"),
    [
        ("logits_processors", [], [lambda ids, logits: logits]), ("guided_decoding", None, {"json": {}}),
        ("extra_args", {}, {"x": 1}),
    ],
)
def test_what_is_not_done_is_taken_only_when_it_asks_for_nothing(name: str, neutral: Any, other: Any) -> None:
    for value in (None, neutral):
        assert SamplingParams(**{name: value}) == SamplingParams()
    with pytest.raises(Unsupported, match=f"^{name} is not supported"):
        SamplingParams(**{name: other})


def test_the_largest_there_can_be_crosses_the_wire() -> None:
    params = SamplingParams(
        n=MAX_N, seed=-(2**63), stop=["é" * MAX_STOP_CHARACTERS] * MAX_STOP_STRINGS, max_tokens=2**31 - 1,
        stop_token_ids=[MAX_TOKEN_ID] * MAX_STOP_TOKEN_IDS, bad_words=["é" * MAX_BAD_WORD_CHARACTERS] * MAX_BAD_WORDS,
        logit_bias=dict.fromkeys(range(MAX_TOKEN_ID - MAX_LOGIT_BIASES, MAX_TOKEN_ID), -100.0), top_k=2**31 - 1,
        allowed_token_ids=[MAX_TOKEN_ID] * 1000, output_kind=RequestOutputKind.FINAL_ONLY, truncate_prompt_tokens=2**31 - 1,
    )
    again = ipc.TO_ENGINE.decode(ipc.TO_ENGINE.encode(ipc.Add(Request("1", [MAX_TOKEN_ID], params))))
    assert isinstance(again, ipc.Add) and again.request.params == params
    plain = ipc.TO_ENGINE.encode(ipc.Add(Request("1", [1], SamplingParams())))
    assert len(plain) < 1024                             # names and defaults of all fields


def test_an_engine_takes_the_front_ends_word_for_all_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy with a thousand biases took 2.7 ms: once in the front end, which must look, and once more between two steps."""
    params = SamplingParams(
        logit_bias={str(each): 1 for each in range(1000)}, stop="x", temperature=0, top_k=-1,      # type: ignore[arg-type, misc]
        structured_outputs={"choice": ["a"]}, seed=-1, allowed_token_ids=(1, 2),                   # type: ignore[arg-type]
    )
    frame = msgspec.msgpack.encode(params)
    monkeypatch.setattr(sampling_params, "_are_checked", False)          # and back, after this test
    sampling_params.take_params_as_checked()
    for name in ("validate", "_biases"):
        monkeypatch.delattr(SamplingParams, name)
    assert msgspec.msgpack.decode(frame, type=SamplingParams) == params
