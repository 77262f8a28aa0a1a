"""Progress where stderr is no terminal: lines, not too many."""

from __future__ import annotations

import pytest

from ridgeline.process.progress import ProgressLines, progress_bar


def test_lines_come_every_few_seconds_and_never_for_what_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    tick = ProgressLines("loading x", True, lambda: now[0])
    for second in range(21):
        now[0] = float(second)
        tick(min(16, second) * 10**9, 16 * 10**9)
    assert capsys.readouterr().err.splitlines() == [f"loading x: {each}.0 of 16.0 GB" for each in (5, 10, 15)]
    now[0] = 30.0
    tick(10**6, 5 * 10**7)
    assert capsys.readouterr().err == "loading x: 1 of 50 MB\n"
    ProgressLines("answers", False, lambda: now[0])(1, 2)
    assert not capsys.readouterr().err


def test_without_a_terminal_the_bar_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("answers") as tick:
        assert isinstance(tick, ProgressLines)
    with progress_bar("answers", wanted=False) as tick:
        tick(1, 2)
    assert not capsys.readouterr().err
