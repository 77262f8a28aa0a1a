"""One logger for the package: short lines on stderr. Prompts and keys are never logged."""

from __future__ import annotations

import logging
import os


def get_logger(name: str) -> logging.Logger:
    logger = logging.getLogger("ridgeline")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(os.environ.get("RIDGELINE_LOG", "INFO").upper())
        logger.propagate = False
    return logger.getChild(name)


def quiet_by_default() -> None:
    """Warnings and errors only, here and in child processes, unless RIDGELINE_LOG says otherwise."""
    os.environ.setdefault("RIDGELINE_LOG", "WARNING")
    get_logger("cli").parent.setLevel(os.environ["RIDGELINE_LOG"].upper())       # type: ignore[union-attr]
