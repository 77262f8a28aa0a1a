"""Every option, declared once: name, type, default, help. The CLI, the Python API and the docs are generated from it.

Options that users of vLLM know keep their names. `None` or "auto" means that `resolve.py` picks a value, once, and
can say why. Nothing here looks at a model, a device or a file.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import types
import typing
from dataclasses import dataclass, field
from typing import Any

from ridgeline.errors import ConfigError


def option(default: Any, help: str, choices: tuple[str, ...] = (), low: int | float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "low": low})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    model: str = option("", "HF directory or .gguf file; empty: the embedded SmolLM2-135M-Instruct")
    tokenizer: str = option("", "tokenizer directory or file, if it is not the model's own")
    chat_template: str = option("", "file with a chat template, instead of the model's own")
    structured_outputs_backend: str = option(
        "auto", "grammar library for structured outputs; auto: llguidance; xgrammar needs pip install 'ridgeline[xgrammar]'",
        ("auto", "guidance", "llguidance", "xgrammar"),
    )
    skip_tokenizer_init: bool = option(False, "load no tokenizer: prompts and answers are token ids")
    load_format: str = option("auto", "dummy: random weights; only config.json is read", ("auto", "dummy"))
    dtype: str = option(
        "auto", "dtype of weights and activations; auto: the checkpoint's on a GPU, float32 on a CPU",
        ("auto", "float32", "bfloat16", "float16", "float64"),
    )
    quantization: str = option(
        "none", "quantise the layers' weights while they load (answers change slightly): fp8, fp8-block, int8, int4 or mxfp4; or "
        "pattern=format pairs such as mlp=int4,attention=fp8. Quantised checkpoints need no option",
    )
    max_model_len: int | None = option(None, "longest context in tokens, prompt and answer together", low=2)
    device: str = option("auto", "device to run on; auto: a GPU if torch sees one", ("auto", "cpu", "cuda"))
    kernels: str = option("auto", "reference: run every op in plain torch, to find a faulty kernel", ("auto", "reference"))
    seed: int = option(0, "random seed for requests without a seed of their own, and for dummy weights", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    block_size: int = option(16, "tokens per KV block", low=1)
    kv_cache_memory_bytes: int | None = option(None, "memory for the KV cache, in bytes", low=1)
    num_gpu_blocks_override: int | None = option(None, "number of KV blocks, instead of kv_cache_memory_bytes", low=2)
    gpu_memory_utilization: float = option(0.9, "fraction of the GPU's memory that the engine may use", low=0.01)
    enable_prefix_caching: bool = option(True, "reuse the KV cache of prompts with a common prefix")
    kv_cache_dtype: str = option(
        "auto", "fp8: e4m3 with a scale per token and head (GPU only); auto: the model's dtype",
        ("auto", "fp8"),
    )
    kv_layout: str = option(
        "paged", "contiguous: reserve max_model_len tokens for every request (turns paging off)",
        ("paged", "contiguous"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    max_num_seqs: int | None = option(None, "largest batch: sequences that run at once", low=1)
    max_num_batched_tokens: int | None = option(None, "token budget of a step, over all sequences", low=1)
    enable_chunked_prefill: bool = option(True, "split the prefill of long prompts over several steps")
    scheduling_policy: str = option("fcfs", "order of waiting requests", ("fcfs", "priority"))
    batching: str = option(
        "continuous", "static: start a batch only when the last one has finished (turns continuous batching off)",
        ("continuous", "static"),
    )
    async_scheduling: bool | None = option(None, "plan the next step while the current one runs; default: on a GPU")
    step_time_ms: float | None = option(
        None, "target step time in ms: prompt chunks are sized so that steps shared with decoding requests stay near it "
        "(0: no limit)", low=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    enforce_eager: bool = option(False, "use no CUDA graphs: launch every kernel by itself")
    shared_prefix_attention: bool = option(True, "attention reads a prefix that running requests share only once (GPU only)")
    deterministic: bool = option(
        False, "batch-invariant kernels: an answer does not depend on the rest of the batch (GPU only); after chunked prefill, "
        "preemption or a prefix hit the last bit may still differ"
    )
    nvtx: bool = option(False, "mark every op with an NVTX range, for a profiler")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    tensor_parallel_size: int = option(1, "number of ranks (processes) that share every layer", low=1)


# Options of vLLM that programs pass with a value that changes nothing here. Each: the values that are accepted besides
# None, and what to do instead of any other.
_HUB = "nothing is downloaded from model hubs; give a local directory or a .gguf file"
_LEAVE_OUT = "leave it out"
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False,), "Ridgeline never runs code from model directories"),
    "revision": ((), _HUB),
    "tokenizer_revision": ((), _HUB),
    "code_revision": ((), _HUB),
    "download_dir": ((), _HUB),
    "hf_token": ((), _HUB),
    "tokenizer_mode": (("auto",), _LEAVE_OUT),
    "config_format": (("auto", "hf"), _LEAVE_OUT),
    "generation_config": (("auto",), "give SamplingParams to override the model's defaults"),
    "override_generation_config": (({},), "give SamplingParams to override the model's defaults"),
    "hf_overrides": (({},), "edit a copy of the model's config.json"),
    "task": (("auto", "generate"), "only text generation is supported"),
    "runner": (("auto", "generate"), "only text generation is supported"),
    "calculate_kv_scales": ((False,), _LEAVE_OUT),
    "cpu_offload_gb": ((0,), "the weights must fit into the device's memory"),
    "pipeline_parallel_size": ((1,), "use tensor_parallel_size"),
    "data_parallel_size": ((1,), "start several engines"),
    "enable_expert_parallel": ((False,), "use tensor_parallel_size"),
    "distributed_executor_backend": (("mp", "uni"), "ranks are processes on this machine"),
    "enable_lora": ((False,), "merge the adapter into the weights first"),
    "speculative_config": ((), _LEAVE_OUT),
    "limit_mm_per_prompt": (({},), "only text prompts are supported"),
    "mm_processor_kwargs": (({},), "only text prompts are supported"),
    "enable_sleep_mode": ((False,), _LEAVE_OUT),
}
# Options of vLLM about its own internals: accepted with any value, because no answer depends on them.
NO_EFFECT = {
    "swap_space", "disable_cascade_attn", "max_seq_len_to_capture", "compilation_config", "disable_log_stats",
    "disable_custom_all_reduce", "use_v2_block_manager", "ray_workers_use_nsight",
}

_DTYPE_NAMES = {"half": "float16", "float": "float32", "double": "float64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: ModelOptions = ModelOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    execution: ExecutionOptions = ExecutionOptions()
    parallel: ParallelOptions = ParallelOptions()

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """From flat option names; an unknown name or an impossible value is a ConfigError. None means the default."""
        declared = {entry[0].name: entry for entry in declared_options()}
        values = {}
        for name, value in _renamed(options).items():
            if name in NO_EFFECT:
                continue
            if name in NEUTRAL:
                _require_neutral(name, value)
            elif name not in declared:
                close = difflib.get_close_matches(name, declared, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ConfigError(f"unknown option {name!r}{hint}")
            elif value is not None:
                if name == "quantization" and isinstance(value, dict):
                    value = json.dumps(value)
                values[name] = checked(*declared[name], _dtype_name(value) if name == "dtype" else value)
        return cls(
            **{
                group: kind(**{name: values[name] for name in _fields(kind) if name in values})
                for group, kind in _groups().items()
            }
        )

    def flat(self) -> dict[str, Any]:
        """The options that differ from their defaults; `EngineConfig.of(**config.flat())` gives it back."""
        groups = [getattr(self, group) for group in _groups()]
        return {
            name: getattr(group, name)
            for group in groups
            for name, declared in _fields(type(group)).items()
            if getattr(group, name) != declared.default
        }


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    """vLLM's other names for structured_outputs_backend: an old one, and a member of a group, given as an object or as JSON."""
    found = dict(options)
    old, group = found.pop("guided_decoding_backend", None), found.pop("structured_outputs_config", None)
    if isinstance(group, str):
        try:
            group = json.loads(group)
        except ValueError:
            raise ConfigError(f"structured_outputs_config must be a JSON object, got {group[:80]!r}") from None
    if group is not None and not isinstance(group, dict):
        raise ConfigError(f"structured_outputs_config must be an object, got {group!r}")
    unknown = sorted(str(name) for name, value in (group or {}).items() if name != "backend" and value)
    if unknown:
        raise ConfigError(f"structured_outputs_config.{unknown[0]} is not supported; only backend is")
    asked = (group or {}).get("backend") or old
    return found | {"structured_outputs_backend": asked} if asked is not None else found


