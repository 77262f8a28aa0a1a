"""Which narrower formats are recommended where: only what resolve takes on the device, with kernels there, and what it brings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.cmd_plan import preset_lengths, shape_file
from ridgeline.config import EngineConfig
from ridgeline.engine.core.what_helps import factors, linear_share, untimed
from ridgeline.errors import ConfigError
from ridgeline.models.checkpoints.quantisation_check import made_formats, product_dtype
from ridgeline.ops.kernel_table import H200, KERNELS, bands
from ridgeline.plan.capacity import kernel_facts
from ridgeline.plan.public_models import CONFIGS, find_model
from ridgeline.plan.records import read_record
from ridgeline.quant.format import MADE
from ridgeline.quant.gpu_layout import GENERAL, LIBRARY, OWN, served
from ridgeline.resolve import DeviceFacts, ResolvedConfig, resolve
from ridgeline.roofline.decoder_shape import decoder_shape
from ridgeline.roofline.peaks import MachinePeaks
from ridgeline.roofline.step_cost import step_cost
from ridgeline.roofline.verdict import WEIGHTS, Setting, Window, judge
from ridgeline.sizes.abilities import BY_FLAG, KV_FORMATS, WEIGHT_FORMATS, factor_at
from ridgeline.sizes.hardware import DEVICES

ROOT = Path(__file__).resolve().parents[2]
PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
    }},
}
STORED: dict[str, Any] = {
    "16-bit": None, "int4": PACKED,
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
FP8, INT8, INT4 = (f"--quantization {name}" for name in ("fp8", "int8", "int4"))
FP8_KV, INT8_KV = (f"--kv-cache-dtype {name}" for name in ("fp8", "int8"))
# Of a 16-bit checkpoint; of a quantised one those of the KV cache alone.
HERE = {
    "H200": {FP8, INT4, FP8_KV}, "A100": {INT8_KV}, "L4": {FP8, FP8_KV}, "RTX4090": {FP8, FP8_KV}, "B200": {FP8, FP8_KV},
    "cpu": {INT8, INT4},
}


def facts(device: str) -> DeviceFacts:
    if device == "cpu":
        return DeviceFacts("cpu", 2**38, ("float32",))
    sheet = DEVICES[device]
    return DeviceFacts("cuda", 2**38, ("bfloat16",), name=sheet.torch_names[0], kernels=kernel_facts(sheet))


def resolved(folder: Path, device: str, stored: str = "16-bit", layers: int = 4, **options: Any) -> ResolvedConfig:
    """Llama-3.1-8B's shapes; a few layers are as good as all, and are resolved sooner."""
    folder.mkdir(exist_ok=True)
    raw = CONFIGS["llama-3.1-8b"] | {"num_hidden_layers": layers, "torch_dtype": "bfloat16"}
    quantised = {} if STORED[stored] is None else {"quantization_config": STORED[stored]}
    (folder / "config.json").write_text(json.dumps(raw | quantised))
    return resolve(EngineConfig.of(model=str(folder), max_model_len=4096, **options), facts(device))


def peaks_of(config: ResolvedConfig) -> MachinePeaks:
    """Of an H200, or of a small CPU."""
    if config.device == "cpu":
        return MachinePeaks("cpu", 1e10, {"float32": 1e11, "int8": 3e11, "int4": 3e11}, 0.0, "")
    return MachinePeaks("gpu", 4.44e12, {"float32": 5e13, "bfloat16": 8.05e14, "float8_e4m3fn": 1.52e15}, 1e-6, "")


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("device", HERE)
def test_what_is_recommended_is_what_resolve_takes(tmp_path: Path, device: str, stored: str) -> None:
    config = resolved(tmp_path / "m", device, stored)
    kv = {flag for flag in HERE[device] if "kv-cache" in flag}
    assert set(config.narrower) == (HERE[device] if stored == "16-bit" else kv)
    for flag in config.narrower:
        each = BY_FLAG[flag]
        option: dict[str, Any] = {each.option: each.name}
        taken = resolved(tmp_path / "m", device, stored, **option)
        said = taken.reasons.get("quantization", "") if each.option == "quantization" else ""
        assert flag not in taken.narrower and "may be slower" not in said
    share = linear_share(decoder_shape(config.model, config.dtype))
    assert 0.55 < share < 1
    by_sheet = untimed(config, peaks_of(config))
    assert by_sheet == [FP8] * (stored == "16-bit" and device in ("L4", "RTX4090", "B200")), "cuBLAS multiplies there"
    setting = Setting(device=config.device, faster=factors(config, peaks_of(config)), untimed=by_sheet, linear_share=share)
    for rows in (1, 64, 256):
        busy = Window(1.0, 1.0, 1.0, on_weights=0.8, on_compute=0.1, running=rows, steps=10)
        said_now = {change.what.split(":")[0]: change.gain for change in judge(busy, setting).changes if change.what[0] == "-"}
        assert set(said_now) <= set(config.narrower) and all(1.02 <= gain < 5 for gain in said_now.values())
        if device == "H200" and stored == "16-bit":
            assert (INT4 in said_now) == (rows < 100) and FP8 in said_now
            assert max(said_now, key=lambda flag: said_now[flag]) == (INT4 if rows == 1 else FP8)


