"""The layout of codes on a GPU: the bytes that are counted are those of the tensors that packing makes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_writer import write_gguf
from quantised_models import random_stored
from test_gguf import random_packed

from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import Axis, Communicator
from ridgeline.layers.linear import Linear
from ridgeline.models.checkpoints.gguf_formats import FORMATS
from ridgeline.models.checkpoints.linear_formats import LinearFormats, LinearShape
from ridgeline.models.checkpoints.quantisation_check import _by_general_kernels, _speed
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config
from ridgeline.models.stages import weight_bytes
from ridgeline.models.weights import load_weights
from ridgeline.ops.kernel_table import H200, choose
from ridgeline.ops.packed.block_weight import block_form
from ridgeline.plan.capacity import Capacity, kernel_facts
from ridgeline.plan.prediction import Setup
from ridgeline.plan.public_models import PlannedModel, gpu_weights
from ridgeline.quant.choose import schemes
from ridgeline.quant.format import FP8_BLOCK, FP8_ROW, INT8_ROW, MXFP4, Scales, WeightFormat, common, uint4
from ridgeline.quant.gpu_layout import (
    BLOCKS,
    EIGHT_BITS,
    FOUR_BITS,
    GENERAL,
    LIBRARY,
    OWN,
    STORED,
    block_form_of,
    gpu_bytes,
    gpu_layout,
    may_pack,
    served,
)
from ridgeline.quant.packed import Packed
from ridgeline.quant.quantised import TENSORS, Quantised
from ridgeline.quant.scheme import Scheme, Unquantised
from ridgeline.resolve import DeviceFacts, resolve
from ridgeline.sizes import ledger
from ridgeline.sizes.hardware import DEVICES

OTHER = H200._replace(hopper=False)
PARTS = {name: (name,) for name in FORMATS} | {
    "Q4_K and Q6_K": ("Q4_K", "Q6_K"), "Q4_K and Q5_K": ("Q4_K", "Q5_K"), "Q4_0 and Q4_1": ("Q4_0", "Q4_1"),
    "Q5_0 and Q5_1": ("Q5_0", "Q5_1"),
}
LAYOUTS = {
    "Q4_0": FOUR_BITS, "MXFP4": FOUR_BITS, "Q8_0": EIGHT_BITS, "TQ1_0": STORED, "TQ2_0": STORED, "Q4_0 and Q4_1": STORED,
    "Q5_0 and Q5_1": STORED,
}
NVFP4 = WeightFormat("e2m1", Scales((1, 16), "float8_e4m3fn", outer=Scales((1, 0))))


def format_of(name: str) -> WeightFormat:
    found = common(FORMATS[each] for each in PARTS[name])
    assert found is not None
    return found


def packed_bytes(format: WeightFormat, outputs: int, inputs: int, gated: bool) -> int:
    """Of the tensors that the scheme leaves in the linear."""
    linear = torch.nn.Module()
    linear.format, linear.quantised = format, random_stored(format, outputs, inputs, "cpu")
    linear.weight, linear.is_loaded, linear.packed, linear.dtype = linear.quantised.weight, True, None, torch.bfloat16
    linear.rows = {"gate": outputs // 2, "up": outputs // 2} if gated else {"": outputs}
    assert (block_form(linear.quantised) or "") == block_form_of(format)
    linear.packed = Packed(format, Unquantised())._packed(linear, linear.quantised)
    found = gpu_layout(format, outputs, inputs, gated, H200)
    assert (linear.packed is not None) == (found != STORED)
    if linear.packed is not None:
        return linear.packed.nbytes
    stored = [getattr(linear.quantised, name) for name in TENSORS]
    return sum(each.nbytes for each in stored if each is not None)


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 512), (40, 256), (37, 768), (80, 1280), (48, 2816)])
@pytest.mark.parametrize("name", PARTS)
def test_the_count_is_the_bytes_that_packing_makes(name: str, outputs: int, inputs: int) -> None:
    format = format_of(name)
    for gated in (False, True) if outputs % 2 == 0 else (False,):
        counted, held = gpu_bytes(format, outputs, inputs, gated, H200), packed_bytes(format, outputs, inputs, gated)
        assert counted == held or (may_pack(format) and counted > held)          # numbers decide: no less than is held
        found = gpu_layout(format, outputs, inputs, gated, H200)
        assert found == (LAYOUTS.get(name, BLOCKS) if not gated or outputs % 16 == 0 else STORED)
    assert gpu_bytes(format, outputs, inputs, False, OTHER) == format.nbytes(outputs, inputs)


@pytest.mark.parametrize("inputs", [96, 160, 544])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_the_count_of_inputs_that_are_no_multiple_of_256(name: str, inputs: int) -> None:
    assert gpu_bytes(FORMATS[name], 24, inputs, False, H200) == packed_bytes(FORMATS[name], 24, inputs, False)


def test_how_much_the_layout_takes() -> None:
    """Bits of a weight, where nothing is padded: docs/techniques/int4-weights.md has them."""
    bits = {name: 8 * gpu_bytes(FORMATS[name], 4096, 4096, False, H200) / 4096**2 for name in FORMATS}
    assert bits["Q4_K"] == 4.625 and bits["Q6_K"] == 6.625 and bits["Q5_K"] == 6.625 and bits["Q8_0"] == 8.5
    assert 8 * gpu_bytes(format_of("Q4_K and Q6_K"), 4096, 4096, False, H200) / 4096**2 == 7.125
    assert bits["MXFP4"] == 4.25 and 8 * (gpu_bytes(NVFP4, 4096, 4096, False, H200) - 4 * 4096) / 4096**2 == 4.5
    padded = gpu_bytes(FORMATS["Q4_K"], 4096, 768, False, H200) / FORMATS["Q4_K"].nbytes(4096, 768)
    assert padded == pytest.approx(4 / 3, rel=0.001)


def test_numbers_decide_only_where_16_bits_may_not_hold_a_scale() -> None:
    wide = uint4(128, "float32")
    assert may_pack(wide) and gpu_layout(wide, 64, 512, False, H200) == STORED
    assert gpu_bytes(wide, 64, 512, False, H200) == wide.nbytes(64, 512)         # the larger one
    assert gpu_bytes(wide, 64, 128, False, H200) > wide.nbytes(64, 128)          # padding makes the packed one larger
    for format in (uint4(128), uint4(64, "bfloat16", "code"), MXFP4, NVFP4):
        assert not may_pack(format) and gpu_layout(format, 64, 512, True, H200) == FOUR_BITS and served(format, H200) == OWN
        assert served(format, OTHER) == GENERAL
    assert gpu_layout(uint4(128), 72, 512, True, H200) == STORED                 # gates and partners share strips of 16
    assert gpu_layout(uint4(24), 64, 480, False, H200) == STORED


# ── whole models ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Rank(Axis):
    """One rank of several, as far as loading is concerned."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def two_layers(path: Path, kind: str, wide: int, tied: bool = False) -> Path:
    """A llama whose matrices are packed as `kind`; the first layer's v and down as Q6_K where that is a mix of types."""
    hidden, heads = 512, 4
    shapes = {"attn_q": (hidden, hidden), "attn_k": (hidden, hidden), "attn_v": (hidden, hidden), "attn_output": (hidden, hidden),
              "ffn_gate": (wide, hidden), "ffn_up": (wide, hidden), "ffn_down": (hidden, wide)}
    tensors: dict[str, Any] = {
        f"blk.{layer}.{name}.weight": random_packed(
            "Q6_K" if kind == "Q4_K" and layer == 0 and name in ("attn_v", "ffn_down") else kind, shape, seed)
        for layer in range(2) for seed, (name, shape) in enumerate(shapes.items())
    }
    norms = ["output_norm", *(f"blk.{layer}.{name}_norm" for layer in range(2) for name in ("attn", "ffn"))]
    tensors |= {f"{name}.weight": np.ones(hidden, np.float32) for name in norms}
    tensors["token_embd.weight"] = np.random.default_rng(0).normal(size=(64, hidden)).astype(np.float32)
    if not tied:
        tensors["output.weight"] = random_packed("Q6_K" if kind.endswith("_K") else kind, (64, hidden), 9)
    metadata = {"general.architecture": "llama"} | {f"llama.{key}": value for key, value in {
        "block_count": 2, "context_length": 128, "embedding_length": hidden, "feed_forward_length": wide,
        "attention.head_count": heads, "attention.head_count_kv": heads, "attention.layer_norm_rms_epsilon": 1e-5,
    }.items()}
    return write_gguf(path, metadata, tensors)


