"""Shared by the kernels written in Gluon: its names, the mbarriers of a ring, and the wait for the kernel before (PDL).

Gluon is Triton's language for kernels with explicit layouts, barriers and copies. Triton's interpreter cannot run it. Names that
changed between the supported versions, 3.6 and later, have one name here. Without Gluon they are None, and the kernels must not
be called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.direct_launch import kept_descriptor
from ridgeline.ops.kernel_table import DeviceFacts
from ridgeline.ops.launch import multiprocessors, shared_memory
from ridgeline.ops.registry import HAS_TRITON, TRITON_INTERPRETED, gluon_kernel, triton

# Triton before 3.6 has other names.
HAS_GLUON = HAS_TRITON and not TRITON_INTERPRETED and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)
if HAS_GLUON:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language._core import builtin
    from triton.experimental.gluon.language.nvidia.hopper import (
        async_copy,
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
    fetch = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

    @builtin
    def viewed(memory, dtype, shape, layout, _semantic=None):  # type: ignore[no-untyped-def]
        """The same shared memory with another dtype, shape and layout."""
        method = memory.reinterpret if hasattr(memory, "reinterpret") else memory._reinterpret
        return method(dtype, shape, layout, _semantic=_semantic)

else:
    gl = async_copy = fence_async_shared = mbarrier = warpgroup_mma = warpgroup_mma_wait = TensorDescriptor = None
    copy = fetch = group_barrier = viewed = None


@functools.cache
def tiles_of(swizzle: int, bits: int, rank: int) -> Any:
    """How tiles lie in shared memory, as TMA writes and the tensor cores read them: bytes of the swizzle, bits of an element."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def described(tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], layout: Any) -> Any:
    """The TMA descriptor of a tensor, for tiles of a block."""
    return kept_descriptor(TensorDescriptor, tensor.data_ptr(), tensor.dtype, shape, strides, block, layout)


@gluon_kernel()
def wait_for_kernel_before(DEPENDENT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start, and wait for the one before (launch.py)."""
    if DEPENDENT:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
        )
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon_kernel()
def ring_barriers(STAGES: gl.constexpr, READERS: gl.constexpr):  # type: ignore[no-untyped-def]
    """mbarriers (slot full, slot empty) of a ring of STAGES slots: one warp fills a slot, READERS warpgroups release it."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return full, empty


def compile_time(function: Callable[..., Any]) -> Any:
    """A function that kernels call while they are compiled; elsewhere it is an ordinary one."""
    return triton.constexpr_function(function) if HAS_GLUON else function


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """TMA and wgmma came with compute capability 9; later GPUs have no wgmma. Some of AMD's GPUs have a number 9, too."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def device_facts(device: torch.device, aligned: bool = True) -> DeviceFacts:
    """What the kernel table asks. `aligned`: the weight begins at a multiple of 16 bytes, which copies need."""
    hopper = is_hopper(device) or (TRITON_INTERPRETED and device.type == "cpu")
    gluon = HAS_GLUON and device.type == "cuda"
    return DeviceFacts(
        gluon and aligned, hopper and aligned, shared_memory(device), multiprocessors(device),
        has_block_scales(torch.version.cuda), device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9),
    )


def has_block_scales(cuda: str | None) -> bool:
    """Of the CUDA that torch was built with, "12.9"."""
    return cuda is not None and tuple(map(int, cuda.split(".")[:2])) >= (12, 9)
