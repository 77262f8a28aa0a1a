"""Names of models: what `Qwen/Qwen3-8B` or a URL means, where the local Hugging Face cache keeps it, or how to fetch it.

Reads the cache's directories only: no network, and no import of huggingface_hub (cli/models/cmd_pull.py downloads).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import ModelError
from ridgeline.process import embedded

_HOSTS = ("https://huggingface.co/", "http://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_OLLAMA = re.compile(r"[a-z][a-z0-9._-]*(:[a-z0-9._-]+)?")
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
    except OSError:
        pass
    found = [path for path in (folder / "snapshots").glob("*") if path.is_dir()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def matching_gguf(files: list[str], tag: str) -> list[str]:
    """The GGUF files that a tag means: its own name, or those with this quantisation in their name; all without a tag."""
    ggufs = sorted(name for name in files if name.endswith(".gguf") and "mmproj" not in name)
    if tag in ggufs:
        return [tag]
    parts = re.compile(rf"(^|[./-]){re.escape(tag)}([./-]|$)", re.IGNORECASE)
    return [name for name in ggufs if not tag or parts.search(name)]


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
    return folder / found[0] if found else None


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
