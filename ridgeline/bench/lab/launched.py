"""Lists the Triton kernels that a piece of work launches, with their registers, spills and shared memory.

Uses Triton's launch hook on the host, so that no profiler is attached to the measured device. A launch during CUDA graph
capture counts once; replays are not seen.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ridgeline.ops
from ridgeline.ops.registry import HAS_TRITON, TRITON_INTERPRETED


@contextmanager
def launched_kernels() -> Iterator[list[tuple[str, int]]]:
    """Name and handle of every Triton kernel that is launched inside."""
    found: list[tuple[str, int]] = []
    hooks = None
    if HAS_TRITON and not TRITON_INTERPRETED:
        triton: Any = importlib.import_module("triton")
        hooks = getattr(getattr(getattr(triton, "knobs", None), "runtime", None), "launch_enter_hook", None)

    def note(metadata: Any) -> None:
        data = metadata.get()
        found.append((data.get("name", ""), data.get("function", 0)))

    if hooks is None or not hasattr(hooks, "add"):
        yield found
        return
    hooks.add(note)
    try:
        yield found
    finally:
        hooks.remove(note)


def kernel_facts(launched: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Registers, spills and shared memory of these kernels, as the loaded binaries have them."""
    if not launched:
        return []
    wanted = {handle for _, handle in launched}
    found: dict[int, dict[str, Any]] = {}
    for kernel in _compiled():
        handle = getattr(kernel, "function", None)
        if handle in wanted:
            found[handle] = {
                "name": kernel.metadata.name, "registers": kernel.n_regs, "spills": kernel.n_spills,
                "shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps, "stages": kernel.metadata.num_stages,
            }
    return list(found.values())


def _compiled() -> Iterator[Any]:
    """Every compiled kernel of the op modules."""
    for module in pkgutil.walk_packages(ridgeline.ops.__path__, "ridgeline.ops."):
        for value in vars(importlib.import_module(module.name)).values():
            for cache in getattr(value, "device_caches", {}).values():
                yield from cache[0].values()
