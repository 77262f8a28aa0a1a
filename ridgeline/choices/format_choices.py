"""What an engine's options ask of weights and KV on a device: refused where it cannot work, and which narrower formats it could
take instead. `resolve` checks with it, and the verdict and `diagnose` recommend by it, so that they never differ."""

from __future__ import annotations

from pathlib import Path

from ridgeline.choices.kv_options import kv_format
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.models.checkpoints.quantisation_check import check_quantization, made_formats
from ridgeline.models.model_config import ModelConfig
from ridgeline.models.stages import first_layers
from ridgeline.ops.kernel_table import DeviceFacts as KernelFacts
from ridgeline.sizes.abilities import KV_FORMATS, WEIGHT_FORMATS, distinct, faster_kv
from ridgeline.sizes.kv_format import KVFormat


def check_formats(
    config: EngineConfig, model: ModelConfig, path: Path, device: str, dtype: str, kernels: KernelFacts, reasons: dict[str, str]
) -> KVFormat:
    """What the KV cache stores. ConfigError: what these options ask for does not work."""
    stored = kv_format(config, model, path, device, dtype, reasons)
    _check_context(config, stored)
    check_quantization(
        model, config.model.quantization, device, dtype, config.parallel.tensor_parallel_size, config.execution.deterministic,
        reasons, kernels,
    )
    if config.execution.deterministic and device == "cuda":
        _check_deterministic(config, dtype, model)
    return stored


def narrower_formats(
    config: EngineConfig, model: ModelConfig, path: Path, device: str, dtype: str, kernels: KernelFacts
) -> tuple[str, ...]:
    """The options, as they are typed, of narrower formats that make this engine faster on this device."""
    if config.model.kernels != "auto" or dtype == "float64":     # nothing but definitions runs, or it is to be exact
        return ()
    found = [each for each in KV_FORMATS if each.name in faster_kv(device, kernels.fp8) and config.cache.kv_cache_dtype == "auto"]
    if model.quantisation is None:                       # a checkpoint's own codes would be rounded a second time
        ranks, deterministic = config.parallel.tensor_parallel_size, config.execution.deterministic
        made = made_formats(model, device, dtype, ranks, deterministic, kernels)
        found += [each for each in WEIGHT_FORMATS if made.get(each.name) and each.name != config.model.quantization]
    taken, few = [], first_layers(model)                 # weights are made alike in all layers
    for each in found:
        options = EngineConfig.of(**config.flat() | {each.option: each.name})
        try:
            check_formats(options, few if each.option == "quantization" else model, path, device, dtype, kernels, {})
        except ConfigError:
            continue
        taken.append(each)
    return tuple(each.flag for each in distinct(taken))


def _check_context(config: EngineConfig, stored: KVFormat) -> None:
    """Can ranks divide contexts as is asked?"""
    parallel = config.parallel
    if parallel.decode_context_parallel_size not in (1, parallel.tensor_parallel_size):
        raise ConfigError(
            f"decode_context_parallel_size {parallel.decode_context_parallel_size} must be 1 or tensor_parallel_size, which is "
            f"{parallel.tensor_parallel_size}"
        )
    if parallel.decode_context_parallel_size > 1 and stored.quantised:
        raise ConfigError("decode_context_parallel_size needs a KV cache that is not quantised; set kv_cache_dtype auto")


def _check_deterministic(config: EngineConfig, dtype: str, model: ModelConfig) -> None:
    if model.latent is not None:
        raise ConfigError(
            "deterministic does not work with latent attention: a prompt's result depends on how it was cut into chunks, in its "
            "last bits; leave it off"
        )
    if dtype not in ("bfloat16", "float16"):
        raise ConfigError(f"deterministic has no kernels for {dtype}; use dtype bfloat16 or float16")
    if config.parallel.tensor_parallel_size > 1:
        raise ConfigError("deterministic needs tensor_parallel_size 1: NCCL decides in which order ranks are summed")
