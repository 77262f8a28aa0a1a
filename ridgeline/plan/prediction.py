"""Predicts the seconds of a step: bytes and FLOPs at the shares of the data sheet that our kernels reach.

    GEMM        (read^p + compute^p)^(1/p) + calls · kernel        read = bytes / (bandwidth · linear_read) …
    attention   read + compute + calls · its own time: decodes read, prefill and shared prefixes compute, one after the other
    layer       norms, rotation, activation: a time that grows with the rows, and the bytes that do not fit in caches
    all-reduce  latency + 2 (n − 1)/n · bytes / link
    experts     whole ones on each rank: the time of the rank with the most (division.py)
    clock       the power limit lowers the clock of a device that has computed for a while (`paces`)
    step        the sum, sampling and copies; the host schedules and launches the next step in parallel, again ^p

p says how well two things overlap: ∞ is the roofline's maximum, 1 a sum. The constants are fitted on Llama-3.1-8B in bf16 on
one H200 (`fit.py`, `fitted.json`); other chips are assumed to reach the same shares of their data sheets.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from ridgeline.config import declared_options
from ridgeline.errors import ConfigError
from ridgeline.plan import expert_work, precision
from ridgeline.plan.division import bubble, expert_loads
from ridgeline.plan.precision import WEIGHT_FORMATS, StoredWeights, compute_format, kv_bytes, weight_bytes
from ridgeline.plan.public_models import PlannedModel
from ridgeline.plan.workload_steps import (
    PRODUCTS,
    Lengths,
    Row,
    Steps,
    count_rows,
    decode_rows,
    gather,
    workload_counts,
    workload_spans,
)
from ridgeline.resolve import GPU_ROWS, GPU_STEP_TOKENS
from ridgeline.roofline.decoder_shape import DecoderShape, decoder_shape, sharded
from ridgeline.sizes.graph_shapes import decode_sizes
from ridgeline.sizes.hardware import INFINIBAND, Device, Link
from ridgeline.sizes.kv_format import KVFormat, cache_dtype
from ridgeline.techniques import turned_off

# By kind of device. Of CPUs, kernels for each architecture reach other shares of their own peaks.
FITTED = {kind: Path(__file__).with_name(name) for kind, name in {
    "cuda": "fitted.json", "cpu": "fitted_cpu.json", "cpu-aarch64": "fitted_cpu_aarch64.json"}.items()}
EXPERTS = PRODUCTS.index("experts")
MANY_ROWS = 128                      # above, the time per layer grows only with its bytes
STEP_TOKENS = GPU_STEP_TOKENS        # token budget of a step
MOST_ROWS = GPU_ROWS                 # concurrent requests
FITTED_HEAD = 128                    # elements of a head of Llama-3.1-8B, on which the constants of GPUs are fitted

# Rows for which a CPU unpacks a tile of weights once, at the cost of one row more (docs/cpu.md); rates are those of many rows.
TILE_ROWS = 8


@dataclass(frozen=True, slots=True)
class Constants:
    """Shares of the data sheet, and seconds."""

    linear_read: float               # of the bandwidth, by memory-bound GEMMs
    linear_compute: float            # of the matrix rate, by GEMMs with many rows
    overlap: float                   # p above
    kernel_one_s: float              # fixed time of a GEMM kernel with one row …
    kernel_many_s: float             # … and with MANY_ROWS
    attention_call_s: float          # … of attention in a layer
    attention_read: float
    attention_compute: float
    layer_one_s: float               # everything else in a layer, with one row …
    layer_many_s: float              # … and with MANY_ROWS
    step_s: float                    # sampling, copies, and host time that is not hidden
    idle_s: float = 0.0              # before the first step of an idle engine and after its last, where host time is not hidden
    launch_s: float = 6.6e-6         # of a kernel by the host without CUDA graphs: measured by `bench ops`, not fitted
    host_s: float = 0.0              # host time to schedule a step and to process the one before it …
    host_row_s: float = 0.0          # … and for each of its rows; hidden while the device takes much longer
    host_add_s: float = 0.0          # … to add a request …
    host_add_token_s: float = 0.0    # … for each token of its prompt; not hidden if all requests are there from the start
    host_request_s: float = 0.0      # … to schedule its first step …
    host_token_s: float = 0.0        # … for each token of its prompt: cache lookup and a slot …
    host_cached_s: float = 0.0       # … or, if cached, only the lookup
    narrow_kv_read: float = 1.0      # factor on attention_read with a KV cache of less than 16 bits …
    narrow_kv_compute: float = 1.0   # … and on attention_compute: from kernels in `bench ops`, not from an end-to-end record
    power_drop: float = 0.0          # share of the matrix rate that the power limit takes after long computation …
    power_s: float = 0.3             # … and the time constant of that

    def values(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(Constants)}


def fitted_as(device: Device) -> str:
    """The constants that hold for a device, of FITTED."""
    return "cuda" if device.kind != "cpu" else "cpu-aarch64" if device.architecture == "aarch64" else "cpu"


@functools.cache
def fitted(kind: str = "cuda") -> Constants:
    """Of a kind of device: shares of a GPU's data sheet, or of a CPU's measured peaks."""
    try:
        return Constants(**json.loads(FITTED[kind].read_text())["constants"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{FITTED[kind]} cannot be used ({error}); make it anew with `ridgeline plan --fit RECORD`") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model on devices, with everything that decides how fast it is."""

    model: PlannedModel
    device: Device
    ranks: int = 1                   # devices that share every layer
    stages: int = 1                  # of a pipeline, each with that many devices
    dtype: str = "bfloat16"          # of activations, and of whatever has no format of its own
    weights: str = "bfloat16"        # of the layers' linears; embedding, head and norms stay in dtype
    stored: StoredWeights | None = None                  # of a checkpoint whose codes are kept; see `kept`
    kv: str = "auto"
    sparse: bool = False             # 2:4, in the layers' linears
    drafts: int = 0                  # tokens proposed per step …
    acceptance: float = 0.0          # … each taken with this probability if those before it are
    draft_model: PlannedModel | None = None              # who proposes; None: at no cost, as n-grams do
    derate: float = 1.0              # what production leaves of the speed
    stage_link: Link | None = None   # between stages; None: as between the devices of one
    expert_parallel: bool = False    # ranks have whole experts
    context_parallel: bool = False   # ranks divide the KV cache by positions
    nodes: int = 1                   # machines; stages are divided among them …
    node_link: Link | None = None    # … with this link between them; None: InfiniBand
    constants: Constants | None = None

    def __post_init__(self) -> None:
        if not 0 < self.derate <= 1:
            raise ConfigError(f"derate must be above 0 and at most 1, got {self.derate}")
        if not 0 <= self.acceptance <= 1 or self.drafts < 0:
            raise ConfigError(f"speculation needs an acceptance between 0 and 1, got {self.acceptance}, and no negative "
                              f"number of drafts, got {self.drafts}")
        if self.nodes > self.stages:
            raise ConfigError(f"{self.nodes} machines need as many stages (--pipeline-parallel-size), got {self.stages}: ranks "
                              "of a stage stay on one machine")
        if self.weights not in WEIGHT_FORMATS:
            raise ConfigError(f"weights in {self.weights}: known are {', '.join(WEIGHT_FORMATS)}")

    @property
    def devices(self) -> int:
        return self.ranks * self.stages

    @property
    def used(self) -> Constants:
        return self.constants or fitted(fitted_as(self.device))

    @property
    def shape(self) -> DecoderShape:
        config = self.model.config
        used = self.kept or StoredWeights(
            self.weights, self._bytes(self.weights), self._bytes(self.dtype), self._bytes(self.expert_weights)
        )
        whole = decoder_shape(config, self.dtype, bytes_per_weight=used.linears, expert_bytes=used.experts, head_bytes=used.head)
        whole = replace(whole, kv_bytes=kv_bytes(self.kv, self.kv_dtype, self.model.kv_scaled), window_kv_bytes=None)
        return whole.shard(self.ranks) if self.ranks > 1 else whole

    def _bytes(self, format: str) -> float:
        """Of a weight. A CPU keeps 16-bit numbers as they are stored, unless ranks divide them."""
        whole = self.device.kind == "cpu" and self.ranks == 1 and WEIGHT_FORMATS[format].bits >= 16
        stored = self.model.config.dtype if whole else format
        return weight_bytes(stored if stored in WEIGHT_FORMATS else format, self.sparse)

    @property
    def kept(self) -> StoredWeights | None:
        """The checkpoint's own weights, unless others are asked for."""
        return self.stored if self.stored is not None and self.stored.format == self.weights and not self.sparse else None

    @property
    def has_blocks(self) -> bool:
        """The weights are blocks of a GGUF file."""
        return self.kept is not None and bool(self.model.config.packed)

    @property
    def computed(self) -> str:
        """The format of matrix products. The codes of a file that a GPU keeps become numbers first, if it has them alone."""
        wide = self.kept is not None and not self.kept.narrow_rows and self.device.kind == "cuda"
        return compute_format(self.device, self.dtype if wide else self.weights, self.dtype)

    @property
    def expert_weights(self) -> str:
        """The checkpoint's own format of experts, unless another is asked for. A CPU expands it."""
        if self.kept is not None and self.kept.expert_format:
            return self.kept.expert_format
        stored = self.model.expert_format if self.device.kind != "cpu" and self.weights == self.dtype else ""
        return stored or self.weights

    @property
    def kv_dtype(self) -> str:
        """Of the cache, where no format is asked for."""
        return cache_dtype("auto", self.dtype, self.device.kind)

    @property
    def wide_kv(self) -> KVFormat:
        return KVFormat(self.kv_dtype, self.kv_dtype)

    @property
    def graphs(self) -> bool:
        """Do decode steps use CUDA graphs? The engine's own list of techniques says with what they work."""
        return self.device.kind == "cuda" and _has_graphs(self.ranks, self.stages, self.context_parallel)

    @property
    def lossy(self) -> list[str]:
        """What is on that may change answers."""
        found = [f"{self.weights} weights"] if WEIGHT_FORMATS[self.weights].bits < 16 else []
        found += [f"{self.kv} KV"] if self.kv != "auto" else []
        return found + (["2:4 sparsity"] if self.sparse else [])

    @property
    def label(self) -> str:
        words = [f"{self.devices} × {self.device.name}"] + ([f"{self.nodes} machines"] if self.nodes > 1 else [])
        words += [f"{self.stages} stages"] if self.stages > 1 else []
        words += ["whole experts"] if self.expert_parallel else []
        words += ["divided contexts"] if self.context_parallel else []
        words += [f"{self.weights} weights{' 2:4' if self.sparse else ''}"]
        words += [f"{self.kv} KV"] if self.kv != "auto" else []
        words += [f"{self.drafts} drafts"] if self.drafts else []
        return ", ".join(words)


