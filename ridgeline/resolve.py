"""Turn every "auto" into a value, once and purely, and say why. Settings that cannot work fail here, before any load.

Knows options, the model's shape and the machine's facts; allocates nothing and needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ridgeline import embedded
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.kv_spec import KVGroupSpec, blocks_for
from ridgeline.models.config import DTYPES, ModelConfig, kv_groups, load_model_config, weight_bytes

CPU_KV_SHARE = 0.25                  # of the memory left after the weights
GIB = 2**30


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    kind: str                        # cpu or cuda
    memory: int                      # bytes that may be used, the weights included
    fast_dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    options: EngineConfig
    model_path: Path
    model: ModelConfig
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    groups: list[KVGroupSpec]
    num_blocks: int
    prefix_caching: bool
    depth: int                       # steps in flight beside the one being planned
    reasons: dict[str, str] = field(default_factory=dict)        # option -> why it has its value

    @property
    def contiguous(self) -> bool:
        return self.options.cache.kv_layout == "contiguous"

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * page_bytes(self.groups, DTYPES[self.dtype])

    def pinned(self) -> EngineConfig:
        """Options with nothing left to decide: another process resolves them to the same values."""
        return EngineConfig.of(
            **self.options.flat()
            | {
                "model": str(self.model_path),
                "device": self.device,
                "dtype": self.dtype,
                "max_model_len": self.max_model_len,
                "max_num_seqs": self.max_num_seqs,
                "max_num_batched_tokens": self.max_num_batched_tokens,
                "num_gpu_blocks_override": self.num_blocks,
                "kv_cache_memory_bytes": None,
                "enable_prefix_caching": self.prefix_caching,
                "async_scheduling": self.depth > 0,
            }
        )


def page_bytes(groups: list[KVGroupSpec], element_size: int) -> int:
    """Bytes of one block in all layer slots, keys and values."""
    spec = groups[0]
    slots = max(len(group.layers) for group in groups)
    return slots * 2 * spec.block_size * spec.num_kv_heads * spec.head_dim * element_size


def model_path(config: EngineConfig) -> Path:
    return Path(config.model.model) if config.model.model else embedded.require()


def resolve(config: EngineConfig, device: DeviceFacts) -> ResolvedConfig:
    path = model_path(config)
    model = load_model_config(path)
    reasons: dict[str, str] = {}
    dtype = _dtype(config, model, device, reasons)
    max_num_seqs = config.scheduler.max_num_seqs or (128 if device.kind == "cpu" else 1024)
    groups = kv_groups(model, config.cache.block_size, config.parallel.tensor_parallel_size)
    longest = _longest(config, model)
    budget = config.scheduler.max_num_batched_tokens or (512 if device.kind == "cpu" else 8192)

    page = page_bytes(groups, DTYPES[dtype])
    num_blocks = _num_blocks(config, model, device, dtype, page, groups, longest, budget, max_num_seqs, reasons)
    max_model_len = _max_model_len(config, groups, num_blocks, page, longest, budget, reasons)
    budget = _budget(config, budget, max_model_len, reasons)

    contiguous = config.cache.kv_layout == "contiguous"
    prefix_caching = config.cache.enable_prefix_caching and not contiguous
    if contiguous and config.cache.enable_prefix_caching:
        reasons["enable_prefix_caching"] = "off: contiguous reservations share nothing"
    overlap = config.scheduler.async_scheduling
    if overlap is None:
        overlap = device.kind != "cpu"
        reasons["async_scheduling"] = "off: on the CPU host and device are the same cores" if not overlap else "on"
    return ResolvedConfig(
        options=config, model_path=path, model=model, device=device.kind, dtype=dtype, max_model_len=max_model_len,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, groups=groups, num_blocks=num_blocks,
        prefix_caching=prefix_caching, depth=int(overlap), reasons=reasons,
    )  # fmt: skip


def _dtype(config: EngineConfig, model: ModelConfig, device: DeviceFacts, reasons: dict[str, str]) -> str:
    if config.model.dtype != "auto":
        if config.model.dtype not in (*device.fast_dtypes, "float64"):
            fast = device.fast_dtypes[0]
            reasons["dtype"] = f"{config.model.dtype} as asked; slow on this {device.kind}, {fast} is fast"
        return config.model.dtype
    if device.kind == "cpu":
        reasons["dtype"] = "float32: the exact choice on a CPU"
        return "float32"
    dtype = model.dtype if model.dtype in ("bfloat16", "float16") else "bfloat16"
    reasons["dtype"] = f"{dtype}: the checkpoint is {model.dtype}"
    return dtype


def _longest(config: EngineConfig, model: ModelConfig) -> int:
    """The context that is asked for; the KV cache may allow less."""
    asked = config.model.max_model_len
    if asked is not None and asked > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {asked} is more than this model was made for; the most is {model.max_position_embeddings}"
        )
    return asked or model.max_position_embeddings


def _num_blocks(
    config: EngineConfig, model: ModelConfig, device: DeviceFacts, dtype: str, page: int, groups: list[KVGroupSpec],
    longest: int, budget: int, max_num_seqs: int, reasons: dict[str, str],
) -> int:  # fmt: skip
    cache = config.cache
    if cache.num_gpu_blocks_override is not None and cache.kv_cache_memory_bytes is not None:
        raise ConfigError("num_gpu_blocks_override and kv_cache_memory_bytes exclude each other; give one")
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        memory = cache.kv_cache_memory_bytes
    else:
        weights = weight_bytes(model, dtype, device.kind, config.parallel.tensor_parallel_size)
        share = CPU_KV_SHARE if device.kind == "cpu" else cache.gpu_memory_utilization
        left = device.memory - weights if device.kind == "cpu" else int(device.memory * share) - weights
        memory = int(left * share) if device.kind == "cpu" else left
        if left <= 0:
            raise ConfigError(
                f"the weights need {weights / GIB:.2f} GiB in {dtype}, {device.memory / GIB:.2f} GiB of {device.kind} "
                "memory are there; take a smaller model, a smaller dtype or more tensor_parallel_size"
            )
        reasons["kv_cache_memory_bytes"] = (
            f"{share:.0%} of the {left / GIB:.2f} GiB left" if device.kind == "cpu" else f"what {share:.0%} leaves"
        )
    # More than every row at its longest can never be used.
    most = blocks_for(groups, longest, budget) * max_num_seqs + 1
    return min(memory // page, most)


def _max_model_len(
    config: EngineConfig, groups: list[KVGroupSpec], num_blocks: int, page: int, longest: int, budget: int,
    reasons: dict[str, str],
) -> int:  # fmt: skip
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
            f"({(needed(longest) + 1) * page / GIB:.3f} GiB), there are {num_blocks}; {fits}"
        )
    reasons["max_model_len"] = f"{low}: what the KV cache holds; the model allows {longest}"
    return low


def _budget(config: EngineConfig, budget: int, max_model_len: int, reasons: dict[str, str]) -> int:
    if config.scheduler.enable_chunked_prefill or budget >= max_model_len:
        return budget
    if config.scheduler.max_num_batched_tokens is not None:
        raise ConfigError(
            f"without chunked prefill max_num_batched_tokens ({budget}) must be at least max_model_len, {max_model_len}"
        )
    reasons["max_num_batched_tokens"] = "max_model_len: without chunks a prompt is one step"
    return max_model_len
