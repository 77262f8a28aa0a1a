"""Where the repository's folders are, and the import path for tests that run part of themselves in a process of their own."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FAKES = ROOT / "tests" / "helpers" / "fakes"


def import_path() -> str:
    """PYTHONPATH with the package, the folders that pytest itself searches, and what it has now."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]["pythonpath"]
    here = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(filter(None, [str(ROOT), *(str(ROOT / folder) for folder in folders), *here]))
