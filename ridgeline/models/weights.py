"""Weight loading: read → rename → shard → fuse → convert → assign, one tensor at a time.

Names and shapes are checked against the model before the first byte of weights is read: every checkpoint tensor is used once
(or is on the family's ignore list) and every parameter is filled once; else loading fails and names them. Files are
memory-mapped, so peak memory is one copy of the weights and one tensor.
"""

from __future__ import annotations

import math
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ridgeline.errors import ModelError, shown, shown_path
from ridgeline.model_files import read_json, read_settings
from ridgeline.models.checkpoints.quantisation import DTYPE_BYTES, MAX_TENSORS, MAX_WEIGHT_FILES, Unchanged, header_of
from ridgeline.models.checkpoints.quantised_source import FLOATS, QuantisedSource, RawSource, Stored
from ridgeline.models.checkpoints.upload import FiniteChecks, Upload
from ridgeline.models.decoder import Decoder
from ridgeline.models.gguf import GGUFFile
from ridgeline.models.model_config import ModelConfig
from ridgeline.models.regrouped import JoinedLatents, Reordered, SplitExperts, check_tied_head, known_as
from ridgeline.process.head_start import register_shapes
from ridgeline.process.log import get_logger
from ridgeline.quant.layout import STORED_KINDS
from ridgeline.quant.piece import Piece

logger = get_logger("models")

Progress = Callable[[int, int], None]        # bytes done, bytes in all

LOAD_FORMATS = ("auto", "dummy")
MOST_UNKNOWN = 10_000                # tensors that the model lacks, behind which no others are looked at
INDEX = "model.safetensors.index.json"


class Source(Protocol):
    """A checkpoint: its tensors' headers, and their content one by one."""

    tensors: dict[str, Stored]       # in file order, so that reading is sequential

    def read(self, name: str, into: Tensor | None) -> Tensor:
        """The tensor, on the CPU. A source that must expand it anyway may do so into `into` (float32, its shape)."""


def load_weights(
    model: Decoder, path: str | Path, config: ModelConfig, load_format: str = "auto", progress: Progress | None = None,
    seed: int = 0, finish: bool = True,
) -> None:
    """Fill every parameter of `model` from the checkpoint at `path`, or with seeded noise ("dummy"). Without `finish`, the caller
    calls the model's own."""
    if load_format not in LOAD_FORMATS:
        raise ModelError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")
    pieces = model_pieces(model)
    with torch.inference_mode():
        if load_format == "dummy":
            _fill_dummy(pieces, seed, progress)
        else:
            with open_checkpoint(Path(path), config.quantisation is not None) as source:
                _fill(pieces, source, config, progress, model)
        if finish:
            model.finish()


def model_pieces(model: Decoder) -> dict[str, Piece]:
    """Everything to fill, by "module.parameter:part"."""
    pieces: dict[str, Piece] = {}
    for module_name, module in model.named_modules():
        if hasattr(module, "pieces"):
            pieces |= {f"{module_name}.{name}": piece for name, piece in module.pieces().items()}
    return pieces


def open_checkpoint(path: Path, quantised: bool = False) -> SafetensorsSource | GGUFSource:
    if path.suffix == ".gguf":
        return GGUFSource(path)
    return SafetensorsSource(path, quantised)


# ---- matching a checkpoint with a model ------------------------------------------------------------------------------


