"""What every op has to compute and to move, counted exactly from shapes, in plain Python.

Plan, CLI, scheduler and benchmarks read these numbers without torch; the op files import the same cases and costs, so
that the correctness test, the micro-benchmark and the roofline speak of the same thing. Nothing here knows how fast a
machine is, or which kernel runs.

Conventions: a multiply-add is two FLOPs; an exponential, a hyperbolic tangent, a root, a division and a comparison are
one each. Bytes are the traffic of a perfect kernel: every input is read once, every output written once, and nothing
stays on the chip from one op to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}          # every dtype the engine computes in
INDEX_BYTES = 8                      # slots, positions, token ids: int64
LENGTH_BYTES = 4                     # block tables, prefix sums, lengths: int32

Rows = Sequence[tuple[int, int]]     # per batch row: tokens computed in this step, and KV length including them


@dataclass(frozen=True, slots=True)
class Cost:
    flops: int = 0
    bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.flops * times, self.bytes * times)


@dataclass(frozen=True, slots=True)
class Case:
    """A named set of sizes at which an op is checked; the timed ones are the micro-benchmark's, of realistic size."""

    name: str
    sizes: Mapping[str, Any]
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")
    timed: bool = False


# ── RMS norm ─────────────────────────────────────────────────────────────────────────────────────────────────────────

def rms_norm_cost(*, tokens: int, width: int, residual: bool, element_bytes: int) -> Cost:
    per_token = 4 * width + 3                            # square, sum, scale, weight; mean, + eps, root
    flops = tokens * (per_token + (width if residual else 0))
    passes = 4 if residual else 2                        # x, out; and the residual in and out
    return Cost(flops, (passes * tokens * width + width) * element_bytes)


RMS_NORM_CASES = (
    Case("one", {"tokens": 1, "width": 64, "residual": False}),
    Case("residual", {"tokens": 3, "width": 128, "residual": True}),
    Case("odd", {"tokens": 5, "width": 77, "residual": True}),
    Case("decode-32", {"tokens": 32, "width": 576, "residual": True}, timed=True),
    Case("prefill-512", {"tokens": 512, "width": 576, "residual": True}, timed=True),
)


# ── rotary ───────────────────────────────────────────────────────────────────────────────────────────────────────────

def rotary_cost(
    *, tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, element_bytes: int
) -> Cost:
    """Only the rotated part counts: the rest of a head stays where it is."""
    rotated = tokens * (heads + kv_heads) * rotary_dim
    table = tokens * rotary_dim * max(element_bytes, 4)  # cosines and sines are never narrower than float32
    return Cost(3 * rotated, 2 * rotated * element_bytes + table + tokens * INDEX_BYTES)


_ROTARY = {"heads": 9, "kv_heads": 3, "head_dim": 64, "rotary_dim": 64}
ROTARY_CASES = (
    Case("one", {"tokens": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "rotary_dim": 8}),
    Case("partial", {"tokens": 4, "heads": 4, "kv_heads": 4, "head_dim": 16, "rotary_dim": 8}),
    Case("odd", {"tokens": 7, "heads": 3, "kv_heads": 1, "head_dim": 10, "rotary_dim": 6}),
    Case("decode-32", {"tokens": 32, **_ROTARY}, timed=True),
    Case("prefill-512", {"tokens": 512, **_ROTARY}, timed=True),
)


# ── gated activation ─────────────────────────────────────────────────────────────────────────────────────────────────

# x/(1+exp(-x));  0.5·x·(1+tanh(c·(x+0.044715·x³)));  0.5·x·(1+erf(x/√2))
ACTIVATION_FLOPS = {"silu": 4, "gelu_tanh": 9, "gelu": 5}


def gated_activation_cost(*, tokens: int, intermediate: int, kind: str, element_bytes: int) -> Cost:
    values = tokens * intermediate
    return Cost(values * (ACTIVATION_FLOPS[kind] + 1), 3 * values * element_bytes)


GATED_ACTIVATION_CASES = (
    Case("silu", {"tokens": 3, "intermediate": 32, "kind": "silu"}),
    Case("gelu-tanh", {"tokens": 3, "intermediate": 32, "kind": "gelu_tanh"}),
    Case("odd-gelu", {"tokens": 5, "intermediate": 19, "kind": "gelu"}),
    Case("decode-32", {"tokens": 32, "intermediate": 1536, "kind": "silu"}, timed=True),
    Case("prefill-512", {"tokens": 512, "intermediate": 1536, "kind": "silu"}, timed=True),
)


