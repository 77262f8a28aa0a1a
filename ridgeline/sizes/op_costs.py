"""FLOPs and bytes of every op, counted exactly from shapes, in plain Python.

Plan, CLI, scheduler and benchmarks read these numbers without torch; the op files import the same cases and costs, so
that the correctness test, the micro-benchmark and the roofline agree. Ops on logits are in sampling_costs.py. Nothing here
knows how fast a machine is, or which kernel runs.

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
SCALE_BYTES = 4                      # scales of quantised tensors: float32
E4M3 = "float8_e4m3fn"
INT8 = "int8"
QUANTISED_BYTES = {E4M3: 1, INT8: 1}     # dtypes of a KV cache that has scales
KVDtype = str | tuple[str | None, str | None] | None     # of K and V together or apart; None: that of the activations

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

def rms_norm_cost(*, tokens: int, width: int, residual: bool, element_bytes: int, weight_offset: float = 0.0) -> Cost:
    """An offset is added to the weight once, however many tokens there are: that is not counted."""
    per_token = 4 * width + 3                            # square, sum, scale, weight; mean, + eps, root
    flops = tokens * (per_token + (width if residual else 0))
    passes = 4 if residual else 2                        # x, out; and the residual in and out
    return Cost(flops, (passes * tokens * width + width) * element_bytes)


RMS_NORM_CASES = (
    Case("one", {"tokens": 1, "width": 64, "residual": False}),
    Case("residual", {"tokens": 3, "width": 128, "residual": True}),
    Case("odd", {"tokens": 5, "width": 77, "residual": True}),
    Case("offset", {"tokens": 3, "width": 96, "residual": True, "weight_offset": 1.0}),
    Case("decode-32", {"tokens": 32, "width": 576, "residual": True}, timed=True),
    Case("prefill-512", {"tokens": 512, "width": 576, "residual": True}, timed=True),
)


# ── the vocabulary's two ends ────────────────────────────────────────────────────────────────────────────────────────

def embedding_cost(*, tokens: int, vocab: int, width: int, scale: float | None, element_bytes: int) -> Cost:
    flops = 0 if scale is None else tokens * width
    return Cost(flops, tokens * (2 * width * element_bytes + INDEX_BYTES))


def soft_cap_cost(*, rows: int, vocab: int, element_bytes: int) -> Cost:
    return Cost(3 * rows * vocab, 2 * rows * vocab * element_bytes)      # divided, tangent, multiplied


EMBEDDING_CASES = (
    Case("one", {"tokens": 1, "vocab": 7, "width": 64, "scale": None}),
    Case("odd", {"tokens": 5, "vocab": 31, "width": 77, "scale": 8.75}),
    Case("decode-32", {"tokens": 32, "vocab": 49152, "width": 576, "scale": None}, timed=True),
)
SOFT_CAP_CASES = (
    Case("one", {"rows": 1, "vocab": 64}),
    Case("odd", {"rows": 3, "vocab": 77}),
    Case("decode-32", {"rows": 32, "vocab": 49152}, timed=True),
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

# x/(1+exp(-x));  0.5·x·(1+tanh(c·(x+0.044715·x³)));  0.5·x·(1+erf(x/√2));  x·x;  (expm1(min(x, ε)) − x)·α + β·x, or α·x² + β·x
ACTIVATION_FLOPS = {"silu": 4, "gelu_tanh": 9, "gelu": 5, "relu": 1, "relu2": 2, "xielu": 6}


def gated_activation_cost(*, tokens: int, intermediate: int, kind: str, element_bytes: int) -> Cost:
    values = tokens * intermediate
    return Cost(values * (ACTIVATION_FLOPS[kind] + 1), 3 * values * element_bytes)


GATED_ACTIVATION_CASES = (
    Case("silu", {"tokens": 3, "intermediate": 32, "kind": "silu"}),
    Case("gelu-tanh", {"tokens": 3, "intermediate": 32, "kind": "gelu_tanh"}),
    Case("odd-gelu", {"tokens": 5, "intermediate": 19, "kind": "gelu"}),
    Case("relu2", {"tokens": 3, "intermediate": 32, "kind": "relu2"}),
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


def rotary_write_cost(
    *, tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, block_size: int, norm: bool,
    element_bytes: int, kv_element_bytes: float | None = None,
) -> Cost:
    """Norm of q and k, rotation and the write of K and V, each value read and written once."""
    turned = tokens * (heads + kv_heads)
    flops = turned * (3 * rotary_dim + (4 * head_dim + 3 if norm else 0))
    queries, values = tokens * heads * head_dim, 2 * tokens * kv_heads * head_dim
    written = kv_bytes(
        tokens=tokens, layers=1, kv_heads=kv_heads, head_dim=head_dim,
        element_bytes=element_bytes if kv_element_bytes is None else kv_element_bytes,
    )
    table = tokens * rotary_dim * max(element_bytes, 4)
    return Cost(flops, (2 * queries + values) * element_bytes + written + table + 2 * tokens * INDEX_BYTES)


def _rotary_write(tokens: int, norm: bool = False, **changes: int) -> dict[str, Any]:
    return {"tokens": tokens, **_ROTARY, "block_size": 16, "norm": norm, **changes}


ROTARY_WRITE_CASES = (
    Case("one", _rotary_write(1, heads=2, kv_heads=1, head_dim=8, rotary_dim=8, block_size=4)),
    Case("norm", _rotary_write(3, norm=True, heads=4, kv_heads=2, head_dim=16, rotary_dim=16, block_size=4)),
    Case("partial", _rotary_write(4, heads=4, kv_heads=4, head_dim=16, rotary_dim=8, block_size=4)),
    Case("odd-norm", _rotary_write(7, norm=True, heads=3, kv_heads=1, head_dim=10, rotary_dim=6, block_size=5)),
    Case("decode-32", _rotary_write(32), timed=True),
    Case("prefill-512", _rotary_write(512), timed=True),
)


def visible_pairs(query_len: int, kv_len: int, window: int | None) -> int:
    """How many (query, key) pairs of a row the mask lets through: sum over queries of min(own position + 1, window)."""
    first = kv_len - query_len + 1                       # keys that the first query sees without a window
    if window is not None and window < 0:                # chunks of -window positions: each query sees those of its own
        def before(count: int) -> int:
            """Pairs of the first `count` queries of a row."""
            whole, rest = divmod(count, -window)
            return whole * (-window * (1 - window) // 2) + rest * (rest + 1) // 2

        return before(kv_len) - before(kv_len - query_len)
    if window is None or window >= kv_len:
        return query_len * (first + kv_len) // 2
    growing = max(0, window - first)                     # queries that still see everything before them
    return growing * (first + first + growing - 1) // 2 + (query_len - growing) * window


def visible_keys(query_len: int, kv_len: int, window: int | None) -> int:
    """How many KV positions at least one query of a row sees."""
    if window is not None and window < 0:
        return kv_len - (kv_len - query_len) // -window * -window
    return kv_len if window is None else min(kv_len, query_len + window - 1)


@dataclass(frozen=True, slots=True)
class Attended:
    """All that the cost of attention asks of a batch's rows."""

    rows: int = 0
    queries: int = 0
    pairs: int = 0                   # of a query and a key that it sees
    keys: int = 0                    # that are read, each once for all queries and heads of its row
    blocks: int = 0                  # in which they lie

    @classmethod
    def of(cls, rows: Rows, window: int | None, block_size: int) -> Attended:
        seen = [visible_keys(query_len, kv_len, window) if query_len else 0 for query_len, kv_len in rows]
        return cls(
            len(rows),
            sum(query_len for query_len, _ in rows),
            sum(visible_pairs(query_len, kv_len, window) for query_len, kv_len in rows),
            sum(seen),
            sum(
                (kv_len - 1) // block_size - (kv_len - keys) // block_size + 1
                for keys, (query_len, kv_len) in zip(seen, rows, strict=True)
                if query_len and kv_len
            ),
        )


