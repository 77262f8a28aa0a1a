"""Calibration text that the model writes itself, where the user has none: drawn at temperature 1 from short openings."""

from __future__ import annotations

from pathlib import Path

from ridgeline.evaluate.scoring import Scorer
from ridgeline.process.progress import progress_bar
from ridgeline.quantize.calibration import CONTEXT
from ridgeline.text.tokenizer import Tokenizer

OPENINGS = ("The", "In the", "def ", "Question:", "# ", "1.", "I ", "import ")


def own_passages(model: Path, tokens: int, seed: int, show: bool) -> list[list[int]]:
    """Passages of CONTEXT tokens, at least `tokens` in all; the seed decides them."""
    tokenizer = Tokenizer.load(model)
    count = max(1, -(-tokens // CONTEXT))
    prompts = [tokenizer.encode(OPENINGS[number % len(OPENINGS)]) for number in range(count)]
    scorer = Scorer({"model": str(model)}, CONTEXT, show)
    try:
        with progress_bar("the model writes text to calibrate with", wanted=show) as tick:
            longest = max(map(len, prompts))
            answers = scorer.generate(prompts, CONTEXT - longest, tick, ignore_eos=True, seed=seed)
    finally:
        scorer.close()
    return [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
