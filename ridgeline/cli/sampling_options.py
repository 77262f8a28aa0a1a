"""Sampling options of the command line: some fields of SamplingParams, the same for every command that generates.

`--seed` is not here: it is an engine option, which seeds every request without a seed of its own.
"""

from __future__ import annotations

import argparse
from typing import Any

_FIELDS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "maximum length of an answer, in tokens"),
    "temperature": (float, "sampling temperature; 0: greedy"),
    "top_p": (float, "sample from the likeliest tokens that together have this probability"),
    "top_k": (int, "sample from this number of likeliest tokens; 0: from all"),
    "min_p": (float, "drop tokens less likely than this fraction of the likeliest"),
    "repetition_penalty": (float, "above 1: penalise tokens that occurred before"),
}


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """`max_tokens`: what the command takes where neither it nor the model says a length."""
    group = parser.add_argument_group("sampling", "what is not given is the model's own default")
    for name, (kind, help) in _FIELDS.items():
        help += f" (default: the model's, or {max_tokens})" if name == "max_tokens" else ""
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(
            flag, dest=f"sampling_{name}", type=kind, metavar=kind.__name__.upper(), help=help, default=argparse.SUPPRESS
        )


def sampling_given(args: argparse.Namespace) -> dict[str, Any]:
    given = vars(args)
    return {name: given[f"sampling_{name}"] for name in _FIELDS if f"sampling_{name}" in given}
