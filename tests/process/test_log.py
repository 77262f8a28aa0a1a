"""The log's level, as RIDGELINE_LOG sets it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from ridgeline.errors import ConfigError
from ridgeline.process import log


@pytest.mark.parametrize(("given", "level"), [("", "INFO"), (" ", "INFO"), ("warning", "WARNING"), ("DEBUG", "DEBUG")])
def test_a_level(given: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log.VARIABLE, given)
    assert log._level("INFO") == level


def test_an_unknown_level_is_told_with_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(log.VARIABLE, "loud")
    with pytest.raises(ConfigError, match="RIDGELINE_LOG must be one of DEBUG, INFO, WARNING, ERROR, CRITICAL, got 'LOUD'"):
        log._level("INFO")


def test_the_command_line_says_it_in_one_line() -> None:
    command = [sys.executable, "-c", "import sys; from ridgeline.__main__ import main; sys.exit(main(['list']))"]
    environment = {"RIDGELINE_LOG": "loud", "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and "RIDGELINE_LOG" in ended.stderr


@pytest.mark.parametrize("time", ["first", "second"])
def test_a_command_is_quiet_and_so_are_its_child_processes(time: str) -> None:
    """The second time shows that the first has changed nothing for later tests of its process."""
    level = logging.getLogger("ridgeline").level
    assert log.VARIABLE not in os.environ and level != logging.WARNING
    log.quiet_by_default()
    assert os.environ[log.VARIABLE] == "WARNING" and logging.getLogger("ridgeline").level == logging.WARNING
