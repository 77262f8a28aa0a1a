"""Structured output over many schemas with a model of noise: nothing but the grammar makes an answer valid. [P-11]

Over three hundred different schemas: those of test_grammar_engine.py written by hand, others drawn at random, and
parameters of tools as collections of function calls have them (described, with enums, defaults, nested objects and
arrays, few of them required).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar_schemas import WRITTEN, drawn
from served_model import write_model

from ridgeline import LLM, SamplingParams
from ridgeline.sampling_params import StructuredOutputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOOLS, DRAWN = 160, 160
NAMES = [
    "location", "unit", "start_date", "end_date", "user_id", "query", "max_results", "radius_km", "currency", "amount",
    "is_active", "filters", "recipients", "priority", "latitude", "longitude", "language", "tags", "options", "time_of_day",
]
WORDS = ["celsius", "fahrenheit", "asc", "desc", "low", "high", "EUR", "USD", "morning", "per night", "N/A", "größer"]
DEEPEST = 3


def tool(seed: int) -> dict[str, Any]:
    """The parameters of a tool; they depend on the seed alone. Strings are bounded, because noise never ends one."""
    return _parameters(random.Random(f"tool-{seed}"), 0)


def _parameters(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(1, 6 if depth == 0 else 3))
    required = [name for name in names if rng.random() < 0.6]
    schema: dict[str, Any] = {
        "type": "object", "properties": {name: _parameter(rng, depth) for name in names}, "additionalProperties": False,
    }
    return schema | ({"required": required} if required else {})


def _parameter(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "enum", "date", "integer", "number", "boolean", "nullable"]
    kind = rng.choice(kinds if depth >= DEEPEST - 1 else [*kinds, "array", "object", "either"])
    described: dict[str, Any] = {"description": f"The {rng.choice(WORDS)} of it, e.g. \"{rng.choice(WORDS)}\"."}
    if kind == "string":
        return described | {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(3, 12)}
    if kind == "enum":
        values = rng.sample(WORDS, rng.randint(1, 5))
        return described | {"type": "string", "enum": values, "default": values[0]}
    if kind == "date":
        return described | {"type": "string", "format": rng.choice(["date", "date-time", "uuid", "time"])}
    if kind == "integer":
        return described | {"type": "integer", "minimum": rng.choice([0, 1, -90]), "maximum": rng.choice([10, 100, 2_000])}
    if kind == "number":
        return described | {"type": "number", "minimum": -180, "maximum": 180}
    if kind == "boolean":
        return described | {"type": "boolean", "default": rng.random() < 0.5}
    if kind == "nullable":
        return described | {"type": ["string", "null"], "maxLength": 6}
    if kind == "array":
        return described | {"type": "array", "items": _parameter(rng, depth + 1), "maxItems": rng.randint(1, 3)}
    if kind == "either":
        return described | {"anyOf": [_parameter(rng, depth + 1), {"type": "null"}]}
    return described | _parameters(rng, depth + 1)


@pytest.mark.reliability("P-11b")
def test_three_hundred_schemas_have_valid_answers_and_no_dead_end(tmp_path: Path) -> None:
    """[P-11] Every answer ends by itself, which a grammar that comes to a dead end cannot, and jsonschema finds it valid."""
    schemas = [*WRITTEN, *(drawn(5_000 + seed) for seed in range(DRAWN)), *(tool(seed) for seed in range(TOOLS))]
    assert len({json.dumps(schema, sort_keys=True) for schema in schemas}) >= 300
    llm = LLM(
        write_model(tmp_path / "tiny"), load_format="dummy", max_model_len=2_048, num_gpu_blocks_override=8_000, block_size=4,
        max_num_seqs=32, dtype="float64",
    )
    params = [
        SamplingParams(
            seed=seed, temperature=1, max_tokens=1_900,
            structured_outputs=StructuredOutputs(json=schema, disable_any_whitespace=True),
        )
        for seed, schema in enumerate(schemas)
    ]
    outputs = llm.generate(["Hello"] * len(schemas), params, use_tqdm=False)
    llm.close()
    for schema, output in zip(schemas, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.finish_reason == "stop" and answer.stop_reason is None, (schema, answer)
        judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
        assert judge.is_valid(json.loads(answer.text)), (schema, answer.text)
    assert len({output.outputs[0].text for output in outputs}) > 150
