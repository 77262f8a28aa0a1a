"""How the kernels of one row place a normed x in shared memory, run as plain Python: Gluon's names are torch's here.

Gluon has no interpreter. The functions that place x load, add, multiply, reshape and store, which torch does as well.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.ops.hopper import HAS_GLUON
from ridgeline.ops.packed import packed_gemv
from ridgeline.ops.quantised import codes_gemv
from ridgeline.ops.rms_norm import rms_norm_reference

pytestmark = pytest.mark.skipif(HAS_GLUON, reason="the functions are compiled here; the tests of a GPU cover them")
WARPS, EPS = 2, 1e-5


class Pointer:
    """A tensor's memory; with places added, what a load reads and a store writes."""

    def __init__(self, tensor: torch.Tensor, place: torch.Tensor | None = None) -> None:
        self.tensor, self.place, self.dtype = tensor, place, SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, place: torch.Tensor) -> Pointer:
        return Pointer(self.tensor, place)


class Shared:
    """Shared memory by chunk."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.chunks = dtype, dict[int, torch.Tensor]()

    def index(self, part: int) -> Any:
        return SimpleNamespace(store=lambda values: self.chunks.__setitem__(part, values.to(self.dtype)))


def load(source: Pointer, mask: torch.Tensor, other: float) -> torch.Tensor:
    found = source.tensor[source.place.clamp(max=source.tensor.numel() - 1)]     # type: ignore[union-attr]
    return torch.where(mask, found, torch.tensor(other, dtype=found.dtype))


def store(target: Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
    target.tensor[target.place[mask]] = values[mask]     # type: ignore[index]


GLUON = SimpleNamespace(
    float32=torch.float32, static_range=range, program_id=lambda axis: 0, BlockedLayout=lambda *parts: None,
    arange=lambda first, last, layout: torch.arange(first, last),
    zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
    sum=lambda values, axis: values.sum(axis), rsqrt=torch.rsqrt, load=load, store=store,
)


def placed(kernel: str, rows: tuple[torch.Tensor, ...], with_residual: bool, offset: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(the numbers that the products take, times the factor of the sums; the new residual)"""
    x, residual, norm = rows
    inputs, stream = len(x), torch.empty_like(x)
    dtype = packed_gemv.NAMES[x.dtype]
    pointers, memory = [Pointer(each) for each in (x, residual, norm, stream)], Shared(x.dtype)
    chunk = (512 if kernel == "packed" else 256) * WARPS
    rounds = -(-inputs // chunk)
    if kernel == "packed":
        totals = Shared(torch.float32)
        factor = packed_gemv._place_rows(
            *pointers, memory, totals, inputs, EPS, offset, rounds, "uint4", "", 128, dtype, True, with_residual, 1, WARPS
        )
        assert all(bool(sums.isfinite().all()) for sums in totals.chunks.values())
        found = [memory.chunks[part].permute(2, 0, 1, 4, 5, 3, 6).reshape(-1) for part in range(rounds)]
        factor = factor / packed_gemv.x_factor(dtype)
    else:
        factor = codes_gemv._place_row(*pointers, memory, inputs, EPS, offset, rounds, dtype, True, with_residual, 1, WARPS)
        found = [memory.chunks[part].permute(2, 0, 3, 1, 4).reshape(-1) for part in range(rounds)]
    return torch.cat(found)[:inputs].double() * factor, stream


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("kernel", ["packed", "codes"])
def test_x_times_the_norm_may_be_more_than_the_dtype_holds(
    monkeypatch: pytest.MonkeyPatch, kernel: str, with_residual: bool, dtype: torch.dtype
) -> None:
    for module in (packed_gemv, codes_gemv):
        monkeypatch.setattr(module, "gl", GLUON)
    torch.manual_seed(3)
    x, residual = (torch.randn(2560).to(dtype) for _ in range(2))
    norm = torch.rand(2560).to(dtype)
    x[[7, 1900]], norm[7] = torch.tensor([30000.0, -20000.0]).to(dtype), 12.0    # 360,000: float16 ends at 65,504
    found, stream = placed(kernel, (x, residual, norm), with_residual, 1.0)
    whole = x + residual if with_residual else x
    wanted = rms_norm_reference(whole, norm, EPS, weight_offset=1.0)
    assert isinstance(wanted, torch.Tensor) and bool(wanted.isfinite().all())
    torch.testing.assert_close(found, wanted.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert not with_residual or torch.equal(stream, whole)
