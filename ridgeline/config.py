"""Every option, declared once: name, type, default, help. The CLI, the Python API and the docs are generated from it.

Options that users of vLLM know keep their names. `None` or "auto" means that `resolve.py` picks a value, once, and
can say why. Nothing here looks at a model, a device or a file.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import re
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ridgeline.errors import ConfigError, shown
from ridgeline.known_options.option_table import asks_for_nothing, known_option
from ridgeline.sizes.kv_format import parse as parse_kv_dtype
from ridgeline.sizes.mesh_shape import MeshShape

LARGEST = 2**62                      # of a whole number: other processes and native code get it as 64 bits


def option(default: Any, help: str, choices: tuple[str, ...] = (), low: int | float | None = None) -> Any:
    return field(default=default, metadata={"help": help, "choices": choices, "low": low})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    model: str = option(
        "", "HF directory, .gguf file, or the name of a fetched model (Qwen/Qwen3-8B); empty: the embedded SmolLM2-135M-Instruct"
    )
    tokenizer: str = option("", "tokenizer directory or file, if it is not the model's own")
    chat_template: str = option("", "chat template instead of the model's own: a file, or the template itself")
    structured_outputs_backend: str = option(
        "auto", "grammar library for structured outputs; auto: llguidance; xgrammar needs pip install 'ridgeline[xgrammar]'",
        ("auto", "guidance", "llguidance", "xgrammar"),
    )
    grammars_at_start: bool = option(
        True, "prepare the vocabulary for grammars while the server starts; off: the first grammar does it, and running requests "
        "wait meanwhile (for seconds with a large vocabulary)"
    )
    generation_config: str = option(
        "auto", "sampling defaults for requests that set none; auto: the model's own (a GGUF file without any gets llama.cpp's); "
        "vllm: neutral (temperature 1.0); or a directory with generation_config.json",
    )
    override_generation_config: str = option(
        "", 'sampling defaults as JSON, over those of generation_config, such as {"temperature": 0.5}'
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
    cpu_activations: str = option(
        "int8", "activations that are multiplied by packed weights on a CPU. int8: rounded, with a scale for every 16; float32: "
        "exact", ("int8", "float32")
    )
    seed: int = option(0, "random seed for requests without a seed of their own, and for dummy weights", low=0)

    @property
    def prepares_grammars(self) -> bool:
        """An engine with a process of its own prepares the vocabulary before it is ready."""
        return self.grammars_at_start and not self.skip_tokenizer_init


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    block_size: int = option(16, "tokens per KV block", low=1)
    kv_cache_memory_bytes: int | None = option(None, "memory for the KV cache, in bytes", low=1)
    num_gpu_blocks_override: int | None = option(None, "number of KV blocks, instead of kv_cache_memory_bytes", low=2)
    gpu_memory_utilization: float = option(0.9, "fraction of the GPU's memory that the engine may use", low=0.01)
    enable_prefix_caching: bool = option(True, "reuse the KV cache of prompts with a common prefix")
    kv_cache_dtype: str = option(
        "auto", "format of the KV cache. fp8 (e4m3) or int8: half the memory, with a scale per token and head, or with the "
        "checkpoint's calibrated ones; k=int8,v=fp8: keys and values apart; auto: the model's dtype, on a CPU float16 instead of "
        "float32; float32 (CPU only)",
    )
    kv_cache_dtype_skip_layers: str = option(
        "", "layers whose KV cache is not quantised: numbers, ranges, or sliding_window, such as 0,1,30-31"
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
    scheduling_policy: str = option(
        "fcfs", "order of requests. fcfs: by arrival; priority: by their priority, then by arrival. With chunked prefill, "
        "much shorter prompts may overtake a long one", ("fcfs", "priority")
    )
    batching: str = option(
        "continuous", "static: start a batch only when the last one has finished (turns continuous batching off)",
        ("continuous", "static"),
    )
    async_scheduling: bool | None = option(None, "plan the next step while the current one runs; auto: on a GPU")
    step_time_ms: float | None = option(
        None, "target step time in ms: prompts are cut into chunks that keep steps near it, so that running requests get their "
        "next token in time; 0: no limit; default of a server: 80 on a GPU, 500 on a CPU", low=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    enforce_eager: bool = option(False, "use no CUDA graphs: launch every kernel by itself")
    max_cudagraph_capture_size: int | None = option(
        None, "largest number of prompt tokens in a step that is captured as a CUDA graph (decode steps always are); auto: "
        "estimated for this GPU, at least 1280", low=0
    )
    shared_prefix_attention: bool = option(True, "attention reads a prefix that running requests share only once (GPU only)")
    deterministic: bool = option(
        False, "batch-invariant kernels: an answer does not depend on the rest of the batch (GPU only); after chunked prefill, "
        "preemption or a prefix hit the last bit may still differ"
    )
    speculative_config: str = option(
        "", 'speculative decoding; answers stay the same. A method (auto, ngram, prediction, grammar or suffix), the path of a '
        'draft model, or JSON such as {"method": "ngram", "num_speculative_tokens": 8} or {"method": "draft_model", "model": '
        '"PATH"}; empty: off',
    )
    nvtx: bool = option(False, "mark every op with an NVTX range, for a profiler")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelOptions:
    tensor_parallel_size: int = option(1, "number of ranks (processes) that share every layer", low=1)
    data_parallel_size: int = option(
        1, "engines behind one front end, each with a whole copy of the model; at most 8 for each group of GPUs, on a CPU 8 or "
        "the number of cores, whichever is larger; `ridgeline serve` only", low=1
    )
    pipeline_parallel_size: int = option(
        1, "number of stages, each with some of the layers; the number of ranks is this times tensor_parallel_size", low=1
    )
    enable_expert_parallel: bool = option(
        False, "divide the experts of a mixture among the ranks of tensor_parallel_size; off: every rank has a part of each"
    )
    decode_context_parallel_size: int = option(
        1, "divide the KV cache among ranks by positions instead of heads: 1 (off) or the value of tensor_parallel_size", low=1
    )
    distributed_executor_backend: str = option(
        "mp", "where ranks run. mp: on this machine; ray: on the machines of a Ray cluster (pip install 'ridgeline[ray]')",
        ("mp", "ray"),
    )
    disable_custom_all_reduce: bool = option(
        False, "use NCCL for small messages between the GPUs of a machine, not the one-shot all-reduce kernel"
    )

    @property
    def mesh(self) -> MeshShape:
        return MeshShape(self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def num_ranks(self) -> int:
        return self.mesh.size


# Other spellings of an option's values: vLLM's, SGLang's, and what people type.
SPELLINGS: dict[str, dict[str, str]] = {
    "dtype": {
        "half": "float16", "float": "float32", "double": "float64", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32",
    },
    "load_format": dict.fromkeys(("safetensors", "gguf", "bitsandbytes", "hf"), "auto"),      # the model's files say which
    # parsers for models that write <think>…</think>; gpt-oss needs none
    "reasoning_parser": dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "glm45", "glm47", "holo2", "kimi_k2", "mimo", "minimax_m2", "nemotron_v3", "olmo3",
         "qwen3", "step3", "step3p5", "deepseek-r1", "deepseek-v3", "qwen3-thinking", "minimax", "interns1", "nemotron_3"),
        "think",
    ) | {"openai_gptoss": "auto", "gpt-oss": "auto"},
    "tool_call_parser": {
        "llama4_json": "llama3_json", "openai": "harmony", "deepseek_v31": "deepseek_v3", "llama3": "llama3_json",
        "qwen": "hermes", "qwen25": "hermes", "gpt-oss": "harmony", "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v3",
        "minimax-m2": "minimax_m2", "glm": "glm45",
    },
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8", "int8_per_token_head": "int8"},
    "distributed_executor_backend": {"uni": "mp"},
}


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
        for given, value in _renamed(options).items():
            name = _answered(given, value, declared)
            if name.startswith("no_"):                           # a switch of another engine that turns one of ours off
                name, value = name.removeprefix("no_"), False if value else None
            if name == "quantization" and isinstance(value, dict):
                value = json.dumps(value)
            if name == "kv_cache_dtype_skip_layers" and isinstance(value, (list, tuple)):
                value = ",".join(map(str, value))
            if name and value is not None:
                values[name] = checked(*declared[name], value)
        parse_kv_dtype(values.get("kv_cache_dtype", "auto"))
        return cls(
            **{
                group: kind(**{name: values[name] for name in _fields(kind) if name in values})
                for group, kind in _groups().items()
            }
        )

    def for_one_engine(self) -> EngineConfig:
        """Itself; ConfigError where several engines are asked for and only one is started."""
        if self.parallel.data_parallel_size > 1:
            raise ConfigError("data_parallel_size is for `ridgeline serve`; only one engine is started here")
        return self

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
    """vLLM's other names for structured_outputs_backend: an old one, and a member of a group, given as an object or as JSON.
    SGLang's chunked_prefill_size of -1 is a switch."""
    found = dict(options)
    if found.get("chunked_prefill_size") == -1:
        found |= {"chunked_prefill_size": None, "enable_chunked_prefill": False}
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


