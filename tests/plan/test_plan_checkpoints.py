"""`ridgeline plan` of a quantised checkpoint on a GPU: the memory that the engine predicts, whatever its format."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from quantised_models import DIALECTS

from ridgeline.__main__ import main
from ridgeline.cli.cmd_plan import _question, add_arguments
from ridgeline.config import EngineConfig
from ridgeline.models.checkpoints.linear_formats import Chosen, LinearFormats, LinearShape
from ridgeline.plan.capacity import Capacity, kernel_facts
from ridgeline.plan.plan_report import answer, summary
from ridgeline.plan.prediction import Setup
from ridgeline.plan.public_models import CONFIGS
from ridgeline.plan.search import recommended
from ridgeline.resolve import DeviceFacts, resolve
from ridgeline.sizes import ledger


def group(targets: str, format: str, weights: dict[str, Any], rows: bool = False) -> dict[str, Any]:
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    return {"targets": [targets], "format": format, "weights": weights} | ({"input_activations": inputs} if rows else {})


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
MIXED = {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"]}
OWN = {name: DIALECTS[name][0] for name in (
    "ct-w4a16", "ct-nvfp4", "ct-mxfp4", "ct-w8a8", "ct-w8a16", "awq", "gptq", "gptq-desc-act", "bnb-nf4", "bnb-int8", "bitnet",
)} | {
    "fp8-rows": {"quant_method": "compressed-tensors", "config_groups": {"a": group("Linear", "float-quantized", FLOAT8, True)}},
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "mixed": MIXED | {"config_groups": {"a": group("re:.*self_attn.*", "float-quantized", FLOAT8, True),
                                        "b": group("re:.*mlp.*", "pack-quantized", INT4)}},
    "head": MIXED | {"ignore": [], "config_groups": {"a": group("re:.*lm_head", "float-quantized", FLOAT8),
                                                     "b": group("Linear", "pack-quantized", INT4)}},
}


def planned(path: Path, gpu: str, own: dict[str, Any]) -> Setup:
    """Of a model whose inputs are no whole units of the packed layout, with a head of its own."""
    sizes = {"num_hidden_layers": 2, "vocab_size": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(CONFIGS["qwen2.5-0.5b"] | sizes | {"quantization_config": own}))
    parser = ArgumentParser()
    add_arguments(parser)
    return _question(parser.parse_args([str(path), "--gpu", gpu])).setup


@pytest.mark.parametrize("gpu", ["H200", "A100"])
@pytest.mark.parametrize("dialect", OWN)
def test_memory_on_a_gpu_is_what_the_engine_predicts(dialect: str, gpu: str, tmp_path: Path) -> None:
    made = planned(tmp_path, gpu, OWN[dialect])
    options = EngineConfig.of(model=str(tmp_path), load_format="dummy", max_model_len=1280)
    facts = DeviceFacts("cuda", made.device.usable, ("bfloat16", "float16"), kernels=kernel_facts(made.device))
    asked = resolve(options, facts).memory[ledger.WEIGHTS]
    assert Capacity.of(made, 1280).parts(1)[ledger.WEIGHTS] == asked


@pytest.mark.parametrize(("dialect", "weights", "computed"), [
    ("fp8-rows", "fp8", "fp8"), ("fp8-block", "fp8-block", "fp8"), ("ct-w8a8", "int8", "int8"), ("ct-w8a16", "int8", "bfloat16"),
    ("awq", "int4", "bfloat16"), ("ct-nvfp4", "mxfp4", "bfloat16"), ("mixed", "int4", "bfloat16"),
])
def test_products_have_the_rate_of_their_kernels(dialect: str, weights: str, computed: str, tmp_path: Path) -> None:
    made = planned(tmp_path, "H200", OWN[dialect])
    assert (made.weights, made.computed) == (weights, computed)


def test_formats_are_found_once_for_each_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not again for each batch and goal: that was most of the time that `plan` took of a mixture's checkpoint."""
    found: Counter[tuple[object, ...]] = Counter()
    format_of = LinearFormats._format

    def counted(self: LinearFormats, shape: LinearShape) -> Chosen:
        found[self.ranks, self.device, tuple(self.rules.items()), shape.path] += 1
        return format_of(self, shape)

    monkeypatch.setattr(LinearFormats, "_format", counted)
    sizes = {"num_hidden_layers": 2, "quantization_config": OWN["ct-w4a16"]}
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3-30b-a3b"] | sizes))
    assert main(["plan", str(tmp_path), "--gpu", "H200", "--most", "2", "--json"]) == 0
    assert 0 < max(found.values()) <= 4                  # by `plan`, and for the weights, products and check of the ledger


@pytest.mark.parametrize(("name", "gpu", "count", "said"), [
    ("deepseek-v3", "H200", 8, "fp8-block"), ("moonshotai/Kimi-K2-Instruct-0905", "MI300X", 8, "fp8-block"),
    ("gpt-oss-120b", "H100", 1, "experts in mxfp4"), ("gpt-oss-120b", "MI300X", 1, "experts in mxfp4"),
])
def test_a_name_is_planned_as_it_is_published(name: str, gpu: str, count: int, said: str) -> None:
    """DeepSeek-V3 in 16 bits did not fit on eight H200, where its checkpoint of fp8 does."""
    parser = ArgumentParser()
    add_arguments(parser)
    words = [name, "--gpu", gpu, "--count", str(count), "--most", "1"]
    first = "\n".join(summary(answer(_question(parser.parse_args(words)))))
    assert first.startswith("fits: ") and f"which weights: {said}, as published; --weights bfloat16" in first
    assert "--quantization" not in first
    first = "\n".join(summary(answer(_question(parser.parse_args([*words, "--weights", "bfloat16"])))))
    assert first.startswith("DOES NOT FIT") and f"which weights: bfloat16, as asked; published are {said}" in first


def test_a_name_is_planned_as_a_directory_of_that_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as a hub's name in the local cache; the weights of a checkpoint whose experts are codes are not quantised again."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--mine--oss-120b/snapshots/0a1b"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIGS["gpt-oss-120b"]))
    parser = ArgumentParser()
    add_arguments(parser)
    asked = [_question(parser.parse_args([model, "--gpu", "H200"])) for model in ("gpt-oss-120b", str(snapshot), "mine/oss-120b")]
    parts = [Capacity.of(each.setup, 1280).parts(1) for each in asked]
    assert parts[0] == parts[1] == parts[2] and asked[2].setup.model.name == "oss-120b"
    assert all(recommended(each.setup)[0] == [] for each in asked)
    assert Capacity.of(asked[0].setup, 1280).largest_batch() > 500, "117 G parameters, most of them in 4 bits"
