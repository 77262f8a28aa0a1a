"""Every kernel that a request can need is compiled before the first one, many at a time; launches stay what they are.

On a machine without a GPU: processes with a pretended one (pretend_gpu.py), for which kernels are compiled and never launched.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import FAKES, import_path

from ridgeline import sampling_params
from ridgeline.ops.experts.expert_products import code_tile_for, tile_for
from ridgeline.ops.experts.expert_tiles import MOST_PAIRS
from ridgeline.ops.experts.packed_products import packed_tile_for
from ridgeline.ops.kernel_table import GATED_ROWS
from ridgeline.runner.row_tables import RowTables
from ridgeline.runner.shared_prefix import FEWEST_ROWS
from ridgeline.runner.start.kernel_steps import KernelStep, kernel_steps

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def child(tmp_path: Path, *words: str, timeout: int = 800) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": import_path()}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def served(tmp_path: Path, shape: str, layers: int, **options: Any) -> dict[str, Any]:
    out = child(tmp_path, str(FAKES / "pretend_serving.py"), shape, str(layers), json.dumps(options))
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_no_request_waits_for_a_kernel_to_be_compiled(tmp_path: Path) -> None:
    found = served(tmp_path, "llama-3.1-8b", 3, max_num_seqs=300, num_gpu_blocks_override=4000)
    assert found["ready"]["ahead"] > 40 and found["ready"]["late"] == 0
    assert {name: late for name, late in found["late"].items() if late} == {}
    sampling = {"_best_kernel", "_select_kernel", "_race_kernel", "_finish_kernel", "_mask_kernel", "_logprobs_kernel"}
    assert set(found["kernels"]) >= {"prefix_kernel", "prompt_kernel", "decode_kernel", "one_row_kernel", *sampling}
    assert set(found["launched"]) == set(found["kernels"])


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "options"), [
    ("llama-3.2-1b", {}),
    ("qwen3-8b", {"max_num_seqs": 100}),
    ("qwen3-30b-a3b", {"max_num_seqs": 64}),
    ("gpt-oss-20b", {"max_num_seqs": 64}),
    ("deepseek-v2-lite", {"max_num_seqs": 200}),
    ("llama-3.1-8b", {"enforce_eager": True, "max_num_seqs": 37}),
    ("llama-3.1-8b", {"kv_cache_dtype": "fp8"}),
    ("llama-3.1-8b", {"quantization": "mlp=int4,attention=int8", "max_num_seqs": 64}),
    ("llama-3.1-8b", {"deterministic": True}),
    ("llama-3.1-8b", {"max_num_seqs": 700, "max_num_batched_tokens": 2048}),
    ("llama-3.1-8b", {"dtype": "float32", "max_num_seqs": 64}),
])
def test_nor_with_other_models_and_options(tmp_path: Path, shape: str, options: dict[str, Any]) -> None:
    found = served(tmp_path, shape, 3, num_gpu_blocks_override=4000, **options)
    assert found["ready"]["ahead"] > 20 and found["ready"]["late"] == 0
    assert {name: late for name, late in found["late"].items() if late} == {}


COLLECTED = """
import os, threading, time
import pretend_gpu
pretend_gpu.install()
import torch
from ridgeline.metrics import HAPPENED
from ridgeline.ops import compile_ahead, registry, rms_norm
from ridgeline.ops.compile_ahead import CompileAhead

told, telling = os.pipe()
second = os.fork()
if not second:                       # a process that has compiled nothing finds in the cache what this one has compiled ahead
    os.close(telling)                # or it would wait for itself when the other one fails
    if os.read(told, 1) == b"x":
        registry.log_compilations()
        rms_norm.rms_norm_triton(torch.zeros(3, 256, dtype=torch.bfloat16), torch.ones(256, dtype=torch.bfloat16), 1e-5)
        os._exit(HAPPENED["kernel_compile"] != 0 or sum(pretend_gpu.LAUNCHED.values()) != 1)
    os._exit(2)
os.close(told)

def norm(width):
    rms_norm.rms_norm_triton(torch.zeros(3, width, dtype=torch.bfloat16), torch.ones(width, dtype=torch.bfloat16), 1e-5)

