"""The GPU cases of `bench ops`: the operations of Llama-3.1-8B with its sizes, as the engine calls them.

Inputs are generated on the device. The ops' own generators are made for small correctness cases (a NaN in every slot that must
not be read) and work token by token; 131,072 tokens of a cache would take them minutes. Comparisons: torch's attention over
contiguous tensors, cuBLAS's GEMM, and the GEMM that adds the residual.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.bench.workload.latent_cases import LATENT_CASES, latent_inputs
from ridgeline.ops.attention.attention_arguments import (
    AttentionWork,
    device_shares,
    make_workspace,
    shared_prefix,
    workspace_floats,
)
from ridgeline.ops.attention.prefill_tiles import cut_queries
from ridgeline.ops.kernel_table import MANY_ROWS
from ridgeline.ops.launch import multiprocessors
from ridgeline.ops.registry import Op
from ridgeline.quant.scheme import Fused
from ridgeline.sizes.op_costs import E4M3, INT8, Case, Cost

CONTIGUOUS = "contiguous"            # the implementation column of torch's attention over contiguous tensors,
LIBRARY = "library"                  # … of cuBLAS's GEMM,
ONTO = "onto"                        # … and of a product onto the residual, as the engine has it for many rows
LINEAR_ROWS = (1, 8, 32, 64, 128, 256, 1024, 8192)
MOST_HEAD_ROWS = 1024                # that have logits in one step

_HEADS = {"heads": 32, "kv_heads": 8, "head_dim": 128}
_MATRICES = {"o": (4096, 4096), "down": (14336, 4096), "head": (4096, 128256)}          # inputs, outputs
_NORMED = {"qkv": (6144, None), "gate_up": (14336, "silu")}                             # outputs (pairs), activation


def _rows(*rows: tuple[int, int]) -> dict[str, Any]:
    return {"rows": rows, "block_size": 16, "window": None, "softcap": None, **_HEADS}


def _narrow(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same over pages in fp8 and in int8, as the engine has them: a scale for each token and head."""
    formats = {"fp8": E4M3, "int8": INT8}
    return {f"{kind}-{name}": sizes | {"kv_dtype": dtype} for kind, dtype in formats.items() for name, sizes in cases.items()}


_ATTENTION = {
    "decode-1x640": _rows((1, 640)),
    "decode-1x8192": _rows((1, 8192)),
    "decode-16x8192": _rows(*[(1, 8192)] * 16),
    "decode-128x640": _rows(*[(1, 640)] * 128),
    "prefill-1x512": _rows((512, 512)),
    "prefill-16x512": _rows(*[(512, 512)] * 16),
    "prefill-1x8192": _rows((8192, 8192)),
    "chunk-2048-of-16384": _rows((2048, 16384)),
}
_FUSED = {
    f"rows-{batch}x{length}": _rows(*[(1, length)] * batch) | {"rotary_dim": 128}
    for batch, length in ((1, 640), (1, 8192), (16, 8192), (128, 640))
}
# Sizes of Llama-3.1-8B by op; each is laid over the op's own first timed case, which brings what is not named here.
GPU_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "rms_norm": {f"tokens-{n}": {"tokens": n, "width": 4096, "residual": True} for n in (1, 128, 8192)},
    "rotary": {f"tokens-{n}": {"tokens": n, "rotary_dim": 128, **_HEADS} for n in (1, 128, 8192)},
    "gated_activation": {f"tokens-{n}": {"tokens": n, "intermediate": 14336} for n in (1, 128, 8192)},
    "kv_write": {f"tokens-{n}": {"tokens": n, "kv_heads": 8, "head_dim": 128, "block_size": 16} for n in (1, 128, 8192)},
    # What `plan --fit --ops` compares, here and in decode_attention: the same rows over wide pages and over narrow ones.
    "paged_attention": _ATTENTION | _narrow(_ATTENTION) | {
        "shared-64x2000+64": _rows(*[(1, 2064)] * 64) | {"shared": ((tuple(range(64)), 2000),)},
    },
    "decode_attention": _FUSED | _narrow(_FUSED),
    "linear": {
        f"{name}-{tokens}": {"tokens": tokens, "inputs": inputs, "outputs": outputs, "bias": False}
        for name, (inputs, outputs) in _MATRICES.items()
        for tokens in LINEAR_ROWS
        if name != "head" or tokens <= MOST_HEAD_ROWS
    },
    "normed_linear": {
        f"{name}-{tokens}": {"tokens": tokens, "inputs": 4096, "outputs": outputs, "gate": gate}
        for name, (outputs, gate) in _NORMED.items()
        for tokens in LINEAR_ROWS
    },
    "rotary_write": {
        f"{name}-{n}": {"tokens": n, "rotary_dim": 128, "block_size": 16, "norm": norm, **_HEADS}
        for name, norm in (("tokens", False), ("qk-norm", True))             # as Llama's heads are, and as Qwen3's
        for n in (1, 128, 8192)
    },
    "logprobs": {f"rows-{n}": {"rows": n, "vocab": 128256} for n in (1, 128)},
    "greedy": {f"rows-{n}": {"rows": n, "vocab": 128256} for n in (1, 128)},
    "apply_mask": {f"rows-{n}": {"rows": n, "vocab": 128256} for n in (1, 128)},
    "sample": {
        f"{kind}-{n}": {"rows": n, "vocab": 128256, "kind": kind}
        for kind in ("greedy", "random", "filtered")
        for n in (1, 128)
    },
    **LATENT_CASES,
}

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Beside(NamedTuple):
    """Something that an op is compared with on the same case."""

    name: str                        # in the column of implementations
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cost: Cost | None = None         # where it is not the op's


