"""Processes that compile Triton kernels for their parent and leave them in Triton's cache; the parent's side is CompileChild.

Triton generates code in Python, so threads that compile wait for each other's interpreter lock; processes do not. A job names a
kernel by its module, with the types and constants of one variant. One process imports torch and Triton, and the others are
copies of it (process/cold/fork_server.py). None opens a GPU.
"""

from __future__ import annotations

import ast
import importlib
import sys
from contextlib import suppress
from typing import Any

from ridgeline.process.cold.fork_server import Worker, serve

MOST_SECONDS = 600.0                 # for one kernel, which takes seconds; a start must not wait for a process that hangs
KERNELS = "ridgeline.models.decoder" # imports all modules that have some, or nearly


class CompileChild:
    """One process; used by one thread at a time. `ready` says when it has been copied."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.ready = worker.ready

    def ended(self) -> bool:
        return not self._worker.alive

    def compile(self, source: Any, target: Any, options: Any, key: str) -> str:
        """What Triton's `compile` gets, and the key of its library. Empty when the kernel is in the cache; otherwise why not."""
        try:
            job = _spelled((
                source.fn.__module__, source.fn.__name__, type(source).__module__, type(source).__name__, dict(source.signature),
                dict(source.constants), dict(source.attrs), (target.backend, target.arch, target.warp_size),
                dict(options.__dict__), key,
            ))
            return self._worker.ask(job, MOST_SECONDS).decode()
        except Exception as error:                       # a constant that cannot be sent, a process that died, was stopped, hangs
            return f"{type(error).__name__}: {error}"


def _spelled(job: tuple[Any, ...]) -> bytes:
    """As Python's literals. ValueError: something of it is none."""
    text = repr(job)
    if ast.literal_eval(text) != job:
        raise ValueError("a variant of a kernel has a constant that is no literal")
    return text.encode()


# ── the processes themselves ─────────────────────────────────────────────────────────────────────────────────────────


def _prepare() -> None:
    torch = importlib.import_module("torch")
    # Kernels are defined where torch sees a GPU. This process has none, and needs none.
    torch.cuda.is_available = lambda: True
    # Hashing Triton's library takes a second, and the parent does it; a job brings the result.
    cache: Any = importlib.import_module("triton.runtime.cache")
    cache.triton_key = str
    importlib.import_module("triton.experimental.gluon")
    with suppress(Exception):                            # what cannot be imported here is imported by a job, or fails there
        importlib.import_module(KERNELS)
        importlib.import_module("ridgeline.ops.registry").wait_for_triton_key()        # its thread


def _compiled(job: bytes) -> None:
    found = ast.literal_eval(job.decode())
    module, name, source_module, source_name, signature, constants, attributes, target, options, key = found
    triton = importlib.import_module("triton")
    triton.runtime.cache.triton_key = lambda: key
    kernel = getattr(importlib.import_module(module), name)
    source = getattr(importlib.import_module(source_module), source_name)(kernel, signature, constants, attributes)
    target = triton.backends.compiler.GPUTarget(*target)
    made = triton.compile(source, target=target, options=options)
    with suppress(Exception):                            # or the parent builds it, as it does for other kinds of devices
        _build_launcher(source, made.metadata)


def _build_launcher(source: Any, metadata: Any) -> None:
    """A launcher is a library in the same cache, made with the C compiler. Triton 3.7 has one for all kernels, in the driver."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if hasattr(driver, "make_launcher"):
        driver.CudaLauncher(source, metadata)


def _build_driver() -> None:
    """Triton's library for the driver, in the same cache: the parent needs it for its first launch."""
    with suppress(Exception):                            # no C compiler, another Triton: the parent builds it, or says why not
        importlib.import_module("triton.backends.nvidia.driver").CudaUtils()


def answer(job: bytes) -> bytes:
    try:
        _compiled(job)
        return b""
    except BaseException as error:
        return f"{type(error).__name__}: {error}".encode()


if __name__ == "__main__":
    serve([int(number) for number in sys.argv[1:]], _prepare, answer, _build_driver)
