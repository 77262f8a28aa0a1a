"""Command-line options, generated from their one declaration in `config.py`."""

from __future__ import annotations

import argparse
import difflib
import os
from dataclasses import Field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ridgeline.config import EngineConfig, checked, declared_options
from ridgeline.errors import ConfigError

T = TypeVar("T")


class OptionParser(argparse.ArgumentParser):
    """argparse, except that --max_model_len is --max-model-len, and that errors are ConfigErrors of one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_args([_with_dashes(word) for word in argv])
        for word in unknown:
            if not word.startswith("-"):
                raise ConfigError(f"unexpected argument {word!r}; see {self.prog} --help")
            name = word.split("=")[0]
            close = difflib.get_close_matches(name, self._option_string_actions, 1)
            raise ConfigError(f"unknown option {name}" + (f"; did you mean {close[0]}?" if close else ""))
        for name in ("out", "html"):
            _check_output(f"--{name}", getattr(args, name, None))
        return args

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _check_output(option: str, path: str | None) -> None:
    """Refuses a file that cannot be written before the measurement, not after it."""
    if not path:
        return
    target = Path(path).absolute()
    above = next((each for each in target.parents if each.exists()), target)
    if target.is_dir() or not above.is_dir() or not os.access(target if target.exists() else above, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written")


# vLLM's names for the same option.
_OTHER_NAMES = dict.fromkeys(
    ("--structured-outputs-config.backend", "--guided-decoding-backend"), "--structured-outputs-backend"
)


def _with_dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    name = name.replace("_", "-")
    return _OTHER_NAMES.get(name, name) + equals + value


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.add_argument(
        "model", nargs="?", default="", metavar="MODEL",
        help="HF directory or .gguf file; default: the embedded SmolLM2-135M-Instruct",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    for declared, kind, _ in declared_options():
        if declared.name != "model":
            _add(group, declared, kind)


def add_options(parser: argparse.ArgumentParser, options: type, title: str) -> None:
    """Every option of a dataclass of declared options."""
    group = parser.add_argument_group(title)
    for declared, kind, _ in declared_options(options):
        _add(group, declared, kind)


def _add(group: argparse._ArgumentGroup, declared: Field[Any], kind: type) -> None:
    """Options that are not given stay absent, so the default has one place: the declaration."""
    flag = f"--{declared.name.replace('_', '-')}"
    default = declared.default
    shown = "" if default in (None, "") or kind is bool else f" (default: {default})"
    if kind is bool:
        help = declared.metadata["help"] + ("" if default is None else f" (default: {'on' if default else 'off'})")
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help)
        return
    group.add_argument(
        flag,
        type=kind,
        choices=declared.metadata["choices"] or None,
        metavar=None if declared.metadata["choices"] else kind.__name__.upper(),
        default=argparse.SUPPRESS,
        help=(declared.metadata["help"] + shown).replace("%", "%%"),
    )


def engine_config(args: argparse.Namespace) -> EngineConfig:
    names = {declared.name for declared, _, _ in declared_options()}
    return EngineConfig.of(**{name: value for name, value in vars(args).items() if name in names})


def options_of(kind: type[T], args: argparse.Namespace) -> T:
    """The dataclass of declared options, filled from the command line and checked."""
    given = vars(args)
    entries = [(declared, plain, optional) for declared, plain, optional in declared_options(kind) if declared.name in given]
    return kind(**{entry[0].name: checked(*entry, given[entry[0].name]) for entry in entries})
