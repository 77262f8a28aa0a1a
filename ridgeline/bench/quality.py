"""Whether a fast engine still computes the model: its greedy tokens against the definitions in float32.

Two layers of the same shapes with the same weights. The engine under test answers; the reference (every op by its
definition, in float32) is then given prompt and answer, and says at every position of the answer which token it would
have taken there. That is teacher forcing: one difference does not make all that follow differ.

The head's rows get very different lengths. Where 128,000 random rows are alike, the best two logits lie so close that
rounding alone decides between them in several of a hundred positions; a trained head decides more clearly. A wrong kernel
still shows: a hidden state that is wrong picks another of the long rows.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from ridgeline.bench.engine import Engine
from ridgeline.bench.shapes import write_shape
from ridgeline.bench.workloads import Asked
from ridgeline.models.decoder import Decoder
from ridgeline.ops.registry import set_kernels

LAYERS = 2
LEAST = 0.99                         # agreement that a figure needs
# (requests, prompt, answer, together): one row at a time, and many rows of different lengths in one step. Answers are
# short: greedy ones soon go round in circles, and one close decision would count again and again.
Batch = tuple[int, int, int, bool]
BATCHES: tuple[Batch, ...] = ((12, 96, 12, False), (128, 64, 8, True))
_SPREAD = 12.0                       # standard deviation of the binary logarithm of a head row's length


def check_quality(
    shape: str, dtype: str = "auto", batches: tuple[Batch, ...] = BATCHES, **options: Any
) -> dict[str, Any]:
    """Share of positions at which both pick the same token, prefill's last and every decode's; and what was compared."""
    # A head that is the embedding would find the token that was put in, whatever the layers do.
    return compare(str(write_shape(shape, LAYERS, tie_word_embeddings=False)), dtype, batches, **options)


def compare(model: str, dtype: str, batches: tuple[Batch, ...], **options: Any) -> dict[str, Any]:
    longest = max(tokens_in + tokens_out for _, tokens_in, tokens_out, _ in batches) + 64
    rows = max(count for count, *_ in batches)
    sizes = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": longest, "max_num_seqs": rows,
        "num_gpu_blocks_override": rows * (longest // 16 + 2) + 8, "block_size": 16,
    }  # fmt: skip
    fast = Engine(model, **sizes | options | {"dtype": dtype, "enable_prefix_caching": False})
    vocab = fast.config.model.vocab_size
    asked: list[Asked] = []          # what is submitted together
    for number, (count, tokens_in, tokens_out, together) in enumerate(batches):
        requests = _prompts(count, tokens_in, tokens_out, vocab, number)
        asked += [requests] if together else [[request] for request in requests]
    plain = [answer for batch in asked for answer in fast.serve(batch).answers]
    spread_head(fast.model)
    spread = [answer for batch in asked for answer in fast.serve(batch).answers]
    weights = {name: parameter.detach() for name, parameter in fast.model.named_parameters()}
    device, used = fast.config.device, fast.config.dtype
    fast.close()

    sizes["max_num_batched_tokens"] = 4096 if device == "cuda" else 512
    slow = {"dtype": "float32", "kernels": "reference", "async_scheduling": False, "enforce_eager": True}
    reference = Engine(model, **sizes | slow | {"device": device})
    copy_weights(weights, reference.model)
    del weights
    prompts = [prompt for batch in asked for prompt, _ in batch]
    agreement = agree(reference, prompts, spread)
    spread_head(reference.model, back=True)
    agreement_alike = agree(reference, prompts, plain)
    reference.close()
    set_kernels("auto")
    return {
        "top1_agreement": agreement, "least": LEAST, "positions": sum(len(answer) for answer in spread),
        "top1_agreement_alike_rows": agreement_alike, "layers": LAYERS, "dtype": used,
        "reference": "every op by its definition in float32, the same weights; teacher-forced",
    }  # fmt: skip


def agree(reference: Engine, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """Share of the answers' tokens that the reference would have taken after the same tokens."""
    best = best_tokens(reference, [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    pairs = [
        (mine, its)
        for answer, chosen in zip(answers, best, strict=True)
        for mine, its in zip(answer, chosen[-len(answer) :], strict=True)
    ]
    return sum(mine == its for mine, its in pairs) / len(pairs)


def spread_head(model: Decoder, back: bool = False) -> None:
    """Give the head's rows lengths that differ by much, the same ones for the same model; or undo it."""
    with torch.inference_mode():
        weight = model.head.weight
        generator = torch.Generator().manual_seed(1)
        powers = (torch.randn(weight.shape[0], generator=generator) * _SPREAD).round_()
        # Powers of two: exact in every dtype, in both directions.
        weight.mul_(torch.exp2(-powers if back else powers).to(weight.device, weight.dtype).unsqueeze(1))
        model.head.finish()                              # a second layout of the weight follows it


def best_tokens(engine: Engine, sequences: list[list[int]]) -> list[list[int]]:
    """Of every sequence, the likeliest token after each of its tokens but the last, with all before it given."""
    found: dict[str, list[int]] = {engine.submit(tokens, 1, prompt_logprobs=1): [] for tokens in sequences}
    while engine.core.has_work:
        for delta in engine.core.step():
            if delta.error:
                raise AssertionError(f"the reference failed: {delta.error}")
            if delta.prompt_logprobs is not None:
                found[delta.request_id] += delta.prompt_logprobs.top_ids[:, 0].tolist()
    return list(found.values())


def copy_weights(weights: dict[str, torch.Tensor], target: Decoder) -> None:
    """The very same weights, not the same noise drawn in another dtype."""
    with torch.inference_mode():
        for name, parameter in target.named_parameters():
            if name not in weights or weights[name].shape != parameter.shape:
                raise AssertionError(f"the reference's {name} has no counterpart in the engine under test")
            parameter.copy_(weights[name])
        target.finish()


def _prompts(count: int, tokens_in: int, tokens_out: int, vocab: int, seed: int) -> Asked:
    """Prompts from half the length on: rows of one step shall differ."""
    rng = random.Random(f"quality-{seed}")
    lengths = [tokens_in - math.floor(tokens_in / 2 * place / count) for place in range(count)]
    return [([rng.randrange(vocab) for _ in range(length)], tokens_out) for length in lengths]
