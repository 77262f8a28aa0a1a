"""Where the repository's folders are, and the import path for tests that run part of themselves in a process of their own."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FAKES = ROOT / "tests" / "helpers" / "fakes"


def import_path() -> str:
    """PYTHONPATH with the package and the folders that pytest itself searches."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]["pythonpath"]
    return os.pathsep.join([str(ROOT), *(str(ROOT / folder) for folder in folders)])
