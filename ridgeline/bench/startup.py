"""`ridgeline bench startup`: an engine started in a fresh process, several times, and where its time goes.

The child imports, starts an engine, answers one request with one token, and prints its own account
(`ridgeline/startup.py`): phases that sum to the wall clock since the process was started. The parent's clock says the
same from outside. With `--cold` every start finds an empty Triton cache and compiles its kernels; otherwise the first
start, which may fill the cache, is not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

from ridgeline import startup
from ridgeline.bench.record import finish, percentiles, record
from ridgeline.bench.shapes import SHAPES, write_shape
from ridgeline.engine.children import child_environment, start_child
from ridgeline.errors import EngineDead

READY = "ready"                      # the figure that counts: everything before the first request is taken
FIRST_TOKEN = "first token"
_LONGEST = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="", help="HF directory or .gguf file; default: the embedded model")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a model by its shapes, with dummy weights")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--starts", type=int, default=3, help="how many starts are counted")
    parser.add_argument("--cold", action="store_true", help="an empty Triton cache for every start")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="engine options")
    parser.add_argument("--out", help="also write the record to this file")


def run(args: argparse.Namespace) -> None:
    model = str(write_shape(args.shape, args.layers)) if args.shape else args.model
    words = [*(["load_format=dummy", "skip_tokenizer_init=on"] if args.shape else []), *args.set]
    if not args.cold:
        start_once(model, words)
    starts = []
    for number in range(args.starts):
        with tempfile.TemporaryDirectory(prefix="ridgeline-cold-") as empty:
            starts.append(start_once(model, words, {"TRITON_CACHE_DIR": empty} if args.cold else {}))
        print(f"start {number + 1}: ready after {starts[-1][READY]:.2f} s, first token after {starts[-1][FIRST_TOKEN]:.2f} s",
              flush=True)  # fmt: skip
    middle = sorted(starts, key=lambda each: each[READY])[len(starts) // 2]
    print(f"\nphases of the median start ({'cold' if args.cold else 'warm'} kernel cache):")
    print(startup.table(middle["phases"]))
    print(f"outside, from its start to its end: {middle['outside_s']:.3f} s")
    setting = {"model": args.shape or args.model or "embedded", "layers": args.layers, "cold": args.cold, "options": words}
    figures = {
        "ready_s": percentiles([each[READY] for each in starts]),
        "first_token_s": percentiles([each[FIRST_TOKEN] for each in starts]), "starts": starts,
    }  # fmt: skip
    finish(record("startup", setting, figures, gpu=middle["gpu"] or None), args.out)


def start_once(model: str, words: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """One fresh process; its account, with the parent's clock beside it."""
    told = child_environment() | (environment or {})
    began = time.perf_counter()
    child = start_child(__name__, model, *words, environment=told, stdout=subprocess.PIPE)
    try:
        output, _ = child.communicate(timeout=_LONGEST)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode != 0:
        raise EngineDead(f"an engine that was started to be timed ended with code {child.returncode}")
    account: dict[str, Any] = json.loads(output.splitlines()[-1])
    account["outside_s"] = time.perf_counter() - began
    return account


def main(argv: list[str]) -> None:
    """The child: start, answer with one token, give account."""
    from ridgeline.bench.device_log import gpu_facts
    from ridgeline.bench.engine import Engine, parse_options

    startup.until_now("process and imports")
    options = parse_options(argv[1:])
    engine = Engine(argv[0], **options)
    ready = startup.since_start()
    with startup.phase("first token"):
        engine.serve([([1, 2, 3], 1)])
    phases = startup.report()
    first_token = sum(phases.values())
    print(json.dumps({"phases": phases, READY: ready, FIRST_TOKEN: first_token, "gpu": gpu_facts()}))


if __name__ == "__main__":
    main(sys.argv[1:])
