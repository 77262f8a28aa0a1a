"""Typed messages between processes: msgpack over ZeroMQ on private ipc sockets, never pickle.

A frame is decoded against the type that is expected there; anything else is a DecodeError. Sockets live in a directory
only this user can enter, under a random name. No torch, and no knowledge of what the messages mean.
"""

from __future__ import annotations

import _thread
import errno
import functools
import hashlib
import os
import re
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import zmq

from ridgeline.errors import RidgelineError
from ridgeline.messages import Request, StepPlan, TokenDeltas
from ridgeline.metrics import EngineStats

MAX_FRAME = 256 * 2**20
SHOW_STACKS = signal.SIGUSR1         # an engine's process that gets it writes the stacks of its threads to stderr, and ends
_DTYPES = {"int8": np.int8, "int32": np.int32, "int64": np.int64, "float32": np.float32, "float64": np.float64}

_THREADS = 2                         # that ZeroMQ starts with the first socket of a context
_END_SECONDS = 0.1                   # for threads that have nothing to do, to end

T = TypeVar("T")
DecodeError = msgspec.DecodeError
EncodeError = msgspec.EncodeError


def new_context() -> zmq.Context[Any]:
    """For sockets. RuntimeError where the system has no threads to give: ZeroMQ would end the process there, by SIGABRT."""
    may_end, before = threading.Event(), _num_threads()
    try:
        for _ in range(_THREADS):                        # Thread.start() would wait for ever for one that finds no memory
            _thread.start_new_thread(may_end.wait, ())
    finally:
        may_end.set()
        deadline = time.monotonic() + _END_SECONDS
        while _num_threads() > before and time.monotonic() < deadline:
            time.sleep(0.0005)
    return zmq.Context()


def _num_threads() -> int:
    """Those that the system counts: one that has ended for Python may be among them for a moment."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:                                      # it does not tell
        return 0


class Codec(Generic[T]):
    """Encodes and decodes one type (or union of types) of message."""

    def __init__(self, kind: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)

    def encode(self, message: T) -> bytes:
        """EncodeError for what would not arrive: integers beyond 64 bits, text that is no Unicode, a frame too large."""
        try:
            frame = self._encoder.encode(message)
        except (OverflowError, UnicodeEncodeError, RecursionError, TypeError) as error:
            raise EncodeError(str(error)) from None
        if len(frame) > MAX_FRAME:
            raise EncodeError(f"a frame of {len(frame)} bytes is larger than the limit of {MAX_FRAME}")
        return frame

    def decode(self, frame: bytes | memoryview) -> T:
        if len(frame) > MAX_FRAME:
            raise DecodeError(f"a frame of {len(frame)} bytes is larger than the limit of {MAX_FRAME}")
        try:
            return self._decoder.decode(frame)
        except (RidgelineError, RecursionError, UnicodeDecodeError) as error:
            # A value that its own type refuses, nesting without end, text that is none: all are just bad frames.
            raise DecodeError(f"{type(error).__name__}: {error}") from None


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.name, list(value.shape), np.ascontiguousarray(value).tobytes()]
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise TypeError(f"{kind.__name__} cannot be received")
    try:
        name, shape, data = value
        return np.frombuffer(data, _DTYPES[name]).reshape([int(size) for size in shape])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise msgspec.ValidationError("not an array") from None


# -- what is said between the front end and the engine's process -------------------------------------------------------


class Add(msgspec.Struct, tag=True):
    request: Request


class Abort(msgspec.Struct, tag=True):
    request_id: str
    index: int | None = None         # one of the n answers; None = all


class Vocabulary(msgspec.Struct, tag=True):
    """The tokenizer's vocabulary, for grammars; sent while the engine loads, if it is to prepare it (grammars_at_start)."""

    pieces: list[bytes]              # by id
    special_ids: list[int]


class ForgetPrefixes(msgspec.Struct, tag=True):
    """Empty the prefix cache; answered by PrefixesForgotten."""


class Switch(msgspec.Struct, tag=True):
    """Leave a technique out from now on, or take it in again; answered by Switched."""

    technique: str
    on: bool


class Profile(msgspec.Struct, tag=True):
    """Profile the next `steps` steps; answered by Profiled."""

    steps: int


class Shutdown(msgspec.Struct, tag=True):
    pass


class Ready(msgspec.Struct, tag=True):
    """The engine can take requests."""

    model: str
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    dtype: str
    device: str
    num_blocks: int                  # KV blocks that requests can have, all of them free now
    block_size: int
    seconds: float
    kv_dtype: str = ""
    techniques: list[str] = []       # that are on, by their names in `techniques`
    memory: dict[str, int] = {}      # bytes of each part of the ledger, all ranks together
    sizes: dict[str, int] = {}       # options with which an engine after this one has the same KV cache and context


class Loading(msgspec.Struct, tag=True):
    done: int
    total: int


class Failed(msgspec.Struct, tag=True):
    """The engine could not start, or has died; one line says why. `config` tells a bad setting from a fault."""

    reason: str
    config: bool = False


class Refused(msgspec.Struct, tag=True):
    """A request that the engine did not take."""

    request_id: str
    reason: str
    field: str = ""                  # the request's field at fault


