"""How long `ridgeline quantize` takes for a model of given shapes, beside what it predicts at the start.

    python benchmarks/studies/quantize_speed/run.py --shape 1.5b --layers 2 --recipes int4-gptq --out cpu-1.5b.json

A checkpoint with random weights and LAYERS of the model's layers is written (all of 8b: 16 GB in TMPDIR), then quantised by each
recipe as the command does it, on the GPU where there is one (on_a_gpu.py runs this there). `whole_s` is the time times (the
model's layers) / LAYERS: too much by what is outside of them. Seconds are on the clock, and `cpu_s` those of all cores together,
which do not depend on what else the machine does.
Before that, a tiny model is quantised on the CPU and on the GPU, and the codes are compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from safetensors.torch import load_file, save_file

from ridgeline.bench.lab.record import commit
from ridgeline.quantize.blocks import block_bytes, write_blocks
from ridgeline.quantize.calibration import CONTEXT, Calibration
from ridgeline.quantize.duration import Spent, Watch, forecast
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.recipes import READ_TEXT, read_recipe
from ridgeline.quantize.workspace import Workspace

WHOLE = {"8b": 32, "1.5b": 28, "tiny": 2}                # layers of the whole model
SHAPES = {
    "1.5b": {"hidden": 1536, "inner": 8960, "heads": 12, "kv": 2, "vocab": 151936},
    "8b": {"hidden": 4096, "inner": 14336, "heads": 32, "kv": 8, "vocab": 128256},
    "tiny": {"hidden": 256, "inner": 512, "heads": 4, "kv": 2, "vocab": 512},
}


def checkpoint(folder: Path, shape: dict[str, int], layers: int) -> Path:
    """Random weights, a file for each layer."""
    folder.mkdir(parents=True)
    hidden, inner, head = shape["hidden"], shape["inner"], shape["hidden"] // shape["heads"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        found = torch.randn(rows, columns, generator=generator, device=device) * columns**-0.5
        return found.to(torch.bfloat16).cpu()

    sizes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (shape["kv"] * head, hidden),
             "self_attn.v_proj": (shape["kv"] * head, hidden), "self_attn.o_proj": (hidden, hidden),
             "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    ones, places = torch.ones(hidden, dtype=torch.bfloat16), {}
    for layer in range(-1, layers):
        if layer < 0:
            tensors = {"model.embed_tokens.weight": weight(shape["vocab"], hidden), "model.norm.weight": ones,
                       "lm_head.weight": weight(shape["vocab"], hidden)}
        else:
            tensors = {f"model.layers.{layer}.{name}.weight": weight(*size) for name, size in sizes.items()}
            tensors |= {f"model.layers.{layer}.{name}.weight": ones.clone()
                        for name in ("input_layernorm", "post_attention_layernorm")}
        save_file(tensors, folder / f"model-{layer + 1}.safetensors", {"format": "pt"})
        places |= dict.fromkeys(tensors, f"model-{layer + 1}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": shape["heads"], "num_key_value_heads": shape["kv"],
        "vocab_size": shape["vocab"], "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "torch_dtype": "bfloat16",
        "max_position_embeddings": 8192, "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 1, "bos_token_id": 0,
    }))
    return folder


def quantise(path: Path, recipe: str, out: Path, tokens: int, device: str) -> dict[str, Any]:
    model = PlainModel(path)
    linears = model.linears(read_recipe(recipe))
    sequences = torch.randint(model.config.vocab_size, (tokens // CONTEXT, CONTEXT), generator=torch.Generator().manual_seed(0))
    reads = any(linear.method in READ_TEXT for linear in linears)
    calibration = Calibration(model, sequences.tolist(), device) if reads else None
    space = Workspace(out, {"study": recipe}, len(model.blocks))
    by_name = {linear.weight: linear for linear in linears if linear.format is not None}
    watch = Watch()
    size = sum(block_bytes(model, by_name, block) for block in model.blocks)
    expected = forecast(model, linears, calibration, None, size, space.folder, device)
    probing = watch.lap()
    write_blocks(model, linears, space, calibration, False, device=device)
    spent = watch.lap()
    model.close()
    return {"probing": probing, "predicted": expected.quantise, "spent": spent,
            "parts": {name: part.as_data() for name, part in expected.parts.items()}}


def same_codes(work: Path) -> dict[str, float]:
    """Of a tiny model on both devices: the share of equal bytes."""
    plain, found = checkpoint(work / "tiny", SHAPES["tiny"], 2), {}
    for recipe in ("int4-rtn", "fp8", "mxfp4", "nvfp4", "int4-gptq", "int4-awq", "w8a8-smooth", "sparse24-sparsegpt"):
        files: dict[str, dict[str, torch.Tensor]] = {}
        for device in ("cpu", "cuda"):
            out = work / f"tiny-{recipe}-{device}"
            quantise(plain, recipe, out, 2048, device)
            folder = out.with_name(f"{out.name}.part")
            files[device] = {}
            for file in folder.glob("*.safetensors"):
                files[device] |= load_file(file)
        equal = total = 0
        for name, tensor in files["cpu"].items():
            one, other = (each.contiguous().view(torch.uint8) if each.dim() else each for each in (tensor, files["cuda"][name]))
            equal, total = equal + int((one == other).sum()), total + one.numel()
        found[recipe] = equal / total
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="8b")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--recipes", nargs="+", default=["int4-gptq", "int4-awq", "fp8"])
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if gpu else platform.machine(), "torch": torch.__version__, "commit": commit(),
        "shape": args.shape, "layers": args.layers, "whole_layers": WHOLE[args.shape], "tokens": args.tokens,
        "recipes": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if gpu:
            result["same_codes"] = same_codes(work)
            print(json.dumps(result["same_codes"]), flush=True)
        watch = Watch()
        path = checkpoint(work / "plain", SHAPES[args.shape], args.layers)
        print(f"checkpoint written in {watch.lap().wall:.1f} s", flush=True)
        for recipe in args.recipes:
            found = quantise(path, recipe, work / recipe, args.tokens, "cuda" if gpu else "cpu")
            shutil.rmtree(work / f"{recipe}.part")
            predicted, spent = found["predicted"], found["spent"]
            whole: Spent = spent * (WHOLE[args.shape] / args.layers)
            row = {"probing_s": round(found["probing"].wall, 2), "predicted_s": round(predicted.wall, 2),
                   "measured_s": round(spent.wall, 2), "error": round(predicted.wall / spent.wall - 1, 3),
                   "predicted_cpu_s": round(predicted.cpu, 1), "cpu_s": round(spent.cpu, 1),
                   "whole_s": round(whole.wall, 1), "whole_cpu_s": round(whole.cpu, 1), "threads": torch.get_num_threads(),
                   "parts": found["parts"]}
            result["recipes"][recipe] = row
            print(recipe, json.dumps(row), flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
