"""`ridgeline bench comm`: time of collectives between ranks by size of the message, and the line through it.

    seconds = latency + bytes that a rank sends / bandwidth

Ranks are processes of this machine, as those of an engine: over gloo on a CPU, over NCCL on GPUs. Ranks beyond the number of GPUs
share them and talk through sockets: their figures say nothing about a link. `ridgeline plan --comm RECORD` reads the record.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from ridgeline.bench.lab import table
from ridgeline.bench.lab.record import finish, record
from ridgeline.distributed.time_collectives import ONE_SHOT
from ridgeline.errors import ConfigError, EngineDead
from ridgeline.process.children import start_child
from ridgeline.process.cold.temporary_folder import temporary_folder
from ridgeline.report.columns import fitted
from ridgeline.sizes.mesh_shape import ONE_SHOT_MOST

SIZES = [4**power for power in range(5, 14)]             # 1 KiB to 64 MiB
_LONGEST = 300.0                     # seconds
_LOOK = 0.05                         # seconds between two looks at the ranks


def sent(operation: str, size: int, ranks: int) -> float:
    """Bytes that each rank sends for a message of `size`, in the way that moves least."""
    around = (ranks - 1) / ranks
    shares = {"all_reduce": 2 * around, "all_gather": around, "all_to_all": around, ONE_SHOT: ranks - 1.0}
    return size * shares.get(operation, 1.0)


def line(sizes: list[float], seconds: list[float]) -> tuple[float, float | None]:
    """(latency, bytes per second) of the line with the least relative error; no latency is below 0. None: times do not grow with
    sizes."""
    x, y = np.array(sizes), np.array(seconds)
    columns = np.stack((1 / y, x / y), axis=1)
    latency, per_byte = np.linalg.lstsq(columns, np.ones(len(y)), rcond=None)[0]
    if latency < 0:
        latency, per_byte = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    return float(latency), 1 / float(per_byte) if per_byte > 0 else None


def default_sizes(ranks: int) -> list[int]:
    """Each rank holds an equal part of a message, in whole numbers of 4 bytes."""
    return [-(-size // (4 * ranks)) * 4 * ranks for size in SIZES]


def check(args: argparse.Namespace) -> None:
    for option, least in (("ranks", 2), ("repeats", 1), ("in_a_row", 1)):
        if getattr(args, option) < least:
            raise ConfigError(f"--{option.replace('_', '-')} must be at least {least}, got {getattr(args, option)}")
    wrong = [size for size in args.sizes or () if size < 4 * args.ranks or size % (4 * args.ranks)]
    if wrong or (args.sizes is not None and len(set(args.sizes)) < 2):
        raise ConfigError(f"--sizes needs two or more multiples of {4 * args.ranks}, got {wrong or args.sizes}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU, and torch finds none here")


def run(args: argparse.Namespace) -> None:
    check(args)
    args.sizes = args.sizes or default_sizes(args.ranks)
    told = measured(args)
    figures, rows = {}, []
    columns = [(size, f"{label(size)}, µs") for size in (min(args.sizes), max(args.sizes))]
    for name, seconds in told["seconds"].items():
        if len(seconds) < 2:                             # of the sizes that a one-shot all-reduce can have
            continue
        latency, bandwidth = line([sent(name, int(size), args.ranks) for size in seconds], list(seconds.values()))
        gigabytes = None if bandwidth is None else bandwidth / 1e9
        figures[name] = {"latency_us": latency * 1e6, "gigabytes_per_s": gigabytes,
                         "seconds": {size: float(taken) for size, taken in seconds.items()}}
        ends = {column: seconds[str(size)] * 1e6 if str(size) in seconds else "" for size, column in columns}
        rows.append({"collective": name, "latency, µs": latency * 1e6,
                     "bandwidth, GB/s": "" if gigabytes is None else gigabytes, **ends})
    where = "GPUs, over NCCL" if args.device == "cuda" else "the CPU, over gloo"
    print(fitted(f"{args.ranks} ranks on {where}; each time is of one call: the median of {args.repeats} measurements of "
                 f"{args.in_a_row} calls\n"))
    print(table.as_markdown(rows))
    print(fitted("\n" + "\n".join(explained(args, figures, torch.cuda.device_count() if args.device == "cuda" else 0))))
    setting = {name: getattr(args, name) for name in ("ranks", "device", "sizes", "repeats", "in_a_row")}
    finish(record("comm", setting, figures, gpu={"name": told["gpu"]} if args.device == "cuda" else None), args)


def explained(args: argparse.Namespace, figures: dict[str, dict[str, Any]], gpus: int) -> list[str]:
    """What the columns mean, and what is not among the rows."""
    notes = [
        "Latency and bandwidth are of the line through the times of all sizes: time = latency + bytes that a rank sends / "
        "bandwidth. Of a message, each of n ranks sends 2 (n - 1) / n in an all_reduce, (n - 1) / n in an all_gather or "
        "all_to_all, else all. 1 GB is 10^9 bytes, 1 MiB 2^20.",
    ]
    if not gpus:
        notes.append("These are sockets between processes of this machine, as a CPU engine uses them. They say nothing about "
                     "links between GPUs: for those, --device cuda on a machine that has them.")
    elif gpus < args.ranks:
        notes.append(f"{args.ranks} ranks share {gpus} GPU{'s' * (gpus > 1)} and talk through sockets: these times say nothing "
                     "about a link between GPUs.")
    if None in (each["gigabytes_per_s"] for each in figures.values()):
        notes.append("No bandwidth: the times do not grow with the sizes; take larger --sizes, or more --repeats.")
    if gpus and ONE_SHOT not in figures:
        notes.append("Not measured: the one-shot all-reduce, which needs GPUs that read each other's memory, and two --sizes "
                     f"of at most {label(ONE_SHOT_MOST)}.")
    if "send" not in figures:
        notes.append("Not measured: send, from one pipeline stage to the next, which is between two ranks (--ranks 2).")
    return notes


def label(size: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if size < 1024 or unit == "MiB":
            return f"{size:g} {unit}"
        size //= 1024
    raise AssertionError


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """What rank 0 prints."""
    common = {"ranks": args.ranks, "device": args.device, "sizes": sorted(args.sizes), "repeats": args.repeats,
              "in_a_row": args.in_a_row}
    folder = temporary_folder("ridgeline-comm-")
    with tempfile.TemporaryFile() as out:
        children = [
            start_child("ridgeline.distributed.time_collectives", json.dumps(
                common | {"rank": rank, "store": f"{folder}/store"}), stdout=out if rank == 0 else None)
            for rank in range(args.ranks)
        ]
        try:
            _wait(children)
            for child in children:                       # a rank whose peer is gone complains
                with suppress(subprocess.TimeoutExpired):
                    child.wait(5)
        finally:
            for child in children:
                child.kill()
                child.wait()
        out.seek(0)
        found: dict[str, Any] = json.loads(out.read().splitlines()[-1])
    return found


def _wait(children: list[subprocess.Popen[bytes]]) -> None:
    """Until rank 0 is done. Ranks wait for one that died: all are watched."""
    end = time.monotonic() + _LONGEST
    while children[0].poll() != 0:
        died = [f"rank {rank} ended with code {child.returncode}" for rank, child in enumerate(children) if child.poll()]
        if died:
            raise EngineDead(f"{', '.join(died)}; what it said is above")
        if time.monotonic() > end:
            raise EngineDead(f"the collectives took longer than {_LONGEST:.0f} s; try smaller --sizes")
        time.sleep(_LOOK)
