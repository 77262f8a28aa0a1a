"""Speed of steps with drafts against the same engine without, by batch size, chance of a right draft, and context.

    python benchmarks/studies/speculation/run.py --shape llama-3.1-8b --out speculation.json   # on a GPU, some 20 minutes
    python benchmarks/studies/speculation/run.py --model DIRECTORY --batch 1 2 --context 64    # any model, also on a CPU

A dial stands in for a proposer: it knows the tokens of the run without drafts, and names each with probability alpha, otherwise a
wrong one. Kernels, verification and scheduling are the real ones. Blocks with and without drafts alternate in one process, and a
cell's figure is the median of the ratios of neighbours.

A block begins when all prompts are computed, and ends when rows have said `output` tokens each, on average. Rows may say half as
many again, so the batch stays full: with drafts rows do not end together, and a few rows at the end would tell nothing of the
batch. `context` is the mean length of a row in a block.

A shape's dummy weights have a tied head and a loud embedding: such a model repeats its last token by a wide margin. So the
rounding of bfloat16, which depends on the rows of a product, does not move answers away from those that the dial knows.
`agreement`: how many tokens were the same.

Width `auto`: the controller decides, with the dial as its proposer. Of a step: `step_ms` on the clock, `device_ms` on the device,
`host_ms` in which the host did not wait for it.

`predictions.json` holds what was expected before the first run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.record import record, write
from ridgeline.bench.workload.shapes import SHAPES, write_shape
from ridgeline.config import EngineConfig
from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.drafters import step_times
from ridgeline.engine.core.executor import LocalExecutor
from ridgeline.messages import Request, StepResult
from ridgeline.sampling_params import SamplingParams
from ridgeline.scheduler.drafting import DecodingRows, Drafts, NoDrafter
from ridgeline.scheduler.drafts.controller import Controller
from ridgeline.scheduler.drafts.offer import EVIDENCE, Offer
from ridgeline.scheduler.drafts.shape_times import ShapeTimes
from ridgeline.scheduler.sequence import Sequence
from ridgeline.sizes.graph_shapes import most_queries

BATCHES, ALPHAS, CONTEXTS = (1, 8, 32, 64, 128, 256), (0.0, 0.3, 0.6, 0.8, 0.9), (640, 8192)
WIDTHS = (1, 2, 3, 5, 7, 11, 15)
AUTO = "auto"
LOUD = 4096.0                        # of the embedding: then it outweighs what 32 layers add
SPARE = 1.5                          # tokens that a row may say, of those that it should on average
Answers = dict[str, list[int]]


class Tape:
    """A guess for every token of the answers, right with probability alpha. A token's guess is compared once at most: rows go on
    behind the first wrong one. So it may be drawn ahead, where it costs the steps nothing."""

    name = "ngram"

    def __init__(self, answers: Answers, alpha: float, vocab: int) -> None:
        self._answers, self._alpha, self._vocab = answers, alpha, vocab
        self._random = np.random.default_rng(1)
        self._guesses: Answers = {}

    def renew(self) -> None:
        draw = self._random
        for key, answer in self._answers.items():
            right = np.array(answer)
            wrong = (right + draw.integers(1, self._vocab, len(right))) % self._vocab
            self._guesses[key] = np.where(draw.random(len(right)) < self._alpha, right, wrong).tolist()

    def guesses(self, sequence: Sequence, count: int) -> list[int]:
        said = len(sequence.tokens) - sequence.num_prompt
        return self._guesses[sequence.request.request_id][said : said + count]

    def propose(self, sequence: Sequence, most: int) -> Offer | None:
        tokens = self.guesses(sequence, most)
        return Offer(self.name, tokens, EVIDENCE - 1) if tokens else None

    def ended(self, sequence: Sequence) -> None:
        """Its answers are known."""


class Fixed:
    """A drafter: as many drafts for every row."""

    active = True

    def __init__(self, tape: Tape, width: int) -> None:
        self._tape, self._width = tape, width
        self.proposed = self.accepted = 0

    def plan(self, rows: DecodingRows) -> Drafts | None:
        width = np.minimum(self._width, rows.most)
        width = np.minimum(width, np.maximum(0, rows.room - (np.cumsum(width) - width))).astype(np.int32)
        if not width.any():
            return None
        longest = int((width + rows.pending).max())
        none = [-1] * longest
        paths = [self._tape.guesses(sequence, longest) for sequence in rows.sequences]
        return Drafts(width, np.array([path + none[len(path) :] for path in paths], np.int32))

    def observe(self, sequences: list[Sequence], width: np.ndarray, accepted: np.ndarray, seconds: float) -> None:
        self.proposed += int(width.sum())
        self.accepted += int(accepted.sum())

    def timed(self, *step: float) -> None:
        """It learns nothing."""

    def ended(self, sequence: Sequence) -> None:
        """Its answers are known."""


@dataclass(slots=True)
class Block:
    """What one run came to."""

    answers: Answers
    seconds: float = 0.0             # of decoding …
    tokens: int = 0                  # … all of these
    steps: int = 0
    waited: float = 0.0              # seconds of the host for the device
    device: float = 0.0              # seconds of the device

    @property
    def each(self) -> float:
        return self.seconds / self.tokens


class Cell:
    """One batch of requests, run again and again."""

    def __init__(self, core: EngineCore, batch: int, context: int, output: int) -> None:
        rng = random.Random(context)
        self._vocab = core.config.model.vocab_size
        self._core, self._output = core, output
        self._prompts = [
            [rng.randrange(3, self._vocab) for _ in range(max(1, context - output // 2))] for _ in range(batch)
        ]
        self._block = Block({})
        self._collect = core.executor.collect
        self._truth = self.run(NoDrafter(), to_the_end=True).answers

    def run(self, drafter: Any, to_the_end: bool = False) -> Block:
        core, count = self._core, len(self._prompts)
        core.scheduler.drafter = NoDrafter()
        limit = math.ceil(SPARE * self._output) + MOST_DRAFTS
        params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True)
        for number, prompt in enumerate(self._prompts):
            core.add(Request(str(number), prompt, params))
        self._block = block = Block({str(number): [] for number in range(count)})
        while not all(block.answers.values()):
            self._take(block)
        core.scheduler.drafter = drafter
        block.tokens = 0
        core.executor.collect = self._timed_collect              # type: ignore[method-assign]
        began = time.perf_counter()
        while core.has_work and (to_the_end or block.tokens < count * self._output):
            self._take(block)
            block.steps += 1
        block.seconds = time.perf_counter() - began
        core.executor.collect = self._collect                    # type: ignore[method-assign]
        for number in range(count):
            core.abort(str(number))
        while core.has_work:
            core.step()
        return block

    def _take(self, block: Block) -> None:
        for delta in self._core.step():
            if delta.error:
                raise RuntimeError(delta.error)
            block.answers[delta.request_id] += delta.token_ids
            block.tokens += len(delta.token_ids)

    def _timed_collect(self) -> StepResult:
        began = time.perf_counter()
        result = self._collect()
        self._block.waited += time.perf_counter() - began
        self._block.device += result.device_seconds
        return result

    def measure(self, alpha: float, width: str, pairs: int, times: ShapeTimes) -> dict[str, Any]:
        tape = Tape(self._truth, alpha, self._vocab)
        drafter: Any = Controller([tape], times, MOST_DRAFTS) if width == AUTO else Fixed(tape, int(width))
        for _ in range(3 if width == AUTO else 1):               # graphs are captured, and the controller learns
            tape.renew()
            self.run(drafter)
        found: dict[str, list[Block]] = {"off": [], "on": []}
        before = _counts(drafter)
        for pair in range(pairs):
            tape.renew()
            for name in ("off", "on") if pair % 2 == 0 else ("on", "off"):
                found[name].append(self.run(drafter if name == "on" else NoDrafter()))
        proposed, accepted = (_counts(drafter) - before).tolist()
        off, on = found["off"], found["on"]
        ratios = [one.each / other.each for one, other in zip(off, on, strict=True)]
        steps = sum(block.steps for block in on)
        return {
            "speedup": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios),
            "off_tok_s": 1 / statistics.median(block.each for block in off),
            "on_tok_s": 1 / statistics.median(block.each for block in on),
            "acceptance": accepted / max(1, proposed), "agreement": min(self._agreement(block) for block in on),
            "drafts_per_step": proposed / steps, "off": _of_a_step(off), "on": _of_a_step(on),
        }

    def _agreement(self, block: Block) -> float:
        both = [zip(said, self._truth[key], strict=False) for key, said in block.answers.items()]
        return float(np.mean([one == other for pairs in both for one, other in pairs]))


def _of_a_step(blocks: list[Block]) -> dict[str, float]:
    steps = sum(block.steps for block in blocks)
    seconds, waited, device = (sum(getattr(block, name) for block in blocks) for name in ("seconds", "waited", "device"))
    tokens = sum(block.tokens for block in blocks)
    return {
        "step_ms": 1e3 * seconds / steps, "host_ms": 1e3 * (seconds - waited) / steps, "device_ms": 1e3 * device / steps,
        "tokens": tokens / steps,
    }


def _counts(drafter: Any) -> np.ndarray:
    """Drafts so far, and those that were accepted."""
    if isinstance(drafter, Controller):
        return np.array([drafter.counters.draft_tokens, drafter.counters.accepted_tokens])
    return np.array([drafter.proposed, drafter.accepted])


def start(args: argparse.Namespace, most_rows: int) -> EngineCore:
    model = args.model or str(write_shape(args.shape, tie_word_embeddings=True))
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True} if args.shape else {}
    longest = max(args.context) + math.ceil((SPARE - 0.5) * args.output) + 2 * MOST_DRAFTS
    core = EngineCore.start(EngineConfig.of(
        model=model, max_model_len=longest, max_num_seqs=most_rows, speculative_config="ngram", **options,
    ))
    if args.shape:
        assert isinstance(core.executor, LocalExecutor)
        embed = core.executor.runner.model.embed
        assert embed is not None and embed.weight is not None
        embed.weight.data.mul_(LOUD)
    began = time.monotonic()
    while core.prepare() and time.monotonic() - began < args.prepare:    # as an idle server does
        pass
    return core


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
    parser.add_argument("--prepare", type=float, default=60, help="seconds in which graphs may be captured before the first cell")
    parser.add_argument("--out", help="the record; it is written after each cell")
    args = parser.parse_args()
    if (args.model is None) == (args.shape is None):
        parser.error("one of --model and --shape")
    began = time.monotonic()
    cells = [(int(batch), width) for batch, width in (each.split(":") for each in args.cells or ())]
    cells = cells or [
        (batch, str(width)) for batch in args.batch for width in (*args.width, AUTO)
        if width == AUTO or int(width) < most_queries(batch)
    ]
    core = start(args, max(batch for batch, _ in cells))
    times, found, gpu = step_times(core.config), [], gpu_facts() or None
    for context in args.context:
        for batch, group in itertools.groupby(cells, key=lambda cell: cell[0]):
            if batch * (context + args.output) > core.config.num_blocks * core.config.groups[0].block_size:
                continue                                         # the KV cache is too small for it
            cell: Cell | None = None
            for (_, width), alpha in itertools.product(list(group), args.alpha):
                if time.monotonic() - began > args.seconds:
                    break
                cell = cell or Cell(core, batch, context, args.output)
                row = {"batch": batch, "context": context, "alpha": alpha, "width": width}
                found.append(row | cell.measure(alpha, width, args.pairs, times))
                print(json.dumps(found[-1]), flush=True)
                if args.out:
                    command = " ".join(word for word in sys.argv if word not in ("--out", args.out))
                    workload = {"command": command, "model": args.shape or args.model, "dtype": core.config.dtype}
                    write(record("speculation", workload, {"cells": found}, gpu=gpu), Path(args.out))
    core.close()


if __name__ == "__main__":
    main()
