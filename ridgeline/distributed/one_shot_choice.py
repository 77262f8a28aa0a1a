"""Whether small messages between GPUs are summed by the one-shot kernel (one_shot.py) or by NCCL: the choice, the shared memory.

The ranks of an axis decide together, before weights are loaded. They must be on one machine, each on a GPU of its own, and every
GPU must reach every other. torch's symmetric memory maps a buffer of each rank into all of them. A trial must give the right sum.
Then NCCL and the one-shot kernel (ops/one_shot_sum.py) are timed inside CUDA graphs; messages up to the size at which NCCL wins
take the kernel. Where a condition fails NCCL does everything, and the log says why.
"""

from __future__ import annotations

import hashlib
import os
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.distributed.comm import ProcessAxis
from ridgeline.distributed.one_shot import OneShot
from ridgeline.errors import one_line
from ridgeline.ops import registry
from ridgeline.process.log import get_logger
from ridgeline.sizes.mesh_shape import ONE_SHOT_MOST, ONE_SHOT_RANKS, one_shot_bytes

logger = get_logger("ranks")

SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's variable: for tests on one GPU
# Why NCCL does everything. Ranks tell each other the number; the largest is the one that is logged.
FINE, MANY, NO_TRITON, FAR, SHARED, NO_PEERS, AGAIN, NO_MEMORY, WRONG, SLOW = range(10)
REASONS = {
    MANY: f"more than {ONE_SHOT_RANKS} ranks",
    NO_TRITON: "Triton is missing",
    FAR: "ranks are on several machines or in several containers",
    SHARED: "ranks share a GPU",
    NO_PEERS: "a GPU cannot read another's memory",
    AGAIN: "a process of these ranks has had other ranks before",        # torch counts meetings, which must be equal on all
    NO_MEMORY: "memory could not be shared",
    WRONG: "the trial gave a wrong sum, or none",
    SLOW: "NCCL is faster at every size",
}
_TRIAL_SECONDS = 60.0                # the kernel may have to be compiled, on one rank after the other
_TIMED = [2**power for power in range(13, ONE_SHOT_MOST.bit_length())]           # 8 KiB to the largest message
_IN_A_ROW, _REPEATS = 8, 5
_meetings = 0


class Facts(NamedTuple):
    """Of a rank, as numbers."""

    machine: int
    gpu: int
    meetings: int                    # of its process so far, in which memory was shared


def machine() -> str:
    """Equal for processes that can share memory through torch: the same kernel, processes and folder of temporary files."""
    names = [socket.gethostname(), tempfile.gettempdir()]
    with suppress(OSError):                              # where a sandbox does not show these
        names.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        names += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt")]
    return " ".join(names)


