"""Predicts whether a model fits: the memory of one device as a ledger, by the engine's own functions (resolve.Memory, kv_spec).

    usable · gpu_memory_utilization = weights + KV cache + rows + steps + runtime (+ the draft model)

On a CPU all of it is the engine's: weights in the dtype, second layouts and stored blocks beside them, and a quarter of what is
left for KV. So are the weights of a GGUF file whose codes a GPU keeps, in the layout of its kind. On GPUs, other formats are
counted by their bytes per weight and per element of K and V, also those that the engine does not support yet. `textbook` is the
common estimate from weights and KV alone.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from ridgeline.choices.draft_checkpoint import draft_pages
from ridgeline.choices.graph_sizes import largest_captured
from ridgeline.config import EngineConfig
from ridgeline.distributed.sharding import head_shards
from ridgeline.errors import ConfigError
from ridgeline.models.model_config import kv_groups
from ridgeline.models.stages import fullest_page_bytes, fullest_weight_bytes, stage_config, stage_parameters
from ridgeline.ops.kernel_table import H200
from ridgeline.ops.kernel_table import DeviceFacts as KernelFacts
from ridgeline.plan.precision import WEIGHT_FORMATS, kv_bytes, weight_bytes
from ridgeline.plan.prediction import Setup
from ridgeline.plan.public_models import PlannedModel
from ridgeline.quant.format import MADE
from ridgeline.quant.gpu_layout import gpu_bytes
from ridgeline.resolve import CPU_KV_SHARE, CPU_STEP_TOKENS, DeviceFacts, Memory, gpu_sizes
from ridgeline.sizes import ledger
from ridgeline.sizes.hardware import Device, data_sheet
from ridgeline.sizes.kv_spec import KVGroupSpec, blocks_for, page_bytes
from ridgeline.sizes.mesh_shape import stage_layers

RUNTIME = 760 * 2**20                # CUDA context and libraries, as the engine counts them
DRAFT = "draft model"
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Capacity:
    """One device's memory, for requests of a given length."""

    setup: Setup
    memory: Memory
    groups: list[KVGroupSpec]
    context: int
    budget: int
    draft: int = 0                   # bytes of a draft model's weights
    draft_per_block: int = 0

    @classmethod
    def of(cls, setup: Setup, context: int, utilization: float = 0.9, budget: int | None = None) -> Capacity:
        """`budget`: None for what the engine would choose."""
        if budget is None and setup.device.kind == "cpu":
            budget = CPU_STEP_TOKENS
        elif budget is None:
            captured = captured_tokens(setup)
            any_budget = cls.of(setup, context, utilization, 0)      # counting the weights takes most of the time
            _, budget = gpu_sizes(lambda tokens: any_budget.memory.with_budget(tokens, captured))
            return replace(any_budget, budget=budget, memory=any_budget.memory.with_budget(budget, captured))
        config = setup.model.config
        on_cpu = setup.device.kind == "cpu"
        # On a GPU weights are counted below; here it is what steps expand of them.
        known = ("int8", "int4") if on_cpu else ("int4", "mxfp4")
        made = setup.weights in known and not config.packed and config.quantisation is None
        options = EngineConfig.of(
            gpu_memory_utilization=utilization, tensor_parallel_size=setup.ranks, pipeline_parallel_size=setup.stages,
            decode_context_parallel_size=setup.ranks if setup.context_parallel else 1,
            quantization=setup.weights if made else "none",
        )
        facts = DeviceFacts(
            "cpu" if on_cpu else "cuda", setup.device.usable * (setup.devices if on_cpu else 1), (setup.dtype,),
            0 if on_cpu else RUNTIME, kernels=kernel_facts(setup.device),
        )
        groups = kv_groups(config, BLOCK_SIZE, setup.ranks, setup.ranks if setup.context_parallel else 1)
        memory = Memory.of(options, facts, config, setup.dtype, groups, setup.wide_kv, context, captured_tokens(setup), budget)
        if not on_cpu and setup.kept is None:
            rotation = memory.weights - fullest_weight_bytes(
                config, setup.dtype, facts.kind, options.parallel.mesh, options.model.quantization, facts.kernels)
            memory = replace(memory, weights=rotation + rank_bytes(setup.model, setup))
        memory = replace(memory, per_block=block_bytes(setup.model, setup, groups))
        if setup.draft_model is None:
            return cls(setup, memory, groups, context, budget)
        draft = replace(setup, weights=setup.dtype, sparse=False, stored=None)
        per_block = page_bytes([draft_pages(setup.draft_model.config, BLOCK_SIZE, setup.ranks)], setup.wide_kv)
        return cls(setup, memory, groups, context, budget, rank_bytes(setup.draft_model, draft), per_block)

    @property
    def kv_bytes_per_token(self) -> float:
        """On all devices together, for layers with full attention; sliding windows keep less."""
        slots = sum(len(group.layers) for group in self.groups) / max(len(group.layers) for group in self.groups)
        copies = 1 if self.setup.model.config.latent is not None else self.setup.ranks   # every rank has the whole latent
        copies *= self.setup.stages                      # of a part of the layers
        if self.setup.context_parallel:                  # a block has as many positions on each rank, and everything once
            copies = self.setup.stages
        return (self.memory.per_block * slots * copies + self.draft_per_block * self.setup.ranks) / BLOCK_SIZE

    def blocks(self, batch: int) -> int:
        """KV bytes of `batch` requests at their longest; block 0 is not used."""
        return batch * blocks_for(self.groups, self.context, self.budget) + 1

    def needed(self, batch: int) -> int:
        """Bytes beside the weights and the runtime."""
        kv = self.blocks(batch) * (self.memory.per_block + self.draft_per_block)
        if self.memory.kind == "cpu":                    # the KV cache may take this part of what is left
            kv = int(kv / CPU_KV_SHARE)
        return kv + self.memory.rows(batch) + self.memory.steps(batch, self.budget)

    @property
    def room(self) -> int:
        """Bytes beside the weights and the runtime that there are; negative: the weights alone are too much."""
        return self.memory.room - self.memory.weights - self.memory.runtime - self.draft

    @property
    def fits(self) -> bool:
        """One request, at least."""
        return self.needed(1) <= self.room

    def largest_batch(self, most: int = 1 << 16) -> int:
        """Requests of this length that the memory holds at once; 0: none."""
        if not self.fits:
            return 0
        return bisect_right(range(1, most + 1), self.room, key=self.needed)

    def longest_context(self) -> int:
        """Tokens that a single request may have; 0: none."""
        most = self.setup.model.config.max_position_embeddings
        return bisect_right(range(1, most + 1), self.room, key=lambda tokens: replace(self, context=tokens).needed(1))

    def parts(self, batch: int) -> dict[str, int]:
        """The ledger of an engine with `batch` requests at their longest."""
        found = self.memory.parts(self.blocks(batch), batch, self.budget)
        if self.draft:
            found[DRAFT] = self.draft + self.blocks(batch) * self.draft_per_block
        return found

    def require(self) -> None:
        if not self.fits:
            gib = ledger.GIB
            raise ConfigError(
                f"{self.setup.model.name} does not fit on {self.setup.label}: weights, runtime and one request of "
                f"{self.context} tokens need {(self.memory.room - self.room + self.needed(1)) / gib:.1f} GiB a device, "
                f"{self.memory.room / gib:.1f} are available; use more devices, narrower weights or a shorter context"
            )


