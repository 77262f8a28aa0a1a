"""Loads the native library of CPU kernels.

It is built at installation (`setup.py`) into this folder, or else by `ridgeline build`, or by the first engine on a CPU, into the
cache. Without a C compiler every op runs its definition in torch, which is slower.

One library serves every processor of an architecture: functions are taken from the best level of instructions that this one has.
The kernels use as many threads as torch does.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ridgeline.errors import ConfigError
from ridgeline.ops.cpu import native_build
from ridgeline.ops.registry import Site
from ridgeline.process import integrity, platform
from ridgeline.process.log import get_logger

logger = get_logger("ops")

_INT, _FLOAT, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_double, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "rms_norm": [_POINTER] * 5 + [_INT] * 5 + [_FLOAT] * 2,
    "gated_activation": [_POINTER] * 2 + [_INT] * 4,
    "soft_cap": [_POINTER] + [_INT] * 2 + [_FLOAT],
    "embedding": [_POINTER] * 3 + [_INT] * 2 + [_FLOAT],
    "greedy": [_POINTER] * 5 + [_INT] * 3,
    "draw": [_POINTER] * 11 + [_INT] * 3,
    "apply_mask": [_POINTER] * 4 + [_INT] * 4,
    "logprobs": [_POINTER] * 6 + [_INT] * 4,
    "rotary_write": [_POINTER] * 9 + [_INT] * 7 + [_FLOAT] * 2,
    "linear_row": [_POINTER] * 4 + [_INT] * 2,
    "packed_linear": [_POINTER, _INT] + [_POINTER] * 3 + [_INT] * 5,
    "decode_attention": [_POINTER] * 8 + [_INT] * 10 + [_FLOAT] * 2,
    "prefill_attention": [_POINTER] * 8 + [_INT] * 9 + [_FLOAT] * 2,
}
# Compiled once, not for every level.
_PLAIN: dict[str, tuple[list[Any], Any]] = {
    "relay_blocks": ([_POINTER] * 2 + [_INT] * 3, None),
    "relay_codes": ([_POINTER] * 4, None),
    "matrix_bytes": ([_POINTER], _INT),
    "scales_finite": ([_POINTER], _INT),
    "matrix_rows": ([_POINTER] * 3 + [_INT, _FLOAT], None),
    "run_program": ([_POINTER, _INT], None),                             # recording.py
    "ngram_drafts": ([_POINTER] * 6 + [_INT] * 4, None),                 # scheduler/drafts/ngram_table.py
    "suffix_drafts": ([_POINTER] * 6 + [_INT] * 5, None),                # scheduler/drafts/suffix.py
    "lay_out_guesses": ([_POINTER] * 6 + [_INT] * 6, _INT),              # runner/verify.py
    "settle_drafts": ([_POINTER] * 13 + [_INT] * 4, _INT),               # runner/runner.py
    "drafted_tokens": ([_POINTER] * 7 + [_INT] * 3, _INT),
    "draft_outcome": ([_POINTER] * 15 + [_INT] * 6 + [_DOUBLE], None),   # scheduler/drafts/acceptance.py
    "draft_chances": ([_POINTER] * 5 + [_INT] * 3 + [_DOUBLE] * 3, None),
    "send_drafts": ([_POINTER] * 9 + [_INT] * 4, _INT),
    "arrange_offers": ([_POINTER] * 13 + [_INT] * 8, _INT),              # scheduler/drafts/weighing.py
    "choose_drafts": ([_POINTER] * 8 + [_INT] * 6 + [_DOUBLE] * 4, _INT),
    "spread_rows": ([_POINTER] * 9 + [_INT] * 10, _INT),                 # runner/row_tables.py
    "decode_again": ([_POINTER] * 4 + [_INT] * 4, _INT),                 # scheduler/decodes.py
    "lay_drafts": ([_POINTER] * 5 + [_INT] * 4, _INT),
    "book_decodes": ([_POINTER] * 4 + [_INT] * 2, _INT),
    "take_in_decodes": ([_POINTER] * 15 + [_INT] * 6, _INT),
    "share_out": ([_POINTER] * 2 + [_INT] * 4, _INT),                    # ops/attention/split_kv.py
}
# They take microseconds, whatever the prompts, and keep Python's lock: another thread would not give it back as soon.
_SHORT = {
    "lay_out_guesses", "settle_drafts", "drafted_tokens", "draft_outcome", "draft_chances", "send_drafts", "arrange_offers",
    "choose_drafts", "decode_again", "lay_drafts", "book_decodes", "take_in_decodes", "share_out",
}
SPLIT = 64                          # as in step/decode_attention.c
WAIT_SECONDS = 600.0                 # for another process that compiles
MOST_TOP = 64                        # as in step/logits.c


def path() -> Path:
    """Where the build of these sources is, or would be made: in the package if it was built there, else in the cache."""
    prebuilt = Path(__file__).with_name(native_build.file_name())
    return prebuilt if prebuilt.is_file() else platform.cache_dir() / prebuilt.name


def build() -> Path:
    """Compile, unless it is done already."""
    return _built_in(path())


def _built_in(target: Path) -> Path:
    """Six servers that start at once on an empty cache compile once: the others wait for the first."""
    if target.is_file() and _is_ours(target):
        return target
    with _alone_in(target.parent):
        return target if target.is_file() and _is_ours(target) else _compiled(target)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """While no other process is, or after WAIT_SECONDS: one that stands still stops no other. The system gives the lock back
    however a process ends."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        ends = time.monotonic() + WAIT_SECONDS
        with suppress(OSError):                          # of a system without such locks
            while not _locked(place) and time.monotonic() < ends:
                time.sleep(0.1)
        yield
    finally:
        os.close(place)