# ── KV cache: writing and attending ──────────────────────────────────────────────────────────────────────────────────

def kv_bytes(*, tokens: int, layers: int, kv_heads: int, head_dim: int, element_bytes: float) -> int:
    """Bytes of K and V that `tokens` tokens keep in `layers` layers."""
    return round(2 * tokens * layers * kv_heads * head_dim * element_bytes)


def kv_write_cost(*, tokens: int, kv_heads: int, head_dim: int, block_size: int, element_bytes: int) -> Cost:
    values = 2 * tokens * kv_heads * head_dim
    return Cost(0, 2 * values * element_bytes + tokens * INDEX_BYTES)


KV_WRITE_CASES = (
    Case("one", {"tokens": 1, "kv_heads": 1, "head_dim": 8, "block_size": 4}),
    Case("odd", {"tokens": 7, "kv_heads": 3, "head_dim": 10, "block_size": 5}),
    Case("decode-32", {"tokens": 32, "kv_heads": 3, "head_dim": 64, "block_size": 16}, timed=True),
    Case("prefill-512", {"tokens": 512, "kv_heads": 3, "head_dim": 64, "block_size": 16}, timed=True),
)


def visible_pairs(query_len: int, kv_len: int, window: int | None) -> int:
    """How many (query, key) pairs of a row the mask lets through: sum over queries of min(own position + 1, window)."""
    first = kv_len - query_len + 1                       # keys that the first query sees without a window
    if window is None or window >= kv_len:
        return query_len * (first + kv_len) // 2
    growing = max(0, window - first)                     # queries that still see everything before them
    return growing * (first + first + growing - 1) // 2 + (query_len - growing) * window


def visible_keys(query_len: int, kv_len: int, window: int | None) -> int:
    """How many KV positions at least one query of a row sees."""
    return kv_len if window is None else min(kv_len, query_len + window - 1)


def paged_attention_cost(
    *,
    rows: Rows,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    element_bytes: int,
    kv_element_bytes: float | None = None,
) -> Cost:
    """Each KV byte is read once per row, however many heads and queries look at it."""
    queries = sum(query_len for query_len, _ in rows)
    pairs = sum(visible_pairs(query_len, kv_len, window) for query_len, kv_len in rows)
    keys = sum(visible_keys(query_len, kv_len, window) for query_len, kv_len in rows)
    blocks = sum(
        (kv_len - 1) // block_size - (kv_len - visible_keys(query_len, kv_len, window)) // block_size + 1
        for query_len, kv_len in rows
        if query_len
    )
    # Per pair and head: two dot products; scale, maximum, subtraction, exponential, sum; tanh and two scalings.
    per_pair = 4 * head_dim + 5 + (3 if softcap is not None else 0)
    flops = heads * (pairs * per_pair + queries * head_dim)
    kv = kv_bytes(
        tokens=keys, layers=1, kv_heads=kv_heads, head_dim=head_dim,
        element_bytes=element_bytes if kv_element_bytes is None else kv_element_bytes,
    )
    tables = (blocks + 2 * len(rows) + 1) * LENGTH_BYTES
    return Cost(flops, 2 * queries * heads * head_dim * element_bytes + kv + tables)


def _attention(rows: Rows, **changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "heads": 4, "kv_heads": 2, "head_dim": 16, "block_size": 4, "window": None, "softcap": None,
    }
    return {"rows": tuple(rows), **sizes, **changes}