class PrefixesForgotten(msgspec.Struct, tag=True):
    done: bool                       # not while requests hold part of the KV cache


class Switched(msgspec.Struct, tag=True):
    technique: str
    active: list[str]                # the techniques that are on now
    refused: str = ""                # why it was not done


class Profiled(msgspec.Struct, tag=True):
    trace: str                       # the file, in a folder that only this user can read; the receiver removes it
    costs: dict[str, dict[str, float]]                   # by part, what the cost model says of these steps
    overhead: float = 0.0            # how much longer a step took than without
    refused: str = ""


class Deltas(msgspec.Struct, tag=True):
    """What one step brought, and how full the engine is after it."""

    deltas: TokenDeltas
    running: int                     # sequences that have a row
    free_blocks: int                 # KV blocks that no sequence holds; the prefix cache may still index them
    began: float = 0.0               # the step, by the clock that all processes of a machine share …
    ended: float = 0.0
    started: list[str] = []          # … and the requests of which it is the first


class Stats(msgspec.Struct, tag=True):
    """What the engine has counted, some ten times a second while it works and once when it stops."""

    stats: EngineStats


class Alive(msgspec.Struct, tag=True):
    """No news, but the loop runs: it is idle, or its steps bring no tokens yet."""

    steps: int                       # so far
    busy: bool                       # has work: then only more steps are progress


ToEngine = Add | Abort | Vocabulary | ForgetPrefixes | Switch | Profile | Shutdown
FromEngine = Ready | Loading | Failed | Refused | PrefixesForgotten | Switched | Profiled | Deltas | Stats | Alive
TO_ENGINE: Codec[ToEngine] = Codec(ToEngine)
FROM_ENGINE: Codec[FromEngine] = Codec(FromEngine)

# -- messages between ranks ---------------------------------------------------------------------------------------------

class Said(msgspec.Struct):
    """What rows have sampled on the last stage."""

    rows: np.ndarray
    tokens: np.ndarray               # the newest of each
    lengths: np.ndarray              # tokens of each in the cache: rejected drafts are not among them


# The first frame of a message to a rank says what it is.
RUN = b"run"                         # this plan
SAID = b"said"                       # to earlier stages: tokens of the last one, before the next plan that has these rows
PREPARE = b"prepare"                 # no plan comes for a moment: capture one more CUDA graph, all ranks the same
AGAIN = b"again"                     # a step did not fit into the memory of some rank: forget all rows, and meet under this name
STOP = b"stop"
PLAN: Codec[StepPlan] = Codec(StepPlan)
SAID_TOKENS: Codec[Said] = Codec(Said)


_LONGEST_FOLDER = 50
_OTHER_FOLDERS = ("/tmp", "/var/tmp")
_FOLDER = re.compile(r"ridgeline-([0-9a-f]{8})[0-9a-f]{8}-\w{8}")
_LEFT_OVER_SECONDS = 600.0           # a folder without a listener that is younger may belong to a server that starts


@functools.cache
def _this_machine() -> str:
    """Since it was started. In a folder that machines share, another one's sockets look dead from here."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        name = secrets.token_bytes(16)                   # nothing is known to be left over
    return hashlib.sha256(name).hexdigest()[:8]


def remove_left_over(new: Path) -> None:
    """Remove the folders of this user's servers that were killed and could not clean up: no socket in them has a listener. They
    lie beside the new folder, whose time is the clock of the file system."""
    with suppress(OSError), os.scandir(new.parent) as found:
        now = new.stat().st_mtime
        for each in found:
            with suppress(OSError):
                named = _FOLDER.fullmatch(each.name)
                if named and named[1] == _this_machine() and each.is_dir(follow_symlinks=False) and _is_left_over(each, now):
                    shutil.rmtree(each.path)


def _is_left_over(folder: os.DirEntry[str], now: float) -> bool:
    facts = folder.stat(follow_symlinks=False)
    if facts.st_uid != os.geteuid() or now - facts.st_mtime < _LEFT_OVER_SECONDS:
        return False                                     # another's, or of a server that starts now
    with os.scandir(folder.path) as entries:
        for entry in entries:
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode):
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.setblocking(False)
                    if probe.connect_ex(entry.path) != errno.ECONNREFUSED:
                        return False
    return True


def _prefix() -> str:
    return f"ridgeline-{_this_machine()}{secrets.token_hex(4)}-"


class SocketDir:
    """A private directory for ipc sockets; gone with close()."""

    def __init__(self) -> None:
        self.path = self._make()
        os.chmod(self.path, 0o700)
        remove_left_over(self.path)

    @staticmethod
    def _make() -> Path:
        """Cleaners of temporary folders remove TMPDIR below a running server; then another folder is taken."""
        # The path of a socket has 107 characters; a long TMPDIR would leave none for its name.
        places = [place for place in (tempfile.gettempdir(), *_OTHER_FOLDERS) if len(place) <= _LONGEST_FOLDER]
        for place in places[:-1]:
            with suppress(OSError):
                return Path(tempfile.mkdtemp(prefix=_prefix(), dir=place))
        return Path(tempfile.mkdtemp(prefix=_prefix(), dir=places[-1]))

    def address(self, name: str) -> str:
        return f"ipc://{self.path / name}"

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
