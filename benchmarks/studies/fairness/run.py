"""A short prompt beside a long one: what the short one waits, and what the long one loses.

    python benchmarks/studies/fairness/run.py --out result.json

The server is `ridgeline serve` with the embedded model. Prompts are random token ids, so that the prefix cache has none of them.
The short prompt has 10 tokens, the long one 8,000. First each runs alone, the short one several times; then short prompts arrive
one after another while the long one is computed. Two bars: a short prompt's time to first token is at most its own time alone and
three times the step-time target, and the long one takes at most 10 % longer. About two minutes on two quiet cores.

`--busy 2` has two processes spin beside all of it, those that run alone among them: a neighbour takes the cores.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

SHORT, LONG = 10, 8000
ALONE = 7                            # short prompts that run alone


class Server:
    def __init__(self, log: Path, target_ms: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        command = [sys.executable, "-m", "ridgeline", "serve", "--port", str(self.port), "--step-time-ms", str(target_ms)]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"PYTHONPATH": str(ROOT)})
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                time.sleep(0.2)
        self.process.kill()
        raise SystemExit(f"the server did not start: {log.read_text()[-2000:]}")

    def first_token(self, tokens: int, seed: int) -> float:
        """Seconds until the first token of a prompt of random ids."""
        source = random.Random(seed)
        prompt = [source.randrange(1000, 40000) for _ in range(tokens)]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True})
        begin = time.monotonic()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"the server answered {answer.status}")
        return time.monotonic() - begin


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that take all the processor time they get."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield spinning
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def measured(server: Server, gap: float) -> dict[str, Any]:
    server.first_token(2000, seed=1)                         # the time model has seen steps of prompts
    alone = sorted(server.first_token(SHORT, seed) for seed in range(100, 100 + ALONE))
    long_alone = [server.first_token(LONG, seed=2)]
    beside: list[float] = []
    long_beside: list[float] = []
    thread = threading.Thread(target=lambda: long_beside.append(server.first_token(LONG, seed=3)))
    thread.start()
    seed = 1000
    time.sleep(gap)
    while thread.is_alive():
        seconds = server.first_token(SHORT, seed)
        if thread.is_alive():                                # else it may have run alone
            beside.append(seconds)
        seed += 1
        thread.join(gap)
    long_alone.append(server.first_token(LONG, seed=4))      # before and after: a machine that slows down shows
    return {"short_alone_s": alone, "long_alone_s": long_alone, "short_beside_s": beside, "long_beside_s": long_beside[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--target-ms", type=float, default=500.0, help="the step-time target; 500 is a server's on a CPU")
    parser.add_argument("--gap", type=float, default=2.0, help="seconds between two short prompts")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    parser.add_argument("--busy", type=int, default=0, help="processes that spin beside the server")
    options = parser.parse_args()
    from ridgeline.bench.lab.record import record

    workload = {"target_ms": options.target_ms, "gap": options.gap, "busy": options.busy, "note": options.note}
    made = record("fairness", workload, {}, peak_memory={})          # before: the load of the machine is that without the study
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder, "log"), options.target_ms)
        try:
            with neighbours(options.busy):
                found = measured(server, options.gap)
        finally:
            server.process.terminate()
            server.process.wait(60)
    bound = statistics.median(found["short_alone_s"]) + 3 * options.target_ms / 1000
    loss = found["long_beside_s"] / statistics.mean(found["long_alone_s"]) - 1
    met = {"short": max(found["short_beside_s"]) <= bound, "long": loss <= 0.1}
    made["figures"] = found | {
        "short_bound_s": bound, "short_worst_s": max(found["short_beside_s"]), "long_loss": loss, "met": met,
    }
    print(json.dumps(made, indent=1))
    if options.out:
        options.out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
