"""What the device's memory holds, against the ledger. Needs a GPU that nobody else uses: `make test-gpu` runs it alone, last."""

from __future__ import annotations

import pytest
import torch

from ridgeline import ledger
from ridgeline.bench.shapes import write_shape
from ridgeline.config import EngineConfig
from ridgeline.engine.core import EngineCore
from ridgeline.engine.executor import LocalExecutor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_ledger_is_right() -> None:
    """On the shapes of a real model: a tiny one drowns in what the library takes for its workspaces."""
    core = EngineCore.start(EngineConfig.of(
        model=str(write_shape("llama-3.2-1b")), load_format="dummy", skip_tokenizer_init=True, device="cuda", dtype="bfloat16",
        gpu_memory_utilization=0.9, max_num_seqs=256,
    ))  # fmt: skip
    assert isinstance(core.executor, LocalExecutor)
    measured = core.executor.runner.memory
    assert abs(ledger.error(core.config.memory, measured)) < 0.02, ledger.table(core.config.memory, measured)
    core.close()
