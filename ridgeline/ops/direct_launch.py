"""Launches of Triton kernels that cost the host little: a variant that Triton has chosen once is launched directly.

    kernel[grid](*tensors_and_numbers, CONSTANT=…, num_warps=…)

is what callers write, and the first launch of a variant is Triton's: it specialises, compiles, loads. What it chose is kept
under a key that holds everything its choice can depend on: dtypes, whether pointers are multiples of 16, whether numbers are 1
or multiples of 16, the constants. Later launches with that key go to the variant's C launcher. Triton would bind and specialise
each argument anew, and format the options as text, for each of a step's hundreds of launches.

Whatever is not plain here takes Triton's way: pointers that are not aligned, arguments of other types, kernels that want
scratch memory, launches that are only collected (compile_ahead.py), another Triton than 3.6.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_ALIGN = 15                          # the bits that are 0 in a pointer to a multiple of 16 bytes
_LEAST, _LARGEST = -(2**31), 2**31 - 1               # other integers are 64 bits wide in a kernel
_MOST_DESCRIPTORS = 8192             # TMA descriptors that are kept; a step of an 8B model has 200
_wanted = True
_collected: dict[int, set[Any]] = {} # threads whose launches are only collected: those that have been, by kernel and key


def set_direct(on: bool) -> None:
    """Off: every launch takes Triton's way, to compare."""
    global _wanted
    _wanted = on


@contextmanager
def collected_once() -> Iterator[None]:
    """Launches are only collected (compile_ahead.py): Triton sees the first of each key, and no launch is direct."""
    _collected[threading.get_ident()] = set()
    try:
        yield
    finally:
        del _collected[threading.get_ident()]


def direct(kernel: Any) -> Any:
    """The kernel, with `kernel[grid](…)` as above."""
    base: Any = type(kernel)
    kind = _class(base)
    if kind is not None:
        kernel.variants_by_key = {}
        kernel.readers = {}
        kernel.__class__ = kind
    return kernel


@functools.cache
def _class(base: Any) -> type | None:
    """None: this Triton's kernels have not the parts that are used here."""
    if not all(hasattr(base, name) for name in ("run", "__getitem__", "create_binder")):
        return None
    return type(f"Direct{base.__name__}", (base,), {"__getitem__": _bound})


