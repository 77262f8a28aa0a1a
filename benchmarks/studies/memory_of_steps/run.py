"""Where a GPU's memory goes that the ledger calls "steps": blocks of torch's allocator, stage by stage of an engine's start.

    python benchmarks/studies/memory_of_steps/run.py [--group llama-3.1-70b-int4] [--layers N] [--out result.json]

The engine of a group of `ridgeline bench offline --preset h200`, with dummy weights. "Steps" is what torch has reserved and no
other part has allocated. So free blocks count that lie in segments beside weights: torch gives a segment back only when all of
it is free. For every stage: the pools (0 is the default one; graphs have their own), the largest blocks, and the segments that
hold both allocated and free blocks, with the names of the parameters in them.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 2**20
SHOWN = 15                           # blocks of a pool


def summary(segments: list[dict[str, Any]], names: dict[int, str]) -> dict[str, Any]:
    """Of torch.cuda.memory_snapshot(), by pool. `names`: of tensors by their address."""
    found: dict[str, Any] = {}
    for segment in segments:
        number, own = segment.get("segment_pool_id", (0, 0))
        pool = found.setdefault("default" if (number, own) == (0, 0) else f"private {number}.{own}", {
            "reserved": 0, "active": 0, "free_in_used_segments": 0, "free_segments": 0, "mixed": Counter(), "blocks": [],
        })
        blocks = [(block["size"], block["state"] != "inactive", names.get(block["address"], "")) for block in segment["blocks"]]
        active = sum(size for size, used, _ in blocks if used)
        pool["reserved"] += segment["total_size"]
        pool["active"] += active
        pool["blocks"] += blocks
        if active == 0:
            pool["free_segments"] += segment["total_size"]
        elif active < segment["total_size"]:
            pool["free_in_used_segments"] += segment["total_size"] - active
            held = Counter(name or "?" for _, used, name in blocks if used)
            pool["mixed"][segment["total_size"], active, tuple(sorted(held.items()))] += 1
    for pool in found.values():
        largest = sorted(pool["blocks"], key=lambda block: -block[0])
        pool["blocks"] = [{"bytes": size, "active": used, "name": name} for size, used, name in largest[:SHOWN]]
        mixed = [
            {"segments": count, "bytes_each": size, "free_each": size - active, "free": count * (size - active),
             "holds": dict(held)}
            for (size, active, held), count in pool["mixed"].items()
        ]
        pool["mixed"] = sorted(mixed, key=lambda each: -each["free"])[:SHOWN]
    return found


def told(stage: str, totals: dict[str, int], pools: dict[str, Any]) -> str:
    lines = [f"── {stage}: " + ", ".join(f"{name} {value / MIB:,.1f} MiB" for name, value in totals.items())]
    for name, pool in pools.items():
        parts = ("reserved", "active", "free_in_used_segments", "free_segments")
        lines.append(f"  pool {name}: " + ", ".join(f"{part} {pool[part] / MIB:,.1f}" for part in parts))
        for block in pool["blocks"]:
            lines.append(f"    block {block['bytes'] / MIB:10,.1f}  {'active' if block['active'] else 'free  '}  {block['name']}")
        for each in pool["mixed"]:
            held = ", ".join(f"{count} x {name}" for name, count in list(each["holds"].items())[:6])
            lines.append(
                f"    {each['segments']:4} segments of {each['bytes_each'] / MIB:,.1f}: free {each['free_each'] / MIB:,.1f} "
                f"each, {each['free'] / MIB:,.1f} in all; hold {held}"
            )
    return "\n".join(lines)


class Stages:
    """Prints and keeps the allocator's state whenever it is asked."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []
        self.model: Any = None

    def look(self, stage: str) -> None:
        import torch

        if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():        # a capture may not wait
            return
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        totals = {
            "allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(),
            "peak allocated": torch.cuda.max_memory_allocated(), "peak reserved": torch.cuda.max_memory_reserved(),
            "used on the GPU": total - free,
        }
        pools = summary(torch.cuda.memory_snapshot(), names_of(self.model))
        self.kept.append({"stage": stage, "totals": totals, "pools": pools})
        print(told(stage, totals, pools), flush=True)
        torch.cuda.reset_peak_memory_stats()

    def around(self, owner: Any, name: str, before: str = "", after: str = "") -> None:
        """Look before and after each call of that function."""
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.model = self.model or next((each for each in args if type(each).__name__ == "Decoder"), None)
            if before:
                self.look(before)
            made = original(*args, **kwargs)
            if after:
                self.look(after)
            return made

        setattr(owner, name, called)


def names_of(model: Any) -> dict[int, str]:
    """Parameters by their address, with a star for the layer."""
    if model is None:
        return {}
    return {each.untyped_storage().data_ptr(): re.sub(r"\.\d+\.", ".*.", name) for name, each in model.named_parameters()}


def watch(stages: Stages) -> None:
    from ridgeline.models.decoder import Decoder
    from ridgeline.runner import worker

    stages.around(worker, "_kernels_and_weights", "model and rows created", "loaded")
    stages.around(Decoder, "finish", "before finish", "after finish, nothing given back yet")
    stages.around(worker, "_first_steps", "KV cache and rows are there", "graphs captured")
    stages.around(worker.memory_pools, "take", "", "a pool taken")
    stages.around(worker, "warm_up", "", "the largest steps have run")


def run(group: str, layers: int | None, prompt: int, requests: int) -> dict[str, Any]:
    from ridgeline.bench.options.suite import SUITE
    from ridgeline.bench.workload.bench_engine import Engine
    from ridgeline.bench.workload.presets import MODEL_OPTIONS, memory_ledger
    from ridgeline.bench.workload.shapes import write_shape

    stages, asked = Stages(), SUITE[group]
    watch(stages)
    options = {"max_model_len": 784} | MODEL_OPTIONS.get(asked.shape, {}) | asked.options
    engine = Engine(str(write_shape(asked.shape, layers)), load_format="dummy", skip_tokenizer_init=True, **options)
    rng, vocab = random.Random(0), engine.config.model.vocab_size
    length = min(prompt, engine.config.max_model_len - 16)

    def ids(count: int) -> list[int]:
        return [rng.randrange(1000, vocab) for _ in range(count)]

    engine.serve([(ids(length), 4) for _ in range(-(-prompt // length))])
    stages.look(f"prompts of {prompt} tokens together")
    engine.serve([(ids(64), 16) for _ in range(requests)])
    stages.look(f"{requests} requests")
    engine.settle()
    stages.look("settled")
    made = {"group": group, "layers": layers, "ledger": memory_ledger(engine), "stages": stages.kept,
            "step_bytes": engine.config.step_bytes, "graph_bytes": engine.config.graph_bytes}
    engine.close()
    print(json.dumps(made["ledger"]), f"step_bytes {made['step_bytes']:,}, graph_bytes {made['graph_bytes']:,}", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", default="llama-3.1-70b-int4")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of prompts")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--out", help="the record")
    args = parser.parse_args()
    made = run(args.group, args.layers, args.prompt, args.requests)
    if args.out:
        Path(args.out).write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
