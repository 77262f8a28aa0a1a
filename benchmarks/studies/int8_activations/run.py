"""What 8-bit activations cost, linear by linear: perplexity and KL of the embedded model against itself with float32 activations.

    python benchmarks/studies/int8_activations/run.py --tokens 2048 --out result.json

Each variant keeps float32 activations in one kind of linear, or rounds with a scale for 16 instead of 32 numbers (simulated: the
rounded numbers are multiplied in float32, which is what a kernel would compute). A minute for each variant.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from ridgeline.bench.lab.record import record, write  # noqa: E402
from ridgeline.evaluate.evaluation import evaluate  # noqa: E402
from ridgeline.evaluate.task import Task  # noqa: E402
from ridgeline.quant import cpu_packed  # noqa: E402

# Of SmolLM2-135M: inputs and outputs of each kind.
KINDS = {"qkv": (576, 960), "o": (576, 576), "gate_up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {         # float32 in these; a scale for 16 numbers in these
    "int8 everywhere": ((), ()), **{f"float32 in {kind}": ((kind,), ()) for kind in KINDS},
    "blocks of 16 everywhere": ((), tuple(KINDS)), "blocks of 16 in down": ((), ("down",)),
}
multiply = cpu_packed.block_linear


def rounded(x: torch.Tensor, block: int) -> torch.Tensor:
    blocks = x.float().unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return ((blocks / scale.clamp_min(1e-30)).round() * scale).flatten(-2)


def variant(exact: tuple[str, ...], fine: tuple[str, ...]) -> Any:
    kinds = {size: kind for kind, size in KINDS.items()}

    def product(x: torch.Tensor, matrix: Any, bias: Any, integers: bool) -> torch.Tensor:
        kind = kinds[matrix.inputs, matrix.outputs]
        if integers and kind in fine:
            return multiply(rounded(x, 16), matrix, bias, False)
        return multiply(x, matrix, bias, integers and kind not in exact)

    return product


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of each slice")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    task, figures = Task(slices=("prose", "code"), tokens=args.tokens), {}
    with tempfile.TemporaryDirectory() as folder:
        logits = f"{folder}/logits"
        evaluate({"device": "cpu", "cpu_activations": "float32"}, task, save_reference=logits, show=False)
        for name in args.variants:
            cpu_packed.block_linear = variant(*VARIANTS[name])
            found = evaluate({"device": "cpu"}, task, reference=logits, show=False)
            figures[name] = {
                place: {key: each[key] for key in ("tokens", "kl", "top1", "perplexity_ratio", "perplexity_ratio_error")}
                for place, each in (found["slices"] | {"all": found["all"]}).items()
            }
            said = [
                f"{place} {each['perplexity_ratio'] - 1:+.2%} ± {each['perplexity_ratio_error']:.2%}, KL {each['kl']:.5f}"
                for place, each in figures[name].items()
            ]
            print(f"{name:26s}", *said, flush=True)
    setting = {"model": "embedded", "tokens": args.tokens, "context": task.context}
    write(record("int8_activations", setting, figures), Path(args.out))


if __name__ == "__main__":
    main()
