"""The folder in which an output is made, beside its final place. If the process is killed, only one layer is lost, and nothing
is renamed before the end.

    OUT.part/run.json             what is being made: a second run with the same goes on, any other is refused
    OUT.part/model-00001-of-00032.safetensors …       one file for each block, whole or absent

A search (`--recipe auto`) makes several outputs, and a kill loses one layer of the last:

    OUT.search/run.json           what is searched
    OUT.search/try1 …             whole outputs with their cards; try2.part: the one that was being made
    OUT.search/chosen             the name of the one that is taken: what is left to do is to rename it, and to delete the others
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ridgeline.errors import ConfigError
from ridgeline.models.weights import INDEX
from ridgeline.quant.quality_card import find_card
from ridgeline.quantize.recipes import require_new

RUN, ERRORS, CHOSEN = "run.json", "errors.json.writing", "chosen"
SPARE = 64 << 20                     # bytes that stay free on the disk


class Claim:
    """One run at a time writes a folder. The kernel ends the claim of a run that was killed."""

    def __init__(self, folder: Path, run: dict[str, Any], out: Path) -> None:
        """`run`: everything that decides what is written. A folder of another run is refused."""
        self._folder, self._file = folder, None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / RUN).exists() or not any(folder.iterdir()):
                self._file = (folder / RUN).open("a+")
                self._lock(out)
            same = self._file is not None and self._is_same(run)
        except OSError as error:
            self.end()
            raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from None
        except ConfigError:
            self.end()
            raise
        if not same:
            self.end()
            raise ConfigError(
                f"{folder} belongs to a run with another model, recipe, text, seed or limit: delete it, or choose another --out"
            )

    def _lock(self, out: Path) -> None:
        assert self._file is not None
        busy = f"another run is writing {self._folder}: wait for it, or choose another --out"
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(busy) from None
        except OSError:                                  # a file system without locks: runs there are not told apart
            return
        require_new(out)                                 # another run may have ended meanwhile, with this folder
        if not (self._folder / RUN).exists() or not os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._folder / RUN)):
            raise ConfigError(busy)

    def _is_same(self, run: dict[str, Any]) -> bool:
        assert self._file is not None
        self._file.seek(0)
        try:
            found = self._file.read()
        except ValueError:
            return False
        if not found:                                    # new, or the machine stopped before it was written
            if any(entry.name != RUN for entry in self._folder.iterdir()):
                return False
            self._file.write(json.dumps(run))
            self._file.flush()
            os.fsync(self._file.fileno())
            return True
        try:
            return bool(json.loads(found) == json.loads(json.dumps(run)))
        except ValueError:
            return False

    def end(self) -> None:
        if self._file is not None:
            self._file.close()


class Tries:
    """The outputs of a search. One that was stopped goes on with those that are there."""

    def __init__(self, out: Path, run: dict[str, Any]) -> None:
        self.out, self.folder = out, out.with_name(f"{out.name}.search")
        if out.exists() and (self.folder / CHOSEN).exists():
            self.remove()                                # killed after the rename
        require_new(out)
        self._claim = Claim(self.folder, run, out)

    def chosen(self) -> tuple[Path, dict[str, Any]] | None:
        """The output that an earlier start has chosen, and its card."""
        with suppress(OSError):
            folder = self.folder / (self.folder / CHOSEN).read_text()
            found = find_card(folder) if folder != self.folder else None
            if found is not None and found.matches:
                return folder, found.card
        return None

    def choose(self, folder: Path) -> None:
        with (self.folder / CHOSEN).open("w") as file:
            file.write(folder.name)
            file.flush()
            os.fsync(file.fileno())

    def place(self, recipe: dict[str, Any]) -> tuple[Path, dict[str, Any] | None]:
        """Where to make the output of this recipe; with its card, where it is complete. Folders tell by their recipes what they
        are: sums in another order, as with more threads, may choose others."""
        number, wanted = 1, json.loads(json.dumps(recipe))
        while (folder := self.folder / f"try{number}").exists():
            found = find_card(folder)
            if found is not None and found.matches and found.card["recipe"] == wanted:
                return folder, found.card
            number += 1
        part = folder.with_name(f"{folder.name}.part")
        try:
            begun = json.loads((part / RUN).read_text())["recipe"]
        except (OSError, ValueError, KeyError):
            begun = None
        if begun != wanted:
            shutil.rmtree(part, ignore_errors=True)
        return folder, None

    def take(self, folder: Path) -> None:
        """This one appears under the output's name. The others go first: a run that is killed here leaves no gigabytes."""
        for other in self.folder.iterdir():
            if other.is_dir() and other != folder:
                shutil.rmtree(other, ignore_errors=True)
        _tidy(folder)
        folder.rename(self.out)
        self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def end(self) -> None:
        """What made no output is not in the way of the next command."""
        if not any(self.folder.glob("try*")):
            self.remove()
        self._claim.end()


class Workspace:
    def __init__(self, out: Path, run: dict[str, Any], blocks: int) -> None:
        """`run`: everything that decides the result."""
        self.out, self.blocks = out, blocks
        self.folder = out.with_name(f"{out.name}.part")
        require_new(out)
        self._claim = Claim(self.folder, run, out)

    def end(self) -> None:
        self._claim.end()

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
        part = self.folder / f"next-{ERRORS}"
        part.write_text(json.dumps(self.errors() | dict(errors)))
        os.replace(part, self.folder / ERRORS)

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
        """The output appears under its name. What only a run needs goes after that: a run that is killed here is complete."""
        for left in self.folder.glob("*.writing"):
            left.unlink()
        os.rename(self.folder, self.out)
        _tidy(self.out)


def _tidy(output: Path) -> None:
    for left in (output / RUN, *output.glob("*.writing")):
        left.unlink(missing_ok=True)
