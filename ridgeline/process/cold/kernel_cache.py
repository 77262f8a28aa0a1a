"""Where compiled GPU kernels are kept: in the cache directory, or where they cannot be written there, in a folder that goes with
the process. A container with a read-only file system, or a full disk, makes a start longer and does not end it."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from ridgeline.errors import ConfigError
from ridgeline.process import platform
from ridgeline.process.cold.temporary_folder import temporary_folder
from ridgeline.process.log import get_logger

VARIABLE = "TRITON_CACHE_DIR"
ROOM = 64 * 2**20                    # bytes: what the kernels of a model or two take

logger = get_logger("ops")


def choose_kernel_cache() -> None:
    """Sets Triton's variable, unless the user has, before triton is imported. Processes made from this one inherit it."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(_folder())


def _folder() -> Path:
    kept: Path | None = None
    try:
        kept = folder = platform.cache_dir() / "triton"
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")                           # a full disk may still make an empty file
        free = shutil.disk_usage(folder).free
        if free >= ROOM:
            return folder
        why = f"{folder}: {free >> 20} MiB are free, and they may take {ROOM >> 20}"
    except (OSError, ConfigError) as error:
        why = str(error)
    logger.warning("compiled GPU kernels cannot be kept, and this start compiles those that are not there: %s", why)
    instead = temporary_folder("ridgeline-kernels-")
    if kept is not None and kept.is_dir():               # in an image, say; a folder that others may write to is not read
        with suppress(OSError, shutil.Error):            # without room for all, those that are there by then
            shutil.copytree(kept, instead, dirs_exist_ok=True)
    return instead
