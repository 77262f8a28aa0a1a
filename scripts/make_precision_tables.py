"""Writes the tables of docs/precision.md from records: `python scripts/make_precision_tables.py --write`.

Quality comes from records of `ridgeline eval` (benchmarks/*/eval-*.json), speed from those of `ridgeline bench offline`. A table
stands between two comments; everything else on the page is written by hand.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from generated_page import with_tables, write_or_compare

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "precision.md"
MODELS = {"SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": "Qwen2.5-Coder-1.5B",
          "Qwen2.5-Coder-1.5B-Instruct": "Qwen2.5-Coder-1.5B"}
SPEED = {
    "bf16": "", "fp8 weights": "-fp8", "fp8 weights, fp8 KV": "-fp8-all", "fp8-block weights": "-fp8-block",
    "int8 weights": "-int8", "int4 weights": "-int4", "mxfp4 weights": "-mxfp4", "NVFP4 checkpoint": "-nvfp4",
    "GGUF Q4_K_M": "-q4_k_m", "GGUF Q8_0": "-q8_0",
    "fp8 KV": "-fp8-kv", "int8 KV": "-int8-kv",
}
WORKLOADS = ("latency_b1", "batch128", "decode_16x8k")


def quality() -> str:
    """A line for every record of a format against the unquantised run of the same model on the same device."""
    lines = [
        "| format | model, device | tokens | perplexity × | KL mean | KL P99 | same top-1 | worst tenth, KL | needle | record |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    found = []
    for path in sorted(ROOT.glob("benchmarks/*/eval-*.json")):
        record = json.loads(path.read_text())
        options, figures = record["workload"]["options"], record["figures"]
        made, cached = options.get("quantization", ""), options.get("kv_cache_dtype", "")
        if not (made or cached) or "reference" not in figures:
            continue
        place = "H200" if record["machine"].get("gpu") else "CPU"
        name = " and ".join(each for each in (f"{made} weights" * bool(made), f"{cached} KV" * bool(cached)) if each)
        found.append((bool(cached), name, place, _quality_line(name, place, path, figures)))
    return "\n".join(lines + [line for *_, line in sorted(found)])


def _quality_line(name: str, place: str, path: Path, figures: dict[str, Any]) -> str:
    every, needle = figures["all"], figures.get("needle")
    cells = (
        name, f"{MODELS.get(figures['model'], figures['model'])}, {place}", f"{every['tokens']:,}",
        f"{every['perplexity_ratio']:.4f}",
        f"{every['kl']:.4f}", f"{every['kl_p99']:.3f}", f"{every['top1']:.1%}", f"{figures['worst_decile']['kl']:.4f}",
        "–" if not needle else f"{round(needle['found'] * needle['trials'])} of {needle['trials']}",
        f"[{path.stem}](../{path.relative_to(ROOT)})",
    )
    return f"| {' | '.join(cells)} |"


def speed() -> str:
    """Decode rates of the records of Llama-3.1-8B's shapes; a dash where a workload was not measured."""
    lines = [
        "| format | 1 request | 128 × (512, 256) | 16 × (8,192, 128) | KV blocks | record |",
        "|---|---|---|---|---|---|",
    ]
    for name, ending in SPEED.items():
        path = ROOT / f"benchmarks/h200/offline-llama-3.1-8b{ending}.json"
        if path.is_file():
            record = json.loads(path.read_text())
            rows = record["figures"]["rows"]
            rates = [f"{rows[each]['median']['decode_tok_s']:,.0f}" if each in rows else "–" for each in WORKLOADS]
            cells = (name, *rates, f"{record['workload']['kv_blocks']:,}", f"[{path.stem}](../{path.relative_to(ROOT)})")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page() -> str:
    return with_tables(PAGE, {"quality": quality, "speed": speed})


if __name__ == "__main__":
    sys.exit(write_or_compare(PAGE, page()))
