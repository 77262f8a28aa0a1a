"""`ridgeline build`: compile the CPU kernels for this machine."""

from __future__ import annotations

import argparse

from rich.console import Console

from ridgeline import interrupt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> None:
    # Imports torch, which --help does not need; before the spinner: Ctrl-C meanwhile would leave the terminal without a cursor.
    native = interrupt.import_module("ridgeline.ops.cpu.native")
    with Console(stderr=True).status("compiling the CPU kernels"):
        path = native.build()
    print(f"CPU kernels for this machine: {path}")
