"""Replicas for a router's tests: real sockets on loopback, answers by script, and the router's app called without a server.

    async with FakeReplica(Behaviour(text="one two", dies_after=1)) as replica: ...

A replica says the words of its text, one event each. Nothing here sleeps: what waits, waits for an asyncio.Event.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ridgeline.route.fleet import Fleet
from ridgeline.route.route_app import RouteApp
from ridgeline.route.route_options import RouteOptions
from ridgeline.server.http.gate import Gate
from ridgeline.server.http.keys import Keys
from ridgeline.server.long_bodies import BodyReader


@dataclass
class Behaviour:
    text: str = "one two three four"
    pieces: list[str] | None = None      # of the text, if they are not its words
    tool: bool = False                   # they are the arguments of a tool's call
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    dies_after: int | None = None        # events, then the connection breaks
    breaks_in: int | None = None         # this event, counted from 0: the connection breaks before its end
    error_after: int | None = None       # events, then an error event as of a stopped engine
    cached: int = 0
    prompt_tokens: int = 10
    hold: asyncio.Event | None = None    # waits for it after the first word
    mute: asyncio.Event | None = None    # waits for it before its answer
    last: bytes = b"data: [DONE]\n\n"
    ends: bool = True                    # False: dies after the finish reason, before [DONE]


@dataclass
class Seen:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    gone: asyncio.Event = field(default_factory=asyncio.Event)   # its client has left before the end


class FakeReplica:
    def __init__(self, *behaviours: Behaviour, health: int = 200) -> None:
        self.behaviours = list(behaviours) or [Behaviour()]      # the last one stays
        self.health = health
        self.metrics = ""                                        # its page /metrics
        self.seen: list[Seen] = []
        self.url = ""
        self._writers = set[asyncio.StreamWriter]()

    async def __aenter__(self) -> FakeReplica:
        await self.listen(0)
        return self

    async def listen(self, port: int) -> None:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """As a killed process: nothing listens, and all connections break."""
        self._server.close()
        for each in list(self._writers):
            each.transport.abort()
        while self._writers:
            await asyncio.sleep(0)

    async def start_again(self) -> None:
        await self.listen(int(self.url.rpartition(":")[2]))

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
                body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
                path = first.split()[1]
                if path == "/health":
                    whole(writer, self.health, {"status": "as scripted"})
                    continue
                if path == "/metrics":
                    page = self.metrics.encode()
                    writer.write(b"HTTP/1.1 200 X\r\ncontent-length: %d\r\n\r\n%b" % (len(page), page))
                    continue
                behaviour = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
                seen = Seen(path, headers, body)
                self.seen.append(seen)
                if not await self._answer(behaviour, seen, writer, reader):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
        writer.transport.abort()

    async def _answer(self, said: Behaviour, seen: Seen, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> bool:
        usage = {"prompt_tokens": said.prompt_tokens, "completion_tokens": len(said.text.split()),
                 "prompt_tokens_details": {"cached_tokens": said.cached}}
        if said.mute is not None:
            await self._held(said.mute, seen, reader)
        if said.status != 200:
            return whole(writer, said.status, {"error": {"message": "as scripted"}}, said.headers)
        if seen.path == "/v1/models":
            return whole(writer, 200, {"data": [{"id": "fake"}]})
        if not seen.body.get("stream"):
            if said.dies_after is not None:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
                await writer.drain()
                return False
            message = {"message": {"role": "assistant", "content": said.text}, "finish_reason": "stop"}
            return whole(writer, 200, {"choices": [message], "usage": usage}, said.headers)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        pieces = said.pieces or [word + " " for word in said.text.split()]
        deltas = [{"tool_calls": [{"index": 0, "function": {"arguments": each}}]} if said.tool else {"content": each}
                  for each in pieces]
        events: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *deltas]
        for number, delta in enumerate(events):
            if number == said.dies_after:
                await writer.drain()
                return False
            if number == said.error_after:
                event(writer, {"error": {"message": "the engine has stopped", "code": "engine_not_available"}})
                break
            event(writer, {"id": f"{self.url}-{len(self.seen)}", "created": 1, "choices": [{"index": 0, "delta": delta}]},
                  cut=6 if number == said.breaks_in else 0)
            if number == said.breaks_in:
                await writer.drain()
                return False
            if number == 1 and said.hold is not None:
                await writer.drain()
                await self._held(said.hold, seen, reader)
        else:
            event(writer, {"id": "end", "created": 2, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            if not said.ends:
                await writer.drain()
                return False
            if (seen.body.get("stream_options") or {}).get("include_usage"):
                event(writer, {"id": "end", "choices": [], "usage": usage})
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(said.last), said.last))
        await writer.drain()
        return True

    async def _held(self, hold: asyncio.Event, seen: Seen, reader: asyncio.StreamReader) -> None:
        left, freed = asyncio.ensure_future(reader.read(1)), asyncio.ensure_future(hold.wait())
        done, waiting = await asyncio.wait((left, freed), return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
            await asyncio.wait((each,))
        if left in done:
            seen.gone.set()
            raise ConnectionResetError


def whole(writer: asyncio.StreamWriter, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> bool:
    body = json.dumps(content).encode()
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n{lines}\r\n".encode() + body)
    return True


def event(writer: asyncio.StreamWriter, content: dict[str, Any], cut: int = 0) -> None:
    """`cut`: bytes of its end that are left out."""
    data = b"data: " + json.dumps(content).encode() + b"\n\n"
    data = data[: len(data) - cut]
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


class Call:
    """One request to the router's app, and what its client got."""

    def __init__(self, router: Router, path: str, body: dict[str, Any] | None, headers: dict[str, str], method: str = "") -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.is_complete = False                         # otherwise the server ends its connection
        self.news = asyncio.Event()
        self._left = asyncio.Event()
        self._body: bytes | None = b"" if body is None else json.dumps(body).encode()
        if body is not None:
            headers = {"content-type": "application/json"} | headers
        given = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        method = method or ("GET" if body is None else "POST")
        scope = {"type": "http", "method": method, "path": path, "headers": given, "client": None}
        self.task = asyncio.ensure_future(router.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.parts.append(message.get("body", b""))
            self.is_complete = not message.get("more_body", False)
        self.news.set()

    def leave(self) -> None:
        self._left.set()

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def events(self) -> list[Any]:
        data = [line[6:] for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [each if each == "[DONE]" else json.loads(each) for each in data]

    @property
    def text(self) -> str:
        choices = [each["choices"][0] for each in self.events if isinstance(each, dict) and each.get("choices")]
        return "".join(choice["delta"].get("content", "") for choice in choices)


class Router:
    """The app of `ridgeline route`, without its process. `seconds` is its clock."""

    def __init__(
        self, *replicas: FakeReplica, keys: tuple[str, ...] = (), replica_keys: tuple[str, ...] = (),
        reader: BodyReader | None = None, **options: Any,
    ) -> None:
        self.seconds = 0.0
        self.fleet = Fleet([each.url for each in replicas], RouteOptions(**options), replica_keys, lambda: self.seconds)
        self.app = Gate(RouteApp(self.fleet, bool(keys), reader), self.fleet.options.as_server(), Keys(keys))

    def start(self, body: dict[str, Any] | None = None, path: str = "/v1/chat/completions", **headers: str) -> Call:
        return Call(self, path, body, {name.replace("_", "-"): value for name, value in headers.items()})

    async def ask(self, body: dict[str, Any] | None = None, path: str = "/v1/chat/completions", **headers: str) -> Call:
        call = self.start(body, path, **headers)
        await asyncio.wait_for(call.task, 60)
        return call

    async def look(self, method: str, path: str, **headers: str) -> Call:
        call = Call(self, path, None, {name.replace("_", "-"): value for name, value in headers.items()}, method)
        await asyncio.wait_for(call.task, 60)
        return call
