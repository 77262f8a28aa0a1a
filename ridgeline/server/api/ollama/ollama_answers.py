"""Answers of Ollama's /api/chat and /api/generate: one JSON object, or one a line with the counts and times in the last.

Times are nanoseconds. Calls are sent whole. Structs in, bytes out; no ASGI.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ridgeline.engine.client.outputs import AnswerDelta, RequestOutput
from ridgeline.server.api.generation import goes_on
from ridgeline.server.api.openai.chat import ChatWriter
from ridgeline.server.api.openai.chat_answers import ToolCallDelta
from ridgeline.server.api.prompt_parts import encode
from ridgeline.server.http.error_bodies import ollama_body
from ridgeline.server.parse.partial_json import completed


class OllamaCallFunction(msgspec.Struct):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct):
    id: str
    function: OllamaCallFunction


class OllamaAnswerMessage(msgspec.Struct):
    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class Counts(msgspec.Struct, kw_only=True):
    """In the last line only. Durations are nanoseconds."""

    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class OllamaChatReply(Counts, kw_only=True):
    model: str
    created_at: str
    message: OllamaAnswerMessage
    done: bool


class OllamaGenerateReply(Counts, kw_only=True):
    model: str
    created_at: str
    response: str
    done: bool
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class OllamaWriter(ChatWriter):
    """Chat's chunks as Ollama's lines."""

    def __init__(self, asked: str, generates: bool, *args: Any) -> None:
        """`asked`: the model's name in the request, which the answer repeats. `generates`: for /api/generate."""
        super().__init__(*args)
        self._asked = asked
        self._generates = generates
        self._began = time.monotonic()
        self._calls: dict[int, tuple[str, str, list[str]]] = {}  # by number: id, name, arguments so far; not sent yet
        self._reason = "stop"

    # -- both ----------------------------------------------------------------------------------------------------------

    def events(self, outputs: list[RequestOutput], batch: list[tuple[int, AnswerDelta]]) -> list[bytes]:
        made = [_line(reply) for place, delta in batch for reply in self._news(outputs[place], delta)]
        return made or [_line(self._part())] * goes_on(batch)

    def last_events(self, outputs: list[RequestOutput]) -> list[bytes]:
        return [_line(self._last(outputs[0]))]

    def error_event(self, status: int, openai_body: bytes) -> bytes:
        return ollama_body(openai_body) + b"\n"

    def body(self, outputs: list[RequestOutput]) -> bytes:
        output, answer = outputs[0], outputs[0].outputs[0]
        ended = answer.finish_reason, answer.stop_reason
        whole = AnswerDelta(0, answer.text, answer.token_ids, answer.logprobs, *ended, answer.text_offsets)
        text, thought, calls, logprobs = "", "", list[OllamaToolCall](), list[Any]()
        for reply in self._news(output, whole):
            part = reply if isinstance(reply, OllamaGenerateReply) else reply.message
            text += part.response if isinstance(part, OllamaGenerateReply) else part.content
            thought += part.thinking or ""
            calls += getattr(part, "tool_calls", None) or []
            logprobs += reply.logprobs or []
        last = self._last(output)
        if isinstance(last, OllamaGenerateReply):
            last.response, last.thinking = text, thought or UNSET
        else:
            last.message = OllamaAnswerMessage("assistant", text, thought or UNSET, calls or UNSET)
        if logprobs:
            last.logprobs = logprobs
        return encode(last)

    def _news(self, output: RequestOutput, delta: AnswerDelta) -> Iterator[OllamaChatReply | OllamaGenerateReply]:
        for chunk in self._chunks(output, 0, delta):
            logprobs = UNSET if chunk.logprobs is None else chunk.logprobs.content
            made = [*self._parts(chunk.delta)]
            if not made and logprobs is not UNSET:
                made = [self._part()]                   # carries what is known of tokens without text
            if made:
                made[0].logprobs = logprobs
            yield from made
            if chunk.finish_reason:
                self._reason = "length" if chunk.finish_reason == "length" else "stop"
                if calls := self._whole_calls(self._calls):
                    yield self._part(calls=calls)

    def _parts(self, delta: Any) -> Iterator[OllamaChatReply | OllamaGenerateReply]:
        if delta.reasoning_content:
            yield self._part(thought=delta.reasoning_content)
        if delta.content:
            yield self._part(delta.content)
        for call in delta.tool_calls or []:
            yield from self._take_call(call)

    def _take_call(self, call: ToolCallDelta) -> Iterator[OllamaChatReply | OllamaGenerateReply]:
        if call.index not in self._calls:
            if calls := self._whole_calls(self._calls):  # a call is whole when the next one begins
                yield self._part(calls=calls)
            self._calls[call.index] = (call.id or "", call.function.name or "", [])
        self._calls[call.index][2].append(call.function.arguments or "")

    def _whole_calls(self, waiting: dict[int, tuple[str, str, list[str]]]) -> list[OllamaToolCall]:
        made = [
            OllamaToolCall(name_id, OllamaCallFunction(index, name, completed("".join(parts))))
            for index, (name_id, name, parts) in waiting.items()
        ]
        waiting.clear()
        return made

    def _part(
        self, text: str = "", thought: str = "", calls: list[OllamaToolCall] | None = None
    ) -> OllamaChatReply | OllamaGenerateReply:
        now = timestamp(time.time())
        if self._generates:
            return OllamaGenerateReply(
                model=self._asked, created_at=now, response=text, thinking=thought or UNSET, done=False
            )
        message = OllamaAnswerMessage("assistant", text, thought or UNSET, calls or UNSET)
        return OllamaChatReply(model=self._asked, created_at=now, message=message, done=False)

    def _last(self, output: RequestOutput) -> OllamaChatReply | OllamaGenerateReply:
        reply, times, answer = self._part(), output.metrics, output.outputs[0]
        reply.done, reply.done_reason = True, self._reason
        reply.total_duration = nanoseconds(time.monotonic() - (times.arrived if times is not None else self._began))
        reply.load_duration = 0                          # the model is loaded before the server is ready
        reply.prompt_eval_count, reply.eval_count = len(output.prompt_token_ids), len(answer.token_ids)
        reply.prompt_eval_duration = nanoseconds(times.prefill() if times is not None else 0.0)
        reply.eval_duration = nanoseconds(times.decode() if times is not None else 0.0)
        if isinstance(reply, OllamaGenerateReply):
            reply.context = [*output.prompt_token_ids, *answer.token_ids]
        return reply


def empty_answer(model: str, generates: bool, unloads: bool) -> bytes:
    """The answer to a request without a prompt, by which clients load a model, or unload it."""
    now, reason = timestamp(time.time()), "unload" if unloads else "load"
    if generates:
        return encode(OllamaGenerateReply(model=model, created_at=now, response="", done=True, done_reason=reason))
    message = OllamaAnswerMessage("assistant", "")
    return encode(OllamaChatReply(model=model, created_at=now, message=message, done=True, done_reason=reason))


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _line(reply: Any) -> bytes:
    return encode(reply) + b"\n"
