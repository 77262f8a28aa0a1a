"""An engine on a pretended GPU (pretend_gpu.py, pretend_memory.py) through all kinds of steps: what would torch take of it?

    python pretend_allocations.py SHAPE LAYERS RESERVE OPTIONS CHANGES

RESERVE: with or without what is reserved for steps. OPTIONS of the engine and CHANGES to the shape are JSON. Prints JSON: bytes
of each pool when the engine was ready, those of steps and what was predicted of them, and what each kind of step has added.
"""

from __future__ import annotations

import json
import sys

import pretend_gpu

LOADED_BYTES = 2**30                 # of a free segment that loading leaves


def main(shape: str, layers: str, reserved: str, options: str, changes: str) -> None:
    pretend_gpu.install(compiles=False)                  # before the package looks for a GPU
    import pretend_memory
    import torch
    from worst_case import WorstCase

    from ridgeline.bench.workload.shapes import write_shape
    from ridgeline.config import EngineConfig
    from ridgeline.engine.core.core import EngineCore
    from ridgeline.engine.core.executor import LocalExecutor
    from ridgeline.models.decoder import Decoder
    from ridgeline.runner import worker
    from ridgeline.runner.start import memory_pools
    from ridgeline.sizes import ledger

    def load_weights(model: Decoder, *args: object) -> None:
        """Takes memory as filling them does; nobody reads them."""
        for weight in model.parameters():
            torch.empty_like(weight)

    def collect_kernels(*args: object) -> None:
        """Loading goes on meanwhile and leaves free segments, into which what stays may not be put."""
        torch.empty(LOADED_BYTES, dtype=torch.uint8)
        collect(*args)
        torch.empty(LOADED_BYTES, dtype=torch.uint8)

    allocator = pretend_memory.install()
    collect, worker.collect_kernels = worker.collect_kernels, collect_kernels
    worker.load_weights = load_weights
    if reserved == "without":
        memory_pools.take = lambda device, num_bytes: None
    core = EngineCore.start(EngineConfig.of(
        model=str(write_shape(shape, int(layers), **json.loads(changes))), load_format="dummy", skip_tokenizer_init=True,
        step_time_ms=0,                                  # steps are as slow as this machine: none would be full
        **json.loads(options),
    ))
    assert isinstance(core.executor, LocalExecutor)
    pools, grown = allocator.pools(), {}
    for name, run in WorstCase(core).kinds():
        before = allocator.reserved
        run()
        if allocator.reserved != before:
            grown[name] = allocator.reserved - before
    predicted, measured = core.config.memory[ledger.STEPS], core.executor.runner.memory[ledger.STEPS]
    print(json.dumps({"pools": pools, "predicted": predicted, "measured": measured, "grown": grown}))


main(*sys.argv[1:])
