"""The floor of a workload: its time with every operation at the device's measured peak, and none overlapping another.

    floor of a step = Σ over its operations of max(bytes / read bandwidth, FLOPs / matrix rate)

A workload's floor is the sum over the steps of a simulated engine that schedules as ours does (decodes first, then prompt
chunks under the token budget) and loses no time anywhere. Shared prefixes are computed once, and read once per step. Needs
the model's shape and the device's peaks, not the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ridgeline.bench.workload.workloads import Asked, Preset
from ridgeline.roofline.decoder_shape import DecoderShape
from ridgeline.roofline.step_cost import PARTS, Peaks, step_cost
from ridgeline.sizes.batch_levelling import Level
from ridgeline.sizes.op_costs import Cost

# What other engines were compared with: Llama-3.1-8B in bf16 on one H200 (4.38 TB/s, 793 TFLOP/s), counting the linears,
# the head and the KV read at the mean context. By preset and figure; seconds or tok/s.
H200_FLOORS: dict[str, dict[str, float]] = {
    "latency_b1": {"decode_tok_s": 290, "first_tokens_s": 0.009},
    "batch128": {"decode_tok_s": 21_800, "first_tokens_s": 1.17, "output_tok_s": 12_300},
    "throughput": {"output_tok_s": 15_400},
    "prefix": {"output_tok_s": 23_400},
}
H200_FLOORS_FOR = ("llama-3.1-8b", "bfloat16", "bfloat16")     # shape, dtype of the KV cache, dtype


@dataclass(slots=True)
class Floor:
    seconds: float = 0.0
    cost: Cost = field(default_factory=Cost)
    steps: int = 0
    parts: dict[str, float] = field(default_factory=dict)        # seconds by kind of operation


@dataclass(slots=True)
class _Sequence:
    kv: int                          # tokens in the cache
    prompt: int
    answer: int                      # tokens still to produce


def step_floor(
    shape: DecoderShape, rows: Sequence[tuple[int, int]], peaks: Peaks, logits: Sequence[int] | None = None,
    shared: int = 0,
) -> tuple[dict[str, float], Cost]:
    """Seconds by part, and what was counted, of one step whose rows share a prefix of that length."""
    cost = step_cost(shape, rows, logits, (len(rows) - 1) * shared if rows else 0)
    parts: dict[str, float] = {}
    for op, seconds in peaks.floor(cost).items():
        parts[PARTS[op]] = parts.get(PARTS[op], 0.0) + seconds
    return parts, cost.total.cost


def _admit(
    waiting: deque[_Sequence], running: list[_Sequence], room: int, max_rows: int, levelled: Level | None
) -> None:
    before = len(running)
    free = max_rows - before if levelled is None else levelled.places(before, len(waiting))
    while waiting and free > 0 and room > sum(max(0, sequence.prompt - sequence.kv) for sequence in running):
        running.append(waiting.popleft())
        free -= 1
    if len(running) > before and levelled is not None:
        levelled.begun(len(running), full=False)


def _advance(running: list[_Sequence], room: int) -> tuple[list[tuple[int, int]], list[int]]:
    """(tokens, KV length) of each row of a step, and whether it has logits: decodes, and prompts within the room."""
    rows: list[tuple[int, int]] = []
    logits: list[int] = []
    for sequence in running:
        count = 1 if sequence.kv >= sequence.prompt else min(room, sequence.prompt - sequence.kv)
        if count == 0:
            continue
        room -= count if sequence.kv < sequence.prompt else 0
        sequence.kv += count
        rows.append((count, sequence.kv))
        logits.append(int(sequence.kv >= sequence.prompt))
        sequence.answer -= logits[-1]
    return rows, logits


def workload_floor(
    shape: DecoderShape, asked: Asked, peaks: Peaks, budget: int, max_rows: int, shared: int = 0, level: int | None = None
) -> Floor:
    """The sum over the steps of an engine without overhead. `level`: rows that run at once, see sizes/batch_levelling.py."""
    floor = Floor()
    levelled = Level(level) if level else None
    waiting = deque(
        _Sequence(shared if shared and place else 0, len(prompt), tokens_out)
        for place, (prompt, tokens_out) in enumerate(asked)
    )
    running: list[_Sequence] = []
    while waiting or running:
        room = budget - sum(sequence.kv >= sequence.prompt for sequence in running)
        _admit(waiting, running, room, max_rows, levelled)
        rows, logits = _advance(running, room)
        running = [sequence for sequence in running if sequence.answer > 0]
        parts, cost = step_floor(shape, rows, peaks, logits, shared)
        floor.seconds += sum(parts.values())
        floor.cost += cost
        floor.steps += 1
        for name, seconds in parts.items():
            floor.parts[name] = floor.parts.get(name, 0.0) + seconds
    return floor


def preset_floor(
    shape: DecoderShape, preset: Preset, asked: Asked, peaks: Peaks, budget: int, max_rows: int, level: int | None = None
) -> dict[str, Any]:
    """Our own count for a preset: the figures that a perfect engine would have, and what it would move and compute.

    It begins with the longest answers, as the engine does with requests that are all there at once, and keeps to its `level` if
    that is faster.
    """
    asked = sorted(asked, key=lambda each: -each[1])
    whole = workload_floor(shape, asked, peaks, budget, max_rows, preset.shared)
    if level is not None:
        levelled = workload_floor(shape, asked, peaks, budget, max_rows, preset.shared, level)
        whole = min(whole, levelled, key=lambda floor: floor.seconds)
    tokens = sum(tokens_out for _, tokens_out in asked)
    found: dict[str, Any] = {
        "seconds": whole.seconds, "bytes": whole.cost.bytes, "flops": whole.cost.flops, "steps": whole.steps,
        "seconds_by_part": whole.parts, "output_tok_s": tokens / whole.seconds,
    }
    if preset.uniform:
        ones = [(prompt, 1) for prompt, _ in asked]
        first = workload_floor(shape, ones, peaks, budget, max_rows).seconds
        found["first_tokens_s"] = first
        if tokens > len(asked):
            found["decode_tok_s"] = (tokens - len(asked)) / (whole.seconds - first)
    return found


def shares(figures: dict[str, float], floor: dict[str, Any]) -> dict[str, float]:
    """By figure, how close it is to its floor: 1 is at it."""
    return {
        name: floor[name] / value if name.endswith("_s") and not name.endswith("tok_s") else value / floor[name]
        for name, value in figures.items()
        if floor.get(name) and value
    }
