"""Turns every "auto" into a value and gives a reason. Settings that cannot work fail here, before anything is loaded.

A pure function of options, model config and device facts: allocates nothing and needs no torch.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.choices.draft_checkpoint import DraftCheckpoint, draft_checkpoint
from ridgeline.choices.format_choices import check_formats, narrower_formats
from ridgeline.choices.graph_sizes import largest_captured
from ridgeline.choices.kv_options import budget_of, max_model_len_of
from ridgeline.config import EngineConfig, require_text
from ridgeline.draft_options import draft_options
from ridgeline.errors import ConfigError
from ridgeline.models.checkpoints.quantisation_check import product_dtype, quantised_memory
from ridgeline.models.model_config import ModelConfig, checkpoint_dtype, kv_groups, load_model_config
from ridgeline.models.stages import fullest_page_bytes, fullest_weight_bytes
from ridgeline.ops.kernel_table import H200
from ridgeline.ops.kernel_table import DeviceFacts as KernelFacts
from ridgeline.process import embedded
from ridgeline.process.hub_cache import locate
from ridgeline.sizes import ledger
from ridgeline.sizes.graph_shapes import MOST_VERIFIED, most_queries
from ridgeline.sizes.hardware import data_sheet
from ridgeline.sizes.kv_format import KVFormat
from ridgeline.sizes.kv_spec import KVGroupSpec, blocks_for
from ridgeline.sizes.ledger import GIB
from ridgeline.sizes.op_costs import DTYPE_BYTES
from ridgeline.sizes.sampling_costs import PROMPT_LOGPROB_ROWS, mask_bytes, sampling_bytes
from ridgeline.techniques import TECHNIQUES, turned_off

CPU_KV_SHARE = 0.25                  # of the memory left after the weights
CPU_STEP_TOKENS = 512
# 8,192 tokens of prompts beside 256 decodes; 66 tiles of 128 rows, with which most GEMMs fill 132 SMs evenly.
GPU_STEP_TOKENS = 8448
GPU_ROWS = 1024
_PROMPT_ROOM = 448                   # tokens that a budget has beyond those of decodes in all rows
# Long enough for prompt chunks that fill the tensor cores, and on a CPU for chunks that take no longer per token than large ones.
STEP_SECONDS = {"cuda": 0.08, "cpu": 0.5}


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    kind: str                        # cpu or cuda
    memory: int                      # bytes that may be used, the weights included
    fast_dtypes: tuple[str, ...]
    runtime: int = 0                 # bytes that the driver and libraries take of it
    free: int = 0                    # bytes that no process has taken yet; 0: not known
    name: str = ""                   # as its vendor spells it
    unusable: tuple[str, ...] = ()   # dtypes that it would need minutes for
    kernels: KernelFacts = H200      # of a GPU: what its kernels can use


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
    kv_format: KVFormat              # of the KV cache
    graphs: bool                     # decode steps are captured as CUDA graphs and replayed
    shared_prefixes: bool            # attention reads a prefix shared by running requests once
    step_seconds: float              # target time of a step that prompts share with decoding requests; 0: no limit
    memory: dict[str, int]           # predicted bytes on this rank, by part of the ledger
    step_bytes: int                  # of these, what the largest step takes that is launched kernel by kernel …
    graph_bytes: int                 # … and the largest CUDA graph
    reasons: dict[str, str] = field(default_factory=dict)        # option -> why it has its value
    device_name: str = ""
    draft: DraftCheckpoint | None = None                         # the draft model
    linear_dtype: str = ""           # of most products of a layer, as measured rates name it
    graph_tokens: int = 0            # of prompts in the largest CUDA graph
    narrower: tuple[str, ...] = ()   # options of narrower formats that are faster on this device (choices/format_choices.py)

    @property
    def kv_dtype(self) -> str:
        """The KV cache's format in words."""
        return self.kv_format.name

    @property
    def contiguous(self) -> bool:
        return self.options.cache.kv_layout == "contiguous"

    def pinned(self) -> EngineConfig:
        """Options with nothing left to decide: another process resolves them to the same values."""
        return EngineConfig.of(
            **self.options.flat()
            | {
                "model": str(self.model_path), "device": self.device, "dtype": self.dtype,
                "max_model_len": self.max_model_len, "max_num_seqs": self.max_num_seqs,
                "max_num_batched_tokens": self.max_num_batched_tokens,
                "num_gpu_blocks_override": self.num_blocks,
                "kv_cache_memory_bytes": None,
                "enable_prefix_caching": self.prefix_caching,
                "max_cudagraph_capture_size": self.graph_tokens,
                "async_scheduling": self.depth >= self.options.parallel.pipeline_parallel_size,
            }
        )


