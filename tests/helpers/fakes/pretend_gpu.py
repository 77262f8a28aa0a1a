"""An H200 that is not there: torch says there is one, tensors lie in the host's memory, and kernels are never launched.

For a process of its own: `install()` comes before the first import of the package. From then on an engine starts and serves
as on the device: it chooses kernels, Triton specialises and compiles them for it, graphs are recorded and replayed. What a
kernel would have written is missing, so answers mean nothing: a tensor of integers that nobody filled holds `unfilled()`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

MULTIPROCESSORS, SHARED_BYTES, MEMORY_BYTES = 132, 232_448, 150_109_880_320
GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
LAUNCHED: Counter[str] = Counter()       # by kernel
COMPILED: list[tuple[str, str]] = []     # kernels and their variants, in order, where only this is wanted of compiling

_NEW = frozenset((torch.empty, torch.empty_like, torch.Tensor.new_empty))
# What is answered without torch. Looked up by hash: a step asks for devices thousands of times.
_ANSWERS: dict[Any, Any] = {
    torch.Tensor.device.__get__: lambda tensor: GPU,
    torch.Tensor.is_cuda.__get__: lambda tensor: True,
    torch.Tensor.is_cpu.__get__: lambda tensor: False,
    torch.Tensor.pin_memory: lambda tensor: tensor,
    torch.Tensor.record_stream: lambda tensor: tensor,
}
_PRODUCTS = 2**24                        # multiplications that are worth their time here; larger products are left out
_unfilled = 0


def unfilled(value: int) -> None:
    """What memory holds that nobody has written, from now on."""
    global _unfilled
    _unfilled = value


def _is_gpu(given: Any) -> bool:
    return isinstance(given, str) and given in ("cuda", "cuda:0")       # a tensor would be compared by torch


class Tensors(TorchFunctionMode):
    """Tensors that say they are on the GPU, in the thread that enters it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if answer := _ANSWERS.get(func):
            return answer(args[0])
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if "device" in kwargs:
            kwargs["device"] = HOST
        if func in (torch.Tensor.to, torch.Tensor.cuda):
            args = tuple(HOST if isinstance(each, torch.device) or _is_gpu(each) else each for each in args)
        # What is left out is not written either: no kernel reads it, and pages that are not touched cost nothing.
        if func is F.linear and args[0].shape[0] * args[1].numel() > _PRODUCTS:
            return torch.empty((args[0].shape[0], args[1].shape[0]), dtype=args[0].dtype)
        if func is torch.Tensor.addmm_ and args[1].shape[0] * args[2].numel() > _PRODUCTS:
            return args[0]
        if func is torch.mm and "out_dtype" in kwargs:   # which only a GPU has
            return torch.empty((args[0].shape[0], args[1].shape[1]), dtype=kwargs["out_dtype"])
        made = func(*args, **kwargs)
        if func in _NEW and not made.dtype.is_floating_point and not made.dtype.is_complex and made.numel() < _PRODUCTS:
            made.fill_(_unfilled if made.dtype.itemsize > 4 else _unfilled % 128)
        return made


class _Nothing:
    """A stream, an event or a graph: whatever is asked of it is done already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 1.0              # milliseconds, where anybody asks


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = source.name

    def __call__(self, *args: Any) -> None:
        LAUNCHED[self.name] += 1


class _Kernel:
    """What launching wants of a compiled kernel."""

    function = packed_metadata = None

    def __init__(self, source: Any) -> None:
        self.run = _Launcher(source, None)

    def launch_metadata(self, *args: Any) -> None:
        return None


def _compile(src: Any, target: Any = None, options: Any = None, **others: Any) -> _Kernel:
    """In place of Triton's: says that it has."""
    from triton import knobs

    chosen = {name: value for name, value in options.items() if name in ("num_warps", "num_stages", "maxnreg")}
    names = src.fn.arg_names
    constants = {names[place[0]]: value for place, value in src.constants.items()}
    aligned = sorted(names[place[0]] for place in src.attrs)
    COMPILED.append((src.name, f"{constants} {src.signature} {aligned} {chosen}"))
    knobs.compilation.listener(src=src, metadata={}, metadata_group={}, times=None, cache_hit=False)
    return _Kernel(src)


def install(compiles: bool = True) -> None:
    """Without `compiles`, kernels are only listed in COMPILED."""
    properties = SimpleNamespace(
        name="pretended", multi_processor_count=MULTIPROCESSORS, shared_memory_per_block_optin=SHARED_BYTES,
        total_memory=MEMORY_BYTES, major=9, minor=0,
    )
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "set_device": None, "synchronize": None,
        "get_device_capability": (9, 0), "get_device_properties": properties, "get_device_name": "pretended",
        "mem_get_info": (MEMORY_BYTES - 2**30, MEMORY_BYTES), "memory_allocated": 0, "memory_reserved": 0, "empty_cache": None,
        "max_memory_allocated": 0, "max_memory_reserved": 0, "graph_pool_handle": (0, 0), "current_stream": _Nothing(),
        "current_blas_handle": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)
    for name in ("Stream", "Event", "CUDAGraph"):
        setattr(torch.cuda, name, _Nothing)
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    torch.cuda.device = lambda device: contextlib.nullcontext()

    import triton.compiler
    from triton.backends.compiler import GPUTarget
    from triton.runtime import cache, driver

    # Part of every name in the cache of kernels. Triton hashes 400 MB for it: 1.4 s, and such a process has a cache of its own.
    cache.triton_key = lambda: "pretended"
    if not compiles:
        triton.compiler.compile = _compile

    driver.set_active(SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, launcher_cls=_Launcher,
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_device_interface=lambda: torch.cuda,
        utils=SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES}, unload_module=lambda module: None,
            load_binary=lambda name, kernel, shared, device: (object(), object(), 0, 0, 1024),
        ),
    ))
    Tensors().__enter__()                                # of this thread
