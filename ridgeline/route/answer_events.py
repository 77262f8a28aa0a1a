"""A streamed answer of chat/completions or completions, as far as the router needs to understand it.

It cuts events, notes the text that the client has, and the usage. A long event is passed on in parts as they come, and not read:
such an answer cannot be continued. When another replica starts the same answer again (`restart`),
its events are compared with that text and dropped or cut until the client has nothing of them yet. Other replicas must say
exactly the same; `Differs` is raised when one does not.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from ridgeline.engine.client.long_work import LONG_BYTES
from ridgeline.engine.replicas.replica_load import Usage

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
MOST_READ = 2**20                    # bytes of an event that is read: a decoder holds Python's lock for 4 ms with these
MOST_HELD = 64 * 2**20               # bytes of begun events of all streams, above which only short events are read
MOST_TEXT = 4 * 2**20                # characters of an answer that are kept to continue it
MOST_TOKENS = 2**31                  # of a prompt or an answer: a larger count is not believed
_DONE = b"[DONE]"
_END = re.compile(rb"\n\r?\n[\r\n]*+")      # of an event: empty lines
_GONE = ("engine_not_available", "try_again", 503)
FIELDS = ("content", "reasoning_content", "reasoning", "text")
_LOOKED_AT = ("id", "created", "choices", "usage", "error")
_OF_CHOICE = ("delta", "finish_reason", *FIELDS)
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]] | None).decode


class Differs(Exception):
    """The second answer is not the first one again."""


class ReplicaGaveUp(Exception):
    """The replica ended the stream with an error of its own, not the request's."""


class Part(NamedTuple):
    """An event as it came, with its line ends; or a part of one that is too long to be read."""

    data: bytes
    is_whole: bool

    @property
    def is_short(self) -> bool:
        """Whether it is read at once."""
        return self.is_whole and len(self.data) <= LONG_BYTES


class Held:
    """The bytes of all streams' begun events, and of begun answers in one piece."""

    def __init__(self, most: int = MOST_HELD) -> None:
        self.num_bytes = 0
        self.most = most

    @property
    def most_of_one(self) -> int:
        """Bytes that one event or answer may have to be read."""
        return MOST_READ if self.num_bytes <= self.most else LONG_BYTES


HELD = Held()


class Beginning:
    """What has come of an answer in one piece, kept while another replica may still answer in its place; close() it at last."""

    def __init__(self, held: Held = HELD) -> None:
        self._kept = bytearray()
        self._held = held

    def add(self, piece: bytes) -> bool:
        """Whether more of it may be kept."""
        self._held.num_bytes += len(piece)
        self._kept += piece
        return len(self._kept) <= self._held.most_of_one

    def close(self) -> bytes:
        """All of it."""
        data = bytes(self._kept)
        self._held.num_bytes -= len(data)
        self._kept.clear()
        return data


class EventCutter:
    """Events out of pieces of a body; close() it at last. Lines may end with LF or CR LF. An event with more than MOST_READ bytes
    is given out in parts: kept until its end, a few of them would take all memory, and the event loop would stand still."""

    def __init__(self, held: Held = HELD) -> None:
        self.is_inside = False                           # of a long event: parts of it were given out, its end was not
        self._rest = bytearray()
        self._held = held

    def cut(self, piece: bytes) -> list[Part]:
        """Takes time for the piece and the event that ends in it. Nothing is copied before that end."""
        held, rest = self._held, self._rest
        most = held.most_of_one
        looked_at = max(0, len(rest) - 2)                # an end may begin in the piece before
        held.num_bytes += len(piece)
        rest += piece
        parts: list[Part] = []
        start = 0
        for end in [found.end() for found in _END.finditer(rest, looked_at)]:
            parts.append(Part(bytes(rest[start:end]), not self.is_inside and end - start <= most))
            self.is_inside, start = False, end
        if self.is_inside or len(rest) - start > most:
            self.is_inside, end = True, max(start, len(rest) - 2)
            parts.append(Part(bytes(rest[start:end]), False))
            start = end
        del rest[:start]
        held.num_bytes -= start
        return parts

    def last(self) -> list[Part]:
        """What has come since the last empty line, at the end of the stream."""
        part = Part(bytes(self._rest), not self.is_inside)
        self.close()
        return [part] if part.data else []

    def close(self) -> None:
        self._held.num_bytes -= len(self._rest)
        self._rest.clear()


def data_of(event: bytes) -> bytes:
    if event.startswith(b"data:") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[5:].strip()                         # one line and an empty one, as nearly all have
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
            for choice in _decode_choices(content["choices"]) or ()
        ]
    return made


def usage_of(content: Any) -> Usage | None:
    """The usage of an answer or an event, in OpenAI's shape."""
    usage = content.get("usage") if isinstance(content, dict) else None
    if not isinstance(usage, dict) or (prompt := _count(usage.get("prompt_tokens"))) is None:
        return None
    details = usage.get("prompt_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else None
    return Usage(prompt, _count(usage.get("completion_tokens")) or 0, cached)


def _count(given: Any) -> int | None:
    """Nothing that would let a counter go back, or spoil the times that are learned for all replicas."""
    return given if type(given) is int and 0 <= given <= MOST_TOKENS else None


class AnswerEvents:
    """`hide_usage`: the client did not ask for the last event with the usage; the router did."""

    def __init__(self, hide_usage: bool = False, resumable: bool = False, one_choice: bool = True) -> None:
        self.usage: Usage | None = None
        self.done = False
        self.began = False                               # some text has come from this replica
        self.shown = False                               # the client has something of the answer, not only its beginning
        self.resumable = resumable                       # the same request gives the same answer, and the text is all of it
        self.is_open = True                              # what was read last is followed by more, or nothing was read
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
        self._resumed, self.began, self.is_open = True, False, True

    def take(self, event: bytes) -> bytes:
        """What the client shall get of an event; empty: nothing."""
        data = data_of(event)
        if data == _DONE:
            if any(self._skip.values()):
                raise Differs
            self.done, self.is_open = True, False
            return event
        if not data:
            return b"" if self._resumed else event       # a comment
        self.is_open = False                             # unless it is a part of a text
        try:
            content = _decode(data) if self._resumed else content_of(data)
        except (ValueError, RecursionError):             # not JSON, not UTF-8, or too deep
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

    def pass_on(self, part: bytes) -> bytes:
        """What the client shall get of an event that is not read: all of it. The router does not know any more what it has."""
        if self._resumed:                                # nor whether the client has this already
            raise Differs
        self.resumable, self.finished, self.is_open = False, False, False
        self.began = self.shown = True
        return part

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
        # A call, a refusal, sound: it is an answer, and the router does not know where it goes on.
        more = "delta" in choice and any(value for name, value in part.items() if name != "role" and name not in FIELDS)
        if len(choices) > 1 or more:
            self.resumable = False
        return self._take_part(content, choice, part, event, more)

    def _take_part(
        self, content: dict[str, Any], choice: dict[str, Any], part: dict[str, Any], event: bytes, more: bool
    ) -> bytes:
        new = {name: text for name, text in part.items() if name in FIELDS and isinstance(text, str)}
        ends = bool(choice.get("finish_reason"))
        self.is_open = not ends
        self.began = self.began or any(new.values())
        if self._resumed:
            new = {name: self._unseen(name, text) for name, text in new.items()}
            if ends and any(self._skip.values()):
                raise Differs                            # it ended earlier than the first one
            if (not ends or self.finished) and not any(new.values()) and not more:
                return b""
            part.update(new)
            part.pop("role", None)
        self.shown = self.shown or ends or more or any(new.values())
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