def model_path(config: EngineConfig) -> Path:
    """The model's directory or file; a name of the Hugging Face hub is looked up in the local cache."""
    path = locate(config.model.model) if config.model.model else embedded.require()
    return Path(require_text("model", str(path)))


def resolve(config: EngineConfig, device: DeviceFacts) -> ResolvedConfig:
    path = model_path(config)
    model = load_model_config(path)
    if config.model.structured_outputs_backend == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
        raise ConfigError("structured_outputs_backend xgrammar is not installed: pip install 'ridgeline[xgrammar]'")
    reasons: dict[str, str] = {}
    dtype = _dtype(config, model, device, reasons)
    groups = kv_groups(
        model, config.cache.block_size, config.parallel.tensor_parallel_size, config.parallel.decode_context_parallel_size
    )
    draft = draft_checkpoint(config, path, model, groups, device.kind, dtype)
    stored = check_formats(config, model, path, device.kind, dtype, device.kernels, reasons)
    longest = _longest(config, model)

    flat = {name: value for part in dataclasses.asdict(config).values() for name, value in part.items()}
    off = turned_off(flat, device.kind)
    for technique in TECHNIQUES:
        if technique.name in off:
            reasons |= dict.fromkeys(technique.off, f"off: {technique.name} {off[technique.name]}")
    graphs = not config.execution.enforce_eager and "CUDA graphs" not in off and _can_capture(config, model, dtype, reasons)
    linear_dtype = _linear_dtype(config, model, device, dtype)
    captured = largest_captured(config, model, data_sheet(device.name), dtype, linear_dtype, reasons) if graphs else None

    def memory_of(most_tokens: int) -> Memory:
        memory = Memory.of(config, device, model, dtype, groups, stored, longest, captured, most_tokens)
        return memory if draft is None else memory.beside(draft, config, device, longest, captured, most_tokens)

    max_num_seqs, budget, memory = _sizes(config, device, memory_of, longest, reasons)
    chunked = config.scheduler.enable_chunked_prefill or config.scheduler.max_num_batched_tokens is not None
    most_tokens = budget if chunked else max(budget, longest)    # see budget_of
    num_blocks = _num_blocks(config, memory, groups, longest, most_tokens, max_num_seqs, reasons)
    max_model_len = max_model_len_of(config, groups, num_blocks, memory.per_block, longest, budget, reasons)
    budget = budget_of(config, budget, max_model_len, reasons)
    step_bytes, graph_bytes = memory.pools(max_num_seqs, budget)

    return ResolvedConfig(
        options=config, model_path=path, model=model, device=device.kind, dtype=dtype, max_model_len=max_model_len,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, groups=groups, num_blocks=num_blocks,
        prefix_caching=config.cache.enable_prefix_caching and "prefix caching" not in off,
        depth=_depth(config, device, reasons),
        kv_format=stored, graphs=graphs,
        shared_prefixes=config.execution.shared_prefix_attention and "shared-prefix attention" not in off,
        step_seconds=_step_seconds(config, device), memory=memory.parts(num_blocks, max_num_seqs, budget),
        step_bytes=step_bytes, graph_bytes=graph_bytes, reasons=reasons, device_name=device.name,
        draft=draft, linear_dtype=linear_dtype, graph_tokens=captured or 0,
        narrower=narrower_formats(config, model, path, device.kind, dtype, device.kernels),
    )


def _can_capture(config: EngineConfig, model: ModelConfig, dtype: str, reasons: dict[str, str]) -> bool:
    if _has_kernels(config, model, dtype):
        return True
    reasons["enforce_eager"] = "on: ops without a kernel run in plain torch and read values back, which a CUDA graph cannot"
    return False


def _depth(config: EngineConfig, device: DeviceFacts, reasons: dict[str, str]) -> int:
    """Steps in flight beside the one being planned. Those of a pipeline have one stage each, so that overlap is a part of it."""
    asked, stages = config.scheduler.async_scheduling, config.parallel.pipeline_parallel_size
    if stages > 1:
        reasons["async_scheduling"] = "off: overlap adds nothing to pipeline parallelism"
        return stages - 1
    if asked is None:
        reasons["async_scheduling"] = "off: on the CPU host and device are the same cores" if device.kind == "cpu" else "on"
        return int(device.kind != "cpu")
    return int(asked)


