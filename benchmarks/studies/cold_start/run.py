"""Where a cold start's time goes, kernel by kernel: `bench startup --cold` with a timeline.

    python benchmarks/studies/cold_start/run.py --shape llama-3.1-8b --starts 2 --out benchmarks/studies/cold_start/result.json

Every start has an empty cache of kernels and of byte code. With `--byte-code` the latter is kept, as for a user whose installer
wrote it: a start that is not counted fills it. `--tree` measures another checkout with this script. Seconds count from the start
of the process. Of each kernel: when it was asked for (submitted), was not in the cache (missed), went to a process (asked), came
back (compiled), and was loaded, its launcher included. A kernel without "asked" was compiled by a thread.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
_TREE = "RIDGELINE_TIMED_TREE"
sys.path[:0] = [os.environ.get(_TREE, str(ROOT))]

LONGEST = 300.0                      # seconds of one start
STEPS = ("submitted", "missed", "asked", "compiled", "loaded")


def processor_seconds(pid: int) -> float:
    """Of a process and of those it has waited for; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return float(sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK"))


class Timeline:
    """Fills itself while the engine of this process starts."""

    def __init__(self) -> None:
        self.marks: dict[str, float] = {}
        self.processor: dict[str, float] = {}            # seconds of this process and of those it has waited for
        self.kernels: list[dict[str, Any]] = []
        self.builds: list[dict[str, Any]] = []           # by the C compiler, in this process
        self.ready: list[float] = []                     # when each process was found ready
        self._rows: dict[int, dict[str, Any]] = {}       # of kernels under way, by what compiles them
        self._here = threading.local()

    def mark(self, name: str) -> None:
        self.marks[name] = self.now()
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.processor[name] = round(used.ru_utime + used.ru_stime, 3)

    @staticmethod
    def now() -> float:
        from ridgeline.process import start_phases

        return round(start_phases.since_start(), 4)

    def around(self, owner: Any, name: str, before: Any = None, after: Any = None) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **options: Any) -> Any:
            if before is not None:
                before(*args)
            try:
                made = function(*args, **options)
            except BaseException as error:
                if after is not None:
                    after(error, *args)
                raise
            if after is not None:
                after(made, *args)
            return made

        setattr(owner, name, timed)

    def install(self) -> None:
        """After the imports."""
        compile_ahead = importlib.import_module("ridgeline.ops.compile_ahead")
        worker = importlib.import_module("ridgeline.runner.worker")
        build = importlib.import_module("triton.runtime.build")
        builders, child = compile_ahead._Builders, compile_ahead.CompileChild
        self.around(builders, "submit", before=self._submitted)
        self.around(builders, "_build", before=self._begun)
        self.around(builders, "_compiled", before=self._missed)
        self.around(builders, "_loaded", after=self._loaded)
        self.around(builders, "close", before=lambda *args: self.mark("all loaded"),
                    after=lambda *args: self.mark("processes ended"))
        self.around(worker, "collect_kernels", before=lambda *args: self.mark("walk begins"),
                    after=lambda *args: self.mark("walk ends"))
        self.around(compile_ahead.CompileAhead, "finish", before=lambda *args: self.mark("waiting for kernels"))
        asked = child.compile

        def compile_kernel(process: Any, *job: Any) -> Any:
            row, held = self._here.row, getattr(process, "_worker", None) or process._child
            row["asked"], before = self.now(), processor_seconds(held.process.pid)
            wrong = asked(process, *job)
            row["compiled"], row["processor_s"] = self.now(), round(processor_seconds(held.process.pid) - before, 3)
            if wrong:
                row["failed"] = wrong
            return wrong

        child.compile = compile_kernel
        own_child = builders._own_child

        def own(pool: Any) -> Any:
            process = own_child(pool)
            if process is not None and not hasattr(process, "timed"):
                process.timed, is_ready = True, process.ready

                def ready() -> bool:
                    said = is_ready()
                    if said and process.timed:
                        process.timed = False
                        self.ready.append(self.now())
                    return bool(said)

                process.ready = ready
            return process

        builders._own_child = own
        self.around(build, "_build", before=self._building, after=self._built)

    def _submitted(self, pool: Any, function: Any, *rest: Any) -> None:
        self._rows[id(function)] = {"kernel": "", "submitted": self.now()}

    def _begun(self, pool: Any, function: Any) -> None:
        self._here.row = self._rows.pop(id(function))
        self.kernels.append(self._here.row)

    def _missed(self, pool: Any, function: Any, missing: Any) -> None:
        self._here.row |= {"kernel": str(missing), "missed": self.now()}

    def _loaded(self, made: Any, *args: Any) -> None:
        if not isinstance(made, BaseException):
            self._here.row["loaded"] = self.now()
            self._here.row["kernel"] = getattr(made, "name", "")

    def _building(self, name: str, *args: Any) -> None:
        self._here.build = (name, self.now())

    def _built(self, made: Any, *args: Any) -> None:
        name, begun = self._here.build
        self.builds.append({"library": name, "begin": begun, "end": self.now()})

    def account(self) -> dict[str, Any]:
        return {"marks": self.marks, "processor_s": self.processor, "ready": sorted(self.ready), "builds": self.builds,
                "kernels": sorted(self.kernels, key=lambda row: row["submitted"])}


