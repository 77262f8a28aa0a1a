"""Compares routers in one run: ours by its three policies, and vllm-router and sglang-router, before the same real servers.

    python benchmarks/studies/router/measured.py --peers FOLDER --rounds 3 --seed 101 > benchmarks/studies/router/measured.json

Four servers on one machine, in one of two kinds. `--engine paced`: a tiny model whose steps take a given time (paced_server.py),
so that they do not disturb each other; server, scheduler, prefix cache, HTTP and routers are real, the time of a step is not.
`--engine embedded`: SmolLM2-135M, one thread each. They share the machine's cores then: output is what the machine can compute.

Every router gets the same traffic with a first line of its own, so that no run finds the prefixes of another. Rounds go through
all routers in turn; figures are sums and percentiles over all rounds. Two rows are no routers. `one` sends the whole traffic to a
single server: its cached tokens are those of one big cache. `known` knows the traffic before it comes: conversation or document k
goes to server k mod 4, so prefixes are computed once and servers have equal shares. It shows what the traffic allows.
Cached tokens and outputs are the servers' own counters; times are the client's. `host`: by how much steps took longer than
given, and the share of all cores that was in use, by anything. Paced figures are good while the first is small.

FOLDER has the peers' wheels, installed by `pip install --target FOLDER vllm-router sglang-router setproctitle aiohttp orjson`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paced_server import write_model

from ridgeline.route.upstream import Upstream

COUNTERS = {"cached": "vllm:prefix_cache_hits_total", "looked_up": "vllm:prefix_cache_queries_total",
            "output": "vllm:generation_tokens_total"}
WORDS = ("river stone morning cloud paper garden window winter letter music silver engine forest candle harbour table "
         "number bridge summer market island mirror doctor circle weather orange kitchen travel history station").split()
WHAT = {
    "paced": "routers before real servers whose steps take a given time (settings.pace): no speed of a real machine",
    "embedded": "routers before real servers with SmolLM2-135M on one machine, whose cores they share",
}
BOUNDS = ("one", "known")
OWN = ("predicted", "round-robin", "least-pending")
ROUTERS = (*OWN, "vllm-router", "sglang-router")


@dataclass
class Tally:
    """Of one router and one kind of traffic, over all rounds."""

    seconds: float = 0.0
    requests: int = 0
    failed: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0.0))
    by_round: list[float] = field(default_factory=list)          # output tokens per second
    host: list[dict[str, float]] = field(default_factory=list)   # by round

    def summary(self) -> dict[str, Any]:
        waits = sorted(self.first) or [0.0]
        return {
            "requests": self.requests, "failed": len(self.failed), "first_failure": self.failed[0] if self.failed else "",
            "seconds": round(self.seconds, 2), "prompt_tokens": self.counted["looked_up"],
            "cached_tokens": self.counted["cached"], "output_tokens": self.counted["output"],
            "output_tokens_s": round(self.counted["output"] / self.seconds, 2),
            "first_token_p50_s": round(waits[len(waits) // 2], 3),
            "first_token_p99_s": round(waits[min(len(waits) - 1, int(0.99 * len(waits)))], 3),
            "output_tokens_s_by_round": self.by_round, "host": self.host,
        }


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


@dataclass(frozen=True)
class Talk:
    """A system prompt, and what a user then says."""

    home: int                        # of its conversation or document, for `known`
    system: str
    questions: list[str]


def conversations(name: str, seed: int, sizes: argparse.Namespace, turns: int = 0) -> list[Talk]:
    rng = random.Random(seed)
    shared = f"{name} {seed} {turns}. {text(rng, sizes.system)}"
    count = turns or sizes.turns
    return [Talk(number, shared, [text(rng, sizes.question) for _ in range(count)]) for number in range(sizes.users)]


def long_conversations(name: str, seed: int, sizes: argparse.Namespace) -> list[Talk]:
    return conversations(name, seed, sizes, 2 * sizes.turns)


def documents(name: str, seed: int, sizes: argparse.Namespace) -> list[Talk]:
    """Single questions about long documents, as conversations of one turn. Every document is asked about 2 · `turns` times."""
    rng = random.Random(seed)
    texts = [f"{name} {seed} {number}. {text(rng, sizes.document)}" for number in range(sizes.users // 2)]
    asked = [Talk(number, each, [text(rng, 8)]) for number, each in enumerate(texts) for _ in range(2 * sizes.turns)]
    rng.shuffle(asked)
    return asked


TRAFFIC = {"conversations": conversations, "long conversations": long_conversations, "shared documents": documents}


# -- processes ---------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def answers(url: str, path: str = "/health") -> str:
    upstream = Upstream(url)
    try:
        async with asyncio.timeout(20), upstream.ask("GET", path) as answer:
            body = (await answer.body(2**24)).decode()
            return body if answer.status == 200 else ""
    except Exception:
        return ""
    finally:
        upstream.close()


@asynccontextmanager
async def process(command: list[str], url: str, log: Path, **variables: str) -> AsyncIterator[str]:
    with log.open("w") as out:
        child = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | variables)
    try:
        until = time.monotonic() + 300
        while not await answers(url):
            if child.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{command[2]} did not start: {' '.join(log.read_text()[-400:].split())}")
            await asyncio.sleep(0.3)
        yield url
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(40)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def steps_file(port: int, sizes: argparse.Namespace) -> Path:
    return Path(sizes.logs) / f"steps-{port}"


def server(port: int, sizes: argparse.Namespace) -> list[str]:
    if sizes.engine == "paced":
        settings = {"port": port, "model": str(Path(sizes.logs) / "tiny"), "pace": sizes.pace, "blocks": sizes.blocks,
                    "rows": 32, "budget": 512, "steps": str(steps_file(port, sizes))}
        return [sys.executable, str(Path(__file__).with_name("paced_server.py")), "front", json.dumps(settings)]
    return [sys.executable, "-m", "ridgeline", "serve", "--port", str(port), "--kv-cache-memory-bytes", str(sizes.kv_bytes),
            "--max-model-len", "4096", "--max-num-seqs", "16", "--drain-timeout", "0"]


def router(name: str, port: int, urls: list[str]) -> list[str]:
    if name in OWN:
        return [sys.executable, "-m", "ridgeline", "route", *urls, "--port", str(port), "--policy", name]
    module = name.replace("-", "_")
    return [sys.executable, "-m", f"{module}.launch_router", "--worker-urls", *urls, "--port", str(port), "--host", "127.0.0.1",
            "--policy", "cache_aware", "--prometheus-port", str(free_port())]


# -- the client --------------------------------------------------------------------------------------------------------


async def ask(upstream: Upstream, messages: list[dict[str, str]], sizes: argparse.Namespace, tally: Tally) -> str:
    body = {"model": sizes.model, "messages": messages, "max_tokens": sizes.answer, "temperature": 0, "stream": True,
            "ignore_eos": True}
    began, first, said = time.monotonic(), 0.0, ""
    async with asyncio.timeout(600), upstream.ask(
        "POST", "/v1/chat/completions", [(b"content-type", b"application/json")], json.dumps(body).encode()
    ) as answer:
        rest = b""
        async for piece in answer.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                choices = json.loads(line[6:]).get("choices") or [{}]
                new = (choices[0].get("delta") or {}).get("content") or ""
                first = first or (time.monotonic() if new else 0.0)
                said += new
        if answer.status != 200 or not first:
            raise RuntimeError(f"HTTP {answer.status}: {rest[:200]!r}")
    tally.first.append(first - began)
    return said


async def talk(urls: list[str], talks: list[Talk], seed: int, sizes: argparse.Namespace, tally: Tally) -> None:
    """`at_once` users; each pauses before it speaks, and takes the next conversation when its last one has ended. Without pauses
    the next turn would come when its own server has just become the least busy one, and any router would look clever."""
    upstreams, waiting = [Upstream(url) for url in urls], list(reversed(talks))

    async def user(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while waiting:
            mine = waiting.pop()
            messages = [{"role": "system", "content": mine.system}]
            for question in mine.questions:
                await asyncio.sleep(rng.expovariate(1 / sizes.pause))
                messages.append({"role": "user", "content": question})
                tally.requests += 1
                try:
                    said = await ask(upstreams[mine.home % len(upstreams)], messages, sizes, tally)
                except Exception as error:
                    tally.failed.append(f"{type(error).__name__}: {error}"[:300])
                    break
                messages.append({"role": "assistant", "content": said})

    await asyncio.gather(*(user(number) for number in range(sizes.at_once)))
    for upstream in upstreams:
        upstream.close()


async def counted(urls: list[str]) -> dict[str, float]:
    found = dict.fromkeys(COUNTERS, 0.0)
    for url in urls:
        page = await answers(url, "/metrics")
        for name, metric in COUNTERS.items():
            found[name] += sum(float(value) for value in re.findall(rf"^{metric}{{[^}}]*}} (\S+)$", page, re.MULTILINE))
    return found


class Host:
    """Of the machine, since it was made: how long steps took, and how busy its cores were."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._before = self._now()

    def _now(self) -> list[float]:
        given, spent = 0.0, 0.0
        for file in self._files:
            with contextlib.suppress(OSError, ValueError):
                each = json.loads(file.read_text())
                given, spent = given + each[0], spent + each[1]
        ticks = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return [given, spent, sum(ticks), ticks[3] + ticks[4]]

    def report(self) -> dict[str, float]:
        given, spent, ticks, idle = (after - before for before, after in zip(self._before, self._now(), strict=True))
        return {"steps_longer_than_given": round(spent / given - 1, 4) if given else 0.0,
                "cores_in_use": round(1 - idle / max(1.0, ticks), 3)}


