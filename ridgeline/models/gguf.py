"""Reader of GGUF files (versions 2 and 3, little-endian): metadata, tensor directory, weights as float32.

The whole header is read and checked when the file is opened: every tensor then lies inside the file, overlaps no other and has
a type that can be expanded. A file with a wrong header is refused in one line that names the file and the field. Weights are
memory-mapped and read only on demand.
This file does not know what the metadata or the tensor names mean, and does not know torch.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ridgeline.errors import ModelError
from ridgeline.models.gguf_types import OTHER_TYPE_NAMES, TENSOR_TYPE_BY_NAME, TENSOR_TYPES

MAX_METADATA_ENTRIES = 1 << 16
MAX_TENSORS = 1 << 17
MAX_STRING_BYTES = 64 << 20
MAX_ARRAY_LENGTH = 1 << 22           # of all arrays together: Python's objects are up to forty times as large as bytes in a file
MAX_DIMENSIONS = 4
MAX_PARTS = 1000
MAX_ELEMENTS = 1 << 48
DEFAULT_ALIGNMENT = 32

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# The numbers by which GGUF names the types of metadata values.
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    name: str
    shape: tuple[int, ...]      # row-major: the last dimension is the contiguous one
    type: str                   # a name of TENSOR_TYPE_BY_NAME, such as "Q4_1"
    offset: int                 # in the file
    nbytes: int
    part: int = 0               # of a split file


class GGUFFile:
    """An open GGUF file. Metadata arrays are lists; numbers are Python's."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def __init__(self, path: str | Path, metadata: bool = True):
        """Without `metadata` a file whose header was read before is not read again, and has none: a vocabulary is long."""
        self.path = Path(path)
        data, identity = _map_file(self.path)
        self._parts = [data]
        try:
            known = None if metadata else _read_before.get(identity)
            if known is not None and self._open_parts(len(known.others)) == known.others:
                self.metadata, self.tensors = {}, known.tensors
                return
            del self._parts[1:]
            header = _Header(data, self.path.name)
            self.metadata, self.tensors = header.metadata, header.tensors
            others = self._open_parts(_split_count(header) - 1)
            self._join_parts()
            _read_before[identity] = _ReadBefore(self.tensors, others)
        except BaseException:
            self.close()
            raise

    @property
    def files(self) -> list[Path]:
        """The file itself, or all parts of a split one."""
        count = len(self._parts)
        others = range(2, count + 1)
        return [self.path, *(self.path.with_name(_part_name(self.path.name, number, count)) for number in others)]

    def _open_parts(self, count: int) -> list[_Identity]:
        """Maps the parts behind the first one of a file that `llama-gguf-split` has cut."""
        found = []
        for number in range(2, count + 2):
            path = self.path.with_name(_part_name(self.path.name, number, count + 1))
            if not path.is_file():
                raise ModelError(f"{self.path.name}: this is the first of {count + 1} parts, and {path.name} is not beside it: "
                                 f"download it, too, into {self.path.absolute().parent}")
            data, identity = _map_file(path)
            self._parts.append(data)
            found.append(identity)
        return found

    def _join_parts(self) -> None:
        """The tensors of all parts. The first one's metadata is that of all, and says how many tensors there are."""
        for part, data in enumerate(self._parts[1:], 1):
            for name, tensor in _Header(data, _part_name(self.path.name, part + 1, len(self._parts))).tensors.items():
                if name in self.tensors:
                    raise ModelError(f"{self.path.name}: tensor {_shown(name)} is in several parts")
                self.tensors[name] = replace(tensor, part=part)
        expected = self.metadata.get("split.tensors.count", len(self.tensors))
        if len(self._parts) > 1 and expected != len(self.tensors):
            held = f"{len(self.tensors):,} tensors"
            raise ModelError(f"{self.path.name}: its parts hold {held}, split.tensors.count says {expected}")

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The packed bytes as a read-only view of the file, [*shape[:-1], bytes per row]."""
        tensor = self._tensor(name)
        data = self._parts[tensor.part]
        if data.size() < len(data):                      # of the file as it is now
            raise shortened(self.files[tensor.part].name, len(data), data.size())
        flat = np.frombuffer(data, np.uint8, tensor.nbytes, tensor.offset)
        return flat.reshape(*tensor.shape[:-1], -1)

    def release(self, name: str) -> None:
        """Give the memory back in which the file's pages of a tensor are mapped; they can be read again."""
        tensor, page = self._tensor(name), mmap.PAGESIZE
        start = -(-tensor.offset // page) * page
        length = (tensor.offset + tensor.nbytes) // page * page - start
        if length > 0:
            self._parts[tensor.part].madvise(mmap.MADV_DONTNEED, start, length)

    def read(self, name: str, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
        """The weights as float32, expanded chunk by chunk into `out` where one is given."""
        tensor = self._tensor(name)
        if out is None:
            out = np.empty(tensor.shape, np.float32)
        elif out.shape != tensor.shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(f"{name}: out must be a contiguous float32 array of shape {tensor.shape}")
        TENSOR_TYPE_BY_NAME[tensor.type].dequantise(self.raw(name).reshape(-1), out)
        return out

    def close(self) -> None:
        """Let go of the file. Views handed out by `raw` stay valid: the last of them unmaps it."""
        for data in self._parts:
            with suppress(BufferError):
                data.close()

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _tensor(self, name: str) -> GGUFTensor:
        if name not in self.tensors:
            raise ModelError(f"{self.path.name}: no tensor {_shown(name)} among its {len(self.tensors):,} tensors")
        return self.tensors[name]


_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_Identity = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class _ReadBefore:
    tensors: dict[str, GGUFTensor]
    others: list[_Identity]     # the parts behind the first


_read_before: dict[_Identity, _ReadBefore] = {}                          # files that this process has opened


def _split_count(header: _Header) -> int:
    """Parts of a split file of which this is the first; 1: the file is whole."""
    count, number = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
    if not isinstance(count, int) or count <= 1:
        return 1
    if count > MAX_PARTS or not _SPLIT.search(header.file_name):
        raise header.error(f"this is one of {count:,} parts; at most {MAX_PARTS}, named like NAME-00001-of-00002.gguf, are read")
    if number != 0:
        raise header.error(f"this is a later part of {count}; give the first one, {_part_name(header.file_name, 1, count)}")
    return count


def _part_name(name: str, number: int, count: int) -> str:
    return f"{_SPLIT.sub('', name)}-{number:05}-of-{count:05}.gguf"


def _map_file(path: Path) -> tuple[mmap.mmap, _Identity]:
    """Its bytes, and what another file, or this one after a change, does not share."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), identity
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except ValueError:
        raise ModelError(f"{path.name}: the file is empty, not a GGUF model") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None


def shortened(name: str, opened: int, now: int) -> ModelError:
    """Of a mapped file: to read behind its end kills a process (SIGBUS)."""
    return ModelError(f"{name} had {opened:,} bytes when it was opened, and has {now:,} now: it was changed while it was read")


def _shown(name: str) -> str:
    """A name from the file, safe to print on one line."""
    if name.isprintable() and 0 < len(name) <= 100:
        return name
    return ascii(name[:100]) + ("..." if len(name) > 100 else "")


class _Header:
    """One pass over the header. Every field is checked before use, so no allocation trusts the file."""

    def __init__(self, data: mmap.mmap, file_name: str):
        self.data = data
        self.size = len(data)
        self.file_name = file_name
        self.position = 0
        self.elements = 0                                # of arrays, so far
        self.check_magic()
        tensor_count = self.count("tensor count", MAX_TENSORS)
        entry_count = self.count("metadata entry count", MAX_METADATA_ENTRIES)
        self.metadata: dict[str, Any] = {}
        for index in range(entry_count):
            self.read_metadata_entry(index)
        self.alignment = self.checked_alignment()
        directory = [self.read_tensor_entry(index) for index in range(tensor_count)]
        self.tensors = self.placed(directory)

    def error(self, reason: str) -> ModelError:
        return ModelError(f"{self.file_name}: {reason}")

    # --- fields ---

    def take(self, size: int, field: str) -> int:
        """Step over `size` bytes, which must exist; returns where they start."""
        start = self.position
        if size > self.size - start:
            raise self.error(f"{field} needs {size:,} bytes at byte {start:,}, but the file ends at {self.size:,}")
        self.position = start + size
        return start

    def u32(self, field: str) -> int:
        return int(_U32.unpack_from(self.data, self.take(4, field))[0])

    def u64(self, field: str) -> int:
        return int(_U64.unpack_from(self.data, self.take(8, field))[0])

    def count(self, field: str, limit: int) -> int:
        value = self.u64(field)
        if value > limit:
            raise self.error(f"{field} is {value:,}, more than the limit of {limit:,}")
        return value

    def string(self, field: str) -> str:
        length = self.count(f"length of {field}", MAX_STRING_BYTES)
        start = self.take(length, field)
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError:
            raise self.error(f"{field} is not valid UTF-8") from None

    def strings(self, count: int, field: str) -> list[str]:
        """A vocabulary has 10^5: a tight loop stops at the first bad one, and `string` says what is wrong with it."""
        data, size, position = self.data, self.size, self.position
        unpack_length = _U64.unpack_from
        found: list[str] = []
        with suppress(struct.error, UnicodeDecodeError):
            while len(found) < count:
                start = position + 8
                end = start + unpack_length(data, position)[0]
                if end > size or end - start > MAX_STRING_BYTES:
                    break
                found.append(data[start:end].decode())
                position = end
        self.position = position
        found.extend(self.string(f"{field}[{index}]") for index in range(len(found), count))
        return found

    def scalars(self, kind: int, count: int, field: str) -> list[Any]:
        layout = f"<{count}{_SCALARS[kind]}"
        values = list(struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout), field)))
        if kind != _BOOL:
            return values
        if max(values, default=0) > 1:
            raise self.error(f"{field} is a boolean but holds {max(values)}")
        return [value == 1 for value in values]

    # --- sections ---

    def check_magic(self) -> None:
        if self.data[:4] != b"GGUF":
            raise self.error("not a GGUF file: it does not start with the letters GGUF")
        self.position = 4
        version = self.u32("version")
        if version not in (2, 3):
            big_endian = version in (2 << 24, 3 << 24)
            what = "is big-endian" if big_endian else f"has GGUF version {version}"
            raise self.error(f"the file {what}; little-endian versions 2 and 3 can be read")

    def read_metadata_entry(self, index: int) -> None:
        key = self.string(f"key of metadata entry {index}")
        field = f"metadata {_shown(key)}"
        if key in self.metadata:
            raise self.error(f"{field} appears twice")
        kind = self.u32(f"type of {field}")
        self.metadata[key] = self.array(field) if kind == _ARRAY else self.values(kind, 1, field)[0]

    def array(self, field: str) -> list[Any]:
        kind = self.u32(f"element type of {field}")
        if kind == _ARRAY:
            raise self.error(f"{field} is an array of arrays, which is not supported")
        length = self.count(f"length of {field}", MAX_ARRAY_LENGTH)
        self.elements += length
        if self.elements > MAX_ARRAY_LENGTH:
            raise self.error(f"the arrays of its metadata have more than {MAX_ARRAY_LENGTH:,} elements together")
        return self.values(kind, length, field)

    def values(self, kind: int, count: int, field: str) -> list[Any]:
        if kind == _STRING:
            return self.strings(count, field) if count != 1 else [self.string(field)]
        if kind not in _SCALARS:
            raise self.error(f"{field} has the unknown value type {kind}")
        return self.scalars(kind, count, field)

    def checked_alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.error(f"metadata general.alignment is {_shown(str(alignment))}, not a power of two")
        return alignment

    def read_tensor_entry(self, index: int) -> GGUFTensor:
        """A tensor whose offset still counts from the start of the data section."""
        name = self.string(f"name of tensor {index}")
        field = f"tensor {_shown(name)}"
        dimensions = self.u32(f"dimension count of {field}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.error(f"{field} has {dimensions:,} dimensions; 1 to {MAX_DIMENSIONS} are possible")
        shape = tuple(self.u64(f"dimension {axis} of {field}") for axis in range(dimensions))[::-1]
        elements = math.prod(shape)
        if not 1 <= elements <= MAX_ELEMENTS:
            raise self.error(f"{field} has the impossible shape {list(shape)}")
        kind_number = self.u32(f"type of {field}")
        kind = TENSOR_TYPES.get(kind_number)
        if kind is None:
            known_as = OTHER_TYPE_NAMES.get(kind_number, "unknown")
            supported = ", ".join(TENSOR_TYPE_BY_NAME)
            raise self.error(f"{field} has type {kind_number} ({known_as}); supported are {supported}")
        if shape[-1] % kind.block_size:
            raise self.error(
                f"{field} has rows of {shape[-1]:,} weights, not a multiple of {kind.name}'s block of {kind.block_size}"
            )
        offset = self.u64(f"offset of {field}")
        if offset % self.alignment:
            raise self.error(f"{field} starts at {offset:,}, not a multiple of the alignment {self.alignment:,}")
        return GGUFTensor(name, shape, kind.name, offset, elements // kind.block_size * kind.block_bytes)

    def placed(self, directory: list[GGUFTensor]) -> dict[str, GGUFTensor]:
        """The tensors by name with offsets in the file, all inside it and apart from each other."""
        data_start = -(-self.position // self.alignment) * self.alignment
        tensors: dict[str, GGUFTensor] = {}
        for entry in directory:
            field = f"tensor {_shown(entry.name)}"
            if entry.name in tensors:
                raise self.error(f"{field} appears twice")
            tensor = GGUFTensor(entry.name, entry.shape, entry.type, data_start + entry.offset, entry.nbytes)
            needed = tensor.offset + tensor.nbytes
            if needed > self.size:
                raise self.error(f"file is {self.size:,} bytes, {field} needs {needed:,} (an incomplete download?)")
            tensors[entry.name] = tensor
        by_offset = sorted(tensors.values(), key=lambda tensor: tensor.offset)
        for before, after in pairwise(by_offset):
            if before.offset + before.nbytes > after.offset:
                raise self.error(f"tensors {_shown(before.name)} and {_shown(after.name)} overlap")
        return tensors