# ── inputs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def make_inputs(op: Op[Any, Any], case: Case, dtype: torch.dtype, device: str) -> Inputs:
    """The op's own inputs; on a GPU generated there, for attention by `attention_inputs`."""
    seed = len(case.name)
    if device == "cuda":
        if op.name in ("paged_attention", "decode_attention"):
            return attention_inputs(op.name, dtype, device, seed, **case.sizes)
        if op.name == "latent_attention":
            return latent_inputs(dtype, device, seed, **case.sizes)
        try:
            with torch.device(device):
                return op.inputs(torch.Generator(device).manual_seed(seed), dtype, device, **case.sizes)
        except (RuntimeError, TypeError):
            pass                                         # something in it is made for the host
    return op.inputs(torch.Generator().manual_seed(seed), dtype, device, **case.sizes)


def attention_inputs(
    op: str, dtype: torch.dtype, device: str, seed: int,
    *, rows: tuple[tuple[int, int], ...], heads: int, kv_heads: int, head_dim: int, block_size: int,
    window: int | None, softcap: float | None, kv_dtype: str | None = None,
    shared: tuple[tuple[tuple[int, ...], int], ...] = (), rotary_dim: int = 0, norm: bool = False,
) -> Inputs:
    """Inputs of paged_attention and decode_attention, with what the engine passes besides: rows in scattered blocks, shared
    prefixes in the same blocks."""
    generator = torch.Generator(device).manual_seed(seed)
    place = torch.device(device)

    def random(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device=device).normal_(generator=generator)

    lengths = [length for _, length in rows]
    query_start = list(itertools.accumulate((queries for queries, _ in rows), initial=0))
    decodes = next((row for row, (queries, _) in enumerate(rows) if queries != 1), len(rows))
    table = _scattered(lengths, block_size, shared, seed)
    pages = (int(table.max()) + 1, block_size, kv_heads, head_dim)
    kwargs: dict[str, Any] = {
        "query_start_host": query_start, "kv_len_host": lengths, "scale": head_dim**-0.5, "window": window,
        "softcap": softcap,
        "work": AttentionWork(decodes, max((queries for queries, _ in rows[decodes:]), default=0)),
    }

    caches = [random(*pages), random(*pages)]
    if kv_dtype is not None:
        caches = [cache.mul_(64).to(getattr(torch, kv_dtype)) for cache in caches]               # values of about one
        for name in ("k_scale", "v_scale"):
            kwargs[name] = torch.rand(pages[:3], generator=generator, device=device) / 64
    if shared:
        groups = [(list(members), length) for members, length in shared]
        kwargs["prefix"] = shared_prefix(groups, len(rows), heads // kv_heads, tiles=len(rows) + 1, device=device)
    if decodes:
        prefix = None if window is not None else kwargs.get("prefix")
        kwargs["shares"] = device_shares(lengths[:decodes], kv_heads, window, prefix, False, place)
        floats = workspace_floats(
            len(rows), heads, kv_heads, head_dim, multiprocessors=multiprocessors(place), prefix_tiles=len(rows) + 1,
        )
        kwargs["workspace"] = make_workspace(floats, len(rows), kv_heads, place)
    if decodes < len(rows):
        cut = cut_queries(
            np.array(query_start[decodes:]), np.array(lengths[decodes:]), np.arange(decodes, len(rows)), heads // kv_heads
        )
        kwargs["query_tiles"] = torch.from_numpy(cut).to(place)
    borders = torch.tensor(query_start, dtype=torch.int32, device=device)
    kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
    pages_and_rows = (*caches, torch.from_numpy(table).to(place), borders, kv_len)
    if op == "paged_attention":
        return (random(query_start[-1], heads, head_dim), *pages_and_rows), kwargs
    positions = np.array(lengths, np.int64) - 1
    slots = table[np.arange(len(rows)), positions // block_size].astype(np.int64) * block_size + positions % block_size
    angles = torch.rand(max(lengths), rotary_dim // 2, generator=generator, device=device) * 100
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1).to(torch.promote_types(dtype, torch.float32))
    kwargs |= {"heads": heads, "kv_heads": kv_heads}
    if norm:
        kwargs |= {"q_norm": random(head_dim), "k_norm": random(head_dim), "eps": 1e-6, "norm_offset": 1.0}
    qkv = random(len(rows), (heads + 2 * kv_heads) * head_dim)
    return (qkv, torch.from_numpy(positions).to(place), torch.from_numpy(slots).to(place), cos_sin, *pages_and_rows), kwargs


def _scattered(
    lengths: list[int], block_size: int, shared: tuple[tuple[tuple[int, ...], int], ...], seed: int
) -> np.ndarray:
    """int32 [rows, blocks]: every row has its own blocks except for a shared prefix; 0 where a row has none."""
    needed = [-(-length // block_size) for length in lengths]
    blocks = 1 + np.random.default_rng(seed).permutation(sum(needed)).astype(np.int32)
    table = np.zeros((len(lengths), max(needed)), np.int32)
    used = 0
    for row, count in enumerate(needed):
        table[row, :count] = blocks[used : used + count]
        used += count
    for members, length in shared:
        table[list(members), : length // block_size] = table[members[0], : length // block_size]
    return table


# ── what stands beside an op ─────────────────────────────────────────────────────────────────────────────────────────


def beside(op: Op[Any, Any], case: Case, dtype: torch.dtype, args: tuple[Any, ...]) -> Iterator[Beside]:
    """What the op is compared with, over the same inputs where it can be."""
    device = args[0].device
    if op.name == "paged_attention":
        contiguous = contiguous_attention(case, dtype, str(device))
        if contiguous is not None:
            yield Beside(CONTIGUOUS, *contiguous)
    if op.name == "linear" and device.type == "cuda":
        x, weight, bias = args
        yield Beside(LIBRARY, F.linear, args, {})
        if len(x) >= MANY_ROWS and bias is None and weight.shape[0] <= weight.shape[1]:        # back into the stream
            yield onto(x, weight, op.case_cost(case, str(dtype).removeprefix("torch.")))


def onto(x: Tensor, weight: Tensor, cost: Cost) -> Beside:
    """The GEMM that adds its result to a residual."""
    residual = torch.zeros(len(x), len(weight), dtype=x.dtype, device=x.device)
    more = Cost(residual.numel(), residual.nbytes)

    def add(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return Fused().apply_onto(SimpleNamespace(weight=weight), residual, x)  # type: ignore[arg-type]

    return Beside(ONTO, add, (residual, x, weight), {}, cost + more)


def contiguous_attention(case: Case, dtype: torch.dtype, device: str) -> Any:
    """torch's attention over contiguous keys and values: (function, args, kwargs); None if rows differ in shape."""
    sizes = case.sizes
    shapes = set(sizes["rows"])
    if len(shapes) != 1 or any(sizes.get(name) for name in ("window", "softcap", "shared", "kv_dtype")):
        return None
    queries, keys = next(iter(shapes))
    if queries not in (1, keys):
        return None                                      # a chunk: torch's causal mask would begin at the wrong corner

    def random(heads: int, tokens: int) -> Tensor:
        return torch.randn(len(sizes["rows"]), heads, tokens, sizes["head_dim"], device=device, dtype=dtype)

    args = (random(sizes["heads"], queries), random(sizes["kv_heads"], keys), random(sizes["kv_heads"], keys))
    grouped = sizes["heads"] != sizes["kv_heads"]
    return F.scaled_dot_product_attention, args, {"is_causal": queries > 1, "enable_gqa": grouped}
