"""The op contract: one definition, several implementations, and the cases and costs that hold for all of them.

An `Op` is called like its reference function. It takes the first implementation that supports the call's site (device
type, dtype, and the last dimension of the first argument, which is the one shape fact that is fixed per model), and
remembers that choice, so that a call costs one dictionary lookup. The reference is always last and supports everything.
`set_kernels("reference")` switches every op to its definition, to bisect a fault.

This file knows no particular op, and nothing of models. A new kernel (Triton, native CPU) is one more `Implementation`
in its op's declaration.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from ridgeline.errors import ConfigError
from ridgeline.metrics import HAPPENED
from ridgeline.ops.direct_launch import direct
from ridgeline.process.cold.kernel_cache import choose_kernel_cache
from ridgeline.process.head_start import hash_triton
from ridgeline.process.log import get_logger
from ridgeline.sizes.op_costs import DTYPE_BYTES, Case, Cost

logger = get_logger("ops")

P = ParamSpec("P")
R = TypeVar("R")

# Importing triton takes half a second: only where its kernels can run, on a GPU or in its interpreter (tests).
TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None and (TRITON_INTERPRETED or torch.cuda.is_available())
if HAS_TRITON:
    choose_kernel_cache()                                # before triton looks for it
    import triton
    import triton.language as tl
    from triton.experimental import gluon
else:
    triton = tl = gluon = None

if HAS_TRITON and not TRITON_INTERPRETED:
    hash_triton()                                        # a process of our own has begun it before its imports


def wait_for_triton_key() -> None:
    """Before the first look into the cache."""
    if HAS_TRITON and not TRITON_INTERPRETED:
        hash_triton().join()


TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


COMPILED_AHEAD: list[str] = []       # kernels compiled before their first launch (ops/compile_ahead.py)
_thread = threading.local()


def compile_ahead_here() -> None:
    """Mark this thread: what it compiles is compiled ahead of its first launch."""
    _thread.ahead = True


def log_compilations() -> None:
    """Log every kernel that was not in the cache and was compiled at its launch."""

    def listener(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        name = getattr(src, "name", "a kernel")
        if cache_hit:
            return
        if getattr(_thread, "ahead", False):
            COMPILED_AHEAD.append(name)
            return
        HAPPENED["kernel_compile"] += 1
        logger.info("compiled %s, which was not in the kernel cache", name)

    if HAS_TRITON and hasattr(triton, "knobs"):
        triton.knobs.compilation.listener = listener


def triton_kernel(do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """`triton.jit`, or the bare function where there is no triton (nothing may call it there).

    Counts that change from step to step go into `do_not_specialize`: triton would otherwise compile anew whenever one
    becomes 1 or a multiple of 16, in the middle of serving.
    """

    def decorate(function: Callable[..., None]) -> Any:
        if not HAS_TRITON:
            return function
        return direct(triton.jit(function, do_not_specialize=list(do_not_specialize)))

    return decorate


def gluon_kernel(do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """`gluon.jit`, or the bare function where there is none: Triton's language for kernels with explicit layouts, barriers
    and copies. Triton's interpreter cannot run it."""

    def decorate(function: Callable[..., None]) -> Any:
        if not HAS_TRITON or TRITON_INTERPRETED:
            return function
        return direct(gluon.jit(function, do_not_specialize=list(do_not_specialize)))

    return decorate


@dataclass(frozen=True, slots=True)
class Site:
    """What an implementation decides by whether it supports a call."""

    device: str                      # "cpu", "cuda"
    dtype: torch.dtype
    width: int                       # the last dimension of the op's first argument


@dataclass(frozen=True, slots=True)
class Implementation:
    name: str                        # "triton", "native"
    function: Callable[..., Any]
    supports: Callable[[Site], bool]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a result may be from the float64 reference: |error| <= relative * |expected| + absolute."""

    relative: float
    absolute: float


REGISTRY: dict[str, Op[Any, Any]] = {}
_kernels = "auto"
_mark: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None = None


class Op(Generic[P, R]):
    """A named operation. Call it like its reference."""

    def __init__(
        self,
        name: str,
        reference: Callable[P, R],
        *,
        kernels: Iterable[Implementation] = (),
        cases: Sequence[Case] = (),
        cost: Callable[..., Cost],
        inputs: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]],
        tolerance: Mapping[str, Tolerance],
    ) -> None:
        """`kernels` are in order of preference. `cost(element_bytes=…, **case.sizes)` and
        `inputs(generator, dtype, device, **case.sizes) -> (args, kwargs)` both take a case's sizes by name.
        """
        self.name = name
        self.implementations = [*kernels, Implementation("reference", reference, lambda site: True)]
        self.cases = tuple(cases)
        self.cost = cost
        self.inputs = inputs
        self.tolerance = dict(tolerance)
        self._chosen: dict[tuple[bool, torch.dtype, int], Callable[P, R]] = {}
        REGISTRY[name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        first: Tensor = args[0]  # type: ignore[assignment]
        function = self._chosen.get((first.is_cpu, first.dtype, first.shape[-1]))
        if function is None:
            site = Site(first.device.type, first.dtype, first.shape[-1])
            function = self.choose(site).function
            if _mark is not None:
                function = _mark(self.name, function)
            self._chosen[first.is_cpu, first.dtype, first.shape[-1]] = function
        return function(*args, **kwargs)

    def choose(self, site: Site) -> Implementation:
        """The implementation that a call at this site runs."""
        if _kernels == "auto":
            for implementation in self.implementations:
                if implementation.supports(site):
                    return implementation
        return self.implementations[-1]

    def case_cost(self, case: Case, dtype: str) -> Cost:
        return self.cost(element_bytes=DTYPE_BYTES[dtype], **case.sizes)

    def forget(self) -> None:
        """Choose again at the next call."""
        self._chosen.clear()


def set_kernels(kernels: str) -> None:
    """"auto": the best implementation of every op; "reference": its definition in plain torch."""
    global _kernels
    if kernels not in ("auto", "reference"):
        raise ConfigError(f"kernels must be 'auto' or 'reference', got {kernels!r}")
    _kernels = kernels
    for op in REGISTRY.values():
        op.forget()


def kernels_are_used() -> bool:
    """False: every op runs by its definition."""
    return _kernels == "auto"


def set_nvtx(on: bool) -> None:
    """A range around every op, for a profiler. Off, it costs nothing."""
    set_mark(_nvtx_range if on else None)


def set_mark(mark: Callable[[str, Callable[..., Any]], Callable[..., Any]] | None) -> None:
    """Wrap every op's function from its next call on, by name; None: as they are."""
    global _mark
    _mark = mark
    for op in REGISTRY.values():
        op.forget()


def is_marked() -> bool:
    """Are ops wrapped by `set_mark`? Then each has to be called."""
    return _mark is not None


def _nvtx_range(name: str, function: Callable[P, R]) -> Callable[P, R]:
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        torch.cuda.nvtx.range_push(name)
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.nvtx.range_pop()

    return call
