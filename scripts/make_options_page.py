"""Writes docs/options.md from the declarations of the options: `python scripts/make_options_page.py --write`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from generated_page import write_or_compare

from ridgeline import config
from ridgeline.cli.cmd_serve import ServerOptions
from ridgeline.known_options.option_table import KNOWN, SHORT
from ridgeline.route.route_options import RouteOptions

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
HEAD = """\
# Options

<!-- Written by scripts/make_options_page.py from ridgeline/config.py and the server's options; `make docs` writes it again. -->

Engine options work on the command line (`ridgeline serve MODEL --max-model-len 4096`) and in Python
(`LLM(model, max_model_len=4096)`, `AsyncLLM`). On the command line a switch is `--enable-prefix-caching` or
`--no-enable-prefix-caching`, and underscores may stand for dashes. An option that is not given, or None, has its default.
"auto" means that the engine picks a value at start-up; where it picks a smaller `max_num_seqs`, `max_num_batched_tokens` or
`max_model_len` than usual, it logs the reason. Names are vLLM's where vLLM has the option.
"""
GROUPS = {
    "Model": config.ModelOptions, "KV cache": config.CacheOptions, "Scheduler": config.SchedulerOptions,
    "Execution": config.ExecutionOptions, "Parallelism": config.ParallelOptions,
}
SERVER = """\
## Server

Options of `ridgeline serve` alone.
"""
ROUTER = """\
## Router

Options of `ridgeline route`; see [router.md](router.md).
"""
ENVIRONMENT = """\
## Environment

| variable | meaning |
|---|---|
| `RIDGELINE_API_KEY` | API keys of the server, separated by commas; removed from the environment once read |
| `RIDGELINE_ROUTE_KEY`, `RIDGELINE_ROUTE_KEY_1`, … | the router's keys for all replicas, or for one; removed once read |
| `RIDGELINE_CACHE` | directory for compiled kernels, peaks and the embedded model; default `~/.cache/ridgeline`; mode 700 |
| `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`, `HF_ENDPOINT` | for `ridgeline pull`; the first two for models by name, too |
| `RIDGELINE_LOG` | log level: `DEBUG`, `INFO` (default), `WARNING`, `ERROR` |
| `OTEL_*` | OpenTelemetry's own variables; see [server.md](server.md#traces) |
"""
OTHERS = """\
## Options of vLLM, SGLang and llama.cpp

The command line and `LLM()` know these names, so that commands and programs written for other engines run or get a reason. An
ignored option is accepted with a note; a refused one is an error that says what to do instead, unless its value changes
nothing.
"""


def cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("*:", "\\*:").replace("<", "&lt;")


def value(declared: dataclasses.Field[Any], kind: type) -> str:
    choices = declared.metadata["choices"]
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    low = declared.metadata["low"]
    names = {str: "text", int: "integer", float: "number", bool: "switch"}
    return names[kind] + (f" ≥ {low}" if low is not None else "")


def default(declared: dataclasses.Field[Any], kind: type) -> str:
    if declared.default is None:
        return "auto"
    if declared.default == "":
        return "none"
    return ("on" if declared.default else "off") if kind is bool else f"`{declared.default}`"


def table(group: type) -> str:
    lines = ["| option | values | default | meaning |", "|---|---|---|---|"]
    for declared, kind, _ in config.declared_options(group):
        flag = "MODEL" if declared.name == "model" else f"--{declared.name.replace('_', '-')}"
        lines.append(f"| `{flag}` | {value(declared, kind)} | {default(declared, kind)} | {cell(declared.metadata['help'])} |")
    return "\n".join(lines) + "\n"


def named(name: str) -> str:
    shorts = [short for short, long in SHORT.items() if long == name]
    return ", ".join(f"`{each}`" for each in (f"--{name.replace('_', '-')}", *shorts))


def others_tables() -> str:
    own = {declared.name for declared, _, _ in config.declared_options(*GROUPS.values(), ServerOptions)}
    lines = ["| the same as ours | |", "|---|---|"]
    lines += [
        f"| {named(name)} | `{'MODEL' if each.says == 'model' else '--' + each.says.replace('_', '-')}` |"
        for name, each in KNOWN.items() if each.kind == "same"
    ]
    lines += [f"| `{short}` | `--{long.replace('_', '-')}` |" for short, long in SHORT.items() if long in own]
    for kind, title in (("refused", "refused | why, and what to do instead"), ("ignored", "ignored | because")):
        reasons: dict[str, list[str]] = {}
        for name, each in KNOWN.items():
            if each.kind == kind:
                reasons.setdefault(each.says, []).append(named(name))
        lines += ["", f"| {title} |", "|---|---|", *(f"| {', '.join(names)} | {cell(says)} |" for says, names in reasons.items())]
    return "\n".join(lines) + "\n"


def page() -> str:
    parts = [HEAD, *(f"## {title}\n\n{table(group)}" for title, group in GROUPS.items())]
    parts += [f"{SERVER}\n{table(ServerOptions)}", f"{ROUTER}\n{table(RouteOptions)}"]
    parts += [ENVIRONMENT, f"{OTHERS}\n{others_tables()}"]
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(write_or_compare(PAGE, page()))
