"""From a checkpoint's tensors to the canonical ones of quant/format.py, exactly: one function for each way of packing.

Each takes the tensors of one module by role and gives the format's tensors by name, with the scales of every output written out.
No number is rounded: codes are moved, zero points are shifted with their codes, scales are widened or repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import ModelError, shown
from ridgeline.models.checkpoints.gguf_packed import packed_gguf
from ridgeline.models.checkpoints.recipe import Recipe
from ridgeline.ops.quantised.codes import NF4, packed_codes, unpacked_bits
from ridgeline.quant.format import GRIDS, ORDER, OUTER, SCALE, WEIGHT, ZERO

Tensors = Mapping[str, Tensor]       # by role
Canonical = dict[str, Tensor]        # by parameter
NO_NUMBER = 0xFF                     # of e8m0
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)                    # of eight neighbouring outputs in a word


def canonical(recipe: Recipe, tensors: Tensors) -> Canonical:
    return UNPACK[recipe.unpack][1](recipe, tensors)


def matrix_shape(recipe: Recipe, shapes: Mapping[str, tuple[int, ...]], small: Callable[[str], Tensor]) -> tuple[int, int]:
    """(outputs, inputs) of a module, from the shapes of its tensors by role; `small` reads one where shapes do not say it."""
    return UNPACK[recipe.unpack][0](recipe, shapes, small)


# ── pieces of work ───────────────────────────────────────────────────────────────────────────────────────────────────


def _bytes(words: Tensor) -> Tensor:
    """[rows, words] -> uint8 [rows, 4 words]; a transposed tensor of one word has no usable strides."""
    return words.reshape(-1).view(torch.uint8).view(len(words), -1)


def bitstream(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [rows, words] -> uint8 codes [rows, count]: code i begins at bit i * bits of a row. Where a width does not divide 32,
    older files start every word anew; the number of words tells."""
    each = 32 // bits
    if words.shape[1] == -(-count * bits // 32):
        data = _bytes(words)
        if bits in (1, 2, 4, 8):
            return (unpacked_bits(data, bits) if bits < 8 else data)[:, :count]
        start = torch.arange(count, device=words.device) * bits
        padded = torch.nn.functional.pad(data, (0, 1)).int()
        pairs = padded[:, start // 8] | (padded[:, start // 8 + 1] << 8)
        return ((pairs >> (start % 8)) & ((1 << bits) - 1)).to(torch.uint8)
    if words.shape[1] != -(-count // each):
        raise ModelError(f"{words.shape[1]} words cannot hold {count} codes of {bits} bits")
    shifts = torch.arange(each, device=words.device) * bits
    codes = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :count].to(torch.uint8)


def stored_codes(recipe: Recipe, codes: Tensor) -> Tensor:
    """Codes of `recipe.bits`, unsigned with zero in their middle, as codes of the format's grid."""
    grid, middle = recipe.format.grid, 1 << (recipe.bits - 1)
    if grid == "int8":
        return (codes.to(torch.int16) - middle).to(torch.int8)
    return codes + (GRIDS[grid][1] - middle)


def with_codes(recipe: Recipe, codes: Tensor, more: Canonical) -> Canonical:
    weight, high = packed_codes(recipe.format.grid, codes)
    return {WEIGHT: weight, **more} | ({} if high is None else {"high": high})


def scale_dtype(recipe: Recipe) -> torch.dtype:
    assert recipe.format.scales is not None
    name = recipe.format.scales.dtype
    return torch.uint8 if name == "e8m0" else getattr(torch, name)


def block_scales(recipe: Recipe, scale: Tensor, outputs: int, inputs: int) -> Tensor:
    """[outputs] or [outputs, blocks], whatever of these the checkpoint shares between outputs."""
    assert recipe.format.scales is not None
    rows, columns = recipe.format.scales.block
    if recipe.format.scales.dtype == "e8m0":
        scale = _exponents(scale)
    elif scale.dtype == torch.float8_e8m0fnu:
        scale = scale.float()
    scale = scale.to(scale_dtype(recipe))
    if not columns:
        if scale.numel() not in (1, outputs):
            raise ModelError(f"{scale.numel()} scales for {outputs} outputs; there must be one, or one for each")
        return scale.reshape(-1).expand(outputs).contiguous()
    expected = (-(-outputs // rows), -(-inputs // columns))
    if scale.dim() == 4 and scale.shape[1::2] == (1, 1):     # ModelOpt keeps a block's own dimensions
        scale = scale[:, 0, :, 0]
    if tuple(scale.shape) != expected:
        raise ModelError(f"scales of shape {list(scale.shape)}, blocks of {rows} x {columns} need {list(expected)}")
    return scale if rows == 1 else scale.repeat_interleave(rows, dim=0)[:outputs]


def middle_zeros(recipe: Recipe, zeros: Tensor) -> None:
    """A checkpoint that calls itself symmetric may not have other zero points."""
    if not bool((zeros == GRIDS[recipe.format.grid][1]).all()):
        raise ModelError("the config says symmetric, but there are zero points that are not in the middle")


def sorted_by_group(recipe: Recipe, codes: Tensor, groups: Tensor | None) -> tuple[Tensor, Canonical]:
    """Inputs sorted by their group, and their order. A config without activation order may have only the plain groups."""
    assert recipe.format.scales is not None
    size, inputs = recipe.format.scales.block[1], codes.shape[1]
    if groups is None or not size:
        order = torch.arange(inputs, device=codes.device)
    else:
        order = torch.argsort(groups.to(torch.int64), stable=True)
        plain = torch.arange(inputs, device=codes.device) // size
        if not torch.equal(groups.to(torch.int64)[order], plain):
            raise ModelError(f"the groups of g_idx are not of {size} inputs each")
        if not recipe.format.reordered and not torch.equal(groups.to(torch.int64), plain):
            raise ModelError("g_idx reorders the inputs, but the config says desc_act false")
    if not recipe.format.reordered:
        return codes, {}
    return codes.index_select(1, order), {ORDER: order.to(torch.int32)[None]}


# ── 8 bits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _codes(recipe: Recipe, tensors: Tensors) -> Canonical:
    weight = tensors["codes"]
    wanted = torch.float8_e4m3fn if recipe.format.grid == "e4m3" else torch.int8
    if weight.dtype != wanted:
        raise ModelError(f"codes are {str(weight.dtype)[6:]}, not {str(wanted)[6:]}")
    scale = _inverse(tensors["scale"].float()) if recipe.variant == "divides" else tensors["scale"]
    found = {WEIGHT: weight, SCALE: block_scales(recipe, scale, *weight.shape)}
    assert recipe.format.scales is not None
    if recipe.format.scales.zero is not None:
        if "zero" not in tensors:
            raise ModelError("the config says asymmetric, but there are no zero points")
        found[ZERO] = block_scales(recipe, tensors["zero"], *weight.shape)
    return found


def _bnb_8bit(recipe: Recipe, tensors: Tensors) -> Canonical:
    """LLM.int8(): each row is scaled so that its largest magnitude becomes 127."""
    return {WEIGHT: tensors["codes"].to(torch.int8), SCALE: tensors["scale"].float().reshape(-1) * (1.0 / 127.0)}


# ── integers of 8 bits and fewer in words ────────────────────────────────────────────────────────────────────────────


def _ct_packed(recipe: Recipe, tensors: Tensors) -> Canonical:
    outputs, inputs = (int(size) for size in tensors["shape"].tolist())
    assert recipe.format.scales is not None
    codes = stored_codes(recipe, bitstream(tensors["codes"], recipe.bits, inputs))
    codes, more = sorted_by_group(recipe, codes, tensors.get("groups"))
    more[SCALE] = block_scales(recipe, tensors["scale"], outputs, inputs)
    if recipe.format.scales.zero is not None:
        if "zero" not in tensors:
            raise ModelError("the config says asymmetric, but there are no zero points")
        zeros = stored_codes(recipe, bitstream(tensors["zero"].t(), recipe.bits, outputs)).t()
        more[ZERO] = block_scales(recipe, zeros, outputs, inputs)
    return with_codes(recipe, codes, more)


def _gptq(recipe: Recipe, tensors: Tensors) -> Canonical:
    assert recipe.format.scales is not None
    words, outputs = tensors["codes"].shape
    inputs = words * 32 // recipe.bits
    codes = stored_codes(recipe, bitstream(tensors["codes"].t(), recipe.bits, inputs))
    codes, more = sorted_by_group(recipe, codes, tensors.get("groups"))
    more[SCALE] = block_scales(recipe, tensors["scale"].t(), outputs, inputs)
    stored = bitstream(tensors["zero"], recipe.bits, outputs).t()
    if recipe.variant == "gptq":                         # minus one, modulo the number of codes
        stored = (stored + 1) & ((1 << recipe.bits) - 1)
    zeros = stored_codes(recipe, stored)
    if recipe.format.scales.zero is None:
        middle_zeros(recipe, zeros)
    else:
        more[ZERO] = block_scales(recipe, zeros, outputs, inputs)
    return with_codes(recipe, codes, more)


def _awq(recipe: Recipe, tensors: Tensors) -> Canonical:
    assert recipe.format.scales is not None

    def unpacked(words: Tensor) -> Tensor:
        """int32 [n, outputs / 8] -> uint8 [outputs, n]"""
        nibbles = unpacked_bits(_bytes(words), 4).unflatten(1, (-1, 8))
        return nibbles[..., list(AWQ_PLACES)].flatten(1).t()

    codes = unpacked(tensors["codes"])
    outputs, inputs = codes.shape
    more = {SCALE: block_scales(recipe, tensors["scale"].t(), outputs, inputs)}
    if recipe.format.scales.zero is not None:
        more[ZERO] = block_scales(recipe, unpacked(tensors["zero"]), outputs, inputs)
    elif "zero" in tensors:
        middle_zeros(recipe, unpacked(tensors["zero"]))
    return with_codes(recipe, codes.contiguous(), more)


# ── 4-bit floats and tables ──────────────────────────────────────────────────────────────────────────────────────────


def _fp4(recipe: Recipe, tensors: Tensors) -> Canonical:
    weight, scale = tensors["codes"], tensors["scale"]
    outputs, inputs = weight.shape[0], weight.shape[1] * 2
    if recipe.format.scales is not None and recipe.format.scales.dtype == "e8m0":
        return {WEIGHT: weight, SCALE: _exponents(scale)}
    if scale.dtype != torch.float8_e4m3fn:
        raise ModelError(f"scales of NVFP4 must be float8_e4m3fn, not {str(scale.dtype)[6:]}")
    outer = tensors["outer"].float().reshape(-1)
    outer = _inverse(outer) if recipe.variant == "divides" else outer
    if outer.numel() not in (1, outputs):
        raise ModelError(f"{outer.numel()} second scales for {outputs} outputs; there must be one, or one for each")
    return {WEIGHT: weight, SCALE: block_scales(recipe, scale, outputs, inputs), OUTER: outer.expand(outputs).contiguous()}


def _exponents(scale: Tensor) -> Tensor:
    if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):           # numbers below 1 would become bytes of 0
        raise ModelError(f"scales of MX formats must be uint8 or float8_e8m0fnu, not {str(scale.dtype)[6:]}")
    exponents = scale.view(torch.uint8)
    if bool((exponents == NO_NUMBER).any()):             # a byte is always finite: the loader's own check sees nothing
        raise ModelError(f"a scale is {NO_NUMBER}, which is not a number in MX formats")
    return exponents


def _inverse(scale: Tensor) -> Tensor:
    """Of scales that divide. Infinite ones would make finite zeros."""
    if not bool(torch.isfinite(scale).all()):
        raise ModelError("a scale is not finite")
    return 1.0 / scale


def _mxfp4(recipe: Recipe, tensors: Tensors) -> Canonical:
    """[outputs, inputs / 32, 16 bytes]"""
    return {WEIGHT: tensors["codes"].flatten(1), SCALE: _exponents(tensors["scale"])}


_MOST_STATE = 2**16                  # bytes; a state has 200


def _bnb_state(state: Tensor) -> dict[str, Any]:
    """Sizes are numbers from 1 on."""
    try:
        if state.numel() > _MOST_STATE:                  # each byte becomes a number of Python's
            raise ValueError
        found = json.loads(bytes(state.cpu().tolist()).decode())
        outputs, inputs = (int(size) for size in found["shape"])
        sizes = {name: int(found[name]) for name in ("blocksize", "nested_blocksize") if name in found}
        if min(outputs, inputs, *sizes.values()) < 1:
            raise ValueError
        return found | sizes | {"shape": (outputs, inputs)}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise ModelError("quant_state of bitsandbytes cannot be read") from None


def _bnb_4bit(recipe: Recipe, tensors: Tensors) -> Canonical:
    state = _bnb_state(tensors["state"])
    (outputs, inputs), size = state["shape"], state["blocksize"]
    if state.get("quant_type") != "nf4" or not torch.equal(tensors["table"].float().cpu(), torch.tensor(NF4)):
        raise ModelError(f"bitsandbytes {shown(state.get('quant_type'))} with another table than NF4's is not supported")
    if size != 64 or inputs % size:
        raise ModelError(f"blocks of {size} weights over rows of {inputs} are not supported; rows must be whole blocks of 64")
    scale = tensors["scale"]
    if scale.dtype == torch.uint8:                       # scales are quantised themselves, in blocks of their own
        if "outer" not in tensors or "outer_table" not in tensors:
            raise ModelError("scales are quantised, but nested_absmax or nested_quant_map is missing")
        each = min(state["nested_blocksize"], scale.numel())     # a longer block has no more of them
        blocks = tensors["outer"][: scale.numel()].float().repeat_interleave(each)[: scale.numel()]
        scale = tensors["outer_table"].float()[scale.reshape(-1).int()] * blocks + float(state["nested_offset"])
    data = tensors["codes"].reshape(-1).view(torch.uint8)
    swapped = (data >> 4) | (data << 4)                  # there the first weight is in the high half
    return {WEIGHT: swapped.view(outputs, inputs // 2), SCALE: scale.float().view(outputs, inputs // size)}


def _bitnet(recipe: Recipe, tensors: Tensors) -> Canonical:
    """Bits 2 i and 2 i + 1 of a byte belong to the i-th quarter of the outputs."""
    packed = tensors["codes"]
    codes = torch.cat([(packed >> shift) & 3 for shift in range(0, 8, 2)])
    scale = tensors["scale"].float().reshape(-1)
    if scale.numel() != 1:
        raise ModelError(f"{scale.numel()} scales of a ternary matrix; there must be one")
    scale = _inverse(scale) if recipe.variant == "divides" else scale
    return with_codes(recipe, codes, {SCALE: scale.expand(len(codes)).contiguous()})


def _bitmask(recipe: Recipe, tensors: Tensors) -> Canonical:
    """The values that are not zero, and a bit for each place."""
    outputs, inputs = (int(size) for size in tensors["shape"].tolist())
    places = unpacked_bits(tensors["mask"], 1)[:, :inputs].bool()
    values = tensors["codes"].reshape(-1)
    if places.shape != (outputs, inputs) or int(places.sum()) != values.numel():
        raise ModelError(f"{values.numel()} values for {int(places.sum())} places of a sparse matrix")
    dense = torch.zeros(outputs, inputs, dtype=values.dtype, device=values.device)
    dense[places] = values
    return {WEIGHT: dense}


# ── shapes ───────────────────────────────────────────────────────────────────────────────────────────────────────────

Shapes = Mapping[str, tuple[int, ...]]
Small = Callable[[str], Tensor]


def _shape_of(rows: int, columns: int) -> Callable[[Recipe, Shapes, Small], tuple[int, int]]:
    """Codes [outputs / rows, inputs / columns]"""
    return lambda recipe, shapes, small: (shapes["codes"][0] * rows, shapes["codes"][1] * columns)


def _written_shape(recipe: Recipe, shapes: Shapes, small: Small) -> tuple[int, int]:
    outputs, inputs = (int(size) for size in small("shape").tolist())
    return outputs, inputs


UNPACK: dict[str, tuple[Callable[[Recipe, Shapes, Small], tuple[int, int]], Callable[[Recipe, Tensors], Canonical]]] = {
    "codes": (_shape_of(1, 1), _codes),
    "bnb_8bit": (_shape_of(1, 1), _bnb_8bit),
    "ct_packed": (_written_shape, _ct_packed),
    "gptq": (lambda recipe, shapes, small: (shapes["codes"][1], shapes["codes"][0] * 32 // recipe.bits), _gptq),
    "awq": (lambda recipe, shapes, small: (shapes["codes"][1] * 8, shapes["codes"][0]), _awq),
    "fp4": (_shape_of(1, 2), _fp4),
    "mxfp4": (lambda recipe, shapes, small: (shapes["codes"][0], shapes["codes"][1] * 32), _mxfp4),
    "bnb_4bit": (lambda recipe, shapes, small: _bnb_state(small("state"))["shape"], _bnb_4bit),
    "bitnet": (_shape_of(4, 1), _bitnet),
    "bitmask": (_written_shape, _bitmask),
    "gguf": (_shape_of(1, 1), lambda recipe, tensors: packed_gguf(recipe, tensors["codes"])),
}
