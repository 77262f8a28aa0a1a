"""What differs from layer to layer, read from a model's configuration: sliding windows and ropes, for Hugging Face and GGUF."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import ModelError, shown
from ridgeline.models.config_fields import MAX_LAYERS, MAX_POSITIONS, Fields
from ridgeline.models.family import Family
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.rope import (
    Rope,
    alpha_theta,
    make_rope,
    no_rope,
    numbers_of,
    rope_kind,
    rope_settings,
    yarn_divisors,
    yarn_scale,
)

LAYER_TYPES = ("full_attention", "sliding_attention")
CHUNKED = "chunked_attention"
YARN_SCORES = "rope.scaling.yarn_log_multiplier"
YARN_FACTOR = "rope.scaling.yarn_attn_factor"            # config.json's attention_factor
PATTERN = "attention.sliding_window_pattern"             # of GGUF
GGUF_LOCAL_THETA = 10_000.0          # Gemma-3's rope for layers with a window, where the file does not say


@dataclass(frozen=True, slots=True)
class Temperature:
    """The queries at position p are multiplied by 1 + scale · ln(1 + floor((p + first) / every))."""

    every: float
    scale: float
    first: int
    turned: bool                     # those of layers with a rope, too


def gguf_temperature(fields: Fields, family: Family, key: Callable[[str], str]) -> Temperature | None:
    if family.temperature != "all" or not fields.get(key("attention.temperature_scale")):
        return None
    original = fields.number(key("rope.scaling.original_context_length"))
    return Temperature(original, fields.number(key("attention.temperature_scale")), 0, True)


def read_temperature(fields: Fields, family: Family) -> Temperature | None:
    if family.temperature == "none":
        return None
    if family.temperature == "nope":                     # Llama-4's fields
        tuned = fields.flag("attn_temperature_tuning", True)
        return Temperature(fields.number("floor_scale"), fields.number("attn_scale"), 1, False) if tuned else None
    own = Fields(fields.where, rope_settings(fields.raw, fields.where), {})
    if not own.get("llama_4_scaling_beta"):
        return None
    return Temperature(own.number("original_max_position_embeddings"), own.number("llama_4_scaling_beta"), 0, True)


def windows_that_hide(windows: tuple[int | None, ...], max_position: int) -> tuple[int | None, ...]:
    """A window as long as the longest context hides nothing: such a layer is computed as one with full attention."""
    return tuple(None if window is None or window >= max_position else window for window in windows)


def hf_windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """Of each layer, how many positions it sees, or the size of its chunks."""
    if family.window == "none":
        _check_kinds(fields)
    return (_chunks if family.window == "chunks" else _sliding)(fields, family, num_layers)


def _sliding(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    everything: tuple[int | None, ...] = (None,) * num_layers
    slides = family.window == "all" or family.window == "pattern" or fields.flag("use_sliding_window")
    if family.window == "none" or not slides or not _has_window(fields):
        return everything
    window = fields.integer("sliding_window")
    types = _layer_types(fields, num_layers)
    if types:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if family.window == "all":
        return (window,) * num_layers
    if family.window == "upper":
        first = fields.integer("max_window_layers", minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    pattern = fields.get("sliding_window_pattern")
    # EXAONE writes "LLLG": the last of four is global.
    every = len(pattern) if isinstance(pattern, str) and pattern else fields.integer("sliding_window_pattern", family.full_every)
    return _pattern(family, window, every, num_layers)


def _pattern(family: Family, window: int, every: int, num_layers: int) -> tuple[int | None, ...]:
    return tuple(window if (layer + (not family.full_first)) % every else None for layer in range(num_layers))


def _has_window(fields: Fields) -> bool:
    """A window of null is none, where a field that is left out is the family's usual one."""
    return fields.raw.get("sliding_window", fields.get("sliding_window")) is not None