class Renamer:
    """From checkpoint names to pieces, by the family's name map."""

    def __init__(self, config: ModelConfig, gguf: bool, is_elsewhere: Callable[[str], bool] = lambda path: False) -> None:
        """`is_elsewhere`: of a part of the model, does another stage have it?"""
        self.is_elsewhere = is_elsewhere
        self.names = config.family.gguf_names if gguf else config.family.names
        self.prefixes = config.family.prefixes
        self.ignored = re.compile("|".join(config.family.ignored).replace("{num_layers}", str(config.num_layers)))
        self.not_text = re.compile(config.family.not_text)
        self.tied = config.tied

    def pieces_of(self, name: str) -> list[str] | None:
        """The pieces that a checkpoint tensor holds, in its order of rows. Empty: ignored. None: unknown."""
        if self.not_text.fullmatch(name):
            return []
        name, _ = known_as(name, self.prefixes)
        if self.ignored.fullmatch(name):
            return []
        alone, numbers = _numbered(name)
        if alone in self.names:
            only = self.names[alone].format(*numbers)
            return [] if self.is_elsewhere(only) else [only + ":"]
        module, _, parameter = name.rpartition(".")
        module, numbers = _numbered(module)
        target = self.names.get(module)
        if target is None:
            return None
        if target == "head" and self.tied:
            return []                # some checkpoints keep a second copy of a tied head
        target, _, parts = target.partition(":")
        target = target.format(*numbers)
        if self.is_elsewhere(target):
            return []
        return [f"{target}.{parameter}:{part}" for part in parts.split("+")]

    def checkpoint_name(self, piece: str) -> str:
        """The name that a checkpoint usually has for a piece: for messages."""
        path, _, part = piece.partition(":")
        module, _, parameter = path.rpartition(".")
        module, numbers = _numbered(module)
        for name, target in self.names.items():
            base, _, parts = target.partition(":")
            if base == module and part in parts.split("+"):
                return f"{name.format(*numbers)}.{parameter}"
        return piece


def _numbered(module: str) -> tuple[str, list[str]]:
    """A module's name with `{}` for the numbers of its layer and its expert, and these."""
    numbers: list[str] = []

    def take(found: re.Match[str]) -> str:
        numbers.append(found[1])
        return ".{}."

    return re.sub(r"\.(\d+)\.", take, module), numbers


def _match(pieces: dict[str, Piece], source: Source, renamer: Renamer, wants: str) -> dict[str, list[str]]:
    """The pieces of every checkpoint tensor, complete and without overlap, shapes checked; or an error. `wants`: where the
    model's shapes are from: either side may be wrong."""
    matched: dict[str, list[str]] = {}
    filled: dict[str, str] = {}
    unknown = []
    for name, stored in source.tensors.items():
        targets = renamer.pieces_of(name)
        if targets is None or not all(target in pieces for target in targets):
            unknown.append(name)
            if len(unknown) < MOST_UNKNOWN:
                continue
            break
        for target in targets:
            if target in filled:
                raise ModelError(f"{stored.file}: tensors {filled[target]} and {name} are the same parameter")
            filled[target] = name
        if targets:
            expected = _joined_shape([pieces[target].shape for target in targets])
            if stored.shape != expected:
                shape = shown(list(stored.shape))
                raise ModelError(f"{stored.file}: tensor {name} has shape {shape}, {wants} asks for {list(expected)}")
            matched[name] = targets
    absent = [piece for piece in pieces if piece not in filled]
    if absent and len(unknown) < MOST_UNKNOWN:
        missing = dict.fromkeys(renamer.checkpoint_name(piece) for piece in absent)
        raise ModelError(f"{wants} asks for tensors that the checkpoint lacks: {_listed(missing)}{_headless(absent)}")
    if unknown:
        raise ModelError(f"the checkpoint has tensors that the model of {wants} does not know: {_listed(unknown)}")
    return matched


def _headless(absent: Iterable[str]) -> str:
    """What to say besides if the head is all that a checkpoint lacks: it was made for something else. `absent`: its pieces."""
    if set(absent) != {"head.weight:"}:
        return ""
    return (". Without a head of a language model it gives vectors or scores, not text, unless tie_word_embeddings says that the "
            "embedding is the head")


