"""The folder in which an output is made, beside its final place: a kill loses one layer, and nothing is renamed before the end.

    OUT.part/run.json             what is being made: a second run with the same goes on, any other is refused
    OUT.part/model-00001-of-00032.safetensors …       one file for each block, whole or absent
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.errors import ConfigError
from ridgeline.models.weights import INDEX
from ridgeline.quantize.recipes import require_new

RUN, ERRORS = "run.json", "errors.json.writing"
SPARE = 64 << 20                     # bytes that stay free on the disk


class Workspace:
    def __init__(self, out: Path, run: dict[str, Any], blocks: int) -> None:
        """`run`: everything that decides the result."""
        self.out, self.blocks = out, blocks
        self.folder = out.with_name(f"{out.name}.part")
        require_new(out)
        if self.folder.exists():
            self._check_same(run)
        else:
            self._create(run)

    def _create(self, run: dict[str, Any]) -> None:
        try:
            self.folder.mkdir(parents=True)
            (self.folder / RUN).write_text(json.dumps(run))
        except OSError as error:
            raise ConfigError(f"--out {self.out} cannot be written: {error.strerror}") from None

    def _check_same(self, run: dict[str, Any]) -> None:
        try:
            found = json.loads((self.folder / RUN).read_text())
        except (OSError, ValueError):
            found = None
        if found != json.loads(json.dumps(run)):
            raise ConfigError(
                f"{self.folder} belongs to a run with another model, recipe, text or seed: delete it, or choose another --out"
            )

    def file(self, block: int) -> Path:
        """By the block's place, from 0."""
        return self.folder / f"model-{block + 1:05}-of-{self.blocks:05}.safetensors"

    def is_done(self, block: int) -> bool:
        try:
            with safe_open(self.file(block), framework="pt"):
                return True
        except (OSError, SafetensorError):
            return False

    def write(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        """Whole or not at all, also where the machine stops."""
        part = self.file(block).with_suffix(".writing")
        try:
            save_file(dict(tensors), part, {"format": "pt"})
        except SafetensorError as error:                 # the library's word for a full disk, too
            raise ConfigError(f"{part} cannot be written: {error}; give the same command again to go on") from None
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.chmod((self.folder / RUN).stat().st_mode)   # the library writes files that only this user may read
        os.replace(part, self.file(block))

    def add_errors(self, errors: Mapping[str, float]) -> None:
        """Of the linears of a block, for the card."""
        (self.folder / ERRORS).write_text(json.dumps(self.errors() | dict(errors)))

    def errors(self) -> dict[str, float]:
        try:
            found: dict[str, float] = json.loads((self.folder / ERRORS).read_text())
        except (OSError, ValueError):
            found = {}
        return found

    def require_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if needed + SPARE > free:
            if not any(self.is_done(block) for block in range(self.blocks)):
                shutil.rmtree(self.folder)
            raise ConfigError(
                f"no room for the output: it needs {needed / 1e9:.2f} GB, {self.folder.parent} has {free / 1e9:.2f} GB free"
            )

    def write_index(self) -> int:
        """Returns the bytes of all tensors."""
        places: dict[str, str] = {}
        for block in range(self.blocks):
            with safe_open(self.file(block), framework="pt") as file:
                places |= dict.fromkeys(file.keys(), self.file(block).name)
        total = sum(self.file(block).stat().st_size for block in range(self.blocks))
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        return total

    def finish(self) -> None:
        """The output appears under its name."""
        (self.folder / RUN).unlink()
        for left in self.folder.glob("*.writing"):
            left.unlink()
        os.rename(self.folder, self.out)