def norm_elsewhere():
    with pretend_gpu.Tensors():
        norm(64)

def launches():
    return sum(pretend_gpu.LAUNCHED.values())

compile_ahead.platform.cpu_count = lambda: 2
compile_ahead.platform.available_memory = lambda: 0      # threads compile: processes that do are in test_compile_child.py
registry.log_compilations()
norm(64)
assert (launches(), HAPPENED["kernel_compile"], registry.COMPILED_AHEAD) == (1, 1, [])
widths = [128, 256]
at_once = most = 0
build = compile_ahead._Builders._build
def counted(self, compile_kernel):
    global at_once, most
    at_once += 1
    most = max(most, at_once)
    deadline = time.monotonic() + 60
    while most < 2 and time.monotonic() < deadline:      # the first waits for the second
        time.sleep(0.001)
    try:
        return build(self, compile_kernel)
    finally:
        at_once -= 1
compile_ahead._Builders._build = counted
run, look_up = registry.triton.JITFunction.run, registry.triton.JITFunction._do_compile
looked_up = []
def look_up_counted(kernel, key, *others):
    looked_up.append(key)
    return look_up(kernel, key, *others)
registry.triton.JITFunction._do_compile = look_up_counted
with CompileAhead(torch.device("cuda", 0)) as ahead:
    with ahead.collecting():
        for width in [*widths, *widths]:
            norm(width)
        assert launches() == 1, "launched while collecting"
        assert len(looked_up) == len(widths), "a variant was looked for again, while it was being compiled"
        other = threading.Thread(target=norm_elsewhere)
        other.start(), other.join()
        assert launches() == 2, "another thread's launch was taken"
    assert registry.triton.JITFunction.run is run
    norm(64)
    assert launches() == 3, "not launched afterwards"
    ahead.finish()
assert len(registry.COMPILED_AHEAD) == len(widths) and most == 2, (registry.COMPILED_AHEAD, most)
for width in widths:
    norm(width)
assert launches() == 3 + len(widths) and HAPPENED["kernel_compile"] == 1, "compiled again"
norm(2048)
assert HAPPENED["kernel_compile"] == 2, "what nobody collected is compiled when it is launched, and counted"

compile_ahead._Builders._build = lambda self, compile_kernel: 1 / 0
with CompileAhead(torch.device("cuda", 0)) as ahead:
    with ahead.collecting():
        norm(4096)
    ahead.finish()
norm(4096)
assert HAPPENED["kernel_compile"] == 3, "one that failed is compiled when it is launched"
try:
    with CompileAhead(torch.device("cuda", 0)) as ahead, ahead.collecting():
        norm(32)
        raise KeyError("a step that fails")
except KeyError:
    pass