_ENGINE_DEFAULTS = {declared.name: declared.default for declared, _, _ in declared_options()}


@functools.lru_cache(maxsize=256)        # asked for every step that is predicted
def _has_graphs(ranks: int, stages: int, context_parallel: bool) -> bool:
    options = _ENGINE_DEFAULTS | {
        "tensor_parallel_size": ranks, "pipeline_parallel_size": stages,
        "decode_context_parallel_size": ranks if context_parallel else 1,
    }
    return "CUDA graphs" not in turned_off(options, "cuda")


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def step_parts(setup: Setup, steps: Steps, pace: np.ndarray | float = 1.0) -> dict[str, np.ndarray]:
    """Seconds of every step, by part. Their sum is the step's time, unless launching takes longer than computing.

    `pace`: the share of the matrix rate that each step has; 1 if the device was idle before.
    """
    constants, device = setup.used, setup.device
    p = constants.overlap
    format = setup.computed
    rate = device.rate(format) * (2 if setup.sparse and device.sparse else 1)
    wide = device.rate(setup.dtype if setup.dtype in device.flops else device.wide)
    read = device.bandwidth * constants.linear_read
    narrow = 1.0
    if WEIGHT_FORMATS[setup.weights].bits < 16 and device.kind == "cuda":
        narrow = precision.READ.get(setup.weights, precision.BLOCKS_READ if setup.has_blocks else precision.NARROW_READ)
    if format in precision.EIGHT_BIT_COMPUTE and device.kind == "cuda":
        rate *= precision.EIGHT_BIT_COMPUTE[setup.weights]
    # The head stays wide, but for a file's own codes, which are multiplied like those of the layers.
    reads = np.array([read * narrow] * (steps.product_bytes.shape[1] - 1) + [read])
    head = rate if setup.kept is not None and not setup.kept.narrow_rows else wide
    rates = np.array([rate] * (steps.product_bytes.shape[1] - 1) + [head]) * constants.linear_compute
    paced = np.broadcast_to(pace, len(steps))
    grown = np.log(np.clip(steps.tokens, 1, MANY_ROWS)) / np.log(MANY_ROWS)
    kernel = constants.kernel_one_s + (constants.kernel_many_s - constants.kernel_one_s) * grown
    layer = constants.layer_one_s + (constants.layer_many_s - constants.layer_one_s) * grown
    codes = _code_bits(setup)
    kept = _rate_kept(setup, steps, codes, format)
    bytes_read, flops = _of_fullest_rank(setup, steps)
    products = _both(bytes_read / reads, flops / (rates * (paced * kept)[:, None]), p)
    products += steps.product_calls * kernel[:, None]
    products[:, :-1] += _expanding(setup, steps, codes)
    if setup.model.experts is not None and device.kind == "cuda":
        if WEIGHT_FORMATS[setup.expert_weights].bits == 4:
            products[:, EXPERTS] = _four_bit_experts(setup, steps, bytes_read[:, EXPERTS], wide, paced)
        else:
            seconds = flops[:, EXPERTS] / (wide * constants.linear_compute * paced)      # also of 8 bits: see expert_work.py
            products[:, EXPERTS] = _tiled_experts(setup, steps, bytes_read[:, EXPERTS] / reads[EXPERTS], seconds, wide * paced)
        few = np.where(steps.tokens <= expert_work.MOST_FEW, expert_work.FEW_CALLS, 1.0)
        products[:, EXPERTS] += steps.product_calls[:, EXPERTS] * few * kernel
    kv = setup.kv if device.kind == "cuda" else "auto"
    reads_kv, computes_kv = precision.kv_factors(kv, constants.narrow_kv_read, constants.narrow_kv_compute)
    attention = steps.attention_bytes / (device.bandwidth * constants.attention_read * reads_kv)
    attention += steps.attention_flops / (wide * constants.attention_compute * computes_kv * paced)
    smaller = min(1.0, setup.shape.head_dim / FITTED_HEAD) if device.kind == "cuda" else 1.0
    attention += steps.attention_calls * constants.attention_call_s * smaller
    beyond = steps.small_bytes * np.maximum(0, steps.tokens - MANY_ROWS) / np.maximum(steps.tokens, 1)
    link = device.link
    ring = 2 * (steps.ranks - 1) / steps.ranks
    return {
        "linears": products[:, :-1].sum(1),
        "head": products[:, -1],
        "attention": attention,
        "small": steps.layers * layer + beyond / read,
        "communication": steps.collectives * link.latency + ring * steps.collective_bytes / link.bandwidth,
        "step": np.full(len(steps), constants.step_s),
    }


