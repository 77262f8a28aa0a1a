"""Asks /health all the time from a process of its own, and tells what each answer waited for.

    python benchmarks/studies/front_end_attacks/probes.py PORT PID     # of the server; until standard input ends

Linux counts for each thread how long it ran, and how long it could have run and waited for a core (/proc/PID/task/TID/schedstat).
The differences over one probe, for the thread of the event loop and for the probe itself, say whether an answer was late because
of the server's own work or because other programs had the cores. What is left is neither: the thread waited for bytes of the
probe, or for Python's lock.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

PROBE_SECONDS = 0.05                 # between two probes
LIMIT_SECONDS = 60.0
REQUEST = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def probe(port: int, seconds: float) -> float | None:
    """Seconds until /health answered 200; None if it did not."""
    begin = time.monotonic()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
            connection.sendall(REQUEST)
            got = connection.recv(65536)
    except OSError:
        return None
    return time.monotonic() - begin if got.startswith(b"HTTP/1.1 200") else None


def ran_and_waited(thread: str) -> tuple[float, float]:
    """Seconds on a core and seconds in line for one; zeros where the system does not count them."""
    try:
        ran, waited = Path(f"/proc/{thread}/schedstat").read_text().split()[:2]
    except OSError:
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9


def explained(port: int, pid: int) -> dict[str, float]:
    """One probe, in milliseconds."""
    loop, own = f"{pid}/task/{pid}", "thread-self"
    ran, waited = ran_and_waited(loop)
    own_waited = ran_and_waited(own)[1]
    begin = time.monotonic()
    took = probe(port, LIMIT_SECONDS)
    probe_waited = ran_and_waited(own)[1] - own_waited
    ran, waited = (after - before for after, before in zip(ran_and_waited(loop), (ran, waited), strict=True))
    row = {"took": LIMIT_SECONDS if took is None else took, "loop_ran": ran, "loop_waited": waited, "probe_waited": probe_waited}
    return {name: round(1000 * value, 2) for name, value in row.items()} | {"at": begin}


class Probes:
    """A process that probes, so that an attacker's work does not count."""

    def __init__(self, port: int, pid: int) -> None:
        command = [sys.executable, __file__, str(port), str(pid)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self._child.stdout is not None
        self._first = self._child.stdout.readline()      # it has started

    def end(self) -> list[dict[str, Any]]:
        """All of them, the fastest first."""
        lines = [self._first, *self._child.communicate()[0].splitlines()]
        return sorted(map(json.loads, lines), key=lambda row: float(row["took"]))


def main() -> None:
    port, pid = map(int, sys.argv[1:])
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.wait(PROBE_SECONDS):
        print(json.dumps(explained(port, pid)), flush=True)


if __name__ == "__main__":
    main()
