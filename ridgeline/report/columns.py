"""Text that fits a terminal: lines that are too long go on below, from where their text begins.

A terminal breaks a long line in the middle of a word and goes on at its left edge. Files and pipes get every line as it is.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from typing import IO

_LEAST = 40                          # columns: narrower ones are left to the terminal
_TEXT_BEHIND_NAME = re.compile(r" *\S+(?: \S+)*? {2,}(?=\S)")    # "  name     what it is": the text goes on below the text


def fitted(text: str, stream: IO[str] | None = None, width: int | None = None) -> str:
    """The text for a stream (standard output); `width` is that of its terminal. Tables of Markdown are left as they are."""
    if width is None:
        out = stream or sys.stdout
        if not out.isatty():
            return text
        width = int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(out.fileno()).columns
    if width < _LEAST:
        return text
    return "\n".join(line if len(line) <= width or line.startswith("|") else _folded(line, width) for line in text.split("\n"))


def _folded(line: str, width: int) -> str:
    begin = re.match(r" *", line)
    named = _TEXT_BEHIND_NAME.match(line)
    margin = named.end() if named and named.end() <= width // 2 else (begin.end() if begin else 0) + 2
    # A word that is longer than a line, such as a URL or a path, stays whole: it can be copied.
    return "\n".join(textwrap.wrap(
        line, width, subsequent_indent=" " * margin, break_long_words=False, break_on_hyphens=False, drop_whitespace=True,
    ))
