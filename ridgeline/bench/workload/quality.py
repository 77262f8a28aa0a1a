"""Checks that a fast engine still computes the model: its greedy tokens against the float32 reference.

Two layers of the same shapes with the same weights. The engine under test answers; the reference (every op by its definition,
in float32) then reads prompt and answer and gives its own token at every position of the answer. This is teacher forcing: one
difference does not change all that follow.

Kernels are chosen by the rows of a step, so the check has parts: one row, many rows, a prompt longer than the token budget
(GEMMs with thousands of rows, prefill attention; some positions of the prompt are compared as well), and rows that share a
prefix long enough to be read once. The techniques that ran are part of the result.

The rows of the head's weight get very different norms. With 128,000 random rows of equal norm the best two logits are so close
that rounding decides several per cent of the positions; a trained head decides more clearly. A wrong kernel still shows: a
wrong hidden state selects another of the long rows.

A mixture's random router has the same fault, and no such remedy: rows of very different norms would choose few experts. There
rounding decides which expert is the last one chosen, in any implementation. The numbers that a file's codes stand for are rounded
as well, before they are multiplied. So both are also computed by the definitions in the dtype of the engine under test, and may
differ from float32 little more often than they do (`least_of`).
"""

from __future__ import annotations

import math
import multiprocessing
import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from ridgeline.bench.lab.launched import launched_kernels
from ridgeline.bench.workload.bench_engine import Engine
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.bench.workload.workloads import Asked
from ridgeline.models.decoder import Decoder
from ridgeline.ops.registry import set_kernels
from ridgeline.quant.cpu_packed import CpuPacked
from ridgeline.resolve import GPU_STEP_TOKENS

LAYERS = 2
LEAST = 0.99                         # agreement that a figure needs
MORE_OFTEN = 1.25                    # mixtures and codes may differ that much more often than definitions in the same dtype
BLOCK_SIZE = 16
_SPREAD = 12.0                       # standard deviation of the binary logarithm of a head row's length
# The same of the longest rows where the head is float16: a logit of five standard deviations is 41,000 then. Shorter rows, which
# are never chosen, are alike: were they made smaller, their numbers would lose bits.
_FLOAT16_POWERS = 13


@dataclass(frozen=True, slots=True)
class Part:
    """Requests that exercise one set of kernels. Answers are short: greedy ones soon repeat themselves, and one close decision
    would count repeatedly."""

    name: str
    count: int
    tokens_in: int                   # of the longest prompt, without what is shared
    tokens_out: int
    together: bool = True            # in the same steps; else one after the other
    shared: int = 0                  # tokens that every prompt begins with, computed before
    scored: int = 0                  # compare also every n-th position of the prompt; 0: none
    compared: int = 0                # requests that are given to the reference; 0: all
    alike: bool = False              # is it also compared with the head's rows all alike?

    @property
    def longest(self) -> int:
        return self.shared + self.tokens_in + self.tokens_out


PARTS = (
    Part("one row", 12, 96, 12, together=False, alike=True),
    Part("many rows", 128, 64, 8, alike=True),
    # The first step of a GPU's default token budget, and a second one of 1,024 tokens over what the first has left.
    Part("long prompt", 1, GPU_STEP_TOKENS + 1024, 12, scored=8),
    Part("shared prefix", 40, 64, 12, shared=1040, compared=20),         # 39 × 1,040 tokens that are not read again
)


@dataclass(slots=True)
class Heard:
    """What the engine under test said to one request."""

    part: Part
    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    expected: list[int] = field(default_factory=list)    # its best token after each of the prompt but the last, if asked for
    cached: int = 0                  # tokens of the prompt that it had already


@dataclass(frozen=True, slots=True)
class Tested:
    """What the engine under test said, and with what."""

    plain: list[Heard]               # with the head's rows all alike
    spread: list[Heard]
    weights: dict[str, torch.Tensor]
    device: str
    dtype: str
    techniques: list[str]
    kernels: list[str]
    rounded: bool                    # its experts or its weights depend on rounding
    head: torch.dtype                # of the numbers of its head


