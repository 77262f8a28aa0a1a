"""OpenAI's Responses API as a dialect of chat: its input items become messages, chat's answers become output items.

Requests are in responses_request beside this; here answers are written, complete or as events. Structs in, structs and bytes
out; no ASGI.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import msgspec

from ridgeline.engine.client.outputs import AnswerDelta, RequestOutput
from ridgeline.server.api.anthropic.messages_api import named_event
from ridgeline.server.api.generation import goes_on
from ridgeline.server.api.openai.chat import ChatWriter
from ridgeline.server.api.openai.chat_answers import TokenLogprob
from ridgeline.server.api.openai.responses_request import Reasoning, ResponsesRequest, TextFormat, TextOptions
from ridgeline.server.api.prompt_parts import encoded_alone
from ridgeline.server.parse.partial_json import is_object
from ridgeline.server.parse.text_tokens import TextTokens

__all__ = ["InputTokens", "ResponseReply", "ResponsesRequest", "ResponsesWriter"]

Keep = Callable[[str, bytes, list[dict[str, Any]], bool], bool]     # the last: whether it still runs
RUNNING = ("queued", "in_progress")

COMMENT = b": \n\n"                 # a sign that the answer goes on, although its newest tokens have no text; clients skip it
ENDLESS = sys.maxsize                # the end of a text that is all content

_encode = msgspec.json.Encoder().encode


class InputTokens(msgspec.Struct):
    """How many tokens a request's prompt has."""

    input_tokens: int
    object: str = "response.input_tokens"


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0      # not billed here


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails

    @classmethod
    def of(cls, output: RequestOutput, reasoning: int) -> Usage:
        given, made = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        return cls(given, made, given + made, InputDetails(output.num_cached_tokens), OutputDetails(reasoning))


class ResponseReply(msgspec.Struct, kw_only=True):
    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: Usage | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    store: bool = False
    temperature: float
    text: TextOptions | None = None
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int | None = None
    top_p: float
    truncation: str = "disabled"
    background: bool = False


