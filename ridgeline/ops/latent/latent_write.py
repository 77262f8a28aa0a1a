"""Fused norm of the latent, rotation of queries and shared key, and the write into the cache, before latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.attention.attention_arguments import largest_code, quantise_kv, scale_argument, token_scales
from ridgeline.ops.attention.kernel_decode import scales_of, store_scaled
from ridgeline.ops.launch import dependent_launch, power_of_two
from ridgeline.ops.registry import TRITON_DTYPES, Implementation, Op, Site, Tolerance, tl, triton_kernel
from ridgeline.ops.rms_norm import rms_norm
from ridgeline.sizes.latent_costs import LATENT_WRITE_CASES, latent_write_cost

# ── definition ───────────────────────────────────────────────────────────────────────────────────────────────────────


def latent_write_reference(
    q: Tensor,                       # [T, H, nope + rope]
    latent: Tensor,                  # [T, rank + rope]: the latent before its norm, and the key that all heads share
    norm: Tensor,                    # [rank]
    positions: Tensor,               # [T]: row of cos_sin
    slots: Tensor,                   # [T]: block * block_size + offset; padding is in block 0
    cos_sin: Tensor,                 # [max_position, 2, rope / 2]
    cache: Tensor,                   # [blocks, block_size, 1, rank + rope], maybe a strided view
    *,
    eps: float,
    interleaved: bool,               # elements that rotate together lie side by side, not half of `rope` apart
    cache_scale: Tensor | None = None,   # float32 [blocks, block_size, 1] of a quantised cache: written with the values
) -> Tensor:
    """q with its last `rope` elements rotated; the normed latent and the rotated key are in the cache. Rotated elements stay
    where they are in either order: scores do not depend on it."""
    half, rank = cos_sin.shape[-1], norm.shape[0]
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).unbind(2)     # [T, 1, half] each
    turned = torch.cat((q[..., -2 * half :], latent[:, None, rank:]), dim=1)
    pairs = turned.unflatten(-1, (half, 2)).transpose(-1, -2) if interleaved else turned.unflatten(-1, (2, half))
    first, second = pairs.unbind(-2)
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1 if interleaved else -2)
    rotated = rotated.flatten(-2).to(q.dtype)
    entry = torch.cat((rms_norm(latent[:, :rank], norm, eps), rotated[:, -1]), dim=-1).unsqueeze(1)
    where = (slots // cache.shape[1], slots % cache.shape[1])
    if cache_scale is not None:
        scales = token_scales(entry, cache.dtype)
        cache_scale[where] = scales.to(cache_scale.dtype)
        entry = quantise_kv(entry, scales, cache.dtype)
        if cache.element_size() == 1:                    # torch does not copy narrow floats everywhere
            entry, cache = entry.view(torch.uint8), cache.view(torch.uint8)
    cache[where] = entry.to(cache.dtype)
    return torch.cat((q[..., : -2 * half], rotated[:, :-1]), dim=-1)


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@triton_kernel()
def write_entry(  # type: ignore[no-untyped-def]
    q_ptr, latent_ptr, norm_ptr, positions_ptr, slots_ptr, cos_sin_ptr, cache_ptr, scale_ptr, eps, token,
    q_token_stride, q_head_stride, latent_stride, block_stride, slot_stride, scale_block_stride, scale_slot_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS_ROUND: tl.constexpr, HALF_ROUND: tl.constexpr, RANK_ROUND: tl.constexpr, INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr, LIMIT: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """One CTA, one token. The queries are rotated in place."""
    token = token.to(tl.int64)
    head = tl.arange(0, HEADS_ROUND)
    pair = tl.arange(0, HALF_ROUND)
    dim = tl.arange(0, RANK_ROUND)
    if INTERLEAVED:
        first_place = 2 * pair
        second_place = 2 * pair + 1
    else:
        first_place = pair
        second_place = pair + HALF
    live = (head < HEADS)[:, None] & (pair < HALF)[None, :]
    weight = tl.load(norm_ptr + dim, mask=dim < RANK, other=0.0).to(tl.float32)
    # What the host sent for the step may be read before the wait. Behind it all loads come before the first store: the compiler
    # leaves them in that order.
    position = tl.load(positions_ptr + token)
    slot = tl.maximum(tl.load(slots_ptr + token), 0)
    angle_ptr = cos_sin_ptr + position * (2 * HALF) + pair
    cos = tl.load(angle_ptr, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angle_ptr + HALF, mask=pair < HALF, other=0.0).to(tl.float32)
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    latent_ptr += token * latent_stride
    latent = tl.load(latent_ptr + dim, mask=dim < RANK, other=0.0).to(tl.float32)
    key_first = tl.load(latent_ptr + RANK + first_place, mask=pair < HALF, other=0.0).to(tl.float32)
    key_second = tl.load(latent_ptr + RANK + second_place, mask=pair < HALF, other=0.0).to(tl.float32)
    turning = q_ptr + token * q_token_stride + head[:, None] * q_head_stride + NOPE
    first = tl.load(turning + first_place[None, :], mask=live, other=0.0).to(tl.float32)
    second = tl.load(turning + second_place[None, :], mask=live, other=0.0).to(tl.float32)
    out = q_ptr.dtype.element_ty
    tl.store(turning + first_place[None, :], (first * cos[None, :] - second * sin[None, :]).to(out), mask=live)
    tl.store(turning + second_place[None, :], (second * cos[None, :] + first * sin[None, :]).to(out), mask=live)

    latent = latent * tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + eps) * weight
    turned_first = key_first * cos - key_second * sin
    turned_second = key_second * cos + key_first * sin
    largest = tl.max(tl.abs(latent), axis=0)
    largest = tl.maximum(largest, tl.maximum(tl.max(tl.abs(turned_first), axis=0), tl.max(tl.abs(turned_second), axis=0)))
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    one = tl.arange(0, 1)
    place = scale_ptr + block * scale_block_stride + offset * scale_slot_stride + one
    scale = scales_of(place, largest + tl.zeros([1], tl.float32), one == 0, LIMIT, SCALED, False)
    entry = block * block_stride + offset * slot_stride
    store_scaled(cache_ptr, (entry + dim)[None, :], latent[None, :], (dim < RANK)[None, :], scale, LIMIT, SCALED)
    entry += RANK
    lives = (pair < HALF)[None, :]
    store_scaled(cache_ptr, (entry + first_place)[None, :], turned_first[None, :], lives, scale, LIMIT, SCALED)
    store_scaled(cache_ptr, (entry + second_place)[None, :], turned_second[None, :], lives, scale, LIMIT, SCALED)


@triton_kernel()
def _latent_write_kernel(  # type: ignore[no-untyped-def]
    q_ptr, latent_ptr, norm_ptr, positions_ptr, slots_ptr, cos_sin_ptr, cache_ptr, scale_ptr, eps,
    q_token_stride, q_head_stride, latent_stride, block_stride, slot_stride, scale_block_stride, scale_slot_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS_ROUND: tl.constexpr, HALF_ROUND: tl.constexpr, RANK_ROUND: tl.constexpr, INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr, LIMIT: tl.constexpr, DEPENDENT: tl.constexpr,
):
    write_entry(
        q_ptr, latent_ptr, norm_ptr, positions_ptr, slots_ptr, cos_sin_ptr, cache_ptr, scale_ptr, eps, tl.program_id(0),
        q_token_stride, q_head_stride, latent_stride, block_stride, slot_stride, scale_block_stride, scale_slot_stride,
        HEADS, NOPE, HALF, RANK, BLOCK_SIZE, HEADS_ROUND, HALF_ROUND, RANK_ROUND, INTERLEAVED, SCALED, LIMIT, DEPENDENT,
    )


@dataclass(frozen=True, slots=True, eq=False)
class FreshLatents:
    """The new tokens of a step, before norm, rotation and write: the arguments of latent_write."""

    latent: Tensor
    norm: Tensor
    positions: Tensor
    slots: Tensor
    cos_sin: Tensor
    eps: float
    interleaved: bool
    cache_scale: Tensor | None = None


def write_arguments(
    q: Tensor, nope: int, rank: int, cache: Tensor, fresh: FreshLatents | None
) -> tuple[tuple[Any, ...], tuple[int, ...], dict[str, Any]]:
    """(pointers and eps, strides from `latent` on, constants) of `write_entry`; without `fresh`, values that it does not use."""
    half = (q.shape[2] - nope) // 2
    scale = None if fresh is None else fresh.cache_scale
    scales, strides = scale_argument(scale, cache)
    if fresh is None:
        arguments: tuple[Any, ...] = (q, q, q, q, q, cache, scales, 0.0)
    else:
        arguments = (fresh.latent, fresh.norm, fresh.positions, fresh.slots, fresh.cos_sin, cache, scales, fresh.eps)
    constants = {
        "HEADS": q.shape[1], "NOPE": nope, "HALF": half, "RANK": rank, "BLOCK_SIZE": cache.shape[1],
        "HEADS_ROUND": power_of_two(q.shape[1]), "HALF_ROUND": power_of_two(half), "RANK_ROUND": power_of_two(rank),
        "INTERLEAVED": fresh is not None and fresh.interleaved, "SCALED": scale is not None,
        "LIMIT": largest_code(cache.dtype),
    }
    latent_stride = 0 if fresh is None else fresh.latent.stride(0)
    return arguments, (latent_stride, *cache.stride()[:2], *strides[:2]), constants


def latent_write_triton(
    q: Tensor, latent: Tensor, norm: Tensor, positions: Tensor, slots: Tensor, cos_sin: Tensor, cache: Tensor, *,
    eps: float, interleaved: bool, cache_scale: Tensor | None = None,
) -> Tensor:
    """In place."""
    tokens, _, width = q.shape
    if tokens == 0:
        return q
    fresh = FreshLatents(latent, norm, positions, slots, cos_sin, eps, interleaved, cache_scale)
    arguments, strides, constants = write_arguments(q, width - 2 * cos_sin.shape[-1], norm.shape[0], cache, fresh)
    _latent_write_kernel[(tokens,)](
        q, *arguments, *q.stride()[:2], *strides, **constants, num_warps=4, **dependent_launch(q.device)
    )
    return q


def _triton_supports(site: Site) -> bool:
    return site.device == "cuda" and site.dtype in TRITON_DTYPES


# ── declaration ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, device: str,
    *, tokens: int, heads: int, nope: int, rope: int, rank: int, block_size: int, interleaved: bool,
    kv_dtype: str | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    max_position = tokens + 5
    angles = torch.rand(max_position, rope // 2, generator=generator) * 100
    table = torch.stack((angles.cos(), angles.sin()), dim=1).to(device, torch.promote_types(dtype, torch.float32))
    positions = torch.randint(max_position, (tokens,), generator=generator).to(device)
    blocks = -(-tokens // block_size) + 2
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens].to(device)
    cache = random(blocks, block_size, 1, rank + rope)
    kwargs: dict[str, Any] = {"eps": 1e-6, "interleaved": interleaved}
    if kv_dtype is not None:
        kwargs["cache_scale"] = torch.zeros(blocks, block_size, 1, device=device)
        cache = torch.zeros(cache.shape, dtype=getattr(torch, kv_dtype), device=device)
    # Queries and latents as they come out of one projection: not contiguous.
    projected = random(tokens, heads * (nope + rope) + rank + rope)
    q = projected[:, : heads * (nope + rope)].unflatten(-1, (heads, nope + rope))
    return (q, projected[:, heads * (nope + rope) :], random(rank), positions, slots, table, cache), kwargs


latent_write = Op(
    "latent_write",
    latent_write_reference,
    kernels=[Implementation("triton", latent_write_triton, _triton_supports)],
    cases=LATENT_WRITE_CASES,
    cost=latent_write_cost,
    inputs=_inputs,
    # The rotation of values below 5, rounded once to the tensor's dtype.
    tolerance={
        "float32": Tolerance(4e-6, 4e-6),
        "bfloat16": Tolerance(3 * 2**-8, 2**-6),
        "float16": Tolerance(3 * 2**-11, 2**-9),
    },
)
