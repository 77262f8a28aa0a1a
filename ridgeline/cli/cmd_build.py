"""`ridgeline build`: compile the CPU kernels for this machine."""

from __future__ import annotations

import argparse
import importlib

from rich.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """It takes none: there is one build for a machine."""


def run(args: argparse.Namespace) -> None:
    with Console(stderr=True).status("compiling the CPU kernels"):
        native = importlib.import_module("ridgeline.ops.native")         # brings torch along, so not for --help
        path = native.build()
    print(path)