class ResponsesWriter(ChatWriter):
    """Chat's chunks and choices as items that are added, filled and completed in turn."""

    def __init__(self, asked: ResponsesRequest, keep: Keep | None, *args: Any) -> None:
        """`keep` stores the response, given its id, JSON, items, and whether it has ended; returns whether it did. None: it is
        not stored."""
        super().__init__(*args)
        self._asked = asked
        self._keep = keep
        self._namespaces = asked.namespaces
        self._tools = encoded_alone(asked.tools or [])   # they may be megabytes, and are in up to four events
        self._number = 0                                 # of the next event
        self._items: list[dict[str, Any]] = []
        self._open: str | int | None = None              # "reasoning", "message" or the number of a tool call
        self._log_probabilities: TextTokens[TokenLogprob] = TextTokens()   # of tokens whose text was not sent yet
        self._ended_by: str | None = None
        self._sent_bytes = 0                             # of texts and log-probabilities in events so far

    def prompt_bytes(self, output: RequestOutput) -> int:
        return super().prompt_bytes(output) + len(self._tools)

    def last_bytes(self, outputs: list[RequestOutput]) -> int:
        return self.prompt_bytes(outputs[0]) + self._sent_bytes

    # -- whole ---------------------------------------------------------------------------------------------------------

    def body(self, outputs: list[RequestOutput]) -> bytes:
        """The same items as a stream would give."""
        output, answer = outputs[0], outputs[0].outputs[0]
        ended = answer.finish_reason, answer.stop_reason
        whole = AnswerDelta(0, answer.text, answer.token_ids, answer.logprobs, *ended, answer.text_offsets)
        for _ in chain(self._news(output, whole), self._close()):
            pass
        return self._kept(self._response(self._status(), output))

    @property
    def keeps(self) -> bool:
        """Whether the response is to be stored."""
        return self._keep is not None

    def stored_as(self, status: str, error: str = "") -> bytes | None:
        """Store the response as it stands, for a client that comes back for it. None: it cannot be stored."""
        reason = {"code": "server_error", "message": error} if error else None
        written = self._kept(self._response(status, error=reason))
        return written if self._keep is not None else None

    def _kept(self, reply: ResponseReply) -> bytes:
        written = _encode(reply)
        if self._keep is not None and not self._keep(reply.id, written, reply.output, reply.status in RUNNING):
            self._keep = None
            reply.store = False
            written = _encode(reply)
        return written

    def _status(self) -> str:
        return "completed" if self._cut() is None else "incomplete"

    def _cut(self) -> str | None:
        """Why the answer is incomplete; known once it has ended. A stop string cuts a call, and ends a text. OpenAI's API has a
        reason only for the length limit; for a stop string only the status says it."""
        if self._ended_by == "length":
            return "max_output_tokens"
        is_call = bool(self._items) and self._items[-1]["type"] == "function_call"
        return "stop" if is_call and self._ended_by == "stop" else None      # "tool_calls" if it is complete

    def _response(self, status: str, output: RequestOutput | None = None, error: dict[str, Any] | None = None) -> ResponseReply:
        asked = self._asked
        cut = self._cut() if status == "incomplete" else None
        return ResponseReply(
            id=self._id,
            created_at=self._created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,
            model=self._model,
            output=self._items if status not in RUNNING else [],
            background=bool(asked.background),
            usage=None if output is None else Usage.of(output, self.reasoning_tokens([output])),
            error=error,
            incomplete_details={"reason": cut} if cut == "max_output_tokens" else None,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata or {},
            frequency_penalty=self._params.frequency_penalty,
            presence_penalty=self._params.presence_penalty,
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            previous_response_id=asked.previous_response_id,
            store=self._keep is not None,
            reasoning=asked.reasoning or Reasoning(),
            temperature=self._params.temperature,
            text=asked.text or TextOptions(format=TextFormat()),
            tool_choice=asked.tool_choice or "auto",
            tools=self._tools,
            top_logprobs=asked.top_logprobs,
            top_p=self._params.top_p if asked.top_p is None else asked.top_p,
        )

    # -- streamed ------------------------------------------------------------------------------------------------------

    def events(self, outputs: list[RequestOutput], batch: list[tuple[int, AnswerDelta]]) -> list[bytes]:
        # Encoded one by one: an item goes on growing after the event that added it.
        events = [self._numbered(event) for event in self._start()] if batch else []
        news = [self._numbered(event) for place, delta in batch for event in self._news(outputs[place], delta)]
        self._sent_bytes += sum(map(len, news))
        events += news
        return events or [COMMENT] * goes_on(batch)

    def _news(self, output: RequestOutput, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        chunks = self._chunks(output, 0, delta)
        for logprobs in (chunk.logprobs for chunk in chunks if chunk.logprobs is not None):
            self._log_probabilities.add(self._with_text(delta, logprobs.content))
        for chunk in chunks:
            yield from self._fill(chunk.delta)
            self._ended_by = chunk.finish_reason or self._ended_by

    def _with_text(self, delta: AnswerDelta, entries: list[TokenLogprob]) -> Iterator[tuple[int, TokenLogprob]]:
        """The entries of tokens with text, each with its offset."""
        assert self._tokenizer is not None
        texts = self._tokenizer.token_pieces(self._params.skip_special_tokens)
        for token, start, entry in zip(delta.token_ids, delta.text_offsets, entries, strict=True):
            if token < len(texts) and texts[token]:
                yield start, entry

    def last_events(self, outputs: list[RequestOutput]) -> Iterable[bytes]:
        return (self._numbered(event) for event in self._end(outputs[0]))

    def _end(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        yield from self._start()
        yield from self._close()
        status = self._status()
        response = self._response(status, output)
        self._kept(response)
        yield {"type": f"response.{status}", "response": response}

    def _close(self) -> Iterator[dict[str, Any]]:
        """The answer has ended."""
        if not self._items:                              # an empty answer is still a message
            yield from self._add("message", _message("in_progress"))
        yield from self._done(self._status())

    def error_event(self, status: int, openai_body: bytes) -> bytes:
        given = msgspec.json.decode(openai_body)["error"]
        error = {"type": "error", "code": given["code"] or given["type"], "message": given["message"], "param": given["param"]}
        failed = self._response("failed", error={"code": "server_error", "message": given["message"]})
        return self._numbered(error) + self._numbered({"type": "response.failed", "response": failed})

    def _numbered(self, event: dict[str, Any]) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return named_event(event)

    def _start(self) -> Iterator[dict[str, Any]]:
        if self._number == 0:
            for name in ("created", "in_progress"):
                yield {"type": f"response.{name}", "response": self._response("in_progress")}

    def _fill(self, delta: Any) -> Iterable[dict[str, Any]]:
        if thought := getattr(delta, "reasoning_content", None):
            if self._open != "reasoning":
                yield from self._add("reasoning", _reasoning())
            yield from self._text_delta("response.reasoning_text.delta", thought)
        if delta.content:
            if self._open != "message":
                yield from self._add("message", _message("in_progress"))
            entries = self._entries(len(delta.content))
            self._items[-1]["content"][0]["logprobs"] += entries
            yield from self._text_delta("response.output_text.delta", delta.content, logprobs=entries)
        for call in getattr(delta, "tool_calls", None) or []:
            if call.index != self._open:                 # the first delta of a call has its id and name
                yield from self._add(call.index, self._call(call.id, call.function.name, "", "in_progress"))
            if call.function.arguments:
                grow(self._items[-1], "arguments", call.function.arguments)
                yield self._of_item("response.function_call_arguments.delta", delta=call.function.arguments)

    def _entries(self, num_chars: int) -> list[TokenLogprob]:
        """The log-probabilities of the next `num_chars` characters of text."""
        if self._params.logprobs is None:
            return []
        parser = self._parsers[0]
        return self._log_probabilities.take(num_chars, [(0, ENDLESS)] if parser is None else parser.content_spans)

    def _text_delta(self, kind: str, text: str, **more: Any) -> Iterator[dict[str, Any]]:
        grow(self._items[-1]["content"][0], "text", text)
        yield self._of_item(kind, content_index=0, delta=text, **more)

    def _add(self, name: str | int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._done()
        self._open = name
        self._items.append(item)
        shown = dict(item)
        if "content" in item:
            shown["content"] = []
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": shown}
        if "content" in item:
            yield self._of_item("response.content_part.added", content_index=0, part=dict(item["content"][0]))

    def _done(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Close the open item. Only the answer's last item can be incomplete, and not a call with complete arguments."""
        if self._open is None:
            return
        self._open = None
        item = self._items[-1]
        item["status"] = "completed" if item["type"] == "function_call" and is_object(item["arguments"]) else status
        if item["type"] == "function_call":
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part = item["content"][0]
            if item["type"] == "message":
                text = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._of_item("response.output_text.done", content_index=0, **text)
            else:
                yield self._of_item("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": item}

    def _call(self, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
        item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": call_id}
        if namespace := self._namespaces.get(name):
            name = name.removeprefix(f"{namespace}.")
            item["namespace"] = namespace
        return item | {"name": name, "arguments": arguments, "status": status}

    def _of_item(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **more}


def grow(item: dict[str, Any], name: str, new: str) -> None:
    """Add to a text that grows token by token."""
    text, item[name] = item[name], ""                    # no other reference: Python adds in place, and does not copy a long text
    text += new
    item[name] = text


def _message(status: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "status": status, "content": [part]}


def _reasoning() -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": ""}
    return {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": [], "status": "in_progress", "content": [part]}
