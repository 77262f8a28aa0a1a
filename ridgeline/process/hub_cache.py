"""Names of models: what `Qwen/Qwen3-8B` or a URL means, where the local Hugging Face cache keeps it, or how to fetch it.

Reads the cache's directories only: no network, and no import of huggingface_hub (cli/models/cmd_pull.py downloads).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import ModelError
from ridgeline.process import embedded

_HOSTS = ("https://huggingface.co/", "http://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_OLLAMA = re.compile(r"[a-z][a-z0-9._-]*(:[a-z0-9._-]+)?")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")       # of a file that llama-gguf-split has cut
_GIVE = "give a directory with config.json or a .gguf file"


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the hub, and a file in it: its name, or a part such as Q4_K_M; empty: the whole model."""

    repo: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.repo}:{self.file}" if self.file else self.repo


def hub_name(text: str) -> HubName | None:
    """From `org/name`, `org/name:Q4_K_M`, `hf.co/org/name` or a page's URL; None for anything else."""
    bare = text
    for host in _HOSTS:
        bare = bare.removeprefix(host)
    bare, _, tag = bare.partition(":")
    parts = bare.strip("/").split("/")
    if len(parts) > 4 and parts[2] in ("resolve", "blob"):               # …/resolve/main/FILE
        tag = "/".join(parts[4:])
    elif len(parts) > 2 and not (parts[2] == "tree" and text != bare):
        return None
    repo = "/".join(parts[:2])
    if not _REPO.fullmatch(repo) or (text == bare and bare.endswith(".gguf")) or text.startswith((".", "/", "~")):
        return None
    return HubName(repo, tag.partition("?")[0])


def cache_root() -> Path:
    """Where huggingface_hub keeps models, by the variables that it reads."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    return Path(home).expanduser() / "hub"


def repo_folder(repo: str) -> Path:
    return cache_root() / ("models--" + repo.replace("/", "--"))


def cached_repos() -> list[str]:
    """Every model repository of the cache, by name."""
    folders = cache_root().glob("models--*--*")
    return sorted(folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders if folder.is_dir())


def snapshot(repo: str) -> Path | None:
    """The directory of the newest revision in the cache: that of `main`, or the one written last."""
    folder = repo_folder(repo)
    try:
        main = folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        if main.is_dir():
            return main
    except (OSError, ValueError):                        # a file that was cut short, or holds no text
        pass
    found = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def gguf_groups(files: Iterable[str]) -> dict[str, list[str]]:
    """Name of a GGUF file -> the files of which it consists: itself, or the parts of a split file, whose first one names it."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in sorted(name for name in files if name.endswith(".gguf")):
        part = _PART.fullmatch(name)
        found.setdefault((part[1], part[3]) if part else (name, ""), []).append(name)
    return {parts[0]: parts for parts in found.values()}


def missing_parts(parts: list[str]) -> list[str]:
    """Of a split file, the names of those that are not among these."""
    part = _PART.fullmatch(parts[0])
    if part is None:
        return []
    held = set(parts)                                    # there may be 99,999
    return [name for number in range(1, int(part[3]) + 1) if (name := f"{part[1]}-{number:05}-of-{part[3]}.gguf") not in held]


def matching_gguf(files: Iterable[str], tag: str) -> dict[str, list[str]]:
    """The GGUF files that a tag means, as `gguf_groups` has them: by a name, or those with this quantisation in their name; all
    without a tag."""
    groups = {first: parts for first, parts in gguf_groups(files).items() if "mmproj" not in first}
    named = {first: parts for first, parts in groups.items() if tag in parts}
    words = re.compile(rf"(^|[./-]){re.escape(tag)}([./-]|$)", re.IGNORECASE)
    return named or {first: parts for first, parts in groups.items() if not tag or words.search(first)}


def find_cached(name: HubName) -> Path | None:
    """The model's directory or GGUF file in the cache; ModelError where the name could mean several files."""
    folder = snapshot(name.repo)
    if folder is None:
        return None
    if not name.file and (folder / "config.json").is_file():
        return folder
    found = matching_gguf([path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")], name.file)
    if len(found) > 1:
        raise ModelError(f"{name} has several files; give one of them: {', '.join(f'{name.repo}:{each}' for each in found)}")
    for first, parts in found.items():
        lacks = missing_parts(parts)
        if lacks:
            raise ModelError(f"{name}: {len(lacks)} of its {len(parts) + len(lacks)} parts are not on this machine, the first is "
                             f"{lacks[0]}: fetch them with `ridgeline pull {name.repo}:{first}`")
        return folder / first
    return None


def locate(model: str) -> Path:
    """A model's path: the path itself if it exists, or a name's place in the local cache. ModelError says how to fetch it."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model in (embedded.NAME, embedded.SHORT_NAME):
        return embedded.require()
    name = hub_name(model)
    found = find_cached(name) if name else None
    if found is None:
        raise ModelError(missing(model, name))
    return found


def missing(model: str, name: HubName | None) -> str:
    """Why there is no such model, and the command that fetches it."""
    if name is not None:
        download = f"hf download {name.repo}" + (f" {name.file}" if name.file.endswith(".gguf") else "")
        return (
            f"model {model} is not on this machine: fetch it with `ridgeline pull {name}` (or `{download}`), or {_GIVE}"
        )
    if "://" in model:
        return f"model {model} is a URL, and nothing is downloaded while serving: fetch the file first, then {_GIVE}"
    if _OLLAMA.fullmatch(model) and not model.endswith(".gguf"):
        return (
            f"model {model} does not exist; names of Ollama's library are not known here. Fetch a model of the Hugging Face hub "
            f"by its full name, such as `ridgeline pull Qwen/Qwen3-0.6B`, or {_GIVE}"
        )
    return f"model {model} does not exist: {_GIVE}"