def _sizes(
    config: EngineConfig, device: DeviceFacts, memory: Callable[[int], Memory], longest: int, reasons: dict[str, str]
) -> tuple[int, int, Memory]:
    """max_num_seqs and the token budget, and what memory there is with them: `memory` depends on the most tokens of a step."""
    asked, cache = config.scheduler, config.cache
    if device.kind == "cpu":
        budget = asked.max_num_batched_tokens or CPU_STEP_TOKENS
        return asked.max_num_seqs or 128, budget, memory(budget)
    kv_bytes = cache.kv_cache_memory_bytes
    if cache.num_gpu_blocks_override is not None:
        kv_bytes = cache.num_gpu_blocks_override * memory(0).per_block
    whole = longest if not asked.enable_chunked_prefill and asked.max_num_batched_tokens is None else 0      # see budget_of
    max_num_seqs, budget = gpu_sizes(memory, asked.max_num_seqs, asked.max_num_batched_tokens, kv_bytes, whole)
    why = "more would take most of the memory that the weights leave"
    if asked.max_num_seqs is None and max_num_seqs < GPU_ROWS:
        reasons["max_num_seqs"] = f"{max_num_seqs}: {why}"
    if asked.max_num_batched_tokens is None and budget < GPU_STEP_TOKENS:
        reasons["max_num_batched_tokens"] = f"{budget}: {why}"
    return max_num_seqs, budget, memory(max(budget, whole))


