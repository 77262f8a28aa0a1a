"""Speed of steps with drafts against the same engine without, by batch size, chance of a right draft, and context.

    python benchmarks/studies/speculation/run.py --shape llama-3.1-8b --seconds 900 --out speculation.json     # on a GPU
    python benchmarks/studies/speculation/run.py --model DIRECTORY --batch 1 2 --context 64    # any model, also on a CPU

The first command measures the cells of the controller's bar, those that say most first: `auto` and the fixed widths that may be
best, for each batch, chance and context (`important`). It ends within `--seconds`. Called again, it goes on where the record in
`--out` ends. The second one measures all combinations of what is named.

A dial stands in for a proposer: it knows the tokens of the run without drafts, and names each with probability alpha, otherwise a
wrong one. Kernels, verification and scheduling are the real ones. The widths of a batch, context and chance take turns in one
process: a round has a block without drafts and one of each width, every second one in reverse order. A cell's figure is the
median of its ratios to the block without drafts of the same round. There are `--pairs` rounds; fewer, but `ENOUGH`, if the
controller holds both of its bars in every one of them.

A block begins when all prompts are computed, and ends when rows have said `output` tokens each, on average. Rows may say half as
many again, so the batch stays full: with drafts rows do not end together, and a few rows at the end would tell nothing of the
batch. `context` is the mean length of a row in a block.

A shape's dummy weights have a tied head and a loud embedding: such a model repeats its last token by a wide margin. So the
rounding of bfloat16, which depends on the rows of a product, does not move answers away from those that the dial knows.
`agreement`: how many tokens were the same.

`controller` in the record: of every cell with `auto`, its speed against the best fixed width that was measured, and against off.

Width `auto`: the controller decides, with the dial as its proposer. Of a step: `step_ms` on the clock, `device_ms` on the device,
`host_ms` in which the host did not wait for it, and `sm_mhz`: the clock of the SMs when blocks began and when they ended, if the
driver says it. `shapes`: which CUDA graphs ran the steps with drafts, by the most queries of a row and by tokens, how often, and
the median of their times.

`predictions.json` holds what was expected before the first run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.record import command, record, source_hash, write
from ridgeline.bench.workload.shapes import SHAPES, write_shape
from ridgeline.config import EngineConfig
from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.drafters import step_times
from ridgeline.engine.core.executor import LocalExecutor
from ridgeline.gpus.nvml import open_nvml, visible
from ridgeline.messages import Request, StepResult
from ridgeline.ops.cpu import native
from ridgeline.sampling_params import SamplingParams
from ridgeline.scheduler.drafting import DecodingRows, Drafts, NoDrafter
from ridgeline.scheduler.drafts.controller import Controller
from ridgeline.scheduler.drafts.offer import EVIDENCE, Offer, RowByRow
from ridgeline.scheduler.drafts.shape_times import Pace
from ridgeline.scheduler.sequence import Sequence
from ridgeline.sizes.graph_shapes import MOST_VERIFIED, most_queries

BATCHES, ALPHAS, CONTEXTS = (1, 8, 32, 64, 128, 256), (0.3, 0.9, 0.0, 0.6, 0.8), (640, 8192)
WIDTHS = (1, 2, 3, 5, 7, 11, 15)
AUTO = "auto"
# Fixed widths that may be best, by chance and batch, from the step times that were measured; with a chance of 0, none are.
BEST = {
    0.9: {1: (15,), 8: (15,), 32: (5, 7), 64: (3, 5), 128: (3,), 256: (1,)},
    0.8: {1: (15,), 8: (11, 15), 32: (3, 5), 64: (3,), 128: (2, 3), 256: (1,)},
    0.6: {1: (7,), 8: (3, 7), 32: (3, 2), 64: (1, 2), 128: (1,), 256: (1,)},
    0.3: {1: (3,), 8: (1, 3), 32: (1, 3), 64: (1,), 128: (1,), 256: (1,)},
}
# The largest batches first, where drafts that do not pay cost most.
ORDER = (256, 128, 64, 32, 8, 1)
BAR_OF_BEST, BAR_OF_OFF = 0.97, 0.98
ENOUGH = 4                           # rounds, if all of them say the same
LOUD = 4096.0                        # of the embedding: then it outweighs what 32 layers add
SPARE = 1.5                          # tokens that a row may say, of those that it should on average
Answers = dict[str, list[int]]


class Tape(RowByRow):
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
        return Offer(tokens, EVIDENCE - 1) if tokens else None

    def ended(self, sequence: Sequence) -> None:
        """Its answers are known."""


class Fixed:
    """A drafter: as many drafts for every row."""

    active, waits, will_look = True, False, True

    def __init__(self, tape: Tape, width: int) -> None:
        self._tape, self._width = tape, width
        self.proposed = self.accepted = 0

    def awake(self) -> bool:
        return True

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

    def slept(self, rows: int) -> bool:
        return False

    def timed(self, *step: float) -> None:
        """It learns nothing; the cell hears of it."""

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
    shapes: dict[tuple[int, int], list[float]] = field(default_factory=dict)     # of steps with drafts: by queries and tokens
    clocks: list[float] = field(default_factory=list)    # of the SMs when it began and ended, MHz

    @property
    def each(self) -> float:
        return self.seconds / self.tokens


class Clock:
    """Of the first GPU's SMs."""

    def __init__(self) -> None:
        self._nvml = open_nvml()
        self._gpus = self._nvml.handles(visible()[:1]) if self._nvml is not None else []

    def now(self) -> list[float]:
        """In MHz; empty without a driver that says it."""
        found = [self._nvml.read(gpu).sm_mhz for gpu in self._gpus] if self._nvml is not None else []
        return [each for each in found if each is not None]