async def measure(name: str, kind: str, seed: int, urls: list[str], servers: list[str], sizes: argparse.Namespace,
                  tally: Tally) -> None:
    host = Host([steps_file(int(url.rsplit(":", 1)[1]), sizes) for url in servers])
    before, began = await counted(servers), time.monotonic()
    await talk(urls, TRAFFIC[kind](name, seed, sizes), seed, sizes, tally)
    seconds = time.monotonic() - began
    await asyncio.sleep(1.0)                             # engines report their counters some times a second
    after = await counted(servers)
    for each in COUNTERS:
        tally.counted[each] += after[each] - before[each]
    tally.seconds += seconds
    tally.by_round.append(round((after["output"] - before["output"]) / seconds, 1))
    tally.host.append(host.report())
    print(f"{kind}, {name}, seed {seed}: {tally.summary()}", file=sys.stderr, flush=True)


async def run(sizes: argparse.Namespace) -> dict[str, Any]:
    folder, ports = Path(sizes.logs), [free_port() for _ in range(sizes.replicas)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    tallies: dict[str, dict[str, Tally]] = {kind: {} for kind in sizes.traffic}
    absent: dict[str, str] = {}
    async with asyncio.TaskGroup() as group:
        running = [process(server(port, sizes), url, folder / f"server-{port}.log", OMP_NUM_THREADS="1")
                   for port, url in zip(ports, urls, strict=True)]
        for each in running:
            group.create_task(each.__aenter__())
    try:
        for number, url in enumerate(urls):              # the first requests of a process load and compile
            await talk([url], [Talk(0, f"warm-up {number}", ["some words", "some more"])] * 2, 0, sizes, Tally())
        for seed in range(sizes.seed, sizes.seed + sizes.rounds):
            for name in sizes.routers:
                if name in absent:
                    continue
                port = free_port()
                through = {"one": urls[:1], "known": urls}.get(name, [f"http://127.0.0.1:{port}"])
                peers = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), sizes.peers]))
                try:
                    async with _router(name, port, urls, folder, through[0], peers):
                        for kind in sizes.traffic:
                            tally = tallies[kind].setdefault(name, Tally())
                            await measure(name, kind, seed, through, urls, sizes, tally)
                except RuntimeError as error:
                    absent[name] = str(error)
                    print(f"{name}: {error}", file=sys.stderr, flush=True)
    finally:
        for each in running:
            await each.__aexit__(None, None, None)
    cases = {kind: {name: tally.summary() for name, tally in by.items()} for kind, by in tallies.items()}
    return {"cases": cases, "absent": absent}


