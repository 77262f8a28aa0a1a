"""The router's process: port, health checks, signals, and a shutdown that lets streams finish."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

from ridgeline.engine.client.long_work import num_done
from ridgeline.process.log import get_logger
from ridgeline.route.body_facts import RESULTS
from ridgeline.route.fleet import FILES, Fleet
from ridgeline.route.replica import keep_checking
from ridgeline.route.route_app import RouteApp
from ridgeline.server.api.openai.responses_store import ResponseStore
from ridgeline.server.event_loop import new_event_loop
from ridgeline.server.give_back import MemoryKeeper, collect_rarely, give_back_large_blocks
from ridgeline.server.http.gate import Gate
from ridgeline.server.http.hosts import HostGuard
from ridgeline.server.http.keys import Keys
from ridgeline.server.lifecycle import (
    GOODBYE_SECONDS,
    SWITCH_SECONDS,
    ListeningServer,
    NoFiles,
    address_of,
    bind,
    check_certificate,
    end_signals,
    http_config,
    raise_file_limit,
)
from ridgeline.server.long_bodies import BodyReader, LongBodies

logger = get_logger("route")

FACTS_PROCESS = "ridgeline.route.facts_process"          # what reads long bodies


class RouteServer(ListeningServer):
    """uvicorn with a graceful shutdown: no new requests, and time for the open ones."""

    def __init__(self, fleet: Fleet, keys: Keys, reader: BodyReader) -> None:
        options = fleet.options.as_server()
        guarded = HostGuard(RouteApp(fleet, len(keys) > 0, reader), options, len(keys) > 0)
        super().__init__(http_config(Gate(guarded, options, keys), options), options.max_connections)
        self._fleet = fleet

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._fleet.stopping = True                      # first of all: load balancers see it in /health
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._fleet.stopping = True
        drained = asyncio.create_task(self._drain())
        await super().shutdown(sockets)
        await drained

    async def _drain(self) -> None:
        fleet, deadline = self._fleet, time.monotonic() + self._fleet.options.drain_timeout
        if fleet.num_open:
            logger.info("waiting for %d answers to finish; Ctrl-C again stops at once", fleet.num_open)
        while fleet.num_open and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.05)
        fleet.end_all()
        deadline = time.monotonic() + GOODBYE_SECONDS
        while fleet.slots.taken and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        for connection in list(self.server_state.connections):
            connection.transport.abort()                 # a client that does not even read its error
        while fleet.num_open and time.monotonic() < deadline + GOODBYE_SECONDS:
            await asyncio.sleep(0.01)                    # those see it, or asyncio would log each with a traceback


async def serve(fleet: Fleet, keys: Keys, listener: socket.socket, on_ready: Callable[[], None]) -> None:
    """Until a signal stops it."""
    reader = LongBodies(RESULTS, bytes, ResponseStore(0, 0), FACTS_PROCESS)
    server = RouteServer(fleet, keys, reader)
    asyncio.get_running_loop().set_exception_handler(NoFiles())
    for number in end_signals():
        signal.signal(number, server.handle_exit)
    interval = float(fleet.options.health_interval)
    beside = [asyncio.create_task(keep_checking(each, interval, fleet.replicas)) for each in fleet.replicas]
    try:
        collect_rarely()
        beside.append(asyncio.create_task(MemoryKeeper(lambda: not fleet.num_open, num_done).watch()))
        on_ready()
        await server.serve(sockets=[listener])
    finally:
        for each in beside:
            each.cancel()
        reader.close()
        fleet.close()


def run(fleet: Fleet, keys: Keys, on_ready: Callable[[Fleet, str], None]) -> None:
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    options = fleet.options.as_server()
    check_certificate(options)
    listener = bind(options)
    fleet.limit_connections(raise_file_limit(options.max_connections, FILES, len(fleet.replicas)))
    give_back_large_blocks()
    sys.setswitchinterval(SWITCH_SECONDS)
    address = address_of(listener, "https" if options.ssl_certfile else "http")
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(fleet, keys, listener, lambda: on_ready(fleet, address)))
