"""What cards in benchmarks/ show of auto: on the embedded model it beats every uniform recipe of the same size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from make_quantize_tables import ALIKE, same_size

PAIRS = same_size("smollm2-135m")


def test_some_card_of_auto_has_rivals() -> None:
    """Of 4 bits by every method, and one that is larger than auto's own output."""
    mine, others = PAIRS[0]
    assert {"int4-rtn", "int4-gptq", "int4-awq", "mxfp4", "nvfp4"} <= {card["recipe"]["name"] for _, card in others}
    assert max(card["size"]["output_bytes"] for _, card in others) >= mine[1]["size"]["output_bytes"] and ALIKE <= 0.05


@pytest.mark.parametrize(("mine", "others"), PAIRS, ids=lambda each: each[0].stem if isinstance(each, tuple) else "")
def test_auto_beats_uniform_recipes_of_its_size(
    mine: tuple[Path, dict[str, Any]], others: list[tuple[Path, dict[str, Any]]]
) -> None:
    for path, card in others:
        assert card["quality"]["texts"] == mine[1]["quality"]["texts"]
        assert card["quality"]["all"]["tokens"] == mine[1]["quality"]["all"]["tokens"]
        assert mine[1]["quality"]["all"]["kl"] < card["quality"]["all"]["kl"], path.stem
    for name, limit in mine[1]["limits"].items():
        assert name == "kl" and all(row["kl"] <= limit for row in mine[1]["quality"]["slices"].values())
