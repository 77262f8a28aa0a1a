"""`ridgeline rm NAME`: deletes a fetched model from the cache."""

from __future__ import annotations

import argparse
import shutil

from ridgeline.errors import ModelError
from ridgeline.process import embedded, integrity, platform
from ridgeline.process.hub_cache import hub_name, matching_gguf, repo_folder, snapshot


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a model, by its name in `ridgeline list`")


def run(args: argparse.Namespace) -> None:
    print(f"removed {remove(args.name)}")


def remove(text: str) -> str:
    if text in (embedded.NAME, embedded.SHORT_NAME):
        file = platform.cache_dir() / embedded.FILE
        if not file.is_file():
            raise ModelError(f"{text} is not in {platform.cache_dir()}")
        file.unlink()
        integrity.record_of(file, platform.cache_dir()).unlink(missing_ok=True)
        return str(file)
    name = hub_name(text)
    folder = repo_folder(name.repo) if name else None
    if name is None or folder is None or not folder.is_dir():
        raise ModelError(f"{text or 'a model without a name'} is not in the cache; `ridgeline list` shows what is")
    if name.file:
        return _remove_file(name.repo, name.file)
    shutil.rmtree(folder)
    return str(folder)


def _remove_file(repo: str, tag: str) -> str:
    """One GGUF file with all of its parts: the link in the snapshot, and the blob behind it."""
    folder = snapshot(repo)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")] if folder else []
    found = matching_gguf(names, tag)
    if folder is None or len(found) != 1:
        raise ModelError(f"{repo}:{tag} means {len(found)} files of the cache; `ridgeline list` shows their names")
    first, parts = next(iter(found.items()))
    for link in (folder / part for part in parts):
        blob = link.resolve()
        link.unlink()
        if blob != link and repo_folder(repo).resolve() in blob.parents:
            blob.unlink(missing_ok=True)
    return str(folder / first)
