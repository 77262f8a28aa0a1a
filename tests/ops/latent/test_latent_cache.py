"""What latent_write leaves in the cache, in either order of rotation and in narrow caches, and both ways to attend to it."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

from ridgeline.ops.latent import latent_reference, latent_write
from ridgeline.ops.latent.latent_attention import latent_attention
from ridgeline.ops.registry import TRITON_INTERPRETED

SIZES = {"tokens": 7, "heads": 5, "nope": 8, "rope": 8, "rank": 24, "block_size": 4}


def written(function: object, interleaved: bool, kv_dtype: str | None, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """(queries, the cache's numbers, its scales)"""
    args, kwargs = latent_write.latent_write.inputs(
        torch.Generator().manual_seed(1), dtype, "cpu", interleaved=interleaved, kv_dtype=kv_dtype, **SIZES
    )
    out = function(*args, **kwargs)  # type: ignore[operator]
    return out.clone(), args[6].float(), kwargs.get("cache_scale", torch.zeros(0))


@pytest.mark.skipif(not TRITON_INTERPRETED, reason="runs in the interpreter, below")
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_the_kernel_writes_what_the_definition_writes(interleaved: bool, kv_dtype: str | None) -> None:
    dtype = torch.float32 if kv_dtype is None else torch.bfloat16
    expected = written(latent_write.latent_write_reference, interleaved, kv_dtype, dtype)
    actual = written(latent_write.latent_write_triton, interleaved, kv_dtype, dtype)
    coarse = {"rtol": 2e-6, "atol": 2e-6} if kv_dtype is None else {"rtol": 2**-6, "atol": 2**-6}
    torch.testing.assert_close(actual[0].float(), expected[0].float(), **coarse)
    torch.testing.assert_close(actual[2], expected[2], rtol=2**-6, atol=0)
    if kv_dtype is None:
        torch.testing.assert_close(actual[1], expected[1], **coarse)
        return
    # A code and its neighbour are an eighth apart, at most. The interpreter loses the carry of a mantissa that is rounded up to
    # the next power of two: such a number is half of what it should be.
    lost_carry = (2 * actual[1] == expected[1]) & (expected[1].abs().log2() % 1 == 0)
    torch.testing.assert_close(torch.where(lost_carry, expected[1], actual[1]), expected[1], rtol=0.13, atol=2.0)
    assert int(lost_carry.sum()) < expected[1].numel() // 50


@pytest.mark.skipif(TRITON_INTERPRETED, reason="this is the interpreter")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_in_the_interpreter(run_interpreted: Any) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "kernel_writes"]
    run = run_interpreted(command)
    assert run.returncode == 0 and "4 passed" in run.stdout, run.stdout[-3000:] + run.stderr[-1000:]


def test_either_order_of_rotation_turns_by_the_same_angles() -> None:
    """Halves, brought into pairs, are the interleaved order."""
    generator = torch.Generator().manual_seed(1)
    args, kwargs = latent_write.latent_write.inputs(generator, torch.float64, "cpu", interleaved=True, **SIZES)
    q, latent, *rest = args
    order = torch.arange(8).view(4, 2).t().flatten()     # where the pairs' elements stand, first ones first
    pairs = latent_write.latent_write_reference(q, latent, *rest[:-1], rest[-1].clone(), **kwargs)
    q2 = torch.cat((q[..., :8], q[..., 8:][..., order]), dim=-1)
    latent2 = torch.cat((latent[:, :24], latent[:, 24:][:, order]), dim=-1)
    halves = latent_write.latent_write_reference(q2, latent2, *rest[:-1], rest[-1].clone(), eps=1e-6, interleaved=False)
    torch.testing.assert_close(halves[..., 8:], pairs[..., 8:][..., order], rtol=0, atol=0)


@pytest.mark.parametrize("few", [0, 1000])
def test_absorbed_and_widened_are_the_same_numbers(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in latent_attention.cases:
        if not case.timed:
            args, kwargs = latent_attention.inputs(torch.Generator().manual_seed(1), torch.float64, "cpu", **case.sizes)
            usual = latent_reference.latent_attention_reference(*args, **kwargs)
            with monkeypatch.context() as patch:
                patch.setattr(latent_reference, "FEW_QUERIES", few)
                other = latent_reference.latent_attention_reference(*args, **kwargs)
            torch.testing.assert_close(other, usual, rtol=0, atol=1e-13)


def test_a_narrow_cache_is_near_the_wide_one() -> None:
    """Three bits of mantissa: an entry is off by a sixteenth at most, and attention averages."""
    wide = written(latent_write.latent_write_reference, True, None, torch.float32)[1]
    codes, scales = written(latent_write.latent_write_reference, True, "float8_e4m3fn", torch.float32)[1:]
    live = scales.squeeze(-1) > 0
    numbers = (codes * scales.unsqueeze(-1))[live]
    assert int(live.sum()) == SIZES["tokens"]
    assert float(((numbers - wide[live]).abs() / wide[live].abs().clamp(min=0.05)).max()) < 1 / 16 + 1e-3
