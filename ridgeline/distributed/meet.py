"""Connects ranks, each in its own process, to a mesh."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ridgeline.distributed.comm import ALONE, Axis, Communicator, ProcessAxis
from ridgeline.distributed.one_shot_choice import open_one_shot
from ridgeline.distributed.pipeline import WHOLE, ProcessStage, Stage
from ridgeline.errors import ConfigError
from ridgeline.sizes.mesh_shape import MeshShape

_ABORT_SECONDS = 3.0


class ProcessMesh(Communicator):
    """Several ranks; close() ends their connections."""

    def reach_peers(self, device: torch.device) -> None:
        if isinstance(self.tensor, ProcessAxis) and device.type == "cuda":
            self.tensor.one_shot = open_one_shot(self.tensor, device)

    def agree(self, decision: bool) -> bool:
        on_gpu = dist.get_backend() == "nccl"
        said = torch.tensor([decision], dtype=torch.int32, device="cuda" if on_gpu else "cpu")
        dist.broadcast(said, 0)
        return bool(said.item())

    _abort: threading.Thread | None = None
    _connect: Callable[[str], None] | None = None        # with the ranks that use the same name, where that can be done again

    @property
    def can_rejoin(self) -> bool:
        return self._connect is not None

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def rejoin(self, name: str) -> None:
        assert self._connect is not None
        self._connect(name)

    def give_up(self) -> None:
        """gloo notices by itself. NCCL's kernels wait for the other rank until they are told not to. Its communicators end when
        the last CUDA graph with one of their collectives has: this waits for that, but not without end. One-shot kernels are let
        go first."""
        one_shot = getattr(self.tensor, "one_shot", None)
        if one_shot is not None:
            with suppress(RuntimeError):                 # a context that is broken: its kernels have ended
                one_shot.let_go()
        if self._abort is None and dist.is_initialized() and dist.get_backend() == "nccl":
            abort = distributed_c10d._abort_process_group        # public only as an argument of later versions
            self._abort = threading.Thread(target=abort, name="abort", daemon=True)
            self._abort.start()
        if self._abort is not None:
            self._abort.join(_ABORT_SECONDS)

    def close(self) -> None:
        self.give_up()                                   # an orderly end of NCCL waits for ranks that may be gone
        if self._abort is None and dist.is_initialized():
            dist.destroy_process_group()


def meet(
    shape: MeshShape, rank: int, store: Path | str, backend: str = "gloo", timeout_seconds: float = 120.0,
    divide_experts: bool = False, divide_context: bool = False,
) -> ProcessMesh:
    """`store`: where all ranks meet, the same for all of them. A new path of this machine, so that nothing listens on a port; or
    tcp://host:port of rank 0, for several machines.

    A collective fails after `timeout_seconds` if a rank has not joined, and at once if a rank has exited.
    """
    if not 0 <= rank < shape.size:
        raise ConfigError(f"rank must be in 0..{shape.size - 1}, got {rank}")
    far, limit = str(store).startswith("tcp://"), timedelta(seconds=timeout_seconds)
    _prepare_environment(rank, shape.size, backend, far)

    def connect(name: str = "") -> None:
        where = str(store) if far else f"file://{store}{name}"
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=shape.size, timeout=limit)

    connect()
    tensor: Axis = ALONE
    if shape.tensor > 1:
        # Every rank takes part in making the group of every stage.
        ranks = [shape.of_stage(stage) for stage in range(shape.pipeline)]
        groups = [dist.new_group(each, timeout=limit) for each in ranks] if shape.pipeline > 1 else [None]
        own = shape.stage(rank)
        tensor = ProcessAxis(shape.of_stage(own), rank, groups[own])
    stages: Stage = WHOLE
    if shape.pipeline > 1:
        stages = ProcessStage(shape.stage(rank), shape.pipeline, rank + shape.tensor, rank - shape.tensor)
    mesh = ProcessMesh(tensor, stages, tensor if divide_experts else ALONE, rank, tensor if divide_context else ALONE)
    # NCCL's kernels wait for a rank that has left until each rank aborts its own communicator, which CUDA graphs hold. Stages
    # have groups of their own, and steps in flight elsewhere. A port of rank 0 may not be free again.
    if backend == "gloo" and not far and shape.pipeline == 1:
        mesh._connect = connect
    return mesh


def _prepare_environment(rank: int, size: int, backend: str, far: bool) -> None:
    if backend == "gloo":
        if not far:
            # All ranks are on this machine; gloo would otherwise look up the host's name, which may not resolve.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return
    # Connections are made before the first step, not inside a capture of one.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    if not far:
        # All ranks are on this machine: NCCL would otherwise listen on the network.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if not far and size > torch.cuda.device_count():
        # NCCL refuses two ranks on one GPU. With host names of their own they talk through sockets: slow, and right.
        # Not a default: a rank inherits the variable of rank 0, which may have had ranks before.
        os.environ["NCCL_HOSTID"] = f"ridgeline-rank-{rank}"
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
