"""A process that compiles Triton kernels for its parent and leaves them in Triton's cache; the parent's side is CompileChild.

Triton generates code in Python, so threads that compile wait for each other's interpreter lock; processes do not. A job names a
kernel by its module, with the types and constants of one variant. The process opens no GPU. It ends when its parent closes the
pipe or dies.
"""

from __future__ import annotations

import ast
import importlib
import os
import select
import subprocess
from typing import Any

from ridgeline.process.children import child_environment, start_child
from ridgeline.process.framed_child import read_frame, write_frame

_READY = b"\0ready to compile\n"      # no text that a library prints while it is imported


class CompileChild:
    """One process; used by one thread at a time. It imports torch and Triton for seconds: `ready` says when it has."""

    def __init__(self) -> None:
        environment = {**child_environment(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = start_child(
            __name__, environment=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        self._is_ready = False

    def ready(self) -> bool:
        if not self._is_ready:
            said = self._answers()
            look = select.poll()                         # files may have larger numbers than `select` knows
            look.register(said, select.POLLIN)
            self._is_ready = bool(look.poll(0)) and said.read(len(_READY)) == _READY         # a pipe keeps such a write whole
        return self._is_ready

    def ended(self) -> bool:
        return self._process.poll() is not None

    def compile(self, source: Any, target: Any, options: Any, key: str) -> str:
        """What Triton's `compile` gets, and the key of its library. Empty when the kernel is in the cache; otherwise why not."""
        try:
            job = _spelled((
                source.fn.__module__, source.fn.__name__, type(source).__module__, type(source).__name__, dict(source.signature),
                dict(source.constants), dict(source.attrs), (target.backend, target.arch, target.warp_size),
                dict(options.__dict__), key,
            ))
            wanted = self._process.stdin
            assert wanted is not None
            write_frame(wanted, job)
            answer = read_frame(self._answers())
        except Exception as error:                       # a constant that cannot be sent, a process that died
            return f"{type(error).__name__}: {error}"
        return "the process has ended" if answer is None else answer.decode()

    def stop(self) -> None:
        self._process.kill()                             # what it has not finished is in no cache

    def close(self) -> None:
        self.stop()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _answers(self) -> Any:
        assert self._process.stdout is not None
        return self._process.stdout


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
    answers.write(_READY)
    while (job := read_frame(wanted)) is not None:
        try:
            answer = _compiled(job)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        write_frame(answers, answer.encode())


if __name__ == "__main__":
    main()
