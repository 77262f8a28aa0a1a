"""OpenAI's `prediction` and our `speculative`: from the request's body to the engine's request, and back into usage."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.outputs import CompletionOutput, RequestOutput
from ridgeline.engine.client.processor import Processor
from ridgeline.engine.client.prompt_limits import amount_of_work
from ridgeline.errors import BadRequest
from ridgeline.messages import Request, TokenDelta
from ridgeline.metrics import EngineStats
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.generation import Usage
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.observe.prometheus import families


def asked(**fields: Any) -> SamplingParams:
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}]} | fields)
    request = msgspec.json.decode(body, type=ChatRequest)
    request.check()
    return request.params({})


@pytest.mark.parametrize("content", ["a = 1\n", [{"type": "text", "text": "a = "}, {"type": "text", "text": "1\n"}]])
def test_a_text_and_its_parts_are_the_same(content: Any) -> None:
    assert asked(prediction={"type": "content", "content": content}).prediction == "a = 1\n"


@pytest.mark.parametrize("given", [
    "text", {"type": "content"}, {"content": "x"}, {"type": "content", "content": 3},
    {"type": "content", "content": [{"type": "image_url"}]},
])
def test_anything_else_is_refused_by_name(given: Any) -> None:
    with pytest.raises(BadRequest, match="prediction must be") as refused:
        asked(prediction=given)
    assert refused.value.field == "prediction"


def test_no_prediction() -> None:
    assert asked().prediction is None and asked().speculative is None


@pytest.mark.parametrize(("given", "means"), [(False, 0), (True, None), (0, 0), (4, 4), (None, None)])
def test_speculative_is_a_switch_or_a_bound(given: Any, means: int | None) -> None:
    assert asked(speculative=given).speculative == means


def test_speculative_is_no_negative_number() -> None:
    with pytest.raises(BadRequest, match="speculative must be an integer at least 0"):
        asked(speculative=-1)


def test_the_engine_gets_tokens_and_no_text() -> None:
    processor = Processor(None)
    params = SamplingParams(prediction=[5, 6, 7])
    assert processor.request([1, 2], params)[0].predicted_token_ids == []        # this engine would not use them
    processor.predicts = True
    request, _ = processor.request([1, 2], params)
    assert request.predicted_token_ids == [5, 6, 7]
    assert request.params.prediction is None and params.prediction == [5, 6, 7]
    with pytest.raises(BadRequest, match="prediction needs a tokenizer"):
        processor.request([1, 2], SamplingParams(prediction="text"))


def test_a_long_prediction_is_long_work() -> None:
    assert amount_of_work([[1]], SamplingParams(prediction="x" * 5000)) > 5000


def test_usage_has_what_the_engine_counted() -> None:
    processor = Processor(None)
    _, state = processor.request([1, 2], SamplingParams(max_tokens=4))
    state.take(TokenDelta("r", 0, [5], predicted=(2, 1)))
    state.take(TokenDelta("r", 0, [6], finish_reason="length", predicted=(4, 3)))
    details = Usage.of([state.output]).completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 3)
    _, state = processor.request([1, 2], SamplingParams(max_tokens=4, stop=[]))
    for delta in (TokenDelta("r", 0, [5], predicted=(2, 1)), TokenDelta("r", 0, [6])):       # it comes not with every one
        state.take(delta)
    assert Usage.of([state.output]).completion_tokens_details.accepted_prediction_tokens == 2
    answers = [CompletionOutput(0, accepted_prediction_tokens=1), CompletionOutput(1, accepted_prediction_tokens=2)]
    assert Usage.of([RequestOutput("r", None, [1], answers)]).completion_tokens_details.accepted_prediction_tokens == 3


def test_a_request_without_a_prediction_says_nothing_of_one() -> None:
    assert Request("r", [1], SamplingParams()).predicted_token_ids == []


def test_metrics_have_vllms_names_where_speculation_is_on() -> None:
    assert not [family for family in families(AsyncLLM()) if "spec_decode" in family.name]
    llm = AsyncLLM(speculative_config="ngram")
    llm.metrics.engine = EngineStats(
        0, 0, 0, {"drafts": 3, "draft_tokens": 12, "accepted_tokens": 7, "accepted_at_0": 3, "accepted_at_1": 2}, {}
    )
    found = {family.name: family.samples for family in families(llm) if "spec_decode" in family.name}
    assert [found[f"vllm:spec_decode_num_{name}"][0][1] for name in ("drafts", "draft_tokens", "accepted_tokens")] == [3, 12, 7]
    positions = [(labels["position"], value) for labels, value in found["vllm:spec_decode_num_accepted_tokens_per_pos"]]
    assert positions[:3] == [("0", 3), ("1", 2), ("2", 0)] and len(positions) == 15
