"""The host's processor time of the requests of real_text.py, without a model: what an engine does for each step of real text.

    python benchmarks/studies/speculation/host_of_text.py --requests 32 --cases "edit, prediction" "JSON schema"
    python benchmarks/studies/speculation/host_of_text.py --other ../before --other-commit 65d17a21 --out host-of-text.json
    python benchmarks/studies/speculation/host_of_text.py --off --cases "JSON schema" --pairs 10 --out host-of-text-off.json

Front end, scheduler, proposers, controller, grammars, packing and the taking in of results are the real ones. Only the forward
pass is a stand-in that knows the answers: an edit is the code with the other name, JSON is made up to fit the schema. As beside a
GPU, one step is in flight while the next is planned, and only the "device" knows how many drafts were accepted. A step takes the
device `--step-ms` and `--token-ms` for each of its tokens: assumed, not measured, and by default so long that the host's own time
does not count.

Parts are those of block_parts.py, in processor time of the engine's thread: masks that other threads fill are not in it.
`device` is what a GPU would do: the stand-in, and sampling, launches included, which a CPU computes here. `host` is all the
rest, but for `begin`: the tokenising of prompts. `sampled`: with sampling. With `--other`, another checkout of this repository
does the same in turn, block by block: on a machine with other work only such pairs can be compared. `ratio`: the median of the
ratios of neighbours, in host time a token; the blocks in the record are those of that pair.

With `--off` the other block of a pair asks the same without drafts, in the same process, beside a device as fast as that of a
small model. Time is played: the processor time of the engine's thread, what the device's work costs here left out, and what it
waits for the device. So other work on the machine does not count, and the controller sees a host that is the limit. `time`:
played time a token, on against off; `first_token`: the same to the first tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import block_parts
import numpy as np
import real_text
import torch

from ridgeline import LLM
from ridgeline.bench.lab.record import record, write
from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import Communicator
from ridgeline.draft_options import draft_options
from ridgeline.engine.client.processor import Processor
from ridgeline.engine.core import core as engine_core
from ridgeline.engine.core import grammars
from ridgeline.engine.core.core import EngineCore, make_grammars
from ridgeline.grammar import masks
from ridgeline.layers.batch import Batch
from ridgeline.messages import StepPlan, StepResult
from ridgeline.process import embedded
from ridgeline.resolve import DeviceFacts, ResolvedConfig, resolve
from ridgeline.runner.device_rows import DeviceRows, leading_decodes
from ridgeline.runner.forward import Computed, best_tokens
from ridgeline.runner.runner import Runner
from ridgeline.runner.sampler import Sampler
from ridgeline.runner.to_host import greedy_bytes
from ridgeline.sizes.graph_shapes import MOST_VERIFIED, GraphShapes, Shape

HERE = Path(__file__).resolve().parents[3]
CASES = ("edit, prediction", "edit, suffix", "JSON schema", "copied code", "free text")
CONTEXT = 2048
SLOW = 130.0, 0.3                    # milliseconds of a step, and of each of its tokens: assumed …
FAST = 1.0, 0.004                    # … and those of a small model, with --off
SAID = ("lamp", "round table", "radio", "shirt of linen", "green chair", "shelf")
THREADS = 12                         # that fill masks: as many as beside a GPU, where the engine's own does not
NOT_HOST = ("forward", "wait", "sample")
PASSED = ("requests", "rounds", "step_ms", "token_ms")      # options of the processes that work


def answer_to(ask: real_text.Ask, earlier: bool) -> str:
    """What the model would say."""
    if ask.params.structured_outputs is not None:
        rng = random.Random(ask.content)
        return json.dumps(made_up(real_text.SCHEMA, rng), separators=(",", ":"))
    if "```python\n" not in ask.content:                 # a story
        rng = random.Random(ask.content)
        return " ".join(rng.choice(SAID) for _ in range(200))
    code = ask.content.split("```python\n")[1].split("\n```")[0]
    if ask.plain:                                        # a copy
        return code + "\n```\n"
    name = ask.content.split("`")[1]
    lines = code.splitlines()
    changed = "\n".join([*lines[:-1], "# checked", lines[-1]]) if earlier else code.replace(name, real_text.NEW_NAME)
    return f"```python\n{changed}\n```"


def made_up(schema: dict[str, Any], rng: random.Random) -> Any:
    """A value that fits."""
    kind = schema.get("type")
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if kind == "object":
        return {name: made_up(each, rng) for name, each in schema["properties"].items()}
    if kind == "array":
        return [made_up(schema["items"], rng) for _ in range(schema.get("minItems", 2))]
    if kind == "integer":
        return rng.randrange(schema.get("minimum", 0), min(1000, schema.get("maximum", 1000)))
    return rng.random() < 0.5 if kind == "boolean" else rng.randrange(1, 999) / 10 if kind == "number" else rng.choice(SAID)


class PlayedTime:
    """The processor time of this thread, and what it waits for the device. In play, work of the device costs nothing here."""

    def __init__(self, step_ms: float, token_ms: float) -> None:
        self._fixed, self._each = step_ms / 1e3, token_ms / 1e3
        self._shift = 0.0                                # played time less processor time
        self._free = 0.0                                 # when the device has done all that was launched

    def monotonic(self) -> float:
        return time.thread_time() + self._shift

    def seconds(self, tokens: int) -> float:
        return self._fixed + self._each * tokens

    def launch(self, tokens: int) -> float:
        """When a step that is launched now has run."""
        self._free = max(self._free, self.monotonic()) + self.seconds(tokens)
        return self._free

    def wait(self, until: float) -> None:
        self._shift += max(0.0, until - self.monotonic())

    def of_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                self._shift -= time.thread_time() - began

        return call


class Knows:
    """A forward pass that computes nothing: it says the answers."""

    replays, stood_in, passing = 0, False, False

    def __init__(self, rows: DeviceRows, max_step_tokens: int, vocab: int) -> None:
        self._rows, self._vocab = rows, vocab
        self.texts = torch.zeros((rows.max_rows + 1, CONTEXT + 64), dtype=torch.int64)   # by row, prompts included
        self._shapes = GraphShapes(rows.max_rows, max_step_tokens, MOST_VERIFIED)
        self._room = torch.zeros(greedy_bytes(rows.max_rows + 1), dtype=torch.uint8)
        self._logits = torch.zeros((max(MOST_VERIFIED, rows.max_rows), vocab))

    def shape(self, plan: StepPlan, greedy: bool) -> Shape | None:
        self.replays += 1
        decodes = leading_decodes(plan)
        if plan.width is None:
            return self._shapes.fit(decodes, len(plan.rows) - decodes, plan.total_tokens - decodes)
        if decodes < len(plan.rows):
            return None
        return self._shapes.fit_drafts(decodes, plan.total_tokens, 1 + int(plan.width.max()))

    def run(self, batch: Batch, greedy: bool) -> Computed:
        said = self.texts[batch.sample_rows, batch.positions[batch.logits_index] + 1]
        if greedy:
            def choose(tokens: torch.Tensor, failed: torch.Tensor, sample_rows: torch.Tensor | None) -> None:
                tokens.copy_(said)
                failed.zero_()
                if sample_rows is not None:
                    self._rows.last_token.index_copy_(0, sample_rows, tokens)

            return Computed(None, None, best_tokens(choose, batch, self._room, self._rows.last_token, self._rows.late.surplus))
        logits = self._logits[: len(said)]
        logits.zero_().scatter_(1, said[:, None], 1.0)
        return Computed(None, logits)


class Stand:
    """An executor: a real runner around that forward pass."""

    def __init__(self, config: ResolvedConfig, answers: dict[bytes, torch.Tensor], played: PlayedTime) -> None:
        self._answers, self._vocab, self._played = answers, config.model.vocab_size, played
        self._plans: deque[StepPlan] = deque()
        self._ends: deque[float] = deque()               # of the steps that were sampled, in played time
        self._rows = rows = DeviceRows(
            config.groups, config.max_num_seqs, config.max_model_len, config.max_num_batched_tokens, config.depth,
            torch.device("cpu"), config.model.num_heads, drafts=True,
        )
        self._forward = Knows(rows, config.max_num_batched_tokens, self._vocab)
        self._forward.run = played.of_device(self._forward.run)              # type: ignore[method-assign]
        sampler = Sampler(config.max_num_seqs, self._vocab, set(), torch.device("cpu"), torch.float32, MOST_VERIFIED)
        model: Any = SimpleNamespace(expert_reads=None, stage=SimpleNamespace(last=True, count=1), weight_reads=None)
        nothing: Any = SimpleNamespace(run=lambda ops: None)
        self.runner = Runner(model, self._forward, rows, sampler, nothing, Communicator())       # type: ignore[arg-type]
        self.runner.knows_at_once = False
        self._sample = played.of_device(self.runner.sample)

    def submit(self, plan: StepPlan) -> None:
        for added in plan.added:
            prompt = added.token_ids[: added.num_prompt].astype(np.int32)
            self._forward.texts[added.row] = self._answers[prompt.tobytes()]
        self._plans.append(plan)
        self.runner.submit(plan)

    def sample(self, masks: np.ndarray | None = None) -> None:
        """The device begins here, and not with the forward pass: so it waits for masks, but not half a step at a time."""
        self._sample(masks)
        self._ends.append(self._played.launch(self._plans[-1].total_tokens))

    def collect(self) -> StepResult:
        result, plan = self.runner.collect(), self._plans.popleft()
        self._played.wait(self._ends.popleft())
        result.device_seconds, result.typical = self._played.seconds(plan.total_tokens), True
        return result

    def prepare(self) -> bool:
        return False

    def start_over(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to close."""