class Cell:
    """One batch of requests, run again and again."""

    def __init__(self, core: EngineCore, batch: int, context: int, output: int, times: Pace, clock: Clock) -> None:
        self._times, self._clock = times, clock
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
        timed, drafter.timed = drafter.timed, self._noted(drafter.timed)
        block.clocks = self._clock.now()
        began = time.perf_counter()
        while core.has_work and (to_the_end or block.tokens < count * self._output):
            self._take(block)
            block.steps += 1
        block.seconds = time.perf_counter() - began
        block.clocks += self._clock.now()
        core.executor.collect, drafter.timed = self._collect, timed              # type: ignore[method-assign]
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

    def _noted(self, timed: Callable[..., None]) -> Callable[..., None]:
        """What a drafter hears of each step, the block hears, too."""
        times, shapes = self._times.ahead, self._block.shapes

        def heard(rows: int, tokens: int, queries: int, keys: int, seconds: float, *more: Any) -> None:
            if queries > 1:
                bound = times.bound(rows, queries)
                sizes = times.table(bound, keys).sizes
                size = int(sizes[min(int(sizes.searchsorted(tokens)), len(sizes) - 1)])
                shapes.setdefault((bound, size), []).append(seconds)
            timed(rows, tokens, queries, keys, seconds, *more)

        return heard

    def measure(self, alpha: float, widths: list[str], pairs: int, end: float) -> list[dict[str, Any]]:
        """A row for each width. With fewer rounds, but one at least, if there is no time for all before `end`."""
        tape = Tape(self._truth, alpha, self._vocab)
        library = native.if_built()                              # as the engine's own controller has it
        drafters: dict[str, Any] = {width: Fixed(tape, int(width)) for width in widths if width != AUTO}
        if AUTO in widths:
            drafters[AUTO] = Controller([tape], self._times, MOST_DRAFTS, native=library)
        for width, drafter in drafters.items():                  # graphs are captured, and the controller learns
            for _ in range(3 if width == AUTO else 1):
                tape.renew()
                self.run(drafter)
        before = {width: _counts(drafter) for width, drafter in drafters.items()}
        off: list[Block] = []
        found: dict[str, list[Block]] = {width: [] for width in widths}
        began = time.monotonic()
        while len(off) < pairs and not (len(off) >= ENOUGH and _clear(off, found)):
            if off and time.monotonic() + (time.monotonic() - began) / len(off) > end:
                break
            tape.renew()
            turns: list[str | None] = [None, *widths]
            for width in turns if len(off) % 2 == 0 else turns[::-1]:
                blocks, drafter = (off, NoDrafter()) if width is None else (found[width], drafters[width])
                blocks.append(self.run(drafter))
        return [self._row(off, found[width], _counts(drafters[width]) - before[width]) | {"width": width} for width in widths]

    def _row(self, off: list[Block], on: list[Block], counts: np.ndarray) -> dict[str, Any]:
        proposed, accepted = counts.tolist()
        ratios = _ratios(off, on)
        steps = sum(block.steps for block in on)
        return {
            "speedup": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios), "pairs": len(ratios),
            "off_tok_s": 1 / statistics.median(block.each for block in off),
            "on_tok_s": 1 / statistics.median(block.each for block in on),
            "acceptance": accepted / max(1, proposed), "agreement": min(self._agreement(block) for block in on),
            "drafts_per_step": proposed / steps, "off": _of_a_step(off), "on": _of_a_step(on), "shapes": _shapes(on),
            "ratios": ratios,
        }

    def _agreement(self, block: Block) -> float:
        both = [zip(said, self._truth[key], strict=False) for key, said in block.answers.items()]
        return float(np.mean([one == other for pairs in both for one, other in pairs]))


