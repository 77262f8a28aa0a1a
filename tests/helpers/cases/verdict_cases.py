"""Planted cases for the verdict: stretches of time whose binding term is known because it was put there.

A case is a model on a machine, a step repeated, and what is added to the time that its roof allows: how close kernels
come to the roof, what the host needs between steps, what launching, ranks and storage cost, who waits. `expected` is what
was planted. Figures are those of real models and data sheets; see test_verdict.py for how a case becomes a window.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ridgeline.gpus.clocks import Clocks
from ridgeline.roofline.decoder_shape import DecoderShape
from ridgeline.roofline.step_cost import Peaks

LLAMA_8B = DecoderShape(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, layers=32, vocab=128256)
LLAMA_70B = DecoderShape(hidden=8192, intermediate=28672, heads=64, kv_heads=8, head_dim=128, layers=80, vocab=128256)
QWEN_05B = DecoderShape(hidden=896, intermediate=4864, heads=14, kv_heads=2, head_dim=64, layers=24, vocab=151936)
OLD_7B = DecoderShape(hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128, layers=32, vocab=32000)
SMOLLM = DecoderShape(hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, layers=30, vocab=49152,
                      weight_bytes=4, kv_bytes=4, activation_bytes=4)
INT4_8B = DecoderShape(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, layers=32, vocab=128256,
                       weight_bytes=0.5625, head_bytes=2, embedding_bytes=2)
FP8_8B = DecoderShape(hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, layers=32, vocab=128256,
                      weight_bytes=1, head_bytes=2, embedding_bytes=2)

H200, H100, A100 = Peaks(4.38e12, 793e12), Peaks(3.35e12, 989e12), Peaks(2.04e12, 312e12)
# Of an H200 that its power limit slows, of one that is hot, and of one whose clock is hardly lower.
CAPPED = Clocks(20, 692, 700, 700, 1275, 1980, 61, power_capped=1.0, heat_capped=0.0)
HOT = Clocks(20, 480, 700, 700, 1200, 1980, 88, power_capped=0.0, heat_capped=0.9)
HARDLY = Clocks(20, 699, 700, 700, 1950, 1980, 61, power_capped=1.0, heat_capped=0.0)
L4, CPU = Peaks(0.3e12, 121e12), Peaks(18e9, 80e9)


@dataclass(frozen=True)
class Planted:
    name: str
    expected: str
    shape: DecoderShape
    peaks: Peaks
    rows: list[tuple[int, int]]
    at_roof: float = 0.8             # of the kernels' time
    host: float = 0.02               # between steps, as a part of the busy time
    communication: float = 0.0
    launches: float = 0.0            # seconds that issuing a step's kernels takes
    busy: float = 1.0                # of the whole time
    waiting: float = 0.0
    lost: float = 0.0                # other programs had the core, as a part of the busy time
    front_end: float = 0.0           # the event loop computed, as a part of the whole time …
    tokenising: float = 0.0          # … and text became tokens
    setting: dict[str, Any] = field(default_factory=dict)
    clocks: Clocks | None = None


def decode(rows: int, context: int) -> list[tuple[int, int]]:
    return [(1, context)] * rows


def prompt(tokens: int, before: int = 0) -> list[tuple[int, int]]:
    return [(tokens, before + tokens)]


CASES = [
    # Reading weights: few rows, short contexts.
    Planted("8B, one chat on an H200", "weight_bandwidth", LLAMA_8B, H200, decode(1, 512)),
    Planted("8B, one chat, excellent kernels", "weight_bandwidth", LLAMA_8B, H200, decode(1, 512), at_roof=0.97),
    Planted("8B, 32 short chats", "weight_bandwidth", LLAMA_8B, H200, decode(32, 600)),
    Planted("70B, 8 chats on an H100", "weight_bandwidth", LLAMA_70B, H100, decode(8, 1000), at_roof=0.7),
    Planted("4-bit 8B, one chat on an L4", "weight_bandwidth", INT4_8B, L4, decode(1, 400)),
    Planted("SmolLM on a CPU", "weight_bandwidth", SMOLLM, CPU, decode(1, 200), at_roof=0.6),
    Planted("8B, a little host time is no cause", "weight_bandwidth", LLAMA_8B, A100, decode(4, 300), host=0.2),
    Planted("8B, launching hidden behind reading", "weight_bandwidth", LLAMA_8B, H200, decode(1, 512), launches=0.002),
    Planted("8B, some wait but rows are not full", "weight_bandwidth", LLAMA_8B, H200, decode(16, 500), waiting=3,
            setting={"max_rows": 256, "kv_usage": 0.3}),
    # Reading the cache: many rows, long contexts, many KV heads.
    Planted("8B, 128 chats of 8K", "kv_bandwidth", LLAMA_8B, H200, decode(128, 8192)),
    Planted("8B, one chat of 128K", "kv_bandwidth", LLAMA_8B, H200, decode(4, 131072)),
    Planted("32 KV heads, 32 chats of 2K", "kv_bandwidth", OLD_7B, A100, decode(32, 2048)),
    Planted("4-bit 8B, 64 chats of 2K", "kv_bandwidth", INT4_8B, H200, decode(64, 2048), at_roof=0.65),
    Planted("70B, 256 chats of 4K", "kv_bandwidth", LLAMA_70B, H100, decode(256, 4096)),
    Planted("SmolLM, 64 chats of 2K on a CPU", "kv_bandwidth", SMOLLM, CPU, decode(64, 2048), at_roof=0.55),
    Planted("8B, 256 chats of 4K, and others wait", "kv_bandwidth", LLAMA_8B, H200, decode(256, 4096), waiting=40,
            setting={"max_rows": 256, "kv_usage": 0.97}),
    # Computing: prompts, and batches beyond the ridge.
    Planted("8B, a prompt of 8K", "compute", LLAMA_8B, H200, prompt(8192)),
    Planted("8B, a prompt of 2K, good kernels", "compute", LLAMA_8B, H200, prompt(2048), at_roof=0.9),
    Planted("70B, a chunk of 4K behind 28K", "compute", LLAMA_70B, H100, prompt(4096, 28672), at_roof=0.7),
    Planted("8B, 512 chats on a ridge of 206", "compute", LLAMA_8B, Peaks(4.8e12, 400e12), decode(512, 64)),
    Planted("8B, prompts beside decodes", "compute", LLAMA_8B, H200, decode(64, 700) + prompt(4096)),
    Planted("SmolLM, a prompt on a CPU", "compute", SMOLLM, CPU, prompt(512), at_roof=0.6),
    Planted("8B, a queue in front of full matrix units", "compute", LLAMA_8B, H200, prompt(8192), waiting=50,
            setting={"max_rows": 1}),
    # Far from every roof, with no overhead to blame.
    Planted("8B, one chat, slow kernels", "implementation", LLAMA_8B, H200, decode(1, 512), at_roof=0.3),
    Planted("8B, a prompt, slow kernels", "implementation", LLAMA_8B, H200, prompt(4096), at_roof=0.35),
    Planted("8B, long contexts, slow attention", "implementation", LLAMA_8B, H200, decode(128, 8192), at_roof=0.25),
    Planted("SmolLM in plain torch on a CPU", "implementation", SMOLLM, CPU, decode(1, 200), at_roof=0.2),
    Planted("0.5B, a prompt at a fifth", "implementation", QWEN_05B, A100, prompt(2048), at_roof=0.2),
    # The host between steps.
    Planted("8B, slow scheduler", "host", LLAMA_8B, H200, decode(256, 500), host=0.4),
    Planted("0.5B, tokenising in the loop", "host", QWEN_05B, H200, decode(32, 500), host=0.7),
    Planted("8B, host at the border", "host", LLAMA_8B, H200, decode(1, 512), host=0.28),
    Planted("slow kernels, and a slower host", "host", SMOLLM, CPU, decode(1, 200), at_roof=0.3, host=0.5),
    # Launching.
    Planted("0.5B eager", "launch", QWEN_05B, H200, decode(1, 300), launches=0.004, setting={"graphs": False}),
    Planted("8B eager with Python between kernels", "launch", LLAMA_8B, H200, decode(1, 512), launches=0.012,
            setting={"graphs": False}),
    Planted("0.5B, a short prompt eager", "launch", QWEN_05B, H100, prompt(64), launches=0.003, setting={"graphs": False}),
    # Ranks.
    Planted("70B on 8, all-reduce over PCIe", "communication", LLAMA_70B.shard(8), H100, decode(16, 1000),
            communication=0.45, setting={"ranks": 8}),
    Planted("8B on 4, small steps", "communication", LLAMA_8B.shard(4), H200, decode(1, 512), communication=0.35,
            setting={"ranks": 4}),
    # Storage and network.
    # Admission.
    Planted("8 rows allowed, 60 wait", "queue", LLAMA_8B, H200, decode(8, 400), waiting=60, setting={"max_rows": 8}),
    Planted("the KV cache is full", "queue", LLAMA_70B, H100, decode(12, 2000), waiting=30,
            setting={"max_rows": 256, "kv_usage": 0.96}),
    Planted("one row, static batching", "queue", SMOLLM, CPU, decode(1, 100), waiting=4, at_roof=0.7,
            setting={"max_rows": 1}),
    # Other programs on the same cores.
    Planted("SmolLM on a CPU that others use", "shared_machine", SMOLLM, CPU, decode(1, 200), at_roof=0.25, lost=0.6),
    Planted("the host's core is taken, beside a GPU", "shared_machine", QWEN_05B, H200, decode(4, 500), host=0.5, lost=0.45),
    Planted("others take little", "implementation", SMOLLM, CPU, decode(1, 200), at_roof=0.25, lost=0.1),
    # The front end.
    Planted("thousands of short answers", "front_end", QWEN_05B, H200, decode(200, 100), busy=0.5, front_end=0.97),
    Planted("long prompts of text, short answers", "tokeniser", QWEN_05B, H200, prompt(4096), busy=0.3, front_end=0.9,
            tokenising=0.7),
    Planted("a full event loop beside a full engine", "weight_bandwidth", LLAMA_8B, H200, decode(8, 400), front_end=0.95),
    # A GPU at a lowered clock.
    Planted("fp8 8B, 128 chats at the power limit", "power", FP8_8B, H200, decode(128, 640), clocks=CAPPED),
    Planted("8B, a prompt at the power limit, the rate was measured there, too", "power", LLAMA_8B, H200, prompt(8192),
            at_roof=0.99, clocks=CAPPED),
    Planted("at the power limit, and others wait", "power", FP8_8B, H200, decode(128, 640), waiting=60, clocks=CAPPED,
            setting={"max_rows": 128}),
    Planted("8B on a hot GPU", "temperature", LLAMA_8B, H200, decode(64, 700), at_roof=0.6, clocks=HOT),
    Planted("the limit is reached, the clock is hardly lower", "weight_bandwidth", LLAMA_8B, H200, decode(8, 512), clocks=HARDLY),
    Planted("memory at its roof, at a lowered clock", "weight_bandwidth", LLAMA_8B, H200, decode(8, 512), at_roof=0.96,
            clocks=CAPPED),
    Planted("a slow host beside a GPU at its limit", "host", LLAMA_8B, H200, decode(256, 500), host=0.4, clocks=CAPPED),
    # Nothing to do.
    Planted("a chat now and then", "idle", LLAMA_8B, H200, decode(1, 512), busy=0.1),
    Planted("a third busy, with slow steps", "idle", SMOLLM, CPU, decode(1, 200), busy=0.33, at_roof=0.3),
    Planted("busy half of the time, but others wait", "weight_bandwidth", LLAMA_8B, H200, decode(8, 400), busy=0.45, waiting=2,
            setting={"max_rows": 256}),
]
