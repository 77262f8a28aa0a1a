"""What the KV cache stores, from the options, the model and the device (sizes/kv_format.py says what that costs)."""

from __future__ import annotations

from pathlib import Path

from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.models.checkpoints.quantisation import KVScales, calibrated_scales
from ridgeline.models.model_config import ModelConfig
from ridgeline.sizes.kv_format import NARROW, KVFormat, cache_dtype, parse, skipped_layers


def kv_format(
    config: EngineConfig, model: ModelConfig, path: Path, device: str, dtype: str, reasons: dict[str, str]
) -> KVFormat:
    asked, kernels = config.cache.kv_cache_dtype, config.model.kernels
    names = parse(asked)
    if "float32" in names and (device, dtype) != ("cpu", "float32"):
        raise ConfigError(f"kv_cache_dtype float32 is for a CPU that computes in float32, not for {device} in {dtype}; use auto")
    if model.latent is not None and names[0] != names[1]:
        raise ConfigError(f"kv_cache_dtype {asked}: latent attention stores one vector that is key and value; use one format")
    k, v = (cache_dtype(name, dtype, device, kernels) for name in names)
    wide = cache_dtype("auto", dtype, device, kernels)
    skipped = skipped_layers(config.cache.kv_cache_dtype_skip_layers, model.windows)
    narrow = sorted(set(names) & NARROW.keys())
    if not narrow:
        if skipped:
            raise ConfigError("kv_cache_dtype_skip_layers needs a quantised KV cache; set kv_cache_dtype to fp8 or int8")
        return KVFormat(k, v)
    if len(skipped) == model.num_layers:
        raise ConfigError("kv_cache_dtype_skip_layers names every layer; leave kv_cache_dtype at auto instead")
    scales, why = _calibrated(model, path, names)
    reasons["kv_cache_dtype"] = f"{asked}: {_speed(device, narrow, names)}; {why}"
    return KVFormat(k, v, wide if skipped else "", skipped, scales)


def _calibrated(model: ModelConfig, path: Path, names: tuple[str, str]) -> tuple[KVScales, str]:
    """Calibrated scales that fit, and what is said of them."""
    dynamic = "a scale for every token and head"
    scales, why_not = calibrated_scales(path, model.quantisation, model.num_layers)
    if scales and model.latent is not None:
        scales, why_not = (), "latents have no calibrated scales"
    if scales and model.quantisation is not None and set(names) != {model.quantisation.kv_format}:
        scales, why_not = (), f"the checkpoint's KV scales are for {model.quantisation.kv_format}"
    if scales:
        return scales, "calibrated scales of the checkpoint"
    return (), dynamic + (f" ({why_not})" if why_not else "")


def _speed(device: str, narrow: list[str], names: tuple[str, str]) -> str:
    """What a format costs beside its bytes: none may be slower unsaid."""
    if device == "cpu":
        return "less memory, but slower: the native kernels of attention do not read it"
    if narrow == ["fp8"] and names[0] == names[1]:
        return "half the bytes of the cache"
    return "fewer bytes of the cache; prompts are slower, since the fastest kernel reads 16 bits or fp8"
