"""A process that compiles Triton kernels for its parent and leaves them in Triton's cache; the parent's side is CompileChild.

Triton generates code in Python, so threads that compile wait for each other's interpreter lock; processes do not. A job names a
kernel by its module, with the types and constants of one variant. The process opens no GPU. It ends when its parent closes the
pipe or dies.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
from typing import Any

from ridgeline.process.children import child_environment
from ridgeline.process.framed_child import FramedChild, read_frame, write_frame

_READY = b"ready to compile"
MOST_SECONDS = 600.0                 # for one kernel, which takes seconds; a start must not wait for a process that hangs


class CompileChild:
    """One process; used by one thread at a time. It imports torch and Triton for seconds: `ready` says when it has."""

    def __init__(self) -> None:
        environment = {**child_environment(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._child = FramedChild(__name__, environment=environment, stderr=subprocess.DEVNULL)
        self._is_ready = False

    def ready(self) -> bool:
        self._is_ready = self._is_ready or self._child.unasked() == _READY
        return self._is_ready

    def ended(self) -> bool:
        return not self._child.alive

    def compile(self, source: Any, target: Any, options: Any, key: str) -> str:
        """What Triton's `compile` gets, and the key of its library. Empty when the kernel is in the cache; otherwise why not."""
        try:
            job = _spelled((
                source.fn.__module__, source.fn.__name__, type(source).__module__, type(source).__name__, dict(source.signature),
                dict(source.constants), dict(source.attrs), (target.backend, target.arch, target.warp_size),
                dict(options.__dict__), key,
            ))
            return self._child.ask(job, MOST_SECONDS).decode()
        except Exception as error:                       # a constant that cannot be sent, a process that died, was stopped, hangs
            return f"{type(error).__name__}: {error}"

    def stop(self) -> None:
        self._child.process.kill()                       # what it has not finished is in no cache

    def close(self) -> None:
        """Its pipes go with this object: the thread that uses them may be about to, and their numbers would be another file's."""
        self.stop()
        self._child.process.wait()


def _spelled(job: tuple[Any, ...]) -> bytes:
    """As Python's literals. ValueError: something of it is none."""
    text = repr(job)
    if ast.literal_eval(text) != job:
        raise ValueError("a variant of a kernel has a constant that is no literal")
    return text.encode()


def _compiled(job: bytes) -> str:
    found = ast.literal_eval(job.decode())
    module, name, source_module, source_name, signature, constants, attributes, target, options, key = found
    triton = importlib.import_module("triton")
    triton.runtime.cache.triton_key = lambda: key        # hashing Triton's library takes a second
    kernel = getattr(importlib.import_module(module), name)
    source = getattr(importlib.import_module(source_module), source_name)(kernel, signature, constants, attributes)
    triton.compile(source, target=triton.backends.compiler.GPUTarget(*target), options=options)
    return ""


def main() -> None:
    wanted, answers = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    os.dup2(2, 1)                                        # what a library prints must not be read as an answer
    torch = importlib.import_module("torch")
    importlib.import_module("triton.experimental.gluon")
    # Kernels are defined where torch sees a GPU. This process has none, and needs none.
    torch.cuda.is_available = lambda: True
    write_frame(answers, _READY)
    while (job := read_frame(wanted)) is not None:
        try:
            answer = _compiled(job)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        write_frame(answers, answer.encode())


if __name__ == "__main__":
    main()
