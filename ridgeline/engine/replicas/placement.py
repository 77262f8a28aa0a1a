"""Where the engines of one front end run: which GPUs each of them sees, and how engines on one device divide it. No torch.

    4 engines, 4 GPUs                   one each
    2 engines of 2 ranks, 4 GPUs        0,1 and 2,3
    4 engines, 2 GPUs                   two on each GPU, with half of gpu_memory_utilization each
    4 engines, 1 CPU                    a quarter of the cores and of the memory each

Engines that share a device share its bandwidth too: they compute no faster than one engine would. This is for tests, and for a
CPU with several memory controllers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.process.platform import ENGINES_HERE, cpu_count

MOST_SHARING = 8                     # engines on one device, or on a CPU of fewer cores: more only divide its memory
VISIBLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Placement:
    """Of one engine."""

    environment: Mapping[str, str] = field(default_factory=dict)
    sharing: int = 1                 # engines on its device, itself included
    device: str = ""                 # in words, for people


def visible_gpus(environment: Mapping[str, str] = os.environ, folder: Path = Path("/dev")) -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES writes them."""
    if VISIBLE in environment:
        named = [name.strip() for name in environment[VISIBLE].split(",")]
        return [name for name in named if name and name != "-1"]
    return [str(number) for number in range(sum(each.name[6:].isdigit() for each in folder.glob("nvidia[0-9]*")))]


def placements(config: EngineConfig, gpus: list[str], environment: Mapping[str, str] = os.environ) -> list[Placement]:
    """One for each engine. ConfigError where they are more than the machine can use."""
    if config.parallel.distributed_executor_backend == "ray":
        raise ConfigError("data_parallel_size starts engines on this machine only, but ray places ranks on other machines: start "
                          "one server for each engine, and `ridgeline route` in front of them")
    engines, ranks = config.parallel.data_parallel_size, config.parallel.num_ranks
    if config.model.device == "cpu" or not gpus:
        _require_room(engines, max(MOST_SHARING, cpu_count()), f"{cpu_count()} CPU cores")
        threads = {} if THREADS in environment else {THREADS: str(max(1, cpu_count() // engines))}
        return [Placement(threads | {ENGINES_HERE: str(engines)}, engines, "CPU")] * engines
    groups = [gpus[start : start + ranks] for start in range(0, max(1, len(gpus) - ranks + 1), ranks)]
    _require_room(engines, MOST_SHARING * len(groups), f"{len(gpus)} GPUs")
    placed = [number % len(groups) for number in range(engines)]
    return [
        Placement({VISIBLE: ",".join(groups[group])}, placed.count(group), f"GPU {'+'.join(groups[group])}") for group in placed
    ]


def _require_room(engines: int, most: int, machine: str) -> None:
    if engines > most:
        raise ConfigError(f"data_parallel_size {engines} is too many for this machine ({machine}): at most {most}; for more "
                          "start servers on other machines, and `ridgeline route` in front of them")
