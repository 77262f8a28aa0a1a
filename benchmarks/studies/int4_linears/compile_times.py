"""What a start without a kernel cache compiles, and what each kernel costs: on a machine without a GPU, for an H200.

    python benchmarks/studies/int4_linears/compile_times.py --shape llama-3.1-8b-q4_k_m --layers 8 --out compile_times.json

An engine of the shape starts on a pretended GPU (tests/helpers/fakes/pretend_gpu.py) and names its kernels. Each is then compiled
alone, with an empty cache: CPU seconds of this process and of the assembler's, and the time of Triton's stages by the clock as
shares of it. Kernels whose PTX is the same are counted (`same_ptx`).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers/fakes")]

import pretend_gpu  # noqa: E402

WAITING: list[tuple[Any, Any, Any]] = []                 # (source, target, options) of every kernel that the start names


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def named(shape: str, layers: int, options: dict[str, Any]) -> None:
    """Fills WAITING."""
    kept = pretend_gpu._compile

    def remember(src: Any, target: Any = None, options: Any = None, **others: Any) -> Any:
        WAITING.append((src, target, options))
        return kept(src, target, options, **others)

    pretend_gpu._compile = remember
    pretend_gpu.install(compiles=False)
    from ridgeline.bench.workload.shapes import write_shape
    from ridgeline.config import EngineConfig
    from ridgeline.engine.core.core import EngineCore
    from ridgeline.quant import packed
    from ridgeline.runner import worker

    worker.load_weights = lambda *args: None             # no kernel reads them
    packed.pack_blocks = one_strip(packed.pack_blocks)
    EngineCore.start(EngineConfig.of(
        model=str(write_shape(shape, layers)), load_format="dummy", skip_tokenizer_init=True, num_gpu_blocks_override=4000,
        **options,
    ))


def one_strip(pack_blocks: Any) -> Any:
    """Packs 16 outputs and says that all are like them: a whole matrix takes a CPU seconds, and no kernel reads it."""
    def pack(weight: Any, gated: bool = False) -> Any:
        outputs, rows = len(weight.weight), slice(0, 16)
        cut = {name: tensor[rows] for name in ("weight", "high", "scale", "offset", "outer", "offset_outer")
               if (tensor := getattr(weight, name)) is not None}
        made = pack_blocks(weight._replace(**cut), gated)
        many = {name: tensor.expand(-(-outputs // 16), *tensor.shape[1:]) for name in ("codes", "scale", "zero", "high", "blocks")
                if (tensor := getattr(made, name)) is not None}
        return dataclasses.replace(made, outputs=outputs, **many)

    return pack


def constants(source: Any) -> dict[str, Any]:
    """By argument, as JSON has them."""
    found = {source.fn.arg_names[place[0]]: value for place, value in source.constants.items()}
    return {name: value if isinstance(value, (int, str)) else str(value) for name, value in found.items()}


def compiled(compile_kernel: Any, source: Any, target: Any, options: Any) -> dict[str, Any]:
    from triton import knobs

    stages: dict[str, float] = {}

    def listen(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        stages["front end"] = times.ir_initialization / 1e6
        stages.update({name: micros / 1e6 for name, micros in times.lowering_stages})

    before, begin = cpu_seconds(), time.perf_counter()
    knobs.compilation.listener = listen
    made = compile_kernel(source, target=target, options=options)
    used, clock = cpu_seconds() - before, time.perf_counter() - begin
    chosen = {name: options[name] for name in ("num_warps", "num_stages", "maxnreg") if name in options}
    return {
        "kernel": source.name, "cpu_s": round(used, 3),
        "shares": {name: round(seconds / clock, 3) for name, seconds in stages.items()},
        "ptx": hashlib.sha256(made.asm["ptx"].encode()).hexdigest()[:16],
        "constants": constants(source), "options": chosen,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b-q4_k_m")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--only", default="", help="kernels whose name has this word")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="ridgeline-compile-")
    import triton.compiler

    from ridgeline.bench.lab.record import record, write

    asked = {"shape": args.shape, "layers": args.layers, "max_num_seqs": args.max_num_seqs, "only": args.only}
    compile_kernel = triton.compiler.compile
    named(args.shape, args.layers, {"max_num_seqs": args.max_num_seqs})
    print(f"{len(WAITING)} kernels", flush=True)
    rows: list[dict[str, Any]] = []
    # Those of packed weights first: what is measured is written at once.
    for source, target, options in sorted(WAITING, key=lambda each: "packed_gemm" not in each[0].name):
        if args.only in source.name:
            rows.append(compiled(compile_kernel, source, target, options))
            print(f"{rows[-1]['kernel']:32s} {rows[-1]['cpu_s']:6.2f} s  {rows[-1]['shares']}", flush=True)
            write(record("compile times", asked, summed(rows)), args.out)
    print(json.dumps({name: value for name, value in summed(rows).items() if name != "rows"}, indent=1))


def summed(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """`kernels`: that a start names; `compiled`: of which as many were measured."""
    found: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for row in rows:
        found[row["kernel"]].append(row)

    def of(some: list[dict[str, Any]], stage: str) -> float:
        return round(sum(row["cpu_s"] * row["shares"].get(stage, 0.0) for row in some), 1)

    stages = list(dict.fromkeys(stage for row in rows for stage in row["shares"]))
    return {
        "kernels": dict(collections.Counter(source.name for source, _, _ in WAITING)), "compiled": len(rows),
        "same_ptx": len(rows) - len({row["ptx"] for row in rows}), "cpu_s": round(sum(row["cpu_s"] for row in rows), 1),
        "by_stage": {stage: of(rows, stage) for stage in stages},
        "by_kernel": {
            name: {"variants": len(some), "cpu_s": round(sum(row["cpu_s"] for row in some), 1),
                   "front_end_s": of(some, "front end")}
            for name, some in sorted(found.items())
        },
        "rows": rows,
    }


if __name__ == "__main__":
    main()