class Study(real_text.Study):
    """An engine with the stand-in, whose drafter is another one for each case."""

    def __init__(self, requests: int, played: PlayedTime) -> None:
        asked = {"method": ["grammar", "prediction", "ngram", "suffix"]}
        options = EngineConfig.of(
            model=str(embedded.require()), max_model_len=CONTEXT, max_num_seqs=max(32, requests), step_time_ms=0.0,
            speculative_config=json.dumps(asked),
        ).for_one_engine()
        config = replace(resolve(options, DeviceFacts("cuda", 10**12, ("bfloat16",))), depth=1)
        self.llm = llm = LLM.__new__(LLM)
        llm._processor = Processor.load(options.model, config.model_path, options.execution.speculative_config)
        self._known: dict[bytes, torch.Tensor] = {}         # by prompt, which it begins with
        # Masks stay here: there is no pinned memory without a GPU.
        llm.core = EngineCore(config, Stand(config, self._known, played), make_grammars(replace(config, device="cpu")))
        self._adaptive = True
        self._whole: Any = llm.core.scheduler.drafter
        self._asked, self._end = draft_options(json.dumps(asked)), config.model.eos_token_ids[0]
        self._step, self._firsts, self._began = llm.core.step, {}, 0.0
        llm.core.step = self._timed_step                 # type: ignore[method-assign]
        masks.num_threads = grammars.num_threads = lambda: THREADS
        engine_core.time = played                        # type: ignore[attr-defined]
        real_text.CLOCK = played.monotonic

    def teach(self, asks: list[real_text.Ask], earlier: bool) -> None:
        """The stand-in will know these answers."""
        processor, tokenizer = self.llm._processor, self.llm.get_tokenizer()
        for ask in asks:
            content = ask.earlier if earlier else ask.content
            message = [{"role": "user", "content": content}]
            prompt = processor.prompt_tokens(content)[1] if ask.plain else processor.chat_tokens(message)
            said = tokenizer.encode(answer_to(ask, earlier), add_special_tokens=False)
            text = torch.full((CONTEXT + 64,), self._end)
            text[: len(prompt) + len(said)] = torch.tensor([*prompt, *said])
            self._known[np.array(prompt, np.int32).tobytes()] = text