@asynccontextmanager
async def _router(name: str, port: int, urls: list[str], folder: Path, url: str, path: str) -> AsyncIterator[None]:
    if name in BOUNDS:
        yield
        return
    async with process(router(name, port, urls), url, folder / f"{name}.log", PYTHONPATH=path):
        await asyncio.sleep(2.0)                         # the peers' routers answer before they know their workers
        yield


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("replicas", 4), ("rounds", 2), ("seed", 1), ("users", 32), ("turns", 4), ("at-once", 32),
                        ("system", 100), ("question", 50), ("document", 400), ("answer", 24), ("kv-bytes", 10**9),
                        ("blocks", 8192)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds before a user speaks")
    parser.add_argument("--traffic", nargs="+", choices=tuple(TRAFFIC), default=tuple(TRAFFIC))
    parser.add_argument("--peers", default="", help="folder with vllm_router and sglang_router")
    parser.add_argument("--logs", default="/tmp", help="folder for the logs of servers and routers")
    parser.add_argument("--routers", nargs="+", choices=(*BOUNDS, *ROUTERS), default=(*BOUNDS, *ROUTERS))
    parser.add_argument("--engine", choices=("paced", "embedded"), default="paced")
    parser.add_argument("--pace", type=float, nargs=3, default=(0.02, 0.001, 0.001), help="seconds: step, row, token")
    sizes = parser.parse_args()
    sizes.model = "tiny" if sizes.engine == "paced" else "SmolLM2-135M-Instruct"
    if sizes.engine == "paced":
        write_model(Path(sizes.logs) / "tiny")
    began = os.getloadavg()
    result = asyncio.run(run(sizes))
    settings = {name: value for name, value in vars(sizes).items() if name not in ("peers", "logs")}
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load_before": began}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    json.dump({"what": WHAT[sizes.engine], "commit": commit, "machine": machine,
               "settings": settings} | result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