def _ratios(off: list[Block], on: list[Block]) -> list[float]:
    return [one.each / other.each for one, other in zip(off, on, strict=True)]


def _clear(off: list[Block], found: dict[str, list[Block]]) -> bool:
    """Did the controller, if it is among them, hold both bars in every round? The best width is that of all rounds."""
    ratios = {width: _ratios(off, blocks) for width, blocks in found.items()}
    auto = ratios.pop(AUTO, None)
    if auto is None:
        return True
    best = max(ratios.values(), key=statistics.median, default=[])
    return min(auto) >= BAR_OF_OFF and all(own >= BAR_OF_BEST * other for own, other in zip(auto, best, strict=False))


def _of_a_step(blocks: list[Block]) -> dict[str, Any]:
    steps = sum(block.steps for block in blocks)
    seconds, waited, device = (sum(getattr(block, name) for block in blocks) for name in ("seconds", "waited", "device"))
    tokens, clocks = sum(block.tokens for block in blocks), [block.clocks for block in blocks if len(block.clocks) == 2]
    return {
        "step_ms": 1e3 * seconds / steps, "host_ms": 1e3 * (seconds - waited) / steps, "device_ms": 1e3 * device / steps,
        "tokens": tokens / steps, "sm_mhz": [statistics.mean(each) for each in zip(*clocks, strict=True)],
    }


def _shapes(blocks: list[Block]) -> list[dict[str, float]]:
    """Of steps with drafts; those that ran most often first."""
    every: dict[tuple[int, int], list[float]] = {}
    for block in blocks:
        for shape, seconds in block.shapes.items():
            every.setdefault(shape, []).extend(seconds)
    return [
        {"queries": queries, "tokens": tokens, "steps": len(seconds), "ms": 1e3 * statistics.median(seconds)}
        for (queries, tokens), seconds in sorted(every.items(), key=lambda each: -len(each[1]))
    ]


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
        model=model, max_model_len=longest, max_num_seqs=most_rows, speculative_config="ngram",
        kv_cache_dtype=args.kv_cache_dtype, **options,
    ))
    if args.shape and core.config.device != "cpu":               # there numbers are wide enough
        assert isinstance(core.executor, LocalExecutor)
        embed = core.executor.runner.model.embed
        assert embed is not None and embed.weight is not None
        embed.weight.data.mul_(LOUD)
    began = time.monotonic()
    while time.monotonic() - began < min(args.prepare, args.seconds / 4) and core.prepare():     # as an idle server does
        pass
    return core


@dataclass(frozen=True, slots=True)
class Key:
    """Which cell."""

    batch: int
    context: int
    alpha: float
    width: str

    @property
    def possible(self) -> bool:
        """May every row have so many drafts?"""
        if self.width == AUTO:
            return True
        return int(self.width) < most_queries(self.batch) and self.batch * (1 + int(self.width)) <= MOST_VERIFIED