def kernel_facts(device: Device) -> KernelFacts:
    """Of a GPU of the table, as the kernel table asks for them: on its kind depends how codes lie in memory."""
    return H200._replace(hopper=device.hopper, gluon=device.hopper, fp8="fp8" in device.flops)


def captured_tokens(setup: Setup) -> int | None:
    """Tokens of prompts in the largest CUDA graph, as the engine chooses it; None: it uses no graphs."""
    if not setup.graphs:
        return None
    options = EngineConfig.of(tensor_parallel_size=setup.ranks, pipeline_parallel_size=setup.stages)
    named = data_sheet(next(iter(setup.device.torch_names), ""))     # the engine knows no other
    return largest_captured(options, setup.model.config, named, setup.dtype, setup.computed)


def model_bytes(model: PlannedModel, setup: Setup) -> int:
    """Weights on all devices: the layers' linears in their format, the rest in the setup's dtype. Experts that a checkpoint has
    in another format lie as their kernels hold them."""
    linears, experts, config = model.linear_parameters, model.experts, model.config
    wide, held = WEIGHT_FORMATS[setup.dtype].bytes, 0
    if experts is not None and setup.expert_weights != setup.weights:
        shapes = ((2 * experts.width, config.hidden_size), (config.hidden_size, experts.width))
        number = (config.num_layers - config.num_plain) * experts.count
        format, facts = MADE[setup.expert_weights], kernel_facts(setup.device)
        held = number * sum(gpu_bytes(format, *shape, place == 0, facts) for place, shape in enumerate(shapes))
        linears -= number * sum(outputs * inputs for outputs, inputs in shapes)
    others = model.parameters - model.linear_parameters
    return round(held + linears * weight_bytes(setup.weights, setup.sparse) + others * wide)