def _locked(place: int) -> bool:
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compiled(target: Path) -> Path:
    scratch = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        native_build.compile_into(scratch)
        note = scratch.with_name(f"{scratch.name}.note")
        note.write_text(integrity.sha256_of(scratch))
        os.replace(note, _note_of(target))               # the note first: a build without one is not loaded
        os.replace(scratch, target)
    except native_build.BuildError as error:
        raise ConfigError(str(error)) from None
    finally:
        scratch.unlink(missing_ok=True)
    return target


def _note_of(built: Path) -> Path:
    """The file with the checksum of a build."""
    return built.with_suffix(".sha256")


def _is_ours(built: Path) -> bool:
    """Whether a build in the cache is what `build` has made. It is code: another's must not be run. One in the package is as
    good as the package."""
    if built.parent == Path(__file__).parent:
        return True
    try:
        note = _note_of(built)
        return integrity.is_own(built) and integrity.is_own(note) and note.read_text() == integrity.sha256_of(built)
    except OSError:
        return False


@functools.cache
def library() -> Any:
    """The kernels by name, compiled now if they are not yet; None if they cannot be compiled or loaded, which is logged once."""
    try:
        if not path().is_file():
            logger.info("compiling the CPU kernels for this machine (once; up to a minute)")
        elif not _is_ours(path()):
            logger.warning("%s is not as it was built, and is not used: it is compiled anew", path())
        built = build()
        try:
            return load(built, level())
        except OSError:
            if built.parent != Path(__file__).parent:
                raise
            logger.info("the CPU kernels that came with the package cannot be loaded; compiling them for this machine (once)")
            return load(_built_in(platform.cache_dir() / built.name), level())
    except (OSError, ConfigError) as error:
        logger.warning("the CPU kernels cannot be used, and decoding is slower: %s", error)
        return None


def if_built() -> Any:
    """The same, but nothing is compiled for it: for what an engine on a GPU can do without."""
    with suppress(ConfigError):                          # of the cache directory, which `library` tells where it is needed
        return library() if path().is_file() else None
    return None


def level() -> str:
    """The best level of instructions that this processor has."""
    flags = platform.cpu_flags()
    return next(level.name for level in native_build.levels() if level.needs <= flags)


def load(built: Path, level: str) -> SimpleNamespace:
    """A build's functions of one level."""
    for runtime in _openmp_runtimes():
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    loaded, short = ctypes.CDLL(str(built)), ctypes.PyDLL(str(built))
    names = [each.name for each in native_build.levels()]
    lower = names[names.index(level) :]                  # a level may have some functions only, or be left out of the build
    found = SimpleNamespace()
    for name, arguments in _SIGNATURES.items():
        function = next(loaded[own] for each in lower if hasattr(loaded, own := f"ridgeline_{name}_{each}"))
        function.argtypes, function.restype = arguments, None
        setattr(found, name, function)
    for name, (types, result) in _PLAIN.items():
        function = (short if name in _SHORT else loaded)[f"ridgeline_{name}"]
        function.argtypes, function.restype = types, result
        setattr(found, name, function)
    return found


def _openmp_runtimes() -> list[str]:
    """The OpenMP runtimes that torch has loaded into this process."""
    with open("/proc/self/maps") as maps:
        mapped = dict.fromkeys(line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "/" in line)
    return [file for file in mapped if Path(file).name.startswith(("libgomp", "libomp", "libiomp5"))]


def supports(site: Site) -> bool:
    return site.device == "cpu" and site.dtype == torch.float32 and library() is not None
