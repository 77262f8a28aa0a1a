"""Every group of `--preset h200` runs, as far as a machine without a GPU can tell: no minute of a GPU is lost to a typing error.

Its weights are laid out at full width without memory, and the whole command runs on narrow shapes. Scripts of studies that need a
GPU are loaded and asked for their options.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.__main__ import main
from ridgeline.bench.options import suite
from ridgeline.bench.workload import presets, quality, shapes, workloads
from ridgeline.bench.workload.shapes import GGUF_SHAPES, SHAPES, write_shape
from ridgeline.bench.workload.workloads import GPU_PRESETS, Lengths, Preset
from ridgeline.distributed.comm import Communicator
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config
from ridgeline.models.stages import weight_bytes
from ridgeline.ops.kernel_table import H200
from ridgeline.quant.choose import schemes
from ridgeline.quant.scheme import Unquantised

STUDIES = Path(__file__).parents[3] / "benchmarks/studies"
ON_A_GPU = ("int4_linears/run", "int4_linears/gguf_run", "int4_linears/compile_times", "fp8_linears/run",
            "quantize_speed/on_a_gpu", "llm_compressor/on_a_gpu",
            "experts/one_request", "experts/tiles", "latent/decode", "first_pass/run", "public_shapes/run")
NARROW: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 640, "bos_token_id": 1, "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}
EXPERTS = {"n_routed_experts": 8, "num_experts": 8, "num_local_experts": 8, "moe_intermediate_size": 64}
SHORT = (quality.Part("one row", 4, 12, 2, together=False, alike=True), quality.Part("long prompt", 1, 24, 2, scored=8))


@pytest.mark.parametrize("name", suite.SUITE)
def test_two_layers_of_every_group_take_the_bytes_that_are_counted(name: str) -> None:
    """Of full width, in the formats of a GPU, before they are packed for its kernels."""
    group = suite.SUITE[name]
    dtype = "float16" if group.shape in GGUF_SHAPES else "bfloat16"
    config, asked = load_model_config(write_shape(group.shape, 2)), group.options.get("quantization", "none")
    formats = LinearFormats(config, asked, "cuda", 1, dtype)
    made = Decoder(config, Communicator(), getattr(torch, dtype), "meta", 64, schemes(formats, Unquantised()))
    sinks = 2 * config.num_layers * config.num_heads if "gpt-oss" in name else 0          # which are float32
    assert made.weight_bytes == weight_bytes(config, dtype, "cuda", 1, asked, H200._replace(hopper=False)) + sinks
    assert weight_bytes(config, dtype, "cuda", 1, asked) < 1.2 * made.weight_bytes


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, config in SHAPES.items():
        sizes = NARROW | (LATENT if "kv_lora_rank" in config else {})
        monkeypatch.setitem(shapes.SHAPES, name, config | sizes | {key: value for key, value in EXPERTS.items() if key in config})
    for name, preset in GPU_PRESETS.items():
        tiny = Preset(name, 2, 12, 3 if preset.longest() > 9000 or preset.uniform else Lengths(1.5, 0.5, 2, 4))
        monkeypatch.setitem(workloads.GPU_PRESETS, name, tiny)
    monkeypatch.setattr(presets, "MODEL_OPTIONS", {})
    monkeypatch.setattr(presets, "check_quality", lambda shape, **options: quality.check_quality(shape, parts=SHORT, **options))
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, group in suite.SUITE.items() if "deterministic" not in group.options])
def test_every_group_measures_and_writes_its_record(name: str, narrow: None, tmp_path: Path) -> None:
    given = Namespace(directory=str(tmp_path), repeats=2, dtype=["auto"], no_quality=False, price=None, sustain=None,
                      set=["device=cpu", "max_num_seqs=4"])
    assert main(["bench", "offline", *presets.group_words(name, given, math.inf)]) == 0
    made = json.loads((tmp_path / f"offline-{name}.json").read_text())
    assert set(made["figures"]["rows"]) == set(suite.SUITE[name].presets) and not made["figures"]["not_measured"]
    assert made["figures"]["quality"]["dtype"] == made["workload"]["dtype"]


@pytest.mark.parametrize("name", ON_A_GPU)
def test_scripts_for_a_gpu_load_and_name_their_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = STUDIES / f"{name}.py"
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.delitem(sys.modules, "run", raising=False)       # scripts of a folder import theirs by this name
    spec = importlib.util.spec_from_file_location(f"study_{name.replace('/', '_')}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0 and "--out" in capsys.readouterr().out
    sys.modules.pop("run", None)
