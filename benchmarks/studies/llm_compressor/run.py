"""`ridgeline quantize` beside llm-compressor: the same weights, calibration tokens and settings, judged by transformers.

    pip install --target SITE --no-deps llmcompressor==0.14.0.1 compressed-tensors==0.19.0 transformers==5.17.0 …
    python benchmarks/studies/llm_compressor/run.py --site SITE --work DIR --out result.json [MODEL.gguf] [--layers N]

4-bit integers in symmetric groups of 64, in float32. Both write compressed-tensors; transformers with compressed-tensors loads
both and computes the perplexity of the same passages, which neither has calibrated with. Round to nearest must give equal codes.
`--layers`: only the first N layers are quantised, where the whole model takes too long. Seconds are CPU time of each process.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
METHODS = ("rtn", "awq", "gptq")
GROUP = 64
GRID = 10                            # points of AWQ's search, for each kind of scales: ours tries 10 of both
CONTEXT = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="a GGUF file or a directory (default: the embedded model)")
    parser.add_argument("--site", required=True, help="where llmcompressor is installed")
    parser.add_argument("--work", type=Path, required=True, help="a folder for the models")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=3072, help="to calibrate with")
    parser.add_argument("--judged", type=int, default=2048, help="tokens to judge by")
    parser.add_argument("--layers", type=int, default=0, help="layers to quantise, from the first (default: all)")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        PARTS[args.part.partition(":")[0]](args, args.part.partition(":")[2])
        return
    args.work.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"model": Path(args.model).name or "embedded", "group": GROUP, "calibration_tokens": args.tokens,
                              "judged_tokens": args.judged, "layers": args.layers or "all", "methods": {}}
    step(args, "plain")
    result["plain_ppl"] = float(step(args, f"judge:{args.work}/plain")["ppl"])
    for method in args.methods:
        row: dict[str, Any] = {}
        for maker, part in (("ours", f"ours:{method}"), ("theirs", f"theirs:{method}")):
            row[f"{maker}_cpu_s"] = step(args, part)["cpu_s"]
            row[f"{maker}_ppl"] = step(args, f"judge:{args.work}/{maker}-{method}")["ppl"]
        row["ratio"] = row["ours_ppl"] / row["theirs_ppl"]
        row["equal"] = equal_tensors(args.work / f"ours-{method}", args.work / f"theirs-{method}")
        result["methods"][method] = row
        print(json.dumps({method: row}), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(result | facts(args.site), indent=1) + "\n")


def facts(site: str) -> dict[str, Any]:
    import platform

    from ridgeline.bench.lab.record import commit

    installed = {each.name: each.version for each in importlib.metadata.distributions(path=[site])}
    versions = [f"{name} {installed[name]}" for name in ("llmcompressor", "compressed-tensors", "transformers")]
    return {"commit": commit(), "system": platform.machine(), "versions": versions, "python": platform.python_version()}


def step(args: argparse.Namespace, part: str) -> dict[str, Any]:
    """In a process of its own, with the CPU seconds that it took."""
    def run() -> dict[str, Any]:
        begun = os.times()
        found = in_a_process(args, Path(__file__), part)
        ended = os.times()
        spent = ended.children_user + ended.children_system - begun.children_user - begun.children_system
        return found | {"cpu_s": round(spent, 1)}

    return kept(args, part, run)


def kept(args: argparse.Namespace, part: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a part found lies beside the models, so that a stopped study goes on where it was."""
    file = args.work / (part.replace("/", "_").replace(":", "-") + ".json")
    if not file.is_file():
        file.write_text(json.dumps(run()))
    return dict(json.loads(file.read_text()))


def in_a_process(args: argparse.Namespace, script: Path, part: str) -> dict[str, Any]:
    site = [args.site] if part.startswith(("theirs", "judge")) else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*site, str(ROOT)]), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), *([args.model] if args.model else []), "--site", args.site, "--work", str(args.work),
               "--tokens", str(args.tokens), "--judged", str(args.judged), "--layers", str(args.layers), "--part", part]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


# ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def plain(args: argparse.Namespace, _: str) -> None:
    """The model as float32 in a Hugging Face directory, and the passages that both read."""
    from safetensors.torch import save_file

    from ridgeline.config import EngineConfig
    from ridgeline.evaluate.texts import passages
    from ridgeline.quantize.calibration import calibration_passages, halves
    from ridgeline.quantize.hf_files import write_small_files
    from ridgeline.quantize.plain_model import PlainModel
    from ridgeline.resolve import model_path
    from ridgeline.text.tokenizer import Tokenizer

    path = model_path(EngineConfig.of(model=args.model))
    folder = args.work / "plain"
    folder.mkdir(exist_ok=True)
    model, places = PlainModel(path), {}
    for block in model.blocks:
        name = f"model-{block + 1:05}.safetensors"
        tensors = {each: model.read(each).float().contiguous() for each in model.names(block)}
        save_file(tensors, folder / name, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    write_small_files(path, model.config, None, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}, indent=1))
    tokenizer = Tokenizer.load(path)
    judged = passages("judged", halves()[1], tokenizer, context=CONTEXT, overlap=0, tokens=args.judged, seed=0)
    (args.work / "passages.json").write_text(json.dumps({
        "calibration": calibration_passages("", tokenizer, args.tokens, 0),
        "judged": [passage.tokens for passage in judged], "layers": model.config.num_layers,
    }))
    print("{}")


