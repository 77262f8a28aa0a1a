"""One logger for the package: short lines on stderr. Prompts and keys are never logged."""

from __future__ import annotations

import logging
import os

from ridgeline.errors import ConfigError

VARIABLE = "RIDGELINE_LOG"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def get_logger(name: str) -> logging.Logger:
    logger = logging.getLogger("ridgeline")
    if not logger.handlers:
        logger.setLevel(_level("INFO"))
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
    return logger.getChild(name)


def quiet_by_default() -> None:
    """Warnings and errors only, here and in child processes, unless RIDGELINE_LOG says otherwise."""
    os.environ[VARIABLE] = _level("WARNING")
    get_logger("cli").parent.setLevel(os.environ[VARIABLE])  # type: ignore[union-attr]


def _level(default: str) -> str:
    """RIDGELINE_LOG, or `default` where it is empty or not set."""
    given = os.environ.get(VARIABLE, "").strip().upper() or default
    if given not in LEVELS:
        raise ConfigError(f"{VARIABLE} must be one of {', '.join(LEVELS)}, got {given[:40]!r}")
    return given
