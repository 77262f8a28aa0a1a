"""What commands print fits a terminal of 80 columns; a pipe gets every line whole."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys

import pytest

from ridgeline.__main__ import COMMANDS as ENTRIES
from ridgeline.__main__ import main, overview
from ridgeline.bench.ops import all_ops
from ridgeline.bench.options import (
    comm_options,
    grammar_options,
    host_options,
    idle_options,
    kernel_options,
    offline_options,
    ops_options,
    studies_options,
)
from ridgeline.cli import cmd_plan, cmd_quantize, cmd_serve
from ridgeline.cli.config_options import OptionParser
from ridgeline.diagnose import loop_options
from ridgeline.diagnose.tuning_loop import GPU_SCENARIOS, SCENARIOS
from ridgeline.report.columns import fitted


def longest(text: str) -> int:
    return max(map(len, text.splitlines()))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_long_line_goes_on_below_its_text() -> None:
    line = "  serve     one two three four five six seven eight nine ten"
    assert fitted(line, width=40) == "  serve     one two three four five six\n            seven eight nine ten"
    assert fitted("  a plain sentence that is too long for this", width=40) == "  a plain sentence that is too long for\n    this"
    table, address = "| a | " + "b" * 90 + " |", "see http://" + "x" * 90
    assert fitted(table, width=80) == table and address[4:] in fitted(address, width=80).splitlines()[-1]
    assert fitted(line, io.StringIO()) == line


def test_the_overview_fits_and_an_error_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error may end with a command to copy."""
    assert longest(overview()) > 80 >= longest(fitted(overview(), width=80))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stderr", said := Terminal())
    assert main(["plan", "embedded"]) == 2 and len(said.getvalue().splitlines()) == 1


LIGHT = [
    comm_options, grammar_options, host_options, idle_options, kernel_options, loop_options, offline_options, ops_options,
    studies_options,
]
COMMANDS = [cmd_plan, cmd_quantize, cmd_serve, *LIGHT]


def test_mistakes_in_the_options_of_benchmarks_are_told_without_torch() -> None:
    """Its import takes seconds on a busy machine."""
    light = {place: name for name, (place, _) in ENTRIES.items() if place in {each.__name__ for each in LIGHT}}
    assert len(light) == len(LIGHT)
    code = f"import sys, {', '.join(light)}; from ridgeline.__main__ import main\n"
    needed = ["FILE", "--op", "linear"]                  # of bench kernel, which is told of them first
    words = [[*name.split(), *(needed if name == "bench kernel" else []), "--no-such-option"] for name in light.values()]
    code += f"codes = [main(each) for each in {words}]\n"
    code += "print(set(codes), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "{2} False\n" and done.stderr.count("--no-such-option") == len(LIGHT)


def test_names_that_are_known_without_torch_are_those_of_ops_and_scenarios() -> None:
    assert set(ops_options.OP_NAMES) == set(all_ops()) and sorted(ops_options.OP_NAMES) == list(ops_options.OP_NAMES)
    assert set(loop_options.SCENARIO_NAMES) == {each.name for each in (*SCENARIOS, *GPU_SCENARIOS)}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda module: module.__name__.split(".")[-1])
def test_the_options_of_a_command_fit(command: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", Terminal())
    parser: argparse.ArgumentParser = OptionParser(prog="ridgeline command")
    command.add_arguments(parser)                        # type: ignore[attr-defined]
    assert longest(parser.format_help()) <= 80


@pytest.mark.slow
def test_a_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", said := Terminal())
    assert main(["plan", "qwen3-30b-a3b", "--gpu", "h200"]) == 0
    assert longest(said.getvalue()) <= 80
