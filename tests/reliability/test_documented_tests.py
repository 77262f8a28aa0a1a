"""docs/reliability.md names tests that exist, and says truly which of them are slow."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from conftest import PER_COMMIT

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
ROWS = [
    (row, name, when)
    for row, names, when in re.findall(r"^\| ([A-Z]-\d\d) \|[^|]*\| ([^|]*) \| (commit|slow) \|$", PAGE, re.M)
    for name in re.findall(r"`([^`]+)`", names)
]
REQUIRED = {
    *(f"S-{number:02}" for number in range(1, 13)), *(f"H-{number:02}" for number in range(1, 9)),
    *(f"B-{number:02}" for number in range(1, 26)),
    *(f"C-{number:02}" for number in range(1, 16)),
    *(f"R-{number:02}" for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 20)),
    *(f"P-{number:02}" for number in (*range(1, 15), 16)),
}  # fmt: skip


def found_file(name: str) -> Path:
    return next(TESTS.rglob(name))


@cache
def named_in(file: str) -> dict[str, bool]:
    """Test functions and classes of a file, and whether they are slow."""
    tree = ast.parse(found_file(file).read_text(encoding="utf-8"))
    marks = [ast.unparse(node.value) for node in tree.body if isinstance(node, ast.Assign)
             and ast.unparse(node.targets[0]) == "pytestmark"]  # fmt: skip
    all_slow = any("mark.slow" in mark for mark in marks)
    found: dict[str, bool] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = all_slow or any(ast.unparse(each) == "pytest.mark.slow" for each in node.decorator_list)
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target): all_slow for target in node.targets}
    return found


@pytest.mark.parametrize(("row", "name", "when"), ROWS, ids=[f"{row} {name}" for row, name, _ in ROWS])
def test_the_named_test_exists(row: str, name: str, when: str) -> None:
    file, _, test = name.partition("::")
    if not test:
        assert found_file(file).exists()
        return
    assert test in named_in(file), f"{row}: {name} does not exist"
    assert named_in(file)[test] is (when == "slow"), f"{row}: {name} is not {when}"


def test_what_every_commit_is_held_to_is_quick_and_complete() -> None:
    """Each of these rows has a test that is not slow, and the page says which rows they are."""
    named = {row for row, _, when in ROWS if when == "commit"}
    assert named >= PER_COMMIT
    said = re.search(r"held to: ([^.]*)\.", PAGE)
    assert said is not None and set(re.findall(r"[A-Z]-\d\d", said[1])) == PER_COMMIT


def test_every_row_has_a_test_or_a_reason() -> None:
    assert {row for row, _, _ in ROWS} == REQUIRED
    reasons = PAGE[PAGE.index("## What is not tested") :]
    assert {"R-08", "P-10"} <= set(re.findall(r"[A-Z]-\d\d", reasons))
