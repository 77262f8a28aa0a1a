"""The engine's process with one fault in it: `RIDGELINE_TEST_FAULT` is "site number file". The call of that number at the
site, counted from the first request on, raises; the file then tells later engines that it has happened."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from ridgeline.cache.block_pool import BlockPool
from ridgeline.cache.manager import KVManager
from ridgeline.cache.prefix_cache import PrefixCache
from ridgeline.engine.core.engine_process import main
from ridgeline.engine.core.frontend_socket import FrontEndLink
from ridgeline.engine.core.grammars import Grammars
from ridgeline.engine.core.loop import EngineLoop
from ridgeline.engine.core.stats import StatsKeeper
from ridgeline.runner.runner import Runner
from ridgeline.scheduler.scheduler import Scheduler

VARIABLE = "RIDGELINE_TEST_FAULT"
SITES: dict[str, tuple[type[Any], str]] = {
    "alloc": (BlockPool, "allocate"),
    "schedule": (Scheduler, "schedule"),
    "forward": (Runner, "submit"),
    "sample": (Runner, "sample"),
    "memory": (Runner, "submit"),                        # the engine goes on after this one
    "grammar": (Grammars, "_matchers"),
    "ipc send": (FrontEndLink, "send"),
    "ipc receive": (FrontEndLink, "receive"),
    "metrics": (StatsKeeper, "stepped"),
    "cache hash": (PrefixCache, "_hash"),
    "free": (KVManager, "free"),
}


def plant(site: str, number: int, file: Path) -> None:
    kind, name = SITES[site]
    whole, calls, armed = getattr(kind, name), [0], [False]
    obey = EngineLoop._handle

    def arm(self: EngineLoop, message: Any) -> None:
        armed[0] = True
        obey(self, message)

    def faulty(*args: Any, **options: Any) -> Any:
        if armed[0]:
            calls[0] += 1
            if calls[0] == number and not file.exists():
                file.touch()
                raise MemoryError if site == "memory" else RuntimeError(f"planted at {site}")
        return whole(*args, **options)

    EngineLoop._handle = arm                               # type: ignore[method-assign]
    setattr(kind, name, faulty)


if __name__ == "__main__":
    if os.environ.get(VARIABLE):
        where, count, told = os.environ[VARIABLE].split("|")
        plant(where, int(count), Path(told))
    sys.exit(main(sys.argv[1]))
