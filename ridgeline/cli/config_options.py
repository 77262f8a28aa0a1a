"""Command-line options, generated from their one declaration in `config.py`."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ridgeline.cli.other_engines import Translation, long_name
from ridgeline.config import (
    CacheOptions,
    EngineConfig,
    ExecutionOptions,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    checked,
    declared_options,
    whole_number,
)
from ridgeline.errors import ConfigError
from ridgeline.user_files import read_yaml

T = TypeVar("T")
ENGINE_GROUPS = {
    "model": ModelOptions, "memory and KV cache": CacheOptions, "scheduling": SchedulerOptions, "execution": ExecutionOptions,
    "parallelism": ParallelOptions,
}


_LONGEST_LIST = 50                   # letters of the choices beside an option
_NO_DEFAULTS: tuple[Any, ...] = (None, False, argparse.SUPPRESS, "", [], [0], "{}")  # if not given: nothing; False: 0, too


class ShortUsage(argparse.HelpFormatter):
    """Long choices are listed in an option's text, which is folded. argparse has them in the usage and beside the option."""

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None = None
    ) -> None:
        """`[options]` for those that may be left out: each is explained below."""
        listed = list(actions)
        if usage is None and any(each.option_strings and each.dest != "help" for each in listed):
            listed = [each for each in listed if each.required or not each.option_strings]
            listed.append(argparse.Action([], "options", nargs="?", metavar="options"))
        super().add_usage(usage, listed, groups, prefix)

    def _metavar_formatter(self, action: argparse.Action, default_metavar: str) -> Callable[[int], tuple[str, ...]]:
        if _long_choices(action):
            return lambda size: ("NAME",) * size
        return super()._metavar_formatter(action, default_metavar)

    def _expand_help(self, action: argparse.Action) -> str:
        text, listed = super()._expand_help(action), _long_choices(action)
        text += f"; one of {', '.join(listed)}" if listed else ""
        if "default" in text or not action.option_strings or action.default in _NO_DEFAULTS:
            return text
        values = action.default if isinstance(action.default, list) else [action.default]
        return f"{text} (default: {' '.join(f'{each:g}' if isinstance(each, float) else str(each) for each in values)})"


def _long_choices(action: argparse.Action) -> list[str]:
    """Empty where they fit beside the option. An option of the engine has them in its metavar alone (_add)."""
    listed, shown = [*map(str, action.choices or ())], action.metavar
    if shown is not None:
        listed = shown[1:-1].split(",") if isinstance(shown, str) and shown.startswith("{") else []
    beside = len(",".join(listed)) * (2 if action.nargs in ("+", "*") else 1)        # argparse says these twice
    return listed if beside > _LONGEST_LIST else []


class OptionParser(argparse.ArgumentParser):
    """argparse, except that --max_model_len is --max-model-len, that options of other engines are answered, that --config reads
    a file, and that errors are ConfigErrors of one line."""

    engine = False                   # set for commands that take engine options

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=ShortUsage, **settings)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        words = with_config_file(argv) if self.engine else argv
        if self.engine:
            arguments = [action.dest for action in self._actions if not action.option_strings]
            translated = Translation(words, self._option_string_actions, len(arguments) if "model" in arguments else 0)
            words = translated.argv
            for note in translated.notes:
                print(f"note: {note}", file=sys.stderr)
        else:
            words = [_with_dashes(word) for word in words]
        args, unknown = self.parse_known_args(words)
        for word in sorted(unknown, key=lambda word: not word.startswith("-")):     # a word may be an unknown option's value
            if not word.startswith("-"):
                raise ConfigError(f"unexpected argument {word!r}; see {self.prog} --help")
            name = "--" + long_name(word.split("=")[0]).replace("_", "-") if word.startswith("--") else word.split("=")[0]
            close = difflib.get_close_matches(name, self._option_string_actions, 1, 0.7)
            raise ConfigError(f"unknown option {name}; " + (f"did you mean {close[0]}?" if close else f"see {self.prog} --help"))
        for name in ("out", "html"):
            _check_output(f"--{name}", getattr(args, name, None))
        return args

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help" if "are required" in message else message)


