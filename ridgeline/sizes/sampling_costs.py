"""What the ops on logits compute and move, and what the sampler keeps in memory; conventions as in op_costs.py."""

from __future__ import annotations

from ridgeline.sizes.op_costs import INDEX_BYTES, Case, Cost

EDITED_BYTES = 1 << 27               # logits that are edited before a token is sampled; larger batches go in parts
PROMPT_LOGPROB_ROWS = 256            # prompt positions whose logits exist at once
KNOWN_IDS = 256                      # per row: room for the ids in its text, for penalties; grows for longer texts

# How the kernels of ops/sampling/sample_kernels.py divide a vocabulary.
SAMPLE_TILE = 8192                   # ids per Triton program that looks for the best
SAMPLE_RACE_TILE = 1024              # ids per Triton program that races
SAMPLE_GROUP = 64                    # ids whose maximum is kept for the filters
SAMPLE_CANDIDATES = 1024             # ids that one Triton program can cut in registers


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


def edited_rows(*, rows: int, vocab: int, element_bytes: int) -> int:
    return min(rows, max(1, EDITED_BYTES // (vocab * element_bytes)))


def sampling_bytes(*, rows: int, vocab: int, element_bytes: int, on_gpu: bool, verified: int = 0) -> int:
    """Memory of the sampler: edited logits, the ids of each row's text and, on a GPU, what its kernels hand to each other, for as
    many rows or `verified` positions as a step samples at."""
    wide, per_position = max(element_bytes, 4), 0
    if on_gpu:
        tiles, race_tiles = -(-vocab // SAMPLE_TILE), 1 << (-(-vocab // SAMPLE_RACE_TILE) - 1).bit_length()
        groups = tiles * (SAMPLE_TILE // SAMPLE_GROUP)
        per_position = 4 * groups + 8 * tiles + 12 * SAMPLE_CANDIDATES + 12 * race_tiles + 36
    kept = rows * KNOWN_IDS * (8 + 4) + max(rows, verified) * per_position
    return kept + edited_rows(rows=rows, vocab=vocab, element_bytes=wide) * vocab * wide


def mask_bytes(*, rows: int, vocab: int) -> int:
    """The mask of a grammar: a bit for each id, in words of 32."""
    return rows * -(-vocab // 32) * 4


def greedy_cost(*, rows: int, vocab: int, element_bytes: int) -> Cost:
    return Cost(rows * vocab, rows * vocab * element_bytes + rows * (3 * INDEX_BYTES + 1))


GREEDY_CASES = (
    Case("one", {"rows": 1, "vocab": 64}, dtypes=("float64", "float32", "bfloat16", "float16")),
    Case("odd", {"rows": 5, "vocab": 77}, dtypes=("float64", "float32", "bfloat16", "float16")),
    Case("decode-32", {"rows": 32, "vocab": 49152}, timed=True),
)


def accept_cost(*, widths: tuple[int, ...], padding: int, element_bytes: int) -> Cost:
    """Per position: a token, a draft and a flag; per row: four numbers are written or read."""
    positions = sum(1 + width for width in widths)
    return Cost(0, positions * (2 * INDEX_BYTES + 1) + len(widths) * 5 * INDEX_BYTES)


ACCEPT_CASES = (
    Case("one", {"widths": (3,), "padding": 0}),
    Case("odd", {"widths": (0, 15, 1, -1, 7, 2), "padding": 5}),
    Case("batch-64", {"widths": (3,) * 64, "padding": 0}, timed=True),
)


def late_cost(*, widths: tuple[int, ...], groups: int, block_size: int, element_bytes: int) -> Cost:
    """Per token: its row, its position, and a block and a slot in each group; per draft four numbers; per row three."""
    tokens, drafts = sum(1 + max(0, width) for width in widths), sum(max(0, width) for width in widths)
    numbers = tokens * (4 + groups) + 5 * drafts + 3 * len(widths)
    return Cost(0, numbers * INDEX_BYTES + tokens * groups * 4)


LATE_CASES = (
    Case("one", {"widths": (3,), "groups": 1, "block_size": 16}),
    Case("odd", {"widths": (0, 15, 1, -1, 7, 2, -1), "groups": 3, "block_size": 5}),
    Case("batch-64", {"widths": (3,) * 64, "groups": 1, "block_size": 16}, timed=True),
)


def mask_cost(*, rows: int, vocab: int, element_bytes: int) -> Cost:
    """Logits are read, and written to another place."""
    return Cost(0, mask_bytes(rows=rows, vocab=vocab) + rows * 2 * vocab * element_bytes)


MASK_CASES = (
    Case("one", {"rows": 1, "vocab": 64}, dtypes=("float64", "float32")),
    Case("odd", {"rows": 3, "vocab": 77}, dtypes=("float64", "float32")),
    Case("decode-32", {"rows": 32, "vocab": 49152}, dtypes=("float32",), timed=True),
)


SAMPLE_CASES = tuple(
    Case(f"{kind}{suffix}", {"rows": rows, "vocab": vocab, "kind": kind}, dtypes=("float64", *dtypes), timed=timed)
    for kind in ("greedy", "random", "filtered", "mixed")
    for suffix, rows, vocab, dtypes, timed in (
        ("", 6, 37, ("float32", "bfloat16"), False),
        ("-32", 32, 49152, ("float32",), True),
    )
)
