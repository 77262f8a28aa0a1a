"""How the endpoints of different APIs write errors and events, over the same answers.

A dialect knows field names, bodies and statuses. The answers themselves are the writers' (server/api/generation).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ridgeline.server.api.llamacpp import llama_requests
from ridgeline.server.api.ollama import ollama_requests
from ridgeline.server.http.error_bodies import anthropic_body, ollama_body
from ridgeline.server.http.failures import NO_NAMES
from ridgeline.server.http.stream import EVENTS, LINES


class Dialect:
    """How an endpoint writes errors and events; by default as OpenAI's chat does."""

    names: Mapping[str, str] = NO_NAMES  # chat's fields -> the same fields in this dialect; the first that fits counts
    framed = False                   # the writer's events are complete, with a name each
    stream_kind = EVENTS             # the type of a streamed answer
    any_media_type = False           # clients that are no browsers need not declare their body as JSON
    clips = False                    # max_tokens may exceed the room that is left; the answer then ends where the context does

    def error(self, status: int, body: bytes) -> bytes:
        """The body of an error, from what `describe` wrote."""
        return body

    def error_event(self, writer: Any, status: int, body: bytes) -> bytes:
        """The same as the last event of a stream."""
        return body


class NamedEvents(Dialect):
    framed = True

    def error_event(self, writer: Any, status: int, body: bytes) -> bytes:
        return bytes(writer.error_event(status, body))


class ResponsesDialect(NamedEvents):
    names = MappingProxyType({
        "max_tokens": "max_output_tokens", "max_completion_tokens": "max_output_tokens", "logprobs": "top_logprobs",
        "response_format.json_schema": "text.format", "response_format": "text.format",
        "reasoning_effort": "reasoning.effort", "verbosity": "text.verbosity",
    })


class AnthropicDialect(NamedEvents):
    names = MappingProxyType({
        "stop": "stop_sequences", "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format", "reasoning_effort": "output_config.effort",
    })
    clips = True                     # its clients must set max_tokens without knowing the prompt's length

    def error(self, status: int, body: bytes) -> bytes:
        return anthropic_body(status, body)


class OllamaDialect(NamedEvents):
    names = MappingProxyType(ollama_requests.NAMES)
    stream_kind = LINES
    any_media_type = True
    clips = True

    def error(self, status: int, body: bytes) -> bytes:
        return ollama_body(body)


class LlamaDialect(Dialect):
    names = MappingProxyType(llama_requests.NAMES)
    clips = True


CHAT, RESPONSES, ANTHROPIC, OLLAMA = Dialect(), ResponsesDialect(), AnthropicDialect(), OllamaDialect()
LLAMA = LlamaDialect()