def _check_output(option: str, path: str | None) -> None:
    """Refuses a file that cannot be written before the measurement, not after it."""
    if not path:
        return
    target = Path(path).absolute()
    above = next((each for each in target.parents if each.exists()), target)
    if target.is_dir() or not above.is_dir() or not os.access(target if target.exists() else above, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written")


def _with_dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


class _NoModel(str):
    """Tells an argument that is not there from an empty one: argparse converts both."""


_NO_MODEL = _NoModel()


def _model(given: str) -> str:
    if not given and given is not _NO_MODEL:
        raise argparse.ArgumentTypeError("it is empty, as of a variable that is not set; leave it out for the embedded model")
    return str(given)


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [options]"
    parser.add_argument(
        "model", nargs="?", default=_NO_MODEL, type=_model, metavar="MODEL",
        help="a name in the Hugging Face cache, a directory or a .gguf file; default: the embedded SmolLM2-135M-Instruct",
    )


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    if isinstance(parser, OptionParser):
        parser.engine = True
    for title, kind in ENGINE_GROUPS.items():
        add_options(parser, kind, title)
    parser.add_argument_group("file").add_argument(
        "--config", metavar="FILE.yaml", default=argparse.SUPPRESS,
        help="options from a YAML or JSON file, by their long names; options on the command line override them",
    )


def add_options(
    parser: argparse.ArgumentParser, options: type, title: str, others: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Every option of a dataclass of declared options, under this title or the one in `others` that lists it."""
    titles = {name: other for other, names in (others or {}).items() for name in names}
    groups = {name: parser.add_argument_group(name) for name in (title, *(others or {}))}
    for declared, kind, _ in declared_options(options):
        if declared.name != "model":
            _add(groups[titles.get(declared.name, title)], declared, kind)


def _add(group: argparse._ArgumentGroup, declared: Field[Any], kind: type) -> None:
    """Options that are not given stay absent, so the default has one place: the declaration."""
    flag = f"--{declared.name.replace('_', '-')}"
    default, choices = declared.default, declared.metadata["choices"]
    if kind is bool:
        shown = "auto" if default is None else "on" if default else "off"
        help = f"{declared.metadata['help']} (default: {shown})"
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help)
        return
    shown = "" if default == "" else f" (default: {'auto' if default is None else default})"
    group.add_argument(
        flag,
        type=_read_int if kind is int else kind,         # `checked` knows the choices, and other spellings of them
        metavar="{" + ",".join(choices) + "}" if choices else kind.__name__.upper(),
        default=argparse.SUPPRESS,
        help=(declared.metadata["help"] + shown).replace("%", "%%"),
    )


def _read_int(text: str) -> int | None:
    return whole_number(text)


_read_int.__name__ = "int"           # argparse: "invalid int value"


def with_config_file(argv: list[str]) -> list[str]:
    """The options of --config FILE as words before the others, so that the command line wins."""
    for place, word in enumerate(argv):
        if word == "--config" or word.startswith("--config="):
            path = word.partition("=")[2] or "".join(argv[place + 1 : place + 2])
            rest = argv[:place] + argv[place + (1 if "=" in word else 2) :]
            return _from_file(path) + rest
    return argv


def _from_file(path: str) -> list[str]:
    if not path:
        raise ConfigError("--config needs a file")
    read = read_yaml(path, "--config")                   # JSON is YAML, too
    if not isinstance(read, dict):
        raise ConfigError(f"--config {path} must hold options, such as max-model-len: 4096")
    words = []
    for name, value in read.items():
        flag = "--" + str(name).lstrip("-").replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list):
            words.append(f"{flag}={','.join(map(str, value))}")
        elif value is not None:
            words.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return words


def engine_config(args: argparse.Namespace, several: bool = False) -> EngineConfig:
    """`several`: whether the command starts as many engines as data_parallel_size asks for."""
    names = {declared.name for declared, _, _ in declared_options()}
    config = EngineConfig.of(**{name: value for name, value in vars(args).items() if name in names})
    return config if several else config.for_one_engine()


def options_of(kind: type[T], args: argparse.Namespace) -> T:
    """The dataclass of declared options, filled from the command line and checked."""
    given = vars(args)
    entries = [(declared, plain, optional) for declared, plain, optional in declared_options(kind) if declared.name in given]
    return kind(**{entry[0].name: checked(*entry, given[entry[0].name]) for entry in entries})
