"""One self-contained HTML file: its frame, sections, tables and text. No script, no external byte, readable at any width."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ridgeline.report.style import SHEET

_MARK = (
    '<svg class="mark" viewBox="0 0 36 24" aria-hidden="true"><path d="M2 22 16 6h18"/><circle cx="23" cy="11.5" r="2.2"/></svg>'
)
_NUMBER = re.compile(r"[-+±≈~<>$]*\d[\d,.]*(e[-+]?\d+)?( ?[–-] ?\d[\d,.]*)? ?(%|×|[kMGT]?i?B|[mµ]?s)?( \(.*\))?")
_NOT_A_WORD = ("", "–", "unknown")   # they stand in columns of numbers as well
_LETTER, _GAP = 7.4, 8               # pixels on a phone, about
_PHONE, _WINDOW = 345, 600           # a wider table becomes a list on a phone, and a still wider one below 1000 px too


def page(title: str, lead: Sequence[str], sections: Sequence[tuple[str, Sequence[str]]]) -> str:
    """`lead`: HTML below the title. `sections`: a heading and pieces of HTML each; one without pieces is left out."""
    digest = base64.b64encode(hashlib.sha256(SHEET.encode()).digest()).decode()
    cards = "\n".join(
        "\n".join(("<section>", f"<h2>{escaped(heading)}</h2>", *pieces, "</section>"))
        for heading, pieces in sections if any(pieces)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src \'sha256-{digest}\'">\n'
        f"<title>{escaped(title)}</title>\n<style>{SHEET}</style>\n</head>\n<body>\n"
        f"<header>{_MARK}<h1>{escaped(title)}</h1></header>\n" + "\n".join(lead) + f"\n{cards}\n</body>\n</html>\n"
    )


def paragraph(text: str, kind: str = "") -> str:
    """`kind`: "quiet", "alarm" or "lead"."""
    return f'<p class="{kind}">{prose(text)}</p>' if kind else f"<p>{prose(text)}</p>"


def table(rows: Sequence[Mapping[str, Any]], show: Callable[[Any], str] = str) -> str:
    """Columns are those that any row has. Numbers are aligned to the right, text to the left. `show` turns a value into text."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shown = [[_text(row.get(name), show) for name in names] for row in rows]
    kinds = [' class="n"' if _numeric([line[place] for line in shown]) else "" for place in range(len(names))]
    head = "".join(f"<th{kind}>{escaped(name)}</th>" for name, kind in zip(names, kinds, strict=True))
    begins = [f'<td{kind} data-label="{escaped(name)}">' for name, kind in zip(names, kinds, strict=True)]
    cells = ("".join(f"{begin}{prose(cell)}</td>" for begin, cell in zip(begins, line, strict=True)) for line in shown)
    lines = "".join(f"<tr>{each}</tr>" for each in cells)
    if not rows:
        return ""
    return f'<table class="{_size(names, shown, kinds)}"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'


def facts(known: Mapping[str, Any]) -> str:
    """Names and values, one a row; what is unknown is left out, and a mapping inside becomes rows of its own."""
    rows = "".join(f"<tr><td>{escaped(name)}</td><td>{prose(value)}</td></tr>" for name, value in flat(known))
    return f'<table class="facts"><tbody>{rows}</tbody></table>' if rows else ""


def beside(*pieces: str) -> str:
    """In a row where the page is wide enough."""
    return f'<div class="beside">{"".join(pieces)}</div>' if any(pieces) else ""


def titled(heading: str, body: str) -> str:
    return f"<div><h3>{escaped(heading)}</h3>{body}</div>" if body else ""


def folded(summary: str, body: str) -> str:
    """Shown after a click."""
    return f"<details><summary>{escaped(summary)}</summary>{body}</details>" if body else ""


def verbatim(text: str) -> str:
    return f"<pre>{escaped(text)}</pre>"


def flat(known: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in known.items():
        words = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            found += flat(value, f"{words}: ")
        elif isinstance(value, list | tuple):
            found += [(words, ", ".join(map(str, value)))] * bool(value)
        elif value is not None and value != "":
            found.append((words, _text(value, str)))
    return found


def prose(text: str) -> str:
    """Escaped; what stands between backticks becomes code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:                             # a backtick without its partner stays one
        pieces[-2:] = ["`".join(pieces[-2:])]
    return "".join(f"<code>{escaped(piece)}</code>" if place % 2 else escaped(piece) for place, piece in enumerate(pieces))


def escaped(value: Any) -> str:
    return html.escape(str(value))


def _text(value: Any, show: Callable[[Any], str]) -> str:
    if value is None:
        return ""
    return ("yes" if value else "no") if isinstance(value, bool) else show(value)


def _size(names: Sequence[str], lines: Sequence[Sequence[str]], kinds: Sequence[str]) -> str:
    """The style's class for a table of this least width: titles and text can be wrapped between words, numbers cannot."""
    least = 0.0
    for place, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        cells = [line[place] for line in lines]
        words = cells if kind else [word for cell in cells for word in cell.split()]
        least += _GAP + _LETTER * max((len(each) for each in (*words, *name.split())), default=0)
    return "small" if least <= _PHONE else "few" if least <= _WINDOW else "many"


def _numeric(cells: Sequence[str]) -> bool:
    words = [cell for cell in cells if cell not in _NOT_A_WORD]
    return bool(words) and all(_NUMBER.fullmatch(cell) for cell in words)
