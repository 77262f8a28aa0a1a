"""Factors of embeddings, of what a layer adds to the stream, of scores and logits, and their caps, as families spell them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ridgeline.models.config_fields import Fields
from ridgeline.models.family import Family


@dataclass(frozen=True, slots=True)
class Multipliers:
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0              # they are divided by it
    attention: float | None = None   # in place of the head's own scale


def gguf_multipliers(fields: Fields, family: Family, key: Callable[[str], str]) -> Multipliers:
    if family.logit_scale:
        return Multipliers(logits=1 / fields.number(key("logit_scale")))
    if family.depth_scale:                               # files of MiniCPM3, and old ones of MiniCPM, do not say them
        usual = read_multipliers(Fields(fields.where, {
            "num_hidden_layers": fields.get(key("block_count")), "hidden_size": fields.get(key("embedding_length")),
        }, family.defaults), family)
        return Multipliers(
            fields.number(key("embedding_scale"), usual.embedding), fields.number(key("residual_scale"), usual.residual),
            fields.number(key("logit_scale"), usual.logits),
        )
    if not family.multipliers:
        return Multipliers()
    scale = fields.number(key("attention.scale")) if fields.get(key("attention.scale")) else None
    embedding, residual, logits = (fields.number(key(name), 1.0) for name in ("embedding_scale", "residual_scale", "logit_scale"))
    return Multipliers(embedding, residual, logits, scale)


def read_multipliers(fields: Fields, family: Family) -> Multipliers:
    if family.multipliers:
        return Multipliers(
            fields.number("embedding_multiplier", 1.0), fields.number("residual_multiplier", 1.0),
            fields.number("logits_scaling", 1.0),
            fields.number("attention_multiplier") if fields.get("attention_multiplier") is not None else None,
        )
    if family.depth_scale:
        depth = math.sqrt(fields.integer("num_hidden_layers"))
        hidden = fields.integer("hidden_size")
        return Multipliers(
            fields.number("scale_emb"), fields.number("scale_depth") / depth, hidden / fields.integer("dim_model_base"),
        )
    return Multipliers()


def gguf_epsilon(fields: Fields, family: Family, key: Callable[[str], str]) -> float:
    """Of the norms. Some converters write it under the name of the other kind of norm."""
    names = [key(f"attention.layer_norm_{kind}epsilon") for kind in ("rms_", "")]
    usual, other = names if family.norm == "rms" else reversed(names)
    return fields.number(usual, fields.get(other))


CAPS = {"attention_softcap": "attn_logit_softcapping", "final_softcap": "final_logit_softcapping"}


def read_softcaps(fields: Fields, family: Family) -> dict[str, Any]:
    """Caps of scores and of logits; None: there is none. A field of null says so where the family has a usual cap."""
    caps: dict[str, Any] = dict.fromkeys(CAPS)
    for cap, name in CAPS.items():
        given = fields.raw.get(fields.spelled.get(name, name), ...)
        if family.softcaps and given is not None and fields.get(name) is not None:
            caps[cap] = fields.number(name)
    return caps


def gguf_softcaps(fields: Fields, family: Family, key: Callable[[str], str]) -> dict[str, Any]:
    caps: dict[str, Any] = dict.fromkeys(CAPS)
    for cap, name in CAPS.items():
        usual = family.defaults.get(name)
        if family.softcaps and family.spelled.get(name) != "" and fields.get(key(name), usual):      # 0 stands for none
            caps[cap] = fields.number(key(name), usual)
    return caps
