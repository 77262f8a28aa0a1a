"""Crowds of clients: how long the turns of the front end's event loop hold the processor, and how long /health takes.

    python benchmarks/studies/front_end_attacks/crowds.py --out result-crowds.json
    python benchmarks/studies/front_end_attacks/crowds.py --only "half bodies" --tree /path/of/another/checkout

The server is that of run.py, under turns.py. A turn's time is processor time, so it means the same on a busy machine; that of
/health is in seconds, with what the slowest answer waited for (probes.py). `--tree` attacks another checkout, to compare. Three
minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from probes import Probes
from run import CHAT, JSON_TYPE, KEY, ONE, ROOT, Server, ask, filled, posted, write_model

TURNS = Path(__file__).with_name("turns.py")
HOLD_SECONDS = 4.0                   # that connections stay
TOOL = '{"type":"function","function":{"name":"f#","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}'
TURN = '{"role":"user","content":"a"}'


class WatchedServer(Server):
    """Its command line is run by turns.py."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self.turns = folder / "turns"
        options = ["--load-format", "dummy", "--served-model-name", "tiny", *write_model(folder)]
        super().__init__(folder / "log", "serve", str(folder), *options, script=(str(TURNS), str(self.turns)), tree=tree)

    def longest(self, since: float) -> dict[str, Any]:
        rows = [json.loads(line) for line in self.turns.read_text().splitlines()]
        found = [row for row in rows if row["at"] >= since]
        names = ("own_ms", "process_ms", "gc_ms", "waited_ms", "blocked_ms")
        longest = {f"longest_{name}": max((row[name] for row in found), default=0) for name in names}
        return {"turns_of_10_ms": len(found), **longest}


def sent_at_once(server: Server, count: int, data: bytes, hold: float = HOLD_SECONDS) -> str:
    """`count` connections open, each sends `data`, as fast as the server reads; after a while all close at once. What it said."""
    connections, unsent = [], selectors.DefaultSelector()
    for _ in range(count):
        connections.append(socket.socket())
        connections[-1].setblocking(False)
        connections[-1].connect_ex(("127.0.0.1", server.port))
        if data:
            unsent.register(connections[-1], selectors.EVENT_WRITE, [0])
    deadline = time.monotonic() + hold
    while time.monotonic() < deadline:
        if not unsent.get_map():
            time.sleep(0.1)
        for key, _ in unsent.select(0.1) if unsent.get_map() else ():
            try:
                key.data[0] += key.fileobj.send(data[key.data[0] :][: 2**16])        # type: ignore[union-attr]
            except BlockingIOError:
                continue
            except OSError:
                key.data[0] = len(data)
            if key.data[0] >= len(data):
                unsent.unregister(key.fileobj)
    said: Counter[str] = Counter()
    for each in connections:
        try:
            said[each.recv(12)[9:12].decode() or "closed"] += 1
        except OSError as error:
            said["no answer" if isinstance(error, BlockingIOError) else "reset"] += 1
        each.close()
    time.sleep(1.5)
    return ", ".join(f"{count} × {name}" for name, count in said.most_common())


