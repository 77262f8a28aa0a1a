"""How long a request may be with the KV cache that there is, and what that asks of a step without chunked prefill. No torch."""

from __future__ import annotations

from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.sizes.kv_spec import KVGroupSpec, blocks_for
from ridgeline.sizes.ledger import GIB


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
            f"without chunked prefill max_num_batched_tokens ({budget}) must be at least max_model_len, {max_model_len}"
        )
    reasons["max_num_batched_tokens"] = "max_model_len: without chunked prefill a whole prompt is one step"
    return max_model_len
