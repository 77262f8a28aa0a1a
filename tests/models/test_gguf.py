"""The GGUF reader: what it reads, against the format's own Python package; what it refuses, and in which words."""

from __future__ import annotations

import itertools
import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf as oracle
import numpy as np
import pytest
from gguf_writer import TYPE_NUMBERS, Field, Packed, Typed, gguf_bytes, gguf_fields, quantise, write_gguf

import ridgeline.models.gguf as gguf_module
from ridgeline.errors import ModelError
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.gguf_types import TENSOR_TYPE_BY_NAME, WEIGHTS_PER_CHUNK
from ridgeline.models.weights import GGUFSource, open_checkpoint
from ridgeline.quantize.plain_model import PlainModel

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "small": Typed("int8", -3),
    "large": 1 << 40,
    "precise": Typed("float64", 0.1),
    "yes": True,
    "flags": [True, False],
    "empty": Typed("uint32", []),
    "scores": Typed("float32", [0.5, -1.5]),
    "tokenizer.ggml.token_type": [1, 3, -1],
    "tokenizer.ggml.tokens": ["<s>", "", "Ġthé", "日本"],
}


def random_packed(type_name: str, shape: tuple[int, ...], seed: int = 0) -> Packed:
    """Random bits in every field, except that floats are finite."""
    rng = np.random.default_rng(seed)
    kind = TENSOR_TYPE_BY_NAME[type_name]
    blocks = np.empty(int(np.prod(shape)) // kind.block_size, kind.layout)
    blocks.view(np.uint8)[:] = rng.integers(0, 256, blocks.nbytes, np.uint8)
    fields = [blocks[name] for name in kind.layout.names] if kind.layout.names else [blocks]
    for field in fields:
        if field.dtype.kind == "f" or type_name == "BF16":
            values = rng.normal(size=len(field)) * 2.0 ** rng.integers(-20, 8, len(field))   # float16 subnormals too
            field[:] = values if field.dtype.kind == "f" else values.astype("<f4").view("<u4") >> 16
    if type_name == "MXFP4":
        blocks["scale"] %= 250                           # exponents whose numbers are finite
    return Packed(shape, type_name, blocks.tobytes())


# --- reading ---


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_comes_back(tmp_path: Path, version: int) -> None:
    with GGUFFile(write_gguf(tmp_path / "model.gguf", METADATA, {}, version=version)) as file:
        expected = {key: value.value if isinstance(value, Typed) else value for key, value in METADATA.items()}
        assert file.metadata == expected
        assert type(file.metadata["yes"]) is bool
        assert all(type(value) is int for value in file.metadata["tokenizer.ggml.token_type"])
        assert file.tensors == {}


@pytest.mark.parametrize("alignment", [1, 32, 4096])
def test_tensors_are_found_where_they_lie(tmp_path: Path, alignment: int) -> None:
    rng = np.random.default_rng(0)
    arrays = {f"t{rank}": rng.normal(size=(5, 3, 2, 7)[:rank]).astype("f4") for rank in (1, 2, 4)}
    with GGUFFile(write_gguf(tmp_path / "model.gguf", METADATA, arrays, alignment=alignment)) as file:
        assert list(file.tensors) == list(arrays)
        for name, array in arrays.items():
            tensor = file.tensors[name]
            assert (tensor.shape, tensor.type, tensor.nbytes) == (array.shape, "F32", array.nbytes)
            assert tensor.offset % alignment == 0
            np.testing.assert_array_equal(file.read(name), array)


@pytest.mark.parametrize("type_name", TYPE_NUMBERS)
def test_weights_equal_the_oracle(tmp_path: Path, type_name: str) -> None:
    shape = (5, 256 * 64)                      # more than one chunk, and a last chunk that is not full
    assert WEIGHTS_PER_CHUNK < 5 * 256 * 64 < 2 * WEIGHTS_PER_CHUNK
    packed = random_packed(type_name, shape)
    with GGUFFile(write_gguf(tmp_path / "model.gguf", {}, {"w": packed})) as file:
        assert file.raw("w").shape == (5, len(packed.data) // 5)
        assert file.raw("w").tobytes() == packed.data
        weights = file.read("w")
        if type_name == "F64":
            expected = np.frombuffer(packed.data, "<f8").astype(np.float32).reshape(shape)
        else:
            number = oracle.GGMLQuantizationType(TYPE_NUMBERS[type_name])
            expected = oracle.quants.dequantize(np.array(file.raw("w")), number).reshape(shape)
        assert weights.dtype == np.float32 and weights.shape == shape
        assert np.isfinite(weights).all() and len(np.unique(weights)) > 100
        np.testing.assert_array_equal(weights, expected)


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
def test_the_writers_quantisers_equal_the_oracle(type_name: str) -> None:
    array = np.random.default_rng(1).normal(size=(64, 96)).astype(np.float32)
    array[3] = 0
    expected = oracle.quants.quantize(array, oracle.GGMLQuantizationType(TYPE_NUMBERS[type_name]))
    assert quantise(array, type_name) == expected.tobytes()


def test_the_oracle_reads_the_writers_file(tmp_path: Path) -> None:
    tensors = {f"{name}.weight": random_packed(name, (2, 256)) for name in TYPE_NUMBERS}
    reader = oracle.GGUFReader(write_gguf(tmp_path / "model.gguf", METADATA, tensors))
    assert [tensor.name for tensor in reader.tensors] == list(tensors)
    assert all(tensor.data.tobytes() == tensors[tensor.name].data for tensor in reader.tensors)
    assert reader.fields["tokenizer.ggml.tokens"].contents() == METADATA["tokenizer.ggml.tokens"]


@pytest.mark.parametrize("type_name", TYPE_NUMBERS)
def test_read_into_an_array_needs_little_memory(tmp_path: Path, type_name: str) -> None:
    shape = (64, 8192)
    with GGUFFile(write_gguf(tmp_path / "model.gguf", {}, {"w": random_packed(type_name, shape)})) as file:
        out = np.full(shape, np.nan, np.float32)
        tracemalloc.start()
        assert file.read("w", out=out) is out
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        np.testing.assert_array_equal(out, file.read("w"))
    assert peak < 8 * WEIGHTS_PER_CHUNK < out.nbytes // 2      # a float32 and four bytes more per weight of a chunk


def test_read_refuses_an_array_it_cannot_fill(tmp_path: Path) -> None:
    with GGUFFile(write_gguf(tmp_path / "model.gguf", {}, {"w": np.ones((2, 32), np.float32)})) as file:
        for out in (np.empty((32, 2), "f4"), np.empty((2, 32), "f8"), np.empty((2, 64), "f4")[:, ::2]):
            with pytest.raises(ValueError, match=r"w: out must be a contiguous float32 array of shape \(2, 32\)"):
                file.read("w", out=out)


def test_a_header_is_read_once_where_the_metadata_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the file changes."""
    path = write_gguf(tmp_path / "m.gguf", METADATA, {"w": random_packed("Q4_1", (4, 64))})
    with GGUFFile(path, metadata=False) as file:
        assert file.metadata["large"] == 1 << 40         # not read before
        tensors = file.tensors
    headers: list[object] = []
    real = gguf_module._Header
    monkeypatch.setattr(gguf_module, "_Header", lambda *given: headers.append(given) or real(*given))
    with GGUFFile(path, metadata=False) as again:
        assert again.tensors == tensors and not headers
        assert again.read("w").shape == (4, 64)
    write_gguf(path, METADATA, {"other": random_packed("Q4_1", (8, 64))})
    with GGUFFile(path, metadata=False) as changed:
        assert list(changed.tensors) == ["other"] and len(headers) == 1


def test_an_infinite_scale_warns_nobody(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    packed = Packed((32,), "Q4_0", np.array([np.inf], "<f2").tobytes() + bytes([0x88] * 16))
    with GGUFFile(write_gguf(tmp_path / "model.gguf", {}, {"w": packed})) as file:
        assert np.isnan(file.read("w")).all()
    assert not recwarn.list


def test_views_outlive_the_file(tmp_path: Path) -> None:
    file = GGUFFile(write_gguf(tmp_path / "model.gguf", {}, {"w": np.arange(4, dtype=np.float32)}))
    view = file.raw("w")
    file.close()
    assert view.view("<f4").tolist() == [0, 1, 2, 3]
    assert not view.flags.writeable


def test_offsets_beyond_four_gibibytes(tmp_path: Path) -> None:
    rows = (1 << 18) + 1                                     # a hole of 4 GiB and a little, never read
    fields = gguf_fields({}, {"hole": Packed((rows, 4096), "F32", b""), "end": np.arange(8, dtype=np.float32)})
    header = b"".join(data for label, data in edited(fields, {"end:offset": u64(rows * 4096 * 4), "end:data": b""}))
    path = tmp_path / "model.gguf"
    with path.open("wb") as out:
        out.write(header)
        out.seek(len(header) + rows * 4096 * 4)
        out.write(np.arange(8, dtype="<f4").tobytes())
    with GGUFFile(path) as file:
        assert file.tensors["end"].offset > 1 << 32
        assert file.read("end").tolist() == list(range(8))


@pytest.mark.slow
def test_a_large_vocabulary_opens_fast(tmp_path: Path) -> None:
    vocabulary = [f"Ġtoken{index}" for index in range(50_000)]
    merges = [f"Ġ t{index}" for index in range(50_000)]
    metadata = {"tokens": vocabulary, "merges": merges, "scores": [0.0] * 50_000, "types": [1] * 50_000}
    path = write_gguf(tmp_path / "model.gguf", metadata, {})
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        with GGUFFile(path) as file:
            seconds.append(time.thread_time() - start)
    assert file.metadata["tokens"] == vocabulary and file.metadata["merges"] == merges
    assert min(seconds) < 0.3


# --- refusing ---


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def edited(fields: list[Field], changes: dict[str, bytes]) -> list[Field]:
    assert changes.keys() <= dict(fields).keys()
    return [(label, changes.get(label, data)) for label, data in fields]


def refusal(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ModelError) as error:
        GGUFFile(path)
    line = str(error.value)
    assert line.startswith("model.gguf: ") and line.isprintable()
    return line


BASE = {"a.weight": np.ones((2, 32), np.float32), "b.weight": (np.ones((4, 32), np.float32), "Q8_0")}
REFUSED = [
    ({"magic": b"GGML"}, "not a GGUF file"),
    ({"version": u32(1)}, "has GGUF version 1; little-endian versions 2 and 3 can be read"),
    ({"version": u32(4)}, "has GGUF version 4; little-endian versions 2 and 3 can be read"),
    ({"version": struct.pack(">I", 3)}, "is big-endian; little-endian versions 2 and 3 can be read"),
    ({"entry_count": u64((1 << 16) + 1)}, "metadata entry count is 65,537, more than the limit of 65,536"),
    ({"tensor_count": u64((1 << 17) + 1)}, "tensor count is 131,073, more than the limit of 131,072"),
    ({"large:key_length": u64(1 << 63)}, "length of key of metadata entry 4 is 9,223,372,036,854,775,808, more than"),
    ({"general.architecture:value_length": u64((64 << 20) + 1)},
     "length of metadata general.architecture is 67,108,865, more than the limit of 67,108,864"),
    ({"general.architecture:value_length": u64(1 << 20)}, "metadata general.architecture needs 1,048,576 bytes"),
    ({"general.architecture:value": b"\xff\xfe\xfd\xfc\xfb"}, "metadata general.architecture is not valid UTF-8"),
    ({"large:key": b"\xc3\x28abc"}, "key of metadata entry 4 is not valid UTF-8"),
    ({"large:key": b"small"}, "metadata small appears twice"),
    ({"small:kind": u32(13)}, "metadata small has the unknown value type 13"),
    ({"yes:value": b"\x02"}, "metadata yes is a boolean but holds 2"),
    ({"flags:value": b"\x01\x07"}, "metadata flags is a boolean but holds 7"),
    ({"flags:element_kind": u32(9)}, "metadata flags is an array of arrays"),
    ({"flags:element_kind": u32(99)}, "metadata flags has the unknown value type 99"),
    ({"scores:length": u64((1 << 22) + 1)}, "length of metadata scores is 4,194,305, more than the limit"),
    ({"scores:length": u64(1 << 22)}, "the arrays of its metadata have more than 4,194,304 elements together"),
    ({"scores:length": u64(1 << 21)}, "metadata scores needs 8,388,608 bytes at byte"),
    ({"tokenizer.ggml.tokens:value[2]": b"\xff" * 6}, "metadata tokenizer.ggml.tokens[2] is not valid UTF-8"),
    ({"tokenizer.ggml.tokens:value[3]_length": u64(1 << 30)},
     "length of metadata tokenizer.ggml.tokens[3] is 1,073,741,824, more than the limit"),
    ({"tokenizer.ggml.tokens:value[3]_length": u64(1 << 20)},
     "metadata tokenizer.ggml.tokens[3] needs 1,048,576 bytes at byte"),
    ({"a.weight:name": b"\xc3\x28weight"}, "name of tensor 0 is not valid UTF-8"),
    ({"a.weight:name": b"b.weight"}, "tensor b.weight appears twice"),
    ({"a.weight:dimensions": u32(0)}, "tensor a.weight has 0 dimensions; 1 to 4 are possible"),
    ({"a.weight:dimensions": u32(5)}, "tensor a.weight has 5 dimensions; 1 to 4 are possible"),
    ({"a.weight:shape": u64(32) + u64(0)}, "tensor a.weight has the impossible shape [0, 32]"),
    ({"a.weight:shape": u64(1 << 63) + u64(2)}, "tensor a.weight has the impossible shape [2, 9223372036854775808]"),
    ({"a.weight:shape": u64(1 << 32) + u64(1 << 32)}, "tensor a.weight has the impossible shape"),
    ({"b.weight:shape": u64(16) + u64(8)},
     "tensor b.weight has rows of 16 weights, not a multiple of Q8_0's block of 32"),
    ({"b.weight:type": u32(21)}, "tensor b.weight has type 21 (IQ3_S); supported are F32, F16, Q4_0, Q4_1,"),
    ({"b.weight:type": u32(42)}, "tensor b.weight has type 42 (Q2_0); supported are F32, F16, Q4_0, Q4_1,"),
    ({"b.weight:type": u32(777)}, "tensor b.weight has type 777 (unknown); supported are F32, F16, Q4_0, Q4_1,"),
    ({"b.weight:offset": u64(257)}, "tensor b.weight starts at 257, not a multiple of the alignment 32"),
    ({"b.weight:offset": u64(128)}, "tensors a.weight and b.weight overlap"),
    ({"b.weight:offset": u64(0)}, "overlap"),
    ({"b.weight:offset": u64((1 << 64) - 32)}, "tensor b.weight needs 18,446,744,073,709,552,"),
]


@pytest.mark.reliability("S-10")
@pytest.mark.parametrize("changes, reason", REFUSED, ids=[reason[:50] for _, reason in REFUSED])
def test_each_lie_is_named(tmp_path: Path, changes: dict[str, bytes], reason: str) -> None:
    fields = gguf_fields(METADATA, BASE)
    (tmp_path / "model.gguf").write_bytes(b"".join(data for _, data in fields))
    GGUFFile(tmp_path / "model.gguf").close()                     # without the lie it opens
    assert reason in refusal(tmp_path / "model.gguf", b"".join(data for _, data in edited(fields, changes)))


@pytest.mark.parametrize("alignment", [0, 3, 48, -32, 32.0, "32", True, [32]])
def test_alignment_is_a_power_of_two(tmp_path: Path, alignment: object) -> None:
    data = gguf_bytes({"general.alignment": alignment}, {})
    assert "metadata general.alignment is" in refusal(tmp_path / "model.gguf", data)


def test_a_truncated_file_says_how_much_is_missing(tmp_path: Path) -> None:
    data = gguf_bytes({}, BASE)
    line = refusal(tmp_path / "model.gguf", data[:-1])
    assert line.startswith(f"model.gguf: file is {len(data) - 1:,} bytes, tensor b.weight needs {len(data):,} ")


def test_names_from_the_file_are_printed_on_one_line(tmp_path: Path) -> None:
    line = refusal(tmp_path / "model.gguf", gguf_bytes({}, {"bad\nname" + "x" * 999: Packed((32,), 777, bytes(32))}))
    assert r"bad\nnamexxx" in line and len(line) < 400


def test_files_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"missing\.gguf: no such file"):
        GGUFFile(tmp_path / "missing.gguf")
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        GGUFFile(tmp_path)
    assert "the file is empty" in refusal(tmp_path / "model.gguf", b"")
    assert "version needs 4 bytes at byte 4, but the file ends at 4" in refusal(tmp_path / "model.gguf", b"GGUF")
    assert "not a GGUF file" in refusal(tmp_path / "model.gguf", u64(12) + b'{"a": "safetensors"}')
    with GGUFFile(write_gguf(tmp_path / "model.gguf", {}, BASE)) as file:
        with pytest.raises(ModelError, match=r"^model\.gguf: no tensor c\.weight among its 2 tensors$"):
            file.read("c.weight")


# --- damage of every kind ---


def cut_files(fields: list[Field]) -> list[bytes]:
    """The file cut at every border between fields, and one byte to either side."""
    data = b"".join(content for _, content in fields)
    borders = {0, *itertools.accumulate(len(content) for _, content in fields)}
    cuts = {border + shift for border in borders for shift in (-1, 0, 1)}
    return [data[:cut] for cut in sorted(cuts) if 0 <= cut < len(data)]


def lying_files(fields: list[Field]) -> list[bytes]:
    """Every count, length, kind, dimension and offset set to values that break careless arithmetic."""
    files = []
    for index, (label, content) in enumerate(fields):
        if label.endswith((":name", ":key", ":data", ":padding")) or (":value" in label and "_length" not in label):
            continue
        size = min(len(content), 8)
        bits, old = 8 * size, int.from_bytes(content[:size], "little")
        for value in {0, 1, old + 1, old - 1, old ^ (1 << (bits - 1)), 1 << (bits // 2), (1 << bits) - 1} - {old}:
            lie = (value % (1 << bits)).to_bytes(size, "little") + content[size:]
            changed = [*fields[:index], (label, lie), *fields[index + 1 :]]
            files.append(b"".join(data for _, data in changed))
    return files


def flipped_files(fields: list[Field], count: int) -> list[bytes]:
    """One bit of the header flipped."""
    data = b"".join(content for _, content in fields)
    header_bits = 8 * sum(len(content) for label, content in fields if not label.endswith((":data", ":padding")))
    flips = np.random.default_rng(7).choice(header_bits, count, replace=False)
    files = []
    for flip in flips.tolist():
        damaged = bytearray(data)
        damaged[flip // 8] ^= 1 << (flip % 8)
        files.append(bytes(damaged))
    return files


def opens(path: Path, data: bytes) -> bool:
    """Whether the file is accepted, and then every tensor in it can be read. Anything but ModelError is a failure."""
    path.write_bytes(data)
    try:
        with GGUFFile(path) as file:
            for name, tensor in file.tensors.items():
                assert file.read(name).shape == tensor.shape
                assert tensor.offset + tensor.nbytes <= len(data)
    except ModelError as error:
        assert str(error).startswith("model.gguf: ") and str(error).isprintable()
        return False
    return True


@pytest.mark.reliability("S-10")
@pytest.mark.timeout(60)
def test_damaged_files_are_refused_or_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    tensors = {f"{name}.weight": random_packed(name, (2, 256)) for name in ("F32", "Q4_1", "Q6_K")}
    fields = gguf_fields(METADATA, tensors)
    assert opens(path, b"".join(data for _, data in fields))
    cut, lying, flipped = cut_files(fields), lying_files(fields), flipped_files(fields, 150)
    assert min(len(cut), len(lying), len(flipped)) >= 100
    assert not any(opens(path, data) for data in cut)
    for files in (lying, flipped):
        accepted = sum(opens(path, data) for data in files)
        assert 0 < accepted < len(files)          # a wrong value may still be a sound file; most are not


# --- files in parts ---


def split_file(folder: Path, said: int = 3, names: tuple[str, ...] = ("a", "b", "c"), **metadata: Any) -> Path:
    """Two parts as llama-gguf-split writes them: the first has all metadata, each has its own tensors."""
    rows = np.arange(64, dtype=np.float32).reshape(2, 32)
    parts = ({names[0]: rows}, {names[1]: rows + 100, names[2]: rows + 200})
    for number, tensors in enumerate(parts):
        known = {"split.no": Typed("uint16", number), "split.count": Typed("uint16", 2)}
        known["split.tensors.count"] = Typed("int32", said)
        write_gguf(folder / f"m-0000{number + 1}-of-00002.gguf", known | (metadata if number == 0 else {}), tensors)
    return folder / "m-00001-of-00002.gguf"


def test_the_parts_of_a_split_file_are_one_model(tmp_path: Path) -> None:
    path = split_file(tmp_path, **{"general.name": "whole"})
    for metadata in (True, False):                       # the second time the headers are known
        with GGUFFile(path, metadata) as file:
            assert file.metadata.get("general.name") == ("whole" if metadata else None)
            assert [float(file.read(name)[0, 0]) for name in ("a", "b", "c")] == [0.0, 100.0, 200.0]
            file.release("c")
    source = open_checkpoint(path)
    assert list(source.tensors) == ["a", "b", "c"] and float(source.read("b", None)[1, 0]) == 132.0
    names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert isinstance(source, GGUFSource) and source.files == [tmp_path / name for name in names]
    assert [stored.file for stored in source.tensors.values()] == [names[0], names[1], names[1]]         # what errors name
    model = PlainModel.__new__(PlainModel)
    model.path, model.gguf, model.source = path, True, source
    assert [stamp[0] for stamp in model.stamps()] == names               # quantize starts anew when any of them changes


def test_a_part_that_was_changed_is_read_again(tmp_path: Path) -> None:
    path = split_file(tmp_path)
    GGUFFile(path).close()
    (tmp_path / "other").mkdir()
    other = split_file(tmp_path / "other", names=("a", "a longer name than before", "c")).with_name("m-00002-of-00002.gguf")
    (tmp_path / other.name).write_bytes(other.read_bytes())
    with GGUFFile(path, metadata=False) as file:
        assert list(file.tensors) == ["a", "a longer name than before", "c"] and float(file.read("c")[0, 0]) == 200.0


def test_parts_that_do_not_make_a_whole_are_refused(tmp_path: Path) -> None:
    path = split_file(tmp_path)
    later = tmp_path / "m-00002-of-00002.gguf"
    with pytest.raises(ModelError, match=r"this is a later part of 2; give the first one, m-00001-of-00002"):
        GGUFFile(later)
    later.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelError, match=r"this is the first of 2 parts, .*m-00002-of-00002\.gguf is not beside it: download it"):
        GGUFFile(path)
    with pytest.raises(ModelError, match=r"elsewhere\.gguf: this is one of 2 parts; at most 1000, named like NAME"):
        GGUFFile(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelError, match=r"its parts hold 3 tensors, split\.tensors\.count says 5"):
        GGUFFile(split_file(tmp_path, said=5))
    with pytest.raises(ModelError, match=r"tensor a is in several parts"):
        GGUFFile(split_file(tmp_path, names=("a", "a", "c")))