_SMOLLM2 = {"heads": 9, "kv_heads": 3, "head_dim": 64, "block_size": 16}
PAGED_ATTENTION_CASES = (
    Case("decode-one", _attention([(1, 9)])),
    Case("decode", _attention([(1, 1), (1, 6), (1, 8), (1, 17)])),
    Case("prompt", _attention([(6, 6)])),
    Case("chunk", _attention([(3, 11)])),
    Case("mixed", _attention([(1, 10), (5, 5), (1, 3), (4, 9), (2, 13)])),
    Case("window", _attention([(1, 14), (1, 3), (6, 15), (9, 9), (1, 18)], window=5)),
    Case("softcap", _attention([(1, 7), (1, 12), (4, 10), (5, 5)], softcap=3.0)),
    Case("window-softcap", _attention([(1, 13), (1, 15), (7, 12)], window=6, softcap=2.0)),
    Case("long", _attention([(1, 75), (40, 70), (2, 3)])),               # several tiles of keys and of queries
    Case("long-window", _attention([(1, 90), (40, 80), (45, 45)], window=20)),
    # Wide heads have narrow tiles of keys: a whole tile may lie behind the window of the tile's last query.
    Case("wide-window", _attention([(70, 75)], heads=1, kv_heads=1, head_dim=144, window=3)),
    Case("one-kv-head", _attention([(1, 5), (3, 7)], heads=6, kv_heads=1)),
    Case("no-groups", _attention([(1, 5), (1, 4), (3, 7)], heads=3, kv_heads=3)),
    Case("odd", _attention([(1, 11), (3, 8), (1, 2)], heads=3, kv_heads=1, head_dim=20, block_size=3)),
    Case("decode-1", _attention([(1, 256)], **_SMOLLM2), timed=True),
    Case("decode-8", _attention([(1, 250 + row) for row in range(8)], **_SMOLLM2), timed=True),
    Case("decode-32", _attention([(1, 240 + row) for row in range(32)], **_SMOLLM2), timed=True),
    Case("prefill-512", _attention([(512, 512)], **_SMOLLM2), timed=True),
)


# ── logits ───────────────────────────────────────────────────────────────────────────────────────────────────────────

def logprobs_cost(*, rows: int, vocab: int, top_k: int, element_bytes: int) -> Cost:
    """Softmax statistics (maximum, subtraction, exponential, sum), the rank and the k best, in one reading."""
    flops = rows * vocab * 6
    outputs = rows * (element_bytes + INDEX_BYTES) * (1 + top_k)
    return Cost(flops, rows * vocab * element_bytes + rows * INDEX_BYTES + outputs)


LOGPROBS_CASES = (
    Case("chosen-only", {"rows": 2, "vocab": 16, "top_k": 0}, dtypes=("float64", "float32")),
    Case("odd", {"rows": 3, "vocab": 37, "top_k": 5}, dtypes=("float64", "float32")),
    Case("decode-32", {"rows": 32, "vocab": 49152, "top_k": 5}, dtypes=("float32",), timed=True),
)


def sample_cost(*, rows: int, vocab: int, kind: str, element_bytes: int) -> Cost:
    """Greedy: a comparison per id. Random: subtraction, division, exponential, logarithm, division, comparison. The
    integer work of the noise and the sorting of the filters are not FLOPs."""
    flops = rows * vocab * (1 if kind == "greedy" else 6)
    return Cost(flops, rows * vocab * element_bytes + rows * (INDEX_BYTES + 1))


SAMPLE_CASES = tuple(
    Case(f"{kind}{suffix}", {"rows": rows, "vocab": vocab, "kind": kind}, dtypes=("float64", *dtypes), timed=timed)
    for kind in ("greedy", "random", "filtered", "mixed")
    for suffix, rows, vocab, dtypes, timed in (
        ("", 6, 37, ("float32", "bfloat16"), False),
        ("-32", 32, 49152, ("float32",), True),
    )
)


# ── a whole step ─────────────────────────────────────────────────────────────────────────────────────────────────────

def linear_cost(*, tokens: int, inputs: int, outputs: int, weight_bytes: float, element_bytes: int) -> Cost:
    moved = round(inputs * outputs * weight_bytes) + tokens * (inputs + outputs) * element_bytes
    return Cost(2 * tokens * inputs * outputs, moved)


LINEAR_CASES = (
    Case("one", {"tokens": 1, "inputs": 16, "outputs": 4, "bias": False}),
    Case("one-odd", {"tokens": 1, "inputs": 37, "outputs": 7, "bias": True}),
    Case("one-wide", {"tokens": 1, "inputs": 576, "outputs": 1003, "bias": True}),
    Case("odd", {"tokens": 3, "inputs": 37, "outputs": 7, "bias": True}),
    Case("decode-1", {"tokens": 1, "inputs": 576, "outputs": 3072, "bias": False}, timed=True),
)


