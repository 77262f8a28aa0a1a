"""An OpenAI-compatible server of its own making, whose every delay is scripted: what a load generator must then report.

    with FakeServer(lambda number, body: Script(first=0.05, gaps=[0.01] * 9)) as server: ...

It notes when each request came and each event was written, by the clock that the client uses too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any


@dataclass
class Script:
    first: float = 0.0               # seconds until the first token
    gaps: list[float] = field(default_factory=list)      # until each of the others
    status: int = 200
    error: str = ""                  # sent as an event after the tokens
    hang_up: bool = False            # close in place of the stream's end
    tokens_per_event: int = 1
    stops_after: float | None = None     # seconds behind the last token: one more that ends the answer and has no text


@dataclass
class Seen:
    body: dict[str, Any]
    came: float
    written: list[float] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)


class FakeServer:
    def __init__(
        self, script: Callable[[int, dict[str, Any]], Script], *, refuses: tuple[str, ...] = (), tokenizes: bool = False,
        key: str = "", cached: int = 0,
    ) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.url = ""
        self._refuses = refuses                          # fields that get a 400
        self._tokenizes = tokenizes
        self._key = key
        self._cached = cached                            # tokens of every prompt, as if a prefix cache had them
        self._writers: list[asyncio.StreamWriter] = []
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connection, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        self._loop.run_forever()
        server.close()
        for writer in self._writers:
            writer.close()
        self._loop.run_until_complete(asyncio.sleep(0.01))
        self._loop.close()

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def timed(self) -> list[Seen]:
        """Requests of the runs themselves: without the first questions and the warm-up."""
        return [seen for seen in self.seen if seen.body.get("user") != "warm-up"]

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if not await self._answer(first.split()[1], json.loads(body or b"{}"), headers, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        writer.close()

    async def _answer(
        self, path: str, body: dict[str, Any], headers: dict[str, str], writer: asyncio.StreamWriter
    ) -> bool:
        came = time.perf_counter()
        if self._key and headers.get("authorization") != f"Bearer {self._key}":
            return _whole(writer, 401, {"error": {"message": "no key"}})
        if path == "/v1/models":
            return _whole(writer, 200, {"data": [{"id": "fake", "owned_by": "nobody"}]})
        if path == "/tokenize" and self._tokenizes:
            words = body["prompt"].split()               # a token per word
            return _whole(writer, 200, {"count": len(words), "tokens": list(range(len(words))),
                                        "token_strs": ["Ġ" + word for word in words]})
        if not path.startswith("/v1/"):
            return _whole(writer, 404, {"error": {"message": "not here"}})
        if refused := [name for name in self._refuses if name in body]:
            return _whole(writer, 400, {"error": {"message": f"unknown field {refused[0]}"}})
        seen = Seen(body, came, headers=headers)
        self.seen.append(seen)
        script = self.script(len(self.seen) - 1, body)
        if script.status != 200:
            return _whole(writer, script.status, {"error": {"message": "as scripted"}})
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        chat = "chat" in path
        if chat:                                         # the role comes first, and is no token
            _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        due, count = came, 0
        for gap in [script.first, *script.gaps]:
            due += gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            text = " word" * script.tokens_per_event
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            if body.get("return_token_ids"):
                choice["token_ids"] = [5] * script.tokens_per_event
            count += script.tokens_per_event
            seen.written.append(time.perf_counter())
            _event(writer, {"choices": [choice]})
            await writer.drain()
        if script.stops_after is not None:
            await asyncio.sleep(script.stops_after)
            count += 1
            end = {"delta": {}} if chat else {"text": ""}
            _event(writer, {"choices": [end | {"finish_reason": "stop"}]})
        if script.hang_up:
            return False
        if script.error:
            _event(writer, {"error": {"message": script.error}})
        elif (body.get("stream_options") or {}).get("include_usage"):
            length = len(str(body.get("prompt") or body.get("messages")).split())
            details = {"prompt_tokens_details": {"cached_tokens": self._cached}} if self._cached else {}
            _event(writer, {"choices": [], "usage": {"prompt_tokens": length, "completion_tokens": count, **details}})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        return True


def main() -> None:
    """A server of its own process, for who wants to know what the client alone costs: answers of 100 tokens in a second."""
    with FakeServer(lambda number, body: Script(0.01, [0.01] * 99)) as server:
        print(server.url, flush=True)
        sys.stdin.read()                                 # until whoever started it goes


def _whole(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> bool:
    body = json.dumps(content).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return True


def _event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    data = b"data: " + json.dumps(content).encode() + b"\n\n"
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


if __name__ == "__main__":
    main()
