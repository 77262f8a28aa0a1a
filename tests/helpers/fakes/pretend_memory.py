"""torch's allocator of a GPU that is not there (pretend_gpu.py): what would be reserved, in blocks and segments as it makes them.

    allocator = pretend_memory.install()     # after pretend_gpu.install()
    ...
    allocator.reserved                       # bytes: what torch.cuda.memory_reserved() would say

The rules are those of torch's caching allocator without options: sizes are multiples of 512 bytes; up to 1 MiB come from segments
of 2 MiB, others from segments of 20 MiB or, from 10 MiB on, of their own size; the smallest free block that is large enough is
taken and what is left of it stays free; neighbours that are free become one. While a graph is recorded there is another pool.
cuBLAS has a workspace in each pool from its first product on, and keeps it. What other libraries take by themselves is not seen.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, ValuesView
from dataclasses import dataclass
from typing import Any

import pretend_gpu
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 2**20
WORKSPACE = 32 * MIB                 # of cuBLAS on an H200
PRODUCTS = (F.linear, torch.mm, torch.bmm, torch.addmm, torch.matmul, torch.Tensor.addmm_, torch._scaled_mm, torch._int_mm)


@dataclass(eq=False, slots=True)
class Block:
    pool: Pool
    address: int
    size: int
    before: Block | None = None      # neighbours in the segment
    after: Block | None = None
    free: bool = False


class Pool:
    """Blocks of one kind: small or large, of steps or of graphs."""

    def __init__(self, name: str, small: bool) -> None:
        self.name, self.small = name, small
        self.free: list[tuple[int, int, Block]] = []         # by size and address
        self.segments: list[int] = []

    def take(self, size: int, address: int) -> Block:
        """A block of this size; `address`: where a new segment would be."""
        place = bisect.bisect_left(self.free, size, key=lambda each: each[0])
        if place < len(self.free):
            block = self.free.pop(place)[2]
        else:
            segment = 2 * MIB if self.small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            self.segments.append(segment)
            block = Block(self, address, segment)
        block.free = False
        if block.size - size >= 512 if self.small else block.size - size > MIB:
            rest = Block(self, block.address + size, block.size - size, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._give(rest)
        return block

    def give(self, block: Block) -> None:
        for other in (block.before, block.after):
            if other is not None and other.free:
                self.free.remove((other.size, other.address, other))
                first, second = (other, block) if other is block.before else (block, other)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                block = first
        self._give(block)

    def empty(self) -> None:
        """Segments of which nothing is in use go back to the device."""
        for each in [each for each in self.free if each[2].before is None and each[2].after is None]:
            self.free.remove(each)
            self.segments.remove(each[0])

    def _give(self, block: Block) -> None:
        block.free = True
        bisect.insort(self.free, (block.size, block.address, block), key=lambda each: each[:2])


class Allocator(TorchDispatchMode):
    """Follows the tensors of the thread that enters it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False                                     # else torch imports its compiler to keep it out: seconds

    def __init__(self) -> None:
        super().__init__()
        self._pools = {(graphs, small): Pool("graphs" if graphs else "steps", small)
                       for graphs in (False, True) for small in (False, True)}
        self._live: dict[int, tuple[StorageWeakRef, Block]] = {}
        self._next = 0
        self._workspaces: dict[bool, Block] = {}             # of cuBLAS, by whether a graph is recorded
        self.recording = False
        self.on_host = False

    @property
    def reserved(self) -> int:
        return sum(sum(pool.segments) for pool in self._pools.values())

    @property
    def allocated(self) -> int:
        self._collect()
        live = [block for _, block in self._live.values()]
        return sum(block.size for block in (*live, *self._workspaces.values()))

    def pools(self) -> dict[str, int]:
        return {f"{pool.name}, {'small' if pool.small else 'large'}": sum(pool.segments) for pool in self._pools.values()}

    def empty_cache(self) -> None:
        self._collect()
        for small in (False, True):
            self._pools[False, small].empty()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        if not self.on_host:
            for storage in _storages(made):
                if storage._cdata not in (each._cdata for given in (args, (kwargs or {}).values()) for each in _storages(given)):
                    self._take(storage)
        return made

    def library(self) -> int:
        """torch.cuda.current_blas_handle: the handle has its workspace afterwards."""
        self._collect()
        if self.recording not in self._workspaces:
            self._workspaces[self.recording] = self._pools[self.recording, False].take(WORKSPACE, self._next)
            self._next += 2**40
        return 0

    def _take(self, storage: torch.UntypedStorage) -> None:
        self._collect()
        if storage._cdata in self._live or not storage.nbytes():
            return
        size = -(-storage.nbytes() // 512) * 512
        block = self._pools[self.recording, size <= MIB].take(size, self._next)
        self._next += 2**40
        self._live[storage._cdata] = (StorageWeakRef(storage), block)

    def _collect(self) -> None:
        gone = [key for key, (storage, _) in self._live.items() if storage.expired()]
        for key in gone:
            block = self._live.pop(key)[1]
            block.pool.give(block)


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Of all tensors in what an operator takes or gives: torch's own walk through any structure takes half of a step's time."""
    if isinstance(value, torch.Tensor):
        yield value.untyped_storage()
    elif isinstance(value, (tuple, list, ValuesView)):
        for each in value:
            yield from _storages(each)


def install() -> Allocator:
    allocator = Allocator()

    class Graph(pretend_gpu._Nothing):
        def capture_begin(self, **options: Any) -> None:
            allocator.recording = True

        def capture_end(self) -> None:
            allocator.recording = False

    torch.cuda.CUDAGraph = Graph
    torch.cuda.memory_reserved = lambda: allocator.reserved
    torch.cuda.memory_allocated = lambda: allocator.allocated
    torch.cuda.empty_cache = allocator.empty_cache
    torch.cuda.current_blas_handle = allocator.library
    torch.cuda.mem_get_info = lambda: (pretend_gpu.MEMORY_BYTES - 2**30 - allocator.reserved, pretend_gpu.MEMORY_BYTES)
    function = pretend_gpu.Tensors.__torch_function__

    def with_place(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            allocator.library()
        if allocator.recording:                              # what indices are there is of no meaning: nothing is computed now
            if func is F.embedding:
                return args[1].new_empty(len(args[0]), args[1].shape[1])
            if func in (torch.index_select, torch.Tensor.index_select):
                return (kwargs or {}).get("out", args[0].new_empty(len(args[2]), *args[0].shape[1:]))
        if not kwargs or not kwargs.get("pin_memory"):
            return function(self, func, types, args, kwargs)
        with _on_host(allocator):
            return function(self, func, types, args, kwargs)

    pretend_gpu.Tensors.__torch_function__ = with_place
    allocator.__enter__()
    return allocator


@contextlib.contextmanager
def _on_host(allocator: Allocator) -> Iterator[None]:
    before, allocator.on_host = allocator.on_host, True
    try:
        yield
    finally:
        allocator.on_host = before