def loaded(path: Path, rank: int, ranks: int) -> Decoder:
    """As on a Hopper GPU: codes are kept and packed."""
    config = load_model_config(path)
    choose = schemes(LinearFormats(config, "none", "cuda", ranks), Unquantised())

    @functools.cache
    def scheme(place: str) -> Scheme:
        chosen = choose(place)
        if isinstance(chosen, Quantised):
            chosen.keeps = True
        return chosen

    made = Decoder(config, Communicator(Rank(rank, ranks)), torch.float32, "cpu", 32, scheme)
    load_weights(made, path, config)
    return made


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("kind", "wide"), [
    ("Q4_K", 768), ("Q5_K", 1024), ("Q6_K", 768), ("Q4_0", 544), ("Q5_1", 544), ("Q8_0", 544),
])
def test_every_rank_holds_what_was_counted(kind: str, wide: int, ranks: int, tmp_path: Path) -> None:
    """768 inputs in two shards cut blocks of 256; 544 in four are 136, which cuts groups of 32."""
    path = two_layers(tmp_path / "m.gguf", kind, wide)
    config = load_model_config(path)
    formats = LinearFormats(config, "none", "cuda", ranks)
    counted = {shape.path: shape.nbytes(format, H200) for shape, format in formats.shapes()}
    assert len(counted) == 9                             # four linears of two layers, and the head
    for rank in range(ranks):
        made = loaded(path, rank, ranks)
        held = {name: module.scheme.read_bytes(module, 1) for name, module in made.named_modules() if isinstance(module, Linear)}
        assert held == counted
        if ranks == 1:
            assert made.weight_bytes == weight_bytes(config, "float32", "cuda")