def gpu_sizes(
    memory: Callable[[int], Memory], rows: int | None = None, tokens: int | None = None, kv_bytes: int | None = None,
    whole: int = 0,
) -> tuple[int, int]:
    """max_num_seqs and the token budget of a GPU; `memory` depends on the most tokens of a step. Values that were not asked for
    shrink if the weights leave little room: half of it should be left to the KV cache, or `kv_bytes`.

    They do not shrink much for a small gain, and the budget always has room for prompts beside a decode in every row. `whole`:
    tokens of prompts that cannot be chunked.
    """
    found: list[tuple[int, tuple[int, int]]] = []        # what is left, and with what
    for part in (1, 2, 4, 8, 16):
        max_num_seqs = rows or GPU_ROWS // part
        least = min(GPU_STEP_TOKENS, max_num_seqs + _PROMPT_ROOM)
        budget = tokens or max(GPU_STEP_TOKENS // part // 128 * 128, least)
        most = max(budget, whole)
        made = memory(most)
        free = made.room - made.weights - made.runtime
        found.append((made.left(max_num_seqs, most), (max_num_seqs, budget)))
        if found[-1][0] >= (free // 2 if kv_bytes is None else kv_bytes):
            return found[-1][1]
    nearly = 0 if kv_bytes is not None else max(0, free) // 20       # kv_bytes does not fit: the error names what would
    best = max(left for left, _ in found)
    return next(sizes for left, sizes in found if left >= best - nearly)


@dataclass(frozen=True, slots=True)
class Memory:
    """What one rank has, and what each part of the engine takes of it. `sizes/ledger.py` names the parts."""

    kind: str                        # of the device
    dtype: str
    room: int                        # bytes this rank may use
    others: int                      # bytes that it may not, because other processes have them
    weights: int                     # rotation tables included
    runtime: int
    per_block: int
    vocab: int
    per_row_kept: int                # a row's block tables, partial results, and the logits of a CUDA graph
    per_row_logits: int              # a row's logits while a step computes them
    per_row_copied: int              # copies of them while tokens are sampled: without padding, for log-probabilities
    scored: int                      # logits of a prompt's positions, of which log-probabilities are wanted
    graph_tokens: int                # of the longest captured prompts, whose activations have memory of their own; 0: no graphs
    per_token: int                   # a token's activations in one layer, the widest
    kv_option: str                   # the option that gave the size of the KV cache
    scratch: int = 0                 # the largest weight that a product expands in the memory of its step
    expanded: int = 0                # the largest packed one, in a place that all steps share (ops/packed/expand_room.py)
    verified: int = 0                # most tokens of decodes with drafts, each with its logits; 0: no drafts
    per_row_partials: int = 0        # partial results of attention, of a row with one query

    @classmethod
    def of(
        cls, config: EngineConfig, device: DeviceFacts, model: ModelConfig, dtype: str, groups: list[KVGroupSpec],
        stored: KVFormat, longest: int, captured: int | None, budget: int,
    ) -> Memory:
        """`captured`: tokens of prompts in the largest CUDA graph; None: there are no graphs."""
        share, ranks = config.cache.gpu_memory_utilization, config.parallel.tensor_parallel_size
        mesh = config.parallel.mesh
        if not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {share}")
        # Ranks and engines on the CPU of one machine share its memory; each GPU has its own.
        far = config.parallel.distributed_executor_backend == "ray"
        sharing = (1 if far else mesh.size) * config.parallel.data_parallel_size
        allowed = room = device.memory // sharing if device.kind == "cpu" else int(device.memory * share)
        if device.free:                                  # others may be on the GPU; what we have taken already is ours
            room = min(room, device.free + device.runtime)
        size = DTYPE_BYTES[dtype]
        tables = len(groups) * -(-longest // (4 * config.cache.block_size)) * 16         # whole 16 bytes (row_tables.py)
        logits = model.vocab_size * size
        if model.final_softcap is not None:
            logits = model.vocab_size * max(4, size)     # capped in float32
        partials = 0 if device.kind == "cpu" else partial_bytes(model, config.execution.deterministic) // ranks
        width = 4 * model.hidden_size + attention_width(model, ranks)
        # gate and up as well: a kernel for hundreds of tokens and more does not write them (ops/linear/gemm_gated.py), but steps
        # just below that do, into other pieces of memory than the largest step has left.
        per_token = (width + model.mlp_elements) * size
        quantised = quantised_memory(model, config.model.quantization, device.kind, ranks, device.kernels, dtype)
        if quantised.codes:                              # rows as codes, beside the rows themselves
            per_token += model.hidden_size + model.intermediate_size
        rotation = sum(2 * len(rope.frequencies(longest)) for rope in set(model.ropes)) * longest * max(4, size)
        made = cls(
            kind=device.kind, dtype=dtype, room=room, others=allowed - room,
            weights=fullest_weight_bytes(model, dtype, device.kind, mesh, config.model.quantization, device.kernels) + rotation,
            runtime=device.runtime, per_block=fullest_page_bytes(groups, model.num_layers, mesh.pipeline, stored),
            vocab=model.vocab_size, per_row_kept=tables + (0 if captured is None else logits) + partials,
            per_row_logits=logits, per_row_copied=0 if device.kind == "cpu" else logits * 2,
            scored=0, graph_tokens=0, per_token=per_token, expanded=quantised.room * size if size == 2 else 0,
            scratch=max(quantised.scratch, 0 if size == 2 else quantised.room) * size,       # float32: by the definition
            verified=MOST_VERIFIED if device.kind != "cpu" and draft_options(config.execution.speculative_config).on else 0,
            per_row_partials=partials,
            kv_option="num_gpu_blocks_override" if config.cache.kv_cache_memory_bytes is None else "kv_cache_memory_bytes",
        )
        return made.with_budget(budget, captured)

    def with_budget(self, budget: int, captured: int | None) -> Memory:
        """For steps of at most `budget` tokens."""
        scored = 0 if self.kind == "cpu" else min(budget, PROMPT_LOGPROB_ROWS) * self.per_row_logits
        return dataclasses.replace(self, scored=scored, graph_tokens=0 if captured is None else max(1, min(captured, budget)))

    def beside(
        self, draft: DraftCheckpoint, config: EngineConfig, device: DeviceFacts, longest: int, captured: int | None, budget: int
    ) -> Memory:
        """With a draft model, whose steps and graphs run between those of the model, in the same memory."""
        plain = dataclasses.replace(config, model=dataclasses.replace(config.model, quantization="none"))
        own = Memory.of(plain, device, draft.config, self.dtype, draft.groups, draft.format, longest, captured, budget)
        return dataclasses.replace(
            self, weights=self.weights + own.weights, per_block=self.per_block + draft.block_bytes,
            per_row_kept=self.per_row_kept + own.per_row_kept, per_token=max(self.per_token, own.per_token),
            per_row_logits=max(self.per_row_logits, own.per_row_logits), scratch=max(self.scratch, own.scratch),
            expanded=self.expanded + own.expanded,       # each has a place
        )

    def rows(self, max_num_seqs: int) -> int:
        size, on_gpu = DTYPE_BYTES[self.dtype], self.kind != "cpu"
        sampling = sampling_bytes(
            rows=max_num_seqs, vocab=self.vocab, element_bytes=size, on_gpu=on_gpu, verified=self.verified
        )
        masks = mask_bytes(rows=max(max_num_seqs, self.verified), vocab=self.vocab) if on_gpu else 0
        drafts = 0
        if self.verified:                                # rows times queries of attention are at most this
            drafts = max(max_num_seqs * most_queries(max_num_seqs), self.verified) * self.per_row_partials
            drafts += max(0, self.verified - max_num_seqs) * (self.per_row_logits if self.graph_tokens else 0)
        return max_num_seqs * self.per_row_kept + drafts + sampling + masks

    def steps(self, max_num_seqs: int, budget: int) -> int:
        on_gpu = 0 if self.kind == "cpu" else ledger.SMALL_BLOCKS * ledger.SMALL_BLOCK + ledger.LIBRARY_BYTES
        return self.expanded + sum(size + on_gpu for size in self.pools(max_num_seqs, budget) if size)

    def pools(self, max_num_seqs: int, budget: int) -> tuple[int, int]:
        """Memory of the largest step that is launched kernel by kernel, and of the largest CUDA graph.

        A step's activations are freed before its tokens are sampled, so the larger of the two counts.
        """
        sampled = max(max_num_seqs, self.verified)
        logits = sampled * self.per_row_logits
        launched = max(budget * self.per_token + self.scratch, sampled * self.per_row_copied, self.scored)
        recorded = max(sampled, self.graph_tokens) * self.per_token + self.scratch
        return logits + launched, logits + recorded if self.graph_tokens else 0

    def left(self, max_num_seqs: int, budget: int) -> int:
        """What remains for the KV cache."""
        return self.room - sum(self.parts(0, max_num_seqs, budget).values())

    def parts(self, num_blocks: int, max_num_seqs: int, budget: int) -> dict[str, int]:
        return {
            ledger.WEIGHTS: self.weights,
            ledger.KV: num_blocks * self.per_block,
            ledger.ROWS: self.rows(max_num_seqs),
            ledger.STEPS: self.steps(max_num_seqs, budget),
            ledger.RUNTIME: self.runtime,
        }

    def check(self, num_blocks: int, max_num_seqs: int, budget: int) -> None:
        """ConfigError for what does not fit, and the largest value that would."""
        if self.weights + self.runtime >= self.room:
            raise ConfigError(
                f"the weights need {self.weights / GIB:.2f} GiB in {self.dtype}, but only "
                f"{(self.room - self.runtime) / GIB:.2f} GiB of "
                f"{self.kind} memory are available{self._without_others()}; {self._advice()}"
            )
        free = self.room - self.weights - self.runtime
        per_kv, kv = (1, num_blocks * self.per_block) if self.kv_option == "kv_cache_memory_bytes" else (
            self.per_block, num_blocks
        )
        parts: list[tuple[str, int, Callable[[int], int]]] = [
            ("max_num_seqs", max_num_seqs, lambda count: self.rows(count) + self.steps(count, 0)),
            ("max_num_batched_tokens", budget, lambda count: self.steps(max_num_seqs, count) - self.steps(max_num_seqs, 0)),
            (self.kv_option, kv, lambda count: count * per_kv),
        ]
        for name, count, needs in parts:
            if needs(count) > free:
                largest = bisect_right(range(count), free, key=needs) - 1
                raise ConfigError(
                    f"{name} {count} needs {needs(count) / GIB:.3f} GiB, but only {free / GIB:.3f} GiB of {self.kind} memory are "
                    f"left for it{self._without_others()}; "
                    + (f"the largest that fits is {largest}" if largest > 0 else "none fits")
                )
            free -= needs(count)

    def _advice(self) -> str:
        """What makes weights smaller on this device. Ranks on a CPU share one memory."""
        if self.kind == "cpu":
            return "use a smaller model, or end other programs"
        smaller = {"float64": "dtype float32", "float32": "dtype bfloat16", "bfloat16": "quantization fp8"}.get(self.dtype)
        return f"use a smaller model, {f'{smaller}, ' if smaller else ''}or more GPUs (tensor_ or pipeline_parallel_size)"

    def _without_others(self) -> str:
        """For error messages: the memory that other processes have taken."""
        return f" (other processes use {self.others / GIB:.2f} GiB of its share)" if self.others > 0 else ""


def attention_width(model: ModelConfig, ranks: int) -> int:
    """Numbers of a token between the linears around attention. A prompt's keys and values are widened from their latents; for
    what earlier steps left in the cache its queries are absorbed as well, and their sums of latents widened."""
    latent = model.latent
    if latent is None:
        return (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    heads = -(-model.num_heads // ranks)
    projected = latent.query_rank + 2 * latent.width
    return projected + heads * (2 * latent.head + 2 * latent.kv_rank + latent.nope + 3 * latent.value)


def partial_bytes(model: ModelConfig, deterministic: bool) -> int:
    """Partial results of split-KV attention, per row: one for a shared prefix; for the row's own keys eight fixed splits if
    deterministic, else 1.5 on average, since every second row is split in two (ops/attention/split_kv.py)."""
    slots = 9.0 if deterministic else 2.5
    value = model.head_dim if model.latent is None else model.latent.kv_rank
    return int(slots * model.num_heads * (2 ** (value - 1).bit_length() + 2) * 4)


def _has_kernels(config: EngineConfig, model: ModelConfig, dtype: str) -> bool:
    """Is there a kernel for everything on a GPU?"""
    return config.model.kernels == "auto" and dtype != "float64" and model.head_dim <= 256


def _linear_dtype(config: EngineConfig, model: ModelConfig, device: DeviceFacts, dtype: str) -> str:
    return product_dtype(
        model, config.model.quantization, device.kind, dtype, config.parallel.tensor_parallel_size, device.kernels,
        config.model.cpu_activations == "int8",
    )


def _step_seconds(config: EngineConfig, device: DeviceFacts) -> float:
    given = config.scheduler.step_time_ms
    if not config.scheduler.enable_chunked_prefill:
        return 0.0                                       # a whole prompt is one step
    if given is None:
        return STEP_SECONDS[device.kind]
    return given / 1e3


def _dtype(config: EngineConfig, model: ModelConfig, device: DeviceFacts, reasons: dict[str, str]) -> str:
    if config.model.dtype != "auto":
        if config.model.dtype in device.unusable:
            raise ConfigError(
                f"this {device.kind} has no instructions for {config.model.dtype}: a token would take minutes; use dtype float32"
            )
        if config.model.dtype not in (*device.fast_dtypes, "float64"):
            fast = device.fast_dtypes[0]
            reasons["dtype"] = f"{config.model.dtype} as asked; it is slow on this {device.kind}, {fast} is fast"
        return config.model.dtype
    if device.kind == "cpu":
        reasons["dtype"] = "float32: exact, and fast on every CPU"
        return "float32"
    dtype = checkpoint_dtype(model)
    reasons["dtype"] = f"{dtype}: the checkpoint is {model.dtype}"
    return dtype


def _longest(config: EngineConfig, model: ModelConfig) -> int:
    """The context that is asked for; the KV cache may allow less."""
    asked = config.model.max_model_len
    if asked is not None and asked > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {asked} is more than this model supports; the largest is {model.max_position_embeddings}"
        )
    return asked or model.max_position_embeddings


def _num_blocks(
    config: EngineConfig, memory: Memory, groups: list[KVGroupSpec], longest: int, budget: int, max_num_seqs: int,
    reasons: dict[str, str],
) -> int:
    cache = config.cache
    if cache.num_gpu_blocks_override is not None and cache.kv_cache_memory_bytes is not None:
        raise ConfigError("num_gpu_blocks_override and kv_cache_memory_bytes exclude each other; give one")
    if cache.num_gpu_blocks_override is not None:
        memory.check(cache.num_gpu_blocks_override, max_num_seqs, budget)
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        given = cache.kv_cache_memory_bytes
    else:
        memory.check(0, max_num_seqs, budget)
        left = memory.left(max_num_seqs, budget)
        given = int(left * CPU_KV_SHARE) if memory.kind == "cpu" else left
        reasons["kv_cache_memory_bytes"] = (
            f"{CPU_KV_SHARE:.0%} of the {left / GIB:.2f} GiB left" if memory.kind == "cpu"
            else f"what is left of {cache.gpu_memory_utilization:.0%} of the GPU's memory"
        )
    # More than every row at its longest can never be used.
    most = blocks_for(groups, longest, budget) * max_num_seqs + 1
    num_blocks = min(given // memory.per_block, most)
    memory.check(num_blocks, max_num_seqs, budget)
    return num_blocks
