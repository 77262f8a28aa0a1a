"""What the KV cache stores, from the options, the model and the device (sizes/kv_format.py says what that costs), and how long a
request may be with the cache that there is. No torch."""

from __future__ import annotations

from pathlib import Path

from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.models.checkpoints.quantisation import KVScales, calibrated_scales
from ridgeline.models.model_config import ModelConfig
from ridgeline.sizes.kv_format import NARROW, KVFormat, cache_dtype, parse, skipped_layers
from ridgeline.sizes.kv_spec import KVGroupSpec, blocks_for
from ridgeline.sizes.ledger import GIB


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


def max_model_len_of(
    config: EngineConfig, groups: list[KVGroupSpec], num_blocks: int, page: int, longest: int, budget: int,
    reasons: dict[str, str],
) -> int:
    """One sequence of the greatest length must fit, or it could never finish."""
    contiguous = config.cache.kv_layout == "contiguous"

    def needed(tokens: int) -> int:
        return blocks_for(groups, tokens, tokens if contiguous else budget)

    if needed(longest) <= num_blocks - 1:
        return longest
    low, high = 0, longest                               # the largest length that fits lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) <= num_blocks - 1 else (low, middle)
    if low < 2 or config.model.max_model_len is not None:
        fits = f"the largest max_model_len that fits is {low}" if low >= 2 else "no request fits"
        raise ConfigError(
            f"max_model_len {longest} needs {needed(longest) + 1} KV blocks "
            f"({(needed(longest) + 1) * page / GIB:.3f} GiB), but there are only {num_blocks}; {fits}"
        )
    reasons["max_model_len"] = f"{low}: what the KV cache holds; the model allows {longest}"
    return low


def budget_of(config: EngineConfig, budget: int, max_model_len: int, reasons: dict[str, str]) -> int:
    if config.scheduler.enable_chunked_prefill or budget >= max_model_len:
        return budget
    if config.scheduler.max_num_batched_tokens is not None:
        raise ConfigError(
            f"without chunked prefill, max_num_batched_tokens ({budget}) must be at least max_model_len, {max_model_len}"
        )
    reasons["max_num_batched_tokens"] = "max_model_len: without chunked prefill a whole prompt is one step"
    return max_model_len
