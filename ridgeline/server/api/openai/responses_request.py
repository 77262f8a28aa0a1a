"""Requests of OpenAI's Responses API: its fields, and its input items and tools in chat's form.

server/api/openai/chat has the meaning of messages, tools and calls; answers are written in responses_answer and stored in
responses_store beside this. Structs in, plain data out; no ASGI.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from ridgeline.engine.client.processor import check_salt
from ridgeline.errors import BadRequest, Unsupported, shown
from ridgeline.server.api.generation import Deadline
from ridgeline.server.api.openai.chat import MEDIA
from ridgeline.server.api.request_checks import check_metadata, forget, refuse
from ridgeline.server.http.body import cut

_LOGPROBS = "message.output_text.logprobs"
# Reasoning is always sent in plain text; the tools of the other entries do not exist here.
KNOWN_INCLUDES = (
    _LOGPROBS, "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
    "file_search_call.results", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "message.input_image.image_url",
)

T = TypeVar("T")


class InputItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One struct for all types: a message may come without a `type`."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[dict[str, Any]] | None = None
    id: str | None = None                # in answers, sent back by clients
    status: Any = None
    phase: Any = None
    summary: Any = None
    encrypted_content: Any = None
    caller: Any = None

    def __post_init__(self) -> None:
        self.type = self.type or "message"

    @property
    def refers(self) -> bool:
        """Whether it refers to an earlier item by its id; a reference may come without a `type`."""
        if self.type == "message":
            return self.id is not None and self.role is None and self.content is None
        return self.type == "item_reference"

    def require(self, where: str, *names: str) -> None:
        for name in names:
            if getattr(self, name) is None:
                raise BadRequest(f"{where}.{name} is missing; an item of type {self.type!r} needs it", field=f"{where}.{name}")


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    name: str | None = None
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    output_schema: Any = None            # hints: the shape of a function's results, and its other callers
    allowed_callers: Any = None
    defer_loading: bool | None = None    # all functions are always in the prompt

    def plain(self, where: str, namespace: str = "") -> dict[str, Any]:
        """In chat's form."""
        if self.name is None:
            raise BadRequest(f"{where}.name is missing", field=f"{where}.name")
        self.name = joined(namespace, self.name)
        given = {name: getattr(self, name) for name in ("name", "parameters", "description", "strict")}
        function = {name: value for name, value in given.items() if value is not None}
        return {"type": "function", "function": function}


