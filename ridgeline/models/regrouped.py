"""Tensors that a file groups in another way than the model's linears: as one matrix for each linear, and for each expert.

So matching, sharding and dequantising see every checkpoint alike. Patterns are of the family's own names: `known_as` takes the
beginning away that a tensor has inside another model. Three rules:
- a tensor that holds the same parameter of all experts, [experts, …], is taken apart;
- of the families that say so, matrices are transposed, or q, k and v of each head are taken apart;
- a GGUF file of a latent model has its widening of keys and values as two tensors, one of them transposed: they are joined.
And a head that is stored although the embedding is the head must be a copy of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ridgeline.errors import ModelError
from ridgeline.models.checkpoints.quantised_source import RawSource, Stored
from ridgeline.models.family import Family, FusedExperts


def known_as(name: str, prefixes: Mapping[str, str]) -> tuple[str, str]:
    """A tensor's name as the family has it, and the beginning that the checkpoint has in the place of the family's."""
    for prefix, stands_for in prefixes.items():
        if name.startswith(prefix):
            return stands_for + name.removeprefix(prefix), prefix
    return name, ""


class SplitExperts:
    def __init__(self, source: RawSource, family: Family, hidden_size: int) -> None:
        self.source, self.prefixes, self.hidden_size = source, family.prefixes, hidden_size
        self.tensors: dict[str, Stored] = {}
        self._parts: dict[str, tuple[str, int, FusedExperts]] = {}       # our name -> the tensor, the expert, and how it lies
        self._last: tuple[str, bool, Tensor] | None = None       # all experts of a tensor are read one after the other
        for name, stored in source.tensors.items():
            self._add(name, stored, family.fused_experts)

    def _add(self, name: str, stored: Stored, rules: tuple[FusedExperts, ...]) -> None:
        known, prefix = known_as(name, self.prefixes)
        for rule in rules:
            found = re.fullmatch(rule.pattern, known)
            if found is None:
                continue
            if len(stored.shape) < 2:
                raise ModelError(f"{stored.file}: tensor {name} has shape {list(stored.shape)}: no room for several experts")
            count, *shape = stored.shape
            if rule.either and not self._is_transposed(name, shape):
                rule = replace(rule, transposed=False)
            if rule.transposed:
                shape[:2] = shape[1::-1]
            each = replace(stored, shape=tuple(shape), nbytes=stored.nbytes // max(1, count))
            for expert in range(count):
                single = found.expand(rule.name).format(expert)
                if prefix:           # rules of quantised checkpoints are of the stored names
                    single = prefix + single.removeprefix(self.prefixes[prefix])
                self.tensors[single], self._parts[single] = each, (name, expert, rule)
            return
        self.tensors[name] = stored

    def _is_transposed(self, name: str, shape: list[int]) -> bool:
        """[inputs, outputs]: `down` has outputs of the hidden size, the others have such inputs."""
        return shape[-1 if name.endswith("down_proj") else 0] == self.hidden_size

    def read(self, name: str, into: Tensor | None) -> Tensor:
        """As numbers."""
        if name not in self._parts:
            return self.source.read(name, into)
        return self._part(name, as_stored=False)

    def stored(self, name: str) -> Tensor:
        """As it lies in the file."""
        return self.source.stored(name) if name not in self._parts else self._part(name, as_stored=True)

    def _part(self, name: str, as_stored: bool) -> Tensor:
        fused, expert, rule = self._parts[name]
        if self._last is None or self._last[:2] != (fused, as_stored):
            whole = self.source.stored(fused) if as_stored else self.source.read(fused, None)
            self._last = (fused, as_stored, whole)
        part = self._last[2][expert]
        if rule.transposed:
            part = part.transpose(0, 1)
        return torch.cat((part[0::2], part[1::2])) if rule.paired else part


class Reordered:
    """Tensors that are stored as [inputs, outputs] (GPT-2), and those with q, k and v of each head together (GPT-NeoX)."""

    def __init__(self, source: RawSource, family: Family, kv_heads: int, head_dim: int) -> None:
        self.source, self.kv_heads, self.head_dim, self.groups = source, kv_heads, head_dim, family.head_groups
        self._transposed, self._by_head = (
            {name for name in source.tensors if re.fullmatch(pattern, known_as(name, family.prefixes)[0])}
            for pattern in (family.transposed, family.by_head)
        )
        self.tensors = {name: replace(stored, shape=stored.shape[::-1]) if name in self._transposed else stored
                        for name, stored in source.tensors.items()}

    def read(self, name: str, into: Tensor | None) -> Tensor:
        return self._reordered(name, self.source.read(name, None))

    def stored(self, name: str) -> Tensor:
        return self._reordered(name, self.source.stored(name))

    def _reordered(self, name: str, tensor: Tensor) -> Tensor:
        if name in self._transposed:
            tensor = tensor.t()
        if name not in self._by_head:
            return tensor
        if self.groups:
            q, v, k = tensor.unflatten(0, (self.groups, 3, -1)).unbind(1)
            return torch.cat([each.flatten(0, 1) for each in (q, k, v)])
        heads = tensor.unflatten(0, (self.kv_heads, -1, self.head_dim))  # of each KV head: its queries, its key, its value
        return torch.cat((heads[:, :-2].flatten(0, 2), heads[:, -2].flatten(0, 1), heads[:, -1].flatten(0, 1)))


_KEYS = re.compile(r"(blk\.\d+)\.attn_k_b\.weight")
_ONE_ROW = re.compile(r"blk\.\d+\.ffn_gate_inp_shexp\.weight")
_FLAT = re.compile(r"blk\.\d+\.exp_probs_b\.bias")


class JoinedLatents:
    """A GGUF file's `attn_k_b` [heads, rank, nope] and `attn_v_b` [heads, value, rank] as `attn_kv_b` [heads · (nope + value),
    rank], which older files store; the gate of a shared expert, a vector there, as a matrix of one row; and the bias of a choice,
    a matrix of one row in ERNIE's files, as a vector."""

    def __init__(self, source: RawSource) -> None:
        self.source = source
        self.tensors: dict[str, Stored] = {}
        self._parts: dict[str, tuple[str, str]] = {}             # our name -> keys, values
        taken = {f"{found[1]}.attn_v_b.weight" for name in source.tensors if (found := _KEYS.fullmatch(name))}
        for name, stored in source.tensors.items():
            found = _KEYS.fullmatch(name)
            if found is not None:
                self._join(found[1], stored)
            elif _ONE_ROW.fullmatch(name) and len(stored.shape) == 1:
                self.tensors[name] = replace(stored, shape=(1, *stored.shape))
            elif _FLAT.fullmatch(name):
                self.tensors[name] = replace(stored, shape=(math.prod(stored.shape),))
            elif name not in taken:
                self.tensors[name] = stored

    def _join(self, layer: str, keys: Stored) -> None:
        names = (f"{layer}.attn_k_b.weight", f"{layer}.attn_v_b.weight")
        values = self.source.tensors.get(names[1])
        if values is None:
            raise ModelError(f"{keys.file}: there is no tensor {names[1]}, which belongs to {names[0]}")
        if len(keys.shape) != 3 or len(values.shape) != 3 or keys.shape[:2] != (values.shape[0], values.shape[2]):
            shapes = f"{list(keys.shape)} and {list(values.shape)}"
            raise ModelError(f"{keys.file}: tensors {names[0]} and {names[1]} have shapes {shapes}, which do not belong together")
        heads, rank, nope = keys.shape
        joined = f"{layer}.attn_kv_b.weight"
        self.tensors[joined] = replace(
            keys, shape=(heads * (nope + values.shape[1]), rank), nbytes=keys.nbytes + values.nbytes
        )
        self._parts[joined] = names

    def read(self, name: str, into: Tensor | None) -> Tensor:
        if name in self._parts:
            keys, values = (self.source.read(part, None) for part in self._parts[name])
            return torch.cat((keys.transpose(1, 2), values.to(keys.dtype)), dim=1).flatten(0, 1)
        return self.source.read(name, into).view(self.tensors[name].shape)

    def stored(self, name: str) -> Tensor:
        return self.source.stored(name)


