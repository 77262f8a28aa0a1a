"""A worker: one rank's device, model, KV memory and runner, made from a resolved config."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ridgeline import platform
from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import Communicator
from ridgeline.errors import ConfigError
from ridgeline.models.decoder import Decoder
from ridgeline.models.weights import load_weights
from ridgeline.ops.registry import set_kernels
from ridgeline.resolve import DeviceFacts, ResolvedConfig
from ridgeline.runner.forward import EagerForward
from ridgeline.runner.kv_buffers import KVBuffers
from ridgeline.runner.rows import DeviceRows
from ridgeline.runner.runner import Runner
from ridgeline.runner.sampler import Sampler


def device_facts(config: EngineConfig) -> DeviceFacts:
    """What resolve() needs to know of the machine."""
    kind = config.model.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return DeviceFacts("cpu", platform.available_memory(), platform.cpu_fast_dtypes())
    if not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, but torch sees no GPU here; use device=cpu")
    return DeviceFacts("cuda", torch.cuda.mem_get_info()[1], ("bfloat16", "float16", "float32"))


def make_runner(
    config: ResolvedConfig, comm: Communicator, progress: Callable[[int, int], None] | None = None
) -> Runner:
    """Load the model and allocate everything a step can need."""
    options = config.options
    set_kernels(options.model.kernels)
    if config.device == "cpu":
        platform.keep_freed_memory()
    device = torch.device("cpu") if config.device == "cpu" else torch.device("cuda", comm.rank)
    dtype = getattr(torch, config.dtype)
    if config.device == "cpu" and comm.size > 1:
        torch.set_num_threads(max(1, platform.cpu_count() // comm.size))
    model = Decoder(config.model, comm, dtype, device, config.max_model_len)
    load_weights(model, config.model_path, config.model, options.model.load_format, progress, options.model.seed)
    buffers = KVBuffers(config.groups, config.num_blocks, dtype, device)
    rows = DeviceRows(
        config.groups, config.max_num_seqs, config.max_model_len, config.max_num_batched_tokens, config.depth, device
    )
    eos = set(config.model.eos_token_ids)
    sampler = Sampler(config.max_num_seqs, config.model.vocab_size, eos, device, dtype)
    return Runner(model, EagerForward(model, buffers.layers()), rows, sampler, buffers, comm)
