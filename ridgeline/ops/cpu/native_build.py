"""Compiles the sources under `src/` into one shared object: every kernel file once per level of instructions.

`pip install` runs this through setup.py, before anything of the package can be imported: only the standard library here.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).with_name("src")
# All others are compiled for every level.
ONCE = ("pool.c", "program.c", "relay.c", "gather.c", "grams.c", "drafted.c", "decodes.c", "shares.c")
# No flag that reorders additions or ignores NaN: a broken row must show, and a row alone equals the row in a batch.
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")


HOST = ("drafted.c", "decodes.c", "shares.c")    # choices, those of numpy to the last bit: no additions fused with products
PRODUCTS = ("product.c",)            # unrolled by hand: -O3 takes minutes on it and gains nothing
_SCRATCH = "compiling-"              # how the folders begin that are compiled in
_LEFT_OVER_SECONDS = 60.0            # the age of one that is not locked, at which its process is gone


class Level(NamedTuple):
    name: str
    flags: tuple[str, ...]           # of the compiler
    needs: frozenset[str]            # of the processor, as Linux names them
    falls_to: str = ""               # the level whose functions it uses but for those of PRODUCTS


_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_HAS_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_HAS_AVX512 = _HAS_AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
# The best level first; every processor of the architecture has the last one.
LEVELS = {
    "x86_64": (
        Level("vnni", (*_AVX512, "-mavx512vnni"), _HAS_AVX512 | {"avx512_vnni"}, "avx512"),
        Level("avx512", _AVX512, _HAS_AVX512),
        Level("avx2", _AVX2, _HAS_AVX2),
        Level("base", (), frozenset()),
    ),
    "aarch64": (
        Level("i8mm", ("-march=armv8.2-a+fp16+dotprod+i8mm",), frozenset({"asimdhp", "asimddp", "i8mm"})),
        Level("dot", ("-march=armv8.2-a+fp16+dotprod",), frozenset({"asimdhp", "asimddp"})),
        Level("base", ("-march=armv8-a",), frozenset()),
    ),
}


class BuildError(Exception):
    """There is no compiler, or it failed."""


def levels() -> tuple[Level, ...]:
    """Of this machine's architecture."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    return LEVELS.get(machine, (Level("base", (), frozenset()),))


def sources() -> list[Path]:
    return sorted(path for path in SOURCES.rglob("*") if path.suffix in (".c", ".h"))


def file_name() -> str:
    """Made of sources, flags and architecture: changed sources never use an old build. Not `.so`: Python would take it for a
    module of the package."""
    # Without the sets of features: their order differs from process to process.
    flags = FLAGS, HOST, PRODUCTS, [level[:2] for level in levels()]
    key = hashlib.sha256(repr((platform.machine(), flags)).encode())
    for path in sources():
        key.update(path.relative_to(SOURCES).as_posix().encode() + path.read_bytes())
    return f"native-{key.hexdigest()[:16]}.native"


def compile_into(target: Path) -> None:
    """Write the shared object, whole or not at all."""
    compiler = os.environ.get("CC", "cc")
    _check(compiler)
    _remove_left_over(target.parent)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=target.parent) as scratch, _opened(folder := Path(scratch)) as place:
        with suppress(OSError):                          # of a system without such locks
            fcntl.flock(place, fcntl.LOCK_EX)
        known = [level for level in levels() if _knows(compiler, level, folder)]
        jobs: list[tuple[Path, Level | None]] = [
            (source, level) for source in sources() if source.suffix == ".c"
            for level in ((None,) if source.name in ONCE else known)
            if level is None or not level.falls_to or source.name in PRODUCTS
        ]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
            objects = list(threads.map(lambda job: _compile(compiler, job[0], job[1], folder), jobs))
        linked = folder / "native.so"
        # Linked without -fopenmp: its symbols are found in torch's runtime when the library is loaded.
        _run(compiler, ["-shared", *map(str, objects), "-o", str(linked), "-lm", "-lpthread"], "the objects")
        os.replace(linked, target)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """For a lock, which the system gives back however a process ends."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield place
    finally:
        os.close(place)


def _remove_left_over(cache: Path) -> None:
    """Scratch folders of compilations that were killed: a start that is stopped ends its engine at once."""
    for folder in cache.glob(f"{_SCRATCH}*"):
        with suppress(OSError), _opened(folder) as place:
            if time.time() - os.fstat(place).st_mtime > _LEFT_OVER_SECONDS:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)        # BlockingIOError: it is in use
                shutil.rmtree(folder)


def _compile(compiler: str, source: Path, level: Level | None, folder: Path) -> Path:
    made = folder / f"{'-'.join(source.relative_to(SOURCES).with_suffix('').parts)}-{level.name if level else 'once'}.o"
    own = [*level.flags, f"-DLEVEL={level.name}"] if level else []
    if source.name in PRODUCTS:
        own.append("-O2")
    if source.name in HOST:
        own.append("-ffp-contract=off")
    _run(compiler, [*FLAGS, *own, "-c", str(source), "-o", str(made)], source.name)
    return made


def _check(compiler: str) -> None:
    try:
        subprocess.run([compiler, "--version"], capture_output=True, check=False)
    except OSError as error:
        raise BuildError(f"no C compiler: {compiler} cannot be run ({error.strerror}); set CC") from None


def _knows(compiler: str, level: Level, folder: Path) -> bool:
    """Older compilers do not know the newest instructions: such a level is left out, and its processors use the next one."""
    if not level.flags:
        return True
    empty = folder / "empty.c"
    empty.touch()
    command = [compiler, *level.flags, "-c", str(empty), "-o", str(folder / "empty.o")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(compiler: str, arguments: list[str], what: str) -> None:
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr.strip() or "?").splitlines()
        reason = next((line for line in lines if "error" in line), lines[0])     # an assembler first says that it has messages
        raise BuildError(f"{compiler} failed on {what}: {reason}")