def check_quality(shape: str, dtype: str = "auto", parts: Sequence[Part] = PARTS, **options: Any) -> dict[str, Any]:
    """Share of positions at which both pick the same token, prefill's last and every decode's; and what was compared."""
    # A head that is the embedding would find the token that was put in, whatever the layers do. One of codes has scales of 16
    # bits, which cannot be spread that far. The dtype is the engine's own: float16 for a GGUF file.
    head = {"tie_word_embeddings": False, "head_type": "F32"}
    written, plain = (str(write_shape(shape, LAYERS, plain, **head)) for plain in (False, True))
    return compare(written, dtype, parts, plain, **options)


def check_apart(shape: str, **options: Any) -> dict[str, Any]:
    """The same in a process of its own: what it leaves on the device would count as the memory of the engine that is measured."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(check_quality, shape, **options).result()


def compare(model: str, dtype: str, parts: Sequence[Part], plain_model: str = "", **options: Any) -> dict[str, Any]:
    """`plain_model`: where the reference is read from, if `model` is a file that keeps codes."""
    sizes = {
        "load_format": "dummy", "skip_tokenizer_init": True, "block_size": BLOCK_SIZE,
        "max_model_len": max(part.longest for part in parts) + 64,
        # More rows than needed: the largest graph is captured before the first request, where its kernels would not be seen.
        "max_num_seqs": max(part.count for part in parts) + 32,
    }
    tested = _try(model, parts, sizes | options | {"dtype": dtype, "enable_prefix_caching": True})
    spread, device = tested.spread, tested.device
    sizes |= {
        "max_num_batched_tokens": 4096 if device == "cuda" else 512,
        "num_gpu_blocks_override": _blocks([len(each.prompt) + len(each.answer) for each in spread]),
    }
    slow = {"kernels": "reference", "async_scheduling": False, "enforce_eager": True, "device": device}
    best, alike = _read(Engine(plain_model or model, **sizes | slow | {"dtype": "float32"}), tested, tested.plain)
    found = agreements(spread, best)
    same_dtype = None
    if tested.rounded:
        others, _ = _read(Engine(plain_model or model, **sizes | slow | {"dtype": tested.dtype}), tested, [])
        same_dtype = _share([same_tokens(spread, best, others)])
    set_kernels("auto")
    return {
        "top1_agreement": _share(found.values()), "least": least_of(same_dtype), "same_dtype_agreement": same_dtype,
        "positions": sum(count for _, count in found.values()),
        "by_part": {name: {"top1_agreement": right / count, "positions": count} for name, (right, count) in found.items()},
        "top1_agreement_alike_rows": _share(alike.values()) if alike else None, "layers": LAYERS, "dtype": tested.dtype,
        "reached": tested.techniques, "kernels": tested.kernels,
        "reference": "every op by its definition in float32, the same weights; teacher-forced",
    }


def _try(model: str, parts: Sequence[Part], options: dict[str, Any]) -> Tested:
    """The engine under test answers, with its head as it is and spread."""
    blocks = max(_blocks([part.longest] * part.count) for part in parts)
    fast = Engine(model, **{"num_gpu_blocks_override": blocks} | options)
    vocab = fast.config.model.vocab_size
    asked = [(part, _prompts(part, vocab, number)) for number, part in enumerate(parts)]
    before = _counts(fast)
    with launched_kernels() as launched:
        plain = [heard for part, prompts in asked for heard in listen(fast, part, prompts, "plain") if part.alike]
        head = head_dtype(fast.model)
        spread_head(fast.model, head)
        spread = [heard for part, prompts in asked for heard in listen(fast, part, prompts, "spread")]
    config = fast.config
    tested = Tested(
        plain, spread, fast.model.numbers(), config.device, config.dtype, reached(fast, before, spread),
        sorted({name for name, _ in launched}), config.model.experts is not None or config.model.quantisation is not None, head,
    )
    fast.close()
    return tested


def _read(
    reference: Engine, tested: Tested, undecided: Sequence[Heard]
) -> tuple[list[list[int]], dict[str, tuple[int, int]]]:
    """A reference with the same weights: its tokens where the head is spread, and its agreement where it is not."""
    copy_weights(tested.weights, reference.model)
    best = best_tokens(reference, tested.spread)
    spread_head(reference.model, tested.head, back=True)
    alike = agreements(undecided, best_tokens(reference, undecided))
    reference.close()
    return best, alike


def listen(engine: Engine, part: Part, asked: Asked, salt: str) -> list[Heard]:
    """Let the engine answer a part's requests; those that the reference is to see."""
    if part.shared:                                      # put the prefix into the cache first
        engine.serve([(asked[0][0][: part.shared], 1)], salt)
    batches = [asked] if part.together else [[request] for request in asked]
    heard = [each for batch in batches for each in _answered(engine, part, batch, salt)]
    every = len(heard) // part.compared if part.compared else 1
    return heard[::every]


