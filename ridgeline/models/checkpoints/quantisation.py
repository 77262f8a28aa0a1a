"""Which quantisation format a checkpoint has: from config.json to its Quantisation. What is not known is refused by name,
before a weight is read. No torch.

The headers of the weight files say what configs leave open: the dtype of scales, and whether inputs are reordered.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.errors import MOST_SHOWN, ModelError, shown
from ridgeline.model_files import read_json
from ridgeline.models.checkpoints import awq, compressed_tensors, fp8_checkpoints, gptq, modelopt, small_dialects
from ridgeline.models.checkpoints.recipe import Quantisation, Recipe, Section
from ridgeline.models.end_tokens import language_model
from ridgeline.models.gguf import shortened

READERS: dict[str, Callable[[Section], Quantisation]] = {
    "compressed-tensors": compressed_tensors.read,
    "awq": awq.read,
    "gptq": gptq.read,
    "auto-round": gptq.read_auto_round,
    "fp8": fp8_checkpoints.read,
    "fbgemm_fp8": fp8_checkpoints.read,
    "modelopt": modelopt.read,
    "mxfp4": small_dialects.read_mxfp4,
    "bitsandbytes": small_dialects.read_bitsandbytes,
    "bitnet": small_dialects.read_bitnet,
}
_OTHER_NAMES = {
    "compressed_tensors": "compressed-tensors", "auto_round": "auto-round", "intel/auto-round": "auto-round",
    "gptqmodel": "gptq", "modelopt_fp4": "modelopt", "modelopt_fp8": "modelopt", "nvfp4": "modelopt",
}
MODELOPT_FILE = "hf_quant_config.json"
_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
# Bytes by dtype. Those of fewer bytes than a float16 are codes, and need a quantization_config to be read.
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1,
    "F8_E8M0": 1,
}
MAX_HEADER = 100 << 20
MAX_TENSORS = 1 << 19                # of all weight files together; a trillion parameters in NVFP4 are 280,000
MAX_HEADER_VALUES = 8 * MAX_TENSORS  # lists and commas: a tensor of two dimensions has seven
MAX_WEIGHT_FILES = 10_000            # a process may map 65,530
NO_HEADERS: Mapping[str, str] = {}


def read_quantisation(
    raw: Mapping[str, Any], where: str, directory: Path | None = None, headers: Mapping[str, str] = NO_HEADERS
) -> Quantisation | None:
    """Of a checkpoint whose config.json is `raw`; None: its weights are plain. `headers`: of its weight files."""
    inner = (language_model(raw) or {}).get("quantization_config")
    found = raw.get("quantization_config") or inner or raw.get("compression_config")
    name = f"{where}: quantization_config"
    if found is None and directory is not None and (directory / MODELOPT_FILE).is_file():
        found = read_json(directory / MODELOPT_FILE) | {"quant_method": "modelopt"}
        name = MODELOPT_FILE
    if _is_mlx(raw, found):
        raise ModelError(f"{where}: quantization: checkpoints of MLX are not supported; serve the model's 16-bit checkpoint with "
                         "--quantization int4, or a GGUF file of it")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ModelError(f"{name} must be an object, got {type(found).__name__}")
    section = Section(found, name)
    method = _method(found, section.text("quant_method").lower())
    if method not in READERS:
        raise ModelError(f"{name}: quant_method {shown(method)} is not supported; supported: {', '.join(READERS)}")
    return refined(READERS[method](section), headers)


def _is_mlx(raw: Mapping[str, Any], found: Any) -> bool:
    """MLX has no quant_method: `quantization` with bits and group_size, and newer files the same as quantization_config."""
    own = raw.get("quantization")
    return isinstance(own, dict) and {"bits", "group_size"} <= set(own) and (found is None or found == own)


def _method(found: Mapping[str, Any], method: str) -> str:
    """By our name. `method`: as the config has it, if it does."""
    if not method and ("config_groups" in found or "sparsity_config" in found):
        return "compressed-tensors"
    if not method and ("load_in_4bit" in found or "load_in_8bit" in found):
        return "bitsandbytes"
    return _OTHER_NAMES.get(method, method)


# ── what the files say ───────────────────────────────────────────────────────────────────────────────────────────────


def safetensors_headers(directory: Path) -> dict[str, str]:
    """Tensor name -> dtype, of all weight files. Files that cannot be read are left to the loader, which says what is wrong."""
    found: dict[str, str] = {}
    files = sorted(directory.glob("*.safetensors"))
    if len(files) > MAX_WEIGHT_FILES:
        raise ModelError(f"{directory} has {len(files):,} weight files; at most {MAX_WEIGHT_FILES:,} are read")
    for path in files:
        with suppress(ValueError, RecursionError):
            header = _decode_kinds(_text_of(path))
            header.pop("__metadata__", None)
            found |= {name: entry.dtype[:MOST_SHOWN] for name, entry in header.items() if entry is not None}
        if len(found) > MAX_TENSORS:
            raise _too_many(directory, f"more than {MAX_TENSORS:,} tensors")
    return found


class _Kind(msgspec.Struct, gc=False):
    dtype: str = ""                  # a file's metadata have none


class TensorEntry(_Kind, gc=False, kw_only=True):
    """A tensor, as the header of its file tells of it."""

    shape: tuple[int, ...]
    data_offsets: tuple[int, int]    # behind the header


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(TensorEntry).decode
_decode_kinds = msgspec.json.Decoder(dict[str, _Kind | None]).decode         # in a third of the time; metadata may be null


def header_of(path: Path) -> tuple[dict[str, TensorEntry], int]:
    """What a weight file's header tells of its tensors, and its bytes. Empty: it cannot be read."""
    try:
        header = _decode_header(text := _text_of(path))
        header.pop("__metadata__", None)
        return {name: _decode_entry(entry) for name, entry in header.items()}, len(text)
    except (ValueError, RecursionError):
        return {}, 0


