"""GGUF files of public models' shapes for benchmarks with dummy weights: header and tensor directory, and a hole for the weights.

Dummy loading reads no weight, so the file takes a few kilobytes on a disk, whatever size it says it has. The types of the tensors
are those that llama.cpp's quantiser gives files of that name.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MIXES = ("q8_0", "q4_k_m")
# Number of the type, weights and bytes of a block. models/gguf_types.py has them, too, but imports numpy, which a measured start
# must not have loaded before.
TYPES = {"F32": (0, 1, 4), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210)}
ALIGNMENT = 32
_UINT32, _FLOAT32, _STRING = 4, 6, 8
Tensors = dict[str, tuple[tuple[int, int] | tuple[int], str]]


def _wants_more_bits(layer: int, layers: int) -> bool:
    """In Q4_K_M: the first and the last eighth of the layers, and every third one between."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def tensors(config: Mapping[str, Any], mix: str) -> Tensors:
    """(shape, type) of every tensor of a Llama, by name. `head_type` in the config: the head's, where the mix has another."""
    hidden, wide, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    queries, keys = (config["head_dim"] * config[name] for name in ("num_attention_heads", "num_key_value_heads"))
    usual, better = ("Q8_0", "Q8_0") if mix == "q8_0" else ("Q4_K", "Q6_K")
    found: Tensors = {"token_embd.weight": ((config["vocab_size"], hidden), usual), "output_norm.weight": ((hidden,), "F32")}
    if not config["tie_word_embeddings"]:
        found["output.weight"] = ((config["vocab_size"], hidden), config.get("head_type", better))
    for layer in range(layers):
        high = better if _wants_more_bits(layer, layers) else usual
        shapes = {
            "attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden), "attn_output": (hidden, queries),
            "ffn_gate": (wide, hidden), "ffn_up": (wide, hidden), "ffn_down": (hidden, wide),
        }
        found |= {
            f"blk.{layer}.{name}.weight": (shape, high if name in ("attn_v", "ffn_down") else usual)
            for name, shape in shapes.items()
        }
        found |= {f"blk.{layer}.{name}.weight": ((hidden,), "F32") for name in ("attn_norm", "ffn_norm")}
    return found


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _metadata(config: Mapping[str, Any]) -> Iterator[bytes]:
    yield _string("general.architecture") + struct.pack("<I", _STRING) + _string("llama")
    numbers = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"], "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]), "rope.freq_base": float(config["rope_theta"]),
        "rope.dimension_count": config["head_dim"],
    }
    for name, value in numbers.items():
        whole = isinstance(value, int)
        yield _string(f"llama.{name}") + struct.pack("<II" if whole else "<If", _UINT32 if whole else _FLOAT32, value)


def write_gguf_shape(path: Path, config: Mapping[str, Any], mix: str) -> Path:
    metadata, directory, offset = list(_metadata(config)), [], 0
    for name, (shape, kind) in (found := tensors(config, mix)).items():
        number, weights, size = TYPES[kind]
        sizes = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        directory.append(_string(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", number, offset))
        offset += -(-math.prod(shape) // weights * size // ALIGNMENT) * ALIGNMENT
    header = b"GGUF" + struct.pack("<IQQ", 3, len(found), len(metadata)) + b"".join(metadata + directory)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(-(-len(header) // ALIGNMENT) * ALIGNMENT + offset)
    return path
