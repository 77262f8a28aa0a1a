"""The one-shot all-reduce in Triton's interpreter: ranks are processes that share the memory of their buffers, so they truly wait
for each other's flags. tests/runner/test_gpu_ranks.py runs it on GPUs."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from typing import Any

import pytest
import torch
from test_triton_compile import compile_for_h100
from torch import Tensor

from ridgeline.ops import one_shot_sum as module
from ridgeline.ops.one_shot_sum import one_shot_sum
from ridgeline.ops.registry import TRITON_INTERPRETED
from ridgeline.sizes.mesh_shape import ONE_SHOT_CHUNK, ONE_SHOT_CTAS, one_shot_bytes

RANKS = 3
# Not multiples of a vector, and of one CTA and of several in turn: each CTA counts its own calls, and takes its slots in turn.
MESSAGES = [(1, torch.float32), (3000, torch.float16), (1025, torch.float32), (7, torch.float32), (2500, torch.float32),
            (4097, torch.bfloat16), (5, torch.bfloat16)]


def numbers(rank: int, message: int) -> Tensor:
    size, dtype = MESSAGES[message]
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * message + rank)).to(dtype)


def sum_all(rank: int, buffers: list[Tensor], sums: list[Tensor]) -> None:
    bases = torch.tensor([buffer.data_ptr() for buffer in buffers])
    for message, found in enumerate(sums):
        found.copy_(one_shot_sum(numbers(rank, message), bases, rank))


@pytest.mark.skipif(not TRITON_INTERPRETED, reason="runs in the interpreter, below")
def test_ranks_find_the_same_sums_call_after_call() -> None:
    buffers = [torch.zeros(one_shot_bytes(RANKS) // 8, dtype=torch.int64).share_memory_() for _ in range(RANKS)]
    sums = [[torch.zeros(size, dtype=dtype).share_memory_() for size, dtype in MESSAGES] for _ in range(RANKS)]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=sum_all, args=(rank, buffers, sums[rank]), daemon=True) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(600)
    assert [process.exitcode for process in ranks] == [0] * RANKS
    for message, (_, dtype) in enumerate(MESSAGES):
        given = [numbers(rank, message).float() for rank in range(RANKS)]
        expected = (given[0] + given[1] + given[2]).to(dtype)
        for rank in range(RANKS):
            assert torch.equal(sums[rank][message], sums[0][message])
        if dtype == torch.bfloat16:                      # the interpreter cuts off where a GPU rounds
            torch.testing.assert_close(sums[0][message], expected, rtol=2**-7, atol=0)
        else:
            assert torch.equal(sums[0][message], expected)


@pytest.mark.skipif(TRITON_INTERPRETED, reason="this is the interpreter")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_in_the_interpreter(run_interpreted: Any) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__, "-k", "same_sums"]
    run = run_interpreted(command)
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout[-3000:]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None or TRITON_INTERPRETED, reason="no compiler")
def test_compiled_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Whole vectors, flags that other GPUs see, and no wait without an end."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "tl", module.tl)
    text = compile_for_h100(
        module, "_one_shot_sum_kernel",
        {"x_ptr": "*bf16", "base_ptr": "*i64", "size": "i32", "rank": "i32", "most_polls": "i32"},
        {"RANKS": 4, "PLACES": 4, "BLOCK": ONE_SHOT_CHUNK // 2, "CHUNK": ONE_SHOT_CHUNK, "CTAS": ONE_SHOT_CTAS},
        aligned=("x_ptr", "base_ptr", "size"), num_warps=4,
    )
    assert text.count("ld.global.cg.v4.b32") == 4 * 2 and text.count("st.global.v4.b32") == 2 * 2
    assert text.count("release.max.s64") == text.count("acquire.add.u64") == 1 and text.count("trap;") == 1
    assert ".sys." in text and "bar.sync" in text[text.index("st.global.v4") : text.index("release.max")]
    assert "add.f32" in text or "add.rn.f32" in text     # three and more are not added in bfloat16
