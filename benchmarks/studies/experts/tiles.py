"""Times the op `experts` on a GPU with the matrices of a public mixture: python tiles.py SHAPE [TOKENS ...]"""

from __future__ import annotations

import statistics
import sys

import torch
from torch import Tensor

from ridgeline.ops.experts.expert_products import experts_triton

SHAPES = {                           # hidden size, width of an expert, experts, used by a token
    "qwen3-30b-a3b": (2048, 768, 128, 8), "mixtral-8x7b": (4096, 14336, 8, 2), "gpt-oss-20b": (2880, 2880, 32, 4),
    "deepseek-v2-lite": (2048, 1408, 64, 6),
}
CALLS, REPLAYS, BANDWIDTH = 8, 5, 4.38e12


def main(name: str, counts: list[int]) -> None:
    hidden, width, experts, used = SHAPES[name]
    codes = name.startswith("gpt-oss")
    gate_up, up_scale = matrix(codes, experts, 2 * width, hidden)
    down, down_scale = matrix(codes, experts, hidden, width)
    for tokens in counts:
        calls = [
            (torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16),
             torch.rand(tokens, experts, device="cuda").topk(used, 1).indices, torch.rand(tokens, used, device="cuda"))
            for _ in range(CALLS if tokens <= 1024 else 1)
        ]

        def run(calls: list[tuple[Tensor, ...]] = calls) -> None:
            for x, chosen, shares in calls:
                experts_triton(x, gate_up, down, chosen, shares, scales=(up_scale, down_scale) if codes else None)

        seconds = timed(run) / len(calls)
        visited = sum(len(chosen.unique()) for _, chosen, _ in calls) / len(calls)
        read = visited * 3 * hidden * width * (17 / 32 if codes else 2)
        flops = tokens * used * 6 * hidden * width
        share = read / seconds / BANDWIDTH
        print(f"{name} {tokens:6} tokens {seconds * 1e6:9.1f} us {100 * share:5.1f} % {flops / seconds / 1e12:6.1f} TFLOP/s")


def matrix(codes: bool, experts: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    if not codes:
        weight = torch.randn(experts, outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5
        return weight, weight
    weight = torch.randint(0, 256, (experts, outputs, inputs // 2), device="cuda", dtype=torch.uint8)
    return weight, torch.full((experts, outputs, inputs // 32), 120, device="cuda", dtype=torch.uint8)


def timed(run: object) -> float:
    """Seconds of a replay of the calls in a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()  # type: ignore[operator]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()  # type: ignore[operator]
    found = []
    for _ in range(REPLAYS + 1):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        found.append(begun.elapsed_time(ended) / 1000)
    return statistics.median(found[1:])


if __name__ == "__main__":
    main(sys.argv[1], [int(count) for count in sys.argv[2:]] or [1, 2, 8, 32, 128])
