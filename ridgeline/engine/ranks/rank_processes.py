"""The processes of the ranks above 0, and the sockets to them. No call here waits for a rank that has ended or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import zmq

from ridgeline.distributed.comm import Communicator
from ridgeline.engine.ipc import AGAIN, STOP, new_context
from ridgeline.engine.ranks.rank_watch import Process, RankWatch
from ridgeline.engine.ranks.rank_wire import LocalWire, Wire
from ridgeline.engine.ranks.ray_ranks import RayLauncher
from ridgeline.errors import EngineDead, one_line
from ridgeline.process.children import child_environment, start_child
from ridgeline.resolve import ResolvedConfig
from ridgeline.runner.memory_errors import is_out_of_memory

_POLL_MS = 100                       # how often ranks are looked at while one waits for them
_SEND_SECONDS = 10.0                 # a rank that takes no plan for so long is lost
_QUIET_SECONDS = 4.0                 # after that, a rank on another machine that is gone has missed its beats
_LEAVE_SECONDS = 5.0                 # what ranks get to end by themselves
DROPPED = "out of memory"            # a rank says: this step did not fit, and it has left the mesh


class Launcher(Protocol):
    """Where ranks run, and how they are reached."""

    wire: Wire
    own_address: str                 # of this machine, where ranks may be on others
    device_index: int | None         # the GPU of rank 0; None: by its number

    def start(self, rank: int, settings: dict[str, Any]) -> Process: ...

    def break_off(self) -> None:
        """End what this process waits for from machines of ranks that have ended."""

    def close(self) -> None: ...


class LocalLauncher:
    """Processes of this one."""

    own_address = ""
    device_index: int | None = None

    def __init__(self) -> None:
        self.wire: Wire = LocalWire()
        self._environment = {"OMP_NUM_THREADS": "1"} | child_environment()

    def start(self, rank: int, settings: dict[str, Any]) -> Process:
        given = json.dumps(settings | {"parent": os.getpid()})
        return start_child("ridgeline.engine.ranks.rank", given, environment=self._environment)

    def break_off(self) -> None:
        """Its end has broken every connection to it."""

    def close(self) -> None:
        self.wire.close()


def make_launcher(config: ResolvedConfig, context: zmq.Context[Any]) -> Launcher:
    parallel = config.options.parallel
    if parallel.distributed_executor_backend == "ray":
        return RayLauncher(context, parallel.mesh, config.device == "cuda")
    return LocalLauncher()


class Ranks:
    def __init__(self, config: ResolvedConfig) -> None:
        self.shape = config.options.parallel.mesh
        self._context = new_context()
        self._launcher = make_launcher(config, self._context)
        self._reports, self._beats = self._context.socket(zmq.PULL), self._context.socket(zmq.PULL)
        self._links: dict[int, zmq.Socket[bytes]] = {}
        self._children: dict[int, Process] = {}
        self._watch: RankWatch | None = None
        self._reached: dict[int, str] = {}               # rank -> the last thing it said it had done
        self._dropped = ""                               # why a rank has dropped the newest step
        try:
            self._start(config)
        except BaseException:
            self.end()
            raise

    def _start(self, config: ResolvedConfig) -> None:
        wire = self._launcher.wire
        common = {
            "options": config.pinned().flat(), "store": wire.store, "reports": wire.bind(self._reports, "reports"),
            "beats": wire.bind(self._beats, "beats"),
        }
        for rank in range(1, self.shape.size):
            link = self._links[rank] = self._context.socket(zmq.PUSH)
            address = wire.bind(link, f"rank-{rank}")
            self._children[rank] = self._launcher.start(rank, common | {"rank": rank, "address": address})

    @property
    def joining(self) -> dict[str, Any]:
        """Where rank 0 meets the others, and with which device."""
        launcher = self._launcher
        return {"store": launcher.wire.store, "own_address": launcher.own_address, "device_index": launcher.device_index}

    def watch(self, mesh: Communicator) -> None:
        """All ranks are there: from now on none may be silent for long."""
        def give_up() -> None:
            self._launcher.break_off()
            mesh.give_up()

        self._watch = RankWatch(self._beats, self._children, lambda: mesh.waited, give_up)

    def require(self) -> None:
        """EngineDead if a rank is known to have ended; costs nothing."""
        if self._watch is not None and self._watch.lost:
            self.check()

    def require_memory(self, cause: BaseException | None = None) -> None:
        """MemoryError if a rank is known to have dropped the newest step; see `check`."""
        if self._dropped:
            raise MemoryError(self._dropped) from cause

    def start_over(self, name: str) -> None:
        """Until every rank has left the mesh, to meet again under this name."""
        self.send(AGAIN, name.encode())
        self.wait(name)
        self._dropped = ""

    def check(self) -> None:
        """EngineDead when a rank has ended, with its own last words if it had any."""
        while self._reports.poll(0):
            rank, reached, reason = json.loads(self._reports.recv())
            if reached == DROPPED:
                self._dropped = f"rank {rank}: {reason}"
                continue
            if reason:
                raise EngineDead(self._first_to_end() or f"rank {rank} failed: {reason}")
            self._reached[rank] = reached
        for rank, process in self._children.items():
            if process.poll() is not None:
                if self._reports.poll(_POLL_MS):
                    return self.check()                  # what it said as it ended says more
                raise EngineDead(self._ended(rank))

    def _ended(self, rank: int) -> str:
        hung = {} if self._watch is None else self._watch.hung
        return hung.get(rank) or f"rank {rank} ended with code {self._children[rank].returncode}"

    def _first_to_end(self) -> str:
        """A rank that ends breaks the connections of the others, which say so. It is the one to be named."""
        for rank, process in self._children.items():
            if (process.poll() or 0) < 0:
                return self._ended(rank)
        return ""

    def wait(self, reached: str) -> None:
        """Until every rank has said so. A rank may take as long as it needs, but not die."""
        while True:
            self.check()
            if sum(said == reached for said in self._reached.values()) == len(self._children):
                return
            self._reports.poll(_POLL_MS)

    def send(self, *frames: bytes, to: list[int] | None = None) -> None:
        """To these ranks; by default to all."""
        deadline = time.monotonic() + _SEND_SECONDS
        for rank in self._links if to is None else to:
            while not _sent(self._links[rank], *frames):
                self.check()
                if time.monotonic() > deadline:
                    raise EngineDead(f"rank {rank} takes no more plans")
                self._links[rank].poll(_POLL_MS, zmq.POLLOUT)

    @contextmanager
    def named(self) -> Iterator[None]:
        """A collective fails when a rank is gone: then say which, not what the network thinks of it."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # The connection may break a moment before the process is gone, and longer before Ray knows of it.
            deadline = time.monotonic() + (_QUIET_SECONDS if self._launcher.own_address else 1.0)
            while time.monotonic() < deadline:
                try:
                    self.check()
                except EngineDead as reason:
                    raise reason from error
                self.require_memory(error)
                time.sleep(_POLL_MS / 1000)
            if self._watch is not None and (quiet := self._watch.quiet()):
                raise EngineDead(f"rank {quiet[0]} cannot be reached: {one_line(error)}") from error
            raise

    def end(self) -> None:
        """However things stand: no process, socket or file is left, within seconds. A second call does nothing."""
        if self._watch is not None:
            self._watch.end()
        for link in self._links.values():
            _sent(link, STOP)
        deadline = time.monotonic() + _LEAVE_SECONDS
        for process in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        sockets = [*self._links.values(), self._reports, self._beats]
        self._links, self._children = {}, {}
        for socket in sockets:                           # before the wire, which decides on connections that are being made
            socket.close(linger=0)
        self._launcher.close()
        self._context.destroy(linger=0)


def _sent(link: zmq.Socket[bytes], *frames: bytes) -> bool:
    try:
        link.send_multipart(frames, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True
