"""How the endpoints of different APIs tell errors and events, over the same answers.

A dialect only knows bodies and statuses; what an answer is, is its writer's to know.
"""

from __future__ import annotations

from typing import Any

from ridgeline.server.http.error_bodies import anthropic_body, responses_body


class Dialect:
    """How an endpoint tells errors and events, where it is not OpenAI's way for chat."""

    framed = False                   # the writer's events are whole, with a name each
    clips = False                    # an answer may be asked to be longer than there is room for

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
    def error(self, status: int, body: bytes) -> bytes:
        return responses_body(body)


class AnthropicDialect(NamedEvents):
    clips = True                     # its clients must name a length without knowing the prompt's, and hear where it ended

    def error(self, status: int, body: bytes) -> bytes:
        return anthropic_body(status, body)


CHAT, RESPONSES, ANTHROPIC = Dialect(), ResponsesDialect(), AnthropicDialect()
