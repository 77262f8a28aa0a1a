"""`ridgeline list`: the models on this machine, in the Hugging Face cache and our own."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ridgeline.process import embedded
from ridgeline.process.hub_cache import cached_repos, gguf_groups, missing_parts, snapshot


@dataclass(frozen=True, slots=True)
class LocalModel:
    name: str                        # for `ridgeline serve NAME`
    path: Path
    size: int                        # bytes
    modified: float                  # seconds since the epoch
    note: str = ""


def local_models() -> list[LocalModel]:
    found = []
    own = embedded.find()
    if own is not None:
        found.append(LocalModel(embedded.NAME, own, own.stat().st_size, own.stat().st_mtime, "the embedded model"))
    for repo in cached_repos():
        folder = snapshot(repo)
        if folder is None:
            continue
        files = _files(folder)
        if (folder / "config.json").is_file():
            partial = "" if any(name.endswith(".safetensors") for name in files) else "no weights"
            modified = max((stat.st_mtime for stat in files.values()), default=0.0)
            found.append(LocalModel(repo, folder, sum(stat.st_size for stat in files.values()), modified, partial))
        else:
            for first, parts in gguf_groups(files).items():
                stats = [files[part] for part in parts]
                lacks = len(missing_parts(parts))
                note = f"{lacks} of {len(parts) + lacks} parts are missing" if lacks else ""
                size, modified = sum(stat.st_size for stat in stats), max(stat.st_mtime for stat in stats)
                found.append(LocalModel(f"{repo}:{first}", folder / first, size, modified, note))
    return found


def _files(folder: Path) -> dict[str, os.stat_result]:
    """By name. A download moves and removes files meanwhile."""
    found = {}
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                found[path.relative_to(folder).as_posix()] = path.stat()
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> None:
    models = local_models()
    if not models:
        print("no model is on this machine yet; `ridgeline pull` fetches the embedded one", file=sys.stderr)
        return
    width = max(len(each.name) for each in models)
    for each in models:
        date = time.strftime("%Y-%m-%d", time.localtime(each.modified))
        print(f"{each.name:<{width}}  {each.size / 1e9:>7.2f} GB  {date}  {each.note}".rstrip())
