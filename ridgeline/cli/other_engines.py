"""Command lines written for vLLM, SGLang or llama.cpp, in our own words: the tables of ridgeline/known_options, for argv."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.known_options.option_table import SHORT, KnownOption, asks_for_nothing, known_option

_NUMBER = re.compile(r"-\.?\d")
_LEVEL = re.compile(r"-O\d")         # vLLM's -O3
_ON_OFF = ("on", "off", "auto", "0", "1")                                # of -fa, which was a switch before
_LISTS = ("--served-model-name", "--api-key", "--allowed-origins")       # vLLM: several words, or JSON; here: commas
_GROUP = "structured_outputs_config"
# llama-server's defaults for requests that set none. A command without these options takes them as overrides.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "repetition_penalty", "typical_p")
_OVERRIDES = "--override-generation-config"


_KEYS = ("VLLM_API_KEY", "SGLANG_API_KEY", "LLAMA_API_KEY")              # without a key of ours every request is accepted
_VARIABLES = {"VLLM_LOGGING_LEVEL": "RIDGELINE_LOG sets the level", "OLLAMA_HOST": "use --host and --port"}
_PREFIXES = ("VLLM_", "SGLANG_", "SGL_", "LLAMA_ARG_", "OLLAMA_")


def variable_notes(environment: Mapping[str, str]) -> list[str]:
    """What is said of another engine's environment variables, which change nothing here."""
    found = sorted(name for name in environment if name.startswith(_PREFIXES) or name in _KEYS)
    notes = [f"{name} is ignored: RIDGELINE_API_KEY holds the server's keys" for name in found if name in _KEYS]
    notes += [f"{name} is ignored: {_VARIABLES[name]}" for name in found if name in _VARIABLES]
    rest = [name for name in found if name not in _KEYS and name not in _VARIABLES]
    shown = ", ".join(rest[:5]) + (f" and {len(rest) - 5} more" if len(rest) > 5 else "")
    verb = "is" if len(rest) == 1 else "are"
    return notes + ([f"{shown} {verb} ignored: docs/options.md lists the environment variables"] if rest else [])


