"""Steps for which a real device has no memory: all that is free is taken by a ballast, as by another process. [R-08]

What an engine has reserved it never runs out of, so that is given to the ballast as well. Needs a GPU that nobody else uses:
`make test-gpu` runs it alone, last. With simulated errors the same is tested everywhere (test_out_of_memory.py).
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import VOCAB
from tiny_models import save_checkpoint

from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.messages import Request
from ridgeline.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 2**20
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_k": 40}
# Greedy, drawn, penalised and with log-probabilities: in turn.
WAYS: list[dict[str, Any]] = [{"temperature": 0}, DRAWN, DRAWN | {"repetition_penalty": 1.2}, {"temperature": 0, "logprobs": 3}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for a step of 8,000 tokens to take 180 MiB in float32, in which no tie is decided by rounding."""
    return save_checkpoint(
        "qwen3", tmp_path_factory.mktemp("ballast"), tie_word_embeddings=False, hidden_size=512, intermediate_size=1024,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, max_position_embeddings=9000,
    )


@pytest.fixture
def core(model: Path, request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    core = EngineCore.start(EngineConfig.of(
        model=str(model), device="cuda", dtype="float32", max_num_seqs=16, max_num_batched_tokens=8192, max_model_len=8192,
        num_gpu_blocks_override=1600, **getattr(request, "param", {}),
    ))
    yield core
    core.close()


@contextmanager
def ballast(spare: int) -> Iterator[int]:
    """Holds what is free of the device but for so many bytes, without torch; yields how many."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    driver = ctypes.CDLL("libcuda.so.1")
    held: list[ctypes.c_uint64] = []
    piece, total = 2**34, 0
    while piece >= 2 * MIB:
        piece = min(piece, max(0, torch.cuda.mem_get_info()[0] - spare)) // (2 * MIB) * 2 * MIB
        address = ctypes.c_uint64()
        if piece and driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(piece)) == 0:
            held.append(address)
            total += piece
        else:
            piece //= 2
    try:
        yield total
    finally:
        torch.cuda.synchronize()
        for address in held:
            driver.cuMemFree_v2(address)


@contextmanager
def no_fragments() -> Iterator[None]:
    """Holds what is left inside of memory that torch cannot give back, down to its smallest blocks."""
    held: list[torch.Tensor] = []
    for size in (16 * MIB, 4 * MIB, MIB, 2**16, 2**12, 512):
        try:
            while True:
                held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            continue
    yield


def run(
    core: EngineCore, lengths: list[int], tokens: int, salt: str, ways: list[dict[str, Any]] = WAYS
) -> tuple[dict[int, list[int]], dict[int, str]]:
    """(answers, errors) by the number of the prompt; the same prompts each time, of which nothing is cached."""
    rng = random.Random(3)
    answers: dict[int, list[int]] = {}
    errors: dict[int, str] = {}
    for number, length in enumerate(lengths):
        prompt = [rng.randrange(3, VOCAB) for _ in range(length)]
        said = SamplingParams(**{"max_tokens": tokens, "ignore_eos": True, "seed": number} | ways[number % len(ways)])
        core.add(Request(str(number), prompt, said, cache_salt=salt))
        answers[number] = []
    while core.has_work:
        for delta in core.step():
            answers[int(delta.request_id)] += delta.token_ids
            if delta.error:
                errors[int(delta.request_id)] = delta.error
    core.scheduler.manager.pool.check()
    return answers, errors


def misfits(core: EngineCore) -> tuple[int, int]:
    """Steps that the engine made smaller, and allocations that torch refused."""
    return core.scheduler.counters.out_of_memory, torch.cuda.memory_stats()["num_ooms"]


def test_a_step_is_tried_again_smaller_and_answers_stay_the_same(core: EngineCore) -> None:
    lengths = [500] * 16
    expected, _ = run(core, lengths, 300, "first")
    began = time.perf_counter()
    assert run(core, lengths, 300, "again") == (expected, {})
    usual = time.perf_counter() - began
    assert misfits(core)[0] == 0
    with ballast(spare=64 * MIB) as held:
        assert held > 2**30
        before = torch.cuda.memory_stats()["num_ooms"]
        began = time.perf_counter()
        assert run(core, lengths, 300, "cramped") == (expected, {})
        took = time.perf_counter() - began
        steps, refused = misfits(core)
        assert steps > 0 and refused > before
    assert usual >= 0.5 * took, f"{usual:.2f} s without, {took:.2f} s with the ballast"
    assert run(core, lengths, 300, "after") == (expected, {})
    assert misfits(core)[0] == steps                     # nothing is missing any more


@pytest.mark.parametrize("core", [{"enable_chunked_prefill": False}], indirect=True)
def test_who_fits_into_no_step_fails_alone(core: EngineCore) -> None:
    """A prompt of 6,000 tokens that may not be cut, between short ones."""
    lengths = [60, 80, 6000, 100, 40, 70]
    expected, errors = run(core, lengths, 40, "first")
    assert not errors
    with ballast(spare=32 * MIB):
        answers, errors = run(core, lengths, 40, "cramped")
        assert list(errors) == [2] and "no memory" in errors[2]
        assert {**answers, 2: expected[2]} == expected
    assert run(core, lengths, 40, "after") == (expected, {})


def test_without_any_memory_everybody_is_told_and_the_engine_lives(core: EngineCore) -> None:
    """Everybody draws: greedy tokens of a step that is a graph need no memory but its own."""
    lengths = [500, 30, 2000, 9]
    expected, _ = run(core, lengths, 20, "first", [DRAWN])
    with ballast(spare=0), no_fragments():
        _, errors = run(core, lengths, 20, "cramped", [DRAWN])
        assert len(errors) == len(lengths) and all("no memory" in error for error in errors.values())
    assert run(core, lengths, 20, "after", [DRAWN]) == (expected, {})
