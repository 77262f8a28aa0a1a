"""A streamed answer of chat/completions or completions, as far as the router needs to understand it.

It cuts events, notes the text that the client has, and the usage. When another replica starts the same answer again (`restart`),
its events are compared with that text and dropped or cut until the client has nothing of them yet. Other replicas must say
exactly the same; `Differs` is raised when one does not.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.engine.client.long_work import LONG_BYTES
from ridgeline.engine.replicas.replica_load import Usage
from ridgeline.route.upstream import AnswerTooLarge

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
MOST_EVENT = 64 * 2**20              # bytes: an event that never ends; 20 log-probabilities of 8,000 prompt tokens take 22 MB
MOST_TEXT = 4 * 2**20                # characters of an answer that are kept to continue it
_DONE = b"[DONE]"
_GONE = ("engine_not_available", "try_again", 503)
FIELDS = ("content", "reasoning_content", "reasoning", "text")
_LOOKED_AT = ("id", "created", "choices", "usage", "error")
_OF_CHOICE = ("delta", "finish_reason", *FIELDS)
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode


class Differs(Exception):
    """The second answer is not the first one again."""


class ReplicaGaveUp(Exception):
    """The replica ended the stream with an error of its own, not the request's."""


class EventCutter:
    """Whole events out of pieces of a body. Events may end with LF LF or CR LF CR LF."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def cut(self, piece: bytes) -> list[bytes]:
        """Takes time for the piece alone, unless an event ends in it: one of megabytes comes in hundreds of pieces."""
        place = max(0, len(self._rest) - 3)              # where an end may begin
        self._rest += piece
        events: list[bytes] = []
        if max(self._rest.find(b"\n\n", place), self._rest.find(b"\r\n\r\n", place)) >= 0:
            read = bytes(self._rest)
            if b"\r\n\r\n" in read:
                read = read.replace(b"\r\n", b"\n")
            *events, rest = read.split(b"\n\n")
            self._rest = bytearray(rest)
        if len(self._rest) > MOST_EVENT:
            raise AnswerTooLarge(f"an event of the answer is larger than {MOST_EVENT} bytes")
        return [event + b"\n\n" for event in events]


def data_of(event: bytes) -> bytes:
    return b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))


def content_of(data: bytes) -> Any:
    """The JSON of an event; of a long one only what the router looks at. The log-probabilities of a prompt take megabytes, and
    a decoder holds Python's lock until it has made an object of each."""
    if len(data) <= LONG_BYTES:
        return _decode(data)
    content = {name: raw for name, raw in _decode_fields(data).items() if name in _LOOKED_AT}
    made: dict[str, Any] = {name: _decode(raw) for name, raw in content.items() if name != "choices"}
    if "choices" in content:
        made["choices"] = [
            {name: _decode(raw) for name, raw in choice.items() if name in _OF_CHOICE}
            for choice in _decode_choices(content["choices"])
        ]
    return made


def usage_of(content: Any) -> Usage | None:
    """The usage of an answer or an event, in OpenAI's shape."""
    usage = content.get("usage") if isinstance(content, dict) else None
    if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    completion = usage.get("completion_tokens")
    return Usage(usage["prompt_tokens"], completion if isinstance(completion, int) else 0,
                 cached if isinstance(cached, int) else None)


class AnswerEvents:
    """`hide_usage`: the client did not ask for the last event with the usage; the router did."""

    def __init__(self, hide_usage: bool = False, resumable: bool = False, one_choice: bool = True) -> None:
        self.usage: Usage | None = None
        self.done = False
        self.began = False                               # some text has come from this replica
        self.shown = False                               # the client has something of the answer, not only its beginning
        self.resumable = resumable                       # the same request gives the same answer, and the text is all of it
        self.finished = False                            # the client has the answer's end; usage and [DONE] may be missing
        self._hide_usage = hide_usage
        self._one_choice = one_choice
        self._sent: dict[str, list[str]] = {}            # text that the client has, by field
        self._length = 0
        self._skip: dict[str, str] = {}                  # what of it the new replica has not repeated yet
        self._same: dict[str, Any] = {}                  # id and creation time of the first replica's answer
        self._resumed = False

    @property
    def text(self) -> str:
        return "".join(self._sent.get("content") or self._sent.get("text") or [])

    def restart(self) -> None:
        """The next events are another replica's, of the same request."""
        self._skip = {name: "".join(parts) for name, parts in self._sent.items()}
        self._resumed, self.began = True, False

    def take(self, event: bytes) -> bytes:
        """What the client shall get of an event; empty: nothing."""
        data = data_of(event)
        if data == _DONE:
            if any(self._skip.values()):
                raise Differs
            self.done = True
            return event
        if not data:
            return b"" if self._resumed else event       # a comment
        try:
            content = _decode(data) if self._resumed else content_of(data)
        except msgspec.DecodeError:
            self.resumable = False
            return event
        if not isinstance(content, dict):
            return event
        self._refuse_errors(content)
        self.usage = usage_of(content) or self.usage
        choices = content.get("choices")
        if not choices:
            return b"" if self._hide_usage and content.get("usage") else self._renamed(content, event)
        return self._take_choices(content, choices, event)

    def _refuse_errors(self, content: dict[str, Any]) -> None:
        error = content.get("error")
        if isinstance(error, dict) and (error.get("code") in _GONE or error.get("type") == "service_unavailable_error"):
            raise ReplicaGaveUp(str(error.get("message"))[:200])

    def _take_choices(self, content: dict[str, Any], choices: list[Any], event: bytes) -> bytes:
        choice = choices[0] if isinstance(choices, list) else None
        part = choice.get("delta", choice) if isinstance(choice, dict) else None
        if not self._same:
            self._same = {name: content[name] for name in ("id", "created") if name in content}
        if not isinstance(choice, dict) or not isinstance(part, dict):
            self.resumable, self.shown = False, True
            return event
        if len(choices) > 1 or part.get("tool_calls"):
            self.resumable = False
        return self._take_part(content, choice, part, event)

    def _take_part(self, content: dict[str, Any], choice: dict[str, Any], part: dict[str, Any], event: bytes) -> bytes:
        new = {name: part[name] for name in FIELDS if isinstance(part.get(name), str)}
        ends = bool(choice.get("finish_reason"))
        self.began = self.began or any(new.values())
        if self._resumed:
            new = {name: self._unseen(name, text) for name, text in new.items()}
            if ends and any(self._skip.values()):
                raise Differs                            # it ended earlier than the first one
            if (not ends or self.finished) and not any(new.values()) and not part.get("tool_calls"):
                return b""
            part.update(new)
            part.pop("role", None)
        self.shown = self.shown or ends or any(new.values()) or bool(part.get("tool_calls"))
        self.finished = self.finished or (ends and self._one_choice)
        for name, text in new.items():
            self._keep(name, text)
        return self._renamed(content, event)

    def _unseen(self, name: str, text: str) -> str:
        skip = self._skip.get(name, "")
        common = min(len(skip), len(text))
        if skip[:common] != text[:common]:
            raise Differs
        self._skip[name] = skip[common:]
        return text[common:]

    def _keep(self, name: str, text: str) -> None:
        if not text:
            return
        self._length += len(text)
        if self._length > MOST_TEXT:
            self.resumable = False
            return
        self._sent.setdefault(name, []).append(text)

    def _renamed(self, content: dict[str, Any], event: bytes) -> bytes:
        return b"data: " + _encode(content | self._same) + b"\n\n" if self._resumed else event
