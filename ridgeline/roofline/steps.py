"""Records every step of a running engine: its FLOPs and bytes, its time, and where the time went.

The engine's loop calls `planned` and `took` for each step, which only note references. `fold` counts the noted steps all at once
and adds them to sums by phase; the statistics report calls it some ten times a second. Sums only grow, so the difference of two
is a window. Reads plans and results without changing them; imports neither torch nor the engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from ridgeline.messages import StepPlan, StepResult, Want
from ridgeline.roofline.decoder_shape import DecoderShape
from ridgeline.roofline.peaks import MachinePeaks
from ridgeline.roofline.step_cost import LINEARS, OPS
from ridgeline.roofline.vectorised import ManyCosts, StepCosts

PHASES = ("prefill", "decode", "mixed")
_PREFILL, _DECODE, _MIXED = range(3)
REMEMBERED = 512                     # points kept; and steps noted before they are folded unasked
_EVERY_HIDDEN = np.int8(Want.PROMPT_LOGPROBS | Want.HIDDEN | Want.HIDDEN_SUM)
_IS_LINEAR = np.array([name in LINEARS for name in OPS])
_IS_PACKED = np.array([name in (*LINEARS, "head") for name in OPS])
_PACKED = ("int4", "int8")           # products of a CPU with packed weights, which computes in float32: of the head, too
_IS_MATRIX = np.array([float(name in (*LINEARS, "experts", "attention", "head")) for name in OPS])
# Norms and activations are part of their neighbours' kernels wherever launching matters.
_IS_LAUNCHED = np.array([float(name not in ("norms", "activation")) for name in OPS])
_ROWS_AT_ONCE = 32_000               # of four bytes each: less than malloc gets from the system and gives back each time
# Of a note.
_AT, _SECONDS, _WAITING, _DEVICE, _SHARED, _PADDED, _RECOMPUTED, _REJECTED, _REPLAYED, _COMMUNICATION, _LOST, _EXPERTS = range(12)
_BEATEN = 0.9                        # of the predicted time: a step that needs less has beaten the peaks


@dataclass(slots=True)
class PhaseSums:
    """Sums over all steps of a phase. Times in seconds."""

    steps: float = 0.0
    seconds: float = 0.0             # from the end of the step before, or from when there was work, to its end
    device: float = 0.0              # of these, on the device
    queued: float = 0.0              # requests that waited × seconds
    rows: float = 0.0
    tokens: float = 0.0              # computed, without padding
    sampled: float = 0.0             # tokens of answers
    padded: float = 0.0
    recomputed: float = 0.0
    rejected: float = 0.0
    flops: float = 0.0               # of matrix products and attention, without padding
    padding_flops: float = 0.0
    recomputed_flops: float = 0.0    # of `flops`, what was computed before …
    rejected_flops: float = 0.0      # … or in vain
    weights: float = 0.0             # bytes
    kv_read: float = 0.0
    kv_written: float = 0.0
    activations: float = 0.0
    compute: float = 0.0             # predicted: FLOPs at the measured rate …
    memory: float = 0.0              # … and bytes at the measured bandwidth
    on_compute: float = 0.0          # every op at its own roof, by what binds it
    on_weights: float = 0.0
    on_kv: float = 0.0
    on_activations: float = 0.0
    launch: float = 0.0              # predicted, of launching its kernels
    replayed: float = 0.0            # steps that replayed a CUDA graph
    communication: float = 0.0       # seconds of `device` in which ranks waited for each other, where that is known
    lost: float = 0.0                # seconds of `seconds` in which other programs had this process's core

    def values(self) -> list[float]:
        return [getattr(self, name) for name in SUMS]

    def add(self, values: np.ndarray) -> None:
        for name, value in zip(SUMS, values.tolist(), strict=True):
            setattr(self, name, getattr(self, name) + value)


SUMS = tuple(each.name for each in fields(PhaseSums))
_AS_NOTED = {
    "padded": _PADDED, "recomputed": _RECOMPUTED, "rejected": _REJECTED, "replayed": _REPLAYED,
    "communication": _COMMUNICATION, "lost": _LOST,
}
_Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]
_PLACE = {name: place for place, name in enumerate(SUMS)}
# One step, for a plot: when it ended, phase, tokens, rows, FLOPs, bytes; seconds in all, on the device, predicted for
# computing and for memory.
POINT = ("at", "phase", "tokens", "rows", "flops", "bytes", "seconds", "device", "compute", "memory")


class StepRecorder:
    def __init__(
        self, shape: DecoderShape, dtype: str, read_bytes: Callable[[int], tuple[int, int]] | None = None,
        linear_dtype: str = "", waited: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`dtype`: that attention and the head are computed in, and the layers' linears unless `linear_dtype` says otherwise.
        `read_bytes`: see StepCosts. `waited`: seconds that this thread has spent in the run queue."""
        self.dtype = dtype
        self.linear_dtype = linear_dtype or dtype
        self.peaks: MachinePeaks | None = None           # not known yet: steps are counted, and nothing is predicted
        self.sums = {phase: PhaseSums() for phase in PHASES}
        self.points: deque[list[float]] = deque(maxlen=REMEMBERED)
        self.num_points = 0                              # so far; the last ones are in `points`
        self.beaten = False                              # a step was faster than the peaks allow
        self._costs = StepCosts(shape, read_bytes)
        self._plans: deque[StepPlan] = deque()
        self._rows: list[_Rows] = []                     # of each step noted: tokens, wishes, KV length and drafts by row …
        self._notes: list[tuple[float, ...]] = []        # … and the numbers above
        self._since = 0.0                                # the end of the step before; 0: there was no work
        self._waited = waited
        self._waited_before = 0.0
        self.last_device = 0.0                           # seconds of the newest step

    @property
    def shape(self) -> DecoderShape:
        return self._costs.shape

    @property
    def weight_bytes(self) -> float:
        """Per element of the linears, in a step of one row."""
        return self._costs.weight_bytes

    # -- on the way of every step --------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan) -> None:
        if not self._since:
            self._since, self._waited_before = time.monotonic(), self._waited()
        self._plans.append(plan)

    def took(self, result: StepResult, waiting: int, goes_on: bool) -> None:
        """The oldest planned step's result. `goes_on`: is there more work?"""
        now, plan = time.monotonic(), self._plans.popleft()
        lengths = result.lengths
        if plan.width is not None:                       # attention went as far as the drafts, accepted or not
            lengths = lengths + (plan.width > 0) * (plan.num_tokens - result.num_new)
        self._rows.append((plan.num_tokens, plan.want, lengths, plan.width))
        waited = self._waited()
        lost, self._waited_before = max(0.0, min(waited - self._waited_before, now - self._since)), waited
        self.last_device = result.device_seconds
        self._notes.append((
            now, now - self._since, waiting, result.device_seconds, result.shared, result.padded, result.recomputed,
            result.rejected, result.replayed, result.communication, lost, result.experts,
        ))
        self._since = now if goes_on or self._plans else 0.0
        if len(self._notes) >= REMEMBERED:
            self.fold()

    def dropped(self) -> StepPlan:
        """The newest planned step, which did not run."""
        return self._plans.pop()

    # -- now and then --------------------------------------------------------------------------------------------------

    def use(self, peaks: MachinePeaks) -> None:
        """Predict with these peaks from now on. Sums start again, because earlier ones used other peaks or none."""
        if peaks != self.peaks:
            self.fold()
            self.peaks = peaks
            self.sums = {phase: PhaseSums() for phase in PHASES}
            self.points.clear()

    def fold(self) -> None:
        """Count the steps noted since the last call, in parts small enough that malloc need not ask the system for memory."""
        rows, notes = self._rows, self._notes
        self._rows, self._notes = [], []
        begin = size = 0
        for end, (new, *_) in enumerate(rows):
            if size + len(new) > _ROWS_AT_ONCE and end > begin:
                self._count(rows[begin:end], notes[begin:end])
                begin, size = end, 0
            size += len(new)
        if rows:
            self._count(rows[begin:], notes[begin:])

    def _count(self, rows: list[_Rows], notes: list[tuple[float, ...]]) -> None:
        counts = np.array([len(new) for new, *_ in rows])
        starts = np.cumsum(counts) - counts
        new, wants = np.concatenate([each[0] for each in rows]), np.concatenate([each[1] for each in rows])
        lengths = np.concatenate([each[2] for each in rows], dtype=np.int32, casting="unsafe")
        numbers = np.array(notes).T
        logits, own = wants & np.int8(Want.TOKEN), new
        if any(each[3] is not None for each in rows):
            width = np.concatenate([np.zeros(len(each[0]), np.int32) if each[3] is None else each[3] for each in rows])
            logits, own = logits * (1 + width), new - width
        costs = self._costs.of(
            counts, new, lengths, logits, numbers[_SHARED],
            every_hidden=np.bitwise_or.reduceat(wants, starts) & _EVERY_HIDDEN != 0, experts=numbers[_EXPERTS],
        )
        # Rows with one token beside their drafts decode; the others compute prompts.
        phases = np.where(np.add.reduceat(own, starts) == counts, _DECODE, _PREFILL)
        if int(own.sum()) > len(new):
            phases[(phases == _PREFILL) & (np.minimum.reduceat(own, starts) == 1)] = _MIXED
        table = self._table(numbers, costs)
        for number in set(phases.tolist()):
            self.sums[PHASES[number]].add(table[:, phases == number].sum(axis=1))
        self._keep_points(numbers[_AT], phases, table)

    def _table(self, numbers: np.ndarray, costs: ManyCosts) -> np.ndarray:
        """[sums, steps]"""
        table = np.zeros((len(SUMS), numbers.shape[1]))
        seconds = numbers[_SECONDS]
        table[_PLACE["steps"]] = 1
        table[_PLACE["seconds"]] = seconds
        table[_PLACE["device"]] = np.minimum(numbers[_DEVICE], seconds)
        table[_PLACE["queued"]] = numbers[_WAITING] * seconds
        table[_PLACE["rows"]], table[_PLACE["tokens"]] = costs.rows, costs.tokens
        table[_PLACE["sampled"]] = costs.logits - numbers[_REJECTED]
        for name, which in _AS_NOTED.items():
            table[_PLACE[name]] = numbers[which]
        matrix = table[_PLACE["flops"]] = costs["flops"] @ _IS_MATRIX
        # Padding goes through the linears of every layer and sees nothing; the rest is the mean of its step's tokens.
        table[_PLACE["padding_flops"]] = numbers[_PADDED] * (2 * self._costs.shape.active_weights)
        per_token = matrix / np.maximum(costs.tokens, 1)
        table[_PLACE["recomputed_flops"]] = numbers[_RECOMPUTED] * per_token
        table[_PLACE["rejected_flops"]] = numbers[_REJECTED] * per_token
        for name in ("weights", "kv_read", "kv_written", "activations"):
            table[_PLACE[name]] = costs[name].sum(axis=1)
        if self.peaks is not None:
            self._predict(table, costs, self.peaks, numbers[_DEVICE])
        return table

    def _predict(self, table: np.ndarray, costs: ManyCosts, peaks: MachinePeaks, device: np.ndarray) -> None:
        """`device`: seconds as the device counted them. A host that was late to take in the step before sees less of a
        step than it took, and that beats nothing."""
        per_byte = 1 / peaks.read_bytes_s
        weights, kv = costs["weights"], costs["kv_read"] + costs["kv_written"]
        computing, moving = costs["flops"] / self.rates(peaks), (weights + kv + costs["activations"]) * per_byte
        compute = table[_PLACE["compute"]] = computing @ _IS_MATRIX
        table[_PLACE["memory"]] = moving.sum(axis=1)
        moves = computing <= moving                      # which ops memory binds
        on_memory, on_weights, on_kv = ((values * moves).sum(axis=1) for values in (moving, weights, kv))
        table[_PLACE["on_compute"]] = (computing * ~moves).sum(axis=1)
        table[_PLACE["on_weights"]], table[_PLACE["on_kv"]] = on_weights * per_byte, on_kv * per_byte
        table[_PLACE["on_activations"]] = on_memory - (on_weights + on_kv) * per_byte
        each = np.where(table[_PLACE["replayed"]] > 0, peaks.launch_s, peaks.host_launch_s or peaks.launch_s)
        table[_PLACE["launch"]] = (costs["calls"] @ _IS_LAUNCHED) * each
        read = (table[_PLACE["weights"]] + table[_PLACE["kv_read"]]) * per_byte
        self.beaten |= bool((device < _BEATEN * np.maximum(compute, read)).any())

    def rates(self, peaks: MachinePeaks) -> np.ndarray:
        """FLOP/s by op."""
        narrow = _IS_PACKED if self.linear_dtype in _PACKED and self.dtype == "float32" else _IS_LINEAR
        return np.where(narrow, peaks.flops_s.get(self.linear_dtype, peaks.rate(self.dtype)), peaks.rate(self.dtype))

    def _keep_points(self, at: np.ndarray, phases: np.ndarray, table: np.ndarray) -> None:
        moved = table[_PLACE["weights"] : _PLACE["activations"] + 1].sum(axis=0)
        tokens, rows, flops, *times = (
            table[_PLACE[name]] for name in ("tokens", "rows", "flops", "seconds", "device", "compute", "memory")
        )
        self.points.extend(np.stack([at, phases, tokens, rows, flops, moved, *times], axis=1).tolist())
        self.num_points += len(at)