def rank_bytes(model: PlannedModel, setup: Setup) -> int:
    """Weights on one device, of the stage that has most: embedding and head are on the first and the last, and wide."""
    config, stages, found = model.config, setup.stages, []
    for stage in range(stages):
        here = replace(model, config=stage_config(config, stage_layers(config.num_layers, stage, stages)))
        absent = here.parameters - stage_parameters(config, stage, stages)
        again = here.on_every_rank * weight_bytes(setup.weights, setup.sparse) * (setup.ranks - 1)
        found.append((model_bytes(here, setup) - absent * WEIGHT_FORMATS[setup.dtype].bytes + again) / setup.ranks)
    return round(max(found))


def block_bytes(model: PlannedModel, setup: Setup, groups: list[KVGroupSpec]) -> int:
    """Of the KV cache's block on one device, in the layer slots of the stage that has most."""
    each = kv_bytes(setup.kv, setup.kv_dtype, model.kv_scaled)
    page = fullest_page_bytes(groups, model.config.num_layers, setup.stages, setup.wide_kv)
    return round(page * each / WEIGHT_FORMATS[setup.kv_dtype].bytes)


@dataclass(frozen=True, slots=True)
class Textbook:
    """The estimate from weights and KV alone: parameters in one format (experts in theirs) without scales, all memory, all
    bandwidth."""

    weights: float                   # bytes
    kv_per_request: float
    batch: int                       # that the memory holds
    tok_s: float                     # of one request, if reading the weights were all


def textbook(setup: Setup, context: int, parameters: float | None = None) -> Textbook:
    """`parameters`: a rounded number, 70e9 for "70B"; by default the model's own. In a mixture of experts one request reads
    the experts that its token uses."""
    model, bits = setup.model, WEIGHT_FORMATS[setup.weights].bits
    saved = (1 - WEIGHT_FORMATS[setup.expert_weights].bits / bits) / model.parameters      # for each parameter of an expert
    whole = 1 - saved * model.expert_parameters(model.experts.count if model.experts else 0)
    used = model.expert_parameters(model.experts.used if model.experts else 0)
    active = model.active_parameters / model.parameters - saved * used
    every = (parameters or model.parameters) * bits / 8
    kv = model.kv_elements * kv_bytes(setup.kv, setup.kv_dtype, model.kv_scaled, scales=False) * context
    left = setup.devices * setup.device.memory - every * whole
    return Textbook(every * whole, kv, max(0, int(left // kv)), setup.ranks * setup.device.bandwidth / (every * active))


def possible_ranks(model: PlannedModel, most: int, stages: int = 1) -> list[int]:
    """Powers of two that divide the model's heads, with at most `most` devices in all stages, but one in each."""
    config = model.config

    def divides(ranks: int) -> bool:
        try:
            head_shards(config.num_heads, config.num_kv_heads, 0, ranks)
        except ConfigError:
            return False
        return True

    return [ranks for ranks in (1, 2, 4, 8, 16, 32) if ranks <= max(1, most // stages) and divides(ranks)]