def blocks(case_name: str, args: argparse.Namespace) -> Any:
    """Figures of one block after the other; with `--off`, of each twice: with drafts, and without."""
    requests, rounds = args.requests, args.rounds
    study = Study(requests, PlayedTime(args.step_ms, args.token_ms))
    listed = {each.name: each for each in real_text.cases(160, False)}
    case = listed[case_name]
    drafter, suffix = study._drafter(listed["free text"].proposers if args.auto else case.proposers)
    core, number = study.llm.core, 0
    while True:
        asks = [case.ask(number * requests * rounds + place) for place in range(requests * rounds)]
        core.scheduler.drafter, drafter.active = drafter, True
        if suffix is not None and asks[0].earlier:
            suffix.learning, drafter.active = True, False
            study.teach(asks, True)
            study._answers(asks, earlier=True)
            suffix.learning, drafter.active = False, True
        study.teach(asks, False)
        kinds = {True: "this", False: "off"} if args.off else {True: "this"}
        found = {}
        for on in sorted(kinds, reverse=bool(number % 2)):
            with block_parts.watched(core, time.thread_time) as steps:
                block = study._block(asks, drafter, on)
            found[kinds[on]] = figures(steps) | {"played_us_a_token": 1e6 * block.each, "first_ms": 1e3 * block.first}
        yield found
        number += 1