def _answered(engine: Engine, part: Part, asked: Asked, salt: str) -> list[Heard]:
    params = {"prompt_logprobs": 1} if part.scored else {}
    found = {engine.submit(prompt, tokens_out, salt, **params): Heard(part, prompt) for prompt, tokens_out in asked}
    for delta in _deltas(engine):
        heard = found[delta.request_id]
        heard.cached = max(heard.cached, delta.num_cached_tokens)
        heard.answer += delta.token_ids
        if delta.prompt_logprobs is not None:
            heard.expected += delta.prompt_logprobs.top_ids[:, 0].tolist()
    return list(found.values())


def _deltas(engine: Engine) -> Iterator[Any]:
    while engine.core.has_work:
        for delta in engine.core.step():
            if delta.error:
                raise AssertionError(f"a request of the check failed: {delta.error}")
            yield delta


def _counts(engine: Engine) -> tuple[int, int]:
    """Steps so far that replayed a CUDA graph, and in which rows shared a prefix."""
    return engine.runner.forward.replays, sum(prefixes.steps for prefixes in engine.runner.rows.prefixes)


def reached(engine: Engine, before: tuple[int, int], heard: Sequence[Heard]) -> list[str]:
    """Techniques that were not only on but also used since."""
    config = engine.config
    replays, sharing = (now - then for now, then in zip(_counts(engine), before, strict=True))
    seen = {
        "chunked prefill": any(len(each.prompt) - each.cached > config.max_num_batched_tokens for each in heard),
        "prefix caching": any(each.cached for each in heard),
        "overlap": config.depth > 0,
        "CUDA graphs": replays > 0 and config.graphs,
        "shared-prefix attention": sharing > 0,
        "quantised weights": config.options.model.quantization != "none" or config.model.quantisation is not None,
        "quantised KV": config.kv_format.quantised,
        "deterministic mode": config.options.execution.deterministic,
    }
    return [name for name, happened in seen.items() if happened]


def least_of(same_dtype: float | None) -> float:
    """The agreement that a figure needs, where the definitions in the same dtype agree with float32 that much."""
    return LEAST if same_dtype is None else min(LEAST, 1 - MORE_OFTEN * (1 - same_dtype))


def agreements(heard: Sequence[Heard], best: list[list[int]]) -> dict[str, tuple[int, int]]:
    """By part, at how many positions the reference would have taken the same token after the same tokens, and of how many."""
    found: dict[str, tuple[int, int]] = {}
    for each, its in zip(heard, best, strict=True):
        pairs = list(zip(each.answer, its[len(each.prompt) - 1 :], strict=True))
        if each.part.scored:
            every = _scored(each)
            pairs += zip(each.expected[every], its[every], strict=True)
        right, count = found.get(each.part.name, (0, 0))
        found[each.part.name] = (right + sum(mine == other for mine, other in pairs), count + len(pairs))
    return found


def same_tokens(heard: Sequence[Heard], best: list[list[int]], other: list[list[int]]) -> tuple[int, int]:
    """At how many of the positions that `agreements` looks at both name the same token, and of how many."""
    pairs = [
        pair for each, its, theirs in zip(heard, best, other, strict=True)
        for places in (slice(len(each.prompt) - 1, None), *([_scored(each)] if each.part.scored else []))
        for pair in zip(its[places], theirs[places], strict=True)
    ]
    return sum(mine == theirs for mine, theirs in pairs), len(pairs)


