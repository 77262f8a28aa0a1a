"""The core after a step that failed: dead, and every later call says why in one line."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from fake_runner import FakeRunner
from test_end_tokens import directory
from test_model_config import LLAMA

from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.errors import BadRequest, EngineDead
from ridgeline.messages import Request, StepPlan
from ridgeline.resolve import DeviceFacts, resolve
from ridgeline.sampling_params import SamplingParams


class Failing(FakeRunner):
    """A device that fails in the middle of its third step."""

    error: BaseException

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        if plan.step == 3:
            raise self.error

    def close(self) -> None:
        pass


def core_with(error: BaseException, folder: Path) -> EngineCore:
    options = EngineConfig.of(model=str(directory(folder, config=LLAMA)), num_gpu_blocks_override=20, max_num_seqs=2)
    config = resolve(options, DeviceFacts("cpu", 2**28, ("float32",)))
    runner = Failing(config.groups, config.num_blocks)
    runner.error = error
    return EngineCore(config, runner)


def request(name: str) -> Request:
    return Request(name, [5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True))


@pytest.mark.parametrize(("error", "reason"), [
    (RuntimeError("CUDA error:\n  out of luck"), "RuntimeError: CUDA error: out of luck"),
    (EngineDead("rank 1 ended with code -9"), "rank 1 ended with code -9"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
])
def test_a_failed_step_is_the_last(error: BaseException, reason: str, tmp_path: Path) -> None:
    core = core_with(error, tmp_path)
    core.add(request("a"))
    core.step()
    core.step()
    with pytest.raises(type(error)):
        core.step()
    for call in (core.step, lambda: core.add(request("b")), core.step):
        with pytest.raises(EngineDead) as caught:
            call()
        assert str(caught.value) == f"the engine has stopped: {reason}"
    core.abort("a")
    core.close()


def test_a_bad_request_kills_nothing(tmp_path: Path) -> None:
    core = core_with(RuntimeError("never reached"), tmp_path)
    with pytest.raises(BadRequest):
        core.add(Request("a", [10**6], SamplingParams()))
    core.add(request("b"))
    assert [delta.request_id for delta in core.step()] == ["b"]


def test_young_garbage_is_looked_for_while_a_long_step_runs_and_nowhere_else(tmp_path: Path) -> None:
    options = EngineConfig.of(
        model=str(directory(tmp_path, config=LLAMA | {"max_position_embeddings": 4096})), num_gpu_blocks_override=300,
        max_num_seqs=2, max_model_len=4096, max_num_batched_tokens=2048, step_time_ms=0,
    )
    config = resolve(options, DeviceFacts("cpu", 2**28, ("float32",)))
    events: list[str] = []

    class Told(FakeRunner):
        def submit(self, plan: StepPlan) -> None:
            super().submit(plan)
            events.append(f"launched {plan.total_tokens}")

        def close(self) -> None:
            pass

    core = EngineCore(config, Told(config.groups, config.num_blocks))
    core.add(Request("a", [5] * 3000, SamplingParams(max_tokens=3, ignore_eos=True)))
    noted = lambda phase, info: events.append(f"collected {info['generation']}") if phase == "stop" else None   # noqa: E731
    gc.collect()
    gc.callbacks.append(noted)
    thresholds = gc.get_threshold()
    gc.set_threshold(0)                                  # nothing is collected by itself
    try:
        while core.has_work:
            core.step()
        gc.disable()                                     # and this process wants none collected
        core.add(Request("b", [6] * 3000, SamplingParams(max_tokens=1, ignore_eos=True)))
        while core.has_work:
            core.step()
    finally:
        gc.callbacks.remove(noted)
        gc.enable()
        gc.set_threshold(*thresholds)
    assert events[:5] == ["launched 2048", "collected 1", "launched 952", "launched 1", "launched 1"]
    assert events[5:] == ["launched 2048", "launched 952"]
    core.close()
