"""How long another stream waits for the first grammar of a server, and what it costs to prepare for it at the start.

    python benchmarks/studies/grammar_vocabulary/run.py --sizes 49152 --out result-49152.json

llguidance keeps Python's lock while it reads a vocabulary, so an engine that does it beside running requests gives them no token
meanwhile. `--grammars-at-start` (the default of a server) does it before the server is ready. The server has a tiny random Llama
and the embedded model's vocabulary of 49,152 tokens, or one of 151,936 that is made from it. Each row is the median of several
fresh servers, with and without the option in turns. CPU seconds and memory are those of the engine's process when the server is
ready. `worst_gap_ms` is the longest time between two tokens of another stream while the first grammar is answered, `quiet_gap_ms`
the same without that request.

Predicted before the first run: without the option the stream waits 0.5 s at 49,152 tokens and 1.6 s at 151,936 (the CPU time of
the calls that keep the lock); with it no longer than beside a second grammar. The start takes 0.5 and 1.6 CPU seconds more; of
these half is hidden by work that does not need the lock.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
_ATTACKS = ROOT / "benchmarks" / "studies" / "front_end_attacks" / "run.py"
_SPEC = importlib.util.spec_from_file_location("front_end_attacks", _ATTACKS)
assert _SPEC is not None and _SPEC.loader is not None
attacks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(attacks)

SIZES = (49_152, 151_936)
FIRST = '"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":' + attacks.SCHEMA + "}}"


def write_tokenizer(path: Path, size: int) -> str:
    """The embedded model's tokenizer, as a directory, with tokens joined from two of its own up to `size`."""
    from ridgeline.process import embedded
    from ridgeline.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(embedded.require())
    written = json.loads(tokenizer._core.to_str())
    vocabulary, merges = written["model"]["vocab"], written["model"]["merges"]
    words = [text for text in vocabulary if text.isalpha() and len(text) > 1]
    token = max(*vocabulary.values(), *(each["id"] for each in written["added_tokens"]))
    for step in range(1, len(words)):
        if token + 1 >= size:
            break
        for first, second in zip(words, words[step:], strict=False):
            if token + 1 < size and first + second not in vocabulary:
                token += 1
                vocabulary[first + second] = token
                merges.append([first, second])
    written["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(written))
    settings = {"chat_template": tokenizer.chat_template, "eos_token": tokenizer.eos_token, "bos_token": tokenizer.bos_token}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(path)


def engine_of(server: Any) -> int:
    """The process id of the engine."""
    for task in Path(f"/proc/{server.process.pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    raise SystemExit("the server has no engine")


def facts_of(engine: int) -> dict[str, float]:
    fields = Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()
    resident = int(Path(f"/proc/{engine}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return {"engine_cpu_s": seconds, "engine_rss_mb": resident / 1e6}


def gap(server: Any, work: Any) -> tuple[float, str]:
    """The longest gap of another stream in ms meanwhile, and what the work came to."""
    stream = attacks.OtherStream(server.port)
    time.sleep(0.3)
    said = work()
    time.sleep(0.3)
    return 1000 * stream.end(), said


def answer(server: Any, request: bytes, tries: int = 10) -> str:
    """What the server says; on a machine that is too busy to check a grammar it says 429 first."""
    said = "429"
    for _ in range(tries):
        said = attacks.together(server, request, 1)
        if said != "429":
            break
    return said


def measured(folder: Path, size: int, at_start: bool, seconds: float) -> dict[str, float]:
    """One fresh server."""
    attacks.write_model(folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": size}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = write_tokenizer(folder / "tokenizer", size)
    option = "--grammars-at-start" if at_start else "--no-grammars-at-start"
    words = ["serve", str(folder), "--load-format", "dummy", "--served-model-name", "tiny", "--tokenizer", tokenizer, option]
    began = time.monotonic()
    server = attacks.Server(folder / "log", *words)
    try:
        found = {"ready_s": time.monotonic() - began, **facts_of(engine_of(server))}
        body = (attacks.ONE.replace('max_tokens":1', 'max_tokens":8') + f",{FIRST}}}").encode()
        attacks.ask(server, attacks.posted("chat/completions", attacks.ONE.encode() + b"}"))
        found["quiet_gap_ms"] = gap(server, partial(time.sleep, seconds))[0]
        found["worst_gap_ms"], said = gap(server, partial(answer, server, attacks.posted("chat/completions", body)))
        assert said == "200", said
        found["engine_rss_after_mb"] = facts_of(engine_of(server))["engine_rss_mb"]
        return found
    finally:
        server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--servers", type=int, default=3, help="fresh servers of each kind")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="tokens of the vocabulary")
    parser.add_argument("--seconds", type=float, default=3.0, help="of the stream without a grammar")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    options = parser.parse_args()
    from ridgeline.bench.lab.record import commit

    facts = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
             "commit": commit(), "note": options.note, "load_average_before": os.getloadavg()}
    found: dict[tuple[int, bool], list[dict[str, float]]] = {}
    for _ in range(options.servers):
        for size in options.sizes:
            for at_start in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    one = measured(Path(folder), size, at_start, options.seconds)
                found.setdefault((size, at_start), []).append(one)
                print(size, at_start, {name: round(value, 2) for name, value in one.items()}, flush=True)
    rows = [
        {"tokens": size, "at_start": at_start,
         **{name: round(statistics.median(each[name] for each in all_of), 2) for name in all_of[0]}, "servers": all_of}
        for (size, at_start), all_of in found.items()
    ]
    facts["load_average_after"] = os.getloadavg()
    if options.out:
        made_by = "benchmarks/studies/grammar_vocabulary/run.py"
        options.out.write_text(json.dumps({"made_by": made_by, **facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
