"""Mixed traffic to stress a server: patient and impatient clients, slow readers, disconnects, and invalid requests.

Each kind checks its answers; a wrong answer is an error of that kind. Plain HTTP on asyncio's streams; bench/soak chooses the
server and the duration.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import RequestError

LONGEST = 180.0                      # seconds; an answer that takes longer is none
TOKENS = 16                          # of an answer: the same for all that are timed
_SLOW_BYTES, _SLOW_SECONDS = 2048, 0.05  # what a slow reader takes at a time, and how long it then rests
_DONE = b"data: [DONE]"
_WORDS = "the red cat sat on a tall hill and sang".split()
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object", "required": ["where"], "additionalProperties": False,
            "properties": {"where": {"enum": ["up", "down", "left", "right"]}},
        },
    },
}
ASK = [{"role": "user", "content": "Say something."}]
# What no server may take, and what it must say then.
BAD: list[tuple[int, str, str, bytes]] = [
    (400, "POST", _CHAT, b'{"messages": ['),
    (400, "POST", _CHAT, b'{"messages": []}'),
    (400, "POST", _CHAT, json.dumps({"messages": ASK, "temperature": "hot"}).encode()),
    (400, "POST", _CHAT, json.dumps({"messages": ASK, "n": 10**6}).encode()),
    (400, "POST", _CHAT, json.dumps({"messages": ASK, "no_such_field": 1}).encode()),
    (400, "POST", _CHAT, json.dumps({"messages": ASK, "structured_outputs": {"regex": "("}}).encode()),
    (400, "POST", _COMPLETIONS, json.dumps({"prompt": "Hello", "max_tokens": -1}).encode()),
    (404, "POST", _CHAT, json.dumps({"messages": ASK, "model": "no-such-model"}).encode()),
    (404, "GET", "/v1/nothing", b""),
    (405, "GET", _CHAT, b""),
]


class Wrong(RequestError):
    """A wrong answer to this kind of client."""


@dataclass(slots=True)
class Timed:
    """One answer of a client that sends a request and waits."""

    at: float                        # when it was asked for, by time.monotonic()
    what: str
    seconds: float


class Reply:
    """An answer that is being read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.status = 0
        self._length: int | None = None                  # None: in chunks

    async def head(self) -> int:
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(lines[0].split()[1])
        named = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
        self._length = None if named.get("transfer-encoding") == "chunked" else int(named.get("content-length", 0))
        return self.status

    async def chunks(self) -> AsyncIterator[bytes]:
        if self._length is not None:
            yield await self._reader.readexactly(self._length)
            return
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readexactly(2)

    async def body(self) -> Any:
        data = b"".join([chunk async for chunk in self.chunks()])
        return json.loads(data) if data else None

    async def events(self, rest: float = 0.0) -> AsyncIterator[dict[str, Any]]:
        """Of a stream that must end as promised. A slow reader rests after each piece."""
        text, done = b"", False
        async for chunk in self.chunks():
            text += chunk
            while b"\n\n" in text:
                event, _, text = text.partition(b"\n\n")
                if event == _DONE:
                    done = True
                elif event.startswith(b"data: "):
                    made = json.loads(event.removeprefix(b"data: "))
                    if "error" in made:
                        raise Wrong(f"a stream ended with {made['error'].get('type')}")
                    yield made
            if rest:
                await asyncio.sleep(rest)
        if not done:
            raise Wrong("a stream ended without [DONE]")

    def leave(self) -> None:
        """Disconnect like a client whose process was killed."""
        self._writer.transport.abort()


