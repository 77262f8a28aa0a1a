"""One scale for a matrix (`w8a8-static`, `fp8-static`) beside one for each output (`w8a8`, `fp8`), on the embedded model.

    python benchmarks/studies/static_scales/run.py --work DIR [--recipes w8a8-static]

The rivals' figures are those of their cards in benchmarks/cards, which must have read the same text. An output that is in DIR
already is not made again: each row names the commit of its card.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ridgeline.config import EngineConfig
from ridgeline.evaluate.slices import SLICES
from ridgeline.evaluate.task import Task
from ridgeline.quant.quality_card import find_card
from ridgeline.quantize.quantize_model import Job, quantize
from ridgeline.quantize.recipes import read_recipe
from ridgeline.resolve import model_path

CARDS = Path(__file__).resolve().parents[2] / "cards"
STATIC = "-static"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for outputs")
    parser.add_argument("--recipes", nargs="+", default=["w8a8-static", "fp8-static"])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    task = Task(slices=tuple(SLICES), context=256, tokens=512, seed=0, speed=True)
    result: dict[str, Any] = {}
    for recipe in args.recipes:
        out = args.work / f"smol-{recipe}"
        if not out.exists():
            quantize(Job(model=model_path(EngineConfig.of(model="")), recipe=read_recipe(recipe), out=out, card=task))
        found = find_card(out)
        assert found is not None and found.matches, out
        rival = recipe.removesuffix(STATIC)
        rows = {recipe: found.card, rival: json.loads((CARDS / f"smollm2-135m-{rival}.json").read_text(encoding="utf-8"))}
        assert len({str(card["quality"]["texts"]) for card in rows.values()}) == 1, recipe
        result |= {name: figures(card) for name, card in rows.items()}
        print(f"{recipe}: KL {result[recipe]['kl']:.3f}, {rival}: {result[rival]['kl']:.3f}", flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def figures(card: dict[str, Any]) -> dict[str, Any]:
    every = card["quality"]["all"]
    return {"kl": every["kl"], "flips": 1 - every["top1"], "perplexity": every["perplexity"], "tokens": every["tokens"],
            "slices": {name: row["kl"] for name, row in card["quality"]["slices"].items()}, "machine": card["machine"],
            "versions": card["versions"], "calibration": card["calibration"], "time": card["time"]}


if __name__ == "__main__":
    main()
