"""Messages between the front end and the process that compiles grammars (grammar/compile_worker), as frames on a pipe: a length
of four bytes, then that many bytes."""

from __future__ import annotations

import struct
from typing import IO, Literal

import msgspec

from ridgeline.sampling_params import StructuredOutputs

_LENGTH = struct.Struct("<I")


class Question(msgspec.Struct, array_like=True):
    asked: StructuredOutputs
    seconds: float                   # wall-clock time until the client gets an answer
    cpu_seconds: float               # that it may use


class Answer(msgspec.Struct, array_like=True):
    """`late`: it used up its CPU time. `busy`: its wall-clock time passed before that, because other processes had the CPUs."""

    verdict: Literal["good", "refused", "late", "busy", "memory"]
    reason: str = ""                 # why it is refused
    spent: float = 0.0               # CPU seconds


def write_frame(stream: IO[bytes], data: bytes) -> None:
    """Writes everything, also where the pipe takes only part at a time."""
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[stream.write(rest) :]
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """None: the other side has closed the pipe."""
    head = _read(stream, _LENGTH.size)
    return None if head is None else _read(stream, _LENGTH.unpack(head)[0])


def _read(stream: IO[bytes], size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        part = stream.read(size - len(data))
        if not part:
            return None
        data += part
    return data
