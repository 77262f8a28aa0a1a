"""What 8-bit activations cost, linear by linear: perplexity and KL of the embedded model against itself with float32 activations.

    python benchmarks/studies/int8_activations/run.py --tokens 2048 --out result.json

Each variant rounds activations in another way, everywhere or in one kind of linear (simulated: the rounded numbers are multiplied
in float32, which is what a kernel would compute): a scale for 32, 16 or 8 numbers; the scale with the least squared error; two
terms, what the first rounding leaves being rounded again; or float32. Beside the text there is one question, whose answer is
nearly a tie: the chance that it is given by the model's sampling defaults. A few minutes; `cost.py` measures the time of kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
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
multiply = cpu_packed.block_linear
Rounding = Callable[[torch.Tensor], torch.Tensor]


def largest(block: int) -> Rounding:
    """The largest number of each block becomes 127."""
    def rounded(x: torch.Tensor) -> torch.Tensor:
        blocks = x.float().unflatten(-1, (-1, block))
        scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
        return ((blocks / scale).round() * scale).flatten(-2)

    return rounded


def least_error(block: int) -> Rounding:
    """Of 7 scales, the one with the least squared error; larger numbers than 127 become 127."""
    def rounded(x: torch.Tensor) -> torch.Tensor:
        blocks = x.float().unflatten(-1, (-1, block))
        scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
        best, least = blocks, torch.full_like(scale, torch.inf)
        for tried in (scale * (0.97 + 0.01 * step) for step in range(7)):
            found = (blocks / tried).round().clamp(-127, 127) * tried
            error = (found - blocks).square().sum(-1, keepdim=True)
            best, least = torch.where(error < least, found, best), torch.minimum(error, least)
        return best.flatten(-2)

    return rounded


def two_terms(x: torch.Tensor) -> torch.Tensor:
    """What one rounding leaves is rounded once more."""
    once = largest(32)(x)
    return once + largest(32)(x - once)


def exact(x: torch.Tensor) -> torch.Tensor:
    return x


def everywhere(rounding: Rounding) -> dict[str, Rounding]:
    return dict.fromkeys(KINDS, rounding)


FLOAT32, WIDE, FINE = everywhere(exact), everywhere(largest(32)), everywhere(largest(16))
VARIANTS: dict[str, dict[str, Rounding]] = {             # a scale for 32 numbers everywhere, but ...
    "32": WIDE, "32, two terms in head": WIDE | {"head": two_terms},
    "16": FINE, **{f"16, float32 in {kind}": FINE | {kind: exact} for kind in KINDS},
    "16, two terms in head and qkv": FINE | {"head": two_terms, "qkv": two_terms},
    "8": everywhere(largest(8)), "32, least error": everywhere(least_error(32)), "16, least error": everywhere(least_error(16)),
}


def variant(roundings: dict[str, Rounding]) -> Any:
    kinds = {size: kind for kind, size in KINDS.items()}

    def product(x: torch.Tensor, matrix: Any, bias: Any, integers: bool) -> torch.Tensor:
        return multiply(roundings[kinds[matrix.inputs, matrix.outputs]](x), matrix, bias, False)

    return product


def question(tokenizer: Tokenizer) -> tuple[list[int], int]:
    """The tokens of a first question and of its answer, and how many are the question's."""
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    return [*prompt, *tokenizer.encode("The capital of France is Paris", add_special_tokens=False)], len(prompt)


def chance(logs: torch.Tensor, following: torch.Tensor) -> float:
    """That these tokens are sampled, by the model's own defaults: temperature 0.2, top_p 0.9."""
    chances, order = (logs / 0.2).softmax(-1).sort(dim=-1, descending=True)
    kept = chances * (chances.cumsum(-1) - chances < 0.9)
    kept = (kept / kept.sum(-1, keepdim=True)).gather(1, order.argsort(-1).gather(1, following[:, None]))
    return kept.prod().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--slice", default="code", choices=list(SLICES))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    path = embedded.require()
    text, tokenizer = slice_texts(Task(slices=(args.slice,)))[args.slice], Tokenizer.load(path)
    cut = passages(args.slice, text, tokenizer, context=512, overlap=0, tokens=args.tokens, seed=0)
    asked, prompt = question(tokenizer)
    sequences = [asked, *(each.tokens for each in cut)]
    scorer = Scorer({"model": str(path), "device": "cpu"}, max(map(len, sequences)), False)

    def scores(roundings: dict[str, Rounding]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of every place that has a token after it: of the question, of the text."""
        cpu_packed.block_linear = variant(roundings)
        found: dict[tuple[int, int], torch.Tensor] = {}
        scorer.score(sequences, lambda place, start, logits: found.update({(place, start): logits.float().log_softmax(-1)}))
        whole = torch.cat([found[key] for key in sorted(found)])
        return whole[: len(asked) - 1], whole[len(asked) - 1 :]

    (asked_reference, reference), following = scores(FLOAT32), torch.tensor([token for each in cut for token in each.tokens[1:]])
    assert len(reference) == len(following)
    answer = torch.tensor(asked[prompt:])
    figures: dict[str, Any] = {"float32": {"answer_chance": chance(asked_reference[prompt - 1 :], answer)}}
    print(f"float32: the answer's chance {figures['float32']['answer_chance']:.1%}")
    setting = {"model": path.name, "slice": args.slice, "tokens": args.tokens, "context": 512}
    for name in args.variants:
        asked_model, model = scores(VARIANTS[name])
        losses = [-each.gather(1, following[:, None]).double() for each in (reference, model)]
        more = losses[1] - losses[0]
        kl = (reference.exp() * (reference - model)).sum(-1)
        figures[name] = {
            "tokens": len(following), "kl": kl.mean().item(), "kl_error": kl.std().item() / len(kl) ** 0.5,
            "perplexity_ratio": more.mean().exp().item(), "perplexity_ratio_error": more.std().item() / len(more) ** 0.5,
            "same_likeliest": (reference.argmax(-1) == model.argmax(-1)).double().mean().item(),
            "answer_chance": chance(asked_model[prompt - 1 :], answer),
        }
        print(f"{name:30s} KL {figures[name]['kl']:.5f}, perplexity {figures[name]['perplexity_ratio'] - 1:+.2%} "
              f"± {figures[name]['perplexity_ratio_error']:.2%}, same likeliest {figures[name]['same_likeliest']:.1%}, "
              f"the answer's chance {figures[name]['answer_chance']:.1%}", flush=True)
        write(record("int8_activations", setting, figures), Path(args.out))      # what is done stays, if the rest is stopped


if __name__ == "__main__":
    main()
