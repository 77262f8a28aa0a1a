"""Ctrl-C in the first moments of a command: one line and exit code 130."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline import interrupt
from ridgeline.__main__ import main
from ridgeline.interrupt import is_command


@pytest.mark.parametrize("module", ["platform", "argparse"])
def test_ctrl_c_during_the_imports_says_that_it_stopped(tmp_path: Path, module: str) -> None:
    """`platform` is among the package's first imports, `argparse` among those of each command. In its place is a module during
    whose import Ctrl-C comes."""
    (tmp_path / f"{module}.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "ridgeline", "list"], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
    )
    assert (run.returncode, run.stderr) == (130, "stopped\n")


def test_little_is_imported_before_ctrl_c_is_taken() -> None:
    """A Ctrl-C meanwhile is a traceback: `typing`, for one, takes milliseconds."""
    nodes = list(ast.walk(ast.parse(Path(interrupt.__file__).read_text())))
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert named | {node.module for node in nodes if isinstance(node, ast.ImportFrom)} <= {"__future__", "os", "signal", "sys"}


@pytest.mark.parametrize("kind", [RuntimeError, ImportError])
def test_a_library_that_fails_by_ctrl_c_was_stopped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def stopped(*_: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise kind("Error importing numpy") from error

    monkeypatch.setattr("ridgeline.cli.models.cmd_list.local_models", stopped)
    assert main(["list"]) == 130 and capsys.readouterr().err == "stopped\n"


def test_only_a_command_has_its_ctrl_c_taken() -> None:
    for command in (["python", "-m", "ridgeline", "list"], ["python", "-P", "-m", "ridgeline.__main__", "serve"],
                    ["/opt/venv/bin/python", "/opt/venv/bin/ridgeline", "chat"]):
        assert is_command(command), command
    for other in (["python", "-m", "ridgeline.engine.core.engine_process"], ["python", "my.py", "ridgeline"], ["python"],
                  ["python", "-m", "pytest", "ridgeline"], ["python", "-c", "import ridgeline"], ["python", "-m"]):
        assert not is_command(other), other