def number_of(name: str) -> int:
    """A name as a number that a tensor holds."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def obstacle(
    own: Facts, all_ranks: list[Facts], seen: dict[int, int], reaches: Callable[[int], bool]
) -> int:
    """The reason against, as this rank sees it. `seen`: indices here of the GPUs that this process sees; `reaches`: whether its
    own GPU reads the memory of that index."""
    if len(all_ranks) > ONE_SHOT_RANKS:
        return MANY
    if not registry.HAS_TRITON:
        return NO_TRITON
    if any(each.machine != own.machine for each in all_ranks):
        return FAR
    gpus = [each.gpu for each in all_ranks]
    if len(set(gpus)) < len(gpus) and os.environ.get(SHARED_GPU) != "1":
        return SHARED
    if not all(gpu in seen and reaches(seen[gpu]) for gpu in gpus if gpu != own.gpu):
        return NO_PEERS
    return AGAIN if any(each.meetings != own.meetings for each in all_ranks) else FINE


def open_one_shot(axis: ProcessAxis, device: torch.device) -> OneShot | None:
    """All ranks of the axis call it. None: NCCL does everything."""
    made, reason, shared = _open(axis, device)
    if reason == FINE and made is not None and not shared:
        made.most = faster_up_to(time_both(axis, made, device))          # of the axis' first rank, on all
        reason = FINE if made.most else SLOW
    torch.cuda.empty_cache()
    if reason != FINE:
        if axis.rank == 0:
            logger.info("all-reduces: NCCL alone, because %s", REASONS[reason])
        return None
    assert made is not None
    if axis.rank == 0:
        logger.info("all-reduces: one-shot up to %d KiB, NCCL above", made.most // 1024)
    return made


def _open(axis: ProcessAxis, device: torch.device) -> tuple[OneShot | None, int, bool]:
    """(buffers, reason against, whether ranks share a GPU), the reason the same on all ranks."""
    def agreed(reason: int) -> int:
        return max(_of_all(axis, [reason], device)[0])

    index = device.index if device.index is not None else torch.cuda.current_device()
    uuids = [str(torch.cuda.get_device_properties(each).uuid) for each in range(torch.cuda.device_count())]
    own = Facts(number_of(machine()), number_of(uuids[index]), _meetings)
    everyone = [Facts(*each) for each in zip(*_of_all(axis, list(own), device), strict=True)]
    shared = len({each.gpu for each in everyone}) < len(everyone)
    seen = {number_of(uuid): each for each, uuid in enumerate(uuids)}
    reason = agreed(obstacle(own, everyone, seen, lambda other: torch.cuda.can_device_access_peer(index, other)))
    if reason != FINE:
        return None, reason, shared
    buffer, made = None, None
    try:
        buffer = _symmetric(axis.size, device)
    except Exception as error:
        logger.info("symmetric memory: %s", one_line(error))
    reason = agreed(FINE if buffer is not None else NO_MEMORY)           # the next step waits for all ranks
    if reason != FINE or buffer is None:
        return None, reason, shared
    try:
        made = _mapped(buffer, axis)
    except Exception as error:
        logger.info("symmetric memory: %s", one_line(error))
    reason = agreed(FINE if made is not None else NO_MEMORY)             # also: every buffer is zero from here on
    if reason == FINE and made is not None:
        reason = agreed(FINE if _tried(made, axis, device) else WRONG)
    return made, reason, shared


def _symmetric(ranks: int, device: torch.device) -> Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    # Not used here. Ranks that share a GPU would wait for each other without end while it is set up.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    # torch's public `empty` takes a pool of the caching allocator for it, whose pieces are larger.
    buffer: Tensor = _SymmetricMemory.empty_strided_p2p((one_shot_bytes(ranks) // 8,), (1,), torch.int64, device)
    buffer.zero_()
    torch.cuda.synchronize(device)
    return buffer


def _mapped(buffer: Tensor, axis: ProcessAxis) -> OneShot:
    import torch.distributed._symmetric_memory as symmetric

    global _meetings
    _meetings += 1
    group = axis.group if axis.group is not None else dist.group.WORLD
    handle = symmetric.rendezvous(buffer, group)
    offset = buffer.data_ptr() - handle.buffer_ptrs[axis.rank]           # in the shared piece of memory, on every rank the same
    bases = torch.tensor([base + offset for base in handle.buffer_ptrs], dtype=torch.int64, device=buffer.device)
    return OneShot(buffer, bases, axis.rank, keep=handle)


def _tried(made: OneShot, axis: ProcessAxis, device: torch.device) -> bool:
    """A rank whose kernel does not compile or start says no: the others wait for its sum, but not without end."""
    try:
        return _trial(made, axis, device)
    except Exception as error:
        logger.info("one-shot sums: %s", one_line(error))
        return False


def _trial(made: OneShot, axis: ProcessAxis, device: torch.device) -> bool:
    """Does a sum come, and the right one?"""
    x = torch.arange(3001, dtype=torch.float32, device=device) * (1 + axis.rank)
    expected = torch.arange(3001, dtype=torch.float32, device=device) * (axis.size * (axis.size + 1) // 2)
    made.sum(x)
    done = torch.cuda.Event()
    done.record()
    limit = time.monotonic() + _TRIAL_SECONDS
    while not done.query():
        if time.monotonic() > limit:
            made.let_go()
            torch.cuda.synchronize(device)
            return False
        time.sleep(0.001)
    return torch.equal(x, expected)


def _of_all(axis: ProcessAxis, numbers: list[int], device: torch.device) -> list[list[int]]:
    """Each number, of every rank."""
    told = torch.tensor([[number] for number in numbers], dtype=torch.int64, device=device)
    found: list[list[int]] = axis.all_gather(told).tolist()
    return found


def time_both(axis: ProcessAxis, made: OneShot, device: torch.device) -> list[tuple[int, float, float]]:
    """(bytes, seconds over NCCL, seconds of the kernel), in CUDA graphs; the first rank's clock, on all ranks."""
    measured = []
    for size in _TIMED:
        x = torch.zeros(size // 4, device=device)
        measured += [_in_graph(axis.sum_over_group, x), _in_graph(made.sum, x)]
    told = axis.broadcast(torch.tensor(measured, dtype=torch.float64, device=device)).tolist()
    return list(zip(_TIMED, told[::2], told[1::2], strict=True))


def _in_graph(call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Seconds of one call in a row of them, the least of several."""
    call(x)                                              # connections, and a kernel to compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):     # NCCL's watchdog asks for events meanwhile
        for _ in range(_IN_A_ROW):
            call(x)
    least = float("inf")
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        least = min(least, begin.elapsed_time(end) / 1000 / _IN_A_ROW)
    return least


def faster_up_to(measured: list[tuple[int, float, float]]) -> int:
    """The largest size at which, and below which, the kernel takes less time than NCCL; 0: none."""
    most = 0
    for size, over_nccl, one_shot in measured:
        if one_shot >= over_nccl:
            break
        most = size
    return most
