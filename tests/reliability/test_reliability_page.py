"""docs/reliability.md is what its script makes of the markers, and no promise is without a test."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from reliability_rows import EVERY_COMMIT, PROMISES, SECTIONS

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("make_reliability_page", ROOT / "scripts" / "make_reliability_page.py")
assert SPEC is not None and SPEC.loader is not None
SCRIPT: Any = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = SCRIPT      # dataclasses look their module up
SPEC.loader.exec_module(SCRIPT)
marked_tests = functools.cache(SCRIPT.marked_tests)     # every process collects this file, and one needs it
REQUIRED = {
    *(f"S-{number:02}" for number in range(1, 13)), *(f"H-{number:02}" for number in range(1, 9)),
    *(f"B-{number:02}" for number in range(1, 26)),
    *(f"C-{number:02}" for number in range(1, 16)),
    *(f"R-{number:02}" for number in (*range(1, 15), 20)),
    *(f"P-{number:02}" for number in (*range(1, 15), 16)),
}


def test_the_page_is_current() -> None:
    text = SCRIPT.PAGE.read_text(encoding="utf-8")
    assert SCRIPT.page(text, marked_tests()) == text, "python scripts/make_reliability_page.py --write"


def test_every_promise_has_a_test_and_every_marker_a_promise() -> None:
    marked = {promise for test in marked_tests() for promise in test.promises}
    assert marked == set(PROMISES)
    assert {promise[:4] for promise in PROMISES} == REQUIRED
    assert {promise[0] for promise in PROMISES} == set(SECTIONS)


def test_what_every_commit_must_pass_is_quick() -> None:
    """Each of these rows has a test that is not slow."""
    quick = {promise[:4] for test in marked_tests() if not test.slow for promise in test.promises}
    assert quick >= EVERY_COMMIT


def test_what_is_not_tested_is_explained() -> None:
    text = SCRIPT.PAGE.read_text(encoding="utf-8")
    reasons = text[text.index("## What is not tested") :]
    assert "**R-08**" in reasons and "**P-10**" in reasons


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('@pytest.mark.reliability("S-01", "B-02")\ndef test_a(): ...', [("test_a", ("S-01", "B-02"), False)]),
        ('@pytest.mark.slow\n@pytest.mark.reliability("S-01")\ndef test_a(): ...', [("test_a", ("S-01",), True)]),
        ('pytestmark = [pytest.mark.slow]\n@pytest.mark.reliability("S-01")\ndef test_a(): ...', [("test_a", ("S-01",), True)]),
        ('@pytest.mark.reliability("S-01", slow=True)\ndef test_a(): ...', [("test_a", ("S-01",), True)]),
        ('pytestmark = pytest.mark.reliability("P-13")\ndef test_a(): ...', [("", ("P-13",), False)]),
        ('TestA = pytest.mark.reliability("P-01")(Machine.TestCase)', [("TestA", ("P-01",), False)]),
        ("@pytest.mark.slow\ndef test_a(): ...\nTestB = Machine.TestCase", []),
    ],
)
def test_markers_are_found(source: str, found: list[tuple[str, tuple[str, ...], bool]]) -> None:
    assert [(test.test, test.promises, test.slow) for test in SCRIPT.marked_in("test_x.py", source)] == found
