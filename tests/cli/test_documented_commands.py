"""Every command on a page can be copied as it stands: a shell and the command's own options understand it."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.__main__ import COMMANDS, find_command
from ridgeline.cli.config_options import OptionParser

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINE = re.compile(r"^ {4,}(?:[A-Z_]+=\S+ )*(ridgeline [a-z].*)$", re.MULTILINE)
SYNOPSIS = re.compile(r"\[[A-Z-]|…| \.\.\.")             # shows what there is, and is not to be copied


def commands(page: Path) -> Iterator[list[str]]:
    for line in LINE.findall(re.sub(r"\\\n\s*", " ", page.read_text())):
        if SYNOPSIS.search(line):
            continue
        reader = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        reader.whitespace_split = True                   # and # begins a comment
        words = list(reader)
        end = next((place for place, word in enumerate(words) if word[0] in "|&;<>"), len(words))
        yield words[1:end]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_can_be_copied(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("serve.yaml").write_text("port: 9000\n")        # as docs/command-line.md has it
    for words in commands(page):
        name, rest = find_command(words)
        parser = OptionParser(prog=name)
        importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
        parser.parse(rest)                               # ConfigError for what it does not know


def test_there_are_commands_to_copy() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) > 100


def test_every_benchmark_is_on_the_page_of_benchmarks() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert [name for name in COMMANDS if name.startswith("bench ") and f"    ridgeline {name}" not in page] == []