def _bound(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    return functools.partial(_launch, kernel, grid)


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    kinds = tuple(map(type, args))
    reader = kernel.readers.get(kinds)
    if reader is None:
        reader = kernel.readers[kinds] = _reader(kernel, kinds)
    if not _wanted or reader is _unread:
        kernel.run(*args, grid=grid, warmup=False, **constants)
        return
    read, pointers, values = reader(*args)
    device = torch.cuda.current_device()
    key = (device, read, tuple(constants), tuple(constants.values()))
    variant = kernel.variants_by_key.get(key)
    if variant is None or variant is _SLOW or pointers & _ALIGN or _collected:
        _launch_by_triton(kernel, grid, args, constants, None if pointers & _ALIGN else key)
        return
    launch, fixed, metas, rest = variant
    if metas:
        values = _expanded(values, metas)
    x, y, z = (*grid, 1, 1)[:3]
    launch(x, y, z, torch._C._cuda_getCurrentRawStream(device), *fixed, *values, *rest)


def _launch_by_triton(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: dict[str, Any], key: Any
) -> None:
    """`key` is None where the next launch cannot be direct either."""
    seen = _collected.get(threading.get_ident())
    if seen is not None:
        if (id(kernel), key) not in seen or key is None:
            seen.add((id(kernel), key))
            kernel.run(*args, grid=grid, warmup=False, **constants)
        return
    compiled = kernel.run(*args, grid=grid, warmup=False, **constants)
    if key is not None and key not in kernel.variants_by_key:
        kernel.variants_by_key[key] = _variant(kernel, compiled, grid, args, constants)


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _unread(*args: Any) -> Any:
    """The reader of arguments that Triton is to read."""
    raise AssertionError("not to be called")


def _describes(kind: type) -> bool:
    """Is it one of Triton's TMA descriptors?"""
    return "block_shape" in getattr(kind, "__annotations__", {})


def _reader(kernel: Any, kinds: tuple[type, ...]) -> Callable[..., Any]:
    """A function of arguments of these types: (what a variant depends on, all pointers or-ed, the values to launch with)."""
    tensors: list[int] = []
    numbers: list[int] = []
    counts: list[int] = []
    tiles: list[int] = []
    for place, (kind, parameter) in enumerate(zip(kinds, kernel.params, strict=False)):
        if kind in (Tensor, nn.Parameter):
            tensors.append(place)
        elif _describes(kind):
            tiles.append(place)
        elif kind is int and not parameter.is_constexpr:
            (counts if parameter.do_not_specialize else numbers).append(place)
        elif kind is not float or parameter.is_constexpr:
            return _unread

    def read(*args: Any) -> tuple[Any, int, list[Any]]:
        values, pointers = list(args), 0
        key: list[Any] = []
        for place in tensors:
            tensor = args[place]
            values[place] = pointer = tensor.data_ptr()
            pointers |= pointer
            key.append(tensor.dtype)
        for place in numbers:
            number = args[place]
            key.append((_LEAST <= number <= _LARGEST, number == 1, not number & _ALIGN))
        for place in counts:
            key.append(_LEAST <= args[place] <= _LARGEST)
        for place in tiles:
            kept_as = getattr(args[place], "kept_as", None)
            pointers |= kept_as is None                  # made elsewhere: Triton's to read
            key.append(kept_as)
        return tuple(key), pointers, values

    return read


# ── variants ─────────────────────────────────────────────────────────────────────────────────────────────────────────

_SLOW = ("a variant that Triton launches",)


@functools.cache
def _knows_launchers() -> bool:
    """The order of a C launcher's arguments is Triton's own affair, and another in later versions."""
    return str(getattr(sys.modules.get("triton"), "__version__", "")).startswith("3.6.")


def _variant(
    kernel: Any, compiled: Any, grid: Any, args: tuple[Any, ...], constants: dict[str, Any]
) -> tuple[Any, ...]:
    """(C launcher, its arguments before the kernel's, descriptors' metadata by place, the constants)"""
    launcher: Any = getattr(compiled, "run", None)
    if not _knows_launchers() or not isinstance(grid, tuple):
        return _SLOW
    wanted = ("launch", "launch_pdl", "launch_cooperative_grid", "global_scratch_size", "profile_scratch_size")
    if not all(hasattr(launcher, name) for name in wanted):
        return _SLOW
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return _SLOW
    rest = []
    for parameter in kernel.params[len(args) :]:
        if not parameter.is_constexpr or (parameter.name not in constants and not parameter.has_default):
            return _SLOW
        rest.append(constants.get(parameter.name, parameter.default if parameter.has_default else None))
    launch, metas = launcher.launch, {}
    described = [place for place, arg in enumerate(args) if _describes(type(arg))]
    if described:
        inside = _inside(launch)
        if inside is None or len(inside[1]) != len(described):
            return _SLOW
        launch, metas = inside[0], dict(zip(described, inside[1], strict=True))
    fixed = (
        compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None, compiled.packed_metadata, None,
        None, None,
    )
    return launch, fixed, metas, tuple(rest)


def _inside(wrapper: Any) -> tuple[Any, list[Any]] | None:
    """Of the function that Triton wraps around a C launcher to encode descriptors: that launcher, and their metadata."""
    names, cells = getattr(wrapper, "__code__", None), getattr(wrapper, "__closure__", None)
    if names is None or cells is None:
        return None
    found = {name: cell.cell_contents for name, cell in zip(names.co_freevars, cells, strict=True)}
    if not {"launcher", "tensordesc_meta"} <= set(found) or None in found["tensordesc_meta"]:
        return None
    return found["launcher"], list(found["tensordesc_meta"])


def _expanded(values: list[Any], metas: dict[int, Any]) -> list[Any]:
    """Descriptors as the C launcher takes them: the encoded map, its shape, its strides."""
    whole: list[Any] = []
    for place, value in enumerate(values):
        if place in metas:
            if value.encoded is None:
                from triton.backends.nvidia.driver import make_tensordesc_arg

                value.encoded = make_tensordesc_arg(value, metas[place])
            whole += value.encoded
        else:
            whole.append(value)
    return whole


# ── TMA descriptors ──────────────────────────────────────────────────────────────────────────────────────────────────


class _Place:
    """An address and a dtype, in place of a tensor that a kept descriptor would keep alive."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self._address


@functools.lru_cache(_MOST_DESCRIPTORS)
def kept_descriptor(
    make: Callable[..., Any], address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...],
    block: tuple[int, ...], *layout: Any,
) -> Any:
    """The TMA descriptor of a tensor at an address. Addresses come again and again: weights stay, and the allocator gives the
    same memory to the same step."""
    made = make(_Place(address, dtype), list(shape), list(strides), list(block), *layout)
    made.kept_as = (dtype, block, layout)
    made.encoded = None
    return made
