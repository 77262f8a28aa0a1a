"""`ridgeline bench frontend`: measures the front end's cost per token, and how many streams it holds.

    clients (this process) ◀─ TCP, one event per token ─ front end (a process) ◀─ Deltas ─ fake engine (its child)

The front end is the real one: HTTP, protocol, streams, detokenising with the model's tokenizer. Only the engine is fake: it
answers every request with tokens of a fixed text, one per step, at a given rate. The rate is the sum over all streams; `kept
up` means that the clients received tokens at that rate. Each token is one event. A front end short of CPU time sends several
events of a stream in one write, which is cheaper; `events per read` shows this. CPU time is that of the front end's process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np

from ridgeline.bench.lab.record import add_output, finish, record
from ridgeline.bench.load.server_check import cpu_seconds
from ridgeline.config import EngineConfig
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.core.frontend_socket import FrontEndGone, FrontEndLink
from ridgeline.engine.ipc import Abort, Add, Alive, Deltas, Ready, Shutdown
from ridgeline.errors import EngineDead
from ridgeline.messages import TokenDelta, TokenDeltas
from ridgeline.process.children import start_child
from ridgeline.resolve import model_path
from ridgeline.server.event_loop import new_event_loop
from ridgeline.server.lifecycle import raise_file_limit
from ridgeline.server.lifecycle import run as run_server
from ridgeline.server.options import ServerOptions
from ridgeline.text.tokenizer import Tokenizer

KEPT_UP = 0.97                       # of the offered rate
CONTEXT = 2**20
_TEXT = (
    "The engine says its tokens one by one, and every one of them travels to its client at once: decoded, written as an "
    "event, and sent. What is measured here is that way, and nothing else. Müller isst 3 Äpfel; naïve façades cost 5 €. "
)
_AT_ONCE = 100                       # connections opened together
_LONGEST = 120.0
_PERIOD = "RIDGELINE_BENCH_STEP_SECONDS"  # environment variables that configure the fake engine
_ROWS = "RIDGELINE_BENCH_ROWS"
_MANY = 2**16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="", help="model whose tokenizer is used; default: the embedded model")
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 2000], help="numbers of open streams")
    parser.add_argument("--rate", type=int, nargs="+", default=[20_000, 30_000, 40_000],
                        help="tokens per second over all streams")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each rate")
    parser.add_argument("--path", default="chat/completions", choices=("chat/completions", "completions"),
                        help="the endpoint that is measured (default: chat/completions)")
    parser.add_argument("--profile", help="write the front end's profile (cProfile) to this file; slows it down")
    add_output(parser)


def run(args: argparse.Namespace) -> None:
    results = []
    for streams in args.streams:
        for rate in args.rate:
            results.append(measure(args, streams, rate))
            print(line(results[-1]), flush=True)
    best = max((each["tokens_per_second"] for each in results if each["kept_up"]), default=0.0)
    print(f"highest rate kept up with: {best:,.0f} tokens/s")
    workload = {"model": args.model or "embedded", "path": args.path, "seconds": args.seconds}
    finish(record("frontend", workload, {"runs": results, "kept_up_tokens_per_second": best}), args)


def line(result: dict[str, Any]) -> str:
    return (
        f"{result['streams']} streams, {result['offered']:,} tokens/s offered: {result['tokens_per_second']:,.0f} arrived"
        f" ({'kept up' if result['kept_up'] else 'fell behind'}), front end {result['cpu_us_per_token']:.1f} µs CPU per token,"
        f" {result['events_per_read']:.2f} events per read,"
        f" {result['cpu_share']:.0%} of a core, {result['resident_mib']:.0f} MiB"
    )


def measure(args: argparse.Namespace, streams: int, rate: int) -> dict[str, Any]:
    settings = {"model": args.model, "streams": streams, "rate": rate, "profile": args.profile or ""}
    front = start_child(__name__, "front", json.dumps(settings), stdout=subprocess.PIPE)
    try:
        assert front.stdout is not None
        port = front.stdout.readline()
        if not port.strip():
            raise EngineDead("the measured front end did not start")
        raise_file_limit(streams)
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_load(int(port), front.pid, args.path, streams, rate, args.seconds))
    finally:
        front.terminate()
        try:
            front.wait(20)
        except subprocess.TimeoutExpired:
            front.kill()
            front.wait()


# -- the clients -------------------------------------------------------------------------------------------------------


class _Client(asyncio.Protocol):
    """Sends one request and counts the events of its answer. An event may arrive in two pieces; it counts once."""

    mark = b"data: "

    def __init__(self, request: bytes) -> None:
        self.events = 0
        self.reads = 0
        self.failed = ""
        self._request = request
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        if not self.events and not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self.failed = data[:200].decode("latin-1")
        self.reads += 1
        data = self._tail + data
        self.events += data.count(self.mark)
        self._tail = data[-len(self.mark) + 1 :]

    def connection_lost(self, exc: Exception | None) -> None:
        self.failed = self.failed or "the connection was closed"


async def _load(port: int, pid: int, path: str, streams: int, rate: int, seconds: float) -> dict[str, Any]:
    asked: dict[str, Any] = {"max_tokens": CONTEXT // 2, "stream": True}
    asked |= {"messages": [{"role": "user", "content": "Go on."}]} if path.startswith("chat") else {"prompt": "Go on."}
    body = json.dumps(asked).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    clients, transports = await _open_streams(port, streams, head.encode() + body)
    await _all_running(clients)
    await asyncio.sleep(1.0)                             # what queued up while the streams were opened has been read
    reads = sum(client.reads for client in clients)
    began, events, cpu = time.monotonic(), sum(client.events for client in clients), cpu_seconds(pid)
    await asyncio.sleep(seconds)
    wall = time.monotonic() - began
    tokens, cpu = sum(client.events for client in clients) - events, cpu_seconds(pid) - cpu
    reads = sum(client.reads for client in clients) - reads
    result = {
        "streams": streams, "offered": rate, "tokens_per_second": tokens / wall, "kept_up": tokens / wall >= KEPT_UP * rate,
        "cpu_us_per_token": 1e6 * cpu / max(1, tokens), "cpu_share": cpu / wall,
        "events_per_read": tokens / max(1, reads),
        "resident_mib": _resident(pid) / 2**20, "failed": sum(bool(client.failed) for client in clients),
    }
    for each in transports:
        each.close()
    return result


async def _open_streams(port: int, streams: int, request: bytes) -> tuple[list[_Client], list[asyncio.BaseTransport]]:
    loop = asyncio.get_running_loop()
    clients: list[_Client] = []
    transports: list[asyncio.BaseTransport] = []
    for _ in range(0, streams, _AT_ONCE):
        some = min(_AT_ONCE, streams - len(clients))
        made = await asyncio.gather(
            *(loop.create_connection(lambda: _Client(request), "127.0.0.1", port) for _ in range(some))
        )
        transports += [transport for transport, _ in made]
        clients += [client for _, client in made]
    return clients, transports


async def _all_running(clients: list[_Client]) -> None:
    """Waits until every stream has had some events."""
    deadline = time.monotonic() + _LONGEST
    while not all(client.events > 3 for client in clients):
        failed = next((client.failed for client in clients if client.failed), "")
        if failed or time.monotonic() > deadline:
            late = sum(client.events <= 3 for client in clients)
            raise EngineDead(f"{late} of {len(clients)} streams did not begin: {failed or 'nothing came'}")
        await asyncio.sleep(0.1)


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- the front end -----------------------------------------------------------------------------------------------------


class FakeEngineLLM(AsyncLLM):
    engine_module = "ridgeline.bench.frontend"


def front(settings: dict[str, Any]) -> None:
    """A server whose engine is the one below; prints its port. `rows` and `options` (of the server) are for tests."""
    streams = settings["streams"]
    os.environ[_PERIOD] = str(streams / settings["rate"])
    os.environ[_ROWS] = str(settings.get("rows", _MANY))
    llm = FakeEngineLLM(settings["model"] or None)
    room = {"max_connections": streams + 64, "max_queued_requests": streams + 64}
    others: dict[str, Any] = {"port": 0, "request_timeout": 0, "drain_timeout": 0} | room | settings.get("options", {})
    options = ServerOptions(**others)
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    profile = None
    if settings["profile"]:
        import cProfile

        profile = cProfile.Profile()
        profile.enable()
    run_server(llm, options, lambda done, total: None, lambda _, address: print(address.rpartition(":")[2], flush=True))
    if profile is not None:
        profile.disable()
        profile.dump_stats(settings["profile"])


def _end_with(parent: int) -> None:
    """In a thread: ends this front end if the benchmark is killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


