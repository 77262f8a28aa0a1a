"""A Ray cluster of two machines in two network namespaces of one machine: docs/cluster.md, followed, and then disturbed.

    sudo python benchmarks/studies/ray_faults/run.py --out benchmarks/studies/ray_faults/result.json

Needs root, `ip`, and an environment with ridgeline[ray]. Each "machine" has a network of its own (10.77.0.1 and .2, joined by a
veth pair), a host name and folders /tmp/ray and /dev/shm of its own; files, memory and cores are shared. The model runs in two
pipeline stages on CPUs. A greedy answer is streamed, and while it is:

    actor        kill -9 of the Ray actor of rank 1
    rank         kill -9 of the process of rank 1
    node         kill -9 of everything of Ray on the second machine, which joins again after 30 s
    link         the link is cut for 40 s

Every answer must be the undisturbed one. Noted are the seconds until the log names the rank, and the stream's longest pause. With
`--num-cpus=1` each machine has room for one rank; Ray would put both on the first one otherwise. `--tensor 2 --only` starts four
ranks, two for each stage, and asks for one answer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ridgeline.bench.lab.record import add_output, finish, record
from ridgeline.process import embedded

ADDRESSES = {"head": "10.77.0.1", "worker": "10.77.0.2"}
URL = "http://127.0.0.1:8000"        # of the head's own network
PROMPT = "Write a long story about a lighthouse keeper and a storm."
REJOIN_SECONDS, CUT_SECONDS = 30.0, 40.0
LONGEST = 300.0                      # seconds that anything may take


class Machine:
    """A namespace of the network, with a few folders of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.space = name, f"ridgeline-{name}"
        self.ray, self.shared = folder / f"ray-{name}", Path(f"/dev/shm/ridgeline-{name}")
        for path in (self.ray, self.shared):
            path.mkdir(parents=True, exist_ok=True)

    def command(self, *words: str) -> list[str]:
        own = f"mkdir -p /tmp/ray; mount --bind {self.ray} /tmp/ray; mount --bind {self.shared} /dev/shm; hostname {self.name}"
        return ["ip", "netns", "exec", self.space, "unshare", "--mount", "--uts", "sh", "-c", f'{own}; exec "$@"', "sh", *words]

    def run(self, *words: str) -> str:
        made = output(self.command(*words))
        assert made.returncode == 0, made.stdout + made.stderr
        return made.stdout

    def processes(self, pattern: str = "") -> list[int]:
        """Its processes whose command line has this."""
        found = []
        for number in output(["ip", "netns", "pids", self.space]).stdout.split():
            with suppress(OSError):
                line = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if re.search(pattern, line):
                    found.append(int(number))
        return found

    def kill(self, pattern: str = "") -> int:
        killed = 0
        for number in self.processes(pattern):
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
                killed += 1
        return killed


def environment() -> dict[str, str]:
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}


def output(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=LONGEST, env=environment(), check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def lay_link(machines: dict[str, Machine]) -> None:
    for machine in machines.values():
        ip("netns", "add", machine.space)
    ip("link", "add", "rl-head", "netns", machines["head"].space, "type", "veth", "peer", "name", "rl-worker",
       "netns", machines["worker"].space)
    for name, machine in machines.items():
        other = ADDRESSES["worker" if name == "head" else "head"]
        for words in (("addr", "add", f"{ADDRESSES[name]}/24", "dev", f"rl-{name}"), ("link", "set", f"rl-{name}", "up"),
                      ("link", "set", "lo", "up"), ("route", "add", "default", "via", other)):     # Ray asks which way is out
            ip("-n", machine.space, *words)


class Server:
    """`ridgeline serve` on the head, its log with the time of each line, and streams from it."""

    def __init__(self, head: Machine, model: str, tensor: int) -> None:
        self.head, self.lines = head, list[tuple[float, str]]()
        words = ["ridgeline", "serve", model, "--pipeline-parallel-size", "2", "--tensor-parallel-size", str(tensor),
                 "--distributed-executor-backend", "ray",
                 "--max-engine-restarts", "10"]          # four faults come within ten minutes
        self.process = subprocess.Popen(
            head.command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment())
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append((time.monotonic(), line.rstrip()))
            print(f"    | {line.rstrip()}", flush=True)

    def get(self, path: str) -> str:
        return output(self.head.command("curl", "-sS", "-m", "60", URL + path)).stdout

    def wait(self) -> float:
        began = time.monotonic()
        while "ok" not in self.get("/health"):
            assert self.process.poll() is None and time.monotonic() < began + LONGEST, "the server did not start"
            time.sleep(0.25)
        return time.monotonic() - began

    def first_line(self, since: float, pattern: str) -> tuple[float, str]:
        for when, line in list(self.lines):
            if when >= since and re.search(pattern, line):
                return when - since, line
        return float("nan"), ""

    def stream(self, tokens: int, disturb: Callable[[], None] | None = None) -> tuple[str, float]:
        """(the text, the longest pause in seconds); `disturb` is called after a quarter of the tokens, in another thread."""
        body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": tokens,
                "stream": True, "ignore_eos": True}
        words = ["curl", "-sS", "-N", "-m", str(LONGEST), f"{URL}/v1/chat/completions", "-H", "Content-Type: application/json",
                 "-d", json.dumps(body)]
        asked = subprocess.Popen(self.head.command(*words), stdout=subprocess.PIPE, text=True)
        text, deltas, pause, last = "", 0, 0.0, time.monotonic()
        for line in asked.stdout or ():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            piece = event["choices"][0]["delta"].get("content") if event.get("choices") else None
            if not piece:
                continue
            now = time.monotonic()
            pause, last = max(pause, now - last) if deltas else pause, now
            text, deltas = text + piece, deltas + 1
            if disturb is not None and deltas > tokens // 4:
                threading.Thread(target=disturb, daemon=True).start()
                disturb = None
        asked.wait()
        assert disturb is None, "the answer ended before it was disturbed"
        return text, pause


