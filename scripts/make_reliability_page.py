"""Writes the tables of docs/reliability.md: promises from tests/helpers/cases/reliability_rows.py, tests from their markers.

    python scripts/make_reliability_page.py            # is the page current?
    python scripts/make_reliability_page.py --write

Markers are read from the syntax of the test files, without importing them: `@pytest.mark.reliability("S-01", …)` on a
function or class, the same call around a class (`TestPool = pytest.mark.reliability("P-01")(Machine.TestCase)`), or in a
file's `pytestmark`. A test is slow if it or its file has the marker `slow`, or if its own marker says so because all of its
parameters are: `reliability("P-07", slow=True)`. Text between the tables is written by hand.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from generated_page import write_or_compare

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
_DECLARED = runpy.run_path(str(ROOT / "tests" / "helpers" / "cases" / "reliability_rows.py"))
PROMISES: dict[str, str] = _DECLARED["PROMISES"]
SECTIONS: dict[str, str] = _DECLARED["SECTIONS"]
EVERY_COMMIT: set[str] = _DECLARED["EVERY_COMMIT"]
TABLE_HEAD = "| row | promise | test | when |\n|---|---|---|---|\n"


@dataclass(frozen=True)
class Marked:
    """A test that keeps promises; `test` is empty where a whole file does."""

    file: str
    test: str
    promises: tuple[str, ...]
    slow: bool

    @property
    def name(self) -> str:
        return f"{self.file}::{self.test}" if self.test else self.file


def marked_tests(tests: Path = ROOT / "tests") -> list[Marked]:
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in sorted(tests.rglob("test_*.py"))]
    return [found for name, text in texts if "mark.reliability(" in text for found in marked_in(name, text)]


def marked_in(file: str, source: str) -> Iterator[Marked]:
    body = ast.parse(source).body
    assigned = [(node, ast.unparse(node.targets[0])) for node in body if isinstance(node, ast.Assign)]
    of_file = [mark for node, name in assigned if name == "pytestmark" for mark in _listed(node.value)]
    all_slow = any(_kind(mark) == "slow" for mark in of_file)
    if rows := _rows(of_file):
        yield Marked(file, "", rows, all_slow)
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if rows := _rows(node.decorator_list):
                slow = all_slow or any(_kind(mark) == "slow" or _says_slow(mark) for mark in node.decorator_list)
                yield Marked(file, node.name, rows, slow)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and (rows := _rows([node.value.func])):
            yield Marked(file, ast.unparse(node.targets[0]), rows, all_slow)


def _listed(value: ast.expr) -> list[ast.expr]:
    return list(value.elts) if isinstance(value, ast.List | ast.Tuple) else [value]


def _kind(mark: ast.expr) -> str:
    """`slow` of `pytest.mark.slow` or `pytest.mark.slow(…)`"""
    words = ast.unparse(mark.func if isinstance(mark, ast.Call) else mark)
    return words.removeprefix("pytest.mark.") if words.startswith("pytest.mark.") else ""


def _says_slow(mark: ast.expr) -> bool:
    return isinstance(mark, ast.Call) and _kind(mark) == "reliability" and bool(mark.keywords)


def _rows(marks: Iterable[ast.expr]) -> tuple[str, ...]:
    calls = [mark for mark in marks if isinstance(mark, ast.Call) and _kind(mark) == "reliability"]
    return tuple(ast.literal_eval(row) for mark in calls for row in mark.args)


def row_of(promise: str) -> str:
    """`S-01` of `S-01b`"""
    return promise[:4]


def table(letter: str, tests: list[Marked]) -> str:
    lines = []
    for promise, words in PROMISES.items():
        for slow in (False, True):
            names = [test.name for test in tests if promise in test.promises and test.slow == slow]
            if promise.startswith(letter) and names:
                listed = ", ".join(f"`{name}`" for name in sorted(names))
                lines.append(f"| {row_of(promise)} | {words} | {listed} | {'slow' if slow else 'commit'} |\n")
    return TABLE_HEAD + "".join(lines)


def page(text: str, tests: list[Marked]) -> str:
    """The page with its tables, and its list of rows, made anew."""
    for letter, title in SECTIONS.items():
        start = text.index(f"\n## {title}\n")
        begin = text.index("\n| row |", start) + 1
        end = re.compile(r"^(?!\|)", re.M).search(text, begin)
        assert end is not None
        text = text[:begin] + table(letter, tests) + text[end.start() :]
    rows = ", ".join(sorted(EVERY_COMMIT, key=lambda row: ("SHRP".index(row[0]), row)))
    return re.sub(r"(?<=^Rows that every commit must pass: ).*$", f"{rows}.", text, count=1, flags=re.M)


if __name__ == "__main__":
    sys.exit(write_or_compare(PAGE, page(PAGE.read_text(encoding="utf-8"), marked_tests())))
