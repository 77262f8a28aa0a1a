"""Records the native calls of a pass over the model, to make them again as one call: what a CUDA graph is on a GPU.

While a pass is recorded, it runs as always. Every call of the native library is written down with its arguments. Tensors that
the ops allocate come from an arena, so that they have the same addresses when the calls are made again. Any other op of torch
would be missing from the program, so it ends the recording: the pass goes on, and `Recording.missing` names the op.

What a program reads must stay where it is: weights, KV pages, tables, and the inputs that the caller fills before every run.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.ops.cpu import native

_WORDS, _FLOATS = 24, 4              # as in src/program.c
_ALIGN = 64
_NEW = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default}


class _Call(ctypes.Structure):
    _fields_ = [("function", ctypes.c_void_p), ("words", ctypes.c_int64 * _WORDS), ("floats", ctypes.c_float * _FLOATS)]


class Arena:
    """Memory of recorded tensors. All recordings share it, because their programs never run at once: a tensor that the ops have
    let go of makes room for a later one."""

    def __init__(self) -> None:
        self._rooms: dict[int, list[tuple[np.ndarray, StorageWeakRef]]] = {}     # by size

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = max(_ALIGN, int(np.prod(shape)) * dtype.itemsize)
        size = 1 << (size - 1).bit_length()              # few sizes: batches of all sizes use the same rooms
        rooms = self._rooms.setdefault(size, [])
        place = next((place for place, (_, user) in enumerate(rooms) if user.expired()), len(rooms))
        room = rooms[place][0] if place < len(rooms) else _aligned(size)
        made = _tensor(room, shape, dtype)
        rooms[place : place + 1] = [(room, StorageWeakRef(made.untyped_storage()))]
        return made

    def kept(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor that does not keep others out of it: a result, which is read before the next run."""
        for rooms in self._rooms.values():
            for room, _ in rooms:
                if room.ctypes.data == tensor.data_ptr():
                    return _tensor(room, tuple(tensor.shape), tensor.dtype)
        raise AssertionError("the tensor does not begin a room of this arena")

    @property
    def num_bytes(self) -> int:
        return sum(size * len(rooms) for size, rooms in self._rooms.items())


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + _ALIGN, np.uint8)
    return memory[-memory.ctypes.data % _ALIGN :][:size]


def _tensor(room: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = int(np.prod(shape))
    if not count:
        return torch.from_numpy(room)[:0].view(dtype).view(shape)
    return torch.frombuffer(room, dtype=dtype, count=count).view(shape)


_ONE_AT_A_TIME = threading.Lock()


class Recording(TorchDispatchMode):
    """`with recording.of_calls(): …`; afterwards `program()`, unless an op was `missing`."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.missing = ""                                # the first op that a program cannot hold
        self._arena = arena
        self._calls: list[_Call] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would import its compiler when the first op is dispatched, to keep it away from this mode: a second, and 100 MB,
        in the middle of the first answer. Nothing here is compiled."""
        return False

    @contextmanager
    def of_calls(self) -> Iterator[None]:
        library = native.library()
        with _ONE_AT_A_TIME:                             # the library is the process's: another engine's thread may record, too
            own = dict(vars(library))
            for name, function in own.items():
                setattr(library, name, self._written_down(function))
            try:
                with self:
                    yield
            finally:
                for name, function in own.items():
                    setattr(library, name, function)

    def _written_down(self, function: Any) -> Callable[..., None]:
        address = ctypes.cast(function, ctypes.c_void_p).value
        kinds = [kind is ctypes.c_float for kind in function.argtypes]
        recorder = threading.get_ident()

        def call(*arguments: Any) -> Any:
            if threading.get_ident() != recorder:        # of another engine in this process
                return function(*arguments)
            words = [each or 0 for each, is_float in zip(arguments, kinds, strict=True) if not is_float]
            floats = [each for each, is_float in zip(arguments, kinds, strict=True) if is_float]
            if len(words) > _WORDS or len(floats) > _FLOATS or function.restype is not None:
                self.missing = self.missing or function.__name__
            else:
                self._calls.append(_Call(address, (ctypes.c_int64 * _WORDS)(*words), (ctypes.c_float * _FLOATS)(*floats)))
            return function(*arguments)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _NEW and kwargs.get("device") in (None, torch.device("cpu")):
            like = args[0] if isinstance(args[0], Tensor) else None
            shape = args[1] if func is torch.ops.aten.new_empty.default else args[0] if like is None else like.shape
            default = torch.get_default_dtype() if like is None else like.dtype
            return self._arena.empty(tuple(shape), kwargs.get("dtype") or default)
        found = func(*args, **kwargs)
        if not self.missing and not _is_view(func, args, found):
            self.missing = str(func)
        return found

    def program(self) -> Program:
        return Program(self._calls)


def _is_view(func: Any, args: Any, found: Any) -> bool:
    """A view, of memory that its first argument has: such ops may also copy."""
    if not getattr(func, "is_view", False):
        return False
    storage = args[0].untyped_storage().data_ptr()
    return all(each.untyped_storage().data_ptr() == storage for each in (found if isinstance(found, list | tuple) else [found]))


class Program:
    """The calls of a recording, in order."""

    def __init__(self, calls: list[_Call]) -> None:
        self._calls = (_Call * len(calls))(*calls)
        self._run = native.library().run_program

    def __len__(self) -> int:
        return len(self._calls)

    def run(self) -> None:
        self._run(self._calls, len(self._calls))
