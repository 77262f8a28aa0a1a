"""Sampling on the command line: a few of SamplingParams' fields, the same for every command that generates.

`--seed` is not among them: the engine's option of that name seeds every request that brings no seed of its own.
"""

from __future__ import annotations

import argparse
from typing import Any

_FIELDS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "longest answer, in tokens"),
    "temperature": (float, "0: always the likeliest token"),
    "top_p": (float, "sample from the likeliest tokens that together have this probability"),
    "top_k": (int, "sample from that many likeliest tokens; 0: from all"),
    "min_p": (float, "leave out tokens less likely than this share of the likeliest"),
    "repetition_penalty": (float, "above 1: avoid tokens that were there before"),
}


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, (kind, help) in _FIELDS.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(
            flag, dest=f"sampling_{name}", type=kind, metavar=kind.__name__.upper(), help=help, default=argparse.SUPPRESS
        )


def sampling_given(args: argparse.Namespace) -> dict[str, Any]:
    given = vars(args)
    return {name: given[f"sampling_{name}"] for name in _FIELDS if f"sampling_{name}" in given}
