"""One rank of `ridgeline bench comm`: it meets the others and runs every collective at every size; rank 0 prints the seconds."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline.distributed.comm import ProcessAxis
from ridgeline.distributed.meet import ProcessMesh, meet
from ridgeline.sizes.mesh_shape import ONE_SHOT_MOST, MeshShape

ONE_SHOT = "all_reduce, one-shot"    # small messages between GPUs that read each other's memory
_ELEMENT = 4                         # bytes: numbers are float32


Calls = dict[str, Callable[[Tensor], object]]


def operations(axis: ProcessAxis) -> Calls:
    """By name; each takes a tensor of the message's size on every rank."""
    return {
        "all_reduce": axis.sum_over_group,
        "all_gather": lambda x: axis.all_gather(x.view(1, -1)[:, : x.numel() // axis.size]),
        "all_to_all": lambda x: axis.all_to_all(x.view(axis.size, -1)),
        "broadcast": axis.broadcast,
    }


def seconds(call: Callable[[Tensor], object], x: Tensor, repeats: int, in_a_row: int) -> float:
    """Of one call: the median over groups of calls."""
    def wait() -> None:
        if x.is_cuda:
            torch.cuda.synchronize()

    taken = []
    for _ in range(1 + repeats):                         # the first makes connections
        wait()
        began = time.perf_counter()
        for _ in range(in_a_row):
            call(x)
        wait()
        taken.append((time.perf_counter() - began) / in_a_row)
    return statistics.median(taken[1:])


def measure(given: dict[str, Any]) -> dict[str, dict[str, float]]:
    rank, ranks, device = given["rank"], given["ranks"], torch.device(given["device"])
    torch.set_num_threads(1)
    backend = "gloo"
    if device.type == "cuda":
        backend = "nccl"
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    found: dict[str, dict[str, float]] = {}

    def run(chosen: Calls, most: float = math.inf) -> None:
        for name, call in chosen.items():
            sizes = [size for size in given["sizes"] if size <= most]
            inputs = (torch.zeros(size // _ELEMENT, device=device) for size in sizes)
            found[name] = {str(size): seconds(call, x, given["repeats"], given["in_a_row"])
                           for size, x in zip(sizes, inputs, strict=True)}

    def leave(mesh: ProcessMesh) -> None:
        mesh.agree(True)                                 # no rank leaves while another still waits for it
        mesh.close()

    mesh = meet(MeshShape(ranks, 1), rank, given["store"], backend)
    assert isinstance(mesh.tensor, ProcessAxis)
    run(operations(mesh.tensor))
    mesh.reach_peers(device)
    if mesh.tensor.one_shot is not None:                 # at all sizes that it can take, also where NCCL is faster
        run({ONE_SHOT: mesh.tensor.one_shot.sum}, ONE_SHOT_MOST)
    leave(mesh)
    if ranks == 2:                                       # a hop from stage to stage; rank 0 is the last one
        mesh = meet(MeshShape(1, 2), rank, given["store"] + "-stages", backend)
        run({"send": mesh.stages.send if rank else mesh.stages.receive})
        leave(mesh)
    return found


def main(settings: str) -> int:
    given = json.loads(settings)
    found = measure(given)
    if given["rank"] == 0:
        print(json.dumps({"seconds": found, "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else ""}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
