"""Compiles Triton kernels in parallel, before anything is launched.

    with CompileAhead(device) as ahead:
        with ahead.collecting():
            ...                      # launches of this thread only start to compile the variant they need
        ...                          # threads compile; this one may load weights
        ahead.finish()               # all are compiled and loaded

Triton compiles a variant of a kernel at its first launch, so a start without its cache compiles one after the other. Threads
look into the cache and load what is there, by Triton's AsyncCompileMode. Each has a process for what is not (compile_child.py),
since Triton's code generation holds the GIL; it compiles itself if that fails, or takes too long to start. A variant that was not
collected is compiled at its launch, and logged.

Memory that a kernel would have written is undefined while launches are collected: the caller must not use it as an index. In
Triton's interpreter, and with a Triton without this mode, nothing is collected and everything is launched.
"""

from __future__ import annotations

import importlib
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
from ridgeline.ops.compile_child import CompileChild
from ridgeline.ops.direct_launch import collected_once
from ridgeline.process import platform
from ridgeline.process.cold import cold_start
from ridgeline.process.cold.cold_start import COMPILER_BYTES, MOST_COMPILERS
from ridgeline.process.cold.fork_server import ForkServer
from ridgeline.process.log import get_logger

logger = get_logger("ops")

PATIENCE = 6.0                       # seconds from the processes' start; a thread that does not wait holds the GIL meanwhile
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


class _NotInCache(Exception):
    """Triton's `compile` is about to generate code."""

    def __init__(self, source: Any, target: Any, options: Any) -> None:
        super().__init__(source.name)
        self.job = (source, target, options)


_thread = threading.local()


def _stop_at_a_miss() -> None:
    """Threads that ask for it get _NotInCache where a kernel is not in the cache. Only Triton knows its keys."""
    compiler = importlib.import_module("triton.compiler.compiler")
    gluon = importlib.import_module("triton.experimental.gluon._runtime")
    for kind in (compiler.ASTSource, gluon.GluonASTSource):
        generate = kind.make_ir
        if getattr(generate, "stops", False):
            continue

        def make_ir(source: Any, target: Any, options: Any, *others: Any, generate: Any = generate) -> Any:
            if getattr(_thread, "stops", False):
                raise _NotInCache(source, target, options)
            return generate(source, target, options, *others)

        make_ir.stops = True  # type: ignore[attr-defined]
        kind.make_ir = make_ir


class _Builders(Executor):
    """A pool whose threads get a kernel compiled, make its launcher, and load it onto the device."""

    def __init__(self, threads: int, device: torch.device, ranks: int, server: ForkServer | None = None) -> None:
        """`server`: of processes; None where nothing was missing at the first look."""
        _stop_at_a_miss()
        self._pool = ThreadPoolExecutor(threads, "compile", registry.compile_ahead_here)
        self._turns = threading.Semaphore(WHILE_COLLECTING)
        self._threads = threads
        self._device = device
        self._room = int(platform.available_memory() / 2 / ranks / COMPILER_BYTES)      # processes that may be used
        self._children: list[CompileChild] = []
        self._server = server
        self._lock = threading.Lock()                    # of the four around it
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit(self._build, fn)

    def _build(self, compile_kernel: Callable[[], Any]) -> Any:
        try:
            try:
                _thread.stops = True
                with self._turns:
                    return self._loaded(compile_kernel)
            except _NotInCache as missing:
                _thread.stops = False
                return self._compiled(compile_kernel, missing)
        except Exception as error:                       # its launch will compile it again and raise
            logger.warning("a kernel could not be compiled ahead: %s", error)
            raise

    def _loaded(self, compile_kernel: Callable[[], Any]) -> Any:
        kernel = compile_kernel()
        with torch.cuda.device(self._device):
            _ = kernel.run                               # the property loads the kernel and makes its launcher
        return kernel

    def _compiled(self, compile_kernel: Callable[[], Any], missing: _NotInCache) -> Any:
        child = self._own_child()
        while child is not None and not child.ready():
            if child.ended():
                child = None
            elif time.monotonic() < self._patient_until():
                time.sleep(0.01)
            elif self._turns.acquire(timeout=0.05):
                try:
                    return self._loaded(compile_kernel)
                finally:
                    self._turns.release()
        if child is not None:
            wrong = child.compile(*missing.job, registry.triton.runtime.cache.triton_key())
            if wrong:
                logger.debug("%s was not compiled in a process of its own: %s", missing, wrong)
            else:
                registry.COMPILED_AHEAD.append(str(missing))
        if self._closed:                                 # the exit of this process waits for its threads
            raise RuntimeError("the start was broken off")
        with self._turns:
            return self._loaded(compile_kernel)

    def _own_child(self) -> CompileChild | None:
        """This thread's process, while there is room. Where the cache was not empty, the first miss starts them all."""
        if not hasattr(_thread, "child"):
            _thread.child = None
            with self._lock:
                if self._closed or len(self._children) >= self._room:
                    return None
                try:
                    if self._server is None:
                        self._server = cold_start.compilers(min(self._threads, self._room))
                    if (worker := self._server.worker()) is not None:
                        _thread.child = CompileChild(worker)
                        self._children.append(_thread.child)
                except OSError as error:                 # no more processes, or files
                    logger.debug("kernels are compiled in threads: %s", error)
        child: CompileChild | None = _thread.child
        return child

    def _patient_until(self) -> float:
        return self._server.began + PATIENCE if self._server is not None else 0.0

    def all_at_once(self) -> None:
        self._turns.release(max(1, self._threads - WHILE_COLLECTING))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            server = self._server
        if server is not None:
            server.end()


class CompileAhead:
    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        """`ranks`: how many compile on this machine at once."""
        possible = registry.HAS_TRITON and not registry.TRITON_INTERPRETED and device.type == "cuda"
        self.active = possible and triton_compiles_ahead()
        self._waiting: list[tuple[dict[str, Any], str, Any]] = []    # variants of a kernel, key of one, its future
        self._began = time.perf_counter()
        self._compiled = len(registry.COMPILED_AHEAD)
        self._threads = min(platform.rank_cores(ranks), MOST_COMPILERS)
        server = cold_start.take_compilers()
        self._builders = _Builders(self._threads, device, ranks, server) if self.active else None
        if server is not None and not self.active:
            server.end()

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
