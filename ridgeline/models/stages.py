"""What a rank, and a stage of the pipeline, has of a model, in numbers: its layers, and the bytes of its weights. No torch."""

from __future__ import annotations

import functools
from dataclasses import replace

from ridgeline.models.checkpoints.linear_formats import HEAD, LinearFormats, cpu_weight_bytes
from ridgeline.models.model_config import ModelConfig
from ridgeline.ops.kernel_table import H200, DeviceFacts
from ridgeline.sizes.kv_format import KVFormat
from ridgeline.sizes.kv_spec import KVGroupSpec, groups_here, page_bytes
from ridgeline.sizes.mesh_shape import MeshShape, stage_layers
from ridgeline.sizes.op_costs import DTYPE_BYTES


def stage_config(config: ModelConfig, layers: range) -> ModelConfig:
    """The same model with only these layers, counted from 0. Embedding and head stay: see `stage_parameters`."""
    experts = config.experts
    if experts is not None:
        experts = replace(experts, dense=tuple(number - layers.start for number in experts.dense if number in layers))
    return replace(
        config, num_layers=len(layers), windows=tuple(config.windows[number] for number in layers),
        ropes=tuple(config.ropes[number] for number in layers), experts=experts,
    )


def first_layers(config: ModelConfig) -> ModelConfig:
    """As many layers as have all of its kinds of linears: what is asked of every layer is answered by these."""
    dense = config.experts.dense if config.experts is not None else ()
    needed = next((number for number in range(config.num_layers) if number not in dense), 0) + 1
    return stage_config(config, range(min(needed, config.num_layers)))


def stage_parameters(config: ModelConfig, stage: int, stages: int) -> int:
    """Weights and biases of a stage. A head that shares the embedding is a second copy of it, on the last stage."""
    found = stage_config(config, stage_layers(config.num_layers, stage, stages)).num_parameters
    first, last = stage == 0, stage == stages - 1
    absent = (not first and not last) if config.tied else (not first) + (not last)
    return found - absent * config.vocab_size * config.hidden_size


def weight_bytes(
    config: ModelConfig, dtype: str, device: str, tp_size: int = 1, quantization: str = "none", kernels: DeviceFacts = H200
) -> int:
    """Bytes of the weights on one rank after loading, without the padding of uneven shards. `kernels`: facts of the GPU, on which
    the layout of codes depends (quant/gpu_layout.py)."""
    if device == "cpu" and dtype == "float32":
        return cpu_weight_bytes(config, tp_size, quantization)
    total = config.num_parameters * DTYPE_BYTES[dtype] // tp_size
    if device == "cuda":
        total += sum(LinearFormats(config, quantization, device, tp_size, dtype).code_bytes(dtype, kernels).values())
    return total


@functools.lru_cache(64)                 # `plan` asks again for every batch, format and goal
def fullest_weight_bytes(
    config: ModelConfig, dtype: str, device: str, shape: MeshShape, quantization: str = "none", kernels: DeviceFacts = H200
) -> int:
    """Bytes of the weights on a rank of the stage that has most. `kernels`: facts of the GPU."""
    stages = shape.pipeline
    numbers = [stage_parameters(config, stage, stages) for stage in range(stages)]
    if stages == 1 or device != "cuda":                  # a CPU packs the embedding as the layers
        whole = weight_bytes(config, dtype, device, shape.tensor, quantization, kernels)
        return whole if stages == 1 else round(whole * max(numbers) / config.num_parameters)
    beyond = LinearFormats(config, quantization, device, shape.tensor, dtype).code_bytes(dtype, kernels)
    codes = [0] * stages
    for stage in range(stages):
        places = {f"layers.{number}" for number in stage_layers(config.num_layers, stage, stages)}
        places |= {HEAD} if stage == stages - 1 else set()
        codes[stage] = sum(size for path, size in beyond.items() if ".".join(path.split(".")[:2]) in places)
    return max(count * DTYPE_BYTES[dtype] // shape.tensor + size for count, size in zip(numbers, codes, strict=True))


def fullest_page_bytes(groups: list[KVGroupSpec], num_layers: int, stages: int, format: KVFormat) -> int:
    """Bytes of one KV block on a rank of the stage that has most: every stage keeps the KV of its own layers."""
    return _fullest_page_bytes(tuple(groups), num_layers, stages, format)


@functools.lru_cache(64)
def _fullest_page_bytes(groups: tuple[KVGroupSpec, ...], num_layers: int, stages: int, format: KVFormat) -> int:
    return max(
        page_bytes(groups_here([*groups], stage_layers(num_layers, stage, stages)), format) for stage in range(stages)
    )
