"""Laws of mixtures with real weights: an MLP cut into slices that are all chosen with weight 1 is the MLP, and so are copies of
it whose weights sum to 1. And what a checkpoint may store differently: all experts in one tensor, or in MXFP4.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import PagedSequences, load, random_tokens, save_checkpoint, teacher_forced_logits
from torch import Tensor

from ridgeline.bench.workload.shapes import write_shape
from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import Communicator
from ridgeline.engine.llm import LLM
from ridgeline.errors import ModelError
from ridgeline.messages import StepResult
from ridgeline.models.checkpoints.linear_formats import LinearFormats, expert_bytes
from ridgeline.models.decoder import Decoder
from ridgeline.models.expert_config import Experts, Routing
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.model_config import ModelConfig, load_model_config
from ridgeline.models.stages import weight_bytes
from ridgeline.models.weights import deinterleaved, load_weights, model_pieces
from ridgeline.ops.kernel_table import H200
from ridgeline.quant.choose import schemes
from ridgeline.quant.cpu_packed import plain_scheme
from ridgeline.quant.scheme import Invariant, Unquantised
from ridgeline.resolve import DeviceFacts, resolve
from ridgeline.roofline.steps import StepRecorder
from ridgeline.sampling_params import SamplingParams

TOKENS = random_tokens(9)
CPU = torch.device("cpu")
LAYERS = 2                           # of the real model: its first and one from the middle


@pytest.fixture(scope="module")
def dense(embedded_model: Path) -> Decoder:
    """Two layers of the embedded model, in float64."""
    config = load_model_config(embedded_model)
    config = dataclasses.replace(
        config, num_layers=LAYERS, windows=config.windows[:LAYERS], ropes=config.ropes[:LAYERS], packed=(),
        quantisation=None,
    )
    model = Decoder(config, Communicator(), torch.float64, "cpu", 64)
    names = {"attention_norm": "attn_norm", "mlp_norm": "ffn_norm", "output": "attn_output", "down": "ffn_down", "q": "attn_q",
             "k": "attn_k", "v": "attn_v", "gate": "ffn_gate", "up": "ffn_up", "embed": "token_embd", "norm": "output_norm"}
    with GGUFFile(embedded_model) as file:
        for name, piece in model_pieces(model).items():
            path, _, part = name.partition(":")
            *place, module, _ = path.split(".")
            layer = f"blk.{15 * int(place[1])}." if place else ""
            values = torch.from_numpy(file.read(f"{layer}{names[part or module]}.weight"))
            piece.target.copy_(deinterleaved(values, config.head_dim) if part in ("q", "k") else values)
    model.finish()
    return model


def mixture(dense: Decoder, experts: Experts, seed: int | None) -> Decoder:
    """The same model with `experts`, which are slices of its MLP, one after the other, or copies; routers are zero without a
    seed."""
    config = dataclasses.replace(dense.config, experts=experts)
    model = Decoder(config, Communicator(), torch.float64, "cpu", 64)
    whole = dense.config.intermediate_size
    mine, theirs = dict(model.named_parameters()), dict(dense.named_parameters())
    generator = torch.Generator().manual_seed(seed or 0)
    for name, parameter in mine.items():
        if ".mlp." not in name:
            parameter.copy_(theirs[name])
        elif "router" in name:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0 * noise if seed is None else noise)
    for ours, layer in zip(model.layers, dense.layers, strict=True):
        gate, up = layer.mlp.gate_up.weight.split(whole)
        for expert in range(experts.count):
            first = expert * experts.width % whole
            rows = slice(first, first + experts.width)
            ours.mlp.experts.gate_up[expert] = torch.cat((gate[rows], up[rows]))
            ours.mlp.experts.down[expert] = layer.mlp.down.weight[:, rows]
    return model


def logits(model: Decoder) -> Tensor:
    return teacher_forced_logits(model, TOKENS, 7)


def test_slices_that_are_all_chosen_are_the_dense_model(dense: Decoder) -> None:
    width = dense.config.intermediate_size
    sliced = Experts(4, 4, width // 4, routing=Routing(scale=4.0))       # even scores of a quarter, times four
    found, expected = logits(mixture(dense, sliced, None)), logits(dense)
    assert float(expected.std()) > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    fewer = dataclasses.replace(sliced, used=3)
    assert float((logits(mixture(dense, fewer, None)) - expected).abs().max()) > 1e-3


def test_copies_whose_weights_sum_to_one_are_the_dense_model(dense: Decoder) -> None:
    copies = Experts(3, 2, dense.config.intermediate_size, routing=Routing(normalise=True))
    expected = logits(dense)
    torch.testing.assert_close(logits(mixture(dense, copies, 7)), expected, rtol=0, atol=1e-11)
    loose = dataclasses.replace(copies, routing=Routing())
    assert float((logits(mixture(dense, loose, 7)) - expected).abs().max()) > 1e-3


# ---- as checkpoints store them ---------------------------------------------------------------------------------------


def rewritten(path: Path, change: dict[str, Tensor], config: dict[str, object] | None = None) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in change.items()}, path / "model.safetensors")
    if config is not None:
        raw = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(raw | config))
    return path


def test_experts_in_one_tensor_are_the_same_model(tmp_path: Path) -> None:
    """As transformers 5 keeps them in memory, and newer checkpoints on disk."""
    path = save_checkpoint("qwen3_moe", tmp_path, dtype=torch.float64)
    expected = logits(load(path, torch.float64))
    tensors = load_file(path / "model.safetensors")
    count = load_model_config(path).experts.count        # type: ignore[union-attr]
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in sorted({name.partition(".mlp.experts.")[0] for name in tensors if ".experts." in name}):
        def each(part: str, layer: str = layer) -> list[Tensor]:
            return [tensors[f"{layer}.mlp.experts.{expert}.{part}_proj.weight"] for expert in range(count)]

        pairs = zip(each("gate"), each("up"), strict=True)
        fused[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        fused[f"{layer}.mlp.experts.down_proj"] = torch.stack(each("down"))
    assert len(fused) < len(tensors)
    assert torch.equal(logits(load(rewritten(path, fused), torch.float64)), expected)
    name = next(name for name in fused if name.endswith("gate_up_proj"))
    with pytest.raises(ModelError, match=r"lacks: model\.layers\.\d+\.mlp\.experts\.7\.gate_proj\.weight"):
        load(rewritten(path, fused | {name: fused[name][:7]}), torch.float64)


def test_gpt_oss_experts_in_mxfp4(tmp_path: Path) -> None:
    """Blocks of 32 inputs: two codes a byte, the first in its lower half, and a power of two for each block."""
    path = save_checkpoint("gpt_oss", tmp_path, hidden_size=64, intermediate_size=32)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    packed, plain = {}, {}
    for name, tensor in tensors.items():
        packed[name] = plain[name] = tensor
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = tensor.shape
        codes = torch.randint(0, 16, (experts, outputs, inputs), generator=generator)
        scales = torch.randint(122, 126, (experts, outputs, inputs // 32), generator=generator)
        del packed[name]
        pairs = codes.view(experts, outputs, inputs // 32, 16, 2)
        packed[f"{name}_blocks"] = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8)
        packed[f"{name}_scales"] = scales.to(torch.uint8)
        numbers = grid[codes] * (scales.double() - 127).exp2().float().repeat_interleave(32, dim=-1)
        plain[name] = numbers.transpose(1, 2)
    expected = logits(load(rewritten(path, plain), torch.float64))
    config = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}}
    found = logits(load(rewritten(path, packed, config), torch.float64))
    formats = LinearFormats(load_model_config(path), "none", "cuda")
    assert all(formats(f"layers.0.attention.{name}").format is None for name in ("qkv", "output"))       # not in MXFP4
    assert float(expected.std()) > 0.5
    assert torch.equal(found, expected)
    # As on a GPU, where the experts stay codes: their bytes are counted, and the numbers are the same.
    path = tmp_path / "kept"
    save_checkpoint("gpt_oss", path, hidden_size=64, intermediate_size=32)
    path = rewritten(path, packed, config)
    model_config = load_model_config(path)
    formats = LinearFormats(model_config, "none", "cuda")
    kept = Decoder(model_config, Communicator(), torch.bfloat16, "cpu", 32, schemes(formats, plain_scheme(CPU, torch.bfloat16)))
    assert kept.layers[0].mlp.experts.gate_up.dtype == torch.uint8
    wide = Decoder(model_config, Communicator(), torch.bfloat16, "cpu", 32)
    saved = sum(parameter.nbytes for parameter in wide.parameters()) - sum(parameter.nbytes for parameter in kept.parameters())
    assert saved > 0
    # The ledger has them as a Hopper GPU holds them.
    for shape, format in formats.experts():
        saved -= shape.count * (shape.nbytes(format, H200) - format.nbytes(shape.outputs, shape.share))
    assert saved == weight_bytes(model_config, "bfloat16", "cpu") - weight_bytes(model_config, "bfloat16", "cuda")
    assert expert_bytes(model_config, "none", "cuda") == 0.5 + 1 / 32 and expert_bytes(model_config, "none", "cpu") is None
    # Kernels of codes compute in bfloat16: for other dtypes experts are planned and loaded as numbers.
    assert weight_bytes(model_config, "float16", "cuda") == weight_bytes(model_config, "float16", "cpu")
    assert expert_bytes(model_config, "none", "cuda", dtype="float16") is None
    assert LinearFormats(model_config, "none", "cuda", 1, "float32")("layers.0.mlp.experts.down").format is None
    kept = Decoder(model_config, Communicator(), torch.float64, "cpu", 32, schemes(formats, plain_scheme(CPU, torch.float64)))
    load_weights(kept, path, model_config)
    assert torch.equal(logits(kept), expected)


@pytest.mark.parametrize(("name", "grid", "least", "most"), [
    ("mxfp4", "e2m1", 0.02, 0.15), ("int4", "uint4", 0.02, 0.12), ("fp8", "e4m3", 0.005, 0.04),
    ("fp8-block", "e4m3", 0.005, 0.04),
])
def test_experts_are_quantised_while_they_load(name: str, grid: str, least: float, most: float, tmp_path: Path) -> None:
    """To the formats that kernels of experts know; others leave them as they are."""
    path = save_checkpoint("mixtral", tmp_path, hidden_size=128, intermediate_size=256)
    config = load_model_config(path)
    assert LinearFormats(config, "int8", "cuda")("layers.0.mlp.experts.down").format is None
    chosen = LinearFormats(config, f"experts={name}", "cuda")
    model = Decoder(config, Communicator(), torch.float64, "cpu", 32, schemes(chosen, plain_scheme(CPU, torch.float64)))
    load_weights(model, path, config, finish=False)
    experts = model.layers[0].mlp.experts
    assert experts.matrices[0].grid == experts.matrices[1].grid == grid and experts.gate_up.element_size() == 1
    plain = load(path, torch.float64).layers[0].mlp.experts
    for each in ("gate_up", "down"):
        numbers = getattr(plain, each)
        error = (experts.numbers()[each] - numbers).norm() / numbers.norm()
        assert least < float(error) < most
    # Where no kernel has the codes they become numbers, which are the same.
    before = experts.numbers()
    experts.finish()
    assert not experts.codes and all(torch.equal(getattr(experts, each), before[each]) for each in before)


def test_formats_of_experts_that_have_no_kernels_are_expanded(tmp_path: Path) -> None:
    """Blocks that end inside a matrix, and inputs that groups do not divide."""
    path = save_checkpoint("mixtral", tmp_path, hidden_size=64, intermediate_size=32)
    config = load_model_config(path)
    formats = {name: LinearFormats(config, name, "cuda")("layers.0.mlp.experts.down").format for name in ("fp8-block", "int4")}
    assert formats["fp8-block"] is None and formats["int4"] is None      # gate and up have groups of 64, down has 32
    assert LinearFormats(config, "fp8", "cuda", 1, "float16")("layers.0.mlp.experts.down").format is None


def test_deterministic_mode_has_one_order_of_additions(tmp_path: Path) -> None:
    """Mixtures are not refused, and are told of it (the kernels: tests/ops/experts/test_invariant_experts.py)."""
    path = save_checkpoint("mixtral", tmp_path)
    resolve(EngineConfig.of(model=str(path), deterministic=True), DeviceFacts("cuda", 2**34, ("bfloat16",)))
    for scheme, told in ((Invariant(), True), (Unquantised(), False)):
        model = Decoder(load_model_config(path), Communicator(), torch.bfloat16, "cpu", 32, lambda _, scheme=scheme: scheme)
        assert model.layers[0].mlp.invariant is told


def test_the_ledger_counts_experts(tmp_path: Path) -> None:
    """Predicted parameters are those of the decoder, for every mixture."""
    for name in ("mixtral", "qwen2_moe", "granitemoe", "glm4_moe", "gpt_oss"):
        path = save_checkpoint(name, tmp_path / name)
        config: ModelConfig = load_model_config(path)
        model = Decoder(config, Communicator(), torch.float64, "cpu", 32)      # in float32 weights are made when they are loaded
        shared = model.embed.weight.numel() if config.tied else 0
        held = sum(parameter.numel() for parameter in model.parameters())
        assert held == config.num_parameters and (shared == 0 or model.head.weight is model.embed.weight)


# ---- what a step reads -----------------------------------------------------------------------------------------------


def test_experts_that_a_step_reads_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step of the engine, from the device to the roofline: one token visits `used` experts in each layer."""
    path = save_checkpoint("mixtral", tmp_path)
    experts = load_model_config(path).experts
    assert experts is not None
    seen = []
    took = StepRecorder.took

    def noted(self: StepRecorder, result: StepResult, *rest: bool) -> None:
        seen.append((len(result.lengths), result.experts))
        took(self, result, *rest)

    monkeypatch.setattr(StepRecorder, "took", noted)
    llm = LLM(path, max_model_len=64, skip_tokenizer_init=True, num_gpu_blocks_override=32)
    params = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": random_tokens(12)}], params, use_tqdm=False)
    (_, prompt), *decodes = seen
    layers = llm.core.config.model.num_layers
    assert layers * experts.used < prompt <= layers * experts.count
    assert decodes and all(step == (1, layers * experts.used) for step in decodes)