def _code_bits(setup: Setup) -> int:
    """Of codes that a GPU multiplies by x of 16 bits: 4, 8 (a checkpoint's own), or 0."""
    bits = WEIGHT_FORMATS[setup.weights].bits
    known = bits == 4 or (bits == 8 and setup.kept is not None)
    return int(bits) if known and setup.device.kind == "cuda" and setup.computed == setup.dtype else 0


def _expanding(setup: Setup, steps: Steps, codes: int) -> np.ndarray:
    """Seconds by linear in which codes become numbers in memory, where there are too many rows for kernels that read codes."""
    weights = steps.product_flops[:, :-1] / (2 * np.maximum(steps.tokens, 1))[:, None]
    moved = weights * (steps.tokens > precision.code_rows(setup.weights))[:, None] * precision.EXPANDED.get(codes, 0)
    return moved / (setup.device.bandwidth * precision.EXPANDS)


def _rate_kept(setup: Setup, steps: Steps, codes: int, format: str) -> np.ndarray | float:
    """The share of the matrix rate that products of these weights have."""
    if codes:
        return np.where(steps.tokens > precision.code_rows(setup.weights), 1.0, precision.CODE_COMPUTE[codes])
    if setup.device.kind == "cpu" and format == setup.weights and format != setup.dtype:
        return (1 + 1 / TILE_ROWS) / (1 + np.ceil(steps.tokens / TILE_ROWS) / np.maximum(steps.tokens, 1))
    return 1.0


