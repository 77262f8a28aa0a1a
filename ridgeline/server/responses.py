"""OpenAI's Responses API as a dialect of chat: its input items become messages, chat's answers become output items.

Nothing is stored here, so whatever refers to an earlier response is refused. What a message, a tool or a call means is
server/protocol's to know. Structs in, structs and bytes out; no ASGI.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import msgspec

from ridgeline.engine.outputs import AnswerDelta, RequestOutput
from ridgeline.errors import BadRequest, Unsupported
from ridgeline.server.anthropic import named_event
from ridgeline.server.chat import ChatWriter
from ridgeline.server.generation import Deadline, refuse

_encode = msgspec.json.Encoder().encode
_LOGPROBS = "message.output_text.logprobs"


# -- what may be asked -------------------------------------------------------------------------------------------------


class InputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One struct for all kinds: a message may come without a `type`."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[dict[str, Any]] | None = None
    id: Any = None                       # told by answers, sent back by clients
    status: Any = None
    phase: Any = None
    summary: Any = None
    encrypted_content: Any = None

    def require(self, where: str, *names: str) -> None:
        for name in names:
            if getattr(self, name) is None:
                raise BadRequest(f"{where}.{name} is missing; an item of type {self.type!r} needs it")


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    name: str | None = None
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """As chat has it."""
        if self.name is None:
            raise BadRequest(f"{where}.name is missing")
        given = {name: getattr(self, name) for name in ("name", "parameters", "description", "strict")}
        function = {name: value for name, value in given.items() if value is not None}
        return {"type": "function", "function": function}


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"]
    name: str


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """As chat has it."""
        if self.type != "json_schema":
            return {"type": self.type}
        names = ("name", "schema", "description", "strict")
        schema = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {"type": "json_schema", "json_schema": schema}


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    summary: Any = None                  # a hint: thoughts are told whole


class ResponsesRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None

    # vLLM's, as chat has them
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    ttft_deadline_ms: Deadline | None = None             # ours

    # Hints: they cannot change an answer.
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    stream_options: Any = None
    max_tool_calls: Any = None           # counts only tools that run on OpenAI's servers

    # Known to clients, not done here.
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    context_management: Any = None

    HINTS: ClassVar[tuple[str, ...]] = (
        "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "stream_options",
        "max_tool_calls",
    )  # fmt: skip
    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "conversation": (), "background": (False,), "prompt": ({},), "context_management": ([], {}),
    }  # fmt: skip

    def check(self) -> None:
        """Refuse what is understood and not done."""
        if self.previous_response_id is not None:
            raise Unsupported("previous_response_id: no response is stored here; send the whole conversation as input")
        if self.store:
            raise Unsupported("store: no response is stored here; set it to false or leave it out")
        refuse(self, self.REFUSED)
        if self.truncation not in (None, "disabled"):
            raise Unsupported("truncation must be 'disabled' here: input that is too long is an error")
        for entry in self.include or []:
            if entry not in (_LOGPROBS, "reasoning.encrypted_content"):      # thoughts are told in the clear anyway
                raise Unsupported(f"include: {entry[:60]!r} is not supported by this server; {_LOGPROBS!r} is")

    def chat(self) -> dict[str, Any]:
        """The same as a chat request, as plain data."""
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for place, item in enumerate(self.input):
                _extend(messages, item, f"input[{place}]")
        if not messages or (isinstance(self.input, list) and not self.input):
            raise BadRequest("input must be a text or a list with at least one item")
        chat: dict[str, Any] = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        chat |= {"messages": messages, "max_completion_tokens": self.max_output_tokens}
        if self.tools:
            chat["tools"] = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(self.tools)]
        if isinstance(self.tool_choice, ToolChoice):
            chat["tool_choice"] = {"type": "function", "function": {"name": self.tool_choice.name}}
        elif self.tool_choice is not None:
            chat["tool_choice"] = self.tool_choice
        if self.text is not None and self.text.format is not None:
            chat["response_format"] = self.text.format.plain()
        if self.text is not None and self.text.verbosity is not None:
            chat["verbosity"] = self.text.verbosity
        if self.reasoning is not None and self.reasoning.effort is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        if self.top_logprobs is not None or _LOGPROBS in (self.include or []):
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return chat


_SAME = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed", "stop", "ignore_eos", "priority", "cache_salt",
    "chat_template_kwargs", "ttft_deadline_ms",
)  # fmt: skip


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise Unsupported(f"{where}.type {str(kind)[:60]!r} is not supported by this server; only 'function' is")
    try:
        return msgspec.convert(tool, FunctionTool).plain(where)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{where}: {str(error).replace('`', '')}") from None


def _extend(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Append what one item says. Thoughts, what follows them, and calls are one assistant's message in a chat."""
    if item.type == "message":
        item.require(where, "role", "content")
        text = _text(item.content, f"{where}.content")
        last = messages[-1] if messages else {}
        if item.role == last.get("role") == "assistant" and last["content"] is None and "tool_calls" not in last:
            last["content"] = text
        else:
            messages.append({"role": item.role, "content": text})
    elif item.type == "function_call_output":
        item.require(where, "call_id", "output")
        output = _text(item.output, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    elif item.type == "function_call":
        item.require(where, "call_id", "name", "arguments")
        function = {"name": item.name, "arguments": item.arguments}
        message = _assistants(messages)
        message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif item.content:
        messages.append(
            {"role": "assistant", "content": None, "reasoning_content": _text(item.content, f"{where}.content")}
        )


def _assistants(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end; a new one where there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(content or []):
        kind, text = part.get("type"), part.get("text")
        if kind not in ("input_text", "output_text", "text", "reasoning_text") or not isinstance(text, str):
            raise Unsupported(f"{where}[{place}] is of type {str(kind)[:40]!r}; only text is supported here")
        texts.append(text)
    return "\n".join(texts)


# -- how answers are written -------------------------------------------------------------------------------------------


class InputDetails(msgspec.Struct):
    cached_tokens: int


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
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: Usage | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool = True
    previous_response_id: None = None
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
    """Chat's own chunks and choices as items that are added, filled and done one after another."""

    def __init__(self, asked: ResponsesRequest, *args: Any) -> None:
        super().__init__(*args)
        self._asked = asked
        self._number = 0                                 # of the next event
        self._items: list[dict[str, Any]] = []
        self._open: str | int | None = None              # "reasoning", "message" or the number of a tool call
        self._ended_by: str | None = None

    # -- whole ---------------------------------------------------------------------------------------------------------

    def body(self, outputs: list[RequestOutput]) -> bytes:
        output = outputs[0]
        choice = self._choice(output, 0, output.outputs[0])
        message, self._ended_by = choice.message, choice.finish_reason
        status, items = self._status(), self._items
        if thought := getattr(message, "reasoning_content", None):
            items.append(_reasoning(thought))
        calls = getattr(message, "tool_calls", None) or []
        if message.content or not (calls or items):
            logprobs = msgspec.to_builtins(choice.logprobs.content) if choice.logprobs is not None else []
            items.append(_message(message.content or "", logprobs, status))
        for call in calls:
            items.append(_call(call.id, call.function.name, call.function.arguments, status))
        return _encode(self._response(status, output))

    def _status(self) -> str:
        return "incomplete" if self._ended_by == "length" else "completed"

    def _response(self, status: str, output: RequestOutput | None = None, error: dict[str, Any] | None = None) -> ResponseReply:
        asked = self._asked
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return ResponseReply(
            id=self._id,
            created_at=self._created,
            status=status,
            model=self._model,
            output=self._items if status != "in_progress" else [],
            usage=None if output is None else Usage.of(output, self.reasoning_tokens([output])),
            error=error,
            incomplete_details=cut,
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata or {},
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            reasoning=asked.reasoning or Reasoning(),
            temperature=self._params.temperature,
            text=asked.text or TextOptions(format=TextFormat()),
            tool_choice=asked.tool_choice or "auto",
            tools=asked.tools or [],
            top_logprobs=asked.top_logprobs,
            top_p=self._params.top_p,
        )

    # -- streamed ------------------------------------------------------------------------------------------------------

    def events(self, outputs: list[RequestOutput], batch: list[tuple[int, AnswerDelta]]) -> list[bytes]:
        # Written down one by one: an item goes on growing after the event that told of its beginning.
        events: list[bytes] = []
        for place, delta in batch:
            for chunk in self._chunks(outputs[place], 0, delta):
                events += map(self._numbered, self._start())
                events += map(self._numbered, self._fill(chunk.delta, chunk.logprobs))
                self._ended_by = chunk.finish_reason or self._ended_by
        return events

    def last_events(self, outputs: list[RequestOutput]) -> list[bytes]:
        return [self._numbered(event) for event in self._end(outputs[0])]

    def _end(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        yield from self._start()
        if not self._items:                              # an answer without a word is still a message
            yield from self._add("message", _message("", [], "in_progress"))
        yield from self._done()
        status = self._status()
        yield {"type": f"response.{status}", "response": self._response(status, output)}

    def error_event(self, status: int, openai_body: bytes) -> bytes:
        told = msgspec.json.decode(openai_body)["error"]
        error = {"type": "error", "code": told["code"] or told["type"], "message": told["message"], "param": told["param"]}
        failed = self._response("failed", error={"code": "server_error", "message": told["message"]})
        return self._numbered(error) + self._numbered({"type": "response.failed", "response": failed})

    def _numbered(self, event: dict[str, Any]) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return named_event(event)

    def _start(self) -> Iterator[dict[str, Any]]:
        if self._number == 0:
            for name in ("created", "in_progress"):
                yield {"type": f"response.{name}", "response": self._response("in_progress")}

    def _fill(self, delta: Any, logprobs: Any) -> Iterable[dict[str, Any]]:
        if thought := getattr(delta, "reasoning_content", None):
            if self._open != "reasoning":
                yield from self._add("reasoning", _reasoning("", "in_progress"))
            yield from self._text_delta("response.reasoning_text.delta", thought)
        if delta.content or (logprobs is not None and logprobs.content and not thought):
            if self._open != "message":
                yield from self._add("message", _message("", [], "in_progress"))
            entries = msgspec.to_builtins(logprobs.content) if logprobs is not None else []
            self._items[-1]["content"][0]["logprobs"] += entries
            yield from self._text_delta("response.output_text.delta", delta.content or "", logprobs=entries)
        for call in getattr(delta, "tool_calls", None) or []:
            if call.index != self._open:                 # the first of a call has its id and name
                yield from self._add(call.index, _call(call.id, call.function.name, "", "in_progress"))
            if call.function.arguments:
                self._items[-1]["arguments"] += call.function.arguments
                yield self._of_item("response.function_call_arguments.delta", delta=call.function.arguments)

    def _text_delta(self, kind: str, text: str, **more: Any) -> Iterator[dict[str, Any]]:
        self._items[-1]["content"][0]["text"] += text
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

    def _done(self) -> Iterator[dict[str, Any]]:
        """Close the item that is open."""
        if self._open is None:
            return
        self._open = None
        item = self._items[-1]
        item["status"] = self._status()
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

    def _of_item(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **more}


def _message(text: str, logprobs: list[Any], status: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "status": status, "content": [part]}


def _reasoning(text: str, status: str = "completed") -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "summary": [], "status": status, "content": [part]}


def _call(call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "call_id": call_id, "name": name,
        "arguments": arguments, "status": status,
    }  # fmt: skip
