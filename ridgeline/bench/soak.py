"""`ridgeline bench soak`: stress-tests a server with mixed traffic for minutes and checks for leaks and slow-down.

    start ─ every kind of client once ─ warm-up ─ quiet ─ traffic (its thirds: early … late) ─ quiet ─ verdict

The warm-up begins with prompts that fill the KV pool, whose memory becomes resident as it is used. Resident memory, open files
and threads of all server processes are sampled throughout; a line is fitted to the memory after the warm-up. In the two quiet
phases there are no requests: what is still open then has leaked. The server is started here, or runs already on this machine
(--url and --pid).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ridgeline.bench.lab.record import add_output, finish, record
from ridgeline.bench.lab.sweep import parse_options
from ridgeline.bench.load.leaks import FAIL, Quiet, Slope, judge, quantile, slope
from ridgeline.bench.load.target import UNKNOWN_QUALITY, quality_of_techniques
from ridgeline.bench.load.traffic import Timed, Traffic
from ridgeline.errors import ConfigError, EngineDead
from ridgeline.process.children import start_child

WARM_UP = 0.3                        # of the time: caches fill, threads start, allocators find their size
_QUIET_SECONDS = 60.0                # for the last answers to end
_SETTLE_SECONDS = 2.0                # and then for connections to close
_SHOWN = 240                         # samples that the record keeps
_ROLES = {
    "ridgeline.engine.core.engine_process": "engine", "ridgeline.engine.ranks.rank": "rank",
    "ridgeline.grammar.compile_worker": "grammar compiler",
    "ridgeline.text.chat_template": "template renderer",
}
FRONT_END = "front end"
# A small pool that fills up soon: until then every new block adds to the resident memory, which would look like a leak.
_POOL = ["num_gpu_blocks_override=400", "max_model_len=1024"]
_FILLING = 480                       # tokens of a prompt that only fills the pool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="",
                        help="name in the HF cache, directory or .gguf file; default: the embedded model")
    parser.add_argument("--url", default="", help="test a running server, such as http://127.0.0.1:8000; needs --pid")
    parser.add_argument("--pid", type=int, default=0, help="process id of that server's front end")
    parser.add_argument("--minutes", type=float, default=10.0, help="duration, including the warm-up")
    parser.add_argument("--clients", type=int, default=6, help="number of concurrent clients")
    parser.add_argument("--period", type=float, default=1.0, help="seconds between two samples")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic (default: 0)")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE",
                        help="engine options of the server, if this command starts it")
    parser.add_argument("--note", default="", help="a note for the record, such as: the machine was shared")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    if bool(args.url) != bool(args.pid):
        raise ConfigError("--url and --pid need each other; give both, or neither to start a server")
    with a_server(args) as (url, pid):
        soak = Soak(url, pid, args.clients, args.period, args.seed)
        asyncio.run(soak.run(args.minutes * 60))
    figures = soak.figures()
    for line in told(figures):
        print(line, flush=True)
    setting = {
        "model": args.url or args.model or "embedded", "minutes": args.minutes, "clients": args.clients,
        "period": args.period, "seed": args.seed, "options": args.set, "note": args.note,
    }
    finish(record("soak", setting, figures, soak.quality), args)
    return int(figures["verdict"]["overall"] == FAIL)


def told(figures: dict[str, Any]) -> list[str]:
    """The figures, for a person."""
    lines = [f"{figures['requests']} requests in {figures['seconds']:.0f} s: " + _counted(figures["sent"])]
    lines += [f"failed: {kind}: {count} × {reason}" for kind, each in figures["errors"].items() for reason, count in each.items()]
    bars = figures["verdict"]["bars"]
    width = max(len(bar["name"]) for bar in bars)
    lines += [f"{bar['verdict']:>11}  {bar['name']:<{width}}  {bar['found']}  (promised: {bar['promised']})" for bar in bars]
    return [*lines, f"verdict: {figures['verdict']['overall']}"]


def _counted(sent: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sent.items())


# -- the server --------------------------------------------------------------------------------------------------------


@contextmanager
def a_server(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """(its address, its process): the one that was given, or one for as long as this lasts."""
    if args.url:
        yield args.url, args.pid
        return
    words = ["serve", *([args.model] if args.model else []), "--port", "0"]
    for name, value in parse_options([*_POOL, *args.set]).items():
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    process = start_child("ridgeline.__main__", *words, stdout=subprocess.PIPE)
    try:
        yield _address(process), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[bytes]) -> str:
    """What it says when it is ready."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"ready: "):
            return line.split()[1].decode().removesuffix("/v1")
    raise EngineDead(f"the server to be soaked did not start: it ended with code {process.wait()}")


