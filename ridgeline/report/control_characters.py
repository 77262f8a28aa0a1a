"""Text of a model, a server or a file on a terminal: control characters are shown, not obeyed.

An escape sequence can overwrite what is on the screen, set the window's title, or write to the clipboard. Newlines and tabs stay.
"""

from __future__ import annotations

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """As `cat -v` and `less` write it: ESC is ^[, and 0x9b is <9b>. Carriage returns are left out: most belong to a line end."""
    return _CONTROL.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    if found[0] == "\r":
        return ""
    return f"<{code:02x}>" if code > 0x7F else f"^{chr(code ^ 0x40)}"
