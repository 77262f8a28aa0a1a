"""Where the time of a block of real_text.py goes: kinds of steps, the host's parts of each, and the idle time of the device.

    python benchmarks/studies/speculation/block_parts.py --out block_parts.json                # the embedded model
    python benchmarks/studies/speculation/block_parts.py --model DIR --requests 1 32 --pairs 1 --seconds 100 --out FILE \\
        --cases "edit, prediction" "edit, suffix" "JSON schema"

Options, requests and pairs of blocks are those of real_text.py. A block's time is cut at each result that arrives. What lies
between two results belongs to the kind of the step that the second one is of:

| kind | a step |
|---|---|
| prompts | all rows compute prompts |
| mixed | prompts beside rows that decode, no drafts |
| decode | all rows decode, no drafts |
| drafts | all rows decode, some with drafts |
| drafts+prompts | rows with drafts beside prompts |

With overlap the host plans the next step meanwhile, so a part is not work for that very step. `front end` before the first step
of a block, tokenising, is the kind `begin`; what follows the last result is `end`.

Parts are exclusive: what one part calls counts only there, so they sum to the time of the block.

| part | what |
|---|---|
| plan | the scheduler plans, drafts aside |
| search | proposers look for drafts |
| weigh | the controller chooses among drafts |
| pack | rows and the batch: changes of the plan, positions, slots, shares of attention, the copy to the device |
| forward | the launch of the forward pass |
| submit | the rest of Runner.submit |
| sample | the launch of sampling or verification, masks to the device |
| wait | for the device |
| collect | the rest of Runner.collect |
| take in | Scheduler.update, what the controller learns aside |
| learn | the controller counts what came |
| copies | matchers are copied along drafts |
| follow | matchers accept tokens |
| masks | waiting for masks, and filling those that are left |
| garbage | Python's collector |
| core | the rest of EngineCore.step |
| front end | outside of a step: text, and what the benchmark does |

`busy`: what the device computes, between events before and after the launch of the forward pass, and of sampling. `idle` is the
rest. Copies of a step's integers count as idle; a step that is launched kernel by kernel counts as busy throughout. On a CPU the
launch is the work itself, and nothing is idle while it runs.

`launch`: what the host took to launch the forward pass of the steps of this kind themselves. The part `forward` is that of the
steps that were launched in their intervals: with overlap a step with a prompt that is captured counts there for the step before.

The stopwatches cost the host about 1 us for each part, and the events of a GPU some 10 us a step.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import real_text
import torch

from ridgeline.engine.core.core import EngineCore
from ridgeline.messages import StepPlan, StepResult
from ridgeline.runner.to_host import Landing

Clock = Callable[[], float]
PARTS = ("plan", "search", "weigh", "pack", "forward", "submit", "sample", "wait", "collect", "take in", "learn", "copies",
         "follow", "masks", "garbage", "core", "front end")
KINDS = ("begin", "prompts", "mixed", "decode", "drafts", "drafts+prompts", "end")
_COUNTED = ("rows", "tokens", "drafts", "accepted", "said")
_WARM = 3                            # blocks before the first pair


def kind_of(plan: StepPlan) -> str:
    own = plan.num_tokens if plan.width is None else plan.num_tokens - plan.width
    drafted, prompts = plan.width is not None and bool(plan.width.any()), int((own > 1).sum())
    if drafted:
        return "drafts+prompts" if prompts else "drafts"
    return "decode" if not prompts else "prompts" if prompts == len(own) else "mixed"


@dataclass(slots=True)
class Step:
    """One step, or what comes before the first or after the last."""

    kind: str
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    rows: int = 0
    tokens: int = 0                  # computed
    drafts: int = 0
    accepted: int = 0
    said: int = 0                    # tokens of answers
    replayed: bool = False           # as a CUDA graph
    typical: bool = True             # its own graph, and none was captured meanwhile
    launch: float = 0.0              # seconds of the host for its own forward pass, in which interval ever
    marks: list[Any] = field(default_factory=list)       # begin and end of its work on the device, in turn

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def busy(self) -> float:
        """Of the device; on a GPU it must have ended."""
        pairs = zip(self.marks[::2], self.marks[1::2], strict=True)
        return sum(begin.elapsed_time(end) / 1e3 if hasattr(begin, "elapsed_time") else end - begin for begin, end in pairs)


class Stopwatch:
    """Time by part: only the innermost part that is under way counts."""

    def __init__(self, on_gpu: bool, clock: Clock | None = None) -> None:
        self.steps: list[Step] = []
        self._on_gpu = on_gpu
        self._clock = clock or time.perf_counter
        self._flights: list[Step] = []                   # launched, without a result yet
        self._open: dict[str, float] = defaultdict(float)        # parts since the last result
        self._stack, self._since = ["front end"], self._clock()

    def _turn(self) -> None:
        now = self._clock()
        self._open[self._stack[-1]] += now - self._since
        self._since = now

    def enter(self, part: str) -> None:
        self._turn()
        self._stack.append(part)

    def leave(self) -> None:
        self._turn()
        self._stack.pop()

    def close(self, step: Step) -> None:
        """All that was spent since the last step was closed is this one's."""
        self._turn()
        step.parts, self._open = self._open, defaultdict(float)
        self.steps.append(step)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.enter(part)
            try:
                return function(*given, **named)
            finally:
                self.leave()

        return call

    def marked(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """timed(), of work that the newest step has launched on the device."""
        whole = self.timed(part, function)

        def call(*given: Any, **named: Any) -> Any:
            self._mark()
            began = self._clock()
            found = whole(*given, **named)
            if part == "forward":
                self._flights[-1].launch += self._clock() - began
            self._mark()
            return found

        return call

    def _mark(self) -> None:
        marks = self._flights[-1].marks
        if not self._on_gpu:
            marks.append(self._clock())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)

    def submitted(self, function: Callable[[StepPlan], None]) -> Callable[[StepPlan], None]:
        whole = self.timed("submit", function)

        def call(plan: StepPlan) -> None:
            drafts = 0 if plan.width is None else int(plan.width.sum())
            if not self.steps:
                self.close(Step("begin"))
            self._flights.append(Step(kind_of(plan), rows=len(plan.rows), tokens=plan.total_tokens, drafts=drafts))
            whole(plan)

        return call

    def collected(self, function: Callable[[], StepResult]) -> Callable[[], StepResult]:
        whole = self.timed("collect", function)

        def call() -> StepResult:
            result, step = whole(), self._flights.pop(0)
            step.said, step.replayed, step.typical = int(result.num_new.sum()), result.replayed, result.typical
            step.accepted = step.drafts - result.rejected
            self.close(step)
            return result

        return call

    def garbage(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self.enter("garbage")
        else:
            self.leave()


@contextlib.contextmanager
def watched(core: EngineCore, clock: Clock | None = None) -> Iterator[list[Step]]:
    """Every step inside the `with`, once it has ended."""
    runner: Any = core.executor.runner                                       # type: ignore[attr-defined]
    drafter: Any = core.scheduler.drafter
    on_gpu = runner.rows.device.type == "cuda"
    watch = Stopwatch(on_gpu, clock)
    parts: list[tuple[Any, str, str]] = [
        (core, "step", "core"), (core.scheduler, "schedule", "plan"), (core.scheduler, "update", "take in"),
        (core.scheduler, "constrained", "copies"), (drafter, "plan", "weigh"), (drafter, "observe", "learn"),
        (drafter, "timed", "learn"), *((runner.rows, name, "pack") for name in ("apply", "pack", "advance")),
        (Landing, "wait", "wait"), *((each, "propose_all", "search") for each in drafter.proposers),
    ]
    if core.grammars.has_masks:
        masks = core.grammars.masks
        parts += [(masks, "advance", "follow"), (masks, "fill", "masks"), (masks, "wait", "masks")]
    made = [(owner, name, watch.timed(part, getattr(owner, name))) for owner, name, part in parts]
    made += [
        (runner.forward, "run", watch.marked("forward", runner.forward.run)),
        (core.executor, "sample", watch.marked("sample", core.executor.sample)),
        (core.executor, "submit", watch.submitted(core.executor.submit)),
        (core.executor, "collect", watch.collected(core.executor.collect)),
    ]
    with contextlib.ExitStack() as undo:
        for owner, name, call in made:
            undo.callback(_put_back, owner, name, vars(owner).get(name))
            setattr(owner, name, call)
        gc.callbacks.append(watch.garbage)
        undo.callback(gc.callbacks.remove, watch.garbage)
        yield watch.steps
        watch.close(Step("end"))
        if on_gpu:
            torch.cuda.synchronize()


def _put_back(owner: Any, name: str, own: Any) -> None:
    """`own`: what the owner itself had under this name; None: its class has it."""
    if own is None:
        delattr(owner, name)
    else:
        setattr(owner, name, own)


def summed(steps: list[Step]) -> dict[str, Any]:
    """By kind of step: how many, and of one the mean rows, tokens, drafts, and milliseconds: all, the device's, each part's."""
    whole = sum(step.seconds for step in steps)
    found: dict[str, Any] = {"seconds": whole, "tokens": sum(step.said for step in steps)}
    for kind in KINDS:
        some = [step for step in steps if step.kind == kind]
        if not some:
            continue
        count = len(some)
        mean = {name: sum(getattr(step, name) for step in some) / count for name in _COUNTED}
        seconds, busy = sum(step.seconds for step in some), sum(step.busy for step in some)
        parts = {part: 1e3 * sum(step.parts[part] for step in some) / count for part in PARTS}
        found[kind] = {
            "steps": count, "share": seconds / whole, **mean, "ms": 1e3 * seconds / count, "busy_ms": 1e3 * busy / count,
            "idle_ms": 1e3 * (seconds - busy) / count, "launch_ms": 1e3 * sum(step.launch for step in some) / count,
            "graphs": sum(step.replayed for step in some) / count,
            "not_typical": sum(not step.typical for step in some) / count,
            "parts_ms": {part: spent for part, spent in parts.items() if spent},
        }
    found["busy"] = sum(step.busy for step in steps) / whole
    return found


def page(name: str, found: dict[str, Any]) -> str:
    lines = [f"{name}: {found['seconds'] * 1e3:.0f} ms, {found['tokens']} tokens, device busy {found['busy']:.0%}"]
    for kind in (kind for kind in KINDS if kind in found):
        each = found[kind]
        parts = ", ".join(f"{part} {spent:.2f}" for part, spent in each["parts_ms"].items() if spent >= 0.005)
        what = ", ".join(f"{each[name]:.1f} {name}" for name in _COUNTED)
        what += f", {each['graphs']:.0%} graphs, {each['not_typical']:.0%} not typical"
        lines.append(
            f" {kind:<14} {each['steps']:>4} × {each['ms']:.2f} ms = {each['share']:.0%} "
            f"(busy {each['busy_ms']:.2f}, launch {each['launch_ms']:.2f}): "
            + (what if each["rows"] else "") + f"\n   {parts}"
        )
    return "\n".join(lines)


class Watched(real_text.Study):
    """Looks into every block."""

    def _block(self, asks: list[real_text.Ask], drafter: Any, on: bool) -> real_text.Block:
        self.llm.core.scheduler.drafter = drafter
        with watched(self.llm.core) as steps:
            block = super()._block(asks, drafter, on)
        self._seen.append((on, steps))
        return block

    def measure(self, case: real_text.Case, requests: int) -> dict[str, Any] | None:
        self._seen: list[tuple[bool, list[Step]]] = []
        row = super().measure(case, requests)
        if row is None:
            return None
        blocks = {
            name: [summed(steps) for wanted, steps in self._seen[_WARM:] if wanted is on]
            for name, on in (("off", False), ("on", True))
        }
        for name, each in blocks.items():
            for number, found in enumerate(each):
                print(page(f"{case.name}, {requests} requests, {name}, block {number}", found), flush=True)
        return row | {"blocks": blocks}


if __name__ == "__main__":
    real_text.main(Watched, "speculation-block-parts")