def _groups() -> dict[str, type]:
    return {
        "model": ModelOptions, "cache": CacheOptions, "scheduler": SchedulerOptions, "execution": ExecutionOptions,
        "parallel": ParallelOptions,
    }


def _fields(kind: type) -> dict[str, dataclasses.Field[Any]]:
    return {declared.name: declared for declared in dataclasses.fields(kind)}


def _require_neutral(name: str, value: Any) -> None:
    taken, instead = NEUTRAL[name]
    if value is not None and value not in taken:
        raise ConfigError(f"{name}={value!r} is not supported; {instead}")


def _dtype_name(value: Any) -> str:
    """torch.float16, "half" and "float16" are the same."""
    name = str(value).removeprefix("torch.")
    return _DTYPE_NAMES.get(name, name)


def declared_options(*kinds: type) -> list[tuple[dataclasses.Field[Any], type, bool]]:
    """(field, plain type, may be None) of every option of these groups, for the CLI and the docs."""
    listed = []
    for kind in kinds or tuple(_groups().values()):
        hints = typing.get_type_hints(kind)
        for declared in dataclasses.fields(kind):
            listed.append((declared, *plain_type(hints[declared.name])))
    return listed


def plain_type(hint: Any) -> tuple[type, bool]:
    """`int | None` -> (int, True)"""
    if isinstance(hint, types.UnionType):
        return next(each for each in typing.get_args(hint) if each is not types.NoneType), True
    return hint, False


def checked(declared: dataclasses.Field[Any], kind: type, optional: bool, value: Any) -> Any:
    """The value in its declared type, or a ConfigError that names the option."""
    name = declared.name
    if value is None and optional:
        return None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if kind is str and isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{name} must be of type {kind.__name__}, got {value!r}")
    choices, low = declared.metadata["choices"], declared.metadata["low"]
    if choices and value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    if low is not None and not value >= low:                     # NaN is not
        raise ConfigError(f"{name} must be at least {low}, got {value}")
    return value