class Traffic:
    """Sends requests of all kinds, one after the other."""

    def __init__(self, host: str, port: int, seed: int, key: str = "") -> None:
        self.sent: Counter[str] = Counter()
        self.errors: dict[str, Counter[str]] = {}
        self.timed: list[Timed] = []
        self._host, self._port, self._key = host, port, key
        self._rng = random.Random(seed)
        self._numbers = itertools.count(seed * 1_000_000)
        self.kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {     # how often of all, and how
            "stream": (5, self._stream), "whole": (4, self._whole), "several": (1, self._several), "leaver": (4, self._leave),
            "bad request": (4, self._bad), "structured": (3, self._structured), "tools": (2, self._tools),
            "slow reader": (1, self._slow), "metrics": (1, self._metrics),
        }

    async def one(self, kind: str = "") -> None:
        """A client of this kind, or of any."""
        name = kind or self._rng.choices(list(self.kinds), [weight for weight, _ in self.kinds.values()])[0]
        self.sent[name] += 1
        try:
            async with asyncio.timeout(LONGEST):
                await self.kinds[name][1]()
        except (Wrong, OSError, EOFError, TimeoutError, ValueError, KeyError, asyncio.LimitOverrunError) as error:
            reason = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"[:120]
            self.errors.setdefault(name, Counter())[reason] += 1

    # -- kinds ---------------------------------------------------------------------------------------------------------

    async def _stream(self) -> None:
        asked = {"messages": self._talk(), "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        began, first, events = time.monotonic(), 0.0, 0
        async with self._asking(_CHAT, asked) as reply:
            async for _ in reply.events():
                first = first or time.monotonic()
                events += 1
        self.timed.append(Timed(began, "first token of a stream", first - began))
        if not events:
            raise Wrong("a stream without events")

    async def _whole(self) -> None:
        began = time.monotonic()
        async with self._asking(_COMPLETIONS, {"prompt": self._words(12), "max_tokens": TOKENS, "ignore_eos": True}) as reply:
            made = await reply.body()
        self.timed.append(Timed(began, "whole answer", time.monotonic() - began))
        if made["usage"]["completion_tokens"] != TOKENS:
            raise Wrong(f"{made['usage']['completion_tokens']} tokens of {TOKENS}")

    async def _several(self) -> None:
        asked = {"messages": self._talk(), "max_tokens": 6, "n": 3, "seed": self._rng.randrange(100), "logprobs": True}
        async with self._asking(_CHAT, asked) as reply:
            made = await reply.body()
        if len(made["choices"]) != 3 or any(not choice["logprobs"]["content"] for choice in made["choices"]):
            raise Wrong("not three answers with log-probabilities")

    async def _leave(self) -> None:
        stream = self._rng.random() < 0.6
        asked = {"messages": self._talk(), "max_tokens": 400, "ignore_eos": True, "stream": stream}
        asked["n"] = self._rng.choice([1, 1, 4])
        async with self._asking(_CHAT, asked, wait=False) as reply:
            if stream:
                await reply.head()
                chunks = reply.chunks()
                for _ in range(self._rng.randrange(3)):
                    await anext(chunks)
            else:
                await asyncio.sleep(self._rng.uniform(0, 0.5))
            reply.leave()

    async def _bad(self) -> None:
        status, method, path, body = self._rng.choice(BAD)
        async with self.sending(method, path, body) as reply:
            got = await reply.head()
            await reply.body()
        if got != status:
            raise Wrong(f"{method} {path} {body[:40].decode()} was answered {got}, not {status}")

    async def _structured(self) -> None:
        colours = ["red", "green", "blue"]
        if self._rng.random() < 0.25:                    # a schema that is not compiled yet
            colours.append(f"colour {next(self._numbers)}")
        schema = {
            "type": "object", "required": ["colour", "count"], "additionalProperties": False,
            "properties": {"colour": {"enum": colours}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        }
        asked = {"messages": self._talk(), "max_tokens": 64}
        if self._rng.random() < 0.5:
            asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema, "strict": True}}
        else:
            asked["structured_outputs"] = {"json": schema, "disable_any_whitespace": True}
        async with self._asking(_CHAT, asked) as reply:
            choice = (await reply.body())["choices"][0]
        if choice["finish_reason"] == "stop":
            answer = json.loads(choice["message"]["content"])
            if answer["colour"] not in colours or not 0 <= answer["count"] <= 99:
                raise Wrong(f"{answer} is not what the schema allows")
        elif choice["finish_reason"] != "length":
            raise Wrong(f"structured output ended with {choice['finish_reason']}")

    async def _tools(self) -> None:
        asked = {"messages": self._talk(), "max_tokens": 64, "tools": [TOOL], "tool_choice": "required"}
        written: list[str] = []
        reason = ""
        if self._rng.random() < 0.5:
            async with self._asking(_CHAT, asked | {"stream": True}) as reply:
                async for event in reply.events():
                    for choice in event["choices"]:
                        reason = choice["finish_reason"] or reason
                        for call in choice["delta"].get("tool_calls") or []:
                            if call.get("function", {}).get("name"):
                                written.append("")
                            written[-1] += call.get("function", {}).get("arguments") or ""
        else:
            async with self._asking(_CHAT, asked) as reply:
                choice = (await reply.body())["choices"][0]
            reason = choice["finish_reason"]
            written = [call["function"]["arguments"] for call in choice["message"].get("tool_calls") or []]
        if reason == "length":
            return
        if not written or any("where" not in json.loads(arguments) for arguments in written):
            raise Wrong(f"no valid tool call, and the end was {reason!r}")

    async def _slow(self) -> None:
        """A slow reader: many bytes per token, and a small receive buffer."""
        asked = {"messages": self._talk(), "max_tokens": 24, "ignore_eos": True, "stream": True}
        asked |= {"logprobs": True, "top_logprobs": 20}
        async with self._asking(_CHAT, asked, slow=True) as reply:
            events = [event async for event in reply.events(_SLOW_SECONDS)]
        if len(events) < 2:
            raise Wrong("a slow reader got no answer")

    async def _metrics(self) -> None:
        await self.metric("vllm:num_requests_running")

    # -- for bench/soak ------------------------------------------------------------------------------------------------

    async def metric(self, name: str) -> float:
        """What /metrics says of it, over all labels."""
        async with self.sending("GET", "/metrics", b"") as reply:
            if await reply.head() != 200:
                raise Wrong(f"/metrics was answered {reply.status}")
            text = b"".join([chunk async for chunk in reply.chunks()]).decode()
        values = [float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name + "{")]
        if not values:
            raise Wrong(f"/metrics has no {name}")
        return sum(values)

    async def techniques(self) -> list[str] | None:
        """The techniques that the server reports; None if it does not."""
        asked = {"prompt": "Hello", "max_tokens": 1, "return_timings": True}
        try:
            async with self._asking(_COMPLETIONS, asked) as reply:
                told = (await reply.body()).get("timings") or {}
        except Wrong:
            return None
        found: list[str] | None = told.get("techniques")
        return found

    async def fill(self, tokens: int) -> None:
        """A new prompt, to fill the KV pool."""
        prompt = [self._rng.randrange(1, 200) for _ in range(tokens)]
        async with self._asking(_COMPLETIONS, {"prompt": prompt, "max_tokens": 1}) as reply:
            await reply.body()

    # -- what they ask, and how ----------------------------------------------------------------------------------------

    def _words(self, count: int) -> str:
        return " ".join(self._rng.choices(_WORDS, k=count))

    def _talk(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self._words(self._rng.randrange(2, 24))}]

    @asynccontextmanager
    async def _asking(self, path: str, asked: dict[str, Any], wait: bool = True, slow: bool = False) -> AsyncIterator[Reply]:
        """Anything but 200 is wrong; without `wait` the head is left to be read."""
        async with self.sending("POST", path, json.dumps(asked).encode(), slow) as reply:
            if wait and await reply.head() != 200:
                told = await reply.body()
                raise Wrong(f"HTTP {reply.status}: {told['error']['message']}"[:120])
            yield reply

    @asynccontextmanager
    async def sending(self, method: str, path: str, body: bytes, slow: bool = False) -> AsyncIterator[Reply]:
        made = socket.socket()
        made.setblocking(False)
        if slow:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BYTES)
        await asyncio.get_running_loop().sock_connect(made, (self._host, self._port))
        reader, writer = await asyncio.open_connection(sock=made, limit=_SLOW_BYTES if slow else 2**16)
        key = f"authorization: Bearer {self._key}\r\n" if self._key else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}\r\nconnection: close\r\n{key}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        try:
            writer.write(head.encode() + body)
            yield Reply(reader, writer)
        finally:
            writer.close()
