"""Decode speed of mixtures with Zipf routing, predicted from the records with even routing before the first run.

    python benchmarks/studies/experts/predict_zipf.py > benchmarks/predictions/zipf-h200.json
    python benchmarks/studies/experts/predict_zipf.py --tiles          # that a layer's pairs make, by the rows of a tile

The experts of a step take time in proportion to those that its tokens visit: simulated, with logits of standard deviation
0.02 sqrt(hidden), as dummy weights give them, and the bias of layers/mixture.py. One request reads as many experts as before.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from ridgeline.bench.workload.shapes import MIXTURES

RECORDS = Path(__file__).resolve().parents[2] / "h200"
BEFORE = {"qwen3-30b-a3b": RECORDS / "history" / "459f2ec8247b"}         # the record that there was then
EXPERTS = {"qwen3-30b-a3b": (128, 8), "gpt-oss-20b": (32, 4), "deepseek-v2-lite": (64, 6)}        # all, and of a token
ROWS, DRAWS = 128, 40


def tiles(count: int, used: int, spread: float, zipf: bool, rows: int = ROWS) -> float:
    """Of so many rows that ROWS tokens make in a layer, in the mean: with one of ROWS, the experts that they visit."""
    total = 0
    for _ in range(DRAWS):
        bias = -torch.log1p(torch.randperm(count).float()) if zipf else torch.zeros(count)
        chosen = (spread * torch.randn(ROWS, count) + bias).topk(used).indices
        total += int((chosen.flatten().bincount() + rows - 1).div(rows, rounding_mode="floor").sum())
    return total / DRAWS


def predicted(name: str) -> dict[str, object]:
    rows = json.loads((BEFORE.get(name, RECORDS) / f"offline-{name}.json").read_text())["figures"]["rows"]
    batch, (count, used) = rows["batch128"], EXPERTS[name]
    spread = 0.02 * MIXTURES[name]["hidden_size"] ** 0.5
    even, zipf = (tiles(count, used, spread, which) for which in (False, True))
    floor = batch["floor"]["counted"]
    of_experts = floor["seconds_by_part"]["experts"] / floor["seconds"]
    seconds = ROWS / batch["median"]["decode_tok_s"] * (1 - of_experts * (1 - zipf / even))
    return {
        "model": f"{name}-zipf", "experts_visited_even": round(even, 1), "experts_visited_zipf": round(zipf, 1),
        "batch128_decode_tok_s": round(ROWS / seconds),
        "latency_b1_decode_tok_s": round(rows["latency_b1"]["median"]["decode_tok_s"]),
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    if "--tiles" in sys.argv:
        for name, (count, used) in EXPERTS.items():
            spread = 0.02 * MIXTURES[name]["hidden_size"] ** 0.5
            found = {rows: round(tiles(count, used, spread, True, rows)) for rows in (16, 32, 64, ROWS)}
            print(f"{name}-zipf: {found} tiles by rows")
        sys.exit()
    print(json.dumps({"what": "Mixtures with Zipf routing on one H200, predicted before any of them has run there.",
                      "made_on": "2026-11-18", "predictions": [predicted(name) for name in EXPERTS]}, indent=1))