def block_linear_cost(
    *, tokens: int, inputs: int, outputs: int, kind: str, bias: bool, element_bytes: int
) -> Cost:
    return linear_cost(
        tokens=tokens, inputs=inputs, outputs=outputs, weight_bytes={"Q4_1": 20, "Q8_0": 34}[kind] / 32,
        element_bytes=element_bytes,
    )  # fmt: skip


BLOCK_LINEAR_CASES = tuple(
    Case(f"{kind}-{name}", {
        "tokens": tokens, "inputs": inputs, "outputs": outputs, "kind": kind, "bias": outputs == 7,
    }, dtypes=("float32",), timed=outputs == 3072)
    for kind in ("Q4_1", "Q8_0")
    for name, tokens, inputs, outputs in (
        ("one", 1, 32, 1), ("one-odd", 1, 96, 7), ("odd", 7, 64, 9), ("eight", 8, 64, 4), ("many-odd", 15, 96, 7),
        ("decode-1", 1, 576, 3072),
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A dense decoder with gated MLPs, as far as its cost goes. Bytes per element may be fractions (packed formats)."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    activation_bytes: int = 2
    window: int | None = None        # of `window_layers` layers; the others see everything
    window_layers: int = 0
    block_size: int = 16

    @property
    def linear_weights(self) -> int:
        """Elements of the layers' matrices; embedding and head are not among them."""
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (query + 2 * key_value) + query * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes(
            tokens=1, layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim, element_bytes=self.kv_bytes
        )


def decoder_step_parts(model: DecoderShape, rows: Rows, logits_rows: int | None = None) -> dict[str, Cost]:
    """Cost of one forward pass by part. `logits_rows`: positions that need logits; by default one per row."""
    tokens = sum(query_len for query_len, _ in rows)
    logits_rows = len(rows) if logits_rows is None else logits_rows
    element_bytes = model.activation_bytes
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim

    def linear(inputs: int, outputs: int, count: int = tokens) -> Cost:
        return linear_cost(
            tokens=count, inputs=inputs, outputs=outputs,
            weight_bytes=model.weight_bytes, element_bytes=element_bytes,
        )

    def attention(window: int | None) -> Cost:
        return paged_attention_cost(
            rows=rows, heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim,
            block_size=model.block_size, window=window, softcap=None,
            element_bytes=element_bytes, kv_element_bytes=model.kv_bytes,
        )

    norm = rms_norm_cost(tokens=tokens, width=model.hidden, residual=True, element_bytes=element_bytes)
    rotary = rotary_cost(
        tokens=tokens, heads=model.heads, kv_heads=model.kv_heads, head_dim=model.head_dim,
        rotary_dim=model.head_dim, element_bytes=element_bytes,
    )
    activation = gated_activation_cost(
        tokens=tokens, intermediate=model.intermediate, kind="silu", element_bytes=element_bytes
    )
    new_kv = kv_bytes(
        tokens=tokens, layers=1, kv_heads=model.kv_heads, head_dim=model.head_dim, element_bytes=model.kv_bytes
    )
    write = Cost(0, new_kv + 2 * tokens * key_value * element_bytes + tokens * INDEX_BYTES)
    matrices = (
        linear(model.hidden, query + 2 * key_value) + linear(query, model.hidden)
        + linear(model.hidden, 2 * model.intermediate) + linear(model.intermediate, model.hidden)
    )
    embedded = round(tokens * model.hidden * model.weight_bytes) + tokens * model.hidden * element_bytes
    full_layers = model.layers - model.window_layers
    return {
        "embedding": Cost(0, embedded + tokens * INDEX_BYTES),
        "linears": matrices * model.layers,
        "attention": attention(None) * full_layers + attention(model.window) * model.window_layers,
        "kv_write": write * model.layers,
        "norms": norm * (2 * model.layers + 1),
        "rotary": rotary * model.layers,
        "activation": activation * model.layers,
        "head": linear(model.hidden, model.vocab, logits_rows),
    }


def decoder_step(model: DecoderShape, rows: Rows, logits_rows: int | None = None) -> Cost:
    """Cost of one forward pass of `model` over `rows` of (tokens, KV length including them)."""
    return sum(decoder_step_parts(model, rows, logits_rows).values(), Cost())
