"""A reference's logits in a file: computed once, compared with many models, on machines that cannot hold both.

    line 1   RIDGELINE-LOGITS 1
    line 2   JSON: vocabulary, the model's name, and the tokens of every sequence
    then     float32 [positions, vocabulary], sequence after sequence, each without its last position

The bytes begin at a multiple of 4,096 and are mapped into memory, so a file may be larger than it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.errors import ConfigError
from ridgeline.evaluate.scoring import LOGITS_ROWS, Scores, Take, Tick
from ridgeline.evaluate.task import REFERENCE_MAGIC

_ALIGNMENT = 4096
_MOST_HEADER = 1 << 30              # bytes: a damaged file may have no line end


def file_bytes(sequences: Sequence[Sequence[int]], vocab_size: int) -> int:
    """Bytes of the logits."""
    return sum(len(sequence) - 1 for sequence in sequences) * vocab_size * 4


def write_reference(
    path: str | Path, scores: Scores, sequences: Sequence[Sequence[int]], name: str, tick: Tick | None = None
) -> None:
    header = {"model": name, "vocab_size": scores.vocab_size, "sequences": [list(each) for each in sequences]}
    head = REFERENCE_MAGIC + json.dumps(header).encode() + b"\n"
    head += b"\0" * (-len(head) % _ALIGNMENT)
    begins = np.cumsum([0, *(len(each) - 1 for each in sequences)])
    partial = Path(f"{path}.partial")                    # renamed when complete: a file of the final name is never partial
    try:
        with partial.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + file_bytes(sequences, scores.vocab_size))
        shape = (int(begins[-1]), scores.vocab_size)
        rows = np.memmap(partial, np.float32, "r+", offset=len(head), shape=shape)

        def take(place: int, start: int, logits: Tensor) -> None:
            first = int(begins[place]) + start
            rows[first : first + len(logits)] = logits.float().cpu().numpy()

        scores.score(sequences, take, tick)
        rows.flush()
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)


class ReferenceFile:
    """Logits as they were written."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            if file.readline() != REFERENCE_MAGIC:
                raise ConfigError(f"{path} is not a reference that `ridgeline eval --save-reference` wrote")
            line = file.readline(_MOST_HEADER)
            offset = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
        try:
            header: dict[str, Any] = json.loads(line)
            self.name, self.vocab_size = str(header["model"]), int(header["vocab_size"])
            begins = np.cumsum([0, *(len(each) - 1 for each in header["sequences"])])
            self._begins = {
                tuple(each): int(begin) for each, begin in zip(header["sequences"], begins[:-1], strict=True)
            }
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ConfigError(f"{path} is a damaged reference: write it again") from None
        expected = offset + int(begins[-1]) * self.vocab_size * 4
        if self.path.stat().st_size != expected:
            raise ConfigError(f"{path} has {self.path.stat().st_size} bytes instead of {expected}: write it again")
        shape = (int(begins[-1]), self.vocab_size)
        self._rows = np.memmap(self.path, np.float32, "r", offset=offset, shape=shape)

    def score(self, sequences: Sequence[Sequence[int]], take: Take, tick: Tick | None = None) -> None:
        for place, sequence in enumerate(sequences):
            begin = self._begins.get(tuple(sequence))
            if begin is None:
                raise ConfigError(
                    f"{self.path} was written for other tokens: use the same text, slices, tokenizer, context and seed"
                )
            for start in range(0, len(sequence) - 1, LOGITS_ROWS):
                end = min(start + LOGITS_ROWS, len(sequence) - 1)
                take(place, start, torch.from_numpy(self._rows[begin + start : begin + end].copy()))
            if tick is not None:
                tick(place + 1, len(sequences))
