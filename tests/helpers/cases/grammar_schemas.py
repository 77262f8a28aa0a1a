"""JSON Schemas to constrain answers with: drawn at random from what people write, and some written by hand.

Everything is bounded (string lengths, array sizes), because a model that answers noise never closes a string by itself.
"""

from __future__ import annotations

import random
from typing import Any

# Of an engine whose tiny model answers noise, and what its answers are asked to be.
OPTIONS: dict[str, Any] = {
    "load_format": "dummy", "max_model_len": 512, "num_gpu_blocks_override": 1500, "block_size": 4, "max_num_seqs": 32,
    "dtype": "float64",
}
SCHEMA: dict[str, Any] = {
    "type": "object", "additionalProperties": False, "required": ["id", "name", "tags"],
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 9999}, "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
}
WRITTEN: list[dict[str, Any]] = [
    {"type": "string", "format": "date"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "pattern": "^[a-z]{2,5}-[0-9]{3}$"},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": ["string", "null"], "maxLength": 4},
    {"type": "integer", "minimum": -20, "maximum": 1000},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 7},
    {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"const": {"a": [1, None, True]}},
    {"enum": ["rot", "grün", "blau", 3, None, {"x": 1}]},
    {"type": "array", "prefixItems": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "boolean"}], "items": False,
     "minItems": 2},
    {"type": "array", "items": {"type": "array", "items": {"type": "null"}, "maxItems": 2}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}]},
    {"oneOf": [
        {"type": "object", "properties": {"kind": {"const": "circle"}, "radius": {"type": "integer", "minimum": 0,
         "maximum": 99}}, "required": ["kind", "radius"], "additionalProperties": False},
        {"type": "object", "properties": {"kind": {"const": "square"}, "side": {"type": "integer", "minimum": 0,
         "maximum": 99}}, "required": ["kind", "side"], "additionalProperties": False},
    ]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 0},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {
        "value": {"type": "integer", "minimum": 0, "maximum": 9},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
     }, "required": ["value", "next"], "additionalProperties": False}}},
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "arguments": {"type": "object", "properties": {
        "city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}}, "required": ["city"],
        "additionalProperties": False}}, "required": ["name", "arguments"], "additionalProperties": False},
]


def drawn(seed: int) -> dict[str, Any]:
    """A schema that depends on the seed alone."""
    rng = random.Random(seed)
    return _object(rng, 0) if rng.random() < 0.8 else _any(rng, 0)


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_string, _integer, _choice, _simple]
    kinds = leaves if depth >= 3 else [*leaves, _object, _array, _union]
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["id", "name", "größe", "a b", "x-y", "items", "type", "quo\"te", "e", "flag"], rng.randint(0, 4))
    required = [name for name in names if rng.random() < 0.7]
    properties = {name: _any(rng, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth + 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string"} | ({"maxLength": rng.randint(0, 6)} if rng.random() < 0.7 else {"pattern": "^[A-F]{1,3}$"})


def _integer(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": rng.sample(["a", "b", "long value", 1, 2.5, None, True, "ü"], rng.randint(1, 5))}


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice([{"type": "boolean"}, {"type": "null"}, {"const": "fixed"}, {"const": 7}])