# ---- a head beside a tied embedding ----------------------------------------------------------------------------------

ROWS = 64                            # of each that are compared, evenly over the vocabulary


def check_tied_head(source: RawSource, family: Family, tied: bool) -> None:
    """transformers before version 5 left such a head out, newer versions use it if it is another: then it is refused. Some rows
    are compared, not all: two heads that were trained apart differ everywhere."""
    found = _stored(source, family.names, family.prefixes)
    if not tied or not {"head", "embed"} <= found.keys():
        return
    head, embedding = (source.stored(found[target]) for target in ("head", "embed"))
    if head.shape == embedding.shape and head.dim() == 2 and not _agree(head, embedding):
        raise ModelError(
            f"{source.tensors[found['head']].file}: tensor {found['head']} is not the embedding, but tie_word_embeddings in "
            "config.json says that the embedding is the head: set it to false to use this tensor, or remove the tensor"
        )


def _stored(source: RawSource, names: Mapping[str, str], prefixes: Mapping[str, str]) -> dict[str, str]:
    """Tensors' names, by what they are here."""
    found = {}
    for name in source.tensors:
        module, _, parameter = known_as(name, prefixes)[0].rpartition(".")
        if parameter == "weight" and names.get(module) in ("head", "embed"):
            found[names[module]] = name
    return found


def _agree(head: Tensor, embedding: Tensor) -> bool:
    """Up to the dtype in which the narrower of them is stored."""
    rows = torch.linspace(0, len(head) - 1, min(ROWS, len(head))).long()
    narrow = min(head.dtype, embedding.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(head[rows].to(narrow), embedding[rows].to(narrow))
