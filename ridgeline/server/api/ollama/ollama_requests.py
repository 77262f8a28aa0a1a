"""Requests of Ollama's API as chat requests: its fields, its options and its messages.

Only names and shapes change here; server/api/openai/chat has the meaning. Ollama ignores fields and options that it does not
know, and so does this. Structs in, plain data out; no ASGI.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import msgspec

from ridgeline.errors import BadRequest, Unsupported, shown
from ridgeline.server.api.generation import Integer
from ridgeline.server.api.request_checks import refuse

LATEST = ":latest"                   # the tag that a name has in Ollama if it has no other

# Ollama's options -> chat's fields. The others of Ollama's (num_ctx, num_gpu, num_thread …) concern how a model is loaded,
# which `ridgeline serve` decides.
OPTIONS = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty", "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "seed": "seed", "stop": "stop", "num_predict": "max_tokens",
}
NAMES = {ours: f"options.{theirs}" for theirs, ours in OPTIONS.items()} | {
    "response_format.json_schema": "format", "response_format": "format", "reasoning_effort": "think",
    "chat_template_kwargs": "think",
}
Think = bool | Literal["low", "medium", "high", "max"]


class OllamaFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any] = {}


class OllamaCall(msgspec.Struct, kw_only=True):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def plain(self, place: int) -> dict[str, Any]:
        """In chat's form."""
        if self.images:
            raise Unsupported(f"messages[{place}].images: this server takes text only", field=f"messages[{place}].images")
        role = self.role.lower()
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if role == "tool":
            message |= {name: value for name, value in (("name", self.tool_name), ("tool_call_id", self.tool_call_id)) if value}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id or f"call_{place}_{number}", "type": "function",
                 "function": {"name": call.function.name, "arguments": call.function.arguments}}
                for number, call in enumerate(self.tool_calls)
            ]
        return message


class OllamaRequest(msgspec.Struct, kw_only=True):
    """What /api/chat and /api/generate share."""

    model: str
    stream: bool | None = None           # true unless false
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Hints: how long a model stays loaded, and what happens to a prompt that is too long (an error, here).
    keep_alive: Any = None
    truncate: Any = None
    shift: Any = None

    HINTS: ClassVar[tuple[str, ...]] = ("keep_alive", "truncate", "shift")
    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def check(self) -> None:
        refuse(self, self.REFUSED)

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def settings(self) -> dict[str, Any]:
        """Chat's fields beside the messages."""
        chat: dict[str, Any] = {"model": plain_name(self.model), "stream": self.streams} | chat_options(self.options or {})
        if (form := response_format(self.format)) is not None:
            chat["response_format"] = form
        if self.think is not None:
            chat["chat_template_kwargs"] = {"enable_thinking": bool(self.think), "thinking": bool(self.think)}
            chat["include_reasoning"] = bool(self.think)
            if isinstance(self.think, str):
                chat["reasoning_effort"] = self.think
        if self.logprobs:
            chat |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        return chat


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[Any] | None = None

    def chat(self) -> dict[str, Any]:
        messages = [message.plain(place) for place, message in enumerate(self.messages or [])]
        return self.settings() | {"messages": messages} | ({"tools": self.tools} if self.tools else {})


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: list[Integer] | None = None
    template: str | None = None
    images: list[Any] | None = None

    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = OllamaRequest.REFUSED | {"template": ("",), "images": ([],)}

    @property
    def is_raw(self) -> bool:
        """Whether the prompt goes to the model without a chat template."""
        return bool(self.raw or self.suffix)

    def chat(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.settings() | {"messages": [*system, {"role": "user", "content": self.prompt or ""}]}


class EmbedRequest(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None         # true unless false
    dimensions: int | None = None
    options: dict[str, Any] | None = None                # hints: none of Ollama's options changes a vector
    keep_alive: Any = None

    HINTS: ClassVar[tuple[str, ...]] = ("options", "keep_alive")

    def check(self) -> None:
        """Everything else is checked as an embedding request."""


class OldEmbedRequest(msgspec.Struct, kw_only=True):
    """Of /api/embeddings, which /api/embed replaces."""

    model: str
    prompt: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: Any = None

    HINTS: ClassVar[tuple[str, ...]] = ("options", "keep_alive")

    def check(self) -> None:
        """Everything else is checked as an embedding request."""


class ShowRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    name: str | None = None              # the older name of `model`
    verbose: bool | None = None
    system: Any = None
    template: Any = None
    options: Any = None

    HINTS: ClassVar[tuple[str, ...]] = ("verbose", "system", "template", "options")

    def check(self) -> None:
        if not (self.model or self.name):
            raise BadRequest("model is missing", field="model")


def plain_name(name: str) -> str:
    """A model's name without the tag that every name has in Ollama."""
    return name.removesuffix(LATEST)


def chat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` as chat's fields. Options that this server does not have are ignored, as Ollama ignores unknown ones."""
    if options.get("mirostat"):
        raise Unsupported("options.mirostat is not supported by this server; leave it out", field="options.mirostat")
    chat = {ours: options[theirs] for theirs, ours in OPTIONS.items() if options.get(theirs) is not None}
    limit = chat.get("max_tokens")
    if isinstance(limit, (int, float)) and limit <= 0:           # -1: no limit, -2: fill the context
        del chat["max_tokens"]
    if isinstance(chat.get("top_k"), (int, float)) and chat["top_k"] < 0:
        chat["top_k"] = 0
    if options.get("repeat_last_n") == 0:                # the penalty is off
        chat.pop("repetition_penalty", None)
    return chat


def response_format(given: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given == "":
        return None
    if given == "json":
        return {"type": "json_object"}
    if isinstance(given, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": given}}
    raise BadRequest(f'format must be "json" or a JSON schema, got {shown(given)}', field="format")