def important(batches: tuple[int, ...], alphas: tuple[float, ...], contexts: tuple[int, ...]) -> list[Key]:
    """The cells of the controller's bar, those that say most first: short contexts, then chances as listed, then batches in
    ORDER. A fixed width stands beside its `auto`: only together they say something."""
    ordered = [batch for batch in ORDER if batch in batches] + [batch for batch in batches if batch not in ORDER]
    return [
        Key(batch, context, alpha, str(width))
        for context in contexts for alpha in alphas for batch in ordered
        for width in (AUTO, *BEST.get(alpha, {}).get(batch, () if alpha == 0 else (1, 3)))
    ]


def wanted(args: argparse.Namespace) -> list[Key]:
    contexts, alphas = tuple(args.context or CONTEXTS), tuple(args.alpha if args.alpha is not None else ALPHAS)
    batches = tuple(args.batch or BATCHES)
    if args.cells:
        pairs = [(int(batch), width) for batch, width in (each.split(":") for each in args.cells)]
        keys = [Key(batch, context, alpha, width) for context in contexts for batch, width in pairs for alpha in alphas]
    elif args.width is None:
        keys = important(batches, alphas, contexts)
    else:
        keys = [
            Key(batch, context, alpha, str(width))
            for context in contexts for batch in batches for width in (*args.width, AUTO) for alpha in alphas
        ]
    return [key for key in dict.fromkeys(keys) if key.possible]


def key_of(row: dict[str, Any]) -> Key:
    return Key(row["batch"], row["context"], row["alpha"], row["width"])


