"""The process of a rank above 0: runs the plans that rank 0 sends, until rank 0 sends a stop or is gone.

It reports when it has started, when it has loaded, and why it failed. Everything was decided by rank 0: this process
resolves pinned options, and does not measure memory, which other ranks are taking meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import zmq

from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import Communicator
from ridgeline.engine.core.executor import join
from ridgeline.engine.ipc import AGAIN, PLAN, PREPARE, RUN, SAID, SAID_TOKENS, STOP, new_context
from ridgeline.engine.ranks.rank_processes import DROPPED
from ridgeline.engine.ranks.rank_watch import BEAT_SECONDS
from ridgeline.engine.ranks.rank_wire import connect
from ridgeline.engine.ranks.ray_ranks import KEYS
from ridgeline.errors import one_line
from ridgeline.process.children import erase_variable
from ridgeline.process.orphans import end_with_parent
from ridgeline.resolve import DeviceFacts, resolve
from ridgeline.runner.memory_errors import is_lost_peer, is_out_of_memory
from ridgeline.runner.runner import Runner
from ridgeline.runner.worker import make_runner

_POLL_MS = 1000
_UNLIMITED = 2**62


class RankZeroGone(Exception):
    pass


class Link:
    """The sockets to rank 0, and a check that it is alive."""

    def __init__(self, given: dict[str, Any], context: zmq.Context[Any]) -> None:
        self._rank, self._parent = given["rank"], given["parent"]
        keys = json.loads(os.environ.pop(KEYS, "{}"))
        erase_variable(KEYS)
        self._plans = context.socket(zmq.PULL)
        connect(self._plans, given["address"], keys)
        self._reports = context.socket(zmq.PUSH)
        connect(self._reports, given["reports"], keys)
        self._beats = context.socket(zmq.PUSH)           # of the thread that says that this rank lives
        self._beats.setsockopt(zmq.SNDHWM, 4)
        connect(self._beats, given["beats"], keys)
        self.steps = 0

    def check(self, *_: int) -> None:
        if os.getppid() != self._parent:
            raise RankZeroGone

    def report(self, reached: str, reason: str = "") -> None:
        self._reports.send(json.dumps([self._rank, reached, reason]).encode())

    def live(self, mesh: Communicator) -> None:
        """Say so once a second from now on: a thread of its own, for this one may wait for other ranks."""
        def beat() -> None:
            while not self._beats.closed:
                with suppress(zmq.ZMQError):             # rank 0 does not read, or this rank is leaving
                    self._beats.send(json.dumps([self._rank, self.steps, mesh.waited]).encode(), zmq.NOBLOCK)
                time.sleep(BEAT_SECONDS)

        threading.Thread(target=beat, name="beat", daemon=True).start()

    def receive(self) -> tuple[bytes, bytes]:
        """What to do, and its frame."""
        while not self._plans.poll(_POLL_MS):
            self.check()
        what, *frame = self._plans.recv_multipart()
        return what, frame[0] if frame else b""


def obey(given: dict[str, Any], link: Link) -> None:
    options = EngineConfig.of(**given["options"])
    config = resolve(options, DeviceFacts(options.model.device, _UNLIMITED, (options.model.dtype,)))
    link.report("started")
    comm = join(config, given["rank"], given)
    try:
        runner = make_runner(config, comm, link.check)
        link.live(comm)
        link.report("loaded")
        try:
            run_plans(runner, link, comm)
        finally:
            runner.forward.release()
            runner.drafter.release()
    finally:
        comm.close()


def run_plans(runner: Runner, link: Link, comm: Communicator) -> None:
    depth, in_flight, has_left = runner.rows.depth, 0, False
    while (message := link.receive())[0] != STOP:
        what, frame = message
        if what == SAID:
            said = SAID_TOKENS.decode(frame)
            runner.said(said.rows, said.tokens, said.lengths)
            continue
        if what == PREPARE:
            for _ in range(in_flight):                   # rank 0 has collected these
                runner.collect()
            in_flight = 0
            runner.prepare()
            continue
        if what == AGAIN:
            _start_over(runner, link, comm, frame.decode())
            in_flight, has_left = 0, False
            continue
        assert what == RUN
        if has_left:                                     # rank 0 did not know yet
            continue
        try:
            runner.submit(PLAN.decode(frame))
            runner.sample()
        except Exception as error:
            if not comm.can_rejoin or not (is_out_of_memory(error) or is_lost_peer(error)):
                raise
            if is_out_of_memory(error):
                link.report(DROPPED, one_line(error))
            comm.leave()                                 # others that wait for this one notice; rank 0 says how to go on
            has_left = True
            continue
        in_flight += 1
        link.steps += 1
        if in_flight > depth:                            # as late as on rank 0: the device is not waited for before
            runner.collect()
            in_flight -= 1


def _start_over(runner: Runner, link: Link, comm: Communicator, name: str) -> None:
    """As rank 0 does: the newest step is dropped on all ranks, and all rows with it."""
    comm.leave()
    runner.start_over()
    link.report(name)
    comm.rejoin(name)


def main(settings: str) -> int:
    given = json.loads(settings)
    end_with_parent(given["parent"])
    context = new_context()
    link = Link(given, context)
    try:
        obey(given, link)
    except RankZeroGone:
        context.destroy(linger=0)
        return 0
    except Exception as error:
        link.report("failed", one_line(error))
        context.destroy(linger=1000)
        return 1
    context.destroy(linger=0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
