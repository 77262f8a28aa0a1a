"""The engine's process as on a machine of four cores, whose masks are filled by three threads: it writes how many matchers they
were told of and how many masks they filled into the file of the environment's `RIDGELINE_TEST_POOL`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from llguidance import LLExecutor

from ridgeline.engine.core.engine_process import main
from ridgeline.grammar import masks

VARIABLE = "RIDGELINE_TEST_POOL"


class Counted:
    """The library's pool."""

    def __init__(self, threads: int) -> None:
        self._pool, self._threads, self._told, self._filled = LLExecutor(threads), threads, 0, 0

    def consume_token_par(self, listed: list[Any]) -> list[bool]:
        self._told += len(listed)
        return self._pool.consume_token_par(listed)

    def unsafe_compute_mask_ptr(self, listed: list[Any], *given: int) -> None:
        self._pool.unsafe_compute_mask_ptr(listed, *given)
        self._filled += len(listed)
        Path(os.environ[VARIABLE]).write_text(f"{self._threads} {self._told} {self._filled}")


if __name__ == "__main__":
    os.cpu_count = lambda: 4
    masks.make_pool = Counted                          # type: ignore[assignment]
    sys.exit(main(sys.argv[1]))
