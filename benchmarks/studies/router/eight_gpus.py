"""What eight GPUs would do behind one front end: A SIMULATION with our scheduler, cache and choice, and step times of an H200.

    python benchmarks/studies/router/eight_gpus.py [CASE] > benchmarks/studies/router/eight_gpus.json    # minutes, no GPU

Each engine is an EngineCore with its real scheduler and KV blocks of Llama-3.1-8B in bf16 on an H200; instead of a model, a clock
of its own advances by the time of the step. The times are fitted to benchmarks/h200/offline-llama-3.1-8b.json (one GPU, commit
132851c): decode at 1 and 128 rows of 640 tokens and at 16 rows of 8k, prefill of 8k. Costs of the front end, of HTTP and of
several GPUs in one machine are not in it. `cached_of_one`: cached prompt tokens as a share of what one cache without an end has.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
import subprocess
import sys
from dataclasses import dataclass, field, replace

from ridgeline.bench.workload.plan_only import PlanOnly
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.replicas.policies import POLICIES, Choice
from ridgeline.engine.replicas.prefix_tree import chain_of, prompt_chain
from ridgeline.engine.replicas.replica_load import Habits, ReplicaLoad, Ticket, Usage
from ridgeline.engine.replicas.routed_prompt import TOKEN_BYTES, token_bytes, tokens_prompt
from ridgeline.messages import Request, StepPlan
from ridgeline.resolve import DeviceFacts, ResolvedConfig, resolve
from ridgeline.sampling_params import SamplingParams

FIXED, ROW, CONTEXT, PROMPT = 3.79e-3, 11.4e-6, 31e-9, 24.2e-6   # seconds: a step, and per row, token of context, prompt token
BLOCK = 16
ENGINES = 8
CASES = {
    "conversations": {"count": 480, "turns": 5, "rate": 60.0, "pause": 1.0, "system": 2000, "question": 1000, "answer": 100},
    "conversations, light load": {"count": 160, "turns": 5, "rate": 10.0, "pause": 3.0, "system": 2000, "question": 1000,
                                  "answer": 100},
    "shared documents": {"count": 2400, "turns": 1, "rate": 240.0, "pause": 0.0, "system": 8000, "question": 100, "answer": 60,
                         "documents": 80},
}


class Clocked(PlanOnly):
    """Knows how long the newest step takes."""

    seconds = 0.0

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        prompts = plan.num_tokens[plan.num_tokens > 1]
        rows, context = len(plan.rows) - len(prompts), sum(self._lengths.get(row, 0) for row in plan.rows.tolist())
        self.seconds = FIXED + ROW * rows + CONTEXT * context + PROMPT * int(prompts.sum()) if len(plan.rows) else 0.0


@dataclass
class Turn:
    ids: list[int]
    left: int                        # turns after it
    arrived: float
    rng: random.Random               # of its conversation: pauses and words are the same under every policy
    ticket: Ticket | None = None
    engine: int = 0
    first: float = 0.0
    ended: float = 0.0
    cached: int = 0
    ideal: int = 0
    said: list[int] = field(default_factory=list)


class Fleet:
    def __init__(self, policy: str, config: ResolvedConfig, case: dict[str, float], seed: int) -> None:
        habits = Habits()
        self.loads = [ReplicaLoad(habits) for _ in range(ENGINES)]
        self.choice = Choice(policy, self.loads)
        self.clocks = [Clocked() for _ in range(ENGINES)]
        self.cores = [EngineCore(config, clock) for clock in self.clocks]  # type: ignore[arg-type]
        self.busy = [False] * ENGINES
        self.open: dict[str, Turn] = {}
        self.done: list[Turn] = []
        self._seen: set[int] = set()                     # blocks that one cache without an end would have
        self._case, self._rng = case, random.Random(seed)
        self._events: list[tuple[float, int, Turn | int]] = []
        self._count = itertools.count()
        self._shared = [_tokens(self._rng, int(case["system"])) for _ in range(int(case.get("documents", 1)))]

    def run(self) -> list[Turn]:
        now = 0.0
        for _ in range(int(self._case["count"])):
            now += self._rng.expovariate(self._case["rate"])
            own = random.Random(self._rng.random())
            ids = [*self._rng.choice(self._shared), *_tokens(own, int(self._case["question"]))]
            self._at(now, Turn(ids, int(self._case["turns"]) - 1, now, own))
        while self._events:
            now, _, what = heapq.heappop(self._events)
            if isinstance(what, Turn):
                self._arrive(what, now)
            else:
                self._step(what, now)
        return self.done

    def _at(self, when: float, what: Turn | int) -> None:
        heapq.heappush(self._events, (when, next(self._count), what))

    def _arrive(self, turn: Turn, now: float) -> None:
        prompt, answer = tokens_prompt(turn.ids, "", int(self._case["answer"]), True), int(self._case["answer"])
        blocks = chain_of(prompt.text, 0, BLOCK * TOKEN_BYTES)
        known = next((place for place, block in enumerate(blocks) if block not in self._seen), len(blocks))
        turn.ideal = min(known, (len(turn.ids) - 1) // BLOCK) * BLOCK
        number = turn.engine = self.choice.choose(prompt, now, range(ENGINES))
        turn.ticket = self.choice.send(number, prompt, now)
        name = str(next(self._count))
        self.open[name] = turn
        self.cores[number].add(Request(name, turn.ids, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)))
        if not self.busy[number]:
            self.busy[number] = True
            self._at(now, number)

    def _step(self, number: int, now: float) -> None:
        """Plan and run one step; its tokens are there when its time has passed."""
        if not self.cores[number].has_work:
            self.busy[number] = False
            return
        deltas = self.cores[number].step()
        after = now + self.clocks[number].seconds
        for delta in deltas:
            turn, load = self.open[delta.request_id], self.loads[number]
            assert turn.ticket is not None
            if not turn.said:
                turn.first, turn.cached = after, delta.num_cached_tokens
                load.first_token(turn.ticket, after)
                self._seen.update(chain_of(token_bytes(turn.ids), 0, BLOCK * TOKEN_BYTES))
            turn.said += delta.token_ids
            if delta.finish_reason is not None:
                self._end(self.open.pop(delta.request_id), load, after)
        self._at(after, number)

    def _end(self, turn: Turn, load: ReplicaLoad, now: float) -> None:
        whole = [*turn.ids, *turn.said]
        chain = prompt_chain(token_bytes(whole), hash(""))
        load.finish(turn.ticket, now, Usage(len(turn.ids), len(turn.said), turn.cached), chain)  # type: ignore[arg-type]
        self._seen.update(chain_of(token_bytes(whole), 0, BLOCK * TOKEN_BYTES))
        turn.ended = now
        self.done.append(turn)
        if turn.left:
            later = now + turn.rng.expovariate(1 / self._case["pause"])
            self._at(later, Turn([*whole, *_tokens(turn.rng, int(self._case["question"]))], turn.left - 1, later, turn.rng))


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(count)]


def summary(done: list[Turn]) -> dict[str, float]:
    waits = sorted(each.first - each.arrived for each in done)
    seconds = max(each.ended for each in done) - min(each.arrived for each in done)
    return {
        "requests": len(done), "seconds": round(seconds, 2),
        "cached_share": round(sum(each.cached for each in done) / sum(len(each.ids) for each in done), 4),
        "cached_of_one": round(sum(each.cached for each in done) / sum(each.ideal for each in done), 4),
        "first_token_p50_s": round(waits[len(waits) // 2], 4), "first_token_p99_s": round(waits[int(len(waits) * 0.99)], 4),
        "output_tokens_s": round(sum(len(each.said) for each in done) / seconds, 1),
    }


def main() -> None:
    options = EngineConfig.of(
        model=str(write_shape("llama-3.1-8b")), skip_tokenizer_init=True, max_model_len=16_384, max_num_seqs=256,
        max_num_batched_tokens=8192, step_time_ms=0.0,
    )
    config = replace(resolve(options, DeviceFacts("cuda", 150_109_880_320, ("bfloat16",))), depth=0)
    cases: dict[str, dict[str, dict[str, float]]] = {}
    wanted = sys.argv[1:] or list(CASES)
    for name, case in ((name, CASES[name]) for name in wanted):
        cases[name] = {}
        for policy in POLICIES:
            fleet = Fleet(policy, config, case, seed=1)
            cases[name][policy] = summary(fleet.run())
            for core in fleet.cores:
                core.close()
            print(name, policy, cases[name][policy], file=sys.stderr, flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    json.dump({
        "what": "simulation of eight engines: our scheduler, prefix cache and choice; step times fitted to one H200's record",
        "commit": commit,
        "step_seconds": {"fixed": FIXED, "row": ROW, "context_token": CONTEXT, "prompt_token": PROMPT},
        "engines": ENGINES, "kv_blocks": config.num_blocks, "traffic": CASES, "cases": cases,
    }, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
