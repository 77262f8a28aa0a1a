"""Calibration: runs text through the model layer by layer, and gathers what every linear reads.

One layer's weights are in memory at a time, beside the hidden states of all passages. A layer reads what the quantised layers
before it give, as it will when it serves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ridgeline.distributed.comm import Communicator
from ridgeline.errors import ConfigError
from ridgeline.evaluate import rounded_inputs
from ridgeline.evaluate.texts import default_text, passages, read_text
from ridgeline.layers.batch import Batch, GroupBatch
from ridgeline.layers.kv import LayerKV
from ridgeline.layers.mixture import Mixture
from ridgeline.models.decoder import Decoder
from ridgeline.models.weights import Renamer, model_pieces
from ridgeline.ops.activation import gated_activation
from ridgeline.ops.registry import set_kernels
from ridgeline.quant.format import Activation
from ridgeline.quant.scheme import Unquantised
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.recipes import FEWEST_TOKENS
from ridgeline.text.tokenizer import Tokenizer

CONTEXT = 256                        # tokens of a passage
ROWS = 8                             # passages that are computed together
PAGE = 16                            # tokens of a KV block
SAMPLE = 1024                        # tokens whose inputs are kept, for methods that search scales
ITS_EXPERTS = "layers.0.mlp.experts" # their path in a decoder of one layer
SPLIT = 2                            # the default text: this part of it calibrates, the rest judges


def halves() -> tuple[str, str]:
    """The default text in two: to calibrate with, and to judge by."""
    text = default_text()
    return text[: len(text) // SPLIT], text[len(text) // SPLIT :]


def calibration_text(path: str) -> str:
    """A text file, or JSONL with a "text" in each line; empty: a half of the default text."""
    if not path:
        return halves()[0]
    text = read_text(path)
    if not path.endswith(".jsonl"):
        return text
    try:
        return "\n\n".join(str(json.loads(line)["text"]) for line in text.splitlines() if line.strip())
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f'{path}: every line must be a JSON object with a "text"') from None


def calibration_passages(path: str, tokenizer: Tokenizer, tokens: int, seed: int) -> list[list[int]]:
    """Which passages of the text, the seed decides."""
    text = calibration_text(path)
    found = passages("calibration", text, tokenizer, context=CONTEXT, overlap=0, tokens=tokens, seed=seed)
    count = sum(len(passage.tokens) for passage in found)
    if count < FEWEST_TOKENS:
        raise ConfigError(f"too little text to calibrate with: {count} tokens, at least {FEWEST_TOKENS} are needed")
    return [passage.tokens for passage in found]


@dataclass(slots=True)
class Inputs:
    """What a linear reads, over all tokens of the text."""

    mean: Tensor                     # of |x|, for each input
    largest: Tensor                  # of |x|
    moments: Tensor | None           # Σ x xᵀ, where a method needs it
    sample: Tensor                   # some of the tokens, [tokens, inputs]

    def divided(self, scales: Tensor) -> Inputs:
        """Of x / scales. Moments are not kept: methods that move scales read the sample."""
        return Inputs(self.mean / scales, self.largest / scales, None, self.sample / scales)


class Tapped(Unquantised):
    """Plain products that note their inputs, while `noted` is a dictionary, and round those of the linears in `rounds`."""

    noted: dict[nn.Module | str, Noted] | None = None
    moments = True
    most_rows = SAMPLE               # of each call, that join the sample

    def __init__(self) -> None:
        self.rounds: dict[nn.Module, Activation] = {}

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor:
        self.note(linear, x)
        activation = self.rounds.get(linear)
        return super().apply(linear, x if activation is None else rounded_inputs.rounded(x, activation), batch)

    def note(self, linear: nn.Module | str, x: Tensor) -> None:
        """`linear`: of an expert, its path."""
        if self.noted is None:
            return
        wide = x.float()
        sizes = wide.abs()
        before = self.noted.setdefault(linear, Noted())
        if self.moments:
            if before.moments is None:
                before.moments = wide.new_zeros(x.shape[1], x.shape[1])
            before.moments.addmm_(wide.t(), wide)
        rows = torch.linspace(0, len(x) - 1, min(self.most_rows, len(x)), device=x.device).long()
        before.tokens += len(x)
        before.parts.append((sizes.sum(0), sizes.amax(0), wide[rows]))


@dataclass(slots=True)
class Noted:
    tokens: int = 0
    moments: Tensor | None = None
    parts: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)     # of each call: Σ |x|, max |x|, a sample

    def together(self) -> Inputs:
        sums, largest, samples = zip(*self.parts, strict=True)
        return Inputs(torch.stack(sums).sum(0) / self.tokens, torch.stack(largest).amax(0), self.moments, torch.cat(samples))


@dataclass(frozen=True, slots=True)
class Rows:
    """Of a tensor of the checkpoint."""

    name: str
    first: int
    end: int


class Calibration:
    """The hidden states of all passages, and a decoder of one layer that moves them on."""

    def __init__(self, model: PlainModel, sequences: list[list[int]], device: str = "cpu") -> None:
        self.model, self.layer, self.device = model, 0, device
        self.groups = [sequences[first : first + ROWS] for first in range(0, len(sequences), ROWS)]
        self.streams: list[Tensor] = []
        self._scheme = Tapped()
        self._renamer = Renamer(model.config, gguf=False)
        self._made: tuple[object, Decoder] | None = None
        self.largest_kv = [0.0, 0.0]                     # magnitudes of the keys and values of the layer that `move_on` left

    @torch.inference_mode()
    def begin(self) -> None:
        name = next(name for name in self.model.names(-1) if self._renamer.pieces_of(name) == ["embed.weight:"])
        table = self.model.read(name)
        scale = self.model.config.embedding_scale
        tokens = [torch.tensor([token for sequence in group for token in sequence]) for group in self.groups]
        self.streams = [(table[each].float() * scale).to(self.device) for each in tokens]

    def _decoder(self, layer: int) -> Decoder:
        config, experts = self.model.config, self.model.config.experts
        if experts is not None:
            experts = replace(experts, dense=(0,) if layer in experts.dense else ())
        kind = (config.windows[layer], config.ropes[layer], experts)
        if self._made is None or self._made[0] != kind:
            one = replace(config, num_layers=1, windows=kind[:1], ropes=kind[1:2], experts=experts, quantisation=None,
                          vocab_size=1, tied=True)
            self._made = kind, Decoder(one, Communicator(), torch.float32, self.device, CONTEXT, lambda path: self._scheme)
        return self._made[1]

    def _fill(self, decoder: Decoder, weights: Mapping[str, Tensor]) -> None:
        """`weights`: of the current layer, by their names in the checkpoint."""
        pieces = model_pieces(decoder)
        for name, tensor in weights.items():
            first = 0
            for target in self._renamer.pieces_of(name) or ():
                piece = pieces[re.sub(r"^layers\.\d+\.", "layers.0.", target)]
                piece.target.copy_(tensor[first : first + piece.shape[0]])
                first += piece.shape[0]

    @torch.inference_mode()
    def observe(self, weights: Mapping[str, Tensor], moments: bool = True) -> dict[str, Inputs]:
        """The inputs of each linear of the current layer, by its path in a decoder of one layer. An expert that no token has
        chosen is not there."""
        decoder = self._decoder(self.layer)
        self._fill(decoder, weights)
        self._scheme.noted, self._scheme.moments = {}, moments
        self._scheme.most_rows = -(-SAMPLE // len(self.groups))
        mixture = decoder.layers[0].mlp
        if isinstance(mixture, Mixture):
            mixture.tap = lambda x, chosen: self._note_experts(mixture, x, chosen)
        for group, stream in zip(self.groups, self.streams, strict=True):
            self._forward(decoder, group, stream.clone())
        if isinstance(mixture, Mixture):
            mixture.tap = None
        found, self._scheme.noted = self._scheme.noted, None
        paths: dict[nn.Module | str, str] = {module: path for path, module in decoder.named_modules()}
        return {paths.get(linear, str(linear)): noted.together() for linear, noted in found.items()}

    def _note_experts(self, mixture: Mixture, x: Tensor, chosen: Tensor) -> None:
        """Of each expert, the tokens that chose it."""
        gate_up = mixture.experts.numbers()["gate_up"]
        for expert, matrix in enumerate(gate_up):
            mine = x[(chosen == expert).any(1)]
            if len(mine):
                self._scheme.note(f"{ITS_EXPERTS}.{expert}.gate_up", mine)
                self._scheme.note(f"{ITS_EXPERTS}.{expert}.down", gated_activation(mine @ matrix.t(), mixture.spec.activation))

    @torch.inference_mode()
    def output(self, weights: Mapping[str, Tensor]) -> Tensor:
        """What the current layer adds to the first passages, with these weights."""
        decoder = self._decoder(self.layer)
        self._fill(decoder, weights)
        return self._forward(decoder, self.groups[0], self.streams[0].clone()) - self.streams[0]

    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Of the current layer, for what `through` computes next."""
        self._fill(self._decoder(self.layer), weights)

    @torch.inference_mode()
    def through(
        self, streams: list[Tensor], weights: Mapping[str, Tensor] | None = None, rounds: Mapping[str, Activation] | None = None
    ) -> list[Tensor]:
        """Other hidden states through the current layer; `weights`: other ones than the last that were used. `rounds`: how
        linears round what they read, by the names of their weights."""
        decoder = self._decoder(self.layer)
        if weights is not None:
            self._fill(decoder, weights)
        self._scheme.rounds = {decoder.get_submodule(self.linear_of(name)): each for name, each in (rounds or {}).items()}
        found = [self._forward(decoder, group, stream.clone()) for group, stream in zip(self.groups, streams, strict=True)]
        self._scheme.rounds = {}
        return found

    def rows(self, names: Iterable[str]) -> dict[str, Rows]:
        """Where the current layer's tensors hold each piece of a decoder of one layer."""
        pieces = model_pieces(self._decoder(self.layer))
        found: dict[str, Rows] = {}
        for name in names:
            first = 0
            for target in self._renamer.pieces_of(name) or ():
                target = re.sub(r"^layers\.\d+\.", "layers.0.", target)
                found[target] = Rows(name, first, first + pieces[target].shape[0])
                first += pieces[target].shape[0]
        return found

    def linear_of(self, name: str) -> str:
        """The path of the linear that a tensor of the checkpoint belongs to."""
        target = (self._renamer.pieces_of(name) or [""])[0]
        return re.sub(r"^layers\.\d+\.", "layers.0.", target).rpartition(".")[0]

    @torch.inference_mode()
    def move_on(self, weights: Mapping[str, Tensor]) -> None:
        """Through the current layer with these weights, to the next one."""
        decoder = self._decoder(self.layer)
        self._fill(decoder, weights)
        self.largest_kv = [0.0, 0.0]
        self.streams = [self._forward(decoder, group, stream) for group, stream in zip(self.groups, self.streams, strict=True)]
        self.layer += 1

    def _forward(self, decoder: Decoder, group: list[list[int]], stream: Tensor) -> Tensor:
        config = decoder.config
        counts = [len(sequence) for sequence in group]
        pages = [-(-count // PAGE) for count in counts]
        shape = (sum(pages) + 1, PAGE, config.num_kv_heads, config.head_dim)
        kv = LayerKV(torch.zeros(shape, device=self.device), torch.zeros(shape, device=self.device))
        with exact_kernels(self.device):
            out, residual = decoder.layers[0](stream, None, _batch(counts, pages, self.device), kv)
        self.largest_kv = [max(old, float(new.abs().amax())) for old, new in zip(self.largest_kv, (kv.k, kv.v), strict=True)]
        return out if residual is None else out + residual

    # ── a stopped run ────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, file: Path) -> None:
        part = file.with_suffix(".writing")
        save_file({f"{number:06d}": stream for number, stream in enumerate(self.streams)}, part, {"layer": str(self.layer)})
        part.replace(file)

    def load(self, file: Path) -> bool:
        """False: there is nothing to go on with."""
        if not file.is_file():
            return False
        try:
            with safe_open(file, framework="pt") as found:
                self.layer = int(found.metadata()["layer"])
                self.streams = [found.get_tensor(name).to(self.device) for name in sorted(found.keys())]
        except SafetensorError:                          # a machine that stopped may leave a file without its content
            return False
        return True


def _batch(counts: list[int], pages: list[int], device: str) -> Batch:
    """Whole passages, one in each row. Page 0 belongs to none of them."""
    starts = [1 + sum(pages[:row]) for row in range(len(pages))]
    table = torch.tensor([[start + min(page, count - 1) for page in range(max(pages))] for start, count in
                          zip(starts, pages, strict=True)], dtype=torch.int32, device=device)
    positions = torch.cat([torch.arange(count) for count in counts]).to(device)
    slots = torch.cat([start * PAGE + torch.arange(count) for start, count in zip(starts, counts, strict=True)]).to(device)
    query_start = [0, *np.cumsum(counts).tolist()]
    total = sum(counts)
    every = torch.arange(total, device=device)
    return Batch(
        tokens=torch.zeros_like(every), positions=positions,
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
        kv_len=torch.tensor(counts, dtype=torch.int32, device=device),
        query_start_host=query_start, kv_len_host=list(counts), groups=[GroupBatch(slots.long(), table)],
        logits_index=every, sample_rows=every, picks=np.arange(total), device_picks=every,
    )


@contextmanager
def exact_kernels(device: str) -> Iterator[None]:
    """On a GPU the ops' definitions, in float32: its kernels are made for 16 bits."""
    if device == "cpu":
        yield
        return
    set_kernels("reference")
    try:
        yield
    finally:
        set_kernels("auto")
