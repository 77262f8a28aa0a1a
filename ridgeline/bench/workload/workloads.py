"""Workloads by name: number of requests, tokens in and out. Token ids only, so any model can run them.

`Workload` and `PRESETS` are small ones for a CPU. `GPU_PRESETS` are those that other engines were measured with on one H200:
the same token ids from the same seeds (1 timed, 2 for first tokens, 99 for warm-up).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

TIMED, FIRST_TOKENS, WARM_UP = 1, 2, 99      # seeds
LOWEST_ID, HIGHEST_ID = 1000, 120_000        # ids of the GPU workloads: [lowest, highest)

Asked = list[tuple[list[int], int]]          # prompts, and how many tokens to answer each with


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: int
    tokens_in: int
    tokens_out: int

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        rng = random.Random(f"{self.name}-{seed}")
        return [[rng.randrange(vocab_size) for _ in range(self.tokens_in)] for _ in range(self.requests)]


PRESETS = {
    "latency": [Workload("latency", 1, 128, 128)],
    "batch": [Workload("batch8", 8, 128, 128), Workload("batch32", 32, 128, 128)],
    "prefill": [Workload("prefill", 1, 512, 1)],
}
# What llama.cpp answers within minutes on two cores, with a model of 100 million weights and with one of 1.5 billion.
BESIDE_LLAMA_CPP = {
    "beside-small": [
        Workload("1x128+64", 1, 128, 64), Workload("8x64+64", 8, 64, 64), Workload("32x32+32", 32, 32, 32),
        Workload("1x512+1", 1, 512, 1),
    ],
    "beside-large": [Workload("1x32+32", 1, 32, 32), Workload("8x16+24", 8, 16, 24), Workload("1x512+1", 1, 512, 1)],
}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal lengths, cut to [low, high]."""

    mean: float
    deviation: float
    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return min(self.high, max(self.low, int(rng.lognormvariate(self.mean, self.deviation))))


@dataclass(frozen=True, slots=True)
class Preset:
    """A GPU workload. The order of the draws is part of it: other engines ran exactly these ids."""

    name: str
    count: int
    tokens_in: int | Lengths         # of each prompt, without what is shared
    tokens_out: int | Lengths
    shared: int = 0                  # tokens that every prompt begins with

    @property
    def uniform(self) -> bool:
        """Whether every request has the same lengths, so that prefill and decode can be measured separately."""
        return isinstance(self.tokens_in, int) and isinstance(self.tokens_out, int) and not self.shared

    def requests(self, seed: int, vocab_size: int = HIGHEST_ID) -> Asked:
        """A vocabulary smaller than the highest id folds the ids into it."""
        rng = random.Random(f"{self.name}-{seed}")
        shared = _ids(rng, self.shared)
        asked: Asked = []
        for _ in range(self.count):
            tokens_in = self.tokens_in if isinstance(self.tokens_in, int) else self.tokens_in.draw(rng)
            tokens_out = self.tokens_out if isinstance(self.tokens_out, int) else self.tokens_out.draw(rng)
            asked.append((shared + _ids(rng, tokens_in), tokens_out))
        if vocab_size < HIGHEST_ID:
            asked = [([token % vocab_size for token in prompt], tokens_out) for prompt, tokens_out in asked]
        return asked

    def lengths(self, seed: int) -> list[tuple[int, int]]:
        """Tokens in and out of each request; ids are drawn only where lengths are drawn between them."""
        if isinstance(self.tokens_in, int) and isinstance(self.tokens_out, int):
            return [(self.shared + self.tokens_in, self.tokens_out)] * self.count
        return [(len(prompt), tokens_out) for prompt, tokens_out in self.requests(seed)]

    def longest(self) -> int:
        """Tokens of the longest possible request, its answer included."""
        most_in = self.tokens_in if isinstance(self.tokens_in, int) else self.tokens_in.high
        most_out = self.tokens_out if isinstance(self.tokens_out, int) else self.tokens_out.high
        return self.shared + most_in + most_out


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(count)]


GPU_PRESETS = {
    preset.name: preset
    for preset in (
        Preset("latency_b1", 1, 512, 256),
        Preset("batch128", 128, 512, 256),
        Preset("throughput", 1000, Lengths(5.2, 1.0, 16, 2048), Lengths(5.1, 0.8, 16, 1024)),
        Preset("prefix", 512, 64, 64, shared=2000),
        Preset("prefill_8k", 1, 8192, 1),
        Preset("prefill_16k", 1, 16384, 1),
        Preset("decode_16x8k", 16, 8192, 128),
    )
}
