"""Ranks on the machines of a Ray cluster: Ray places one actor for each rank, and the actor starts, watches and ends the rank's
process. Plans go over sockets of our own and tensors over gloo or NCCL: nothing of a step passes through Ray.

Rank 0 is the engine's own process, on the machine where the server was started. An actor keeps its place in the cluster.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import threading
from contextlib import suppress
from typing import Any

import zmq

from ridgeline.engine.ranks.rank_wire import FarWire, Keys, Wire, break_connections
from ridgeline.errors import ConfigError, EngineDead
from ridgeline.process.children import child_environment, start_child
from ridgeline.process.log import get_logger
from ridgeline.sizes.mesh_shape import MeshShape

logger = get_logger("ranks")

KEYS = "RIDGELINE_RANK_KEYS"         # the variable with the keys of a rank's sockets, which is erased as it starts
PLACE_SECONDS = 60.0                 # for Ray to find room
_ANSWER_SECONDS = 300.0              # for an actor to start


class Keeper:
    """The actor of one rank."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def place(self) -> tuple[str, list[int]]:
        """The address of its machine, and the GPUs that Ray gives it."""
        ray = load_ray()
        return ray.util.get_node_ip_address(), [int(number) for number in ray.get_gpu_ids()]

    def start(self, settings: dict[str, Any], keys: Keys) -> None:
        environment = {"OMP_NUM_THREADS": "1"} | child_environment()
        given = settings | {"parent": os.getpid(), "own_address": self.place()[0]}
        self._child = start_child(
            "ridgeline.engine.ranks.rank", json.dumps(given), environment={**environment, KEYS: json.dumps(keys)}
        )

    def wait(self) -> int:
        """Until the rank's process has ended; its code."""
        assert self._child is not None
        return self._child.wait()


class RayRank:
    """A rank's process, as its actor tells of it. The actor's own end counts as the rank's, which ends with it."""

    def __init__(self, ray: Any, keeper: Any) -> None:
        self.returncode: int | None = None
        self._ray, self._keeper = ray, keeper
        self._ended = threading.Event()
        keeper.wait.remote().future().add_done_callback(self._note)

    def _note(self, future: Any) -> None:
        if self.returncode is None:
            self.returncode = -9 if future.exception() is not None else future.result()
            self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        """Its end counts from now on: a machine that cannot be reached will not confirm it."""
        self.returncode = -9
        self._ended.set()
        with suppress(Exception):                        # Ray itself may be gone
            self._ray.kill(self._keeper)

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode


class RayLauncher:
    def __init__(self, context: zmq.Context[Any], shape: MeshShape, on_gpu: bool) -> None:
        self._ray = load_ray()
        if not self._ray.is_initialized():
            join_cluster(self._ray)
        own = self._ray.util.get_node_ip_address()
        self._group = self._placed(shape.size, on_gpu, own)
        keepers = [self._keeper(place, on_gpu) for place in range(shape.size)]
        places = self._ray.get([keeper.place.remote() for keeper in keepers], timeout=_ANSWER_SECONDS)
        order = by_machine([address for address, _ in places], own)
        self._keepers, places = [keepers[place] for place in order], [places[place] for place in order]
        for rank, (address, gpus) in enumerate(places):
            logger.info("rank %d is on %s%s", rank, address, f", GPU {gpus[0]}" if gpus else "")
        self._addresses = [address for address, _ in places]
        self._started: dict[int, RayRank] = {}
        gpus = places[0][1]
        self.device_index: int | None = gpus[0] if gpus else None            # of rank 0, which sees all GPUs of its machine
        self.own_address = own
        self.wire: Wire = FarWire(context, own)

    def _placed(self, size: int, on_gpu: bool, own: str) -> Any:
        """A place for every rank, the first on this machine."""
        needs = {"CPU": 1.0} | ({"GPU": 1.0} if on_gpu else {})
        group = self._ray.util.placement_group([needs | {f"node:{own}": 0.001}, *([needs] * (size - 1))], strategy="PACK")
        if not group.wait(PLACE_SECONDS):
            self._ray.util.remove_placement_group(group)
            there = self._ray.cluster_resources()
            # No fault of the settings: a machine may come back, and the next start find room.
            raise EngineDead(
                f"the Ray cluster has no room for {size} ranks with one {'GPU' if on_gpu else 'CPU'} each: it has "
                f"{there.get('CPU', 0):.0f} CPUs and {there.get('GPU', 0):.0f} GPUs, some of which may be in use"
            )
        return group

    def _keeper(self, place: int, on_gpu: bool) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group, place)
        return self._ray.remote(Keeper).options(
            num_cpus=1, num_gpus=int(on_gpu), max_restarts=0, max_concurrency=2, scheduling_strategy=strategy
        ).remote()

    def start(self, rank: int, settings: dict[str, Any]) -> RayRank:
        keeper = self._keepers[rank]
        # Ray counts the GPUs of an actor from 0, and shows it no others.
        self._ray.get(keeper.start.remote(settings | {"device_index": 0}, self.wire.keys), timeout=_ANSWER_SECONDS)
        self._started[rank] = RayRank(self._ray, keeper)
        return self._started[rank]

    def break_off(self) -> None:
        for address in {self._addresses[rank] for rank, process in self._started.items() if process.poll() is not None}:
            if address != self.own_address:
                break_connections(address)

    def close(self) -> None:
        self.wire.close()
        for keeper in self._keepers:
            with suppress(Exception):                    # Ray itself may be gone
                self._ray.kill(keeper)
        with suppress(Exception):
            self._ray.util.remove_placement_group(self._group)


def by_machine(addresses: list[str], own: str) -> list[int]:
    """Which of Ray's places each rank gets. Ray gives them in any order; the ranks of a stage, which are numbered one after the
    other and sum in every layer, are to be on one machine. Rank 0 keeps the first place, which is here."""
    return sorted(range(len(addresses)), key=lambda place: (place != 0, addresses[place] != own, addresses[place], place))


def load_ray() -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError:
        raise ConfigError("distributed_executor_backend ray needs Ray: pip install 'ridgeline[ray]'") from None
    return ray


def join_cluster(ray: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address="auto", log_to_driver=False, configure_logging=False)
    except ConnectionError:
        raise ConfigError(
            "no Ray cluster runs on this machine: start one with `ray start --head`, and join others with "
            "`ray start --address=HEAD:6379`"
        ) from None
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)            # Ray prints its stack at an orderly end otherwise