class Namespace(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


class ToolChoice(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, tag_field="type", tag="function"
):
    name: str
    namespace: str | None = None

    def plain(self) -> dict[str, Any]:
        """In chat's form."""
        return {"type": "function", "function": {"name": joined(self.namespace or "", self.name)}}


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[ToolChoice]

    def plain(self) -> dict[str, Any]:
        """In chat's form."""
        return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": [tool.plain() for tool in self.tools]}}


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """In chat's form."""
        names = ("name", "schema", "description", "strict")
        schema = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.type != "json_schema":
            for name in schema:
                message = f"text.format.{name} belongs to the type json_schema; this one is {self.type!r}"
                raise BadRequest(message, field=f"text.format.{name}")
            return {"type": self.type}
        return {"type": "json_schema", "json_schema": schema}


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    effort: str | None = None
    summary: Any = None                  # hints: reasoning is always sent in full
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


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
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None            # too long an input is an error either way
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    background: bool | None = None

    # vLLM's, as in chat
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
    chat_template_kwargs: dict[str, Any] | None = None
    ttft_deadline_ms: Deadline | None = None             # ours

    # Hints: they cannot change an answer.
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    stream_options: Any = None
    max_tool_calls: Any = None           # counts only tools that run on OpenAI's servers
    client_metadata: Any = None
    prompt_cache_options: Any = None
    access_programs: Any = None

    # Known to clients, not supported here.
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None

    HINTS: ClassVar[tuple[str, ...]] = (
        "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "stream_options",
        "max_tool_calls", "client_metadata", "prompt_cache_options", "access_programs",
    )
    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "conversation": (), "prompt": ({},), "context_management": ([], {}), "moderation": (),
    }

    TOLERANT: ClassVar[tuple[str, ...]] = ("input",)

    def check(self) -> None:
        """Refuse fields that are known and not supported."""
        refuse(self, self.REFUSED)
        forget(self, self.HINTS)
        check_metadata(self.metadata)
        check_salt(self.cache_salt or "")
        if self.background and self.store is False:
            raise BadRequest("background can only be used when `store` is true: the answer is fetched later", field="background")
        if self.background and self.stream:
            raise Unsupported("background with stream is not supported by this server; fetch the response by its id",
                              field="background")
        for entry in self.include or []:
            if entry not in KNOWN_INCLUDES:
                message = f"include: {shown(entry)} is not supported by this server; {_LOGPROBS!r} is"
                raise Unsupported(message, field="include")

    @property
    def namespaces(self) -> dict[str, str]:
        """The namespace of each function that has one, by the function's name in the prompt."""
        spaces = [tool for tool in self.tools or [] if tool.get("type") == "namespace"]
        return {joined(space["name"], tool["name"]): space["name"] for space in spaces for tool in space["tools"]}

    def items(self) -> list[dict[str, Any]]:
        """The input as plain data; a text as a user's message."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": self.input}]}]
        listed = [msgspec.to_builtins(item) for item in self.input]
        return [{"type": "message"} | {name: value for name, value in item.items() if value is not None} for item in listed]

    def chat(self, before: Sequence[InputItem] = ()) -> dict[str, Any]:
        """The same request in chat's form, as plain data; `before`: the items of the conversation before the input."""
        chat: dict[str, Any] = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        chat |= {"messages": self._messages(before), "max_completion_tokens": self.max_output_tokens}
        if self.tools:
            chat["tools"] = [each for place, tool in enumerate(self.tools) for each in _tools(tool, f"tools[{place}]")]
        if isinstance(self.tool_choice, ToolChoice | AllowedTools):
            chat["tool_choice"] = self.tool_choice.plain()
        elif self.tool_choice is not None:
            chat["tool_choice"] = self.tool_choice
        text, reasoning = self.text or TextOptions(), self.reasoning or Reasoning()
        if text.format is not None:
            chat["response_format"] = text.format.plain()
        if text.verbosity is not None:
            chat["verbosity"] = text.verbosity
        if reasoning.effort is not None:
            chat["reasoning_effort"] = reasoning.effort
        if self.top_logprobs is not None or _LOGPROBS in (self.include or []):
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return chat

    def _messages(self, before: Sequence[InputItem]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        for place, item in enumerate(before):
            _extend(messages, item, f"previous_response_id.input[{place}]")
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            for place, item in enumerate(self.input):
                _extend(messages, item, f"input[{place}]")
        if not messages or (isinstance(self.input, list) and not self.input):
            raise BadRequest("input must be a text or a list with at least one item", field="input")
        return messages


_SAME = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed", "stop", "ignore_eos", "priority", "cache_salt",
    "chat_template_kwargs", "ttft_deadline_ms",
)


def joined(namespace: str, name: str) -> str:
    """A function's name in the prompt."""
    return f"{namespace}.{name}" if namespace else name


def _tools(tool: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """The functions of one entry, in chat's form; a namespace has several."""
    kind = tool.get("type")
    if kind in ("web_search", "web_search_preview") and tool.get("external_web_access") is False:
        return                                           # without web access there is nothing to search
    if kind == "namespace":
        space = _converted(tool, Namespace, where)
        for place, each in enumerate(space.tools):
            yield _function(each, f"{where}.tools[{place}]", space.name)
    else:
        yield _function(tool, where)


def _function(tool: dict[str, Any], where: str, namespace: str = "") -> dict[str, Any]:
    if tool.get("type") != "function":
        message = f"{where}.type {shown(tool.get('type'))} is not supported by this server; only 'function' is"
        raise Unsupported(message, field=f"{where}.type")
    return _converted(tool, FunctionTool, where).plain(where, namespace)


def _converted(tool: dict[str, Any], kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(tool, kind)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{where}: {cut(str(error)).replace('`', '')}", field=where) from None


def _extend(messages: list[dict[str, Any]], item: InputItem, where: str) -> None:
    """Append one item. In chat, reasoning, the text after it, and calls are one assistant's message."""
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
        function = {"name": joined(item.namespace or "", item.name or ""), "arguments": item.arguments}
        message = _assistants(messages)
        message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif item.content:
        messages.append(
            {"role": "assistant", "content": None, "reasoning_content": _text(item.content, f"{where}.content")}
        )


def _assistants(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end; a new one if there is none."""
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
            message = f"{where}[{place}] is of type {shown(kind)}; only text is supported here"
            raise Unsupported(message, field=f"{where}[{place}]")
        for name in sorted(MEDIA & part.keys()):
            if part[name] is not None:
                message = f"{where}[{place}].{name} is not supported; a part of text has a type and a text"
                raise Unsupported(message, field=f"{where}[{place}]")
        texts.append(text)
    return "\n".join(texts)