def dtypes_of(kv_dtype: KVDtype) -> tuple[str | None, str | None]:
    """Of K and of V; None: that of the activations."""
    return kv_dtype if isinstance(kv_dtype, tuple) else (kv_dtype, kv_dtype)


def vector_bytes(dtype: str | None, dim: int, element_bytes: int) -> int:
    """Of one key or value of one head; a quantised one has a scale."""
    return dim * element_bytes if dtype is None else dim * QUANTISED_BYTES[dtype] + SCALE_BYTES


def paged_attention_cost(
    *,
    rows: Rows | Attended,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    element_bytes: int,
    kv_element_bytes: float | None = None,
    scattered: bool = False,
    shared: Sequence[tuple[Sequence[int], int]] = (),
    kv_dtype: KVDtype = None,
    sinks: bool = False,
) -> Cost:
    """Each KV byte is read once per row, however many heads and queries look at it; once for all rows that share it.

    `scattered`: rows have their tables in other places; `shared`: (rows, tokens of their common prefix); `kv_dtype`:
    of a quantised cache, with a scale for each token and head.
    """
    attended = rows if isinstance(rows, Attended) else Attended.of(rows, window, block_size)
    queries, pairs, blocks = attended.queries, attended.pairs, attended.blocks
    keys = attended.keys - sum((len(members) - 1) * tokens for members, tokens in shared)
    # Per pair and head: two dot products; scale, maximum, subtraction, exponential, sum; tanh and two scalings.
    per_pair = 4 * head_dim + 5 + (3 if softcap is not None else 0)
    flops = heads * (pairs * per_pair + queries * (head_dim + 2 * sinks))
    kv = kv_bytes(
        tokens=keys, layers=1, kv_heads=kv_heads, head_dim=head_dim,
        element_bytes=element_bytes if kv_element_bytes is None else kv_element_bytes,
    )
    if kv_dtype is not None:
        kv = sum(keys * kv_heads * vector_bytes(each, head_dim, element_bytes) for each in dtypes_of(kv_dtype))
    numbers = 2 + scattered                              # per row: its length, its queries, its table
    tables = (blocks + numbers * attended.rows + 1) * LENGTH_BYTES
    tables += heads * SCALE_BYTES * sinks
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
    # Chunks: rows that end inside one, at its end and behind it; queries of several chunks in one tile.
    Case("chunks", _attention([(1, 14), (1, 15), (1, 16), (1, 3), (6, 17), (9, 9)], window=-5)),
    Case("long-chunks", _attention([(1, 90), (1, 41), (40, 80), (45, 45)], window=-20)),
    Case("long-window", _attention([(1, 90), (40, 80), (45, 45)], window=20)),
    # Wide heads have narrow tiles of keys: a whole tile may lie behind the window of the tile's last query.
    Case("wide-window", _attention([(70, 75)], heads=1, kv_heads=1, head_dim=144, window=3)),
    Case("one-kv-head", _attention([(1, 5), (3, 7)], heads=6, kv_heads=1)),
    # Heads and blocks as TMA wants them (more of it in test_kernel_prefill_hopper.py).
    Case("tiles", _attention([(1, 9), (5, 21), (2, 35)], head_dim=64, block_size=16)),
    Case("no-groups", _attention([(1, 5), (1, 4), (3, 7)], heads=3, kv_heads=3)),
    Case("odd", _attention([(1, 11), (3, 8), (1, 2)], heads=3, kv_heads=1, head_dim=20, block_size=3)),
    Case("padded", _attention([(1, 12), (1, 0), (1, 5), (1, 0)], scattered=True)),
    Case("decodes-first", _attention([(1, 70), (1, 0), (1, 9), (5, 40), (1, 3)], scattered=True)),
    Case("many-shares", _attention([(1, 200), (1, 65), (1, 2)], block_size=16)),
    Case("many-shares-window", _attention([(1, 300), (1, 65)], heads=6, window=150, softcap=2.0)),
    # Groups of rows with one prefix each, of one tile and of several (128 pairs of 64 heads are two rows), and others.
    Case("shared", _attention(
        [(1, 21), (1, 20), (1, 3), (1, 9), (1, 17)], scattered=True, shared=(((0, 1, 4), 16), ((2,), 0)),
    )),
    Case("shared-long", _attention(
        [(1, 290), (1, 30), (1, 281), (1, 20), (1, 280)], kv_heads=1, heads=64, head_dim=8, block_size=8,
        shared=(((0, 2, 4), 272), ((1, 3), 16)), softcap=4.0,
    )),
    Case("fp8", _attention([(1, 12), (1, 70), (3, 8)], kv_dtype=E4M3), dtypes=("float64", "bfloat16")),
    Case("fp8-shared", _attention(
        [(1, 12), (1, 70), (3, 8)], kv_dtype=E4M3, scattered=True, shared=(((0, 1), 8),),
    ), dtypes=("float64", "bfloat16")),
    # Heads of which half fills a tensor core: two values are read as one.
    Case("fp8-pairs", _attention(
        [(1, 12), (1, 70), (1, 0), (3, 8)], head_dim=40, block_size=3, softcap=3.0, kv_dtype=E4M3,
    ), dtypes=("float64", "bfloat16")),
    Case("fp8-pairs-window", _attention(
        [(1, 12), (1, 70), (3, 8)], head_dim=32, window=6, kv_dtype=E4M3,
    ), dtypes=("float64", "bfloat16")),
    Case("int8", _attention([(1, 12), (1, 70), (3, 8)], kv_dtype=INT8), dtypes=("float64", "bfloat16")),
    Case("int8-pairs", _attention(
        [(1, 12), (1, 70), (1, 0), (3, 8)], head_dim=40, block_size=3, softcap=3.0, kv_dtype=INT8,
    ), dtypes=("float64", "bfloat16")),
    Case("int8-shared", _attention(
        [(1, 12), (1, 70), (3, 8)], head_dim=32, kv_dtype=INT8, scattered=True, shared=(((0, 1), 8),),
    ), dtypes=("float64", "bfloat16")),
    Case("apart", _attention([(1, 12), (1, 70), (3, 8)], head_dim=32, kv_dtype=(INT8, E4M3)), dtypes=("float64", "bfloat16")),
    Case("wide-keys", _attention([(1, 12), (1, 70), (3, 8)], window=6, kv_dtype=(None, INT8)), dtypes=("float64", "bfloat16")),
    Case("wide-values", _attention(
        [(1, 12), (1, 70), (3, 8)], head_dim=32, kv_dtype=(E4M3, None), softcap=3.0,
    ), dtypes=("float64", "bfloat16")),
    Case("sinks", _attention([(1, 10), (5, 5), (4, 9), (2, 13)], sinks=True)),
    Case("sinks-shares", _attention([(1, 300), (1, 65), (1, 2)], block_size=16, window=150, sinks=True)),
    Case("decode-1", _attention([(1, 256)], **_SMOLLM2), timed=True),
    Case("decode-8", _attention([(1, 250 + row) for row in range(8)], **_SMOLLM2), timed=True),
    Case("decode-32", _attention([(1, 240 + row) for row in range(32)], **_SMOLLM2), timed=True),
    Case("prefill-512", _attention([(512, 512)], **_SMOLLM2), timed=True),
)


