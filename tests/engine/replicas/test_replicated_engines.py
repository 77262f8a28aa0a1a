"""Two real engines behind one front end, on a tiny model in float32, where a recomputed prefix gives the same tokens again."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from served_model import write_model

from ridgeline import SamplingParams
from ridgeline.engine.client.watchdog import Supervision
from ridgeline.engine.replicas.replicated_llm import ReplicatedLLM

pytestmark = pytest.mark.slow

LENGTH = 200
PARAMS = [
    SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH, ignore_eos=True),
]


async def answers(llm: ReplicatedLLM, kill_after: int = 0) -> list[list[int]]:
    """Both answers; their engines are killed when the first one has `kill_after` tokens."""
    streams = [await llm.stream([f"prompt {place}"], params) for place, params in enumerate(PARAMS)]
    if kill_after:
        while len(streams[0].outputs[0].outputs[0].token_ids) < kill_after:
            await asyncio.sleep(0.001)
        busy = next(each for each in llm.engines if any(one.stream is streams[0] for one in each.requests.by_wire_id.values()))
        assert busy._engine.process is not None
        os.kill(busy._engine.process.pid, signal.SIGKILL)
    return [list((await each.complete())[0].outputs[0].token_ids) for each in streams]


def test_greedy_and_seeded_streams_outlive_their_engine(tmp_path: Path) -> None:
    async def scene() -> None:
        rules = Supervision(max_restarts=5, backoff=0.01)
        llm = ReplicatedLLM(
            write_model(tmp_path / "tiny"), supervision=rules, data_parallel_size=2, device="cpu", load_format="dummy",
            num_gpu_blocks_override=600, max_num_seqs=8, dtype="float32", enable_prefix_caching=False,
        )
        async with llm:
            undisturbed = await answers(llm)
            assert await answers(llm, kill_after=40) == undisturbed and llm.num_moved >= 1
            while [each.state for each in llm.engines] != ["ok", "ok"]:
                await asyncio.sleep(0.01)
            assert await answers(llm) == undisturbed and llm.num_restarts == 1

    asyncio.run(asyncio.wait_for(scene(), 400))