def _answered(name: str, value: Any, declared: Mapping[str, Any]) -> str:
    """Our name of an option; "" for one of another engine that changes nothing here; ConfigError for any other."""
    if name in declared:
        return name
    known = known_option(name)
    if known is None:
        close = difflib.get_close_matches(name, declared, 1)
        raise ConfigError(f"unknown option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    if known.kind == "same":
        if known.says.removeprefix("no_") not in declared:
            raise ConfigError(f"{name}={value!r} is no engine option; it is {known.says} of `ridgeline serve` or `chat`")
        return known.says
    if known.kind == "refused" and not asks_for_nothing(known, value):
        says = re.sub(r"--([a-z-]+)(?![^`]*`)", lambda flag: flag[1].replace("-", "_"), known.says)   # Python's spelling
        raise ConfigError(f"{name}={value!r} is not supported: {says}")
    return ""


def declared_options(*kinds: type) -> tuple[tuple[dataclasses.Field[Any], type, bool], ...]:
    """(field, plain type, may be None) of every option of these groups, for the CLI and the docs."""
    return _declared(kinds or tuple(_groups().values()))


@functools.cache                     # to evaluate the types takes milliseconds, and a plan makes hundreds of configs
def _declared(kinds: tuple[type, ...]) -> tuple[tuple[dataclasses.Field[Any], type, bool], ...]:
    listed = []
    for kind in kinds:
        hints = typing.get_type_hints(kind)
        for declared in dataclasses.fields(kind):
            listed.append((declared, *plain_type(hints[declared.name])))
    return tuple(listed)


def plain_type(hint: Any) -> tuple[type, bool]:
    """`int | None` -> (int, True)"""
    if isinstance(hint, types.UnionType):
        return next(each for each in typing.get_args(hint) if each is not types.NoneType), True
    return hint, False


_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def whole_number(text: str) -> int | None:
    """As vLLM reads them: 4096, 4k (4,000), 4K (4,096), 25.6k; auto is None. ValueError for anything else."""
    if text == "auto":
        return None
    if text[-1:] not in _FACTORS:
        return int(text)
    number = float(text[:-1]) * _FACTORS[text[-1]]
    if not number.is_integer() or " " in text:
        raise ValueError(text)
    return int(number)


def checked(declared: dataclasses.Field[Any], kind: type, optional: bool, value: Any) -> Any:
    """The value in its declared type, or a ConfigError that names the option."""
    name = declared.name
    value = _in_type(name, kind, value)
    if optional and (value is None or (name == "max_model_len" and value == -1)):      # -1: vLLM's "as long as fits"
        return None
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{name} must be of type {kind.__name__}, got {value!r}")
    choices, low = declared.metadata["choices"], declared.metadata["low"]
    if choices and value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
    if low is not None and not value >= low:                     # NaN is not
        raise ConfigError(f"{name} must be at least {low}, got {value}")
    if isinstance(value, int) and value > LARGEST:
        raise ConfigError(f"{name} must be at most {LARGEST}, got {shown(value)}")
    return require_text(name, value) if isinstance(value, str) else value


def require_text(name: str, value: str) -> str:
    """The value itself. A file's name may be any bytes; what is no text here could not be written into a message or an answer."""
    if any("\ud800" <= each <= "\udfff" for each in value):
        raise ConfigError(f"{name} {value!a} is not text in this locale: set a UTF-8 one (LANG=C.UTF-8), or rename the file")
    return value


def _in_type(name: str, kind: type, value: Any) -> Any:
    """Other spellings of a value as the value itself; what is none is left as it is."""
    if name in SPELLINGS and value is not None:                  # torch.float16, "half" and "float16" are the same
        value = str(value).removeprefix("torch.")
        return SPELLINGS[name].get(value, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if kind is str and isinstance(value, Mapping):
        return json.dumps(value)
    if kind is int and isinstance(value, str):
        with suppress(ValueError, OverflowError):
            return whole_number(value)
    return value
