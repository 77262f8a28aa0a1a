"""Anthropic's Messages API as a dialect of chat: its requests become chat requests, chat's answers become its messages.

Only names and shapes change here; server/api/openai/chat has the meaning of messages, tools and calls. A field that is not
declared is refused by name. Structs in, structs and bytes out; no ASGI.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ridgeline.engine.client.outputs import AnswerDelta, RequestOutput
from ridgeline.errors import BadRequest, Unsupported, shown
from ridgeline.server.api.generation import Deadline, goes_on
from ridgeline.server.api.openai.chat import ChatWriter
from ridgeline.server.api.request_checks import refuse
from ridgeline.server.http.error_bodies import anthropic_body
from ridgeline.server.parse.partial_json import completed

_encode = msgspec.json.Encoder().encode


class NoThreads(Unsupported):
    """Answered with a code at which Anthropic's clients go on without a thread (their tool runners begin with one)."""

    details: ClassVar[dict[str, Any]] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


# -- requests ----------------------------------------------------------------------------------------------------------


class Block(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    cache_control: Any = None            # a hint: prefixes are always cached here


class TextBlock(Block, tag_field="type", tag="text"):
    text: str
    citations: Any = None

    def check(self, where: str) -> None:
        if self.citations:
            raise Unsupported(f"{where}.citations is not supported by this server; leave it out", field=f"{where}.citations")


class ToolUseBlock(Block, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None                   # in answers, sent back by clients


class ToolResultBlock(Block, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[AnyBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(Block, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""                  # ours are not signed


class RedactedThinkingBlock(Block, tag_field="type", tag="redacted_thinking"):
    data: str


class ImageBlock(Block, tag_field="type", tag="image"):
    source: Any = None


class DocumentBlock(Block, tag_field="type", tag="document"):
    source: Any = None
    title: Any = None
    context: Any = None
    citations: Any = None


class ToolReferenceBlock(Block, tag_field="type", tag="tool_reference"):
    """A tool found by a search for tools. The model sees all tools anyway: the name is enough."""

    tool_name: str


AnyBlock = (
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock | ImageBlock | DocumentBlock
    | ToolReferenceBlock
)


class Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None    # hints
    input_examples: Any = None
    allowed_callers: Any = None
    defer_loading: bool | None = None    # all tools are always in the prompt

    def plain(self, where: str) -> dict[str, Any]:
        """In chat's form."""
        if self.type not in (None, "custom"):
            message = f"{where}.type {shown(self.type)} is one of Anthropic's own; only custom tools work here"
            raise Unsupported(message, field=f"{where}.type")
        if self.input_schema is None:
            message = f"{where}.input_schema is missing; a JSON schema of type object works"
            raise BadRequest(message, field=f"{where}.input_schema")
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def plain(self) -> str | dict[str, Any]:
        """In chat's form."""
        if (self.type == "tool") != (self.name is not None):
            raise BadRequest("tool_choice.name belongs to tool_choice.type 'tool', and only to it", field="tool_choice.name")
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`budget_tokens` is a hint: only max_tokens limits the reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    task_budget: Any = None              # a hint, like `budget_tokens`


class Edit(msgspec.Struct, kw_only=True):
    """Its other fields say when and how much to remove, which is not supported."""

    type: str


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """No edits are made; the answer to a request that asks for some says so with an empty `applied_edits`."""

    edits: list[Edit] = []


APPLIED_EDITS: dict[str, list[Any]] = {"applied_edits": []}


class CountRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of both endpoints: all that the prompt depends on."""

    model: str
    messages: list[Message]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None            # the older name of output_config.format
    context_management: ContextManagement | None = None
    cache_control: Any = None            # hints
    diagnostics: Any = None
    fallbacks: Any = None                # not needed: this model does not decline
    fallback_credit_token: Any = None
    speed: Any = None
    mcp_servers: Any = None
    compaction: Any = None
    thread: Any = None

    TOLERANT: ClassVar[tuple[str, ...]] = ("messages", "system")
    HINTS: ClassVar[tuple[str, ...]] = ("cache_control", "diagnostics", "fallbacks", "fallback_credit_token", "speed")
    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {"mcp_servers": ([],), "compaction": (), "thread": ()}

    def check(self) -> None:
        """Refuse fields that are known and not supported."""
        if self.thread is not None:
            raise NoThreads("thread: conversations are not stored here; leave it out and send all messages", field="thread")
        refuse(self, self.REFUSED)

    def chat(self) -> dict[str, Any]:
        """The same request in chat's form, as plain data."""
        chat: dict[str, Any] = {"model": self.model, "messages": self._conversation()}
        if self.messages and self.messages[-1].role == "assistant":
            chat |= {"add_generation_prompt": False, "continue_final_message": True}     # the client began the answer
        if self.tools:
            chat["tools"] = [tool.plain(f"tools[{place}]") for place, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            chat["tool_choice"] = self.tool_choice.plain()
            if self.tool_choice.disable_parallel_tool_use:
                chat["parallel_tool_calls"] = False
        if self.thinking is not None:
            chat["thinking"] = {"type": self.thinking.type}
        if self.output_config is not None and self.output_config.effort is not None:
            chat["reasoning_effort"] = self.output_config.effort
        asked = self.output_config.format if self.output_config is not None else None
        if (asked := asked or self.output_format) is not None:
            schema = {"name": "answer", "schema": asked.schema}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        return chat

    def _conversation(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.system:
            blocks = [TextBlock(text=self.system)] if isinstance(self.system, str) else self.system
            messages.append({"role": "system", "content": _texts(blocks, "system")})
        for place, message in enumerate(self.messages):
            _extend(messages, message, f"messages[{place}]")
        for plain in (plain for plain in messages if "joined" in plain):
            plain["content"] = "\n".join([plain["content"], *plain.pop("joined")])
        return messages


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    ttft_deadline_ms: Deadline | None = None             # ours
    metadata: Any = None                 # hints
    service_tier: Any = None
    inference_geo: Any = None
    container: Any = None

    HINTS: ClassVar[tuple[str, ...]] = (*CountRequest.HINTS, "metadata", "service_tier", "inference_geo")
    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = CountRequest.REFUSED | {"container": ("",)}

    def chat(self) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in _SAME}
        return super().chat() | given | {"stop": self.stop_sequences}


_SAME = ("max_tokens", "temperature", "top_p", "top_k", "stream", "ttft_deadline_ms")


def _extend(messages: list[dict[str, Any]], message: Message, where: str) -> None:
    """Append one message. In chat, a tool's results are separate messages, and adjacent turns of a role are one."""
    blocks = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
    if not blocks and message.role != "assistant":
        raise BadRequest(f"{where}.content must have at least one block", field=f"{where}.content")
    texts: list[TextBlock] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for place, block in enumerate(blocks):
        at = f"{where}.content[{place}]" if isinstance(message.content, list) else f"{where}.content"
        match block:
            case TextBlock():
                block.check(at)
                texts.append(block)
            case ToolResultBlock() if message.role == "user":
                messages.append(_result(block, at))
            case ToolUseBlock() if message.role == "assistant":
                arguments = _encode(block.input).decode()
                calls.append(
                    {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
                )
            case ThinkingBlock() if message.role == "assistant":
                thoughts.append(block.thinking)
            case RedactedThinkingBlock() if message.role == "assistant":
                pass                                     # only its author can read it
            case ImageBlock() | DocumentBlock():
                raise Unsupported(f"{at}: only text is supported by this server, not images or documents", field=at)
            case _:
                kind = msgspec.to_builtins(block)["type"]
                words = f"a block of type {kind!r} does not belong in a message of role {message.role!r}"
                raise BadRequest(f"{at}: {words}", field=at)
    if texts or calls or thoughts:
        content = _texts(texts, where) if texts else None
        _append(messages, {"role": message.role, "content": content}, calls, thoughts)


def _append(
    messages: list[dict[str, Any]], plain: dict[str, Any], calls: list[dict[str, Any]], thoughts: list[str]
) -> None:
    """A user's text joins the user's message before it; the texts become one when all are there, in linear time."""
    last = messages[-1] if messages else None
    if last is not None and last["role"] == plain["role"] == "user" and plain["content"] is not None:
        last.setdefault("joined", []).append(plain["content"])
        return
    if calls:
        plain["tool_calls"] = calls
    if thoughts:
        plain["reasoning_content"] = "\n".join(thoughts)
    messages.append(plain)


def _result(block: ToolResultBlock, where: str) -> dict[str, Any]:
    text = block.content or ""
    if not isinstance(text, str):
        named = [TextBlock(text=each.tool_name) if isinstance(each, ToolReferenceBlock) else each for each in text]
        text = _texts(named, f"{where}.content")
    if block.is_error:
        text = f"Error: {text}"                          # chat templates have no field for it
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _texts(blocks: Iterable[AnyBlock], where: str) -> str:
    texts = []
    for place, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            raise Unsupported(f"{where}[{place}]: only text is supported here", field=f"{where}[{place}]")
        block.check(f"{where}[{place}]")
        texts.append(block.text)
    return "\n".join(texts)


# -- answers -----------------------------------------------------------------------------------------------------------


class Usage(msgspec.Struct):
    """Tokens found in the prefix cache are not counted among the input tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0

    @classmethod
    def of(cls, output: RequestOutput) -> Usage:
        cached = output.num_cached_tokens
        return cls(len(output.prompt_token_ids) - cached, len(output.outputs[0].token_ids), cached)


class MessageReply(msgspec.Struct):
    id: str
    model: str
    content: list[dict[str, Any]]
    usage: Usage
    stop_reason: str | None = None
    stop_sequence: str | None = None
    type: str = "message"
    role: str = "assistant"
    context_management: dict[str, list[Any]] | UnsetType = UNSET


class TokenCount(msgspec.Struct):
    input_tokens: int


class ModelInfo(msgspec.Struct):
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int                      # of an answer
    type: str = "model"
    lifecycle: str = "active"

    @classmethod
    def of(cls, name: str, created: int, max_model_len: int) -> ModelInfo:
        return cls(name, name, datetime.fromtimestamp(created, UTC).isoformat(), max_model_len, max_model_len)


class ModelList(msgspec.Struct):
    data: list[ModelInfo]
    first_id: str
    last_id: str
    has_more: bool = False

    @classmethod
    def of(cls, models: list[ModelInfo]) -> ModelList:
        return cls(models, models[0].id, models[-1].id)


def named_event(data: dict[str, Any]) -> bytes:
    """One server-sent event, whole; its name is the data's type."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), _encode(data))


class MessagesWriter(ChatWriter):
    """Chat's chunks and choices in Anthropic's shape: blocks that are opened, filled and closed in turn."""

    def __init__(self, asked: MessagesRequest, *args: Any) -> None:
        super().__init__(*args)
        self._edits = UNSET if asked.context_management is None else APPLIED_EDITS
        self._shows_thoughts = asked.thinking is None or asked.thinking.display != "omitted"
        self._started = False
        self._blocks = 0                                 # opened so far
        self._open: str | int | None = None              # "thinking", "text" or the number of a tool call
        self._ended_by: tuple[str | None, int | str | None] = (None, None)

    def events(self, outputs: list[RequestOutput], batch: list[tuple[int, AnswerDelta]]) -> list[bytes]:
        events: list[dict[str, Any]] = []
        for place, delta in batch:
            for chunk in self._chunks(outputs[place], 0, delta):
                events += self._start(outputs[place])
                events += self._fill(chunk.delta)
                if chunk.finish_reason:
                    self._ended_by = (chunk.finish_reason, delta.stop_reason)
        return [named_event(event) for event in events or [{"type": "ping"}] * goes_on(batch)]

    def last_events(self, outputs: list[RequestOutput]) -> list[bytes]:
        reason, sequence = self._stop(*self._ended_by, len(outputs[0].outputs[0].token_ids))
        usage = msgspec.to_builtins(Usage.of(outputs[0]))
        ended: dict[str, Any] = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": usage}
        if self._edits is not UNSET:
            ended["context_management"] = self._edits
        closed = [*self._start(outputs[0]), *self._close()]
        return [named_event(event) for event in (*closed, {"type": "message_delta", **ended}, {"type": "message_stop"})]

    def error_event(self, status: int, openai_body: bytes) -> bytes:
        return b"event: error\ndata: %b\n\n" % anthropic_body(status, openai_body)

    def body(self, outputs: list[RequestOutput]) -> bytes:
        output = outputs[0]
        choice = self._choice(output, 0, output.outputs[0])
        message = choice.message
        blocks: list[dict[str, Any]] = []
        if thought := getattr(message, "reasoning_content", None):
            blocks.append({"type": "thinking", "thinking": thought if self._shows_thoughts else "", "signature": ""})
        if message.content:
            blocks.append({"type": "text", "text": message.content})
        for call in getattr(message, "tool_calls", None) or []:
            arguments = completed(call.function.arguments)       # all of them, unless the call was cut
            blocks.append({"type": "tool_use", "id": call.id, "name": call.function.name, "input": arguments})
        reason, sequence = self._stop(choice.finish_reason, output.outputs[0].stop_reason, len(output.outputs[0].token_ids))
        reply = MessageReply(self._id, self._model, blocks, Usage.of(output), reason, sequence)
        reply.context_management = self._edits
        return _encode(reply)

    def _stop(self, finish: str | None, stop: int | str | None, tokens: int) -> tuple[str, str | None]:
        """(stop_reason, stop_sequence)."""
        if finish == "length" and tokens < (self._params.max_tokens or 0):
            return "model_context_window_exceeded", None
        if finish == "stop" and isinstance(stop, str) and stop in self._params.stop:
            return "stop_sequence", stop
        return {"length": "max_tokens", "tool_calls": "tool_use"}.get(finish or "", "end_turn"), None

    def _start(self, output: RequestOutput) -> Sequence[dict[str, Any]]:
        if self._started:
            return ()
        self._started = True
        usage = Usage.of(output)
        usage.output_tokens = 0
        return [{"type": "message_start", "message": msgspec.to_builtins(MessageReply(self._id, self._model, [], usage))}]

    def _fill(self, delta: Any) -> Iterable[dict[str, Any]]:
        if thought := getattr(delta, "reasoning_content", None):
            yield from self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            if self._shows_thoughts:
                yield self._delta({"type": "thinking_delta", "thinking": thought})
        if delta.content:
            yield from self._block("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta.content})
        for call in getattr(delta, "tool_calls", None) or []:
            if call.index != self._open:                 # the first delta of a call has its id and name
                block = {"type": "tool_use", "id": call.id, "name": call.function.name, "input": {}}
                yield from self._block(call.index, block)
            if call.function.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.function.arguments})

    def _block(self, name: str | int, block: dict[str, Any]) -> Iterable[dict[str, Any]]:
        """Open a block, unless it is already open."""
        if self._open == name:
            return
        yield from self._close()
        self._open = name
        self._blocks += 1
        yield {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}

    def _close(self) -> Sequence[dict[str, Any]]:
        if self._open is None:
            return ()
        self._open = None
        return [{"type": "content_block_stop", "index": self._blocks - 1}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}