assert registry.triton.JITFunction.run is run
before = launches()
norm(16)
norm(32)
assert launches() == before + 2, "what a step that failed has collected is compiled when it is launched"
os.write(telling, b"x")
assert os.waitpid(second, 0)[1] == 0, "compiled again in another process"
print("ok")
"""


def test_launches_are_collected_and_compiled_at_once(tmp_path: Path) -> None:
    assert child(tmp_path, "-c", COLLECTED).split()[-1] == "ok"


@pytest.mark.parametrize(("max_rows", "budget", "max_model_len"), [
    (1024, 8192, 131072), (1, 2, 4), (4, 8192, 1000), (64, 48, 4096), (8192, 8192, 100), (7, 512, 2), (300, 64, 40000),
])
def test_the_steps_are_ones_that_can_be(max_rows: int, budget: int, max_model_len: int) -> None:
    steps = list(kernel_steps(max_rows, budget, max_model_len, drafts=True))
    for step in steps:
        drafts = sum(step.widths)
        assert 0 < len(step.counts) <= max_rows and min(step.counts) > 0 and sum(step.counts) + drafts <= budget
        assert step.past + max(step.counts) + max(step.widths, default=0) < max_model_len
        assert step.counts == [1] * step.counts.count(1) + [count for count in step.counts if count > 1]
    assert sum(steps[0].counts) == min(budget, min(max_rows, budget) * (max_model_len - 1))      # the longest to compile
    assert [1] in [step.counts for step in steps]
    going_on = [step for step in steps if not step.added]
    assert all(max(step.counts) == 1 and step.past == 0 and step.params.temperature == 0 for step in going_on)
    assert len(going_on) < max_model_len


def test_steps_of_every_kind_are_among_them() -> None:
    steps = list(kernel_steps(256, 8192, 32768))
    assert not any(step.widths for step in steps)
    assert {1 + max(step.widths, default=0) for step in kernel_steps(256, 8192, 32768, drafts=True)} == {1, 2, 4, 8, 16}

    def some(kind: str, holds: Any) -> None:
        assert any(holds(step) for step in steps), kind

    alone = {len(step.counts) for step in steps if max(step.counts) == 1 and not step.past}
    assert alone >= {1, 2, 4, 8, 16, 32, 64, 128, 256}
    some("decodes beside a prompt", lambda step: step.counts[0] == 1 and step.counts[-1] > 1)
    some("a shared prefix", lambda step: step.past * (len(step.counts) - 1) >= 32_768)
    assert {len(step.counts) for step in steps if step.past} >= {FEWEST_ROWS, 8, 16, 32, 64, 128, 256}
    some("gate and up written whole", lambda step: sum(step.counts) == GATED_ROWS - 1)
    some("a mask", lambda step: step.masked)
    some("a later chunk of a prompt", lambda step: step.past and max(step.counts) > 1)
    some("log-probabilities", lambda step: step.params.logprobs is not None)
    some("log-probabilities of a prompt", lambda step: step.params.prompt_logprobs is not None)
    some("a penalty", lambda step: step.params.repetition_penalty != 1 and step.params.temperature > 0)
    some("a filter", lambda step: step.params.top_k and len(step.counts) == 1)


@pytest.mark.parametrize(("experts", "used"), [(8, 2), (16, 1), (32, 4), (64, 6), (128, 8), (256, 8), (512, 10)])
def test_experts_are_compiled_for_every_number_of_tokens(experts: int, used: int) -> None:
    """Whatever a step's tokens decide of the kernels of a mixture is decided so in one of these steps."""

    def chosen(tokens: int) -> set[Any]:
        pairs = tokens * used
        plain = [tile_for(pairs, experts, gated, 2, 232_448) for gated in (True, False)]
        coded = [code_tile_for(pairs, experts, gated) for gated in (True, False)]
        of_each = {"plain": plain, "coded": coded, "packed": [packed_tile_for(pairs, experts)]}
        rows = {"plain": plain[0].rows, "coded": coded[0].rows, "packed": of_each["packed"][0].block_rows}
        kernels = {(kind, which, tile) for kind, tiles in of_each.items() for which, tile in enumerate(tiles)}
        return kernels | {(kind, "sort", rows[kind]) for kind in rows if pairs <= MOST_PAIRS}

    compiled = set[Any]()
    for step in kernel_steps(256, 8192, 32768, experts_used=used):
        compiled |= chosen(sum(step.counts))
    assert set[Any]().union(*map(chosen, (*range(1, 257), *range(272, 8193, 16)))) == compiled


def test_tables_of_all_groups_are_aligned() -> None:
    """Or a kernel would have a second variant for those that are not."""
    tables = RowTables(num_groups=3, block_size=16, max_rows=2, max_model_len=100, device=torch.device("cpu"))
    assert [group.data_ptr() % 16 for group in tables.groups] == [0, 0, 0] and tables.blocks.shape[2] >= 7


def test_a_step_is_greedy_unless_it_says_otherwise() -> None:
    assert KernelStep([1]).params.temperature == 0


def test_parameters_of_steps_need_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's process makes them, which checks and changes none."""
    found = [step.params for step in kernel_steps(64, 512, 1024, drafts=True)]
    monkeypatch.setattr(sampling_params, "_are_checked", True)
    for mine, checked in zip(kernel_steps(64, 512, 1024, drafts=True), found, strict=True):
        assert repr(mine.params).replace("temperature=0,", "temperature=0.0,") == repr(checked)
