"""Speed of steps with drafts against the same engine without, by batch size, chance of a right draft, and context.

    python benchmarks/studies/speculation/run.py --shape llama-3.1-8b > result.json            # on a GPU, some 20 minutes
    python benchmarks/studies/speculation/run.py --model DIRECTORY --batch 1 2 --context 64    # any model, also on a CPU

A dial stands in for a proposer: it knows the tokens of the run without drafts, and names each with probability alpha, otherwise a
wrong one. Kernels, verification and scheduling are the real ones. Blocks with and without drafts alternate in one process, and a
cell's figure is the median of the ratios of neighbours.

A shape's dummy weights have a tied head and a loud embedding: such a model repeats its last token by a wide margin. So the
rounding of bfloat16, which depends on the rows of a product, does not move answers away from those that the dial knows.
`agreement`: how many tokens were the same.

Width `auto`: the controller decides, with the dial as its proposer.

`predictions.json` holds what was expected before the first run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from typing import Any

import numpy as np

from ridgeline.bench.workload.shapes import SHAPES, write_shape
from ridgeline.config import EngineConfig
from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.drafters import step_model
from ridgeline.engine.core.executor import LocalExecutor
from ridgeline.messages import Request
from ridgeline.sampling_params import SamplingParams
from ridgeline.scheduler.drafting import DecodingRows, Drafts, NoDrafter
from ridgeline.scheduler.drafts.controller import Controller
from ridgeline.scheduler.drafts.offer import EVIDENCE, Offer
from ridgeline.scheduler.drafts.shape_times import ShapeTimes
from ridgeline.scheduler.sequence import Sequence
from ridgeline.sizes.graph_shapes import decode_sizes, most_queries

BATCHES, ALPHAS, CONTEXTS = (1, 8, 32, 64, 128, 256), (0.0, 0.3, 0.6, 0.8, 0.9), (512, 8192)
WIDTHS = (1, 2, 3, 5, 7, 11, 15)
AUTO = "auto"
LOUD = 4096.0                        # of the embedding: then it outweighs what 32 layers add
Answers = dict[str, list[int]]


class Dial:
    """Drafts of one width for every row, each right with probability alpha."""

    active = True

    def __init__(self, answers: Answers, alpha: float, width: int, vocab: int) -> None:
        self._answers, self._alpha, self._width, self._vocab = answers, alpha, width, vocab
        self._random = random.Random(1)
        self.proposed = self.accepted = 0

    def plan(self, rows: DecodingRows) -> Drafts | None:
        width = np.minimum(self._width, rows.most)
        width = np.minimum(width, np.maximum(0, rows.room - (np.cumsum(width) - width))).astype(np.int32)
        if not width.any():
            return None
        path = np.full((len(width), int((width + rows.pending).max())), -1, np.int32)
        for place, sequence in enumerate(rows.sequences):
            guesses = self._guesses(sequence, path.shape[1])
            path[place, : len(guesses)] = guesses
        return Drafts(width, path)

    def _guesses(self, sequence: Sequence, count: int) -> list[int]:
        said = len(sequence.tokens) - sequence.num_prompt
        right = self._answers[sequence.request.request_id][said : said + count]
        return [token if self._random.random() < self._alpha else self._wrong(token) for token in right]

    def _wrong(self, token: int) -> int:
        return (token + 1 + self._random.randrange(self._vocab - 1)) % self._vocab

    def observe(self, sequences: list[Sequence], width: np.ndarray, accepted: np.ndarray, seconds: float) -> None:
        self.proposed += int(width.sum())
        self.accepted += int(accepted.sum())

    def timed(self, *step: float) -> None:
        """It learns nothing."""

    def ended(self, sequence: Sequence) -> None:
        """Its answers are known."""


class DialProposer(Dial):
    """The same, for the controller."""

    name = "ngram"

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        tokens = self._guesses(sequence, most)
        return Offer(self.name, tokens, EVIDENCE - 1) if tokens else None


class Cell:
    """One batch of requests, run again and again."""

    def __init__(self, core: EngineCore, batch: int, context: int, output: int) -> None:
        rng = random.Random(context)
        self._vocab = core.config.model.vocab_size
        self._core, self._output = core, output
        self._prompts = [[rng.randrange(3, self._vocab) for _ in range(context)] for _ in range(batch)]

    def run(self, drafter: Any) -> tuple[float, Answers, int]:
        """Seconds of decoding, from the step in which the last prompt was computed; the answers; the steps."""
        core = self._core
        core.scheduler.drafter = NoDrafter()
        params = SamplingParams(temperature=0, max_tokens=self._output, ignore_eos=True)
        for number, prompt in enumerate(self._prompts):
            core.add(Request(str(number), prompt, params))
        answers: Answers = {str(number): [] for number in range(len(self._prompts))}
        while not all(answers.values()):
            self._take(answers)
        core.scheduler.drafter = drafter
        before, steps, began = sum(map(len, answers.values())), 0, time.perf_counter()
        while core.has_work:
            self._take(answers)
            steps += 1
        seconds = time.perf_counter() - began
        return seconds / (sum(map(len, answers.values())) - before), answers, steps

    def _take(self, answers: Answers) -> None:
        for delta in self._core.step():
            answers[delta.request_id] += delta.token_ids

    def _drafter(self, truth: Answers, alpha: float, width: str) -> Any:
        if width != AUTO:
            return Dial(truth, alpha, int(width), self._vocab)
        config = self._core.config
        sizes = decode_sizes(config.max_num_batched_tokens) if config.graphs else []
        times = ShapeTimes(step_model(config), sizes, config.max_num_batched_tokens)
        return Controller([DialProposer(truth, alpha, MOST_DRAFTS, self._vocab)], times, MOST_DRAFTS)

    def measure(self, alpha: float, width: str, pairs: int) -> dict[str, Any]:
        _, truth, _ = self.run(NoDrafter())
        drafter = self._drafter(truth, alpha, width)
        for _ in range(3 if width == AUTO else 1):               # graphs of its shapes are captured, and the controller learns
            self.run(drafter)
        ratios, off, on = [], [], []
        before = _counts(drafter)
        for pair in range(pairs):
            first = [("off", NoDrafter()), ("on", drafter)]
            seconds = {}
            for name, which in first if pair % 2 == 0 else reversed(first):
                seconds[name], answers, needed = self.run(which)
                if name == "on":
                    steps = needed
                    same = np.mean([a == b for key, said in truth.items() for a, b in zip(said, answers[key], strict=True)])
            ratios.append(seconds["off"] / seconds["on"])
            off.append(seconds["off"])
            on.append(seconds["on"])
        proposed, accepted = (_counts(drafter) - before).tolist()
        return {
            "speedup": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios),
            "off_tok_s": 1 / statistics.median(off), "on_tok_s": 1 / statistics.median(on), "steps": steps,
            "acceptance": accepted / max(1, proposed), "agreement": float(same), "drafts_per_step": proposed / (pairs * steps),
        }


def _counts(drafter: Any) -> np.ndarray:
    """Drafts so far, and those that were accepted."""
    if isinstance(drafter, Controller):
        return np.array([drafter.counters.draft_tokens, drafter.counters.accepted_tokens])
    return np.array([drafter.proposed, drafter.accepted])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--alpha", type=float, nargs="+", default=ALPHAS)
    parser.add_argument("--context", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--width", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--cells", nargs="+", help="BATCH:WIDTH or BATCH:auto, in the place of all batches and widths")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no cell begins after that long")
    args = parser.parse_args()
    if (args.model is None) == (args.shape is None):
        parser.error("one of --model and --shape")
    began = time.monotonic()
    cells = [(int(batch), width) for batch, width in (each.split(":") for each in args.cells or ())]
    cells = cells or [(batch, str(width)) for batch in args.batch for width in args.width if width < most_queries(batch)]
    model = args.model or str(write_shape(args.shape, tie_word_embeddings=True))
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True} if args.shape else {}
    longest = max(args.context) + args.output + 1
    core = EngineCore.start(EngineConfig.of(
        model=model, max_model_len=longest, max_num_seqs=max(batch for batch, _ in cells), speculative_config="ngram", **options,
    ))
    if args.shape:
        assert isinstance(core.executor, LocalExecutor)
        embed = core.executor.runner.model.embed
        assert embed is not None and embed.weight is not None
        embed.weight.data.mul_(LOUD)
    for context, (batch, width), alpha in itertools.product(args.context, cells, args.alpha):
        if batch * (context + args.output) > core.config.num_blocks * core.config.groups[0].block_size:
            continue                                             # the KV cache is too small for it
        if time.monotonic() - began > args.seconds:
            break
        found = {"batch": batch, "context": context, "alpha": alpha, "width": width}
        cell = Cell(core, batch, context, args.output)
        print(json.dumps(found | cell.measure(alpha, width, args.pairs)), flush=True)
    core.close()


if __name__ == "__main__":
    main()
