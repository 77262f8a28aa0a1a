"""Calibration text that the model writes itself, where the user has none: drawn at temperature 1 from short openings."""

from __future__ import annotations

from pathlib import Path

from ridgeline.evaluate.scoring import Scorer
from ridgeline.process.progress import progress_bar
from ridgeline.quantize.calibration import CONTEXT
from ridgeline.text.tokenizer import Tokenizer

OPENINGS = ("The", "In the", "def ", "Question:", "# ", "1.", "I ", "import ")
# To judge formats by: several languages beside kinds of English text, since a card reads them, too.
SEARCH_OPENINGS = (
    "The story begins", "def main(", "Der Fluss ist", "3 + 5 =", "Le fleuve est", "Name: ", "Question:", "El río es",
    "import ", "Река", "In the", "河", "# ", "川は", "Nehir", "1. ",
)


def own_passages(
    model: Path, tokens: int, seed: int, show: bool, length: int = CONTEXT, openings: tuple[str, ...] = OPENINGS
) -> list[list[int]]:
    """Passages of `length` tokens, at least `tokens` in all; the seed decides them."""
    tokenizer = Tokenizer.load(model)
    count = max(1, -(-tokens // length))
    prompts = [tokenizer.encode(openings[number % len(openings)]) for number in range(count)]
    scorer = Scorer({"model": str(model)}, length, show)
    try:
        with progress_bar("the model writes text to read", wanted=show) as tick:
            longest = max(map(len, prompts))
            answers = scorer.generate(prompts, length - longest, tick, ignore_eos=True, seed=seed)
    finally:
        scorer.close()
    return [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
