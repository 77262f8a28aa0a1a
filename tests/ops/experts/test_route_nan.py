"""Rows of NaN, as the padded rows of a graph may be, choose experts that exist, and change nothing for the rows beside them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.ops.experts.route import route_reference, route_triton
from ridgeline.ops.experts.router import route_rows_triton
from ridgeline.ops.registry import TRITON_INTERPRETED

HIDDEN, EXPERTS, USED = 16, 12, 4


def check_routing(routed: Callable[..., tuple[Tensor, Tensor]], x: Tensor) -> None:
    """Row 1 is NaN, and one logit of row 2."""
    alone, expected = routed(x[:1])
    chosen, weights = routed(x)
    assert torch.equal(chosen[:1], alone) and torch.equal(weights[:1], expected)
    for row in chosen.tolist():
        assert len(set(row)) == USED and all(0 <= expert < EXPERTS for expert in row)


@pytest.fixture
def logits() -> Tensor:
    made = torch.randn(3, EXPERTS, generator=torch.Generator().manual_seed(0))
    made[1], made[2, 5] = torch.nan, torch.nan
    return made


RULES = [("softmax", False), ("sigmoid", False), ("sigmoid", True)]


@pytest.mark.parametrize(("score", "biased"), RULES)
def test_the_definition_chooses_experts_that_exist(score: str, biased: bool, logits: Tensor) -> None:
    bias = torch.linspace(-0.1, 0.1, EXPERTS) if biased else None
    check_routing(lambda x: route_reference(x, USED, score, True, bias), logits)
    check_routing(lambda x: route_reference(x, USED, score, True, bias, 3, 2, "best two"), logits)


@pytest.mark.skipif(not TRITON_INTERPRETED, reason="runs in the interpreter, below")
@pytest.mark.parametrize(("score", "biased"), RULES)
def test_the_kernels_write_every_slot(score: str, biased: bool, logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    def filled(shape: tuple[int, ...], **options: object) -> Tensor:
        return torch.full(shape, -7, **options)          # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "empty", filled)
    bias = torch.linspace(-0.1, 0.1, EXPERTS) if biased else None
    check_routing(lambda x: route_triton(x, USED, score, True, bias), logits)
    generator = torch.Generator().manual_seed(1)
    x, router = torch.randn(3, HIDDEN, generator=generator), torch.randn(EXPERTS, HIDDEN, generator=generator)
    x[1] = torch.nan
    check_routing(lambda x: route_rows_triton(x, router, None, USED, score, True, bias), x)


@pytest.mark.skipif(TRITON_INTERPRETED, reason="this is the interpreter")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_in_the_interpreter(run_interpreted: Any) -> None:
    files = [__file__, str(Path(__file__).with_name("test_invariant_experts.py"))]
    wanted = "every_slot or same_bits or take_them"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files, "-k", wanted]
    run = run_interpreted(command)
    assert run.returncode == 0 and "5 passed" in run.stdout, run.stdout[-3000:]
