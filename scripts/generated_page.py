"""What scripts that write pages share: tables between two comments of a page, and `--write` against a check."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path


def with_tables(page: Path, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page with its tables made anew. A table stands between `<!-- table: NAME -->` and `<!-- end -->`."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        head, begin, rest = text.partition(f"<!-- table: {name} -->\n")
        _, end, tail = rest.partition("<!-- end -->")
        if not end:
            raise SystemExit(f"{page.name} has no place for the table {name}")
        text = f"{head}{begin}{table()}\n{end}{tail}"
    return text


def write_or_compare(page: Path, made: str) -> int:
    """The exit code. With --write the page becomes what was made; without, 1 where it is something else."""
    name = f"{page.parent.name}/{page.name}"
    if "--write" in sys.argv[1:]:
        page.write_text(made, encoding="utf-8")
        return 0
    current = page.read_text(encoding="utf-8") == made
    print(f"{name} is current" if current else f"{name} is out of date: run with --write")
    return int(not current)
