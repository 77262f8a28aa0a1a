"""What a start without caches begins beside its imports: the first on a machine, or in a new container.

    cold_start.begin(gpu=True)       # in the first lines of an engine's process; looks at two folders if there is nothing to do
    head_start.begin(gpu=True)       # ...

If torch has no byte code, and Python may write some, processes compile it ahead of the imports (byte_code.py). If the cache of
kernels is empty, the server of compilers is started (ops/compile_child.py): it imports while this process does, and its workers
are ready when the first kernel is missed.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from ridgeline.errors import ConfigError
from ridgeline.process import head_start, platform
from ridgeline.process.children import child_environment, start_child
from ridgeline.process.cold.fork_server import ForkServer
from ridgeline.process.cold.kernel_cache import VARIABLE, choose_kernel_cache

FEWEST_CORES = 4                     # on fewer, processes beside the imports only take their time
A_WARM_CACHE = 8                     # entries of Triton's cache; a start of a model leaves a hundred
COMPILERS = "ridgeline.ops.compile_child"
MOST_COMPILERS = 16                  # processes; also of a rank
COMPILER_BYTES = 500e6               # that one may take; half of the memory that is free is for them

_compilers: ForkServer | None = None


def begin(gpu: bool) -> None:
    global _compilers
    if gpu and head_start.has_driver():
        choose_kernel_cache()                            # the compilers get it with their environment
    cores = platform.granted_cores()
    if cores < FEWEST_CORES:
        return
    with suppress(OSError, RuntimeError):                # no more processes, files or threads: the start does without
        if not has_byte_code():
            writing = start_child("ridgeline.process.cold.byte_code", str(os.getpid()), stderr=subprocess.DEVNULL)
            # It may end before this process is ready or after; until it is waited for, it is in the table of processes.
            threading.Thread(target=writing.wait, name="byte-code", daemon=True).start()
        if gpu and not has_kernels() and head_start.has_driver() and importlib.util.find_spec("triton") is not None:
            share = max(1, cores // platform.engines_here())
            count = min(share, MOST_COMPILERS, int(platform.available_memory() / 2 / COMPILER_BYTES))
            _compilers = compilers(count) if count else None


def compilers(count: int) -> ForkServer:
    """A server of `count` of them. OSError if it cannot be started."""
    environment = {**child_environment(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return ForkServer(COMPILERS, count, environment)


def take_compilers() -> ForkServer | None:
    """The server that was started; it is the caller's to end."""
    global _compilers
    taken, _compilers = _compilers, None
    return taken


def has_byte_code() -> bool:
    """Also where Python may write none, or cannot."""
    spec = importlib.util.find_spec("torch")
    if sys.dont_write_bytecode or spec is None or spec.origin is None:
        return True
    cached = Path(importlib.util.cache_from_source(spec.origin))
    folder = next(each for each in cached.parents if each.exists())
    return cached.exists() or not os.access(folder, os.W_OK)


def kernel_folder() -> Path:
    """Triton's cache. ConfigError if there is no folder for it."""
    return Path(os.environ.get(VARIABLE) or platform.cache_dir() / "triton")


def has_kernels() -> bool:
    try:
        with os.scandir(kernel_folder()) as entries:
            return len(list(itertools.islice(entries, A_WARM_CACHE))) == A_WARM_CACHE
    except ConfigError:
        return True                                      # whatever is wrong is said later
    except OSError:
        return False
