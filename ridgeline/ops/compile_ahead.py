"""Compiles Triton kernels in parallel, before anything is launched.

    with CompileAhead(device) as ahead:
        with ahead.collecting():
            ...                      # launches of this thread only start to compile the variant they need
        ...                          # threads compile; this one may load weights
        ahead.finish()               # all are compiled and loaded

Triton compiles a variant of a kernel at its first launch, so a start without its cache compiles one after the other. Nine
tenths of that time are LLVM passes and other processes (the assembler, the C compiler of the launcher), which do not hold the
GIL: so threads suffice. They use Triton's AsyncCompileMode and leave the same entries in its cache. A variant that was not
collected is compiled at its launch, and logged.

Memory that a kernel would have written is undefined while launches are collected: the caller must not use it as an index. In
Triton's interpreter, and with a Triton without this mode, nothing is collected and everything is launched.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from ridgeline.ops import registry
from ridgeline.ops.direct_launch import collected_once
from ridgeline.process import platform
from ridgeline.process.log import get_logger

logger = get_logger("ops")

MOST_THREADS = 32
# Threads that generate code hold the GIL for tens of milliseconds, and the collecting thread needs it thousands of times: with
# sixteen compiling it took 10.5 s, and 2.1 s when nothing has to be compiled. So few threads compile during collection, and the
# switch interval is shorter than Python's 5 ms.
WHILE_COLLECTING, LET_IN = 2, 0.0002


_loading = threading.Lock()


def load_launchers_apart() -> bool:
    """Let threads load launchers; returns whether this Triton allows it.

    Launchers are extension modules of one name, and the interpreter keeps one object per name: loading another file of that name
    returns the same object with the functions of the new file. The first kernel would then have the launcher of the second. So
    the loaded module is copied under a lock.
    """
    from triton.runtime import build

    load: Callable[[str, str], Any] | None = getattr(build, "_load_module_from_path", None)
    if load is None:
        return False
    if getattr(load, "apart", False):
        return True

    def load_apart(name: str, path: str) -> SimpleNamespace:
        with _loading:
            return SimpleNamespace(**vars(load(name, path)))

    load_apart.apart = True  # type: ignore[attr-defined]
    build._load_module_from_path = load_apart
    return True


def triton_compiles_ahead() -> bool:
    """Whether this Triton has the functions used here, some of which are private."""
    function = getattr(registry.triton, "JITFunction", None)
    there = hasattr(registry.triton, "AsyncCompileMode") and all(hasattr(function, name) for name in ("run", "_do_compile"))
    if there and load_launchers_apart():
        return True
    logger.info("this Triton cannot compile ahead: each kernel is compiled when it is launched for the first time")
    return False


class _Builders(Executor):
    """A pool whose threads compile a kernel, and also make its launcher and load it onto the device."""

    def __init__(self, threads: int, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(threads, "compile", registry.compile_ahead_here)
        self._turns = threading.Semaphore(WHILE_COLLECTING)
        self._threads = threads
        self._device = device

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit(self._build, fn)

    def _build(self, compile_kernel: Callable[[], Any]) -> Any:
        try:
            with self._turns:
                kernel = compile_kernel()
                with torch.cuda.device(self._device):
                    _ = kernel.run                       # the property loads the kernel and makes its launcher
                return kernel
        except Exception as error:                       # its launch will compile it again and raise
            logger.warning("a kernel could not be compiled ahead: %s", error)
            raise

    def all_at_once(self) -> None:
        self._turns.release(max(1, self._threads - WHILE_COLLECTING))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class CompileAhead:
    def __init__(self, device: torch.device) -> None:
        possible = registry.HAS_TRITON and not registry.TRITON_INTERPRETED and device.type == "cuda"
        self.active = possible and triton_compiles_ahead()
        self._waiting: list[tuple[dict[str, Any], str, Any]] = []    # variants of a kernel, key of one, its future
        self._began = time.perf_counter()
        self._compiled = len(registry.COMPILED_AHEAD)
        self._threads = min(platform.cpu_count(), MOST_THREADS)
        self._builders = _Builders(self._threads, device) if self.active else None

    def __enter__(self) -> CompileAhead:
        return self

    def __exit__(self, *error: object) -> None:
        if self._builders is not None:
            self._builders.close()                       # after an error the rest is not needed
            for variants, key, kernel in self._waiting:
                if variants.get(key) is kernel:
                    del variants[key]                    # its launch compiles it

    @contextmanager
    def collecting(self) -> Iterator[None]:
        if self._builders is None:
            yield
            return
        registry.wait_for_triton_key()
        mode = registry.triton.AsyncCompileMode(self._builders, ignore_errors=True)
        jit_function, here = registry.triton.JITFunction, threading.get_ident()
        launch, compile_variant = jit_function.run, jit_function._do_compile

        def collect(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
            return launch(kernel, *args, warmup=warmup or threading.get_ident() == here, **kwargs)

        def remember(kernel: Any, key: str, signature: Any, device: int, *others: Any) -> Any:
            """Register the variant under its key now. Triton 3.6 would otherwise hash its source again at every launch."""
            found = compile_variant(kernel, key, signature, device, *others)
            if threading.get_ident() == here and found is not None:
                variants = kernel.device_caches[device][0]
                variants.setdefault(key, found)
                self._waiting.append((variants, key, found))
            return found

        mode.__enter__()
        jit_function.run, jit_function._do_compile = collect, remember
        usual = sys.getswitchinterval()
        sys.setswitchinterval(LET_IN)
        try:
            with collected_once():
                yield
        finally:
            sys.setswitchinterval(usual)
            jit_function.run, jit_function._do_compile = launch, compile_variant
            self._builders.all_at_once()
            mode.raw_futures = []                        # or leaving the mode would wait for them
            mode.__exit__(None, None, None)

    def finish(self) -> None:
        """Wait until all are compiled. A kernel that failed is compiled again at its launch."""
        if self._builders is None:
            return
        for variants, key, kernel in self._waiting:
            made = kernel.result(ignore_errors=True)
            if made is not None:
                variants[key] = made
        compiled = len(registry.COMPILED_AHEAD) - self._compiled
        if compiled:
            logger.info(
                "compiled %d kernels that were not in the kernel cache, %d at a time: %.1f s", compiled, self._threads,
                time.perf_counter() - self._began,
            )
