"""Calibrated scales of the KV cache that a checkpoint brings: one number for the keys and one for the values of every layer.

Read from the safetensors files without torch, since the size of a block depends on them. Scales that are all 1.0 are what tools
write who calibrated nothing: they are not taken for calibrated ones.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from ridgeline.models.checkpoints.recipe import Quantisation

MAX_HEADER = 100 * 2**20
LAYER = re.compile(r"\.layers\.(\d+)\.")
BOTH = ("kv_scale",)
FORMATS = {"F32": "<f", "F64": "<d", "F16": "<e", "BF16": "<f"}
Scales = tuple[tuple[float, float], ...]


def calibrated_scales(directory: Path, quantisation: Quantisation | None, num_layers: int) -> tuple[Scales, str]:
    """The scales of K and V of every layer; or none, and why they are not used (empty: the checkpoint has none)."""
    if quantisation is None or not quantisation.kv_scales or not directory.is_dir():
        return (), ""
    patterns = [re.compile(pattern) for pattern in quantisation.kv_scales]
    found: dict[tuple[int, str], float] = {}
    several = False
    for path in sorted(directory.glob("*.safetensors")):
        for name, values in _read(path, patterns).items():
            layer = LAYER.search(name)
            if layer is None or len(values) != 1:
                several |= layer is not None
                continue
            for part in _parts(name):
                found[int(layer[1]), part] = values[0]
    if several:
        return (), "the checkpoint's KV scales are not one number per layer"
    if not found:
        return (), ""
    wanted = [(layer, part) for layer in range(num_layers) for part in "kv"]
    missing = [each for each in wanted if not found.get(each, 0.0) > 0.0]
    if missing:
        return (), "the checkpoint has no {1}_scale for layer {0}".format(*missing[0])
    if all(found[each] == 1.0 for each in wanted):
        return (), "the checkpoint's KV scales are all 1.0, so nothing was calibrated"
    return tuple((found[layer, "k"], found[layer, "v"]) for layer in range(num_layers)), ""


def _parts(name: str) -> str:
    """k, v or both; scales of queries are neither."""
    last = name.rpartition(".")[2]
    if last in BOTH:
        return "kv"
    owner = last if last != "output_scale" else name.rsplit(".", 2)[1]
    return owner[0] if owner[:2] in ("k_", "v_") else ""


def _read(path: Path, patterns: list[re.Pattern[str]]) -> dict[str, list[float]]:
    """The tensors of a file that match. A file that cannot be read is left to the loader, which says what is wrong."""
    try:
        with path.open("rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            header: dict[str, Any] = json.loads(file.read(size)) if size <= MAX_HEADER else {}
            found = {}
            for name, entry in header.items():
                if any(pattern.fullmatch(name) for pattern in patterns) and entry["dtype"] in FORMATS:
                    begin, end = entry["data_offsets"]
                    file.seek(8 + size + begin)
                    found[name] = _numbers(file.read(min(end - begin, 2**16)), entry["dtype"])
            return found
    except (OSError, ValueError, struct.error, KeyError, TypeError):
        return {}


def _numbers(data: bytes, dtype: str) -> list[float]:
    if dtype == "BF16":                                  # the upper half of a float32
        data = b"".join(b"\0\0" + data[place : place + 2] for place in range(0, len(data), 2))
    return [number for (number,) in struct.iter_unpack(FORMATS[dtype], data)]
