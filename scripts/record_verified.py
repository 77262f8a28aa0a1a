"""Write benchmarks/h200/verified.json: which op files the GPU tests have just passed with. Run by `make test-gpu`.

One SHA-256 per file of ridgeline/ops, and where and when it was. `make test`, which has no GPU, compares the files with
it and names the ops whose verification is stale.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPS = ROOT / "ridgeline" / "ops"
RECORD = ROOT / "benchmarks" / "h200" / "verified.json"


def hashes() -> dict[str, str]:
    """By file name; the CPU's kernels are verified wherever the tests run."""
    files = sorted(path for path in OPS.rglob("*.py") if path.name != "__init__.py")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def main(tests: list[str]) -> None:
    sys.path.insert(0, str(ROOT))
    import torch

    from ridgeline.bench.lab.device_log import gpu_facts
    from ridgeline.bench.lab.record import commit

    if not torch.cuda.is_available():
        sys.exit("no GPU here: nothing was verified")
    record = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "gpu": gpu_facts(),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "triton": _triton()},
        "commit": commit(),
        "tests": tests,
        "sha256": hashes(),
    }
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {RECORD.relative_to(ROOT)}")


def _triton() -> str:
    import triton

    return str(triton.__version__)


if __name__ == "__main__":
    main(sys.argv[1:])
