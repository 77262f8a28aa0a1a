"""`ridgeline completion bash|zsh`: a completion script, written from the parsers of all commands.

    eval "$(ridgeline completion bash)"      # in ~/.bashrc; or write it to a file once, which starts faster
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping
from types import ModuleType

from ridgeline.cli.config_options import OptionParser

_ZSH = "autoload -U +X compinit && compinit -u\nautoload -U +X bashcompinit && bashcompinit\n"
_SCRIPT = """\
# completion of the `ridgeline` command, written by `ridgeline completion`
_ridgeline() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}" words=""
  if [[ $COMP_CWORD -eq 1 || ( $COMP_CWORD -eq 2 && $command == help ) ]]; then
    COMPREPLY=($(compgen -W "{first}" -- "$cur")); return
  fi
  case "$command" in
{aliases}
  esac
  if [[ $command == bench ]]; then
    if [[ $COMP_CWORD -eq 2 ]]; then COMPREPLY=($(compgen -W "{bench}" -- "$cur")); return; fi
    command="bench ${{COMP_WORDS[2]}}"
  fi
  case "$command:$prev" in
{choices}
  esac
  if [[ -z $words && $cur == -* ]]; then
    case "$command" in
{options}
    esac
  fi
  if [[ -n $words ]]; then COMPREPLY=($(compgen -W "$words" -- "$cur")); fi
}}
complete -o default -F _ridgeline ridgeline
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"), help="the shell to write the script for")


def run(args: argparse.Namespace) -> None:
    print((_ZSH if args.shell == "zsh" else "") + script(parsers()), end="")


def _main() -> ModuleType:
    """The layer above: it imports every command by name."""
    return importlib.import_module("ridgeline.__main__")


def parsers() -> dict[str, OptionParser]:
    """The parser of every command."""
    made = {}
    for name, (place, _) in _main().COMMANDS.items():
        made[name] = OptionParser(prog=f"ridgeline {name}")
        importlib.import_module(place).add_arguments(made[name])
    return made


def script(made: Mapping[str, argparse.ArgumentParser]) -> str:
    options, choices = [], []
    for name, parser in made.items():
        shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
        flags = [flag for action in shown for flag in action.option_strings if flag.startswith("--")]
        options.append(f'      "{name}") words="{" ".join(flags)}";;')
        for action in parser._actions:
            values = values_of(action)
            if values and action.option_strings:
                keys = "|".join(f'"{name}:{flag}"' for flag in action.option_strings)
                choices.append(f'    {keys}) words="{" ".join(values)}";;')
    first = dict.fromkeys(name.split()[0] for name in made)
    bench = [name.split()[1] for name in made if name.startswith("bench ")]
    aliases = [f"    {other}) command={name};;" for other, name in _main().ALIASES.items()]
    return _SCRIPT.format(
        first=" ".join(first), bench=" ".join(bench), aliases="\n".join(aliases), choices="\n".join(choices),
        options="\n".join(options),
    )


def values_of(action: argparse.Action) -> list[str]:
    """The values that an option may have, where they are listed."""
    if action.choices:
        return [str(each) for each in action.choices]
    shown = action.metavar if isinstance(action.metavar, str) else ""
    return shown[1:-1].split(",") if shown.startswith("{") else []