def test_floors_count_the_experts_that_zipf_routing_visits() -> None:
    """Counted by routing random tokens as dummy weights do."""
    experts = Experts(64, 6, zipf=0.9)
    assert experts.visited(1) == pytest.approx(6, rel=1e-6)
    rng, rows, total = np.random.default_rng(0), 128, 0
    for _ in range(50):
        logits = rng.normal(0, 0.9, (rows, 64)) - np.log1p(rng.permutation(64))
        total += len(np.unique(np.argpartition(-logits, 6, axis=1)[:, :6]))
    assert experts.visited(rows) == pytest.approx(total / 50, rel=0.03)
    assert experts.visited(rows) < 0.8 * Experts(64, 6).visited(rows)


def test_zipf_routing_of_dummy_weights_reads_fewer_experts() -> None:
    reads = {}
    for name in ("qwen3-30b-a3b", "qwen3-30b-a3b-zipf"):
        path = write_shape(
            name, layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=131,
            moe_intermediate_size=16, intermediate_size=16,
        )
        config = load_model_config(path)
        model = Decoder(config, Communicator(), torch.float32, "cpu", 64)
        load_weights(model, path, config, "dummy")
        PagedSequences(model).step({0: random_tokens(40)})
        assert model.expert_reads is not None
        assert not any(counter.data_ptr() % 16 for counter in model.expert_reads), "a kernel would have two variants"
        reads[name] = int(model.expert_reads.sum())
    even, zipf = reads.values()
    assert even > 100 and zipf < 0.75 * even
