"""Token counts in the events of a stream: those of the whole answer in the end, and counted with little work for each event."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from counted_work import is_linear

from ridgeline.engine.client.outputs import AnswerDelta, CompletionOutput, RequestOutput
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.generation import Writer
from ridgeline.server.api.openai.chat import ChatRequest, ChatWriter
from ridgeline.server.api.openai.completions import CompletionRequest, CompletionWriter
from ridgeline.server.parse.tools import Reading

EACH: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def outputs_of(prompts: int, n: int) -> list[RequestOutput]:
    return [
        RequestOutput(str(place), "a", [1, 2], [CompletionOutput(index) for index in range(n)], num_cached_tokens=1)
        for place in range(prompts)
    ]


def written(writer: Writer, outputs: list[RequestOutput], texts: list[str]) -> list[dict[str, Any]]:
    """The usage in each event, where every answer gets these texts in turn, a token each."""
    found = []
    for text in texts:
        for prompt, output in enumerate(outputs):
            for answer in output.outputs:
                answer.text_offsets.append(len(answer.text))
                answer.text += text
                answer.token_ids.append(7)
                answer.accepted_prediction_tokens += 1
                if text == texts[-1]:
                    answer.finish_reason = "stop"
                delta = AnswerDelta(answer.index, text, [7], None, answer.finish_reason, None, answer.text_offsets[-1:])
                found += [msgspec.json.decode(event)["usage"] for event in writer.events(outputs, [(prompt, delta)])]
    return found


def completions(prompts: int, n: int, **more: Any) -> CompletionWriter:
    request = msgspec.convert({"prompt": ["a"] * prompts, "n": n} | EACH | more, CompletionRequest)
    return CompletionWriter(request, SamplingParams(n=n), "cmpl-1", "tiny", None)


def chat(n: int) -> ChatWriter:
    request = msgspec.convert({"messages": [{"role": "user", "content": "a"}], "n": n} | EACH, ChatRequest)
    return ChatWriter(request, SamplingParams(n=n), "chatcmpl-1", "tiny", None, Reading(reasoning="think"))


def test_the_last_usage_of_a_stream_is_that_of_the_whole() -> None:
    texts = ["<think>", "so", "</think>", "Yes", "."]
    for writer, outputs in ((completions(3, 2), outputs_of(3, 2)), (chat(4), outputs_of(1, 4))):
        found = written(writer, outputs, texts)
        assert found[-1] == msgspec.to_builtins(writer._usage_of(outputs))
        counts = [usage["completion_tokens"] for usage in found]
        assert counts == sorted(counts) and counts[0] == 1
        for usage in found:
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert found[-1]["completion_tokens_details"]["reasoning_tokens"] == 4 * 3


def test_a_prompt_that_is_only_scored_has_no_tokens_of_an_answer() -> None:
    found = written(completions(1, 1, echo=True, max_tokens=0), outputs_of(1, 1), ["x"])
    assert [usage["completion_tokens"] for usage in found] == [0] and found[0]["total_tokens"] == 2


@pytest.mark.parametrize("is_chat", [False, True])
def test_usage_in_every_event_takes_as_much_work_for_one_of_many_answers(is_chat: bool) -> None:
    """Each event counted the tokens of all answers: 1.7 s a step for 4,096 prompts."""
    def stream(count: int) -> None:
        if is_chat:
            written(chat(count), outputs_of(1, count), ["a"])
        else:
            written(completions(count, 1), outputs_of(count, 1), ["a"])

    good, few, many = is_linear(stream, 16)
    assert good, (few, many)
