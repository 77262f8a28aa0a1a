"""The `ridgeline` command: finds the subcommand and imports only what that one needs.

A subcommand is a module with `add_arguments(parser)` and `run(args)`. An error a user can meet is one line and exit code 2
(1 when the engine died); never a traceback.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys

from ridgeline.errors import MOST_SHOWN_PATH, ConfigError, EngineDead, RidgelineError, shown_path
from ridgeline.interrupt import end_guard, was_interrupted
from ridgeline.process.head_start import keep_byte_code
from ridgeline.process.platform import current_directory, enlarge_stack
from ridgeline.process.standard_streams import discard_output, open_missing
from ridgeline.report.columns import fitted
from ridgeline.report.control_characters import harmless
from ridgeline.version import __version__

COMMANDS = {
    "serve": ("ridgeline.cli.cmd_serve", "OpenAI-compatible server"),
    "route": ("ridgeline.cli.cmd_route", "one address in front of several servers, with prefix-aware routing"),
    "chat": ("ridgeline.cli.chat.cmd_chat", "talk to a model in the terminal"),
    "generate": ("ridgeline.cli.cmd_generate", "answer a file of prompts: JSONL in, JSONL out"),
    "admin": ("ridgeline.cli.cmd_admin", "query or profile a running server, or switch its techniques on and off"),
    "eval": ("ridgeline.cli.cmd_eval", "evaluate a model: perplexity, KL from a reference, retrieval, multiple choice"),
    "quantize": ("ridgeline.cli.cmd_quantize", "compress a model to 8 or 4 bits, and measure what it cost"),
    "plan": ("ridgeline.cli.cmd_plan", "predict what fits on a GPU, how fast it runs and what it costs"),
    "diagnose": ("ridgeline.cli.cmd_diagnose", "show where the time goes, what the bottleneck is, and what to change next"),
    "pull": ("ridgeline.cli.models.cmd_pull", "fetch a model of the Hugging Face hub, or the embedded one"),
    "list": ("ridgeline.cli.models.cmd_list", "list the models on this machine"),
    "rm": ("ridgeline.cli.models.cmd_rm", "delete a fetched model"),
    "build": ("ridgeline.cli.cmd_build", "compile the CPU kernels for this machine"),
    "completion": ("ridgeline.cli.cmd_completion", "print shell completions for bash or zsh"),
    "bench serve": ("ridgeline.bench.serve", "measure any OpenAI-compatible server under load"),
    "bench offline": ("ridgeline.bench.options.offline_options", "measure generation without a server"),
    "bench host": ("ridgeline.bench.options.host_options", "measure the host's share: scheduling, tokenising, detokenising"),
    "bench grammar": ("ridgeline.bench.options.grammar_options", "measure the cost of structured output"),
    "bench ops": ("ridgeline.bench.options.ops_options", "measure every operation's kernels against the roofline"),
    "bench frontend": ("ridgeline.bench.frontend", "measure the front end's cost per token, with a fake engine"),
    "bench idle": ("ridgeline.bench.options.idle_options", "trace decode steps: time of every kernel, idle time of the device"),
    "bench comm": ("ridgeline.bench.options.comm_options", "measure messages between the GPUs of one model: latency, bandwidth"),
    "bench startup": ("ridgeline.bench.startup", "measure an engine's start-up, phase by phase"),
    "bench soak": ("ridgeline.bench.soak", "stress-test a server with mixed traffic, and check for leaks and slow-down"),
    "bench loop": ("ridgeline.diagnose.loop_options", "diagnose, apply a remedy, measure again: predicted and achieved gain"),
    "bench kernel": ("ridgeline.bench.options.kernel_options", "check a candidate kernel of an operation, and compare its speed"),
    "bench compare": ("ridgeline.bench.compare", "compare two records; fails on a regression"),
    "bench studies": (
        "ridgeline.bench.options.studies_options", "measure the gain of batching, paging and others, each against its off version"
    ),
}
ALIASES = {"run": "chat", "ls": "list", "remove": "rm"}          # as Ollama and Docker call them


def overview(group: str = "") -> str:
    """All commands, or those of one group (`bench `)."""
    chosen = {name: help for name, (_, help) in COMMANDS.items() if name.startswith(group)}
    width = max(len(name) for name in chosen)
    others = {name: f" (also: {other})" for other, name in ALIASES.items()}
    lines = [f"  {name:<{width}}  {help}{others.get(name, '')}" for name, help in chosen.items()]
    if group:
        usage = f"usage: ridgeline {group}COMMAND ..."
        return "\n".join([usage, "", *lines, "", f"`ridgeline {group}COMMAND --help` lists a command's options."])
    return "\n".join(
        [
            "usage: ridgeline COMMAND ...",
            "",
            "An LLM inference engine that knows its roofline.",
            "",
            *lines,
            "",
            "`ridgeline COMMAND --help` lists a command's options; `ridgeline --version` the version.",
            "Without a MODEL, commands that run a model use the embedded SmolLM2-135M-Instruct.",
        ]
    )


def find_command(argv: list[str]) -> tuple[str, list[str]]:
    """(command, its arguments); a command may be two words."""
    argv = [ALIASES.get(argv[0], argv[0]), *argv[1:]]
    for words in (2, 1):
        name = " ".join(argv[:words])
        if len(argv) >= words and name in COMMANDS:
            return name, argv[words:]
    raise ConfigError(_unknown(argv))


def _unknown(argv: list[str]) -> str:
    """What to type instead of a command that does not exist."""
    instead = importlib.import_module("ridgeline.known_options.other_commands").INSTEAD
    for name in (" ".join(argv[:2]), argv[0]):
        if name in instead:
            return f"unknown command {name!r}; {instead[name]}"
    closest = importlib.import_module("difflib").get_close_matches
    if starts := {name.split()[1]: name for name in COMMANDS if name.startswith(argv[0] + " ")}:
        close = closest(" ".join(argv[1:2]), starts, 1)
        return f"{argv[0]} needs one of: {', '.join(starts)}" + (f"; did you mean {starts[close[0]]!r}?" if close else "")
    close = closest(argv[0], [*COMMANDS, *ALIASES], 1)
    hint = f"did you mean {close[0]!r}?" if close else f"the commands are {', '.join(COMMANDS)}"
    return f"unknown command {argv[0]!r}; {hint}"


def run(argv: list[str]) -> int:
    if argv and argv[0] == "help":                       # `ridgeline help serve`
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help"):
        print(fitted(overview()))
        return 0
    if argv[0] in ("-V", "--version", "version"):
        print(f"ridgeline {__version__}")
        return 0
    if len(argv) == 2 and argv[1] in ("-h", "--help", "help") and any(name.startswith(f"{argv[0]} ") for name in COMMANDS):
        print(fitted(overview(f"{argv[0]} ")))
        return 0
    name, rest = find_command(argv)
    place, help = COMMANDS[name]
    keep_byte_code()
    module = importlib.import_module(place)
    options = importlib.import_module("ridgeline.cli.config_options")
    parser = options.OptionParser(prog=f"ridgeline {name}", description=help[0].upper() + help[1:] + ".")
    module.add_arguments(parser)
    end_guard()
    return int(module.run(parser.parse(rest)) or 0)


# What the machine has run out of, by the error's number: no fault of the program, so no traceback.
SCARCE = {
    errno.EMFILE: "too few files may be open here; raise `ulimit -n`",
    errno.ENFILE: "the machine has no file descriptor left",
    errno.ENOMEM: "there is not enough memory",
    errno.ENOSPC: "no space is left where it was to be written",
    errno.EDQUOT: "no space is left where it was to be written",
    errno.EFBIG: "a file would be larger than it may be there (`ulimit -f`, or the file system)",
    errno.EAGAIN: "no further process or thread may be started here; raise `ulimit -u`",
}


# What is wrong with a path that was given, or may not be written to.
REFUSED_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS)


LONGEST_REASON = 2000                # characters


def main(argv: list[str] | None = None) -> int:
    open_missing()
    given = sys.argv[1:] if argv is None else argv
    try:
        if argv is None:
            enlarge_stack()
        code = run(given)
        sys.stdout.flush()                               # here an error is one line; at Python's end it would be its own
        return code
    except RidgelineError as error:
        return _refuse(_without_long_words(" ".join(str(error).split()), given), 1 if isinstance(error, EngineDead) else 2)
    except KeyboardInterrupt:
        return _stopped()
    except BrokenPipeError:                              # the reader of a pipe has left; Python must not try to flush
        discard_output()
        return 141
    except MemoryError:
        return _refuse(SCARCE[errno.ENOMEM], 2)
    except (ImportError, RuntimeError) as error:
        told = _told(error)
        if told is None:
            raise
        return told
    except OSError as error:
        if error.errno in REFUSED_PATHS and error.filename is not None:
            return _refuse(f"{shown_path(os.fsdecode(error.filename))}: {error.strerror}", 2)
        if error.errno == errno.ENOENT and current_directory() is None:          # libraries ask for it when they are imported
            return _refuse("the current directory was removed; change to another one", 2)
        if error.errno not in SCARCE:
            raise
        discard_output()                                 # it may be what could not be written
        return _refuse(f"{SCARCE[error.errno]} ({error})", 2)


def _told(error: Exception) -> int | None:
    """The exit code of an error that is not the program's, after a line about it; None: a traceback is right."""
    if was_interrupted(error):                           # in an import
        return _stopped()
    if "start new thread" in str(error):
        return _refuse(f"{SCARCE[errno.EAGAIN]}, or `ulimit -v`", 2)
    return None


def _stopped() -> int:
    print("stopped", file=sys.stderr)
    return 130


def _without_long_words(reason: str, argv: list[str]) -> str:
    """Errors quote what was typed, as it was or as Python writes it: 15 kB of it would hide what is wrong with it."""
    for word in {*argv, *(word.partition("=")[2] for word in argv)}:
        if len(word) > MOST_SHOWN_PATH:
            for quoted in (" ".join(word.split()), " ".join(repr(word)[1:-1].split())):
                reason = reason.replace(quoted, shown_path(quoted))
    return re.sub(rf"(\S{{{MOST_SHOWN_PATH}}})\S{{100,}}", r"\1 ...", reason)        # a part of a word, or one that was changed


def _refuse(reason: str, code: int) -> int:
    if len(reason) > LONGEST_REASON:                     # it quotes a model's file, such as a shape of 100,000 numbers
        reason = f"{reason[: LONGEST_REASON - 500]} … {reason[-500:]}"
    print(f"ridgeline: error: {harmless(reason)}", file=sys.stderr)                # not folded: it may end with a command to copy
    return code


if __name__ == "__main__":
    sys.exit(main())
