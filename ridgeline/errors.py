"""Errors of two kinds: one request failed, or the engine is dead.

A request error is sent to that request's client and says what to change; other requests go on. An engine error is sent to
every open request. `ConfigError` and `ModelError` are raised before the engine exists. Each error carries one line of text.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, Self

PROMPT = "prompt_token_ids"          # the engine's name for a request's prompt, as an error's `field`
MOST_SHOWN = 80                      # characters of a value that an error message quotes
MOST_SHOWN_PATH = 200                # characters of a path
MOST_SAID = 2000                     # characters of a request error's message; libraries quote as much as was sent


class RidgelineError(Exception):
    """Base of every error a user can meet. `str(error)` is one clear line."""


class ConfigError(RidgelineError):
    """A setting that cannot work, found before any weight is loaded."""


class ModelError(RidgelineError):
    """A model directory or file that cannot be served: missing, damaged, or of an unknown kind."""


class RequestError(RidgelineError):
    """This request failed; the engine and every other request go on.

    `field` is the request's field at fault, as a path such as `messages[0].content`; empty if no single field is. The message
    names it too, but only for people: code reads `field`.
    """

    def __init__(self, message: str = "", *, field: str = "") -> None:
        super().__init__(message if len(message) <= MOST_SAID else f"{message[:MOST_SAID]} …")
        self.field = field[:MOST_SAID]

    def is_about(self, field: str) -> bool:
        """Whether the error concerns this field or a part of it."""
        return self.field == field or self.field.startswith((f"{field}.", f"{field}["))

    def renamed(self, field: str, name: str) -> Self:
        """The same error for a request in which `field` is called `name`."""
        error = copy.copy(self)
        error.field = name + self.field.removeprefix(field)
        error.args = (re.sub(rf"(?<!\w){re.escape(field)}(?!\w)", lambda _: name, str(self), count=1),)
        return error


class BadRequest(RequestError):
    """The client asked for something invalid (HTTP 400)."""


class UnknownField(BadRequest):
    """The request has a field that its type does not have; `field` is its name as the client wrote it."""


class PromptTooLong(BadRequest):
    """More tokens than the model's context holds. Clients recognise this error by its code and shorten the conversation."""


class Unsupported(RequestError):
    """A valid request for something this engine does not do (HTTP 400)."""


class Overloaded(RequestError):
    """No room now; the same request may succeed later, in about `retry_after` seconds if that is known (HTTP 429)."""

    def __init__(self, message: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NotNow(Overloaded):
    """No time for what this request needs, such as a new grammar or a long body; others may be taken."""


class TryAgain(RequestError):
    """A part of the server failed, not the request: the same request may succeed in `retry_after` seconds (HTTP 503)."""

    def __init__(self, message: str = "", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BadGateway(TryAgain):
    """The servers behind this one failed in this request; the same request may succeed later (HTTP 502)."""


class TimedOut(RequestError):
    """The request took longer than it may (HTTP 504)."""


class EngineDead(RidgelineError):
    """The engine has stopped; every request in it fails (HTTP 503)."""


def one_line(error: BaseException) -> str:
    """Any error as one line of text."""
    words = " ".join(str(error).split())
    return words if isinstance(error, RidgelineError) else f"{type(error).__name__}: {words[:300]}".rstrip(": ")


def shown(value: Any) -> str:
    """Any value for an error message: short, on one line. Only what is shown is formatted: a client may have sent megabytes."""
    text, parts = "", _parts(value)
    try:
        for part in parts:
            text += part
            if len(text) > MOST_SHOWN:
                break
        was_cut = next(parts, None) is not None
    except Exception:                                    # an integer with too many digits; an object whose repr fails
        return f"a value of type {type(value).__name__}"
    text = " ".join(text.split())
    return f"{text[:MOST_SHOWN - 3]}..." if was_cut or len(text) > MOST_SHOWN else text


def shown_path(path: Any) -> str:
    """A path or another word of the command line, as it was given, for an error message that it must not fill."""
    text = " ".join(str(path).split("\n"))
    return text if len(text) <= MOST_SHOWN_PATH else f"{text[:MOST_SHOWN_PATH]} ..."


def _parts(value: Any) -> Iterator[str]:
    """`repr(value)`, part by part."""
    kind = type(value)
    if kind in (str, bytes):
        yield repr(value[: MOST_SHOWN + 1])
        if len(value) > MOST_SHOWN + 1:
            yield ""                                     # the rest, which is not formatted
    elif kind in (list, tuple) and value:
        opens, closes = ("[", "]") if kind is list else ("(", ",)" if len(value) == 1 else ")")
        for place, each in enumerate(value):
            yield ", " if place else opens
            yield from _parts(each)
        yield closes
    elif isinstance(value, Mapping) and value:
        for place, (name, each) in enumerate(value.items()):
            yield ", " if place else "{"
            yield from _parts(name)
            yield ": "
            yield from _parts(each)
        yield "}"
    else:
        yield repr(value)