def decode_attention_cost(
    *, rows: Rows, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, block_size: int, norm: bool,
    element_bytes: int, **attention: Any,
) -> Cost:
    """Rotation, write and attention together: queries stay on the chip in between, and so do the newest K and V."""
    tokens = len(rows)
    write = rotary_write_cost(
        tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, rotary_dim=rotary_dim, block_size=block_size,
        norm=norm, element_bytes=element_bytes,
    )
    read = paged_attention_cost(
        rows=rows, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, element_bytes=element_bytes,
        **attention,
    )
    newest = kv_bytes(tokens=tokens, layers=1, kv_heads=kv_heads, head_dim=head_dim, element_bytes=element_bytes)
    between = 2 * tokens * heads * head_dim * element_bytes + newest
    return Cost(write.flops + read.flops, write.bytes + read.bytes - between)


def _decode(lengths: Sequence[int], **changes: Any) -> dict[str, Any]:
    return _attention([(1, length) for length in lengths], **{"rotary_dim": 16, "norm": False, **changes})


DECODE_ATTENTION_CASES = (
    Case("one", _decode([9])),
    Case("one-first", _decode([1], norm=True)),
    Case("one-alone-in-its-share", _decode([65], norm=True, block_size=16)),
    Case("one-long", _decode([1900], norm=True, heads=16, kv_heads=2, block_size=16)),       # several tiles in a share
    Case("one-window-softcap", _decode([77], window=50, softcap=3.0, scattered=True)),
    Case("one-sinks", _decode([150], sinks=True, head_dim=10, rotary_dim=6, block_size=5, norm=True)),
    Case("one-padded", _decode([0])),
    Case("first-of-a-block", _decode([1, 5, 16, 17], norm=True)),
    Case("partial", _decode([6, 12], rotary_dim=8, heads=4, kv_heads=4)),
    Case("odd-norm", _decode([11, 8, 2], rotary_dim=6, norm=True, heads=3, kv_heads=1, head_dim=10, block_size=5)),
    Case("wide-group", _decode([7, 20], heads=20, kv_heads=1, head_dim=24, rotary_dim=24, norm=True)),
    Case("window-softcap", _decode([14, 3, 18, 40], window=5, softcap=3.0)),
    Case("padded", _decode([12, 0, 5, 0], scattered=True)),
    Case("sinks", _decode([12, 0, 5, 200], sinks=True)),
    Case("many-shares", _decode([400, 65, 2], heads=64, kv_heads=1, block_size=16, norm=True)),  # merged in two turns
    Case("shared", _decode([21, 20, 3, 9, 17], scattered=True, shared=(((0, 1, 4), 16), ((2,), 0)), norm=True)),
    Case("shared-long", _decode(
        [290, 30, 281, 20, 280], kv_heads=1, heads=64, head_dim=8, rotary_dim=8, block_size=8,
        shared=(((0, 2, 4), 272), ((1, 3), 16)), softcap=4.0,
    )),
    Case("decode-32", _decode([240 + row for row in range(32)], rotary_dim=64, **_SMOLLM2), timed=True),
)