# -- the engine --------------------------------------------------------------------------------------------------------


class FakeEngine:
    """Sends one token per step for every request that has a row; a step takes `period` seconds."""

    def __init__(self, link: FrontEndLink, tokens: list[int], period: float, rows: int = _MANY) -> None:
        self._link = link
        self._tokens = tokens
        self._period = period
        self._rows = rows
        self._said: dict[str, int] = {}                  # by request: tokens so far; the first have the rows
        self._most: dict[str, int] = {}

    def run(self, clock: Callable[[], float] = time.monotonic) -> None:
        due = spoke = clock()
        while True:
            self._link.check()
            for message in self._link.receive(wait=not self._said):
                if isinstance(message, Shutdown):
                    return
                if isinstance(message, Add):
                    self._said[message.request.request_id] = 0
                    self._most[message.request.request_id] = message.request.params.max_tokens or CONTEXT
                elif isinstance(message, Abort):
                    self._said.pop(message.request_id, None)
                    self._most.pop(message.request_id, None)
            now = clock()
            if not self._said:
                due = now
                if now - spoke > 0.4:
                    spoke = now
                    self._link.send(Alive(0, False))
                continue
            if now < due:
                time.sleep(due - now)
            self._link.send(Deltas(self._step(), min(self._rows, len(self._said)), 1))
            spoke = clock()
            due = max(due + self._period, spoke - 0.1)   # catch up on a delay of at most 0.1 s

    def _step(self) -> TokenDeltas:
        """As the engine's own: arrays for rows that go on, an object for one that ends."""
        tokens, answers, new, ended = self._tokens, list[tuple[str, int, int]](), list[int](), list[TokenDelta]()
        for request_id, said in islice(self._said.items(), self._rows):
            self._said[request_id] = said + 1
            token = tokens[said % len(tokens)]
            if said + 1 >= self._most[request_id]:
                ended.append(TokenDelta(request_id, 0, [token], finish_reason="length"))
            else:
                answers.append((request_id, 0, 0))
                new.append(token)
        for delta in ended:
            del self._said[delta.request_id], self._most[delta.request_id]
        return TokenDeltas(answers, np.ones(len(new), np.int32), np.array(new, np.int32), ended)


def engine(settings: dict[str, Any]) -> None:

    path = model_path(EngineConfig.of(**settings["options"]))
    # Without tokens that are half a character: so each token gives text, and an event.
    tokenizer = Tokenizer.load(path)
    tokens = [token for token in tokenizer.encode(_TEXT * 4) if _is_text(tokenizer.token_bytes(token))]
    link = FrontEndLink(Path(settings["folder"]), settings["parent"])
    try:
        rows = int(os.environ[_ROWS])
        link.send(Ready(str(path), CONTEXT, rows, 2**17, "none", "none", 1, 16, 0.0))
        FakeEngine(link, tokens, float(os.environ[_PERIOD]), rows).run()
        link.close()
    except FrontEndGone:
        link.abandon()


def _is_text(piece: bytes) -> bool:
    with suppress(UnicodeDecodeError):
        return bool(piece.decode())
    return False


if __name__ == "__main__":
    if sys.argv[1] == "front":
        front(json.loads(sys.argv[2]))
    else:
        engine(json.loads(sys.argv[1]))