def _tiled_experts(setup: Setup, steps: Steps, reading: np.ndarray, computing: np.ndarray, rate: np.ndarray) -> np.ndarray:
    """Seconds without the kernels' own, from those of reading the weights and of dense GEMMs. `rate`: of matrices in 16 bits."""
    used, experts, hidden = setup.used, sharded(setup.model.experts, setup.ranks), setup.model.config.hidden_size
    assert experts is not None
    bits, layers = WEIGHT_FORMATS[setup.expert_weights].bits, steps.layers - setup.model.config.num_plain
    computing = computing * expert_work.padded_rows(experts, steps.tokens, bits) / expert_work.tiled_compute(bits)
    converting = layers * expert_work.conversions(experts, hidden, steps.tokens, bits) * expert_work.FLOPS_PER_LANE / rate
    moved = layers * expert_work.pair_bytes(experts, hidden, steps.tokens, WEIGHT_FORMATS[setup.dtype].bytes)
    return _both(np.maximum(reading, converting), computing, used.overlap) + moved / (setup.device.bandwidth * used.linear_read)


def _four_bit_experts(setup: Setup, steps: Steps, bytes_read: np.ndarray, wide: float, paced: np.ndarray) -> np.ndarray:
    """Seconds without the kernels' own: reading and unpacking overlap, and computing with both."""
    used, experts, hidden = setup.used, sharded(setup.model.experts, setup.ranks), setup.model.config.hidden_size
    assert experts is not None
    unpacked, padded = expert_work.work(experts, hidden, steps.tokens)
    flops = steps.product_flops[:, EXPERTS]
    layers = flops / np.maximum(2 * 3 * hidden * experts.width * experts.used * steps.tokens, 1)     # the last has fewer tokens
    unpacking = layers * unpacked / (expert_work.unpacks_per_second(wide, setup.expert_weights, steps.tokens) * paced)
    reading = bytes_read / (setup.device.bandwidth * used.linear_read)
    computing = flops * padded / (wide * used.linear_compute * precision.CODE_COMPUTE[4] * paced)
    return _both(np.maximum(reading, unpacking), computing, used.overlap)


