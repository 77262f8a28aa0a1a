"""Shortens the imports of an engine process: called in its first lines.

    head_start.begin(gpu=True)       # before anything else imports torch
    import ...
    head_start.imported()

Imports run in one thread of Python, so everything else is taken off that thread:

    compiling torch's sources        which every start does where their byte code is not kept: in images that were made
                                     without it and tell Python not to write it, or where this user may not write. There
                                     it is kept in the cache directory (`byte_code_folder`), for our processes alone
    the driver                       makes its context of the first GPU beside the imports, in a thread
    Triton's library                 400 MB, of which a hash is part of every name in its cache: made in another thread
    binding every function           of libraries with a hundred thousand of them: each is bound when it is called
    looking for other backends       in what every installed package says of itself
    shapes for compilers             torch defines its ops once more in Python, for tensors without numbers: a fifth of its
                                     import, and of its memory. An engine on a CPU has no such tensors
    collecting garbage               imports make none; what they made is not looked at again (gc.freeze)

For our own processes only: a user's program imports modules as it likes. No torch here.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import importlib.util
import os
import sys
import threading
import types
from pathlib import Path

from ridgeline.errors import ConfigError
from ridgeline.process import platform

_DRIVER = "libcuda.so.1"
_SHAPES = "torch._meta_registrations"
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._prims", "torch._refs", "torch._decomp")


_dlopen_flags = sys.getdlopenflags()


def begin(gpu: bool) -> None:
    gc.disable()
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    if platform.is_address_space_limited():              # torch's allocator on ARM reserves 1 GiB, used or not
        os.environ.setdefault("MIMALLOC_ARENA_RESERVE", "64M")
    sys.setdlopenflags(os.RTLD_LAZY)
    if not (gpu and has_driver()):
        leave_out_shapes()
    else:
        # The driver holds the loader's lock while it starts, and other loads wait: so torch's libraries come first.
        importlib.import_module("torch")
        threading.Thread(target=_open_device_early, name="open-device", daemon=True).start()
        if importlib.util.find_spec("triton") is not None:
            hash_triton()


def imported() -> None:
    """All imports are through."""
    sys.setdlopenflags(_dlopen_flags)
    gc.freeze()
    gc.enable()


def leave_out_shapes() -> None:
    """Before torch is imported: an empty module in place of the one that torch imports for nothing but its registrations. What
    needs them, such as its profiler, gets them when it is imported."""
    if "torch" not in sys.modules:
        sys.modules[_SHAPES] = types.ModuleType(_SHAPES)
        sys.meta_path.insert(0, _ShapesLater())


class _ShapesLater:
    """Looks for no module: it puts the registrations in place before the first import of a compiler."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name in _COMPILERS and "torch.library" in sys.modules:
            register_shapes()


def register_shapes() -> None:
    """What was left out, if it was: half a second. A torch.Generator needs it, too."""
    for finder in [each for each in sys.meta_path if isinstance(each, _ShapesLater)]:
        sys.meta_path.remove(finder)
        del sys.modules[_SHAPES]
        importlib.import_module(_SHAPES)


def has_driver() -> bool:
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        return False                                     # an error comes later, if a GPU is needed
    return True


def open_device() -> int:
    """Make the context of the first GPU, which torch then finds made; the driver's code for what came of it. Calls of
    foreign functions leave the interpreter to others."""
    driver = ctypes.CDLL(_DRIVER)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return int(
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    )


def _open_device_early() -> None:
    """A failure here costs only the time saved: torch opens the device again later and reports what is wrong."""
    try:
        code = open_device()
        problem = f"the driver's code is {code}" if code else ""
    except Exception as error:                           # a library of that name which is not the driver
        problem = f"{type(error).__name__}: {error}"
    if problem:
        from ridgeline.process.log import get_logger  # with what it imports, nothing that a start should wait for

        get_logger("start").info("could not open the first GPU while importing (start-up is slower): %s", problem)


@functools.cache
def hash_triton() -> threading.Thread:
    """Starts once. Must be waited for before the first look into Triton's cache, or the hash is computed twice."""
    cache = importlib.import_module("triton.runtime.cache")
    thread = threading.Thread(target=getattr(cache, "triton_key", bool), name="hash-triton", daemon=True)
    thread.start()
    return thread


@functools.cache
def byte_code_folder() -> Path | None:
    """Where our processes keep the byte code of what they import; None where Python needs no help: it lies beside
    the sources, or can be written there, or the user has chosen another place."""
    spec = importlib.util.find_spec("torch")
    if sys.pycache_prefix is not None or spec is None or spec.origin is None:
        return None
    if _has_byte_code(Path(spec.origin)):                # ours alone (`make install` compiles it) is not worth torch's again
        return None
    try:
        return platform.cache_dir() / "bytecode"         # files are named by Python's version, and checked by their source's time
    except ConfigError:
        return None                                      # no cache directory to be used


def _has_byte_code(source: Path) -> bool:
    """Whether Python finds byte code beside a source, or may write it there."""
    beside = source.with_name("__pycache__") / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
    return beside.exists() or (not sys.dont_write_bytecode and os.access(source.parent, os.W_OK))


def keep_byte_code() -> None:
    """In this process, for what it imports from now on. Children get it in their environment (process/children.py)."""
    folder = byte_code_folder()
    if folder is not None:
        sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False


def byte_code_environment() -> dict[str, str]:
    """Environment for child processes. An empty PYTHONDONTWRITEBYTECODE counts as unset."""
    folder = byte_code_folder()
    return {} if folder is None else {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