def test_nothing_is_recommended_that_other_options_exclude(tmp_path: Path) -> None:
    assert resolved(tmp_path / "m", "H200", deterministic=True).narrower == (FP8_KV,)
    with pytest.raises(ConfigError, match="deterministic has no kernels for int4"):
        resolved(tmp_path / "m", "H200", deterministic=True, quantization="int4")
    assert resolved(tmp_path / "m", "H200", kernels="reference").narrower == ()
    assert set(resolved(tmp_path / "m", "H200", dtype="float16").narrower) == {INT8, INT4, FP8_KV}       # fp8 needs bfloat16
    divided = resolved(tmp_path / "m", "H200", tensor_parallel_size=8, decode_context_parallel_size=8)
    assert set(divided.narrower) == {FP8, INT4}
    assert set(resolved(tmp_path / "m", "H200", quantization="fp8", kv_cache_dtype="fp8").narrower) == {INT8, INT4}


def test_small_models_and_mixtures() -> None:
    """Few inputs have an 8-bit decode kernel for one row; experts have none for integers of 8 bits, and only Hopper's are for
    codes."""
    small, mixture = (find_model(name).config for name in ("llama-3.2-1b", "qwen3-30b-a3b"))
    assert {name for name, faster in made_formats(small, "cuda", "bfloat16").items() if faster} == {"int4", "mxfp4"}
    assert made_formats(mixture, "cuda", "bfloat16") == dict.fromkeys(("fp8", "fp8-block", "int4", "mxfp4"), True)
    assert not any(made_formats(mixture, "cuda", "bfloat16", facts=kernel_facts(DEVICES["L4"])).values())
    assert made_formats(mixture, "cpu", "float32") == {} and made_formats(small, "cpu", "bfloat16") == {}


@pytest.mark.parametrize(("name", "device", "expected"), [
    ("fp8", "H200", OWN), ("fp8", "L4", LIBRARY), ("fp8", "B200", LIBRARY), ("fp8", "A100", GENERAL), ("int8", "H200", OWN),
    ("int8", "L4", GENERAL), ("fp8-block", "L4", GENERAL), ("int4", "H200", OWN), ("int4", "RTX4090", GENERAL),
    ("mxfp4", "A100", GENERAL),
])
def test_who_multiplies_is_what_the_kernel_table_has(name: str, device: str, expected: str) -> None:
    kernels, found = kernel_facts(DEVICES[device]), served(MADE[name], kernel_facts(DEVICES[device]))
    assert found == expected
    table = {"fp8": "fp8-row", "int8": "int8-row", "fp8-block": "fp8-block"}.get(name, "4-bit" if kernels.hopper else "other")
    used = {kernel for *_, kernel in bands(table, 4096, 4096, False, kernels)}
    assert table in KERNELS and (found == OWN) == bool(used & {"one_row_gemm", "packed_gemv"})
    if found == LIBRARY:
        assert used == {"scaled_mm"}


def test_reasons_say_what_multiplies_where(tmp_path: Path) -> None:
    """No format is slower than 16 bits without a word; int8 is not, with many rows, since its kernel was timed."""
    def said(device: str, name: str) -> str:
        return resolved(tmp_path / "m", device, quantization=name).reasons.get("quantization", "")

    for device, name in (("A100", "fp8"), ("A100", "int8"), ("L4", "int8"), ("L4", "fp8-block"), ("RTX4090", "int4")):
        assert "may be slower than in bfloat16" in said(device, name), (device, name)
    assert "cuBLAS" in said("L4", "fp8") and "slower" not in said("L4", "fp8")
    assert said("H200", "int8") == said("H200", "fp8") == "" and "up to about 100 rows" in said("H200", "int4")