def _joined_shape(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - 4
    return ", ".join(map(shown_path, names[:4])) + (f" and {more} more tensors" if more > 0 else "")


# ---- filling ---------------------------------------------------------------------------------------------------------


def _fill(
    pieces: dict[str, Piece], stored: SafetensorsSource | GGUFSource, config: ModelConfig, progress: Progress | None,
    model: Decoder,
) -> None:
    gguf = isinstance(stored, GGUFSource)
    renamer = Renamer(config, gguf, model.is_elsewhere)
    if isinstance(stored, SafetensorsSource):
        stored.check_dtypes(renamer.pieces_of)
        check_tied_head(stored, config.family, config.tied)
    source = _canonical_source(_regrouped(stored, config, gguf), config, renamer, pieces, model)
    matched = _match(pieces, source, renamer, "its metadata" if gguf else "config.json")
    total = sum(source.tensors[name].nbytes for name in matched)
    done = 0

    def ended(name: str) -> None:
        nonlocal done
        done += source.tensors[name].nbytes
        if progress is not None:
            progress(done, total)

    checks = FiniteChecks(_not_finite)
    with Upload(next(iter(pieces.values())).target.device) as upload:
        for name, targets in matched.items():
            turned = [config.interleaved and _ROTATED.search(target) is not None for target in targets]
            takes = all(pieces[target].take_packed is not None for target in targets)
            if takes and isinstance(stored, GGUFSource) and stored.stays_packed(name):
                _fill_packed(name, [pieces[target] for target in targets], stored, config, turned)
                ended(name)
                continue
            only = pieces[targets[0]].target if len(targets) == 1 and not turned[0] else None
            tensor = source.read(name, only)
            first = 0
            for target, is_turned in zip(targets, turned, strict=True):
                piece = pieces[target]
                rows = tensor[first : first + piece.shape[0]]
                first += piece.shape[0]
                if is_turned:
                    rows = deinterleaved(rows, config.head_dim, config.ropes[0].dim)
                _fill_piece(piece, rows, upload, checks, (name, source.tensors[name].file))
            ended(name)
        upload.finish()
        checks.finish()


def _fill_piece(piece: Piece, rows: Tensor, upload: Upload, checks: FiniteChecks, origin: tuple[str, str]) -> None:
    """`origin`: the tensor's name and file, for errors."""
    if piece.store is not None:
        kept = upload.fetched(rows[piece.kept])
        upload.finish()                                  # of tensors before it, which are checked too
        checks.add(kept, *origin)
        checks.finish()                                  # it is not kept
        piece.store(kept)
        return
    if rows.data_ptr() != piece.target.data_ptr():
        upload.copy(piece.target, rows[piece.kept])
    checks.add(piece.target, *origin)


def _fill_packed(name: str, pieces: list[Piece], stored: GGUFSource, config: ModelConfig, turned: list[bool]) -> None:
    """The rows as the file packs them, for weights that stay packed; `turned`: rows of heads in GGUF's order."""
    packed, packing = stored.packed(name)
    first = 0
    for piece, is_turned in zip(pieces, turned, strict=True):
        assert piece.take_packed is not None
        rows = packed[first : first + piece.shape[0]]
        rows = deinterleaved(rows, config.head_dim, config.ropes[0].dim) if is_turned else rows
        if not piece.take_packed(rows, packing):
            _not_finite(name, stored.tensors[name].file, torch.float32)
        first += piece.shape[0]
    stored.release(name)


_ROTATED = re.compile(r"\.qkv\.\w+:[qk]$")


def _regrouped(stored: SafetensorsSource | GGUFSource, config: ModelConfig, gguf: bool) -> RawSource:
    """One tensor for each linear, and for each expert."""
    family = config.family
    if not gguf and (family.transposed or family.by_head):
        if config.quantisation is not None:
            raise ModelError(f"quantised checkpoints of {family.name} are not supported: give one in 16 or 32 bits, or GGUF")
        return Reordered(stored, family, config.num_kv_heads, config.head_dim)
    joined = JoinedLatents(stored) if gguf and (config.latent is not None or config.experts is not None) else stored
    return joined if config.experts is None else SplitExperts(joined, family, config.hidden_size)


def _canonical_source(
    stored: RawSource, config: ModelConfig, renamer: Renamer, pieces: dict[str, Piece], model: Decoder,
) -> Source:
    """Of a quantised checkpoint, the tensors of the formats that the model's linears keep."""
    quantisation, formats = config.quantisation, model.stored_formats()
    if quantisation is None or (quantisation.method == "gguf" and not formats):
        return stored
    weight = model.norm.weight
    if not formats:
        dtype = str(weight.dtype)[6:]
        logger.info("%s weights are expanded to %s: this device has no kernels for them", quantisation.method, dtype)
    return QuantisedSource(
        stored, quantisation, renamer.pieces_of, renamer.prefixes, pieces, formats, weight.dtype, weight.device
    )


def deinterleaved(rows: Tensor, head_dim: int, rotated: int = 0) -> Tensor:
    """Undo the order of q and k rows in GGUF files of llamas and in some families' checkpoints: dimensions that rotate together
    lie side by side there, half of the rotated ones apart here. `rotated`: of a head, the first ones; 0: all.
    """
    rotated = rotated or head_dim
    heads = rows.unflatten(0, (-1, head_dim))
    turned = heads[:, :rotated].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    whole = turned if rotated == head_dim else torch.cat((turned, heads[:, rotated:]), dim=1)
    return whole.reshape(rows.shape)


def _not_finite(name: str, file: str, dtype: torch.dtype) -> None:
    raise ModelError(f"{file}: tensor {name} holds values that are not finite in {str(dtype)[6:]}")


def _fill_dummy(pieces: dict[str, Piece], seed: int, progress: Progress | None) -> None:
    """Noise from (seed, name), made for the whole tensor, so that it does not depend on the sharding."""
    register_shapes()
    total = sum(piece.target.nbytes for piece in pieces.values())
    done = 0
    for name, piece in pieces.items():
        target = piece.target
        generator = torch.Generator(target.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        if callable(piece.dummy):
            whole = piece.dummy(generator, piece.shape)
        else:
            codes = piece.store is not None and target.dtype.itemsize == 1
            dtype = torch.bfloat16 if codes else target.dtype
            whole = torch.empty(piece.shape, dtype=dtype, device=target.device).normal_(*piece.dummy, generator=generator)
        (target.copy_ if piece.store is None else piece.store)(whole[piece.kept])
        done += target.nbytes
        if progress is not None:
            progress(done, total)


# ---- sources ---------------------------------------------------------------------------------------------------------


class SafetensorsSource:
    """A directory with one file of weights, or with several and their index. Tensors are views of mapped files."""

    def __init__(self, directory: Path, quantised: bool = False) -> None:
        self.tensors: dict[str, Stored] = {}
        self._dtypes = tuple(DTYPE_BYTES) if quantised else FLOATS
        self._files = ExitStack()
        self._open_files: dict[str, tuple[safe_open, Unchanged]] = {}
        for file in _safetensors_files(directory):
            try:
                handle = self._files.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file.name} is damaged or not a safetensors file: {shown_path(error)}") from None
            self._open_files[file.name] = handle, Unchanged(file)
            self._add(file)
        listed = read_settings(directory / INDEX).get("weight_map", {})
        absent = [f"{name} ({file})" for name, file in listed.items() if name not in self.tensors]
        if absent:
            raise ModelError(f"{INDEX} lists tensors that their files do not hold: {_listed(absent)}")

    def _add(self, path: Path) -> None:
        """The tensors of a file: from its header, in a sixth of the time that the library takes to tell of each."""
        file, (header, _) = path.name, header_of(path)
        for name, entry in sorted(header.items(), key=lambda each: each[1].data_offsets):
            if name in self.tensors:
                raise ModelError(f"tensor {name} is in both {self.tensors[name].file} and {file}")
            size = DTYPE_BYTES.get(entry.dtype, 0) * math.prod(entry.shape)
            self.tensors[name] = Stored(entry.shape, size, file, entry.dtype)

    def check_dtypes(self, pieces_of: Callable[[str], list[str] | None]) -> None:
        """Of what is read: masks and positions that are left in the file may be of any kind."""
        for name, stored in self.tensors.items():
            if stored.dtype not in self._dtypes and pieces_of(name) != []:
                raise ModelError(
                    f"{stored.file}: tensor {name} has dtype {stored.dtype}; supported: {', '.join(self._dtypes)}")

    def read(self, name: str, into: Tensor | None) -> Tensor:
        return self.stored(name)

    def stored(self, name: str) -> Tensor:
        handle, unchanged = self._open_files[self.tensors[name].file]
        unchanged.check()
        tensor = handle.get_tensor(name)
        if tuple(tensor.shape) != self.tensors[name].shape:
            raise ModelError(f"{self.tensors[name].file}: tensor {name} is in it twice, or the file was changed")
        return tensor

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open_files.clear()
        self._files.close()


def _safetensors_files(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(map(_is_name, weight_map.values())):
            raise ModelError(f"{directory / INDEX}: weight_map must map tensor names to files")
        names = set(weight_map.values())
        if len(weight_map) > MAX_TENSORS or len(names) > MAX_WEIGHT_FILES:
            count = f"{len(weight_map):,} tensors in {len(names):,} files"
            raise ModelError(f"{directory}: {INDEX} has {count}; at most {MAX_TENSORS:,} in {MAX_WEIGHT_FILES:,} are read")
        files = [directory / Path(name).name for name in sorted(names)]
    elif (directory / "model.safetensors").is_file():
        files = [directory / "model.safetensors"]
    else:
        files = _files_without_index(directory)
    for file in (each for each in files if not each.is_file()):
        other = "is no regular file" if os.path.lexists(file) else f"is not there, but {INDEX} names it"
        raise ModelError(f"{directory}: {file.name} {other}")
    return files


def _is_name(file: object) -> bool:
    """Of a file that any system can have."""
    return isinstance(file, str) and file.isprintable() and len(file.encode()) < 256


_NUMBERED = re.compile(r"(.+)-(\d{1,18})-of-(\d{1,18})\.safetensors")
_NOT_THE_MODEL = ("adapter_", "consolidated")            # a LoRA; the makers' own names for the tensors


def _files_without_index(directory: Path) -> list[Path]:
    """One file of any name, or numbered ones, all of which must be there."""
    found = sorted(path for path in directory.glob("*.safetensors") if not path.name.startswith(_NOT_THE_MODEL))
    if len(found) == 1 and _NUMBERED.fullmatch(found[0].name) is None:
        return found
    numbered = [match for path in found if (match := _NUMBERED.fullmatch(path.name))]
    if numbered and len(numbered) == len(found) and len({(match[1], match[3]) for match in numbered}) == 1:
        count = int(numbered[0][3])
        there = {int(match[2]) for match in numbered} - {0}      # some count from 0
        first = next(number for number in range(1, len(there) + 2) if number not in there)
        if first <= count:           # a file's name may say any count
            raise ModelError(f"{directory} lacks {count - len(there)} of {count} weight files: the first is number {first}")
        return found
    if found:
        raise ModelError(f"{directory} has {len(found)} weight files and no {INDEX}, which would say what belongs together: "
                         f"{', '.join(path.name for path in found[:4])}")
    other = sorted(path.name for path in (*directory.glob("*.bin"), *directory.glob("*.pth")))
    hint = f"no model.safetensors and no {INDEX}"
    hint = f"found {other[0]}, which is not supported: save the model as safetensors" if other else hint
    if any(directory.glob("consolidated*.safetensors")):
        hint = "consolidated.safetensors has its makers' own names for tensors: fetch the Hugging Face files, model*.safetensors"
    raise ModelError(f"{directory} has no weights: {hint}")


_NARROW = {"F16": torch.float16, "BF16": torch.bfloat16}


class GGUFSource:
    """A GGUF file. Packed tensors are expanded to float32 as they are read; those of 16 bits are views of the file."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path, metadata=False)
        in_order = sorted(self._file.tensors.values(), key=lambda tensor: (tensor.part, tensor.offset))
        self.files = self._file.files
        self.tensors = {each.name: Stored(each.shape, each.nbytes, self.files[each.part].name) for each in in_order}

    def read(self, name: str, into: Tensor | None) -> Tensor:
        if (
            into is not None and into.device.type == "cpu" and into.dtype == torch.float32 and into.is_contiguous()
            and into.shape == self.tensors[name].shape
        ):
            self._file.read(name, into.numpy())
            return into
        narrow = _NARROW.get(self._file.tensors[name].type)
        return torch.from_numpy(self._file.read(name)) if narrow is None else self.packed(name)[0].view(narrow)

    def stored(self, name: str) -> Tensor:
        """Packed rows as they are; other tensors as float32."""
        return self.packed(name)[0] if self.is_packed(name) else self.read(name, None)

    def is_packed(self, name: str) -> bool:
        return self._file.tensors[name].type.startswith(("Q", "TQ", "MXFP4"))

    def stays_packed(self, name: str) -> bool:
        """Whether a CPU multiplies by the tensor as it is packed."""
        return self._file.tensors[name].type in STORED_KINDS

    def packed(self, name: str) -> tuple[Tensor, str]:
        """The rows as they lie in the file, bytes [rows, row bytes], not to be written to; and how they are packed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)             # that the mapped file is not writable
            return torch.from_numpy(self._file.raw(name)), self._file.tensors[name].type

    def release(self, name: str) -> None:
        """The tensor was copied: its pages of the mapped file are not needed any more."""
        self._file.release(name)

    def __enter__(self) -> GGUFSource:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
