"""What the device's memory holds, against the ledger. Needs a GPU that nobody else uses: `make test-gpu` runs it alone, last."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from worst_case import WorstCase

from ridgeline.bench.workload.shapes import write_shape
from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.executor import LocalExecutor
from ridgeline.sizes import ledger

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# The second has many rows for its steps: what choosing tokens takes is more than what computing takes.
SETTINGS = {"wide steps": {"max_num_seqs": 256}, "many rows": {"max_num_seqs": 512, "max_num_batched_tokens": 512}}


@pytest.fixture(params=SETTINGS)
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    """On the shapes of a real model: a tiny one drowns in what the library takes for its workspaces."""
    gc.collect()
    torch.cuda.empty_cache()
    core = EngineCore.start(EngineConfig.of(
        model=str(write_shape("llama-3.2-1b")), load_format="dummy", skip_tokenizer_init=True, device="cuda", dtype="bfloat16",
        gpu_memory_utilization=0.9, **SETTINGS[request.param],
    ))
    yield core
    core.close()


def test_the_ledger_is_right_and_nothing_is_allocated_after_ready(core: EngineCore) -> None:
    """What torch has of the device when the engine is ready is what it has after every kind of step, the ledger's figure."""
    assert isinstance(core.executor, LocalExecutor)
    measured = core.executor.runner.memory
    assert abs(ledger.error(core.config.memory, measured)) < 0.02, ledger.table(core.config.memory, measured)
    # Steps alone, too: a weight's worth of memory that nobody can use (501 MiB here) does not hide in the sum. Segments that are
    # filled in part count as steps', and so does what the library works in.
    assert abs(core.config.memory[ledger.STEPS] - measured[ledger.STEPS]) < 256 * 2**20
    ready = torch.cuda.memory_reserved()
    grown: dict[str, int] = {}
    for name, run in WorstCase(core).kinds():
        before = torch.cuda.memory_reserved()
        run()
        if torch.cuda.memory_reserved() != before:
            grown[name] = torch.cuda.memory_reserved() - before
    assert not grown and torch.cuda.memory_reserved() == ready
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0       # nor was anything given back and taken again