def test_products_are_measured_against_the_rate_of_their_own_format(tmp_path: Path) -> None:
    """Against that of 16 bits they would reach more than all of it: also those of a checkpoint's own codes."""
    def dtype(device: str, stored: str = "16-bit", **options: Any) -> str:
        return resolved(tmp_path / "m", device, stored, **options).linear_dtype

    made = [dtype("H200", quantization=name) for name in ("none", "fp8", "fp8-block", "int8", "int4")]
    assert made == ["bfloat16", "float8_e4m3fn", "float8_e4m3fn", "int8", "bfloat16"]
    assert [dtype("H200", stored) for stored in ("fp8", "int4")] == ["float8_e4m3fn", "bfloat16"]
    assert dtype("A100", "fp8") == dtype("A100", quantization="fp8") == "bfloat16"           # expanded
    assert [dtype("cpu", quantization=name) for name in ("none", "int8", "int4", "fp8")] == ["float32", "int8", "int4", "float32"]
    assert dtype("cpu", quantization="int8", cpu_activations="float32") == "float32"
    mixture = find_model("qwen3-30b-a3b").config
    assert product_dtype(mixture, "fp8", "cuda", "bfloat16", 1, H200) == "bfloat16"          # experts: codes become numbers


# -- what it brings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "workload", "rows"), [
    ("fp8", "latency_b1", 1), ("int4", "latency_b1", 1), ("fp8", "batch128", 128), ("int4", "batch128", 128),
])
def test_predicted_gains_are_those_of_the_records(tmp_path: Path, format: str, workload: str, rows: int) -> None:
    """Within 15 %: the verdict of the 16-bit record's decode steps against the record of the format."""
    def tpot(name: str) -> float:
        record = read_record(ROOT / f"benchmarks/h200/offline-llama-3.1-8b{name}.json", preset_lengths(), shape_file)
        return next(row.tpot_seconds for row in record.rows if row.workload == workload and row.tpot_seconds)

    config = resolved(tmp_path / "m", "H200", layers=32)
    peaks, shape = peaks_of(config), decoder_shape(config.model, config.dtype)
    cost, now = step_cost(shape, [(1, 640)] * rows), tpot("")
    window = Window(
        now, now, now, on_weights=sum(op.weights for op in cost.ops.values()) / peaks.read_bytes_s,
        on_kv=sum(op.kv_read for op in cost.ops.values()) / peaks.read_bytes_s, running=rows, steps=1,
    )
    setting = Setting(faster=factors(config, peaks), linear_share=linear_share(shape), speculation=True)
    found = judge(window, setting)
    gains = {change.what.split(":")[0]: change.gain for change in found.changes}
    measured = now / tpot(f"-{format}")
    assert found.term == WEIGHTS and gains.get(f"--quantization {format}", 1.0) == pytest.approx(measured, rel=0.15)


def test_losses_are_those_of_the_records() -> None:
    for each in (*WEIGHT_FORMATS, *KV_FORMATS):
        record = json.loads((ROOT / "benchmarks" / each.record).read_text())
        figures = record["quality" if each.record.startswith("cards/") else "figures"]["all"]
        assert each.kl == pytest.approx(figures["kl"], abs=1e-4), each.flag
        if "eval" in each.record:
            assert record["workload"]["options"][each.option] == each.name
    assert all(each.element_bytes == pytest.approx(MADE[each.name].bytes_each(), rel=0.01) for each in WEIGHT_FORMATS)


def test_between_rows_factors_grow_with_their_logarithm() -> None:
    points = [(1.0, 0.4), (4.0, 0.6), (16.0, 1.0)]
    assert [factor_at(points, rows) for rows in (0, 1, 2, 4, 8, 16, 99)] == pytest.approx([0.4, 0.4, 0.5, 0.6, 0.8, 1.0, 1.0])
    assert replace(BY_FLAG[FP8], name="x").flag == "--quantization x"


def test_nothing_is_recommended_to_an_engine_that_is_to_be_exact(tmp_path: Path) -> None:
    """Its cost model knows no float64: an engine must not end because of advice."""
    found = resolved(tmp_path, "cpu", dtype="float64")
    assert not found.narrower and resolved(tmp_path, "cpu").narrower
