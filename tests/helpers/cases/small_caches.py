"""A server whose engine keeps few compiled grammars, so that its cache of them is full within a minute. `front` is the server,
which prints its port; otherwise this is its engine's process."""

from __future__ import annotations

import json
import sys
from typing import Any

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.core.engine_process import main
from ridgeline.engine.core.grammars import Grammars
from ridgeline.server.lifecycle import run as run_server
from ridgeline.server.options import ServerOptions

CACHE_BYTES = 2**20                  # about eight of the soak's grammars


class SmallLLM(AsyncLLM):
    engine_module = "small_caches"


def front(settings: dict[str, Any]) -> None:
    llm = SmallLLM(settings["model"], **settings["options"])
    run_server(llm, ServerOptions(port=0), lambda done, total: None, lambda _, at: print(at.rpartition(":")[2], flush=True))


def keep_little() -> None:
    whole = Grammars.__init__

    def made(*args: Any, **options: Any) -> None:
        whole(*args, **options)
        args[0].cache.capacity = CACHE_BYTES

    Grammars.__init__ = made                             # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "front":
        front(json.loads(sys.argv[2]))
    else:
        keep_little()
        sys.exit(main(sys.argv[1]))