def _scored(heard: Heard) -> slice:
    return slice(None, len(heard.prompt) - 1, heard.part.scored)


def _share(counts: Iterable[tuple[int, int]]) -> float:
    right, positions = map(sum, zip(*counts, strict=True))
    return right / positions


def head_dtype(model: Decoder) -> torch.dtype:
    head = model.head
    assert head is not None
    if head.weight is not None:
        found: torch.dtype = head.weight.dtype
        return found
    assert isinstance(head.scheme, CpuPacked)
    return head.scheme.stored


def row_powers(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Binary logarithms of what lengthens the rows of a head of this dtype: whole numbers, exact in both directions."""
    powers = (torch.randn(rows, generator=torch.Generator().manual_seed(1)) * _SPREAD).round_()
    return powers if dtype != torch.float16 else (powers - powers.max() + _FLOAT16_POWERS).clamp_min_(0)


def spread_head(model: Decoder, dtype: torch.dtype, back: bool = False) -> None:
    """Give the head's rows lengths that differ by much, the same ones for the same model; or undo it. `dtype`: of the head of the
    engine under test."""
    with torch.inference_mode():
        head = model.head
        assert head is not None                    # the engine that is compared has one stage
        weight = head.scheme.numbers(head) if head.weight is None else head.weight
        powers = row_powers(weight.shape[0], dtype)
        factors = torch.exp2(-powers if back else powers).to(weight.device)
        scale = getattr(head, "scale", None)
        if weight.is_floating_point() and weight.dtype.itemsize > 1:
            weight.mul_(factors.to(weight.dtype).unsqueeze(1))
        elif scale is None or scale.shape != factors.shape:
            raise AssertionError("the check lengthens the rows of a head of codes by their scales: one for each row")
        else:
            scale.mul_(factors)                    # codes stay
        if head.weight is not None:
            head.finish()                          # a second layout of the weight follows it
            return
        assert head.matrix is not None and isinstance(head.scheme, CpuPacked)
        (part,) = head.matrix.parts                # a CPU keeps 16-bit numbers; recorded steps know where they are
        part.put_numbers(weight.to(head.scheme.stored))


def best_tokens(engine: Engine, heard: Sequence[Heard]) -> list[list[int]]:
    """Of each prompt and its answer, the likeliest token after each of their tokens but the last (teacher forcing)."""
    found: dict[str, list[int]] = {engine.submit(each.prompt + each.answer, 1, prompt_logprobs=1): [] for each in heard}
    for delta in _deltas(engine):
        if delta.prompt_logprobs is not None:
            found[delta.request_id] += delta.prompt_logprobs.top_ids[:, 0].tolist()
    return list(found.values())


def copy_weights(weights: dict[str, torch.Tensor], target: Decoder) -> None:
    """Copies the weights: the same random numbers in another dtype would differ."""
    with torch.inference_mode():
        for name, parameter in target.named_parameters():
            if name not in weights or weights[name].shape != parameter.shape:
                raise AssertionError(f"the reference's {name} has no counterpart in the engine under test")
            parameter.copy_(weights[name])
        target.finish()


def _blocks(lengths: Sequence[int]) -> int:
    """KV blocks for requests of these lengths at once."""
    return sum(-(-length // BLOCK_SIZE) + 2 for length in lengths) + 8


def _prompts(part: Part, vocab: int, seed: int) -> Asked:
    """Prompts from half the length on: rows of one step shall differ."""
    rng = random.Random(f"quality-{seed}")
    lengths = [part.tokens_in - math.floor(part.tokens_in / 2 * place / part.count) for place in range(part.count)]
    asked = [([rng.randrange(vocab) for _ in range(length)], part.tokens_out) for length in lengths]
    shared = [rng.randrange(vocab) for _ in range(part.shared)]
    return [(shared + prompt, tokens_out) for prompt, tokens_out in asked]
