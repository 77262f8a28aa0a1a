"""What kernels of narrow weights and of narrow KV caches keep of a GPU's speed, for prediction.py."""

from __future__ import annotations

from ridgeline.ops.kernel_table import MOST_CODE_ROWS

# The share of the reading speed of bf16 weights that kernels of narrow ones keep at a few rows, beyond a call's own time: all
# from one request of their records in benchmarks/h200, those of fp8 and int4 between 8B and 70B. MXFP4's numbers take more
# instructions than 4-bit integers, and blocks of a GGUF file have more scales and planes to unpack (Q4_K_M).
READ = {"fp8": 0.90, "fp8-block": 0.85, "int8": 0.87, "mxfp4": 0.67}
NARROW_READ, BLOCKS_READ = 0.78, 0.68
# The share of twice the matrix rate that layers of 8-bit weights keep with many rows, quantisation included: from the first
# tokens of 128 prompts in their records.
EIGHT_BIT_COMPUTE = {"fp8": 0.83, "fp8-block": 0.76, "int8": 0.86}
# The share of the rate of attention over prompts that an int8 KV cache leaves: another kernel reads it (its record, 16 x 8,192).
INT8_KV_COMPUTE = 0.22
# 4-bit weights (benchmarks/studies/int4_linears): the share of the bf16 rate of many rows that layers keep at 256 rows (the 3.6
# TFLOP of 32 layers in 8.03 ms, 446 of 700 TFLOP/s), and the most rows that are multiplied like that.
FOUR_BIT_COMPUTE, FOUR_BIT_ROWS = 0.64, 768
# Above a number of rows codes become numbers in memory first. By bits: these rows, and the bytes that are moved for each weight,
# at the share of the bandwidth that this reaches. Products of so many rows of 4 bits hide reading the numbers again; those of
# blocks of 8 bits (Q8_0) do not.
EXPANDED = {4: (FOUR_BIT_ROWS, 2.516), 8: (MOST_CODE_ROWS, 4.0)}
EXPANDS = 0.7