def timed(model: str, words: list[str], out: str) -> None:
    """The child: the one of `bench startup`, with a timeline."""
    from ridgeline.bench import startup
    from ridgeline.process import head_start

    line = Timeline()
    line.mark("python")
    line.around(head_start, "begin", after=lambda *args: line.mark("torch and triton"))
    line.around(head_start, "imported", after=lambda *args: (line.mark("imported"), line.install()))
    startup.main([model, *words])
    Path(out).write_text(json.dumps(line.account()))


def started(tree: Path, model: str, words: list[str], environment: dict[str, str]) -> dict[str, Any]:
    from ridgeline.process.children import child_environment, module_path

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "timeline.json"
        told = {**child_environment(), "PYTHONPATH": os.pathsep.join(module_path()), **environment, _TREE: str(tree)}
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-P", __file__, "--timed", str(out), model, *words], env=told, stdout=subprocess.PIPE,
            timeout=LONGEST, check=True,
        )
        account: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return account | {"outside_s": time.perf_counter() - began, "timeline": json.loads(out.read_text())}


def table(start: dict[str, Any]) -> str:
    line = start["timeline"]
    marks, kernels = line["marks"], [row for row in line["kernels"] if "missed" in row]
    asked = [row for row in kernels if "asked" in row and "failed" not in row]
    took = sorted((row["compiled"] - row["asked"] for row in asked), reverse=True)
    lines = ["  ".join(f"{name} {seconds:.2f}" for name, seconds in start["phases"].items())]
    used = line["processor_s"]
    lines.append("  ".join(f"{name} @{seconds:.2f} ({used[name]:.1f} s of CPU)" for name, seconds in marks.items()))
    ready = line["ready"]
    first = f", first seen @{ready[0]:.2f}, last @{ready[-1]:.2f}" if ready else ""
    lines.append(f"processes ready: {len(ready)}{first}")
    lines.append(f"{len(kernels)} kernels missed, {len(asked)} compiled by processes in {sum(took):.1f} s together, "
                 f"{sum(row['processor_s'] for row in asked):.1f} s of CPU; "
                 f"failed there: {[row['failed'] for row in kernels if 'failed' in row][:3]}")
    built = sum(row["end"] - row["begin"] for row in line["builds"])
    names = [f"{row['library']} @{row['begin']:.2f}" for row in line["builds"]]
    lines.append(f"{len(names)} libraries built here in {built:.1f} s together: {', '.join(names[:4])}")
    for title, key in (("longest", lambda row: row["missed"] - row["loaded"]), ("last", lambda row: -row["loaded"])):
        lines.append(f"{title}:")
        for row in sorted((row for row in kernels if "loaded" in row), key=key)[:6]:
            times = "  ".join(f"{name} {row[name]:6.2f}" for name in STEPS if name in row)
            lines.append(f"  {row['kernel']:28s} {times}")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--timed"]:
        timed(sys.argv[3], sys.argv[4:], sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--warm", action="store_true", help="keep both caches; the first start is not counted")
    parser.add_argument("--byte-code", action="store_true", help="keep the byte code; the first start is not counted")
    parser.add_argument("--tree", type=Path, default=ROOT, help="another checkout, to measure that")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="engine options")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if Path(sys.path[0]) != args.tree.resolve():         # what is imported from here on is the tree's
        os.environ[_TREE] = str(args.tree.resolve())
        os.execv(sys.executable, [sys.executable, *sys.argv])
    from ridgeline.bench.lab.record import record, write
    from ridgeline.bench.startup import READY, cold_environment
    from ridgeline.bench.workload.shapes import write_shape

    model = str(write_shape(args.shape, args.layers))
    words = ["load_format=dummy", "skip_tokenizer_init=on", *args.set]
    starts: list[dict[str, Any]] = []
    keeps = args.warm or args.byte_code
    with tempfile.TemporaryDirectory(prefix="ridgeline-byte-code-") as kept:
        for number in range(args.starts + keeps):
            with tempfile.TemporaryDirectory(prefix="ridgeline-cold-") as empty:
                told = cold_environment(empty) | {"PYTHONDONTWRITEBYTECODE": ""}
                if keeps:
                    told["PYTHONPYCACHEPREFIX"] = f"{kept}/byte-code"
                if args.warm:
                    told["TRITON_CACHE_DIR"] = f"{kept}/kernels"
                start = started(args.tree.resolve(), model, words, told)
            if number >= keeps:
                starts.append(start)
                print(f"\nstart {len(starts)}: ready after {start[READY]:.2f} s, from outside {start['outside_s']:.2f} s")
                print(table(start), flush=True)
    asked = {"shape": args.shape, "layers": args.layers, "warm": args.warm, "byte_code": args.byte_code, "options": args.set}
    write(record("cold start", asked, {"ready_s": [start[READY] for start in starts], "starts": starts},
                 starts[-1]["quality"], starts[-1]["gpu"] or None), args.out)


if __name__ == "__main__":
    main()
