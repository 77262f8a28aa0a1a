"""The process of a rank above 0: obeys the plans that rank 0 sends, until it is told to stop or rank 0 is gone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import zmq

from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import ProcessGroup
from ridgeline.engine.ipc import PLAN
from ridgeline.resolve import resolve
from ridgeline.runner.worker import device_facts, make_runner

_POLL_MS = 1000


def main(settings: str) -> None:
    given = json.loads(settings)
    options = EngineConfig.of(**given["options"])
    config = resolve(options, device_facts(options))
    parent = os.getppid()
    context = zmq.Context()
    link = context.socket(zmq.PULL)
    link.connect(given["address"])
    backend = "gloo" if config.device == "cpu" else "nccl"
    comm = ProcessGroup(given["rank"], given["size"], Path(given["store"]), backend)
    runner = make_runner(config, comm)
    while os.getppid() == parent:
        if not link.poll(_POLL_MS):
            continue
        frame = link.recv()
        if not frame:
            break
        runner.submit(PLAN.decode(frame))
        runner.sample()
        runner.collect()
    comm.close()


if __name__ == "__main__":
    main(sys.argv[1])
