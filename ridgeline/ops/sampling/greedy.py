"""The best token of each row of logits, without any of the stages of sample.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.cpu import native
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance
from ridgeline.ops.sampling import sample_kernels
from ridgeline.sizes.sampling_costs import GREEDY_CASES, greedy_cost

# ── definition ────────────────────────────────────────────────────────────────────────────────────────────────────


def greedy_reference(
    logits: Tensor, tokens: Tensor, failed: Tensor, rows: Tensor | None = None, last_token: Tensor | None = None
) -> None:
    """The best id of each row of logits [S, V] into tokens [S], and which rows failed; with `rows` [S], the tokens also
    into last_token[rows].
    """
    best = argmax(logits if logits.dtype in (torch.float32, torch.float64) else logits.float())
    torch.logical_not(logits.gather(1, best[:, None]).isfinite()[:, 0], out=failed)
    tokens.copy_(best.masked_fill_(failed, 0))
    if rows is not None and last_token is not None:
        last_token.index_copy_(0, rows, tokens)


def argmax(x: Tensor) -> Tensor:
    """The first of the largest along the last dimension; a NaN counts as the largest."""
    if x.is_cpu:                     # the same answer as torch's, which does not vectorise: 4 µs a row instead of 90
        return torch.from_numpy(x.numpy().argmax(axis=-1))
    return x.argmax(dim=-1)


# ── kernels ───────────────────────────────────────────────────────────────────────────────────────────────────────


def greedy_native(
    logits: Tensor, tokens: Tensor, failed: Tensor, rows: Tensor | None = None, last_token: Tensor | None = None
) -> None:
    if logits.stride(1) != 1:
        greedy_reference(logits, tokens, failed, rows, last_token)
        return
    target = (0, 0) if rows is None or last_token is None else (rows.data_ptr(), last_token.data_ptr())
    native.library().greedy(
        logits.data_ptr(), tokens.data_ptr(), failed.data_ptr(), *target, *logits.shape, logits.stride(0)
    )


def greedy_on_gpu(
    logits: Tensor, tokens: Tensor, failed: Tensor, rows: Tensor | None = None, last_token: Tensor | None = None
) -> None:
    sample_kernels.draw(logits, None, tokens, failed, rows, last_token)


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES


# ── declaration ───────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str, *, rows: int, vocab: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Quarters, so that many are equal; the second and third row are broken."""
    logits = torch.randn(rows, vocab, generator=generator).mul_(12).round_().div_(4)
    logits[1:2], logits[2:3, vocab // 2] = -torch.inf, torch.nan
    last_token = torch.full((rows + 3,), -1)
    row = torch.randperm(rows + 3, generator=generator)[:rows]
    arguments = (logits.to(dtype), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.bool), row, last_token)
    return tuple(argument.to(device) for argument in arguments), {}


greedy = Op(
    "greedy",
    greedy_reference,
    kernels=[
        Implementation("triton", greedy_on_gpu, _triton_supports),
        Implementation("native", greedy_native, native.supports),
    ],
    cases=GREEDY_CASES,
    cost=greedy_cost,
    inputs=_inputs,
    tolerance={dtype: Tolerance(0, 0) for dtype in ("float32", "bfloat16", "float16")},
)
