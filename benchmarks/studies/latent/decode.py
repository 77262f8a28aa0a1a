"""Decode attention over latents on one GPU: microseconds, and the share of the memory's bandwidth that reading the latents takes.

    python benchmarks/studies/latent/decode.py --out decode-h200.json

Rows with one query each and as many keys; the whole op (queries absorbed, attention, shares merged, sums widened) in a CUDA
graph, the median of its replays. The latents of one call are more than the L2 cache holds. `error` is that of the first rows
against the definition in float32, |out - definition| / |definition|.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.graph_times import graph_microseconds
from ridgeline.bench.lab.record import commit
from ridgeline.ops.attention.attention_arguments import latent_shares
from ridgeline.ops.latent.latent_attention import latent_attention, latent_attention_triton
from ridgeline.ops.latent.latent_reference import latent_attention_reference
from ridgeline.ops.registry import triton

NOPE, ROPE, VALUE, RANK, BLOCK = 128, 64, 128, 512, 16
BANDWIDTH = 4.38e12
POINTS = ((16, 64, 8192), (128, 64, 8192), (16, 128, 640), (16, 1, 8192))        # heads, rows, keys


def measure(heads: int, rows: int, keys: int) -> dict[str, Any]:
    pages = keys // BLOCK
    generator = torch.Generator(device="cuda").manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device="cuda") * scale).bfloat16()

    cache = torch.empty((rows * pages + 1, BLOCK, 1, RANK + ROPE), dtype=torch.bfloat16, device="cuda")
    for first in range(0, len(cache), 4096):
        cache[first : first + 4096] = draw(*cache[first : first + 4096].shape)
    table = 1 + torch.randperm(rows * pages, generator=generator, device="cuda").view(rows, pages).int()
    q, kv_up = draw(rows, heads, NOPE + ROPE), draw(heads, NOPE + VALUE, RANK, scale=RANK**-0.5)
    start, lengths = list(range(rows + 1)), [keys] * rows
    slots = table[:, -1].long() * BLOCK + (keys - 1) % BLOCK

    def arguments(number: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = {
            "query_start_host": start[: number + 1], "kv_len_host": lengths[:number], "scale": (NOPE + ROPE) ** -0.5,
            "nope": NOPE, "slots": slots[:number], "shares": latent_shares(lengths[:number], heads, torch.device("cuda")),
        }
        on_gpu = [torch.tensor(each, dtype=torch.int32, device="cuda") for each in (start[: number + 1], lengths[:number])]
        return (q[:number], cache, kv_up, table[:number], *on_gpu), given

    args, given = arguments(rows)
    found = latent_attention_triton(*args, **given)[:2].float()
    few, options = arguments(min(2, rows))
    wanted = latent_attention_reference(*(each.float() if each.is_floating_point() else each for each in few), **options)
    error = float((found[: len(wanted)] - wanted.view_as(found[: len(wanted)])).norm() / wanted.norm())
    microseconds = graph_microseconds(lambda number: latent_attention_triton(*args, **given), 4, 2, 7)
    share = rows * keys * (RANK + ROPE) * 2 / (microseconds * 1e-6) / BANDWIDTH
    return {"heads": heads, "rows": rows, "keys": keys, "us": microseconds, "percent_of_bandwidth": 100 * share, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {
        "what": f"the op `{latent_attention.name}`, decodes: a CUDA graph, the median of seven replays",
        "command": "benchmarks/studies/latent/decode.py", "commit": commit(), "when": date.today().isoformat(),
        "gpu": gpu_facts(), "torch": torch.__version__, "triton": triton.__version__, "bandwidth": BANDWIDTH, "points": [],
    }
    for point in POINTS:
        found = measure(*point)
        record["points"].append(found)
        text = "{heads:4} heads {rows:4} rows {keys:6} keys {us:9.1f} us {percent_of_bandwidth:5.1f} %  error {error:.1e}"
        print(text.format(**found), flush=True)
        torch.cuda.empty_cache()
        if args.out is not None:
            args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
