"""Counts the floors of records with Zipf routing again: those of a58c6dc3 and before took routing for even.

    python benchmarks/studies/experts/recount_zipf.py benchmarks/h200/offline-qwen3-30b-a3b-zipf.json …

What was measured stays. `floors_counted` names the commit that counted them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ridgeline.bench.lab.record import commit
from ridgeline.bench.workload import workloads
from ridgeline.bench.workload.floors import preset_floor, shares
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.models.checkpoints.linear_formats import expert_bytes
from ridgeline.models.model_config import load_model_config
from ridgeline.roofline.decoder_shape import decoder_shape
from ridgeline.roofline.step_cost import Peaks


def recount(path: Path) -> None:
    record = json.loads(path.read_text())
    figures, work = record["figures"], record["workload"]
    model = load_model_config(write_shape(work["model"]))
    peaks = Peaks(figures["peaks"]["read_tb_s"] * 1e12, figures["peaks"]["tflop_s"] * 1e12)
    shape = decoder_shape(model, work["dtype"], expert_bytes=expert_bytes(model, "", work["device"], dtype=work["dtype"]))
    for name, row in figures["rows"].items():
        preset = workloads.GPU_PRESETS[name]
        asked = preset.requests(workloads.TIMED, model.vocab_size)
        own = preset_floor(shape, preset, asked, peaks, work["max_num_batched_tokens"], work["max_num_seqs"], row["level"])
        factor = own["bytes"] / row["counted"]["bytes"]
        row["floor"], row["share_of_floor"] = {"counted": own}, {"counted": shares(row["median"], own)}
        row["counted"] |= {"bytes": own["bytes"], "flops": own["flops"], "tb_s": row["counted"]["tb_s"] * factor}
        print(path.name, name, {figure: round(share, 3) for figure, share in row["share_of_floor"]["counted"].items()})
    record["floors_counted"] = commit()
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    for each in sys.argv[1:]:
        recount(Path(each))
