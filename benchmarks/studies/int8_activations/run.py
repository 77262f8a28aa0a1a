"""What 8-bit activations cost, linear by linear: perplexity and KL of the embedded model against itself with float32 activations.

    python benchmarks/studies/int8_activations/run.py --tokens 2048 --out result.json

Each variant keeps float32 activations in one kind of linear, or rounds with a scale for 16 instead of 32 numbers (simulated: the
rounded numbers are multiplied in float32, which is what a kernel would compute). Half a minute for all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from ridgeline.bench.lab.record import record, write  # noqa: E402
from ridgeline.evaluate.evaluation import slice_texts  # noqa: E402
from ridgeline.evaluate.scoring import Scorer  # noqa: E402
from ridgeline.evaluate.slices import SLICES  # noqa: E402
from ridgeline.evaluate.task import Task  # noqa: E402
from ridgeline.evaluate.texts import passages  # noqa: E402
from ridgeline.process import embedded  # noqa: E402
from ridgeline.quant import cpu_packed  # noqa: E402
from ridgeline.text.tokenizer import Tokenizer  # noqa: E402

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
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--slice", default="code", choices=list(SLICES))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    path = embedded.require()
    text = slice_texts(Task(slices=(args.slice,)))[args.slice]
    cut = passages(args.slice, text, Tokenizer.load(path), context=512, overlap=0, tokens=args.tokens, seed=0)
    sequences = [each.tokens for each in cut]
    scorer = Scorer({"model": str(path), "device": "cpu"}, max(map(len, sequences)), False)

    def scores(exact: tuple[str, ...], fine: tuple[str, ...]) -> torch.Tensor:
        """Log-probabilities of every place that has a token after it."""
        cpu_packed.block_linear = variant(exact, fine)
        found: dict[tuple[int, int], torch.Tensor] = {}
        scorer.score(sequences, lambda place, start, logits: found.update({(place, start): logits.float().log_softmax(-1)}))
        return torch.cat([found[key] for key in sorted(found)])

    reference, following = scores(tuple(KINDS), ()), torch.tensor([token for each in sequences for token in each[1:]])
    assert len(reference) == len(following)
    figures = {}
    for name in args.variants:
        model = scores(*VARIANTS[name])
        losses = [-each.gather(1, following[:, None]).double() for each in (reference, model)]
        more = losses[1] - losses[0]
        figures[name] = {
            "tokens": len(following), "kl": (reference.exp() * (reference - model)).sum(-1).mean().item(),
            "perplexity_ratio": more.mean().exp().item(), "perplexity_ratio_error": more.std().item() / len(more) ** 0.5,
        }
        print(f"{name:26s} KL {figures[name]['kl']:.5f}, perplexity {figures[name]['perplexity_ratio'] - 1:+.2%} "
              f"± {figures[name]['perplexity_ratio_error']:.2%}", flush=True)
    setting = {"model": path.name, "slice": args.slice, "tokens": args.tokens, "context": 512}
    write(record("int8_activations", setting, figures), Path(args.out))


if __name__ == "__main__":
    main()