# -- its processes -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Process:
    """What the kernel says of a process."""

    pid: int
    resident: int                    # bytes
    files: int
    threads: int


def processes(root: int) -> dict[str, Process]:
    """The process and all its descendants, by role. A number distinguishes two of the same role."""
    found: dict[str, Process] = {}
    waiting, numbers = [root], Counter[str]()
    while waiting:
        pid = waiting.pop(0)
        with suppress(OSError):                          # it has just ended
            name = FRONT_END if pid == root else _role(pid)
            numbers[name] += 1
            found[name if numbers[name] == 1 else f"{name} {numbers[name]}"] = _look(pid)
            waiting += sorted(_children(pid))
    return found


def _look(pid: int) -> Process:
    folder = Path(f"/proc/{pid}")
    resident = int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return Process(pid, resident, len(os.listdir(folder / "fd")), len(os.listdir(folder / "task")))


def _children(pid: int) -> list[int]:
    """Of any of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def _role(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return next((_ROLES[word] for word in words if word in _ROLES), Path(words[0]).name or "process")


# -- the soak ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    at: float                        # seconds since the start
    processes: dict[str, Process]
    kv_blocks: int                   # in use
    running: int


@dataclass(slots=True)
class Soak:
    url: str
    pid: int
    clients: int
    period: float
    seed: int
    samples: list[Sample] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    warm: float = 0.0                # when the warm-up was over, since the start
    seconds: float = 0.0
    filled: bool = False             # every block of the KV pool has been used
    before: Quiet | None = None
    after: Quiet | None = None
    load: list[float] = field(default_factory=list)      # load average of the machine, with each sample
    quality: str = UNKNOWN_QUALITY
    _began: float = 0.0

    async def run(self, seconds: float) -> None:
        place = urllib.parse.urlsplit(self.url)
        host, port = place.hostname or "127.0.0.1", place.port or 80
        key = os.environ.get("RIDGELINE_API_KEY", "").partition(",")[0]
        self.traffic = [Traffic(host, port, self.seed * 1000 + number, key) for number in range(self.clients)]
        self.quality = await self._learn_quality()
        for kind in self.traffic[0].kinds:               # every kind once: processes that they start exist from now on
            await self.traffic[0].one(kind)
        self._began = time.monotonic()
        sampling = asyncio.create_task(self._sample())
        try:
            await self._fill(self._began + WARM_UP * seconds)
            await self._drive(self._began + WARM_UP * seconds)
            self.before = await self._quiet()
            self.warm = time.monotonic() - self._began
            await self._drive(time.monotonic() + (1 - WARM_UP) * seconds)
            self.seconds = time.monotonic() - self._began
        finally:
            sampling.cancel()
            await asyncio.wait({sampling})
        if not sampling.cancelled():
            sampling.result()
        self.after = await self._quiet()

    async def _learn_quality(self) -> str:
        """From the techniques that the server reports: options alone do not say what was resolved from them."""
        names = await self.traffic[0].techniques()
        return UNKNOWN_QUALITY if names is None else quality_of_techniques(names)

    async def _fill(self, until: float) -> None:
        """Random prompts until the prefix cache evicts blocks, which means that every block has been used."""
        while not self.filled and time.monotonic() < until:
            await asyncio.gather(*(each.fill(_FILLING) for each in self.traffic[:2]))
            self.filled = await self.traffic[0].metric("ridgeline:kv_blocks_evicted_total") > 0

    async def _drive(self, until: float) -> None:
        async def client(traffic: Traffic) -> None:
            while time.monotonic() < until:
                await traffic.one()

        await asyncio.gather(*map(client, self.traffic))

    async def _sample(self) -> None:
        while True:
            self.samples.append(await self._look())
            self.load.append(os.getloadavg()[0])
            await asyncio.sleep(self.period)

    async def _look(self) -> Sample:
        told = await self._health()
        held = told["num_blocks"] - told["free_blocks"]
        return Sample(time.monotonic() - self._began, processes(self.pid), held, told["running"])

    async def _health(self) -> dict[str, Any]:
        try:
            async with self.traffic[0].sending("GET", "/health", b"") as reply:
                await reply.head()
                told = await reply.body()
        except (OSError, EOFError) as error:
            raise EngineDead(f"the server is gone: {error}") from None
        return dict(told)

    async def _quiet(self) -> Quiet:
        """What is left without requests: as soon as nothing is, or after a while."""
        deadline = time.monotonic() + _QUIET_SECONDS
        while True:
            told = await self._health()
            held = told["num_blocks"] - told["free_blocks"]
            if not (told["requests"] or held) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(_SETTLE_SECONDS)
        found = processes(self.pid)
        return Quiet(
            files={name: each.files for name, each in found.items()},
            threads={name: each.threads for name, each in found.items()},
            resident={name: each.resident for name, each in found.items()},
            kv_blocks=held, requests=told["requests"],
        )

    # -- what came of it -----------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        assert self.before is not None and self.after is not None
        sent: Counter[str] = sum((each.sent for each in self.traffic), Counter())
        errors: dict[str, Counter[str]] = {}
        for each in self.traffic:
            for kind, reasons in each.errors.items():
                errors.setdefault(kind, Counter()).update(reasons)
        slopes = self.slopes()
        latencies = early_and_late([one for each in self.traffic for one in each.timed],
                                   self._began + self.warm, self._began + self.seconds)
        pids = {name: {sample.processes[name].pid for sample in self.samples if name in sample.processes} for name in slopes}
        replaced = sum(len(each) - 1 for each in pids.values())
        verdict = judge(slopes, self.before, self.after, latencies, errors, replaced, self.filled)
        return {
            "verdict": verdict.plain(),
            "seconds": self.seconds, "warm_up_s": self.warm, "requests": sum(sent.values()), "sent": dict(sent),
            "errors": {kind: dict(reasons) for kind, reasons in errors.items()},
            "memory_mb_per_h": {name: asdict(each) for name, each in slopes.items()},
            "latency_s": {name: {"early": _spread(early), "late": _spread(late)} for name, (early, late) in latencies.items()},
            "quiet_after_warm_up": asdict(self.before), "quiet_at_the_end": asdict(self.after),
            "kv_pool_filled": self.filled, "kv_blocks_most": max(sample.kv_blocks for sample in self.samples),
            "machine_load": {"least": min(self.load), "most": max(self.load)},
            "samples": [_plain(sample) for sample in self.samples[:: -(-len(self.samples) // _SHOWN)]],
        }

    def slopes(self) -> dict[str, Slope]:
        """Of every process that existed from the warm-up's end on."""
        warm = [sample for sample in self.samples if sample.at >= self.warm]
        names = [name for name in (warm[0].processes if warm else {}) if all(name in sample.processes for sample in warm)]
        return {
            name: slope([sample.at for sample in warm], [sample.processes[name].resident for sample in warm]) for name in names
        }


def early_and_late(timed: list[Timed], began: float, ended: float) -> dict[str, tuple[list[float], list[float]]]:
    """Latencies of requests sent in the first and in the last third of that time, by kind."""
    third = (ended - began) / 3
    found: dict[str, tuple[list[float], list[float]]] = {}
    for each in timed:
        early, late = found.setdefault(each.what, ([], []))
        if began <= each.at < began + third:
            early.append(each.seconds)
        elif each.at >= ended - third:
            late.append(each.seconds)
    return found


def _spread(values: list[float]) -> dict[str, float]:
    return {"count": len(values)} | {f"p{share}": round(quantile(values, share / 100), 4) for share in (50, 90, 99) if values}


def _plain(sample: Sample) -> dict[str, Any]:
    return {
        "s": round(sample.at, 1), "kv_blocks": sample.kv_blocks, "running": sample.running,
        "resident_mb": {name: round(each.resident / 1e6, 1) for name, each in sample.processes.items()},
        "files": {name: each.files for name, each in sample.processes.items()},
        "threads": {name: each.threads for name, each in sample.processes.items()},
    }