def _chunks(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The size of each layer's chunks; without a list of layers, those with a rope have them."""
    if "attention_chunk_size" in fields.raw and fields.raw["attention_chunk_size"] is None:
        return (None,) * num_layers
    size = fields.integer("attention_chunk_size")
    types = _layer_types(fields, num_layers, ("full_attention", CHUNKED))
    chunked = [kind == CHUNKED for kind in types] if types else _turned_layers(fields, family, (None,) * num_layers, True)
    return tuple(size if each else None for each in chunked)


def _check_kinds(fields: Fields) -> None:
    """Of a family whose layers all see everything: others have state-space or linear attention in some."""
    for name in ("layer_types", "layers_block_type"):
        kinds = fields.get(name)
        for kind in kinds if isinstance(kinds, list) else ():
            if kind not in ("full_attention", "attention"):
                raise ModelError(f"{fields.where}: layer type {shown(kind)} is not supported; supported: full_attention")


def _layer_types(fields: Fields, num_layers: int, known: tuple[str, ...] = LAYER_TYPES) -> list[str]:
    """Empty: the config does not list them."""
    types = fields.get("layer_types")
    if types is None:
        return []
    if not isinstance(types, list) or len(types) != num_layers:
        raise ModelError(f"{fields.where}: layer_types must list {num_layers} layers, got {shown(types)}")
    for kind in types:
        if kind not in known:
            raise ModelError(f"{fields.where}: layer type {shown(kind)} is not supported; supported: {', '.join(known)}")
    return types


def hf_ropes(
    fields: Fields, family: Family, head_dim: int, max_position: int, windows: tuple[int | None, ...]
) -> tuple[tuple[Rope, ...], int]:
    """The rope of each layer, and the context they are good for (yarn stretches it)."""
    scaling = rope_settings(fields.raw, fields.where)
    if not any(fields.raw.get(name) for name in ("rope_parameters", "rope_scaling")):
        scaling = {**family.defaults.get("rope_scaling", {}), **scaling}
    nested = {kind: scaling[kind] for kind in LAYER_TYPES if isinstance(scaling.get(kind), dict)}
    if nested and "full_attention" not in nested:
        raise ModelError(f"{fields.where}: rope_parameters has no full_attention")
    everywhere = nested.get("full_attention", scaling)

    dim = _rotated_dim(fields, family, everywhere, head_dim)
    original = fields.get("original_max_position_embeddings")
    if original is not None:         # Phi-3 has it outside the dictionary, and there it counts
        everywhere = {**everywhere, "original_max_position_embeddings": original}

    def rope(parameters: Mapping[str, Any], theta_name: str) -> Rope:
        own = Fields(fields.where, parameters, {})
        theta = own.number("rope_theta", fields.number(theta_name, 10_000.0))
        if family.alpha_rope:
            theta = alpha_theta(parameters, theta, dim, fields.where)
        return make_rope(parameters, theta, dim, max_position, family.longrope, fields.where)

    full = rope(everywhere, "rope_theta")
    _check_scale(full, fields, family)
    local = full
    if family.local_rope:
        local = rope(nested.get("sliding_attention", {}), "rope_local_base_freq")
    if rope_kind(everywhere, family.longrope) == "yarn":
        before = everywhere.get("original_max_position_embeddings") or max_position
        stretched = float(before) * (everywhere.get("factor") or 1.0)        # both were checked with the rope
        if not stretched <= MAX_POSITIONS:
            words = f"yarn stretches the context to {stretched:g} tokens"
            raise ModelError(f"{fields.where}: {words}; at most {MAX_POSITIONS} are allowed")
        max_position = max(max_position, int(stretched))
    turned = _turned_layers(fields, family, windows, _has_window(fields))
    return tuple(
        (full if window is None else local) if turns else no_rope(dim) for window, turns in zip(windows, turned, strict=True)
    ), max_position


def _check_scale(rope: Rope, fields: Fields, family: Family) -> None:
    if (family.late_qk_norm or family.bare_qk_norm) and rope.scale != 1.0:       # norms behind the rotation take it away again
        raise ModelError(f"{fields.where}: a rope with a scale of {rope.scale:g} is not supported for {family.name}")


def _turned_layers(fields: Fields, family: Family, windows: tuple[int | None, ...], has_window: bool) -> list[bool]:
    """For each layer, whether it has a rope. `has_window`: the model has a window, be it that every layer is a full one."""
    if family.nope in ("full", "hybrid"):
        everywhere = family.nope == "hybrid" and not has_window
        return [window is not None or everywhere for window in windows]
    if family.nope in ("none", "all"):
        return [family.nope == "none"] * len(windows)
    every = fields.integer("no_rope_layer_interval", 4)
    listed = fields.get("no_rope_layers") or [int((layer + 1) % every > 0) for layer in range(len(windows))]
    if not isinstance(listed, list) or len(listed) != len(windows) or not all(each in (0, 1) for each in listed):
        raise ModelError(f"{fields.where}: no_rope_layers must list {len(windows)} times 0 or 1, got {shown(listed)}")
    return [bool(each) for each in listed]             # despite the name, 1 is a layer with a rope


def _rotated_dim(fields: Fields, family: Family, parameters: Mapping[str, Any], head_dim: int) -> int:
    if family.latent:
        return head_dim              # qk_rope_head_dim says it
    partial = fields.number("partial_rotary_factor", 1.0)
    if family.partial_rotary and fields.get("rotary_dim") and not fields.raw.get("partial_rotary_factor"):
        partial = fields.integer("rotary_dim") / head_dim            # MiniMax-M2
    partial = Fields(fields.where, parameters, {}).number("partial_rotary_factor", partial)
    if partial != 1.0 and not family.partial_rotary:
        raise ModelError(f"{fields.where}: partial_rotary_factor {partial!r} is not supported for {family.name}")
    dim = int(head_dim * min(partial, 2.0))
    if dim % 2 or not 0 < dim <= head_dim:
        raise ModelError(f"{fields.where}: {dim} rotated dimensions of a head of {head_dim}: must be even")
    return dim


def gguf_layers(fields: Fields, key: Callable[[str], str]) -> int:
    """How many layers there are, without those that predict the token after next, which `block_count` counts too."""
    count = fields.integer(key("block_count"), maximum=MAX_LAYERS)
    drafts = fields.integer(key("nextn_predict_layers"), 0, minimum=0, maximum=count - 1)
    heads = fields.get(key("attention.head_count_kv"))
    if isinstance(heads, list) and 0 in heads:
        raise ModelError(f"{fields.where}: layers without attention (a state-space hybrid) are not supported: "
                         f"{key('attention.head_count_kv')} is 0 for {heads.count(0)} of {len(heads)}")
    return count - drafts


def gguf_windows(
    fields: Fields, family: Family, num_layers: int, key: Callable[[str], str]
) -> tuple[int | None, ...]:
    if family.window == "none" or not fields.get(key("attention.sliding_window")):
        return (None,) * num_layers
    window, listed = fields.integer(key("attention.sliding_window")), fields.get(key(PATTERN))
    if isinstance(listed, list):                         # of each layer, whether it has the window
        if len(listed) < num_layers or not all(each in (0, 1) for each in listed):
            raise ModelError(f"{fields.where}: {key(PATTERN)} must list {num_layers} times true or false, got {shown(listed)}")
        return tuple(window if slides else None for slides in listed[:num_layers])
    if family.window == "pattern":
        return _pattern(family, window, fields.integer(key(PATTERN), family.full_every), num_layers)
    return (window,) * num_layers


def gguf_ropes(
    file: GGUFFile, fields: Fields, family: Family, head_dim: int, max_position: int,
    windows: tuple[int | None, ...], key: Callable[[str], str],
) -> tuple[Rope, ...]:
    dim = fields.integer(key("rope.dimension_count"), head_dim)
    if dim % 2 or dim > head_dim:
        raise ModelError(f"{fields.where}: {key('rope.dimension_count')} must be even and at most {head_dim}, "
                         f"got {dim}")
    full = _gguf_full_rope(file, fields, dim, max_position, key)
    _check_scale(full, fields, family)
    local = full
    if family.local_rope:
        usual = full.theta if family.spelled.get("rope_local_base_freq") == "rope_theta" else GGUF_LOCAL_THETA
        local = Rope(fields.number(key("rope.freq_base_swa"), usual), dim)
    # Files do not list them: those that are usual.
    turned = _turned_layers(fields, family, windows, bool(fields.get(key("attention.sliding_window"))))
    return tuple(
        (full if window is None else local) if turns else no_rope(dim) for window, turns in zip(windows, turned, strict=True)
    )


def gguf_score_scale(fields: Fields, family: Family, key: Callable[[str], str]) -> float:
    """As yarn_score_scale: DeepSeek's files have a tenth of mscale_all_dim, and take mscale to be the same."""
    if not family.latent or fields.get(key("rope.scaling.type")) != "yarn" or not fields.get(key(YARN_SCORES)):
        return 1.0
    return yarn_scale(fields.number(key("rope.scaling.factor")), 10 * fields.number(key(YARN_SCORES))) ** 2


def _gguf_full_rope(file: GGUFFile, fields: Fields, dim: int, max_position: int, key: Callable[[str], str]) -> Rope:
    """Of layers that see the whole context."""
    theta = fields.number(key("rope.freq_base"), 10_000.0)
    kind = fields.get(key("rope.scaling.type"), "none")
    usual = yarn_scale(fields.number(key("rope.scaling.factor")), 1.0) if kind == "yarn" else 1.0
    _check_yarn_factor(fields, key(YARN_FACTOR), usual)
    short, long = (_gguf_divisors(file, f"rope_factors_{name}.weight", dim, fields.where) for name in ("short", "long"))
    if short and long:
        return Rope(theta, dim, short, fields.number(key("rope.scaling.attn_factor"), 1.0), long,
                    fields.integer(key("rope.scaling.original_context_length"), max_position))
    if kind == "yarn":
        factor = fields.number(key("rope.scaling.factor"))
        original = fields.number(key("rope.scaling.original_context_length"), max_position)
        fast = fields.number(key("rope.scaling.yarn_beta_fast"), 32.0)
        slow = fields.number(key("rope.scaling.yarn_beta_slow"), 1.0)
        # Older files of OLMo 3 have config.json's attention_factor there. It stands in the place of yarn's own, as in training;
        # llama.cpp multiplies the two.
        given = fields.number(key("rope.scaling.attn_factor"), 1.0)
        scale = usual if math.isclose(given, usual, rel_tol=1e-6) else given * usual
        if fields.get(key(YARN_SCORES)):
            scale = 1.0              # the scores are scaled instead, or mscale and mscale_all_dim are the same
        with numbers_of(fields.where):
            return Rope(theta, dim, yarn_divisors(theta, dim, factor, original, fast, slow, truncate=True), scale)
    if kind not in ("none", "linear", "longrope"):
        raise ModelError(f"{fields.where}: {key('rope.scaling.type')} {shown(kind)} is not supported; supported: none, "
                         "linear, yarn, longrope")
    factor = fields.number(key("rope.scaling.factor"), 1.0) if kind == "linear" else 1.0
    stored = _gguf_divisors(file, "rope_freqs.weight", dim, fields.where) or (1.0,) * (dim // 2)
    scaled = tuple(factor * divisor for divisor in stored)
    return Rope(theta, dim, scaled if set(scaled) != {1.0} else ())


def _check_yarn_factor(fields: Fields, name: str, usual: float) -> None:
    """llama.cpp's converter copies OLMo 3's, which is what yarn's factor gives; llama.cpp takes no other for a yarn rope."""
    given = fields.number(name, 1.0)
    if not any(math.isclose(given, each, rel_tol=1e-6) for each in (1.0, usual)):
        words = " or ".join(f"{each:g}" for each in sorted({1.0, usual}))
        raise ModelError(f"{fields.where}: {name} {shown(fields.get(name))} is not supported; supported: {words}")


def _gguf_divisors(file: GGUFFile, name: str, dim: int, where: str) -> tuple[float, ...]:
    """Of the frequencies, from a tensor; empty: the file has none of this name."""
    if name not in file.tensors:
        return ()
    values = tuple(float(value) for value in file.read(name).reshape(-1))
    if len(values) != dim // 2 or not all(0 < value < math.inf for value in values):
        raise ModelError(f"{where}: tensor {name} must hold {dim // 2} positive numbers")
    return values
