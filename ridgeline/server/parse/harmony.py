"""gpt-oss' message format "harmony": every message names its channel, so one parser reads reasoning, calls and content.

    <|channel|>analysis<|message|>…<|end|>                                  reasoning
    <|start|>assistant<|channel|>final<|message|>…<|return|>                content, and so is a commentary without a recipient
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>          a call

The prompt ends with "<|start|>assistant", so an answer begins with its channel. Text outside of any message is content.
"""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.server.parse.incremental import Reads, Reasoning
from ridgeline.server.parse.json_text import MAX_WORD
from ridgeline.server.parse.tool_calls import CallParser

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
_FUNCTIONS = "functions."


class HarmonyParser(CallParser):
    """`reasoning_end`: where the first message that is no reasoning begins; None before that."""

    reasoning_end: int | None = None

    def _run(self) -> Reads[None]:
        mark = ""                                        # the first of a message whose predecessor has no end
        while text := mark or (yield from self._piece()):
            mark = ""
            if text in (START, CHANNEL):
                mark = yield from self._message(text)
            elif text not in HARMONY_MARKS:
                self._ends_reasoning(len(text))
                self._content(text)
        self._end_content()

    def _message(self, mark: str) -> Reads[str]:
        """From its first mark to its last; returns the first mark of the next message, if that has been read."""
        header, length, behind_mark = [mark], len(mark), list[str]()
        while header[-1] != MESSAGE:
            piece = yield from self._piece()
            if not piece or piece in ENDS:
                return ""                                # no message came of it
            header.append(piece)
            length += len(piece)
            if piece in HARMONY_MARKS:
                behind_mark = []
                if length > MAX_WORD and piece != MESSAGE:
                    return piece
                continue
            behind_mark.append(piece)
            if length > MAX_WORD:                        # no header is that long: it was text
                text = "".join(behind_mark)
                self._ends_reasoning(len(text))
                self._content(text)
                return ""
        channel, name = _channel_and_function("".join(header))
        if channel == "analysis" and not name:
            return (yield from self._body(lambda text: self._events.append(Reasoning(text))))
        self._ends_reasoning(0)
        return (yield from self._body(self._arguments_of(self._start(name)) if name else self._content))

    def _body(self, say: Callable[[str], None]) -> Reads[str]:
        while text := (yield from self._piece()):
            if text in HARMONY_MARKS:
                return "" if text in ENDS else text
            say(text)
        return ""

    def _piece(self) -> Reads[str]:
        """A mark, or text before the next one; "" at the end. A mark that the end cuts off is left out."""
        text = yield from self._until("<")
        if text != "<":
            return text
        word = yield from self._mark(text, HARMONY_MARKS)
        return "" if word not in HARMONY_MARKS and self._is_cut_mark(word) else word

    def _ends_reasoning(self, read: int) -> None:
        """`read`: characters of what follows it that have been read."""
        if self.reasoning_end is None:
            self.reasoning_end = self._place - read


def _channel_and_function(header: str) -> tuple[str, str]:
    """From "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"; the recipient may also come
    before the channel."""
    for mark in HARMONY_MARKS:
        header = header.replace(mark, f" {mark} ")
    words = header.split()
    channel = words[words.index(CHANNEL) + 1] if CHANNEL in words[:-1] else ""
    recipient = next((word.removeprefix("to=") for word in words if word.startswith("to=")), "")
    return channel, recipient.removeprefix(_FUNCTIONS) if recipient.startswith(_FUNCTIONS) else ""