def disturbances(machines: dict[str, Machine]) -> dict[str, tuple[Callable[[], None], str]]:
    """By name: what is done, and what the log says of it."""
    worker = machines["worker"]

    def node() -> None:
        assert worker.kill()
        time.sleep(REJOIN_SECONDS)
        join(worker)

    def link() -> None:
        ip("-n", worker.space, "link", "set", "rl-worker", "down")
        time.sleep(CUT_SECONDS)
        ip("-n", worker.space, "link", "set", "rl-worker", "up")
        with suppress(subprocess.CalledProcessError):    # a link that goes down takes its route with it
            ip("-n", worker.space, "route", "add", "default", "via", ADDRESSES["head"])

    def kill(pattern: str) -> Callable[[], None]:
        def done() -> None:
            assert worker.kill(pattern), f"no process {pattern}"
        return done

    named = r"rank 1 |rank 1:"
    return {"actor": (kill("ray::Keeper"), named), "rank": (kill(r"ridgeline\.engine\.ranks\.rank"), named),
            "node": (node, named), "link": (link, named)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded one")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer (default: 160)")
    parser.add_argument("--tensor", type=int, default=1, help="ranks of a stage (default: 1)")
    parser.add_argument("--only", nargs="*", choices=("actor", "rank", "node", "link"), help="default: all, in this order")
    add_output(parser)
    args = parser.parse_args()
    model, figures = args.model or str(embedded.require()), dict[str, Any]()
    folder = Path(tempfile.mkdtemp(prefix="ridgeline-ray-"))
    machines = {name: Machine(name, folder) for name in ADDRESSES}
    try:
        lay_link(machines)
        figures = measure(machines, model, args)
    finally:
        for machine in machines.values():
            machine.kill()
            subprocess.run(["ip", "netns", "del", machine.space], check=False)
            shutil.rmtree(machine.shared, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
    for name, found in figures.items():
        print(name, found)
    workload = {"model": Path(model).name, "tokens": args.tokens, "stages": 2, "tensor": args.tensor, "ray": ray_version()}
    finish(record("ray faults", workload, figures), args)


def ray_version() -> str:
    return output(["ray", "--version"]).stdout.split()[-1]


def join(worker: Machine, ranks: int = 1) -> None:
    worker.run("ray", "start", f"--address={ADDRESSES['head']}:6379", f"--num-cpus={ranks}")


def measure(machines: dict[str, Machine], model: str, args: argparse.Namespace) -> dict[str, Any]:
    tokens = args.tokens
    machines["head"].run("ray", "start", "--head", f"--num-cpus={args.tensor}")
    join(machines["worker"], args.tensor)
    server = Server(machines["head"], model, args.tensor)
    figures: dict[str, Any] = {"start": {"seconds": server.wait()}}
    expected, pause = server.stream(tokens)
    figures["undisturbed"] = {"longest_pause_s": pause, "characters": len(expected), "begin": expected[:60]}
    print(f"  answer: {expected[:100]!r} …", flush=True)
    for name, (disturb, pattern) in disturbances(machines).items():
        if args.only is not None and name not in args.only:
            continue
        print(f"  {name}", flush=True)
        began: list[float] = []

        def noted(disturb: Callable[[], None] = disturb, began: list[float] = began) -> None:
            began.append(time.monotonic())
            disturb()

        text, pause = server.stream(tokens, noted)
        named, line = server.first_line(began[0], pattern)
        figures[name] = {"named_after_s": named, "log": line, "longest_pause_s": pause, "same_answer": text == expected}
        print(f"  {figures[name]}", flush=True)
    server.process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(60)
    figures["end"] = {"code": server.process.poll(), "left": len(machines["worker"].processes(r"ridgeline\.engine"))}
    return figures


if __name__ == "__main__":
    main()
