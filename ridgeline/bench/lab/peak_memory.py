"""Peak memory, for every record: of this process, of the GPU it used, and of a server on this machine.

The processes of a server are found by the port that one of them listens on.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

PROC = Path("/proc")
_LISTENS = "0A"                      # the state of a listening socket in /proc/net/tcp


def own_peak() -> dict[str, int]:
    """Bytes: the largest resident size of this process, and what torch had on a GPU.

    torch is asked only if it is loaded already: the load generator does not need it.
    """
    found = {"process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}     # Linux counts in KiB
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        found["gpu_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["gpu_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return found


def server_peak(port: int, proc: Path = PROC) -> int | None:
    """Bytes: the largest resident sizes of the processes behind a port of this machine, summed; None if not to be seen."""
    listening, children = server_processes(port, proc)
    return sum(_peak_of(proc / str(pid)) for pid in listening | children) or None


def server_processes(port: int, proc: Path = PROC) -> tuple[set[int], set[int]]:
    """(those that listen on a port of this machine, all children of theirs); empty if not to be seen."""
    sockets = set()
    for name in ("tcp", "tcp6"):
        for line in _lines(proc / "net" / name)[1:]:
            cells = line.split()
            if len(cells) > 9 and cells[3] == _LISTENS and int(cells[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{cells[9]}]")
    listening = {pid for pid in _processes(proc) if sockets & _sockets(proc / str(pid))} if sockets else set()
    parents = {pid: _parent(proc / str(pid)) for pid in _processes(proc)} if listening else {}
    family = set(listening)
    while more := {pid for pid, parent in parents.items() if parent in family and pid not in family}:
        family |= more
    return listening, family - listening


def _processes(proc: Path) -> list[int]:
    return [int(path.name) for path in proc.iterdir() if path.name.isdigit()]


def _sockets(process: Path) -> set[str]:
    found = set()
    try:
        for entry in (process / "fd").iterdir():
            try:
                found.add(str(entry.readlink()))
            except OSError:
                continue
    except OSError:                                          # gone, or another user's
        pass
    return found


def _parent(process: Path) -> int:
    return next((int(line.split()[1]) for line in _lines(process / "status") if line.startswith("PPid:")), 0)


def _peak_of(process: Path) -> int:
    return next((int(line.split()[1]) * 1024 for line in _lines(process / "status") if line.startswith("VmHWM:")), 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
