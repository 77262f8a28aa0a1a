"""Every family starts in an engine and answers: what the engine counts of a model is known for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_configs import CHECKPOINTS
from tiny_models import save_checkpoint

from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.messages import Request
from ridgeline.sampling_params import SamplingParams


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_an_engine_answers(name: str, tmp_path: Path) -> None:
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 60}
    core = EngineCore.start(EngineConfig.of(model=str(save_checkpoint(name, tmp_path)), **sizes))
    core.add(Request("one", [3, 4, 5], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)))
    said: list[int] = []
    while core.has_work:
        for delta in core.step():
            assert not delta.error
            said += delta.token_ids
    core.close()
    assert len(said) == 5
