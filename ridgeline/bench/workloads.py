"""Workloads by name: how many requests, how many tokens in and out. Token ids are random, so any model can run them."""

from __future__ import annotations

import random
from dataclasses import dataclass


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
