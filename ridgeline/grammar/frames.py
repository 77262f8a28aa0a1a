"""Messages between the front end and the process that compiles grammars (grammar/compile_worker), as frames on a pipe
(process/framed_child)."""

from __future__ import annotations

from typing import Literal

import msgspec

from ridgeline.sampling_params import StructuredOutputs


class Question(msgspec.Struct, array_like=True):
    asked: StructuredOutputs
    seconds: float                   # wall-clock time until the client gets an answer
    cpu_seconds: float               # that it may use


class Answer(msgspec.Struct, array_like=True):
    """`late`: it used up its CPU time. `busy`: its wall-clock time passed before that, because other processes had the CPUs.
    `memory`: it needs more than it may have. `killed`: someone else ended its process, which says nothing of the grammar."""

    verdict: Literal["good", "refused", "late", "busy", "memory", "killed"]
    reason: str = ""                 # why it is refused
    spent: float = 0.0               # CPU seconds
