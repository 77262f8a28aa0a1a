"""Detokenizer: from token ids to text, one answer at a time, in whole characters, with stop strings.

A token is a run of bytes (`Tokenizer.token_bytes`). The text so far is those bytes decoded; its last character may be
incomplete. Every byte and character is processed once: feeding n tokens takes time linear in n.
This file does not know where the tokens come from, and ends an answer only at stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ridgeline.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ridgeline.text.tokenizer import Tokenizer


_PIECES = 512                        # of text that are joined at once: joining at every piece would copy the text each time
_STEPS = 8192                        # of a request's stop strings that are remembered: a few megabytes at most

Matched = tuple[int, ...]            # of each stop string, the length of its longest beginning that the text ends with


class Characters:
    """Bytes as text; the first bytes of a character wait for its last. Most tokens are whole characters, the quick case."""

    __slots__ = ("_decoder", "_is_cut")

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_cut = False                         # the decoder has the first bytes of a character

    def decode(self, piece: bytes) -> str:
        if not self._is_cut:
            try:
                return piece.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(piece)
        self._is_cut = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Bytes that never became a character turn into U+FFFD."""
        return self._decoder.decode(b"", final=True)


class TextStream:
    """The text of one answer as its tokens arrive.

    `feed` returns what may be shown at once; a suffix that could begin a stop string waits. `finish` returns the rest.
    The pieces joined are `text`, whatever the chunks in which the tokens came. When `stopped_by` is set the answer is
    over: `num_tokens` tokens belong to it, and further tokens are ignored.
    """

    __slots__ = (
        "_decoder", "_finder", "_finished", "_first", "_held", "_hide_stop", "_length", "_min_tokens", "_pieces", "_shown",
        "_strip", "_window", "num_tokens", "stopped_by", "text_offsets",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: StopStrings | None = None,
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        at_start: bool = False,
    ) -> None:
        """`at_start`: the tokens begin a text and do not continue a prompt, so a SentencePiece prefix space is removed."""
        self.num_tokens = 0                          # tokens taken; those fed after a stop are not
        self.text_offsets: list[int] = []            # where in the text each of those tokens begins
        self.stopped_by: str | None = None
        self._pieces = tokenizer.token_pieces(skip_special_tokens)
        self._decoder = Characters()
        self._strip = at_start and tokenizer.has_prefix_space
        self._first: Callable[[int], bytes | None] | None = None     # until the first token, where that is written differently
        if at_start and tokenizer.has_first_pieces:
            self._first = partial(tokenizer.first_piece, skip_special_tokens=skip_special_tokens)
        self._window = None if tokenizer.decodes_alone else tokenizer.window(skip_special_tokens)
        self._min_tokens = min_tokens
        self._hide_stop = not include_stop_str_in_output
        self._finder = StopFinder(stop) if stop is not None and stop.strings else None
        self._held = ""                              # decoded, not yet shown
        self._shown: list[str] = []
        self._length = 0                             # characters decoded so far
        self._finished = False

    @classmethod
    def for_answers(cls, tokenizer: Tokenizer, params: SamplingParams) -> list[TextStream]:
        """One for each of the `n` answers to a request; they share the tables of the stop strings."""
        stop = StopStrings(params.stop)
        return [
            cls(
                tokenizer,
                stop=stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
            for _ in range(params.n)
        ]

    @property
    def text(self) -> str:
        """Everything shown so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def feed(self, token_ids: Iterable[int], *, ends_with_stop_token: bool = False) -> str:
        """Take the next tokens, return the text that can be shown now.

        `ends_with_stop_token`: the last of them is the end-of-sequence or stop token that ended the answer. It counts
        as a token, and is part of the text only with include_stop_str_in_output.
        """
        token_ids = list(token_ids)
        hidden = len(token_ids) - 1 if ends_with_stop_token and self._hide_stop else -1
        pieces, last_piece = self._pieces, len(self._pieces) - 1
        for place, token_id in enumerate(token_ids):
            if self._finished:
                break
            self.num_tokens += 1
            self.text_offsets.append(self._length)
            # A model's vocabulary may be padded: ids beyond the tokenizer's have no text.
            piece = pieces[token_id] if 0 <= token_id <= last_piece and place != hidden else b""
            if self._window is not None:
                self._take(self._window.push(token_id) if place != hidden else "")
                continue
            if self._first is not None and place != hidden and (first := self._first(token_id)) is not None:
                piece, self._first = first, None
            self._take(self._decoder.decode(piece))
        return self._show()

    @property
    def is_plain(self) -> bool:
        """Whether more() may be used: no token is written in another way than by its own bytes, and none ends the answer."""
        return self._finder is None and self._window is None and self._first is None and not self._strip

    def more(self, token_ids: list[int]) -> str:
        """feed() of a plain stream, in half the time: on the path of nearly every token of a server."""
        if self._finished:
            return ""
        pieces, decode, length, text = self._pieces, self._decoder.decode, self._length, ""
        for token_id in token_ids:
            self.text_offsets.append(length)
            piece = pieces[token_id] if 0 <= token_id < len(pieces) else b""
            new = decode(piece)
            length += len(new)
            text = text + new if text else new
        self.num_tokens += len(token_ids)
        self._length = length
        if text:
            self._keep(text)
        return text

    def finish(self) -> str:
        """The answer is over: return what was held back. Bytes that never became a character turn into U+FFFD."""
        if not self._finished:
            self._take(self._decoder.finish() if self._window is None else self._window.finish())
        if not self._finished:
            self._finished = True
            if self._finder is not None and self._finder.best is not None:
                self._stop(self._finder)
        return self._show()

    def _take(self, text: str) -> None:
        if not text:
            return
        if self._strip:
            self._strip = False
            text = text.removeprefix(" ")
        held, self._held = self._held, ""            # no other reference: Python adds in place, and does not copy a long text
        held += text
        self._held = held
        self._length += len(text)
        if self._finder is not None:
            self._finder.advance(text, counts=self.num_tokens > self._min_tokens)
            if self._finder.decided:
                self._finished = True
                self._stop(self._finder)

    def _stop(self, finder: StopFinder) -> None:
        """Cut the held text at the stop string that was found."""
        assert finder.best is not None
        start, index = finder.best
        self.stopped_by = finder.stop.strings[index]
        end = start if self._hide_stop else start + len(self.stopped_by)
        self._held = self._held[: end - (self._length - len(self._held))]

    def _show(self) -> str:
        text = self._held
        if not self._finished and self._finder is not None:
            text = text[: len(text) - (self._length - self._finder.settled)]
        if text:
            self._held = self._held[len(text) :]
            self._keep(text)
        return text

    def _keep(self, text: str) -> None:
        self._shown.append(text)
        if len(self._shown) >= _PIECES:                  # a string of its own costs more than its characters
            self._shown = ["".join(self._shown)]


class StopStrings:
    """The stop strings of a request, and the tables to find them with. All its answers share it: what one of them has looked up,
    the others need not."""

    __slots__ = ("_fallbacks", "_steps", "nothing", "strings")

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = tuple(strings)
        self.nothing: Matched = (0,) * len(self.strings)
        self._fallbacks = [_fallback_table(string) for string in self.strings]
        self._steps: dict[tuple[Matched, str], tuple[Matched, tuple[int, ...]]] = {}

    def step(self, matched: Matched, character: str) -> tuple[Matched, tuple[int, ...]]:
        """What is matched after one more character, and which strings end with it."""
        key = matched, character
        step = self._steps.get(key)
        if step is None:
            if len(self._steps) >= _STEPS:
                self._steps.clear()
            step = self._steps[key] = self._computed(matched, character)
        return step

    def _computed(self, matched: Matched, character: str) -> tuple[Matched, tuple[int, ...]]:
        after, ended = [], []
        for index, (stop, fallback, length) in enumerate(zip(self.strings, self._fallbacks, matched, strict=True)):
            while length and stop[length] != character:
                length = fallback[length - 1]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                ended.append(index)
                length = fallback[length - 1]
            after.append(length)
        return tuple(after), tuple(ended)


class StopFinder:
    """Finds the stop string that starts earliest in a text that comes in pieces; at equal start the first listed.

    Each stop string has a Knuth-Morris-Pratt automaton: the length of its longest beginning that the text now ends
    with. That gives at once what must be held back, and whether an earlier match could still complete. So the answer
    does not depend on the pieces, at the price of waiting for a few characters where stop strings overlap.
    """

    __slots__ = ("_matched", "_position", "best", "decided", "stop")

    def __init__(self, stop: StopStrings) -> None:
        self.stop = stop
        self.best: tuple[int, int] | None = None     # where it starts, and which of the stop strings it is
        self.decided = False
        self._matched = stop.nothing
        self._position = 0

    @property
    def settled(self) -> int:
        """Characters from the start that no stop string can reach any more.

        While a match waits to be decided, a better one is open, and that one starts no later.
        """
        return self._position - max(self._matched)

    def advance(self, text: str, counts: bool = True) -> None:
        """Take the next characters. With `counts` false (min_tokens), stop strings that end among them are ignored."""
        strings, step, matched = self.stop.strings, self.stop.step, self._matched
        if self.best is None and not any(matched):
            # The usual case: nothing is open and nothing can open before the first character of some stop string.
            openings = [place for stop in strings if (place := text.find(stop[0])) >= 0]
            skipped = min(openings, default=len(text))
            self._position += skipped
            text = text[skipped:]
        for character in text:
            self._position += 1
            matched, ended = step(matched, character)
            self._matched = matched
            if counts:
                for index in ended:
                    found = (self._position - len(strings[index]), index)
                    self.best = found if self.best is None else min(self.best, found)
            if self.best is not None and not self._better_may_come(self.best):
                self.decided = True
                return

    def _better_may_come(self, best: tuple[int, int]) -> bool:
        return any(length and (self._position - length, index) < best for index, length in enumerate(self._matched))


def _fallback_table(pattern: str) -> list[int]:
    """For each beginning of the pattern: the length of its longest proper beginning that is also its end."""
    table = [0] * len(pattern)
    length = 0
    for place in range(1, len(pattern)):
        while length and pattern[place] != pattern[length]:
            length = table[length - 1]
        if pattern[place] == pattern[length]:
            length += 1
        table[place] = length
    return table