def figures(steps: list[block_parts.Step]) -> dict[str, Any]:
    found = block_parts.summed(steps)
    own = [step for step in steps if step.kind != "begin"]
    host = sum(spent for step in own for part, spent in step.parts.items() if part not in NOT_HOST)
    sampled = host + sum(step.parts["sample"] for step in own)
    parts = {part: 1e3 * sum(step.parts[part] for step in own) / (len(own) - 1) for part in block_parts.PARTS}
    return found | {"host_us_a_token": 1e6 * host / found["tokens"], "host_ms_a_step": 1e3 * host / (len(own) - 1),
                    "sampled_us_a_token": 1e6 * sampled / found["tokens"],
                    "all_parts_ms": {part: spent for part, spent in parts.items() if spent}}


def work(case: str, args: argparse.Namespace) -> None:
    """A block for each line that comes, and prints its figures."""
    made = blocks(case, args)
    for _ in sys.stdin:
        print(json.dumps(next(made)), flush=True)


def start(code: Path, case: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    words = ["--work", case, *(f"--{name.replace('_', '-')}={getattr(args, name)}" for name in PASSED)]
    words += [f"--{name}" for name in ("off", "auto") if getattr(args, name)]
    environment = {**os.environ, "PYTHONPATH": str(code)}
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), *words], cwd=code, env=environment, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )


def ask(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("block\n")
    process.stdin.flush()
    return dict(json.loads(process.stdout.readline()))


def compare(case: str, args: argparse.Namespace) -> dict[str, Any]:
    codes = {"this": HERE} | ({"other": args.other.resolve()} if args.other else {})
    running = {name: start(code, case, args) for name, code in codes.items()}
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for number in range(-1, args.pairs):                 # the first warms up
        for name in sorted(running, reverse=bool(number % 2)):
            for kind, block in ask(running[name]).items():
                if number >= 0:
                    found[kind if name == "this" else name].append(block)
    for process in running.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    against = next((name for name in found if name != "this"), None)
    if against is None:
        return {"this": sorted(found["this"], key=lambda block: block["host_us_a_token"])[args.pairs // 2]}
    # Blocks are of different requests: only the two of a pair did the same.
    pairs = sorted(zip(found["this"], found[against], strict=True), key=lambda pair: ratio(*pair, "host_us_a_token"))
    this, other = pairs[len(pairs) // 2]
    figures = {"ratio": "host_us_a_token", "ratio_with_sampling": "sampled_us_a_token"}
    if args.off:
        figures |= {"time": "played_us_a_token", "first_token": "first_ms"}
    return {"this": this, against: other, "ratios": [ratio(*pair, "host_us_a_token") for pair in pairs]} | {
        name: statistics.median(ratio(*pair, figure) for pair in pairs) for name, figure in figures.items()
    }


def ratio(this: dict[str, Any], other: dict[str, Any], figure: str) -> float:
    return float(this[figure] / other[figure])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES[:3]), choices=CASES)
    parser.add_argument("--auto", action="store_true", help="every case has all proposers")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--step-ms", type=float, help=f"of the device; default: {SLOW[0]}, with --off {FAST[0]}")
    parser.add_argument("--token-ms", type=float, help=f"and of each token; default: {SLOW[1]}, with --off {FAST[1]}")
    beside = parser.add_mutually_exclusive_group()
    beside.add_argument("--off", action="store_true", help="against the same without drafts")
    beside.add_argument("--other", type=Path, help="another checkout, with its native library")
    parser.add_argument("--other-commit", default="")
    parser.add_argument("--out", help="the record")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, assumed in zip(("step_ms", "token_ms"), FAST if args.off else SLOW, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, assumed)
    if args.work:
        work(args.work, args)
        return
    found = {}
    for case in args.cases:
        found[case] = compare(case, args)
        for name in ("off", "other", "this"):
            if name in found[case]:
                block = found[case][name]
                print(block_parts.page(f"{case}, {name}: {block['host_us_a_token']:.1f} us a token", block), flush=True)
        print(case, {name: round(value, 3) for name, value in found[case].items() if isinstance(value, float)}, flush=True)
    if args.out:
        asked = ("cases", "auto", *PASSED, "pairs", "off", "other_commit")
        write(record("host-of-text", {name: getattr(args, name) for name in asked}, found), Path(args.out))


if __name__ == "__main__":
    main()
