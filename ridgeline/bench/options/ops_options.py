"""Options of `ridgeline bench ops`, without torch, so that a mistake is reported at once. ops runs it."""

from __future__ import annotations

import argparse

from ridgeline import interrupt
from ridgeline.bench.lab import sustain, table
from ridgeline.bench.lab.sweep import check_runs
from ridgeline.sizes.op_costs import DTYPE_BYTES

SAMPLES = 21
# ops/registry has them once torch is imported.
OP_NAMES = (
    "accept", "apply_mask", "block_linear", "decode_attention", "embedding", "experts", "fp8_linear", "fp8_rows",
    "gated_activation", "gated_fp8_rows", "greedy", "kv_write", "late_positions", "latent_attention", "latent_decode",
    "latent_write", "linear", "logprobs", "normed_fp8_linear", "normed_fp8_rows", "normed_linear", "normed_packed_linear",
    "normed_quantised_linear", "normed_route_rows", "packed_linear", "paged_attention", "quantised_linear", "rms_norm",
    "rotary", "rotary_write", "route_experts", "route_rows", "sample", "soft_cap",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--op", nargs="+", choices=OP_NAMES, metavar="NAME",
                        help=f"{', '.join(OP_NAMES)} (default: all that an engine uses on the device)")
    parser.add_argument("--implementation", nargs="+", metavar="NAME",
                        help="only implementations of these names: reference (plain torch), native (C), triton; for comparison "
                             "library (cuBLAS), onto (a GEMM onto the residual), contiguous (torch's attention) (default: all)")
    parser.add_argument("--case", nargs="+", help="only cases whose name contains one of these words")
    parser.add_argument("--dtype", nargs="+", choices=sorted(DTYPE_BYTES), metavar="DTYPE",
                        help=f"{', '.join(sorted(DTYPE_BYTES))} (default: the device's fastest common one)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the GPU, if there is one")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"timed runs of each case (default: {SAMPLES})")
    parser.add_argument("--peaks-again", action="store_true", help="measure this machine's peak rates again")
    sustain.add_arguments(parser)
    table.add_format(parser)
    parser.add_argument("--out", help="also write the record, as JSON, to this file")
    parser.add_argument("--table", action="store_true",
                        help="measure nothing: print which kernel multiplies which rows, for each weight format, on this GPU; "
                             "without one, on an H200")


def run(args: argparse.Namespace) -> None:
    check_runs(args.samples, 1, "--samples")             # every timing makes calls that do not count before it
    sustain.check(args.sustain)
    interrupt.import_module("ridgeline.bench.ops").run(args)