def already(path: Path | None, workload: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of an unfinished record. One of another workload or of other source code is refused: its cells mean something
    else."""
    if path is None or not path.exists():
        return []
    before = json.loads(path.read_text())
    same_for_all = ("model", "kv_cache_dtype", "output")
    same = {name: before["workload"].get(name) for name in same_for_all} == {name: workload[name] for name in same_for_all}
    if before.get("benchmark") != "speculation" or not same or before.get("source") != source_hash():
        raise SystemExit(f"{path} is a record of another workload or of other source code; name another file, or remove it")
    return list(before["figures"]["cells"])


def controller(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every cell with `auto`: its speed against the best fixed width beside it, and against off; and do both bars hold?"""
    found = []
    for row in cells:
        if row["width"] == AUTO:
            key = key_of(row)
            beside = [each["speedup"] for each in cells if each["width"] != AUTO
                      and (each["batch"], each["context"], each["alpha"]) == (key.batch, key.context, key.alpha)]
            best = max(beside, default=None)
            of_best = row["speedup"] / max(best, 1.0) if best is not None else None
            holds = row["speedup"] >= BAR_OF_OFF and (of_best is None or of_best >= BAR_OF_BEST)
            found.append({"batch": key.batch, "context": key.context, "alpha": key.alpha, "of_off": row["speedup"],
                          "of_best": of_best, "holds": holds})
    return found


class Study:
    """Measures cells one after the other, and writes the record after each."""

    def __init__(self, args: argparse.Namespace, core: EngineCore, found: list[dict[str, Any]], end: float) -> None:
        self._args, self._core, self._end = args, core, end
        self._times, self._gpu = step_times(core.config), gpu_facts() or None
        self._cells: dict[tuple[int, int], Cell] = {}
        self.found = found
        self._clock = Clock()
        self._longest = 0.0                              # seconds of the longest measurement …
        self._prompts = 0.0                              # … and of a new cell's prompts, for each of their tokens

    def fits(self, key: Key) -> bool:
        """Does the KV cache hold it?"""
        config = self._core.config
        longest = key.context + math.ceil((SPARE - 0.5) * self._args.output) + 2 * MOST_DRAFTS
        return key.batch * longest <= config.num_blocks * config.groups[0].block_size

    def measure(self, keys: list[Key]) -> bool:
        """Widths of one batch, context and chance. False: there is no time left for them."""
        first = keys[0]
        at = (first.batch, first.context)
        new = 0 if at in self._cells else first.batch * first.context
        if time.monotonic() + self._longest + self._prompts * new > self._end:
            return False
        began = time.monotonic()
        if at not in self._cells:
            self._cells[at] = Cell(self._core, *at, self._args.output, self._times, self._clock)
        cell = self._cells[at]
        if new:
            self._prompts = max(self._prompts, (time.monotonic() - began) / new)
        began = time.monotonic()
        for row in cell.measure(first.alpha, [key.width for key in keys], self._args.pairs, self._end):
            self.found.append({"batch": first.batch, "context": first.context, "alpha": first.alpha} | row)
            print(json.dumps(self.found[-1]), flush=True)
        self._longest = max(self._longest, time.monotonic() - began)
        self.write([])
        return True

    def write(self, too_large: list[Key]) -> None:
        """`too_large`: cells that the KV cache does not hold."""
        if self._args.out:
            figures = {"cells": self.found, "controller": controller(self.found), "too_large": [asdict(key) for key in too_large]}
            what = workload(self._args, self._core.config.dtype)
            write(record("speculation", what, figures, gpu=self._gpu), Path(self._args.out))


def table(cells: list[dict[str, Any]]) -> str:
    judged = {(each["batch"], each["context"], each["alpha"]): each for each in controller(cells)}
    lines = ["batch context alpha width   speed  lowest highest  step, ms (off)  host, ms  equal  of the best fixed width"]
    for row in sorted(cells, key=lambda row: (row["context"], -row["alpha"], row["batch"], row["width"] != AUTO)):
        own = judged[row["batch"], row["context"], row["alpha"]] if row["width"] == AUTO else {}
        best = f"{100 * own['of_best']:.1f} %" if own.get("of_best") else ""
        missed = " missed" if own and not own["holds"] else ""
        lines.append(
            f"{row['batch']:>5} {row['context']:>7} {row['alpha']:>5} {row['width']:>5} {row['speedup']:>6.3f}x "
            f"{row['lowest']:>7.3f} {row['highest']:>7.3f} {row['on']['step_ms']:>7.2f} ({row['off']['step_ms']:>5.2f}) "
            f"{row['on']['host_ms']:>9.2f} "
            f"{row['agreement']:>6.3f}  {best}{missed}"
        )
    return "\n".join(lines)


def workload(args: argparse.Namespace, dtype: str = "") -> dict[str, Any]:
    given = {name: getattr(args, name) for name in ("kv_cache_dtype", "output", "pairs")}
    return {"command": command(args.out), "model": args.shape or args.model, "dtype": dtype} | given


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", help=f"default: {BATCHES}")
    parser.add_argument("--alpha", type=float, nargs="+", help=f"default: {ALPHAS}")
    parser.add_argument("--context", type=int, nargs="+", help=f"default: {CONTEXTS}")
    parser.add_argument("--width", type=int, nargs="+", help="default: those that may be best")
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=10, help="rounds")
    parser.add_argument("--cells", nargs="+", help="BATCH:WIDTH or BATCH:auto, in the place of all batches and widths")
    parser.add_argument("--seconds", type=float, default=math.inf, help="it ends within that long")
    parser.add_argument("--kv-cache-dtype", default="auto", help="fp8 holds 128 rows with 8k tokens of an 8B model on one H200")
    parser.add_argument("--prepare", type=float, default=60, help="seconds in which graphs may be captured before the first cell")
    parser.add_argument("--out", help="the record; it is written after each cell, and continued if it is there")
    args = parser.parse_args()
    if (args.model is None) == (args.shape is None):
        parser.error("one of --model and --shape")
    end = time.monotonic() + args.seconds
    found = already(Path(args.out) if args.out else None, workload(args))
    done = {key_of(row) for row in found}
    keys = [key for key in wanted(args) if key not in done]
    if not keys:
        print(f"all cells are in {args.out}")
        return
    args.context = sorted({key.context for key in keys})
    core = start(args, max(key.batch for key in keys))
    study = Study(args, core, found, end)
    left = 0
    together: dict[tuple[int, int, float], list[Key]] = {}
    for key in filter(study.fits, keys):
        together.setdefault((key.batch, key.context, key.alpha), []).append(key)
    for group in together.values():
        left += 0 if study.measure(group) else len(group)
    study.write([key for key in keys if not study.fits(key)])
    core.close()
    print(table(study.found))
    print(f"{len(study.found)} cells; {left} had no time left", file=sys.stderr)


if __name__ == "__main__":
    main()
