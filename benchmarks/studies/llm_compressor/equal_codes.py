"""Round to nearest, code by code: `ridgeline quantize` beside compressed-tensors, which rounds for llm-compressor.

    python benchmarks/studies/llm_compressor/equal_codes.py MODEL --site SITE --out equal-codes.json

One linear is in memory at a time, so a CPU compares all linears of a model of 1.5B: symmetric groups of 64, float32 scales. Equal
codes and scales mean equal perplexity.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from run import GROUP, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="", help="a GGUF file or a directory (default: the embedded model)")
    parser.add_argument("--site", required=True, help="where compressed-tensors is installed")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sys.path.insert(0, args.site)
    import torch
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    from ridgeline.config import EngineConfig
    from ridgeline.ops.quantised.codes import unpacked_codes
    from ridgeline.quant.format import SCALE, WEIGHT
    from ridgeline.quantize.methods.rounding import rounded
    from ridgeline.quantize.plain_model import PlainModel
    from ridgeline.quantize.recipes import read_recipe, stored_scales
    from ridgeline.resolve import model_path

    model = PlainModel(model_path(EngineConfig.of(model=args.model)))
    settings = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=GROUP)
    counts = {"linears": 0, "codes": 0, "equal_codes": 0, "scales": 0, "equal_scales": 0}
    begun = time.process_time()
    for linear in model.linears(read_recipe("int4-rtn", GROUP)):
        if linear.format is None:
            continue
        values = model.read(linear.weight).float()
        mine = rounded(values, stored_scales(linear.format, "float32"))
        groups = values.view(len(values), -1, GROUP)
        scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), settings)
        other = quantize(values, scale, zero, settings).to(torch.int8)
        codes = unpacked_codes("uint4", mine[WEIGHT], None).to(torch.int8) - 8
        counts["linears"] += 1
        counts["codes"] += codes.numel()
        counts["equal_codes"] += int((codes == other).sum())
        counts["scales"] += scale.numel()
        counts["equal_scales"] += int((mine[SCALE] == scale).sum())
    counts |= {"cpu_s": round(time.process_time() - begun, 1)}
    print(json.dumps(counts))
    found = {"model": Path(args.model).name or "embedded", "group": GROUP} | counts | facts(args.site)
    args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