# ── linears ──────────────────────────────────────────────────────────────────────────────────────────────────────────

def linear_cost(
    *, tokens: int, inputs: int, outputs: int, weight_bytes: float, element_bytes: int, bias: bool = False
) -> Cost:
    moved = round(inputs * outputs * weight_bytes) + tokens * (inputs + outputs) * element_bytes
    added = outputs if bias else 0
    return Cost(tokens * (2 * inputs * outputs + added), moved + added * element_bytes)


LINEAR_CASES = (
    Case("one", {"tokens": 1, "inputs": 16, "outputs": 4, "bias": False}),
    Case("one-odd", {"tokens": 1, "inputs": 37, "outputs": 7, "bias": True}),
    Case("one-wide", {"tokens": 1, "inputs": 576, "outputs": 1003, "bias": True}),
    Case("odd", {"tokens": 3, "inputs": 37, "outputs": 7, "bias": True}),
    Case("few", {"tokens": 5, "inputs": 96, "outputs": 70, "bias": True}),
    Case("many", {"tokens": 130, "inputs": 80, "outputs": 65, "bias": False}),
    Case("decode-1", {"tokens": 1, "inputs": 576, "outputs": 3072, "bias": False}, timed=True),
)


def normed_linear_cost(
    *, tokens: int, inputs: int, outputs: int, residual: bool, bias: bool, gate: str | None, element_bytes: int
) -> Cost:
    """Values between norm, GEMM and activation are not moved. With a gate, `outputs` counts the pairs."""
    rows = outputs if gate is None else 2 * outputs
    norm = rms_norm_cost(tokens=tokens, width=inputs, residual=residual, element_bytes=element_bytes)
    product = linear_cost(
        tokens=tokens, inputs=inputs, outputs=rows, weight_bytes=element_bytes, element_bytes=element_bytes
    )
    total, inner = norm + product, 2 * tokens * inputs
    if gate is not None:
        total += gated_activation_cost(tokens=tokens, intermediate=outputs, kind=gate, element_bytes=element_bytes)
        inner += 2 * tokens * rows
    return Cost(total.flops, total.bytes - inner * element_bytes)


