"""Prints the rows of a benchmark as Markdown, CSV, or the whole record as JSON.

A row maps columns to values: text, numbers, or {"median", "p10", "p90"}, which is shown with its spread. In CSV the spread has
its own columns.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

FORMATS = ("md", "csv", "json")
Rows = Sequence[Mapping[str, Any]]


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, default="md", help="output format (default: md)")


def rendered(rows: Rows, form: str, made: Mapping[str, Any]) -> str:
    """The rows in the wanted form; `made` is the whole record, which is what JSON prints."""
    if form == "json":
        return json.dumps(made)
    return as_csv(rows) if form == "csv" else as_markdown(rows)


def columns(rows: Rows) -> list[str]:
    """Every column that some row has, in the order of their first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def as_markdown(rows: Rows, width: int | None = None) -> str:
    """One table. Wider than `width` (default: the terminal's, and no limit for a file or a pipe), it is turned on its side if it
    then fits, or cut into several that begin with the same first column."""
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    whole = _grid(rows)
    if width is None or _width(whole) <= width:
        return whole
    sideways = _grid(_turned(rows))
    if _width(sideways) <= width:
        return sideways
    first, *others = columns(rows)
    pieces: list[str] = []
    kept = [first]
    for name in others:
        if len(kept) > 1 and _width(_grid(rows, [*kept, name])) > width:
            pieces.append(_grid(rows, kept))
            kept = [first]
        kept.append(name)
    return "\n\n".join([*pieces, _grid(rows, kept)])


def _width(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


def _turned(rows: Rows) -> list[dict[str, Any]]:
    """A row per column; columns without any value are left out."""
    filled = [name for name in columns(rows) if any(cell(row.get(name)) for row in rows)]
    return [{"": name} | {str(place): row.get(name) for place, row in enumerate(rows, 1)} for name in filled]


def _grid(rows: Rows, chosen: Sequence[str] = ()) -> str:
    if not rows:
        return ""
    names = list(chosen) or columns(rows)
    cells = [[cell(row.get(name)) for name in names] for row in rows]
    numbers = [all(isinstance(row.get(name), int | float | dict | None) for row in rows) for name in names]
    pads = [max(len(name), *(len(line[place]) for line in cells)) for place, name in enumerate(names)]
    rule = ["-" * (pad - 1) + (":" if number else "-") for pad, number in zip(pads, numbers, strict=True)]
    lines = [names, rule, *cells]
    return "\n".join(
        "| " + " | ".join(text.rjust(pad) if number else text.ljust(pad)
                          for text, pad, number in zip(line, pads, numbers, strict=True)) + " |"
        for line in lines
    )


def as_csv(rows: Rows) -> str:
    flat = [_flat(row) for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns(flat), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue().rstrip("\n")


def cell(value: Any) -> str:
    """A value for people: four significant digits, thousands apart."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        middle, low, high = (number(value[name]) for name in ("median", "p10", "p90"))
        return middle if low == high else f"{middle} ({low}–{high})"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return number(value)


def number(value: float) -> str:
    if isinstance(value, int) or value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.4g}"
    return text if "e" in text or "." not in text else text.rstrip("0").rstrip(".")


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            found |= {name: value["median"], f"{name} P10": value["p10"], f"{name} P90": value["p90"]}
        else:
            found[name] = "" if value is None else value
    return found
