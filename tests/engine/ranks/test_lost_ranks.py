"""Engines of several ranks behind a front end: when one rank dies or hangs, greedy and seeded streams go on exactly in a new
engine. A tiny model in float64, where a recomputed prefix gives the same tokens again."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from served_model import write_model

from ridgeline import AsyncLLM, SamplingParams
from ridgeline.engine.client.watchdog import Supervision

pytestmark = pytest.mark.slow

LENGTH = 200
PARAMS = [
    SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH, ignore_eos=True),
]


def rank_of(llm: AsyncLLM) -> psutil.Process:
    """The process of rank 1: a child of the engine's."""
    assert llm._engine.process is not None
    children = psutil.Process(llm._engine.process.pid).children()
    (found,) = [child for child in children if "ridgeline.engine.ranks.rank" in child.cmdline()]
    return found


async def answers(llm: AsyncLLM, fault: signal.Signals | None = None) -> list[list[int]]:
    """Both answers; the fault comes when the first of them has a tenth of its tokens."""
    streams = [await llm.stream([f"prompt {place}"], params) for place, params in enumerate(PARAMS)]
    if fault is not None:
        while len(streams[0].outputs[0].outputs[0].token_ids) < LENGTH // 10:
            await asyncio.sleep(0.001)
        assert not streams[0].outputs[0].finished
        rank_of(llm).send_signal(fault)
    return [list((await each.complete())[0].outputs[0].token_ids) for each in streams]


@pytest.mark.parametrize(("mesh", "fault"), [
    ({"tensor_parallel_size": 2}, signal.SIGKILL), ({"tensor_parallel_size": 2}, signal.SIGSTOP),
    ({"pipeline_parallel_size": 2}, signal.SIGKILL),
], ids=["a rank is killed", "a rank hangs", "a stage is killed"])
def test_greedy_and_seeded_streams_outlive_a_rank(mesh: dict[str, Any], fault: signal.Signals, tmp_path: Path) -> None:
    async def scene() -> None:
        llm = AsyncLLM(
            write_model(tmp_path / "tiny"), supervision=Supervision(max_restarts=5, backoff=0.01), device="cpu",
            load_format="dummy", num_gpu_blocks_override=200, max_num_seqs=4, dtype="float64", enable_prefix_caching=False,
            **mesh,
        )
        async with llm:
            undisturbed = await answers(llm)
            assert undisturbed[0] != undisturbed[1] and {len(each) for each in undisturbed} == {LENGTH}
            assert await answers(llm, fault) == undisturbed
            assert llm.num_restarts == 1

    asyncio.run(asyncio.wait_for(scene(), 600))
