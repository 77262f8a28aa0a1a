"""Kernels for whole groups of GGUF's formats, on a GPU or in Triton's interpreter, against the definition."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folders import import_path

from ridgeline.ops.kernel_table import H200, choose


def check(device: str) -> None:
    from quantised_models import random_stored

    from ridgeline.models.checkpoints.gguf_formats import FORMATS
    from ridgeline.ops.quantised.expand import expand
    from ridgeline.ops.quantised.quantised_kernels import expand_triton, few_rows_triton, whole_groups
    from ridgeline.quant.format import common

    formats = {name: FORMATS[name] for name in ("Q8_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")}
    for name, format in (formats | {"Q4_K and Q6_K": common([FORMATS["Q4_K"], FORMATS["Q6_K"]])}).items():
        weight = random_stored(format, 40, 256, device)
        assert whole_groups(weight)
        assert torch.equal(expand_triton(weight, torch.float32), expand(weight, torch.float32)), name
        x, bias = torch.randn(3, 256, device=device), torch.randn(40, device=device)
        wanted = F.linear(x.double(), expand(weight, torch.float64), bias.double())
        torch.testing.assert_close(few_rows_triton(x, weight, bias).double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_whole_groups(run_interpreted: Any) -> None:
    if torch.cuda.is_available():
        check("cuda")
        return
    run = run_interpreted([sys.executable, __file__], PYTHONPATH=import_path())
    assert run.returncode == 0, run.stderr[-3000:]


def test_few_rows_are_multiplied_by_codes_only_where_that_was_faster() -> None:
    """Expanding and cuBLAS took 165 us for two rows of gate and up, the codes 229."""
    kernels = {(rows, outputs): choose("groups", rows, outputs, 4096, False, H200).kernel
               for rows in (2, 16, 64, 65) for outputs in (4096, 28672)}
    assert {place for place, kernel in kernels.items() if kernel == "few_rows"} == {(64, 28672)}


if __name__ == "__main__":
    check("cpu")
