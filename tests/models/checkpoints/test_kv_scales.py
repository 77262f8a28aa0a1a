"""Calibrated scales of the KV cache: found under every name they have, and never silently 1.0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ridgeline.models.checkpoints.quantisation import calibrated_scales
from ridgeline.models.checkpoints.recipe import KV_SCALES, Quantisation

LAYERS = 2
QUANTISATION = Quantisation("fp8", (), KV_SCALES)
NAMES = {
    "compressed-tensors": ("self_attn.k_scale", "self_attn.v_scale"),
    "outputs of the projections": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "attention as a module": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
}


def write(directory: Path, scales: dict[str, torch.Tensor]) -> Path:
    """Over two files, beside other tensors."""
    save_file({"model.embed_tokens.weight": torch.zeros(3, 2), **dict(list(scales.items())[:2])}, directory / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(3), **dict(list(scales.items())[2:])}, directory / "b.safetensors")
    return directory


def named(
    kind: str, dtype: torch.dtype = torch.float32, values: tuple[float, ...] = (0.5, 0.25, 2.0, 0.75)
) -> dict[str, torch.Tensor]:
    names = [f"model.layers.{layer}.{name}" for layer in range(LAYERS) for name in NAMES[kind]]
    return {name: torch.tensor([value], dtype=dtype) for name, value in zip(names, values, strict=True)}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_found_under_every_name(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = write(tmp_path, named(kind, dtype))
    assert calibrated_scales(directory, QUANTISATION, LAYERS) == (((0.5, 0.25), (2.0, 0.75)), "")


def test_one_scale_for_keys_and_values(tmp_path: Path) -> None:
    directory = write(tmp_path, {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.5) for layer in range(LAYERS)})
    assert calibrated_scales(directory, QUANTISATION, LAYERS) == (((0.5, 0.5), (0.5, 0.5)), "")


@pytest.mark.parametrize(("change", "says"), [
    ({}, "all 1.0"),
    ({"model.layers.1.self_attn.v_scale": None}, "no v_scale for layer 1"),
    ({"model.layers.0.self_attn.k_scale": torch.zeros(1)}, "no k_scale for layer 0"),
    ({"model.layers.0.self_attn.k_scale": torch.ones(4)}, "not one number per layer"),
])
def test_what_was_not_calibrated_is_not_used(change: dict[str, torch.Tensor | None], says: str, tmp_path: Path) -> None:
    scales = named("compressed-tensors", values=(1.0,) * 4) | change
    directory = write(tmp_path, {name: scale for name, scale in scales.items() if scale is not None})
    found, why = calibrated_scales(directory, QUANTISATION, LAYERS)
    assert found == () and says in why


def test_a_checkpoint_without_scales_has_nothing_to_say(tmp_path: Path) -> None:
    assert calibrated_scales(write(tmp_path, {}), QUANTISATION, LAYERS) == ((), "")
    assert calibrated_scales(write(tmp_path, {}), None, LAYERS) == ((), "")
    assert calibrated_scales(tmp_path / "model.gguf", QUANTISATION, LAYERS) == ((), "")