NORMED_LINEAR_CASES = tuple(
    Case(name, {
        "tokens": tokens, "inputs": inputs, "outputs": outputs, "residual": residual, "bias": bias, "gate": gate,
    }, timed=timed)
    for name, tokens, inputs, outputs, residual, bias, gate, timed in (
        ("one", 1, 64, 64, True, False, None, False),
        ("one-first", 1, 80, 70, False, False, None, False),
        ("one-gate", 1, 96, 67, True, False, "silu", False),
        ("one-gate-bias", 1, 64, 64, True, True, "gelu_tanh", False),
        ("odd", 3, 37, 7, True, True, None, False),
        ("few-gate", 5, 80, 70, True, True, "gelu", False),
        ("decode-32", 32, 576, 1536, True, False, "silu", True),
    )
)


# Of 32 weights, or of 256 of the K types, as a GGUF file stores them.
BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}


def block_linear_cost(
    *, tokens: int, inputs: int, outputs: int, kind: str, bias: bool, integers: bool, element_bytes: int
) -> Cost:
    each = {"INT4": 24 / 32, "INT8": 36 / 32, "E4M3": 36 / 32, "E2M1": 20 / 32, "NF4": 20 / 32, "F16": 2, "BF16": 2, "F32": 4}
    weight_bytes = BLOCK_BYTES[kind] / (256 if kind.endswith("_K") else 32) if kind in BLOCK_BYTES else each[kind]
    return linear_cost(
        tokens=tokens, inputs=inputs, outputs=outputs, weight_bytes=weight_bytes, element_bytes=element_bytes
    )


BLOCK_LINEAR_CASES = tuple(
    Case(f"{kind}-{'int8' if integers else 'float32'}-{name}", {
        "tokens": tokens, "inputs": inputs, "outputs": outputs, "kind": kind, "bias": outputs % 2 == 1, "integers": integers,
    }, dtypes=("float32",), timed=outputs == 3072)
    for kind in (*BLOCK_BYTES, "INT4", "INT8", "E4M3", "E2M1", "NF4", "F16", "BF16", "F32")
    for integers in (True, False)
    for name, tokens, inputs, outputs in (
        ("one", 1, 256, 1), ("odd", 7, 512, 9), ("eight", 8, 256, 36), ("many-odd", 15, 768, 49),
        *((("decode-1", 1, 768, 3072),) if kind in ("Q4_1", "Q8_0", "Q4_K", "Q6_K") and integers else ()),
    )
)