def test_ledger_and_plan_count_what_the_kind_of_gpu_holds(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "m.gguf", "Q5_K", 768)
    config, found = load_model_config(path), {}
    for name in ("H200", "A100"):
        sheet = DEVICES[name]
        facts = kernel_facts(sheet)
        device = DeviceFacts("cuda", sheet.usable, ("float16",), 0, kernels=facts)
        options = EngineConfig.of(model=str(path), dtype="float16", max_model_len=128, max_num_seqs=4)
        resolved = resolve(options, device)
        model = PlannedModel("m", config)
        kept = gpu_weights(model, "float16", 1, facts)
        assert kept is not None and kept.format == "int4" and kept.linears > 5.5 / 8 and kept.head > 6.5 / 8
        setup = Setup(model=model, device=sheet, dtype="float16", weights=kept.format, stored=kept)
        assert Capacity.of(setup, 128).parts(4)[ledger.WEIGHTS] == resolved.memory[ledger.WEIGHTS]
        assert setup.shape.weight_bytes == kept.linears and setup.computed == "float16"
        other = "fp8" if name == "H200" else "bfloat16"
        assert Setup(model=model, device=sheet, weights=other, stored=kept).kept is None
        found[name] = resolved.memory[ledger.WEIGHTS]
        rotation = resolved.memory[ledger.WEIGHTS] - weight_bytes(config, "float16", "cuda", kernels=facts)
        assert rotation == 2 * 64 * 128 * 4
    assert found["H200"] > 1.05 * found["A100"]


def test_a_head_that_is_the_embedding_is_planned_wide(tmp_path: Path) -> None:
    model = PlannedModel("m", load_model_config(two_layers(tmp_path / "m.gguf", "Q4_K", 768, tied=True)))
    kept = gpu_weights(model, "float16", 1, H200)
    assert kept is not None and kept.head == 2.0 and kept.linears < 1


def test_reasons_name_what_this_gpu_does(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "m.gguf", "Q4_K", 768)
    said = {}
    for facts in (H200, OTHER):
        device = DeviceFacts("cuda", 2**34, ("float16",), 0, kernels=facts)
        said[facts.hopper] = resolve(EngineConfig.of(model=str(path), max_model_len=128), device).reasons["quantization"]
    assert "decode is faster than in bfloat16 up to about 100 rows" in said[True] and "Hopper" not in said[True]
    assert "may be slower than in bfloat16" in said[False] and "faster" not in said[False]


def test_steps_of_more_than_one_row_in_q8_0_do_not_expand_weights(tmp_path: Path) -> None:
    path = two_layers(tmp_path / "m.gguf", "Q8_0", 544)
    said = {}
    for facts in (H200, OTHER):
        device = DeviceFacts("cuda", 2**34, ("float16",), 0, kernels=facts)
        said[facts.hopper] = resolve(EngineConfig.of(model=str(path), max_model_len=128), device).reasons["quantization"]
    assert "with 128 rows, and in prompts, slower" in said[True] and "more than 768 rows expand each weight" in said[True]
    assert "steps of more than one row may expand each weight first" in said[False]
    assert served(FORMATS["Q8_0"], H200) == OWN and served(FORMATS["Q8_0"], OTHER) == GENERAL


def test_a_scale_for_each_output_is_packed_with_any_inputs_that_kernels_read_and_the_log_says_where_not() -> None:
    rows = WeightFormat("int8", Scales((1, 0)))
    for inputs, found, said in ((580, STORED, "kept packed as"), (576, EIGHT_BITS, "kept in 8 bits"), (96, EIGHT_BITS, "")):
        shape = LinearShape("layers.0.mlp.down", {"": 1024}, inputs, inputs)
        assert gpu_layout(rows, 1024, inputs, False, H200) == found
        slow = {rows.name} if _by_general_kernels(shape, rows, H200) else set()
        assert _speed([rows], slow, inputs, "bfloat16", H200).startswith(said)
        assert gpu_bytes(rows, 1024, inputs, False, H200) == packed_bytes(rows, 1024, inputs, False)
    assert "kept in 4 to 8 bits" in _speed([FORMATS["Q8_0"], FORMATS["Q6_K"]], set(), 1024, "float16", H200)


