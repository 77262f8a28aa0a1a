"""How fast an engine reads a prompt and writes an answer, one request at a time: for the card of a quantised model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from ridgeline.evaluate.scoring import Scorer

PROMPT, ANSWER, TIMES = 128, 32, 3   # tokens, tokens, runs whose median counts


def measure_speed(scorer: Scorer, tokens: Sequence[int], clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """Tokens per second of a prompt, and of an answer after its first token. `tokens`: any text, at least PROMPT of it."""
    prompt = list(tokens[:PROMPT])

    def seconds(count: int) -> float:
        begun = clock()
        scorer.generate([prompt], count, ignore_eos=True)
        return clock() - begun

    seconds(2)                                           # kernels are compiled, memory is touched
    first, whole = ([seconds(count) for _ in range(TIMES)] for count in (1, 1 + ANSWER))
    decode = max(statistics.median(whole) - statistics.median(first), 1e-9)
    return {"prefill_tok_s": len(prompt) / statistics.median(first), "decode_tok_s": ANSWER / decode}