def _of_fullest_rank(setup: Setup, steps: Steps) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and FLOPs of the products, where all ranks wait for the one with the most work of whole experts."""
    experts = setup.model.experts
    if not setup.expert_parallel or experts is None or setup.ranks == 1:
        return steps.product_bytes, steps.product_flops
    computed, read = expert_loads(experts, setup.ranks, steps.tokens)
    scale_bytes, scale_flops = np.ones(steps.product_bytes.shape), np.ones(steps.product_bytes.shape)
    scale_bytes[:, EXPERTS], scale_flops[:, EXPERTS] = read, computed
    return steps.product_bytes * scale_bytes, steps.product_flops * scale_flops


def paces(setup: Setup, steps: Steps, steady: bool = False) -> np.ndarray:
    """The share of the matrix rate left to each of these consecutive steps, the first on an idle device. Power follows recent
    computation, and the clock falls as power nears its limit. `steady`: each step as one of many like it."""
    used = setup.used
    if not used.power_drop:
        return np.ones(len(steps))
    seconds = np.sum(list(step_parts(setup, steps).values()), axis=0)
    wide = setup.device.rate(setup.dtype if setup.dtype in setup.device.flops else setup.device.wide)
    computing = np.minimum(1.0, steps.product_flops.sum(1) / (wide * used.linear_compute) / np.maximum(seconds, 1e-12))
    if steady:
        return 1 - used.power_drop * computing
    lately, mean = 0.0, np.empty(len(steps))
    for number, (took, share) in enumerate(zip(seconds.tolist(), computing.tolist(), strict=True)):
        kept = math.exp(-took / used.power_s)
        mean[number] = share + (lately - share) * (1 - kept) * used.power_s / max(took, 1e-12)
        lately = share + (lately - share) * kept
    return 1 - used.power_drop * mean


def step_seconds(setup: Setup, steps: Steps, steady: bool = False) -> np.ndarray:
    device = np.sum(list(step_parts(setup, steps, paces(setup, steps, steady)).values()), axis=0)
    used = setup.used
    host = used.host_s + used.host_row_s * steps.rows
    host[:-1] += _admission(used, steps)[1:]             # of the next step, which is planned meanwhile
    if not setup.graphs:
        host = host + steps.launches * setup.used.launch_s
    device = _both(device, host, setup.used.overlap)
    return np.asarray(device / setup.derate)


def _admission(used: Constants, steps: Steps) -> np.ndarray:
    """What planning the requests that begin in each step costs the host."""
    new = used.host_token_s * (steps.admitted_tokens - steps.cached_tokens) + used.host_cached_s * steps.cached_tokens
    return np.asarray(used.host_request_s * steps.admitted + new)


def idle_seconds(setup: Setup, steps: Steps) -> float:
    """Idle device time before the first step of a workload, while all requests are added and the first are scheduled, and after
    its last step."""
    used = setup.used
    adding = used.host_add_s * steps.admitted.sum() + used.host_add_token_s * steps.admitted_tokens.sum()
    return float(used.idle_s + adding + _admission(used, steps)[0])


def _both(read: np.ndarray, compute: np.ndarray, p: float) -> np.ndarray:
    """The time of two things that overlap partly: reading and computing, or device and host."""
    longer = np.maximum(np.maximum(read, compute), 1e-30)
    return np.asarray(longer * ((read / longer) ** p + (compute / longer) ** p) ** (1 / p))


def rows_seconds(setup: Setup, rows: list[Row], padded_to: int = 0) -> float:
    """One step of these rows, of many like it."""
    shape = setup.shape
    counts = count_rows(shape, rows, padded_to=padded_to)
    return float(step_seconds(setup, gather(shape, [counts], setup.model), steady=True)[0])


def seconds_each(setup: Setup, steps: Iterable[list[Row]]) -> list[float]:
    """Steps with these rows, each as one of many like it."""
    shape = setup.shape
    gathered = gather(shape, [count_rows(shape, rows) for rows in steps], setup.model)
    return [float(each) for each in step_seconds(setup, gathered, steady=True)]


# ── what a user sees ─────────────────────────────────────────────────────────────────────────────────────────────────


def prefill_seconds(setup: Setup, tokens: int, batch: int = 1, budget: int = STEP_TOKENS, cached: int = 0) -> float:
    """From prompts to their first tokens, with nothing else running; `cached` tokens of each are in the cache already."""
    shape = setup.shape
    if not cached:
        counts = workload_counts(shape, [(tokens, 1)] * batch, budget, MOST_ROWS, graphs=False)
    else:
        chunks = [(done, min(tokens, done + budget)) for done in range(cached, tokens, budget)]
        rows = [Row(end - done, end, int(end == tokens)) for done, end in chunks]
        together = max(1, budget // max(1, tokens - cached)) if len(rows) == 1 else 1
        groups = [min(together, batch - first) for first in range(0, batch, together)]
        counts = [count_rows(shape, [row] * group) for group in groups for row in rows]
    steps = gather(shape, counts, setup.model)
    return float(step_seconds(setup, steps).sum()) + idle_seconds(setup, steps)


def decode_seconds(setup: Setup, batch: int, context: int) -> float:
    """Of one decode step; with drafts, of the proposals and their verification."""
    padded = next((size for size in decode_sizes(MOST_ROWS) if size >= batch), 0) if setup.graphs else 0
    own = rows_seconds(setup, decode_rows(batch, context, setup.drafts), padded * (1 + setup.drafts))
    return own + proposal_seconds(setup, batch, context)


def hop_seconds(setup: Setup, tokens: int) -> float:
    """What a step of a pipeline waits for its stream, on its way through all stages."""
    near, far = setup.stage_link or setup.device.link, setup.node_link or INFINIBAND
    size = tokens * setup.model.config.hidden_size * WEIGHT_FORMATS[setup.dtype].bytes
    hops = [near] * (setup.stages - setup.nodes) + [far] * (setup.nodes - 1)
    return sum(link.latency + size / link.bandwidth for link in hops)


def stage_bubble(setup: Setup, batch: int, context: int) -> float:
    """Factor on the time of decode steps of `batch` rows each, one on every stage."""
    one = replace(setup, stages=1, nodes=1)
    steps = gather(one.shape, [count_rows(one.shape, decode_rows(batch, context, setup.drafts))], one.model)
    parts = {name: float(seconds[0]) for name, seconds in step_parts(one, steps).items()}
    ends = parts.pop("head") + parts.pop("step")
    return bubble(setup.model.config.num_layers, setup.stages, sum(parts.values()), ends)


def proposal_seconds(setup: Setup, batch: int, context: int) -> float:
    """Time of proposing drafts: the draft model decodes token after token on the same devices."""
    if setup.draft_model is None or not setup.drafts:
        return 0.0
    drafter = replace(setup, model=setup.draft_model, drafts=0, draft_model=None, weights=setup.dtype, sparse=False)
    return setup.drafts * decode_seconds(drafter, batch, context)


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A closed loop: each user sends the next request when the answer has arrived."""

    seconds: float                   # until the last answer
    tpot: float                      # the mean of all answers


def closed_loop(setup: Setup, asked: Lengths, users: int) -> ClosedLoop:
    """Requests of equal lengths that wait for one of `users` rows; the front end's work runs in another process."""
    shape = setup.shape
    counts, spans = workload_spans(shape, asked, STEP_TOKENS, users, graphs=setup.graphs)
    ends = np.cumsum(step_seconds(setup, gather(shape, counts, setup.model)))
    each = [(ends[last] - ends[first]) / (out - 1) for (first, last), (_, out) in zip(spans, asked, strict=True) if out > 1]
    return ClosedLoop(float(ends[-1]) + setup.used.idle_s, float(np.mean(each)) if each else 0.0)


def workload_seconds(
    setup: Setup, asked: Lengths, budget: int = STEP_TOKENS, max_rows: int = MOST_ROWS, shared: int = 0,
    level: int | None = None,
) -> float:
    shape = setup.shape
    counts = workload_counts(shape, asked, budget, max_rows, shared, setup.graphs, level)
    steps = gather(shape, counts, setup.model)
    return float(step_seconds(setup, steps).sum()) + idle_seconds(setup, steps)