@pytest.mark.parametrize(
    "format", [uint4(128), uint4(128, "float32"), MXFP4, NVFP4, FORMATS["Q4_K"], FORMATS["Q8_0"], FP8_ROW, FP8_BLOCK]
)
def test_hopper_without_gluon_keeps_what_is_stored(format: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older Triton: none of the packed kernels runs, so nothing is packed for them, and the log says what that costs."""
    older = H200._replace(gluon=False)
    assert gpu_layout(format, 64, 512, False, older) == STORED
    assert gpu_bytes(format, 64, 512, False, older) == format.nbytes(64, 512)
    assert served(format, older) == (LIBRARY if format == FP8_ROW else GENERAL)
    monkeypatch.setattr("ridgeline.quant.packed.H200", older)
    linear = torch.nn.Module()
    linear.format, linear.quantised = format, random_stored(format, 64, 512, "cpu")
    linear.weight, linear.is_loaded, linear.packed, linear.dtype = linear.quantised.weight, True, None, torch.bfloat16
    linear.rows = {"": 64}
    linear.packed = Packed(format, Unquantised())._packed(linear, linear.quantised)
    assert linear.packed is None
    for name in ("4-bit", "6-bit", "8-bit"):             # what is packed all the same is multiplied by
        assert {choose(name, rows, 64, 512, False, older).kernel for rows in (1, 2, 128, 4096)} == {"expand"}


@pytest.mark.parametrize(("format", "dtype", "size", "is_packed"), [
    (uint4(128, "bfloat16"), torch.float16, 2.0**-10, True), (uint4(128, "bfloat16"), torch.float16, 2.0**-30, False),
    (uint4(128, "bfloat16"), torch.float16, 2.0**17, False), (uint4(128, "bfloat16"), torch.bfloat16, 2.0**-30, True),
    (uint4(0, "bfloat16"), torch.float16, 2.0**-30, False), (uint4(128, "float32"), torch.float16, 2.0**-30, False),
    (WeightFormat("int8", Scales((1, 32), "bfloat16")), torch.float16, 2.0**-30, False),
    (WeightFormat("int8", Scales((1, 32), "bfloat16")), torch.bfloat16, 2.0**-30, True),
    (WeightFormat("int8", Scales((1, 32), "bfloat16")), torch.bfloat16, 2.0**20, False),
    (WeightFormat("int8", Scales((1, 0))), torch.float16, 2.0**-30, True), (FORMATS["Q8_0"], torch.bfloat16, 65504.0, True),
])
def test_scales_that_the_kernels_would_lose_stay_as_stored(
    format: WeightFormat, dtype: torch.dtype, size: float, is_packed: bool
) -> None:
    """Weights of several rows are 16-bit numbers, and so are scales of groups. One group of zeros, with the least scale there
    is, changes nothing."""
    linear = torch.nn.Module()
    stored = random_stored(format, 64, 512, "cpu")
    scale = torch.full_like(stored.scale, size)
    if scale.dim() > 1 and scale.shape[1] > 1:
        scale[3, 1] = torch.finfo(scale.dtype).tiny
    linear.format, linear.quantised, linear.rows, linear.dtype = format, stored._replace(scale=scale), {"": 64}, dtype
    linear.weight, linear.is_loaded, linear.packed = stored.weight, True, None
    linear.packed = Packed(format, Unquantised())._packed(linear, linear.quantised)
    assert (linear.packed is not None) == is_packed


def test_int8_is_packed_where_x_keeps_its_bits() -> None:
    groups, rows = (WeightFormat("int8", Scales((1, 128), "bfloat16")), WeightFormat("int8", Scales((1, 0))))
    for format in (groups, rows):
        assert gpu_layout(format, 64, 512, True, H200) == EIGHT_BITS and gpu_layout(format, 64, 512, True, OTHER) == STORED
        assert gpu_bytes(format, 64, 512, False, H200) == packed_bytes(format, 64, 512, False)
    wide = WeightFormat("int8", Scales((1, 128)))                                # compressed-tensors: its numbers decide
    assert may_pack(wide) and gpu_layout(wide, 64, 512, False, H200) == STORED and not may_pack(INT8_ROW)
    assert gpu_layout(INT8_ROW, 64, 512, False, H200) == STORED                  # rows are quantised, too: another scheme
    assert gpu_layout(WeightFormat("int8", Scales((1, 128), "float16", "code")), 64, 512, False, H200) == STORED
