"""`ridgeline quantize` on a GPU: cards of a real model by every recipe, and GPTQ of a large model's shapes.

    python benchmarks/studies/quantize_speed/on_a_gpu.py MODEL.gguf --shape llama-3.1-8b --out FILE --seconds 480

Every part is a process of its own, as a user starts it, so that one that fails or takes too long leaves the others alone. FILE is
written after each part. First run.py quantises LAYERS layers of the shape with random weights (`measured_s`); `whole_s` is that
time × all layers / LAYERS, extrapolated since layers are alike, and measured only where LAYERS is all of them. Then each recipe
makes the model and its card, which is copied beside FILE (for benchmarks/cards); `auto:0.3` is auto with --max-kl 0.3. Parts that
no time is left for are named in `left_out`.
`--layers 0` leaves the shapes out; without MODEL there are only shapes.

Without a GPU it runs on the CPU: `MODEL --shape tiny --layers 2 --recipes int4-rtn --card-tokens 64` is a quick try.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch

from ridgeline.bench.lab.record import commit, source_hash

ROOT = Path(__file__).resolve().parents[3]
SHAPES = {"llama-3.1-8b": "8b", "qwen2.5-1.5b": "1.5b", "tiny": "tiny"}      # -> as run.py calls them
RECIPES = ("int4-rtn", "int4-gptq", "fp8", "int4-awq", "w8a8-smooth", "w8a8", "mxfp4")
LEAST_S = 20                         # a part is not begun with less
SAID = 1500                          # characters of a failed part's last words


class Clock:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


def part(command: list[str], seconds: float) -> dict[str, Any]:
    """Runs it; returns what it took, and why it failed if it did."""
    begun = time.monotonic()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environment = os.environ | {"PYTHONPATH": path, "RIDGELINE_COMMIT": commit()}
    try:
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True,
                              timeout=seconds, check=False)
        failed = "" if done.returncode == 0 else f"exit code {done.returncode}: {(done.stdout + done.stderr)[-SAID:]}"
    except subprocess.TimeoutExpired:
        failed = f"stopped after {seconds:.0f} s"
    return {"command_s": round(time.monotonic() - begun, 1)} | ({"failed": failed} if failed else {})


def shapes(args: argparse.Namespace, work: Path, seconds: float) -> dict[str, Any]:
    file = work / "shapes.json"
    found = part(["benchmarks/studies/quantize_speed/run.py", "--shape", SHAPES[args.shape], "--layers", str(args.layers),
                  "--recipes", "int4-gptq", "--out", str(file)], seconds)
    return found | (json.loads(file.read_text()) if file.is_file() else {})


def model(args: argparse.Namespace, recipe: str, work: Path, seconds: float) -> dict[str, Any]:
    name, _, limit = recipe.partition(":")
    out = work / f"{args.name or args.model.stem}-{recipe.replace(':', '-')}"
    found = part(["-m", "ridgeline", "quantize", str(args.model), "--recipe", name, *(["--max-kl", limit] if limit else []),
                  "--out", str(out), "--card-tokens", str(args.card_tokens), "--card-needle", str(args.card_needle)], seconds)
    if not (out / "quality.json").is_file():
        return found
    args.out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(out / "quality.json", args.out.parent / f"{out.name}.json")
    return found | {"time": times(json.loads((out / "quality.json").read_text(encoding="utf-8"))["time"])}


def times(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Seconds on the clock and of all cores; `error`: how far the prediction was from what it took. Only those of all cores can
    be judged on a CPU that others use."""
    rows = {}
    for name in ("quantise", "card"):
        rows[name] = dict[str, float]()
        for unit, words in (("wall_s", ""), ("cpu_s", "cpu_")):
            predicted, measured = found["predicted"][name][unit], found[name][unit]
            rows[name] |= {f"{words}predicted_s": predicted, f"{words}measured_s": measured,
                           f"{words}error": round(predicted / max(measured, 0.1) - 1, 3)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=4, help="of the shape, that are quantised")
    parser.add_argument("--name", default="", help="of the model, on its cards (default: the file's)")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--card-tokens", type=int, default=512)
    parser.add_argument("--card-needle", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out, clock = args.out.resolve(), Clock(args.seconds)
    if args.model is None:
        args.recipes = []
    elif not args.model.resolve().exists():
        parser.error(f"{args.model} is not there")
    else:
        args.model = args.model.resolve()
    result: dict[str, Any] = {
        "study": "quantize on a GPU", "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {"gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "", "architecture": platform.machine(),
                    "cores": os.cpu_count()},
        "versions": {name: version(name) for name in ("torch", "numpy", "safetensors", "tokenizers")},
        "commit": commit(), "source": source_hash(), "model": args.model.name if args.model else "",
        "options": {name: getattr(args, name) for name in ("shape", "layers", "card_tokens", "card_needle", "seconds")},
        "shapes": {}, "recipes": {}, "left_out": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in (*(["shapes"] if args.layers else []), *args.recipes):
            if clock.left < LEAST_S:
                result["left_out"].append(name)
            elif name == "shapes":
                result["shapes"] = shapes(args, work, clock.left)
            else:
                result["recipes"][name] = model(args, name, work, clock.left)
                for left in work.iterdir():                              # gigabytes
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            row = result["shapes"] if name == "shapes" else result["recipes"].get(name, {})
            said = {key: value for key, value in row.items() if key in ("command_s", "failed", "time")}
            print(name, json.dumps(said), f"{clock.left:.0f} s left", flush=True)


if __name__ == "__main__":
    main()
