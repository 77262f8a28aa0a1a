"""The op `experts` on one GPU with the matrices of public mixtures: error against the definition, and time by tokens and tiles.

    python benchmarks/studies/experts/tiles.py --out tiles-h200.json [--shape SHAPE ...] [--tokens N ...] [--variants]

Even routing, other tokens in each call, a CUDA graph of several calls, the median of its replays; the time is that of the whole
op, sort and sum included. `--variants` also times other tiles than the chosen ones. Every combination is checked before it is
timed: the error is |out - definition| / |definition| for some tokens, with the definition in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor

from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.graph_times import graph_microseconds
from ridgeline.bench.lab.record import commit
from ridgeline.ops.experts import expert_products, few_bytes, few_tokens, packed_few, packed_products
from ridgeline.ops.experts.expert_products import Tile, experts_triton
from ridgeline.ops.experts.experts_op import experts_reference
from ridgeline.ops.experts.few_bytes import FewBytes
from ridgeline.ops.experts.few_tokens import Few
from ridgeline.ops.experts.matrices import Matrices, numbers
from ridgeline.ops.experts.packed_matrices import pack_experts
from ridgeline.ops.packed.packed_weight import byte_scales
from ridgeline.ops.quantised.expand import QuantisedWeight
from ridgeline.ops.registry import triton

SHAPES = {                           # hidden size, width of an expert, experts, used by a token, weights
    "qwen3-30b-a3b": (2048, 768, 128, 8, "bfloat16"), "mixtral-8x7b": (4096, 14336, 8, 2, "bfloat16"),
    "deepseek-v2-lite": (2048, 1408, 64, 6, "bfloat16"), "gpt-oss-20b": (2880, 2880, 32, 4, "mxfp4"),
    "qwen3-30b-a3b-int4": (2048, 768, 128, 8, "int4"), "qwen3-30b-a3b-fp8": (2048, 768, 128, 8, "fp8"),
}
BYTES = {"bfloat16": 2.0, "mxfp4": 17 / 32, "int4": 0.5 + 2 / 128, "fp8": 1.0}       # of a weight as a checkpoint has it
TOKENS = (1, 2, 8, 32, 128, 512, 2048, 8192)
BANDWIDTH = 4.38e12
CHECKED = 16                         # tokens that are compared with the definition

Replaced = list[tuple[Any, str, Any]]


def variants(weights: str, tokens: int, used: int, experts: int) -> Iterator[tuple[str, Replaced]]:
    """(name, what is replaced for it); the chosen tiles first."""
    yield "chosen", []
    mean = tokens * used / min(tokens * used, experts)
    few = few_tokens.serves(tokens, used, experts)
    if weights == "bfloat16":
        if few:
            for up in (Few(2, 1024, 2), Few(4, 2048, 4), Few(4, 1024, 4)):
                yield f"up {tuple(up)}", [(few_tokens, "few_up", lambda *_, up=up: up)]
        elif mean <= 96:
            for tile in (Tile(16, 64, 128, 4, 4, 1), Tile(32, 64, 64, 4, 4, 1), Tile(64, 64, 64, 4, 4, 1)):
                yield f"tile {tuple(tile)}", [(expert_products, "_measured_tile", lambda *_, tile=tile: tile)]
        return
    if weights == "fp8":
        yield from byte_variants(mean, few)
        return
    if few:
        for warps in (8, 4, 2):
            yield f"up warps {warps}", [(packed_few, "up_warps", lambda _, warps=warps: warps)]
        yield "down warps 4", [(packed_few, "DOWN_WARPS", 4)]
        return
    for rows, shape in (
        (16, (1, 8, 1, 4, 8, 2)), (16, (1, 8, 1, 8, 6, 1)), (32, (1, 8, 1, 4, 5, 2)), (32, (1, 8, 1, 2, 8, 2)),
        (32, (1, 4, 1, 4, 5, 3)), (64, (2, 4, 2, 2, 8, 1)), (64, (2, 4, 1, 4, 5, 1)), (64, (1, 8, 1, 2, 6, 2)),
        (128, (2, 4, 2, 2, 6, 1)), (128, (2, 4, 1, 2, 6, 1)),
    ):
        if mean / 2 <= rows <= max(4 * mean, 32):
            parts, warps, halves, tiles, stages, programs = shape
            plan = packed_products.PackedGemmPlan(rows, parts, warps, halves, tiles, stages, 1, parts * warps * halves, programs)
            yield f"rows {rows} {shape}", [(packed_products, "packed_tile_for", lambda *_, plan=plan: plan)]


def byte_variants(mean: float, few: bool) -> Iterator[tuple[str, Replaced]]:
    if few:
        for up, down in product(((1, 4, 4), (4, 2, 4), (2, 4, 2)), ((2, 3, 8), (4, 3, 8), (2, 2, 8))):
            yield f"up {up} down {down}", [
                (few_bytes, "UP", FewBytes(*up)), (few_bytes, "down_tile", lambda *_, down=down: FewBytes(*down)),
            ]
        yield "tiles", [(expert_products, "serves_bytes", lambda *_: False)]
    else:
        yield "x in 16 bits", [(expert_products, "row_codes", lambda *_: 0)]
    for tile in (
        Tile(16, 64, 128, 4, 4, 1), Tile(16, 128, 128, 8, 3, 1), Tile(16, 128, 128, 8, 4, 1), Tile(32, 64, 128, 4, 4, 1),
        Tile(32, 128, 128, 8, 3, 1), Tile(32, 128, 128, 8, 4, 1), Tile(64, 64, 128, 4, 3, 1), Tile(64, 128, 128, 8, 3, 1),
        Tile(64, 128, 128, 8, 3, 8), Tile(64, 128, 128, 8, 4, 8), Tile(128, 128, 128, 8, 3, 8), Tile(128, 64, 128, 8, 3, 8),
    ):
        if mean / 2 <= tile.rows <= max(4 * mean, 32) and not few:
            yield f"tile {tuple(tile)}", [(expert_products, "row_code_tile_for", lambda *_, tile=tile: tile)]


def matrix(weights: str, experts: int, outputs: int, inputs: int, gated: bool) -> Matrices:
    if weights == "bfloat16":
        return torch.randn(experts, outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
    if weights == "fp8":
        codes = (torch.randn(experts, outputs, inputs, device="cuda", dtype=torch.bfloat16) * 100).clamp_(-448, 448)
        codes = codes.to(torch.float8_e4m3fn)
        scale = (0.5 + torch.rand(experts, outputs // 128, inputs // 128, device="cuda")) * inputs**-0.5 / 100
        return QuantisedWeight("e4m3", inputs, codes, scale, (128, 128))
    group, kind = (32, "e2m1") if weights == "mxfp4" else (128, "uint4")
    codes = torch.randint(0, 256, (experts, outputs, inputs // 2), device="cuda", dtype=torch.uint8)
    power = torch.randint(-1, 2, (experts, outputs, inputs // group), device="cuda").float().exp2()
    scale = (power * inputs**-0.5 / 4).log2().round().exp2().bfloat16()
    return pack_experts(codes, byte_scales(scale, group) if kind == "e2m1" else scale, kind=kind, gated=gated)


def relative_error(call: tuple[Tensor, ...], gate_up: Any, down: Any) -> float:
    x, chosen, shares = call
    found = experts_triton(x, gate_up, down, chosen, shares)[:CHECKED].float()
    matrices = (numbers(each, torch.float32).float() for each in (gate_up, down))
    wanted = experts_reference(x[:CHECKED].float(), *matrices, chosen[:CHECKED], shares[:CHECKED])
    return float((found - wanted).norm() / wanted.norm())


def measure(name: str, counts: list[int], others: bool) -> Iterator[dict[str, Any]]:
    hidden, width, experts, used, weights = SHAPES[name]
    gate_up = matrix(weights, experts, 2 * width, hidden, True)
    down = matrix(weights, experts, hidden, width, False)
    for tokens in counts:
        calls = [
            (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16),
             torch.rand(tokens, experts, device="cuda").topk(used, 1).indices, torch.rand(tokens, used, device="cuda"))
            for _ in range(8 if tokens <= 1024 else 2)
        ]
        visited = sum(len(chosen.unique()) for _, chosen, _ in calls) / len(calls)
        for variant, replaced in variants(weights, tokens, used, experts) if others else [("chosen", [])]:
            found: dict[str, Any] = {"shape": name, "weights": weights, "tokens": tokens, "variant": variant}
            try:
                for target, attribute, value in replaced:
                    mock.patch.object(target, attribute, value).start()
                found["relative_error"] = relative_error(calls[0], gate_up, down)
                found["us"] = graph_microseconds(
                    lambda number, calls=calls: experts_triton(calls[number][0], gate_up, down, *calls[number][1:]),  # type: ignore[misc]
                    len(calls), 1, 5,
                )
            except Exception as error:
                found["error"] = f"{type(error).__name__}: {error}"[:200]
                yield found
                continue
            finally:
                mock.patch.stopall()
            seconds = found["us"] * 1e-6
            found["percent_of_bandwidth"] = 100 * visited * 3 * hidden * width * BYTES[weights] / seconds / BANDWIDTH
            found["tflops"] = tokens * used * 6 * hidden * width / seconds / 1e12
            yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    record: dict[str, Any] = {
        "what": "the op `experts`: even routing, other tokens in each call, a CUDA graph, the median of five replays",
        "command": f"tiles.py --shape {' '.join(args.shape)} --tokens {' '.join(map(str, args.tokens))}"
        + " --variants" * args.variants, "commit": commit(),
        "when": date.today().isoformat(), "gpu": gpu_facts(), "torch": torch.__version__, "triton": triton.__version__,
        "bandwidth": BANDWIDTH, "products": [],
    }
    for name in args.shape:
        for found in measure(name, args.tokens, args.variants):
            record["products"].append(found)
            if "us" in found:
                print(f"{name:20} {found['tokens']:6} {found['us']:9.1f} us {found['percent_of_bandwidth']:5.1f} % "
                      f"{found['tflops']:6.1f} TFLOP/s  error {found['relative_error']:.1e}  {found['variant']}", flush=True)
            else:
                print(f"{name:20} {found['tokens']:6} {found['variant']}: {found['error']}", flush=True)
            if args.out is not None:
                args.out.write_text(json.dumps(record, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
