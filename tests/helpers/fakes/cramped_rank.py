"""A rank that runs out of memory in some of its steps: before their first collective, between two of them, or behind the last."""

from __future__ import annotations

import json
import sys
from typing import Any

from ridgeline.engine.ranks import rank
from ridgeline.models.decoder import Decoder
from ridgeline.runner.runner import Runner


def plant(steps: dict[int, str]) -> None:
    """In this process: the n-th step that is submitted fails at this place, once."""
    seen, where = [0], [""]
    submit, sample, logits_here = Runner.submit, Runner.sample, Decoder.logits_here

    def fail(place: str) -> None:
        if where[0] == place:
            where[0] = ""
            raise MemoryError(f"planted at {place}")

    def submitting(self: Runner, plan: Any) -> None:
        seen[0] += 1
        where[0] = steps.get(seen[0], "")
        fail("begin")
        submit(self, plan)

    def heading(self: Decoder, rows: Any) -> Any:
        fail("middle")
        return logits_here(self, rows)

    def sampling(self: Runner, masks: Any = None) -> None:
        sample(self, masks)
        fail("end")

    Runner.submit, Runner.sample, Decoder.logits_here = submitting, sampling, heading    # type: ignore[method-assign]


if __name__ == "__main__":
    faults = json.loads(sys.argv[2]).get(str(json.loads(sys.argv[1])["rank"]), {})
    plant({int(step): place for step, place in faults.items()})
    sys.exit(rank.main(sys.argv[1]))
