"""What a conversation needs of a model, wherever it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """How an answer went; its text has been written already."""

    tokens: int
    finish_reason: str | None
    first_s: float                   # from the question to the first token
    seconds: float                   # from the question to the last token
    max_tokens: int | None = None    # that was asked for; None: what the context holds

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first one."""
        return (self.tokens - 1) / (self.seconds - self.first_s) if self.tokens > 1 and self.seconds > self.first_s else None


class ChatModel(Protocol):
    def describe(self) -> str:
        """Its name and what is worth knowing, in one line."""

    def reply(self, messages: list[Message], settings: dict[str, Any], write: Callable[[str], None]) -> Reply:
        """The next message, written as it comes. RequestError: this message was refused."""