def ours(args: argparse.Namespace, method: str) -> None:
    kept = json.loads((args.work / "passages.json").read_text())["layers"] - args.layers if args.layers else 0
    subprocess.run(
        [sys.executable, "-m", "ridgeline", "quantize", str(args.work / "plain"), "--recipe", f"int4-{method}",
         "--group", str(GROUP), "--calibration-tokens", str(args.tokens), "--no-card", "--out", str(args.work / f"ours-{method}"),
         *(["--keep-last", str(kept)] if kept else [])],
        check=True, stdout=sys.stderr,
    )
    print("{}")


def stand_ins() -> None:
    """llm-compressor wants the names of these types, and reads none of their data here: datasets need not be installed."""
    if importlib.util.find_spec("datasets") is not None:
        return
    for name in ("datasets", "datasets.formatting", "datasets.formatting.formatting"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(dict.fromkeys(("Dataset", "DatasetDict", "IterableDataset", "LazyRow"), type("Unread", (), {})))
        module.__dict__.update({"load_dataset": None, "__version__": "0"})
        sys.modules[name] = module


def their_recipe(method: str, layers: int, count: int) -> Any:
    """`layers` of `count`, from the first; 0: all."""
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    left = [rf"re:.*layers\.{layer}\..*" for layer in range(layers, count)] if layers else []
    what = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head", *left]}
    made: Any = {
        "rtn": lambda: [QuantizationModifier(**what)],
        "gptq": lambda: [GPTQModifier(**what, dampening_frac=0.01, block_size=128)],
        "awq": lambda: [AWQModifier(duo_scaling="both", n_grid=2 * GRID), QuantizationModifier(**what)],
    }
    return made[method]()


def theirs(args: argparse.Namespace, method: str) -> None:
    stand_ins()
    import torch
    from llmcompressor import oneshot
    from llmcompressor.pipelines.cache import IntermediatesCache
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not torch.cuda.is_available():
        IntermediatesCache.pin_memory = lambda self, *_, **__: None      # it asks for an accelerator
    found = json.loads((args.work / "passages.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(args.work / "plain", dtype=torch.float32)
    data = DataLoader([{"input_ids": torch.tensor(ids), "attention_mask": torch.ones(len(ids), dtype=torch.long)}
                       for ids in found["calibration"]], batch_size=1)
    oneshot(model=model, processor=AutoTokenizer.from_pretrained(args.work / "plain"),
            recipe=their_recipe(method, args.layers, found["layers"]), dataset=None if method == "rtn" else data,
            num_calibration_samples=len(found["calibration"]))
    model.save_pretrained(args.work / f"theirs-{method}", save_compressed=True)
    print("{}")


def judge(args: argparse.Namespace, folder: str) -> None:
    """Perplexity of the passages, in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    begun = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids in json.loads((args.work / "passages.json").read_text())["judged"]:
            tokens = torch.tensor([ids])
            logits = model(tokens).logits[0, :-1].float().log_softmax(-1)
            total -= float(logits.gather(1, tokens[0, 1:, None]).sum())
            count += len(ids) - 1
    print(json.dumps({"ppl": float(torch.tensor(total / count, dtype=torch.float64).exp()), "tokens": count,
                      "s": round(time.perf_counter() - begun, 1)}))


PARTS = {"plain": plain, "ours": ours, "theirs": theirs, "judge": judge}


def equal_tensors(one: Path, other: Path) -> dict[str, Any]:
    """Codes and scales of the two outputs, counted."""
    from safetensors import safe_open

    def tensors(folder: Path) -> dict[str, Any]:
        found = {}
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys() if "weight_" in name}
        return found

    mine, other_ones = tensors(one), tensors(other)
    counts = {"names": len(mine.keys() & other_ones.keys()), "only_one_has": len(mine.keys() ^ other_ones.keys())}
    for kind in ("weight_packed", "weight_scale"):
        names = [name for name in mine if name.endswith(kind) and name in other_ones]
        same = sum(int((mine[name] == other_ones[name]).sum()) for name in names)
        counts[kind] = {"equal": same, "of": sum(mine[name].numel() for name in names)}
    return counts


if __name__ == "__main__":
    main()
