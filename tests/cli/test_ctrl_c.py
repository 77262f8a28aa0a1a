"""Ctrl-C in the first moments of a command: one line and exit code 130."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ridgeline import interrupt
from ridgeline.__main__ import COMMANDS, main
from ridgeline.interrupt import is_command


@pytest.mark.parametrize("module", ["platform", "argparse"])
def test_ctrl_c_during_the_imports_says_that_it_stopped(tmp_path: Path, module: str) -> None:
    """`platform` is among the package's first imports, `argparse` among those of each command. In its place is a module during
    whose import Ctrl-C comes."""
    (tmp_path / f"{module}.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    assert interrupted(tmp_path, "list") == (130, "stopped\n")


def test_ctrl_c_while_torch_is_imported_says_that_it_stopped(tmp_path: Path) -> None:
    """torch keeps an exception in there to itself: it was an error about numpy after many seconds, or no end at all."""
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    raise SystemExit(5)\n"
    )
    assert interrupted(tmp_path, "bench", "idle") == (130, "stopped\n")


def test_what_brings_torch_is_imported_by_the_guard() -> None:
    """Commands that import no torch for their options import it by name, in a function."""
    others = {"ridgeline.bench.startup", "ridgeline.cli.cmd_completion"}         # a child imports torch; nothing does
    for place in {place for place, _ in COMMANDS.values()} - others:
        source = Path(interrupt.__file__).parent.joinpath(*place.split(".")[1:]).with_suffix(".py").read_text()
        assert not re.search(r"importlib\.import_module\(f?\"ridgeline\.", source), place


def test_build_shows_no_spinner_while_ctrl_c_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It left a terminal without a cursor."""
    said: list[str] = []

    @contextmanager
    def status(self: Console, text: str) -> Iterator[None]:
        said.append("begin")
        yield
        said.append("end")

    def build() -> str:
        said.append("build")
        return "here"

    def import_module(name: str) -> Any:
        said.append("import")
        return SimpleNamespace(build=build)

    monkeypatch.setattr(Console, "status", status)
    monkeypatch.setattr(interrupt, "import_module", import_module)
    main(["build"])
    assert said == ["import", "begin", "build", "end"]


def interrupted(folder: Path, *words: str) -> tuple[int, str]:
    """A command that finds the modules in `folder` first: its exit code and what it said."""
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-m", "ridgeline", *words], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{root}"},
    )
    return run.returncode, run.stderr


def test_little_is_imported_before_ctrl_c_is_taken() -> None:
    """A Ctrl-C meanwhile is a traceback: `typing`, for one, takes milliseconds."""
    nodes = ast.parse(Path(interrupt.__file__).read_text()).body
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert named | {node.module for node in nodes if isinstance(node, ast.ImportFrom)} <= {
        "__future__", "os", "signal", "sys", "types",    # signal imports types
    }


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