def _text_of(path: Path) -> bytes:
    """A weight file's header; empty: it cannot be read. What is in it is counted before it is decoded: 100 MB of it hold 1.6
    million tensors, which take minutes, or 50 million lists, which take 4 GB."""
    if not path.is_file():                               # opening a pipe would wait for its writer
        return b""
    try:
        with path.open("rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            text = file.read(size) if size <= MAX_HEADER else b""
    except (OSError, struct.error):
        return b""
    tensors, values = text.count(b"{") - 1, text.count(b"[") + text.count(b",")
    if tensors > MAX_TENSORS or values > MAX_HEADER_VALUES:
        raise _too_many(path, f"{tensors:,} tensors" if tensors > MAX_TENSORS else f"{values:,} numbers in its header")
    return text


def _too_many(where: Path, count: str) -> ModelError:
    return ModelError(f"{where}: {count}; at most {MAX_TENSORS:,} tensors are read, and {MAX_HEADER_VALUES:,} numbers about them")


class Unchanged:
    """A mapped file as it was opened."""

    def __init__(self, path: Path) -> None:
        self._path, self._opened = path, path.stat()

    def check(self) -> None:
        with suppress(OSError):                          # a file that was deleted or replaced stays mapped as it was
            now = self._path.stat()
            if os.path.samestat(now, self._opened) and now.st_size < self._opened.st_size:
                raise shortened(self._path.name, self._opened.st_size, now.st_size)


def other_dtypes(headers: Mapping[str, str], dtype: str) -> dict[str, str]:
    """Tensor name -> dtype, of numbers that are not stored in the dtype that the config names. A CPU keeps them as they are."""
    return {name: _DTYPES[kind] for name, kind in headers.items() if kind in _DTYPES and _DTYPES[kind] != dtype}


def refined(quantisation: Quantisation, headers: Mapping[str, str]) -> Quantisation:
    """With the scales' dtypes as stored (the widest, where modules differ), reordered where groups are numbered, and with the
    names of the modules that the files hold."""
    if not headers:
        return quantisation
    changed: dict[Recipe, Recipe] = {}
    for recipe in {recipe for _, recipe in quantisation.rules if recipe is not None}:
        changed[recipe] = _refined(recipe, quantisation, headers)
    rules = tuple((pattern, None if recipe is None else changed[recipe]) for pattern, recipe in quantisation.rules)
    return replace(quantisation, rules=rules, held=_held(quantisation, headers))


def _held(quantisation: Quantisation, headers: Mapping[str, str]) -> frozenset[str]:
    recipes = {recipe for _, recipe in quantisation.rules if recipe is not None}
    endings = tuple(sorted({ending for recipe in recipes for ending in recipe.endings}))
    found = {name.rpartition(".")[0] for name in headers}
    for name in headers:
        if name.endswith(endings):
            found.update(name.removesuffix(ending) for ending in endings if name.endswith(ending))
    return frozenset(found)


def _refined(recipe: Recipe, quantisation: Quantisation, headers: Mapping[str, str]) -> Recipe:
    scales = recipe.format.scales
    if recipe.unpack not in ("ct_packed", "gptq", "awq") or scales is None:
        return recipe
    endings = dict(recipe.tensors)
    dtypes, reordered = set(), False
    for name, dtype in headers.items():
        for role in ("scale", "groups"):
            ending = next((each for each in endings.get(role, ()) if name.endswith(each)), None)
            if ending is not None and quantisation.recipe(name.removesuffix(ending)) is recipe:
                if role == "scale" and dtype in _DTYPES:
                    dtypes.add(_DTYPES[dtype])
                reordered |= role == "groups"
    dtype = scales.dtype
    if dtypes:
        dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    if recipe.unpack == "ct_packed":
        reordered = reordered and bool(scales.block[1])
    else:
        reordered = recipe.format.reordered and reordered
    return replace(recipe, format=replace(recipe.format, scales=replace(scales, dtype=dtype), reordered=reordered))


# ── calibrated scales of the KV cache ────────────────────────────────────────────────────────────────────────────────
# One number for the keys and one for the values of every layer. Read without torch, since the size of a block depends on them.

_LAYER = re.compile(r"\.layers\.(\d{1,9})\.")
_NUMBERS = {"F32": "<f", "F64": "<d", "F16": "<e", "BF16": "<f"}
KVScales = tuple[tuple[float, float], ...]


def calibrated_scales(directory: Path, quantisation: Quantisation | None, num_layers: int) -> tuple[KVScales, str]:
    """The scales of K and V of every layer; or none, and why they are not used (empty: the checkpoint has none)."""
    if quantisation is None or not quantisation.kv_scales or not directory.is_dir():
        return (), ""
    found: dict[tuple[int, str], list[float]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        for name, values in _tensors_of(path, [re.compile(pattern) for pattern in quantisation.kv_scales]).items():
            layer = _LAYER.search(name)
            if layer is not None:
                found |= {(int(layer[1]), part): values for part in _kept_by(name)}
    wanted = [(layer, part) for layer in range(num_layers) for part in "kv"]
    why_not = _why_not(found, wanted) if found else ""
    if why_not or not found:
        return (), why_not
    return tuple((found[layer, "k"][0], found[layer, "v"][0]) for layer in range(num_layers)), ""


def _why_not(found: Mapping[tuple[int, str], list[float]], wanted: list[tuple[int, str]]) -> str:
    """Why scales are not taken for calibrated ones; empty: they are."""
    if any(len(values) != 1 for values in found.values()):
        return "the checkpoint's KV scales are not one number per layer"
    missing = [each for each in wanted if not 0.0 < found.get(each, [0.0])[0] < math.inf]
    if missing:
        return "the checkpoint has no {1}_scale for layer {0}".format(*missing[0])
    if all(found[each] == [1.0] for each in wanted):     # what tools write that calibrated nothing
        return "the checkpoint's KV scales are all 1.0, so nothing was calibrated"
    return ""


def _kept_by(name: str) -> str:
    """What a scale is for: k, v or both; those of queries are for neither."""
    last = name.rpartition(".")[2]
    if last == "kv_scale":
        return "kv"
    owner = last if last != "output_scale" else name.rsplit(".", 2)[1]
    return owner[0] if owner[:2] in ("k_", "v_") else ""


def _tensors_of(path: Path, patterns: list[re.Pattern[str]]) -> dict[str, list[float]]:
    """The tensors of a file that match. A file that cannot be read is left to the loader, which says what is wrong."""
    found: dict[str, list[float]] = {}
    header, size = header_of(path)
    if not header:
        return found
    try:
        with path.open("rb") as file:
            for name, entry in header.items():
                if any(pattern.fullmatch(name) for pattern in patterns) and entry.dtype in _NUMBERS:
                    begin, end = entry.data_offsets
                    file.seek(8 + size + begin)
                    found[name] = _numbers(file.read(max(0, min(end - begin, 2**16))), entry.dtype)
    except (OSError, ValueError, struct.error, OverflowError):
        return {}
    return found


def _numbers(data: bytes, dtype: str) -> list[float]:
    if dtype == "BF16":                                  # the upper half of a float32
        data = b"".join(b"\0\0" + data[place : place + 2] for place in range(0, len(data), 2))
    return [number for (number,) in struct.iter_unpack(_NUMBERS[dtype], data)]