def half_body(size: int) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {size}\r\n"
    return head.encode() + JSON_TYPE + b"\r\n" + b'{"messages":"'.ljust(size // 2, b"x")


ITEMS = filled('{"model":"tiny","max_output_tokens":1,"input":[', TURN, "]}", 60_000)
SCHEMA = '"json_schema":{"name":"a","strict":true,"schema":{"type":"object","properties":{'
STRICT = f'{ONE},"response_format":{{"type":"json_schema",{SCHEMA}'
# name: (connections, what each of them sends)
CROWDS: dict[str, Callable[[], tuple[int, bytes]]] = {
    "nothing": lambda: (0, b""),
    "half bodies of 140 KB": lambda: (3000, half_body(140_000)),
    "half bodies of 140 KB, again": lambda: (3000, half_body(140_000)),
    "half bodies of 60 KB": lambda: (3000, half_body(60_000)),
    "silent": lambda: (3000, b""),
    "half heads": lambda: (3000, b"GET /x HTTP/1.1\r\nHo"),
    "unknown paths": lambda: (3000, b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"),
    "chats": lambda: (3000, posted("chat/completions", (ONE + "}").encode())),
    "streams": lambda: (3000, posted("chat/completions", ONE.replace(":1,", ":100,").encode() + b',"stream":true}')),
    "2,000 items each": lambda: (100, posted("responses", ITEMS)),
    "1,900 chats each": lambda: (
        100, posted("chat/completions/batch", filled(f'{{{CHAT},"messages":[', f"[{TURN}]", "]}", 60_000))),
    "2,000 messages each": lambda: (100, posted("chat/completions", filled(f'{{{CHAT},"messages":[', TURN, "]}", 60_000))),
    "2,000 messages each, Ollama": lambda: (
        100, posted("/api/chat", filled('{"model":"tiny","messages":[', TURN, "]}", 60_000))),
    "120 tools each": lambda: (100, posted("chat/completions", filled(ONE + ',"tools":[', TOOL, "]}", 120 * 115))),
    "variables of 20,000 lists each": lambda: (
        100, posted("chat/completions", filled(ONE + ',"chat_template_kwargs":{"x":[', "[]", "]}}", 60_000))),
    "schema of 800 objects each": lambda: (100, posted("chat/completions", filled(
        STRICT, '"#":{"type":"object","properties":{"a":{"type":"string"}}}', "}}}}}", 60_000))),
    "30,000 tokens with pieces each": lambda: (
        100, posted("/tokenize", b'{"with_pieces":true,"content":"' + b"a b " * 15_000 + b'"}')),
    "4,000 tokens with texts each": lambda: (
        100, posted("/tokenize", b'{"return_token_strs":true,"prompt":"' + b"a b " * 2_000 + b'"}')),
    "50,000 ids each": lambda: (100, posted("completions", filled('{"model":"tiny","prompt":[', "1000", "]}", 250_000))),
    "1,000 embeddings each": lambda: (
        100, posted("embeddings", filled('{"model":"tiny","encoding_format":"base64","input":[', '"a"', "]}", 4_000))),
}


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Other programs, as a scheduler sees them."""
    begun = [subprocess.Popen([sys.executable, "-c", "while True: pass"], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for each in begun:
            each.kill()
            each.wait()


def measured(server: WatchedServer, name: str) -> dict[str, Any]:
    count, data = CROWDS[name]()
    since, probes = time.monotonic(), Probes(server.port, server.process.pid)
    said = sent_at_once(server, count, data)
    found = probes.end()
    slowest = {f"slowest_{part}_ms": round(found[-1][part]) for part in ("loop_ran", "loop_waited", "probe_waited")}
    row = {"crowd": name, "clients": count, "bytes_each": len(data), "said": said, **server.longest(since),
           "health_p50_ms": round(found[len(found) // 2]["took"]), "health_max_ms": round(found[-1]["took"]), **slowest,
           "most_loop_ran_ms": round(max(each["loop_ran"] for each in found))}
    print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of names")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose server is attacked")
    parser.add_argument("--busy", type=int, default=0, help="processes that compute all the time, each in a session of its own")
    parser.add_argument("--note", default="", help="what else ran on the machine")
    options = parser.parse_args()
    from ridgeline.bench.lab.record import commit

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    facts = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
             "commit": commit(), "note": options.note, "busy": options.busy,
             "load_average_before": os.getloadavg()}
    with tempfile.TemporaryDirectory() as folder, busy_processes(options.busy):
        server = WatchedServer(Path(folder), options.tree)
        try:
            for size in (1, 2**19):                      # these start the renderer and the process for huge bodies
                ask(server, posted("chat/completions", ONE.encode() + b',"stop":"%b"}' % (b"x" * size)))
            rows = [measured(server, name) for name in CROWDS if name.startswith(tuple(options.only))]
        finally:
            server.stop()
    if options.out:
        made_by = "benchmarks/studies/front_end_attacks/crowds.py"
        options.out.write_text(json.dumps({"made_by": made_by, **facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
