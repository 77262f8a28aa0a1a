"""Measures cascade attention: attention of a decode step with a shared prefix read once or by every row.

Every row has the prefix and some tokens of its own; points are batch × shared tokens. Each point is timed with the prefix read
by every row (off) and read once (forced); "on" is what the rule of runner/shared_prefix.py chooses for the same block tables.
The rule is good if on is never slower than off and mostly as fast as the better of both.

Calls use different blocks in turn, so that only rereads within one call can come from the L2 cache: with a prefix that every
row reads they do, on and off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ridgeline.bench.lab.record import percentiles
from ridgeline.bench.ops import Call, time_calls
from ridgeline.ops.attention.attention_arguments import (
    AttentionWork,
    SharedPrefix,
    device_shares,
    make_workspace,
    prefix_tile_rows,
    shared_prefix,
    workspace_floats,
)
from ridgeline.ops.attention.fused_decode import decode_attention
from ridgeline.ops.launch import multiprocessors
from ridgeline.runner.shared_prefix import SharedPrefixes

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHARED = (0, 256, 512, 1024, 2048, 4096, 8192)
OWN = 96                             # tokens of a row beyond the prefix
SHAPES = {                           # query heads, KV heads, dimensions of a head
    "Llama-3.1-8B": (32, 8, 128), "Llama-3.2-1B": (32, 8, 64), "Llama-3.1-70B": (64, 8, 128),
}
BLOCK_SIZE = 16
COLD_BYTES = 150_000_000             # of different blocks before the first are read again: several times a GPU's L2
MOST_COPIES = 48
SAMPLES = 7


def cascade(
    device: str, shapes: Sequence[str] = tuple(SHAPES), batches: Sequence[int] = BATCHES,
    lengths: Sequence[int] = SHARED, samples: int = SAMPLES,
) -> dict[str, Any]:
    """Per shape of heads: a row for every batch and shared length, and the least that on is of off."""
    found: dict[str, Any] = {}
    for name in shapes:
        rows = []
        for batch in batches:
            rows += [measure(SHAPES[name], batch, length, device, samples) for length in lengths]
            _show(name, rows[-len(lengths) :])
        found[name] = {"rows": rows, "least": min(row["off_us"] / row["on_us"] for row in rows)}
        print(f"{name}: on is at least {found[name]['least']:.3f}x off", flush=True)
    return found


def measure(heads: tuple[int, int, int], batch: int, shared: int, device: str, samples: int) -> dict[str, Any]:
    """Medians in µs: off, forced (None where there is nothing to share), and on."""
    tables, calls = _calls(heads, batch, shared, device)
    group = heads[0] // heads[1]
    length = shared + OWN
    off = _time(calls, None, device, samples)
    forced = None
    if batch > 1 and shared:
        forced = _time(calls, shared_prefix([(list(range(batch)), shared)], batch, group, device=device), device, samples)
    finder = SharedPrefixes(BLOCK_SIZE, prefix_tile_rows(group))
    chosen = finder.find(tables[:batch], np.arange(batch), np.full(batch, length - 1), batch) is not None
    return {
        "batch": batch, "shared": shared, "own": OWN, "chosen": chosen, "off_us": off, "forced_us": forced,
        "on_us": forced if chosen and forced is not None else off,
    }


def _time(calls: list[Call], prefix: SharedPrefix | None, device: str, samples: int) -> float:
    shares = device_shares(
        calls[0][1]["kv_len_host"], calls[0][1]["kv_heads"], None, prefix, False, torch.device(device)
    )
    with torch.inference_mode():
        seconds, _ = time_calls(
            decode_attention, [(args, {**kwargs, "prefix": prefix, "shares": shares}) for args, kwargs in calls],
            device, samples,
        )
    return percentiles(seconds)["median"] * 1e6


def _calls(heads: tuple[int, int, int], batch: int, shared: int, device: str) -> tuple[np.ndarray, list[Call]]:
    """(block tables of all calls, the calls): the same step over different blocks."""
    num_heads, kv_heads, head_dim = heads
    length = shared + OWN
    prefix_blocks, own_blocks = shared // BLOCK_SIZE, -(-OWN // BLOCK_SIZE)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator)

    block_bytes = 2 * BLOCK_SIZE * kv_heads * head_dim * dtype.itemsize
    per_call = prefix_blocks + batch * own_blocks
    copies = min(MOST_COPIES, max(2, -(-COLD_BYTES // (per_call * block_bytes)))) if device == "cuda" else 1
    caches = [random(copies * per_call + 1, BLOCK_SIZE, kv_heads, head_dim) for _ in "kv"]
    blocks = 1 + np.random.default_rng(1).permutation(copies * per_call).astype(np.int32).reshape(copies, per_call)
    tables = np.empty((copies, batch, prefix_blocks + own_blocks), np.int32)
    tables[:, :, :prefix_blocks] = blocks[:, None, :prefix_blocks]
    tables[:, :, prefix_blocks:] = blocks[:, prefix_blocks:].reshape(copies, batch, own_blocks)
    slots = tables[:, :, (length - 1) // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
    qkv = random(batch, (num_heads + 2 * kv_heads) * head_dim)
    angles = torch.rand(length, head_dim // 2, generator=generator, device=device)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    positions = torch.full((batch,), length - 1, device=device)
    borders = torch.arange(batch + 1, dtype=torch.int32, device=device)
    kv_len = torch.full((batch,), length, dtype=torch.int32, device=device)
    floats = workspace_floats(
        batch, num_heads, kv_heads, head_dim, multiprocessors=multiprocessors(qkv.device), prefix_tiles=1
    )
    kwargs = {
        "heads": num_heads, "kv_heads": kv_heads, "scale": head_dim**-0.5, "work": AttentionWork(batch, 0),
        "workspace": make_workspace(floats, batch, kv_heads, qkv.device),
        "query_start_host": list(range(batch + 1)), "kv_len_host": [length] * batch,
    }
    calls: list[Call] = [
        (
            (qkv, positions, torch.from_numpy(slot).to(device), cos_sin, *caches, torch.from_numpy(table).to(device),
             borders, kv_len),
            kwargs,
        )
        for table, slot in zip(tables, slots, strict=True)
    ]
    return tables.reshape(copies * batch, -1), calls


def _show(name: str, rows: list[dict[str, Any]]) -> None:
    cells = []
    for row in rows:
        forced = "" if row["forced_us"] is None else f" → {row['forced_us']:.1f}{' *' if row['chosen'] else ''}"
        cells.append(f"{row['shared']}: {row['off_us']:.1f}{forced}")
    print(f"{name} × {rows[0]['batch']}: " + "  ".join(cells), flush=True)
