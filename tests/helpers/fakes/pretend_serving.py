"""A process that starts an engine on a GPU that is not there, serves every kind of request, and prints what was compiled when.

    python tests/helpers/fakes/pretend_serving.py SHAPE LAYERS OPTIONS-AS-JSON

While launches are collected, memory that nobody has written holds numbers that are no index of anything.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pretend_gpu

GREEDY: dict[str, Any] = {"temperature": 0}
DRAWN: dict[str, Any] = {"temperature": 0.8}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY, "drawn": DRAWN, "top_k": DRAWN | {"top_k": 20}, "top_p": DRAWN | {"top_p": 0.9},
    "min_p": DRAWN | {"min_p": 0.1}, "typical_p": DRAWN | {"typical_p": 0.5}, "penalty": GREEDY | {"presence_penalty": 0.5},
    "drawn with a penalty": DRAWN | {"repetition_penalty": 1.2}, "log-probabilities": GREEDY | {"logprobs": 3},
    "filtered with a bias": DRAWN | {"top_k": 9, "logit_bias": {5: 1.0}}, "allowed ids": GREEDY | {"allowed_token_ids": [5, 6]},
    "those of drawn tokens": DRAWN | {"logprobs": 0}, "those of the prompt": GREEDY | {"prompt_logprobs": 2},
}


def main(shape: str, layers: int, options: dict[str, Any]) -> None:
    pretend_gpu.install(compiles=False)                  # before the package looks for a GPU
    from ridgeline.bench.workload.shapes import write_shape
    from ridgeline.config import EngineConfig
    from ridgeline.engine.core.core import EngineCore
    from ridgeline.messages import Request
    from ridgeline.metrics import HAPPENED
    from ridgeline.ops import registry
    from ridgeline.runner import worker
    from ridgeline.runner.start import kernel_steps
    from ridgeline.sampling_params import SamplingParams

    collect = worker.collect_kernels

    def collect_from_unwritten_memory(*args: Any) -> None:
        pretend_gpu.unfilled(10**15 + 119)
        collect(*args)
        pretend_gpu.unfilled(0)

    worker.collect_kernels = collect_from_unwritten_memory
    worker.load_weights = lambda *args: None                              # no kernel reads them
    core = EngineCore.start(EngineConfig.of(
        model=str(write_shape(shape, layers)), load_format="dummy", skip_tokenizer_init=True, **options,
        step_time_ms=0,                                  # steps are as slow as this machine: chunks would become tiny
    ))
    ready = {"ahead": len(registry.COMPILED_AHEAD), "late": HAPPENED["kernel_compile"]}
    late: dict[str, list[str]] = {}
    rng = random.Random(7)

    def serve(name: str, *asked: tuple[int, dict[str, Any]], shared: int = 0) -> None:
        seen = len(pretend_gpu.COMPILED)
        for number, (tokens, params) in enumerate(asked):
            prompt = [3] * shared + [rng.randrange(3, 100) for _ in range(tokens)]
            said = SamplingParams(**{"max_tokens": 3, "ignore_eos": True} | params)
            core.add(Request(f"{name} {number}", prompt, said))
        while core.has_work:
            for delta in core.step():
                if delta.error:
                    raise AssertionError(delta.error)
        late[name] = [f"{kernel} {variant}" for kernel, variant in pretend_gpu.COMPILED[seen:]]

    for name, params in KINDS.items():
        serve(name, (5, params))
    for rows in (2, 3, 7, 16, 17, 33, 60, 65, 100, 130, 200, 270):
        serve(f"{rows} greedy", *((rng.randrange(1, 40), GREEDY) for _ in range(rows)))
    for turn in range(6):
        lengths = [1, 3, 20, 100, 700, 1500]
        kinds = [rng.choice(list(KINDS.values())) | {"max_tokens": rng.randrange(1, 6)} for _ in range(rng.choice([4, 30]))]
        serve(f"all kinds {turn}", *((rng.choice(lengths), params) for params in kinds))
    serve("a shared prefix, first", (3, GREEDY), shared=2400)
    serve("a shared prefix", *[(3, GREEDY)] * 30, shared=2400)
    seen = len(pretend_gpu.COMPILED)
    for rows in (1, 9, 30):
        for params in (GREEDY, DRAWN, DRAWN | {"top_p": 0.5}):
            masked = SamplingParams(**params | {"structured_outputs": {"regex": "a"}})
            step = kernel_steps.KernelStep([1] * rows, params=masked, masked=True)
            kernel_steps.run_step(core.executor.runner, len(core.config.groups), step)
    late["masks"] = [f"{kernel} {variant}" for kernel, variant in pretend_gpu.COMPILED[seen:]]
    kernels = sorted({kernel for kernel, _ in pretend_gpu.COMPILED})
    print(json.dumps({"ready": ready, "late": late, "kernels": kernels, "launched": pretend_gpu.LAUNCHED}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
