"""torch's profiler around an engine's steps: marks steps, what the loop does in them, and every op.

The marks are there only while it runs. What it costs itself is measured by whoever runs the same steps without it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ridgeline.diagnose.trace import OP, PHASE, STEP
from ridgeline.engine.core import EngineCore
from ridgeline.ops.registry import set_mark, set_nvtx

# What the engine's loop calls: on which of the core's objects, and as what it is marked.
_PHASES = (
    ("scheduler", "schedule", "schedule"), ("executor", "submit", "launch"), ("executor", "sample", "sample"),
    ("executor", "collect", "collect"), ("scheduler", "update", "update"),
)  # fmt: skip


def _marked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return call


@contextmanager
def _marks(core: EngineCore) -> Iterator[None]:
    on_gpu = core.config.device == "cuda"
    kept = []
    for owner_name, method, name in _PHASES:
        owner = getattr(core, owner_name)
        kept.append((owner, method, vars(owner).get(method)))
        setattr(owner, method, _marked(PHASE + name, getattr(owner, method)))
    if not on_gpu:                                       # a GPU's kernels have names of their own
        set_mark(lambda name, function: _marked(OP + name, function))
    try:
        yield
    finally:
        for owner, method, before in kept:
            if before is None:
                delattr(owner, method)
            else:
                setattr(owner, method, before)
        if not on_gpu:
            set_nvtx(core.config.options.execution.nvtx)


def profile_steps(core: EngineCore, run: Callable[[Callable[[], list[Any]]], Any]) -> dict[str, Any]:
    """`run(step)` drives the engine, calling `step` instead of the core's own; returns the Chrome trace."""
    on_gpu = core.config.device == "cuda"                # a CPU's allocator is called hundreds of times a step
    activities = [ProfilerActivity.CPU]
    if on_gpu:
        activities.append(ProfilerActivity.CUDA)
    step = _marked(STEP, core.step)
    with _marks(core), profile(activities=activities, profile_memory=on_gpu, acc_events=True) as profiler:
        run(step)
        if on_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found: dict[str, Any] = json.loads(path.read_text())
    return found
