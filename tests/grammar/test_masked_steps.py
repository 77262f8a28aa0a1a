"""What a step with masks asks of a GPU beside its forward pass, counted on one that is not there (pretend_gpu.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from folders import FAKES, import_path

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

COUNTED = """
import json, sys
from collections import Counter
import pretend_gpu
pretend_gpu.install(compiles=False)                      # before the package looks for a GPU
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.runner import worker
from ridgeline.runner.start.kernel_steps import KernelStep, run_step
from ridgeline.sampling_params import SamplingParams

worker.load_weights = lambda *args: None                 # no kernel reads them
worker.CAPTURE_SECONDS = float("inf")                    # all graphs, however busy this machine is
core = EngineCore.start(EngineConfig.of(
    model=str(write_shape("llama-3.2-1b", 2)), load_format="dummy", skip_tokenizer_init=True, max_num_seqs=16,
    num_gpu_blocks_override=400,
))
asked, made = Counter(), pretend_gpu.Tensors.__torch_function__

def counted(self, function, types, args=(), kwargs=None):
    asked[function.__name__] += 1
    return made(self, function, types, args, kwargs)

pretend_gpu.Tensors.__torch_function__ = counted
found = {}
for rows, temperature in ((1, 0), (3, 0), (16, 0), (3, 1)):
    params = SamplingParams(temperature=temperature, structured_outputs={"regex": "a"})
    for added in (True, False, False):                   # the last one repeats the one before
        asked.clear()
        launched = Counter(pretend_gpu.LAUNCHED)
        run_step(core.executor.runner, 1, KernelStep([1] * rows, params=params, masked=True, added=added))
    kernels = pretend_gpu.LAUNCHED - launched
    found[f"{rows} rows, {temperature}"] = {"launched": kernels, "asked": asked.copy()}
print(json.dumps(found))
"""
FREE = {"__get__", "data_ptr", "stride", "__len__", "view", "numel", "__getitem__", "size", "numpy"}      # no work for a device


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("kernels")), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(FAKES), import_path()])
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, timeout=800, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    counted: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counted


@pytest.mark.parametrize("step", ["1 rows, 0", "3 rows, 0", "16 rows, 0"])
def test_a_greedy_step_with_masks_is_one_launch_and_three_copies(found: dict[str, Any], step: str) -> None:
    """The step's numbers and the masks go to the device, tokens come back. 3 rows are padded to 4, and no logits are copied."""
    assert found[step]["launched"] == {"_best_kernel": 1}
    assert {name: count for name, count in found[step]["asked"].items() if name not in FREE} == {"copy_": 3}


def test_a_sampled_step_with_masks_sends_how_rows_choose_and_nothing_else(found: dict[str, Any]) -> None:
    step = found["3 rows, 1"]
    assert step["launched"] == {"_best_kernel": 1, "_race_kernel": 1}
    assert {name: count for name, count in step["asked"].items() if name not in FREE} == {"copy_": 3, "empty": 1, "to": 1}
