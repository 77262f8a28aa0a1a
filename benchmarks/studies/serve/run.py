"""The server under load, as users start and meet it: start-up, bursts, steady rates, closed loops. One record for each load.

    python benchmarks/studies/serve/run.py --shape llama-3.1-8b --directory benchmarks/h200 --seconds 300
    python benchmarks/studies/serve/run.py --shape llama-3.1-8b --directory OUT --only 1000-first closed -- --max-num-seqs 128

Writes a directory with the shape's config.json and a tokenizer with a word for every id, starts `ridgeline serve` on it with
random weights in a process of its own, and runs `ridgeline bench serve` in another. What is most important comes first; a load
that `--seconds` does not leave time for is left out, and the table says so. Words after `--` are options of the server.

Records: serve-SHAPE-1000-first and -second (1,000 requests at once, right after the start and again), serve-SHAPE-rate-16,
-rate-32 and -at-once (512 ± 256 tokens in, 256 ± 128 out), serve-SHAPE (closed loops, as docs/lab/step-time.md has them), and
startup-served-SHAPE (seconds until the server was ready, and until it had answered a request).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from ridgeline.bench.lab.record import record, write  # noqa: E402
from ridgeline.bench.lab.sweep import middle  # noqa: E402
from ridgeline.bench.load.prompts import common_words  # noqa: E402
from ridgeline.bench.workload.shapes import SHAPES, write_shape  # noqa: E402
from ridgeline.gpus import nvml  # noqa: E402

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BLANK = "Ġ"                          # as byte-level BPE writes it
LEAST_SECONDS = 5.0                  # that a load is begun with
LEFT_OUT = "left out: no time left"


@dataclass(frozen=True)
class Load:
    name: str
    words: tuple[str, ...]           # of `ridgeline bench serve`

    def file(self, shape: str) -> str:
        return f"serve-{shape}.json" if self.name == "closed" else f"serve-{shape}-{self.name}.json"


def loads(requests: int, rates: list[float], seconds: float) -> list[Load]:
    """The most important first. `requests`: of a burst; `seconds`: that requests keep coming at a rate."""
    mixed = ("--input-len", "lognormal:5.2:1.0:16:2048", "--output-len", "lognormal:5.1:0.8:16:1024", "--num-warmups", "16")
    even = ("--input-len", "512", "--output-len", "256", "--random-range-ratio", "0.5")
    burst = ("--request-rate", "inf", "--num-prompts", str(requests))
    at_rates = [
        Load(f"rate-{rate:g}", (*even, "--request-rate", f"{rate:g}", "--num-prompts", str(max(1, round(rate * seconds)))))
        for rate in rates
    ]
    users = ("--max-concurrency", "16", "64", "--num-prompts", str(min(requests, 128)), "--num-warmups", str(min(requests, 64)))
    return [
        Load(f"{requests}-first", (*mixed, *burst)),
        Load(f"{requests}-second", (*mixed, *burst, "--seed", "1")),
        *at_rates,
        Load("at-once", (*even, *burst)),
        Load("closed", ("--input-len", "512", "--output-len", "128", *users, "--slo", "ttft:500,tpot:20")),
    ]


# -- the model ---------------------------------------------------------------------------------------------------------


def write_tokenizer(path: Path, size: int, ends: set[int]) -> None:
    """Byte-level BPE with a word for every id, as large as the model's own: words that `bench serve` uses, then made-up ones.

    A word is merged letter by letter, so all its beginnings are tokens, too. `ends`: ids of special tokens.
    """
    tokens, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), []
    known = {BLANK}

    def add(word: str) -> None:
        if word not in known and len(tokens) < size:
            known.add(word)
            merges.append([word[:-1], word[-1]])
            while len(tokens) in ends:
                tokens.append(f"<|{len(tokens)}|>")
            tokens.append(word)

    for word in common_words():
        for length in range(1, len(word) + 1):
            add(BLANK + word[:length])
    level = [BLANK]
    while len(tokens) < size:
        level = [word + letter for word in level for letter in LETTERS]
        for word in level:
            add(word)
    del tokens[size:]
    not_so = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": end, "content": tokens[end], "special": True} | not_so for end in sorted(ends)]
    kept = set(tokens)
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {token: place for place, token in enumerate(tokens)},
        "merges": [pair for pair in merges if "".join(pair) in kept],
    }
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
             "pre_tokenizer": plain, "post_processor": None, "decoder": plain, "model": model}
    (path / "tokenizer.json").write_text(json.dumps(whole))


def write_model(shape: str) -> Path:
    path = write_shape(shape, plain=True)
    config = json.loads((path / "config.json").read_text())
    ends = {config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    write_tokenizer(path, config["vocab_size"], ends)
    return path


# -- the server --------------------------------------------------------------------------------------------------------


class Server:
    """`ridgeline serve` in its own process; `ready_s` and `answered_s` are seconds from its start."""

    def __init__(self, model: Path, words: list[str], log: Path, until: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [sys.executable, "-m", "ridgeline", "serve", str(model), "--load-format", "dummy", "--port", str(port), *words]
        began = time.monotonic()
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment())
        try:
            while not self._answer("/health"):
                self._check(until)
                time.sleep(0.02)
            self.ready_s = time.monotonic() - began
            asked = {"model": model.name, "prompt": " the", "max_tokens": 1}
            while not self._answer("/v1/completions", asked):
                self._check(until)
            self.answered_s = time.monotonic() - began
        except BaseException:
            self.stop()
            raise

    def _answer(self, path: str, body: dict[str, Any] | None = None) -> bool:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise SystemExit(f"the server refused {path}: {error.read().decode()[:400]}") from None
            return False
        except OSError:
            return False

    def _check(self, until: float) -> None:
        if self.process.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"the server did not start: {self._log.read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def environment() -> dict[str, str]:
    before = os.environ.get("PYTHONPATH", "")
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), before)))}


# -- the study ---------------------------------------------------------------------------------------------------------


def measure(load: Load, url: str, out: Path, until: float) -> str:
    """Runs one load; what went wrong, or nothing."""
    left = until - time.monotonic()
    if left < LEAST_SECONDS:
        return LEFT_OUT
    command = [sys.executable, "-m", "ridgeline", "bench", "serve", url, *load.words, "--no-progress", "--out", str(out)]
    try:
        done = subprocess.run(command, timeout=left, check=False, env=environment(), capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return "not finished in time"
    said = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else f"failed: {said[-1] if said else done.returncode}"


def row(name: str, point: dict[str, Any]) -> dict[str, str]:
    found = middle(point["figures"])
    server, client = found.get("server", {}), found["client"]
    users = point["setting"]["max_concurrency"]
    return {
        "load": f"{name}, {users} users" if users else name, "requests": f"{found['completed']} of {found['requests']}",
        "tok/s": f"{found['output_throughput']:,.0f}", "TTFT p50": f"{found['ttft_ms']['p50']:,.0f}",
        "TPOT p50": f"{found['tpot_ms']['p50']:.1f}", "p99": f"{found['tpot_ms']['p99']:.1f}",
        "ITL p99": f"{found['itl_ms']['p99']:.0f}", "E2E mean": f"{found['e2el_ms']['mean']:,.0f}",
        "front end": f"{server.get('front_end_cpu_share', 0):.0%}",
        "us/token": f"{server.get('front_end_cpu_us_per_token', 0):.0f}",
        "engine": f"{server.get('engine_cpu_share', 0):.0%}",
        "client late p99": f"{max(client['send_lag_ms']['p99'], client['loop_lag_ms']['p99']):.0f}",
    }


def show(rows: list[dict[str, str]]) -> None:
    """Times are in ms; processor time of front end and engine is a share of one core."""
    if not rows:
        return
    table = [list(rows[0]), *(list(each.values()) for each in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))


def parsed(argv: list[str]) -> argparse.Namespace:
    before, _, server = "\0".join(argv).partition("\0--\0")
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--directory", type=Path, required=True, help="of the records, and of the server's log")
    parser.add_argument("--seconds", type=float, default=300.0, help="that all of it may take")
    parser.add_argument("--requests", type=int, default=1000, help="of a burst")
    parser.add_argument("--rates", type=float, nargs="+", default=[16, 32], help="requests per second")
    parser.add_argument("--rate-seconds", type=float, default=12.0, help="that requests keep coming at a rate")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these loads, such as 1000-first, rate-16, at-once or closed")
    args = parser.parse_args(before.split("\0") if before else [])
    args.server = ["--max-model-len", "4096", *(server.split("\0") if server else [])]
    return args


def main(argv: list[str]) -> int:
    args = parsed(argv)
    until = time.monotonic() + args.seconds
    chosen = loads(args.requests, args.rates, args.rate_seconds)
    if unknown := set(args.only or ()) - {load.name for load in chosen}:
        raise SystemExit(f"no such load: {', '.join(sorted(unknown))}; there are {', '.join(load.name for load in chosen)}")
    args.directory.mkdir(parents=True, exist_ok=True)
    model = write_model(args.shape)
    server = Server(model, args.server, args.directory / "server.log", until)
    rows, wrong = [], []
    try:
        start = {"ready_s": server.ready_s, "first_answer_s": server.answered_s}
        print(f"ready after {server.ready_s:.2f} s, first answer after {server.answered_s:.2f} s", flush=True)
        gpu = nvml.facts(nvml.visible())
        made = record("served_start", {"model": args.shape, "options": args.server}, start, gpu=gpu)
        write(made, args.directory / f"startup-served-{args.shape}.json")
        for load in chosen:
            if args.only and load.name not in args.only:
                continue
            out = args.directory / load.file(args.shape)
            if problem := measure(load, server.url, out, until):
                wrong.append(f"{load.name}: {problem}")
                continue
            rows += [row(load.name, point) for point in json.loads(out.read_text())["figures"]["points"]]
            print(f"{load.name}: {rows[-1]['tok/s']} tok/s", flush=True)
    finally:
        server.stop()
    show(rows)
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if any(not each.endswith(LEFT_OUT) for each in wrong) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