class Translation:
    """`argv` in our own words, and `notes`: what was ignored and why."""

    def __init__(self, words: list[str], own: Mapping[str, argparse.Action], positional: int) -> None:
        self.argv: list[str] = []
        self.notes: list[str] = []
        self._words = list(words)
        self._own = own
        self._positional = positional > 0                # the command's model is an argument, not --model …
        self._sampling: dict[str, Any] = {}
        self._model = ""                                 # given as an option
        arguments: list[str] = []                        # … which is the first of them
        ends_options = False
        while self._words:
            word = self._words.pop(0)
            if word == "--":
                arguments += self._words
                ends_options = True
                break
            if not word.startswith("-") or word == "-" or _NUMBER.match(word):
                arguments.append(word)
            else:
                self._option(word)
        if self._model and (len(arguments) < positional or positional > 1):      # `chat --model MODEL PROMPT`
            arguments.insert(0, self._model)
        if self._sampling:
            self.argv += [_OVERRIDES, json.dumps(self._sampling)]
        # Together: argparse of Python 3.11 takes no PROMPT behind an option that follows MODEL.
        self.argv = [*self.argv, "--", *arguments] if ends_options else [*arguments, *self.argv]

    def _option(self, word: str) -> None:
        typed, equals, value = word.partition("=")
        name = long_name(typed)
        flag = "--" + name.replace("_", "-")
        if typed in self._own or flag in self._own:
            self._keep(typed if typed in self._own else flag, equals + value)
        elif name == "model" and self._positional:
            self._model = value if equals else self._value(typed)
        elif name in _SAMPLING and _OVERRIDES in self._own:
            self._sampling[name] = _number(typed, value if equals else self._value(typed))
        else:
            self._foreign(typed, name, value if equals else None)

    def _keep(self, flag: str, rest: str) -> None:
        """One of ours; its value must not be taken for an option."""
        action = self._own[flag]
        if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
            self.argv.append(flag + rest)
            return
        if action.nargs is not None:
            self.argv.append(flag + rest)
            while not rest and self._words and not self._words[0].startswith("-"):
                self.argv.append(self._words.pop(0))
            return
        values = [rest[1:]] if rest else self._words[:1]
        if not rest:
            del self._words[:1]
        if flag in _LISTS and _LISTS[0] in self._own:    # a client's command has one key
            while self._words and not self._words[0].startswith("-"):
                values.append(self._words.pop(0))
            values = [_joined(flag, values)]
        # With "=", argparse takes a value that begins with a dash.
        self.argv += [f"{flag}={values[0]}"] if values else [flag]

    def _foreign(self, typed: str, name: str, value: str | None) -> None:
        negated = name.startswith("no_") and known_option(name) is None
        known = known_option(name.removeprefix("no_") if negated else name)
        if name.startswith(_GROUP):                      # --structured-outputs-config.backend, or the whole group as JSON
            self._group(name, value if value is not None else self._value(typed))
            return
        if known is None:
            self.argv.append(typed if value is None else f"{typed}={value}")     # the parser will say what it is close to
            return
        if known.takes_value and value is None and not _LEVEL.fullmatch(typed):
            optional = known.kind == "ignored" and (self._ends() or (name == "flash_attn" and self._words[0] not in _ON_OFF))
            value = "" if optional else self._value(typed)
        self._answer(typed, known, value if known.takes_value else not negated if value is None else value)

    def _answer(self, typed: str, known: KnownOption, value: Any) -> None:
        flag = "--" + known.says.replace("_", "-")
        if known.kind == "same" and known.says == "model" and self._positional:
            self._model = value
        elif known.kind == "same" and flag in self._own:
            self.argv += _as_ours(typed, flag, value, known.takes_value)
        elif known.kind == "same" and known.says in _SAMPLING and _OVERRIDES in self._own:
            self._sampling[known.says] = _number(typed, value)
        elif known.kind == "same":
            raise ConfigError(f"{typed} is {flag} here, and this command has no such option")
        elif known.kind == "ignored":
            self.notes.append(f"{typed} is ignored: {known.says}")
        elif not asks_for_nothing(known, value):
            shown = typed if isinstance(value, bool) else f"{typed} {value}"
            raise ConfigError(f"{shown} is not supported: {known.says}")

    def _group(self, name: str, value: str) -> None:
        member = name.partition(".")[2]
        try:
            group = {member: value} if member else json.loads(value)
        except ValueError:
            group = None
        if not isinstance(group, dict):
            raise ConfigError(f"--structured-outputs-config must be a JSON object, got {value[:80]!r}")
        other = sorted(key for key, each in group.items() if key != "backend" and each)
        if other:
            raise ConfigError(f"--structured-outputs-config.{other[0]} is not supported; only backend is")
        self.argv.append(f"--structured-outputs-backend={group.get('backend', 'auto')}")

    def _ends(self) -> bool:
        """No value follows."""
        return not self._words or (self._words[0].startswith("-") and not _NUMBER.match(self._words[0]))

    def _value(self, typed: str) -> str:
        if self._ends():
            raise ConfigError(f"{typed} needs a value")
        return self._words.pop(0)


def long_name(typed: str) -> str:
    """--max-model-len, --max_model_len and short options by their name in Python."""
    if typed.startswith("--"):
        return typed[2:].replace("-", "_")
    short, dot, member = typed.partition(".")
    if _LEVEL.fullmatch(typed):
        return "optimization_level"
    return SHORT.get(short, typed.lstrip("-").replace("-", "_")) + dot + member


def _as_ours(typed: str, flag: str, value: Any, takes_value: bool) -> list[str]:
    if not takes_value:
        return [flag] if str(value).lower() in ("true", "1") else []
    if (flag, value) == ("--max-model-len", "0"):                        # llama.cpp: the model's own
        return []
    if (long_name(typed), value) == ("chunked_prefill_size", "-1"):      # SGLang: prompts are not cut
        return ["--no-enable-chunked-prefill"]
    return [f"{flag}={value}"]


def _joined(flag: str, values: list[str]) -> str:
    if not values:
        raise ConfigError(f"{flag} needs a value")
    joined = ",".join(each for value in values for each in _listed(value))
    if flag == "--api-key" and not joined.strip(", "):                   # such as "$KEY" of a variable that is not set
        raise ConfigError("--api-key is empty, and every request would be accepted; give a key, or leave it out")
    return joined


def _listed(value: str) -> list[str]:
    if value.startswith("["):
        try:
            return [str(each) for each in json.loads(value)]
        except ValueError:
            pass
    return [value]


def _number(typed: str, value: str) -> float | int:
    try:
        return int(value) if re.fullmatch(r"-?\d+", value) else float(value)
    except ValueError:
        raise ConfigError(f"{typed} must be a number, got {value!r}") from None
