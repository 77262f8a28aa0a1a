"""FLOPs and bytes of the ops of latent attention, and the cases at which they are checked and timed, as in op_costs.py."""

from __future__ import annotations

from typing import Any

from ridgeline.sizes.op_costs import (
    E4M3,
    INDEX_BYTES,
    LENGTH_BYTES,
    QUANTISED_BYTES,
    SCALE_BYTES,
    Attended,
    Case,
    Cost,
    Rows,
    visible_pairs,
)

FEW_QUERIES = 16                     # of a row: up to here attention computes against the latent itself
SOFTMAX = 5                          # FLOPs per pair and head: scale, maximum, subtraction, exponential, sum


def near_flops(rank: int, rope: int) -> int:
    """Of a pair and head against the latent itself: two dot products with it, and one with the rotated key."""
    return 2 * (2 * rank + rope) + SOFTMAX


def wide_flops(nope: int, rope: int, value: int) -> int:
    """Of a pair and head whose key and value are widened."""
    return 2 * (nope + rope + value) + SOFTMAX


def latent_write_cost(
    *, tokens: int, heads: int, nope: int, rope: int, rank: int, block_size: int, interleaved: bool, element_bytes: int,
    kv_element_bytes: float | None = None, kv_dtype: str | None = None,
) -> Cost:
    """The norm of the latent, the rotation of queries and key, and the write. Of the queries only what turns is moved."""
    turned = tokens * (heads + 1) * rope
    flops = 3 * turned + tokens * (4 * rank + 3)
    if kv_dtype is not None:
        kv_element_bytes = QUANTISED_BYTES[kv_dtype] + SCALE_BYTES / (rank + rope)
    written = round(tokens * (rank + rope) * (element_bytes if kv_element_bytes is None else kv_element_bytes))
    moved = (2 * tokens * heads * rope + tokens * (rank + rope) + rank) * element_bytes
    return Cost(flops, moved + written + tokens * rope * max(element_bytes, 4) + 2 * tokens * INDEX_BYTES)


def latent_attention_cost(
    *, rows: Rows, heads: int, nope: int, rope: int, value: int, rank: int, block_size: int, element_bytes: int,
    scattered: bool = False, kv_dtype: str | None = None, drafted: int = 0,
) -> Cost:
    """Every entry of the cache is read once per row, however many heads and queries look at it. The products with `kv_up` are
    those of the way that a row goes: of its queries where they are few, of all its entries where they are many.
    `drafted`: leading rows that decode with drafts."""
    attended = Attended.of(rows, None, block_size)
    flops = 0
    for queries, length in rows:
        pairs = heads * visible_pairs(queries, length, None)
        if queries <= FEW_QUERIES:
            flops += pairs * near_flops(rank, rope) + queries * heads * (rank + 2 * rank * (nope + value))
        else:
            flops += pairs * wide_flops(nope, rope, value) + heads * (queries * value + 2 * length * rank * (nope + value))
    entry = (rank + rope) * (element_bytes if kv_dtype is None else QUANTISED_BYTES[kv_dtype])
    entry += 0 if kv_dtype is None else SCALE_BYTES
    moved = attended.queries * heads * (nope + rope + value) + heads * (nope + value) * rank
    tables = (attended.blocks + (2 + scattered) * attended.rows + 1) * LENGTH_BYTES
    return Cost(flops, attended.keys * entry + moved * element_bytes + tables)


def latent_decode_cost(*, rows: Rows, interleaved: bool, element_bytes: int, **sizes: Any) -> Cost:
    """Both ops; what the first writes and the second reads is counted twice, but for the queries."""
    attention = latent_attention_cost(rows=rows, element_bytes=element_bytes, **sizes)
    own = {name: sizes[name] for name in ("heads", "nope", "rope", "rank", "block_size", "kv_dtype") if name in sizes}
    tokens = sum(queries for queries, _ in rows)
    write = latent_write_cost(tokens=tokens, interleaved=interleaved, element_bytes=element_bytes, **own)
    turned = 2 * tokens * sizes["heads"] * sizes["rope"] * element_bytes
    return Cost(attention.flops + write.flops, attention.bytes + write.bytes - turned)


def _write(tokens: int, interleaved: bool = True, **changes: Any) -> dict[str, Any]:
    sizes = {"heads": 3, "nope": 8, "rope": 4, "rank": 16, "block_size": 4}
    return {"tokens": tokens, "interleaved": interleaved, **sizes, **changes}


def _attend(rows: Rows, **changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"heads": 4, "nope": 16, "rope": 16, "value": 16, "rank": 32, "block_size": 4}
    return {"rows": tuple(rows), **sizes, **changes}


# DeepSeek-V2-Lite, or V3 on one of 8 ranks.
_LITE: dict[str, Any] = {"heads": 16, "nope": 128, "rope": 64, "rank": 512, "block_size": 16}
LATENT_WRITE_CASES = (
    Case("one", _write(1)),
    Case("halves", _write(3, interleaved=False)),
    Case("odd", _write(7, heads=5, nope=6, rope=6, rank=20, block_size=5)),
    Case("decode-32", _write(32, **_LITE), timed=True),
)
LATENT_ATTENTION_CASES = (
    Case("decode-one", _attend([(1, 9)])),
    Case("decode", _attend([(1, 1), (1, 6), (1, 8), (1, 17)])),
    Case("many-shares", _attend([(1, 200), (1, 65), (1, 2)], block_size=16)),
    Case("prompt", _attend([(24, 24)])),
    Case("few-queries", _attend([(3, 11)])),
    Case("chunk", _attend([(20, 43)])),
    Case("mixed", _attend([(1, 10), (1, 70), (1, 0), (40, 40), (2, 13), (17, 30)], scattered=True)),
    Case("odd", _attend([(1, 11), (18, 21), (1, 2)], heads=3, nope=12, rope=6, value=20, rank=24, block_size=3)),
    # Decodes with drafts, of which rows have different numbers, alone and before a prompt.
    Case("drafts", _attend([(3, 12), (1, 90), (4, 140), (2, 2), (1, 0)], drafted=5, scattered=True)),
    Case("drafts-first", _attend([(3, 66), (1, 9), (20, 33), (2, 7)], drafted=2)),
    Case("many-heads", _attend([(1, 40), (1, 5), (3, 9)], heads=70)),
    Case("fp8", _attend([(1, 12), (1, 70), (20, 33)], kv_dtype=E4M3), dtypes=("float64", "bfloat16")),
    Case("decode-8", _attend([(1, 250 + row) for row in range(8)], value=128, **_LITE), timed=True),
)
LATENT_DECODE_CASES = (
    Case("one", _attend([(1, 9)], interleaved=True)),
    Case("rows", _attend([(1, 70), (1, 1), (1, 0), (1, 18)], interleaved=False, scattered=True)),
    Case("more-rows", _attend([(1, 3 + 7 * row) for row in range(18)], interleaved=True)),
    Case("odd", _attend([(1, 11), (1, 66)], interleaved=True, heads=3, nope=12, rope=6, value=20, rank=24, block_size=3)),
    Case("many-heads", _attend([(1, 40), (1, 5)], interleaved=False, heads=70)),
    Case("drafts", _attend([(3, 12), (1, 90), (2, 40)], interleaved=True, drafted=3)),
    Case("mixed", _attend([(1, 10), (20, 33)], interleaved=True)),
    Case("decode-1", _attend([(1, 640)], interleaved=True, value=128, **_LITE), timed=True),
)
