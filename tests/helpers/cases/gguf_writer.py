"""Builds small GGUF files for tests: metadata, and tensors that are quantised here or brought packed.

The file is made as a list of labelled fields, so that a test can change one field, or cut the file where a field ends.
Labels are "<key>:kind", "<tensor>:offset" and so on; `gguf_fields` shows them all. It shares no code with the reader.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

TYPE_NUMBERS = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "F64": 28, "BF16": 30, "TQ1_0": 34, "TQ2_0": 35, "MXFP4": 39,
}
KINDS = {
    "uint8": (0, "B"), "int8": (1, "b"), "uint16": (2, "H"), "int16": (3, "h"), "uint32": (4, "I"), "int32": (5, "i"),
    "float32": (6, "f"), "bool": (7, "?"), "uint64": (10, "Q"), "int64": (11, "q"), "float64": (12, "d"),
}
STRING, ARRAY = 8, 9

Field = tuple[str, bytes]


class Typed(NamedTuple):
    """A metadata value whose kind is said, not guessed: Typed("uint64", 3), Typed("float32", [0.5, 1.0])."""

    kind: str
    value: Any


@dataclass
class Packed:
    """A tensor given as the bytes of the file. `type` is a name, or a number to write a type nobody knows."""

    shape: tuple[int, ...]          # row-major, as numpy has it
    type: str | int
    data: bytes


Tensor = np.ndarray | tuple[np.ndarray, str] | Packed   # an array alone is F32


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], *, alignment: int = 32, version: int = 3
) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, alignment=alignment, version=version))
    return path


def gguf_bytes(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], *, alignment: int = 32, version: int = 3
) -> bytes:
    return b"".join(data for _, data in gguf_fields(metadata, tensors, alignment=alignment, version=version))


def gguf_fields(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], *, alignment: int = 32, version: int = 3
) -> list[Field]:
    """Metadata values are bool, int, float, str, Typed, or lists of one kind; numbers take the usual kind that fits."""
    if alignment != 32:
        metadata = {**metadata, "general.alignment": Typed("uint32", alignment)}
    packed = {name: _packed(tensor) for name, tensor in tensors.items()}
    fields: list[Field] = [
        ("magic", b"GGUF"),
        ("version", _u32(version)),
        ("tensor_count", _u64(len(packed))),
        ("entry_count", _u64(len(metadata))),
    ]
    for key, value in metadata.items():
        fields += _string(f"{key}:key", key) + _metadata_value(key, value)
    offset = 0
    for name, tensor in packed.items():
        number = tensor.type if isinstance(tensor.type, int) else TYPE_NUMBERS[tensor.type]
        fields += _string(f"{name}:name", name)
        fields += [
            (f"{name}:dimensions", _u32(len(tensor.shape))),
            (f"{name}:shape", b"".join(_u64(size) for size in reversed(tensor.shape))),
            (f"{name}:type", _u32(number)),
            (f"{name}:offset", _u64(offset)),
        ]
        offset += _rounded_up(len(tensor.data), alignment)
    position = sum(len(data) for _, data in fields)
    for name, tensor in packed.items():
        fields.append((f"{name}:padding", bytes(_rounded_up(position, alignment) - position)))
        fields.append((f"{name}:data", tensor.data))
        position = _rounded_up(position, alignment) + len(tensor.data)
    return fields


def quantise(array: np.ndarray, type_name: str) -> bytes:
    """Pack an array whose rows are whole blocks, in the plain round-to-nearest way of the type."""
    x = np.ascontiguousarray(array, np.float32)
    if type_name in ("F32", "F16", "F64"):
        return x.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[type_name]).tobytes()
    if type_name == "BF16":
        bits = x.view(np.uint32)
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2").tobytes()   # to nearest, ties to even
    if type_name not in ("Q4_0", "Q4_1", "Q8_0"):
        raise ValueError(f"{type_name} has no quantiser here: bring the tensor as Packed")
    if x.shape[-1] % 32:
        raise ValueError(f"rows of {x.shape[-1]} are not whole blocks of 32")
    blocks = x.reshape(-1, 32)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1)
    if type_name == "Q8_0":
        scale = np.abs(largest) / np.float32(127)
        scaled = blocks * _inverse(scale)
        quants = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled).astype(np.int8).view(np.uint8)
        return _joined(scale.astype("<f2"), quants)
    if type_name == "Q4_0":
        scale = largest / np.float32(-8)
        return _joined(scale.astype("<f2"), _nibbles(blocks * _inverse(scale) + np.float32(8.5)))
    low = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - low) / np.float32(15)
    quants = _nibbles((blocks - low) * _inverse(scale) + np.float32(0.5))
    return _joined(scale.astype("<f2"), low.astype("<f2"), quants)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, and 0 for a block of zeros."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _nibbles(values: np.ndarray) -> np.ndarray:
    quants = np.clip(np.floor(values), 0, 15).astype(np.uint8)
    return quants[:, :16] | (quants[:, 16:] << 4)


def _joined(*columns: np.ndarray) -> bytes:
    return np.concatenate([column.view(np.uint8).reshape(len(column), -1) for column in columns], axis=1).tobytes()


def _packed(tensor: Tensor) -> Packed:
    if isinstance(tensor, Packed):
        return tensor
    array, type_name = tensor if isinstance(tensor, tuple) else (tensor, "F32")
    return Packed(array.shape, type_name, quantise(array, type_name))


def _metadata_value(key: str, value: Any) -> list[Field]:
    given = value if isinstance(value, Typed) else None
    value = given.value if given else value
    items = list(value) if isinstance(value, list | tuple | np.ndarray) else None
    strings = isinstance(value, str) or (items is not None and all(isinstance(item, str) for item in items))
    if strings and not given:
        number = STRING
        content = _string(f"{key}:value", value) if items is None else [
            field for index, item in enumerate(items) for field in _string(f"{key}:value[{index}]", item)
        ]
    else:
        kind = given.kind if given else _usual_kind([value] if items is None else items, in_array=items is not None)
        number, code = KINDS[kind]
        values = [value] if items is None else items
        content = [(f"{key}:value", struct.pack(f"<{len(values)}{code}", *values))]
    if items is None:
        return [(f"{key}:kind", _u32(number)), *content]
    return [
        (f"{key}:kind", _u32(ARRAY)),
        (f"{key}:element_kind", _u32(number)),
        (f"{key}:length", _u64(len(items))),
        *content,
    ]


def _usual_kind(values: list[Any], in_array: bool) -> str:
    if all(isinstance(value, bool | np.bool_) for value in values):
        return "bool"
    if any(isinstance(value, float | np.floating) for value in values):
        return "float32"
    low, high = min(values), max(values)
    order = ("int32", "uint32", "int64", "uint64") if in_array else ("uint32", "int32", "uint64", "int64")
    return next(kind for kind in order if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)


def _string(label: str, text: str) -> list[Field]:
    data = text.encode()
    return [(f"{label}_length", _u64(len(data))), (label, data)]


def _u32(value: int) -> bytes:
    return struct.pack("<I", value)


def _u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def _rounded_up(value: int, alignment: int) -> int:
    return math.ceil(value / alignment) * alignment
