"""Builds and loads `native.c`, the float32 CPU kernels.

It is compiled for this machine once, by `make install`, by `ridgeline build`, or when an engine on a CPU first needs it, into the
cache, under a name made of the source, the compiler's flags and the processor's features: a changed source or another machine
never uses an old build. Without a C compiler every op runs its definition in torch, which is slower.

The kernels use the OpenMP runtime that torch has loaded, so that there is one pool of threads and not two.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform as python_platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

from ridgeline.errors import ConfigError
from ridgeline.ops.registry import Site
from ridgeline.process import integrity, platform
from ridgeline.process.log import get_logger

logger = get_logger("ops")

SOURCE = Path(__file__).with_name("native.c")
# No flag that reorders additions or ignores NaN: a broken row must show, and a row alone equals the row in a batch.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")

_INT, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_SIGNATURES = {
    "ridgeline_rms_norm": [_POINTER] * 5 + [_INT] * 5 + [_FLOAT] * 2,
    "ridgeline_rotary": [_POINTER] * 4 + [_INT] * 7,
    "ridgeline_gated_activation": [_POINTER] * 2 + [_INT] * 4,
    "ridgeline_kv_write": [_POINTER] * 5 + [_INT] * 4,
    "ridgeline_linear_row": [_POINTER] * 4 + [_INT] * 2,
    "ridgeline_block_linear": [_POINTER] * 4 + [_INT] * 4,
    "ridgeline_decode_attention": [_POINTER] * 7 + [_INT] * 10 + [_FLOAT] * 2,
    "ridgeline_prefill_attention": [_POINTER] * 7 + [_INT] * 9 + [_FLOAT] * 2,
}
SPLIT = 512                          # as in native.c


def path() -> Path:
    """Where this machine's build of this source is, if there is one."""
    features = " ".join([python_platform.machine(), *sorted(platform.cpu_flags()), *FLAGS])
    key = hashlib.sha256(SOURCE.read_bytes() + features.encode()).hexdigest()[:16]
    return platform.cache_dir() / f"native-{key}.so"


def build() -> Path:
    """Compile, unless it is done already."""
    target = path()
    if target.is_file() and _is_ours(target):
        return target
    compiler = os.environ.get("CC", "cc")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        compiled, linked = Path(folder) / "native.o", Path(folder) / "native.so"
        # Linked without -fopenmp: its symbols are found in torch's runtime when the library is loaded.
        for command in (
            [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(compiled)],
            [compiler, "-shared", str(compiled), "-o", str(linked), "-lm"],
        ):
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                raise ConfigError(f"no C compiler: {compiler} cannot be run ({error.strerror}); set CC") from None
            if done.returncode:
                raise ConfigError(f"{compiler} failed on {SOURCE.name}: {(done.stderr.strip() or '?').splitlines()[0]}")
        note = Path(folder) / "note"
        note.write_text(integrity.sha256_of(linked))
        os.replace(note, _note_of(target))               # the note first: a build without one is not loaded
        os.replace(linked, target)
    return target


def _note_of(built: Path) -> Path:
    """The file with the checksum of a build."""
    return built.with_suffix(".sha256")


def _is_ours(built: Path) -> bool:
    """Whether a build is what `build` has made. It is code: another's must not be run."""
    try:
        note = _note_of(built)
        return integrity.is_own(built) and integrity.is_own(note) and note.read_text() == integrity.sha256_of(built)
    except OSError:
        return False


@functools.cache
def library() -> Any:
    """The kernels, compiled now if they are not yet; None if they cannot be compiled or loaded, which is logged once."""
    try:
        if not path().is_file():
            logger.info("compiling the CPU kernels for this machine (once; a few seconds)")
        elif not _is_ours(path()):
            logger.warning("%s is not as it was built, and is not used: it is compiled anew", path())
        built = build()
        for runtime in _openmp_runtimes():
            ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(built))
    except (OSError, ConfigError) as error:
        logger.warning("the CPU kernels cannot be used, and decoding is slower: %s", error)
        return None
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


def _openmp_runtimes() -> list[str]:
    """The OpenMP runtimes that torch has loaded into this process."""
    with open("/proc/self/maps") as maps:
        mapped = {line.split()[-1] for line in maps if "/" in line}
    return [file for file in mapped if Path(file).name.startswith(("libgomp", "libomp", "libiomp5"))]


def supports(site: Site) -> bool:
    return site.device == "cpu" and site.dtype == torch.float32 and library() is not None
