"""Facts about this machine and settings of this process: CPU, memory, caches, threads. No torch."""

from __future__ import annotations

import ctypes
import functools
import os
import platform as _platform
import pwd
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import ConfigError

STACK_BYTES = 8 * 2**20              # of a stack, where it may have them: what Linux gives by default
LEAST_STACK = 2**20                  # the deepest recursion that Python lets a C function do takes about half of it
_CGROUP = Path("/sys/fs/cgroup")


@functools.cache
def cpu_flags() -> frozenset[str]:
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def cpu_fast_dtypes() -> tuple[str, ...]:
    """Dtypes whose matrix products run at full speed here. Without the instructions bf16 is over 100 times slower."""
    flags = cpu_flags()
    native_bf16 = bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})
    return ("float32", "bfloat16") if native_bf16 else ("float32",)


def cpu_unusable_dtypes() -> tuple[str, ...]:
    """Dtypes whose products would take minutes. oneDNN multiplies bf16 with AVX-512 or bf16 instructions; elsewhere torch falls
    back to a loop that is 200 times slower than float32."""
    flags = cpu_flags()
    multiplies = bool(flags & {"amx_bf16", "avx512_bf16", "bf16"}) or flags >= {"avx512bw", "avx512vl", "avx512dq"}
    return () if multiplies or not flags else ("bfloat16",)


def cpu_count() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def granted_cores() -> int:
    """Cores whose time this process may use: a container may see all of a machine, and have the time of a few."""
    cores = cpu_count()
    with suppress(OSError, ValueError):                  # no container, or "max": no limit
        limit, period = map(int, (_CGROUP / "cpu.max").read_text().split())
        cores = min(cores, max(1, limit // period))
    return cores


ENGINES_HERE = "RIDGELINE_ENGINES_HERE"          # the variable with the number of engines that divide the cores; none: 1


def rank_cores(ranks: int) -> int:
    """Cores for one of an engine's ranks."""
    return max(1, cpu_count() // (ranks * engines_here()))


def engines_here() -> int:
    """Engines that divide the cores, this one among them."""
    return int(os.environ.get(ENGINES_HERE, "1"))


@dataclass(frozen=True, slots=True)
class CoreSeconds:
    """CPU seconds of the whole machine and of this process, and when they were read."""

    machine: float
    own: float
    at: float

    def others_since(self, before: CoreSeconds) -> float:
        """The share of all cores that other programs had."""
        others = (self.machine - before.machine) - (self.own - before.own)
        return min(1.0, max(0.0, others / max((self.at - before.at) * (os.cpu_count() or 1), 1e-9)))


def core_seconds() -> CoreSeconds:
    times = os.times()
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, interrupts, soft, *_ = (int(word) for word in file.readline().split()[1:])
        machine = (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):                        # no such system: nothing is known of others
        machine = times.user + times.system
    return CoreSeconds(machine, times.user + times.system, times.elapsed)


def wait_briefly() -> None:
    """Threads that wait for each other spin only briefly before they sleep.

    Beside other programs on the same cores, spinning takes the time that the awaited thread needs: two engines on two
    cores stall each other for many times a step with OpenMP's default of 300,000 spins. With far fewer than this a step
    that is alone gets slower, because its threads sleep between two products. An x86 spin is a long pause; elsewhere it
    is a cycle and no harm. Works only before OpenMP is loaded, that is before torch is imported.
    """
    if _platform.machine() in ("x86_64", "AMD64"):
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def quiet_torch() -> None:
    """torch's C++ half logs warnings, some with stack traces, straight to stderr; leave only its errors. Works only before torch
    is imported. Set TORCH_CPP_LOG_LEVEL=WARNING to see them. Its profiler (Kineto) writes two lines per trace below level 6."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def keep_freed_memory() -> None:
    """Have malloc keep what was freed. Giving large buffers back makes the next step fault every page in again."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        m_trim_threshold, m_mmap_threshold = -1, -3
        libc.mallopt(m_trim_threshold, 1 << 30)
        libc.mallopt(m_mmap_threshold, 1 << 25)


def return_freed_memory() -> None:
    """Have malloc give back what was freed. Takes milliseconds, without Python's lock."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)       # only glibc has it, and needs it
    if trim is not None:
        trim(0)


def cache_dir() -> Path:
    """Where Ridgeline keeps files: RIDGELINE_CACHE, or the user's cache directory. Other users may not write there."""
    given = os.environ.get("RIDGELINE_CACHE")
    path = Path(given) if given else _user_cache() / "ridgeline"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"cache directory {path} cannot be used: {error.strerror}; set RIDGELINE_CACHE") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(f"cache directory {path} can be written by others; make it yours alone (chmod 700) or move it")
    return path


def _user_cache() -> Path:
    """By the XDG rules, which ignore a path that is not absolute: an empty HOME must not make the working directory the cache."""
    for given in (os.environ.get("XDG_CACHE_HOME", ""), os.path.join(os.environ.get("HOME", ""), ".cache")):
        if os.path.isabs(given):
            return Path(given)
    try:
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise ConfigError("there is no home directory to keep files in; set RIDGELINE_CACHE") from None
    return home / ".cache"


# By the numbers of maker and core. Arm's own: Ampere, Graviton, Axion, Cobalt and Grace are made of these.
_ARM_CORES: dict[tuple[str, ...], str] = {
    ("0x41", "0xd08"): "Arm Cortex-A72", ("0x41", "0xd0b"): "Arm Cortex-A76", ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1", ("0x41", "0xd49"): "Arm Neoverse-N2", ("0x41", "0xd4f"): "Arm Neoverse-V2",
}


def cpu_name() -> str:
    """As /proc/cpuinfo names it. On aarch64 it gives only numbers, of the maker and of the core: two kinds of core must not share
    measured peaks."""
    fields: dict[str, str] = {}
    with suppress(OSError), open("/proc/cpuinfo") as info:
        for line in info:
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    numbers = tuple(fields[name] for name in ("CPU implementer", "CPU part") if name in fields)
    return fields.get("model name") or _ARM_CORES.get(numbers) or " ".join([_platform.machine(), *numbers])


def available_memory() -> int:
    """Bytes this process can still take: what the system has to give, or what is left of its container's limit or its own."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    with suppress(OSError, ValueError):                  # no container, or "max": no limit
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        available = min(available, limit - used)
    pages = [int(each) * resource.getpagesize() for each in Path("/proc/self/statm").read_text().split()]
    for kind, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):        # ulimit -v, ulimit -d
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            available = min(available, limit - used)
    return max(0, available)


def is_address_space_limited() -> bool:
    """By `ulimit -v`: memory that is only reserved counts."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def current_directory() -> Path | None:
    """None: it was removed, as a deployment does with an old release. Engines must start again all the same."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def enlarge_stack() -> None:
    """Start this program again with a larger stack where `ulimit -s` is small and may be raised: threads of libraries have the
    size that was set when the program started, and overflow without a word. ConfigError where it must stay too small."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    if soft == resource.RLIM_INFINITY or soft >= STACK_BYTES:
        return
    largest = STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, STACK_BYTES)
    if largest > max(soft, LEAST_STACK - 1) and sys.executable:      # it has none where Python is embedded
        with suppress(OSError):
            resource.setrlimit(resource.RLIMIT_STACK, (largest, hard))
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    if soft < LEAST_STACK:
        raise ConfigError(f"a stack may have {soft >> 10} KiB here (ulimit -s); at least {LEAST_STACK >> 10} are needed")
