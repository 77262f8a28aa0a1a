"""The study beside llm-compressor (run.py) on a GPU, for models that take CPU hours: same weights, tokens and settings.

    pip install --no-index --no-deps --target SITE WHEELS/*.whl          # see WHEELS below
    python benchmarks/studies/llm_compressor/on_a_gpu.py MODEL --site SITE --work DIR --out result.json [--layers 10]

MODEL: a directory in 16 bits, or a GGUF file. Two methods search for minutes in both programs: `--layers` quantises the first
layers only, and no method begins after `--seconds`. The record is written after each method, and a study that was stopped goes on
with the same command: what is in DIR is not made again. Round to nearest must give equal codes; codes are unpacked by
compressed-tensors, and transformers computes the perplexity of the same passages with the numbers that they mean. Without a GPU
it runs, too, for small models.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from run import GROUP, METHODS, equal_tensors, facts, in_a_process, kept, ours, plain, stand_ins, theirs

# For `pip download --no-deps --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64
# --only-binary=:all:` (17 MB). Needed besides: torch, numpy, safetensors, tokenizers, pyyaml, jinja2, tqdm, packaging,
# requests, httpx, filelock and fsspec. `datasets` and `auto-round`, which llm-compressor also names, are not read here.
WHEELS = (
    "llmcompressor==0.14.0.1", "compressed-tensors==0.19.0", "transformers==5.17.0", "huggingface-hub==1.33.0",
    "accelerate==1.15.0", "loguru==0.7.3", "pydantic==2.14.3", "pydantic-core==2.50.4", "annotated-types==0.8.0",
    "typing-inspection==0.4.5", "typing-extensions==4.16.0", "psutil==7.2.2", "regex==2026.11.9",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory in 16 bits, or a GGUF file")
    parser.add_argument("--site", required=True, help="where llmcompressor is installed")
    parser.add_argument("--work", type=Path, required=True, help="a folder for the models")
    parser.add_argument("--out", type=Path, default=None, help="the record")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=3072, help="to calibrate with")
    parser.add_argument("--judged", type=int, default=8192, help="tokens to judge by")
    parser.add_argument("--layers", type=int, default=0, help="layers to quantise by AWQ and GPTQ, from the first; 0: all")
    parser.add_argument("--seconds", type=float, default=400.0, help="no method begins later than this")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        name, _, method = args.part.partition(":")
        if method == "rtn":
            args.layers = 0                              # takes no time: all layers
        {"plain": plain, "ours": ours, "theirs": theirs, "judge": judge}[name](args, method)
        return
    if args.out is None:
        parser.error("--out is missing")
    args.work.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    part(args, "plain")
    judged = part(args, "judge:plain")
    result: dict[str, Any] = {
        "model": Path(args.model).name, "group": GROUP, "calibration_tokens": args.tokens, "judged_tokens": args.judged,
        "layers": args.layers or "all", "plain_ppl": judged["plain"], "methods": {},
    } | judged["facts"]
    for method in args.methods:
        if time.perf_counter() - begun > args.seconds:
            print(f"{method}: left out after {args.seconds:.0f} s", flush=True)
            continue
        result["methods"][method] = compare(args, method)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{time.perf_counter() - begun:.0f} s in all")


def compare(args: argparse.Namespace, method: str) -> dict[str, Any]:
    seconds = {maker: part(args, f"{maker}:{method}")["s"] for maker in ("ours", "theirs")}
    judged = part(args, f"judge:ours-{method},theirs-{method}")
    mine, other = (judged[f"{maker}-{method}"] for maker in ("ours", "theirs"))
    equal = equal_tensors(args.work / f"ours-{method}", args.work / f"theirs-{method}")
    codes = equal["weight_packed"]
    print(f"{method:5} ours {mine:.4f}  llm-compressor's {other:.4f}  ratio {mine / other:.4f}  equal words "
          f"{codes['equal'] / max(codes['of'], 1):.2%}  {seconds['ours']:.0f} s and {seconds['theirs']:.0f} s", flush=True)
    return {"ours_ppl": mine, "theirs_ppl": other, "ratio": mine / other} | {f"{maker}_s": s for maker, s in seconds.items()} | {
        "layers": "all" if method == "rtn" else args.layers or "all", "equal": equal, "commit": judged["facts"]["commit"]}


def part(args: argparse.Namespace, words: str) -> dict[str, Any]:
    """In a process of its own, with the seconds that it took."""
    def run() -> dict[str, Any]:
        begun = time.perf_counter()
        found = in_a_process(args, Path(__file__), words)
        took = round(time.perf_counter() - begun, 1)
        print(f"{words}: {took} s", flush=True)
        return found | {"s": took}

    return kept(args, words, run)


# ── the parts ────────────────────────────────────────────────────────────────────────────────────────────────────────


def judge(args: argparse.Namespace, folders: str) -> None:
    """Perplexity by transformers: one plain model, into which the numbers of each output are copied."""
    stand_ins()
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(args.work / "plain", dtype=torch.float32).to(device).eval()
    passages = json.loads((args.work / "passages.json").read_text())["judged"]
    found: dict[str, Any] = {}
    for folder in folders.split(","):
        if folder != "plain":
            copy_numbers(model, args.work / folder)
        found[folder] = perplexity(model, passages, device)
    where = {"gpu": torch.cuda.get_device_name() if device == "cuda" else "", "torch": torch.__version__}
    print(json.dumps(found | {"facts": facts(args.site) | where}))


def copy_numbers(model: Any, folder: Path) -> None:
    """Every tensor of an output, codes as the numbers that they mean. Outputs hold all tensors: nothing of another one stays."""
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from safetensors import safe_open

    targets, left = dict(model.named_parameters()), set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt", device=str(next(model.parameters()).device)) as opened:
            for name in opened.keys():
                if name in targets:
                    targets[name].data.copy_(opened.get_tensor(name))
                elif name.endswith("weight_packed"):
                    module = name.removesuffix("_packed")
                    shape = torch.Size(targets[module].shape)
                    codes = unpack_from_int32(opened.get_tensor(name), 4, shape).float()
                    scale = opened.get_tensor(f"{module}_scale").float()
                    targets[module].data.copy_(codes * scale.repeat_interleave(GROUP, 1))
                elif not name.endswith(("weight_scale", "weight_shape")):
                    left.add(name)
    if left - {"lm_head.weight"}:
        raise SystemExit(f"{folder.name} has tensors that were not judged: {sorted(left)[:4]}")


def perplexity(model: Any, passages: list[list[int]], device: str) -> float:
    import torch

    total, count = torch.zeros((), dtype=torch.float64, device=device), 0
    with torch.inference_mode():
        for ids in passages:
            tokens = torch.tensor([ids], device=device)
            logs = model(tokens).logits[0, :-1].float().log_softmax(-1)
            total -= logs.gather(1, tokens[0, 1:, None]).double().sum()
            count += len(ids) - 1
    return float((total / count).exp())


if __name__ == "__main__":
    main()
