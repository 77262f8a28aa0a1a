"""Noise as a checkpoint on disk, for a model of which only the shape is there: to time a start that reads its weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ridgeline.distributed.comm import Communicator
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config
from ridgeline.models.weights import INDEX, Renamer, model_pieces
from ridgeline.quant.scheme import Unquantised

FILE_BYTES = 4 * 2**30               # of one file, about
_NOISE = 2**24                       # numbers that are repeated: noise for every weight would take minutes to make


def write_weights(directory: Path) -> int:
    """Adds safetensors files in bfloat16 and their index to a directory with a config.json; returns their bytes."""
    config = load_model_config(directory)
    model = Decoder(config, Communicator(), torch.bfloat16, torch.device("meta"), 16, lambda path: Unquantised())
    renamer = Renamer(config, gguf=False)
    noise = torch.empty(_NOISE, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
    places: dict[str, str] = {}
    waiting: dict[str, torch.Tensor] = {}
    total = count = 0
    for name, piece in model_pieces(model).items():
        size = torch.Size(piece.shape).numel()
        values = noise.repeat(-(-size // _NOISE))[:size].view(piece.shape).clone()
        waiting[renamer.checkpoint_name(name)] = values
        total += values.nbytes
        if sum(each.nbytes for each in waiting.values()) >= FILE_BYTES:
            count = _save(directory, waiting, places, count)
    _save(directory, waiting, places, count)
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}))
    return total


def _save(directory: Path, waiting: dict[str, torch.Tensor], places: dict[str, str], count: int) -> int:
    file = f"model-{count + 1:05d}.safetensors"
    if waiting:
        save_file(waiting, directory / file)
        places.update(dict.fromkeys(waiting, file))
        waiting.clear()
    return count + 1
