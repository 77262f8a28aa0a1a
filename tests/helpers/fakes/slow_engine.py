"""A server whose engine takes a tenth of a second for every step: a large model, as the front end sees it. `front` is the
server, which prints its port; otherwise this is its engine's process."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.watchdog import Supervision
from ridgeline.engine.core.engine_process import main
from ridgeline.runner.runner import Runner
from ridgeline.server.lifecycle import run as run_server
from ridgeline.server.options import ServerOptions

STEP_SECONDS = 0.1


class SlowLLM(AsyncLLM):
    engine_module = "slow_engine"


def front(settings: dict[str, Any]) -> None:
    rules = Supervision(max_restarts=3, silence=settings["silence"])
    llm = SlowLLM(settings["model"], supervision=rules, **settings["options"])
    options = ServerOptions(port=0, drain_timeout=0)
    run_server(llm, options, lambda done, total: None, lambda _, address: print(address.rpartition(":")[2], flush=True))


def slow_down() -> None:
    whole = Runner.submit

    def submit(*args: Any, **options: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return whole(*args, **options)

    Runner.submit = submit                               # type: ignore[method-assign]


if __name__ == "__main__":
    if sys.argv[1] == "front":
        front(json.loads(sys.argv[2]))
    else:
        slow_down()
        sys.exit(main(sys.argv[1]))
