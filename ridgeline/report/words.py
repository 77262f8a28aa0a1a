"""The words for the verdict's terms and for the parts of the busy time, the same on /dashboard and in the reports.

A step's time is compute and memory at the roof, kernels below their roof, overhead, in which the device waits, and the time that
other programs had the engine's core.
"""

from __future__ import annotations

# By the verdict's term: "bound by …".
TERMS = {
    "weight_bandwidth": "weight bandwidth", "kv_bandwidth": "KV bandwidth", "compute": "compute",
    "implementation": "kernels below their roof", "host": "the host", "launch": "kernel launches",
    "communication": "communication", "io": "I/O", "queue": "the queue", "idle": "nothing: idle",
    "shared_machine": "other programs", "front_end": "the front end", "tokeniser": "the tokeniser",
    "power": "power", "temperature": "temperature",
}
PARTS = {
    "weight_bandwidth": "reading weights", "kv_bandwidth": "reading KV", "activations": "activations", "compute": "computing",
    "implementation": "kernels below their roof", "host": "host", "launch": "kernel launches",
    "communication": "waiting for ranks", "io": "I/O", "shared_machine": "other programs",
    "clock": "lowered clock",
}
# The parts together, as a step's time is drawn: the group's key is its colour.
GROUPS = {"compute": "compute", "memory": "memory", "kernels": "kernels below their roof", "overhead": "overhead",
          "others": "other programs"}
GROUP_OF = {
    "compute": "compute", "weight_bandwidth": "memory", "kv_bandwidth": "memory", "activations": "memory",
    "implementation": "kernels", "host": "overhead", "launch": "overhead", "communication": "overhead", "io": "overhead",
    "shared_machine": "others", "clock": "kernels",
}
EXPLAINED = {
    "MFU": "Model FLOPs utilisation: FLOPs of useful tokens as a share of this machine's measured matrix rate, while there was "
           "work.",
    "HFU": "Hardware FLOPs utilisation: MFU plus the FLOPs of wasted work (padding, recomputation, rejected drafts).",
    "MBU": "Memory bandwidth utilisation: bytes of weights and KV as a share of this machine's measured bandwidth, while there "
           "was work.",
    "ridge": "The FLOPs per byte at which computing and reading take equally long. Left of it memory limits a step, right of it "
             "compute.",
    "roof": "The least time that a step can take here: its FLOPs at the measured matrix rate or its bytes at the measured "
            "bandwidth.",
    "TTFT": "Time to first token: from the request's arrival to the first token of its answer.",
    "TPOT": "Time per output token: the mean time between the tokens of an answer after the first.",
}


def term_name(term: str) -> str:
    return TERMS.get(term, term.replace("_", " "))


def part_name(part: str) -> str:
    return PARTS.get(part, part.replace("_", " "))
