"""Makes the drafter of an engine from its options: proposers, and the controller that chooses among their drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ridgeline.choices.draft_checkpoint import DraftCheckpoint
from ridgeline.draft_options import DraftOptions, draft_options
from ridgeline.ops.cpu import native
from ridgeline.process.log import get_logger
from ridgeline.resolve import ResolvedConfig
from ridgeline.scheduler.drafting import Drafter, NoDrafter
from ridgeline.scheduler.drafts.controller import Controller
from ridgeline.scheduler.drafts.forced import Forced
from ridgeline.scheduler.drafts.ngram import Ngram
from ridgeline.scheduler.drafts.ngram_table import NgramTable
from ridgeline.scheduler.drafts.offer import Proposer
from ridgeline.scheduler.drafts.predicted import Predicted
from ridgeline.scheduler.drafts.shape_times import Pace, ShapeTimes
from ridgeline.scheduler.drafts.small_model import SmallModel
from ridgeline.scheduler.drafts.suffix import Suffix
from ridgeline.sizes.graph_shapes import MOST_VERIFIED, GraphShapes
from ridgeline.sizes.hardware import DEVICES, data_sheet
from ridgeline.sizes.op_costs import DTYPE_BYTES

logger = get_logger("engine")

# Of a CPU that was never measured. Only their proportion counts, and only until steps have been measured.
_CPU_BYTES_S = 10e9
_CPU_FLOPS_S = 60e9
# In place of a GPU without a data sheet. The seconds of keys are added to measured ones: better too few than too many.
_FASTEST = max(DEVICES.values(), key=lambda device: device.bandwidth)

MAKE: dict[str, Callable[[DraftOptions], Proposer]] = {
    "grammar": lambda asked: Forced(),
    "prediction": lambda asked: Predicted(),
    "ngram": lambda asked: ngram(asked.prompt_lookup_min, asked.prompt_lookup_max),
    "suffix": lambda asked: Suffix(asked.suffix_bytes, getattr(native.if_built(), "suffix_drafts", None)),
}


def ngram(fewest: int, longest: int) -> Proposer:
    """For all rows at once, if the native library is there; else row by row, with the same drafts."""
    library = native.if_built()
    return Ngram(fewest, longest) if library is None else NgramTable(fewest, longest, library.ngram_drafts)


def make_drafter(config: ResolvedConfig) -> Drafter:
    asked = draft_options(config.options.execution.speculative_config)
    if not asked.on:
        return NoDrafter()
    if config.options.execution.deterministic and config.device != "cpu":
        logger.warning("deterministic: no drafts on a GPU, whose attention kernel splits the KV of a row with drafts differently")
        return NoDrafter()
    proposers: list[Proposer] = [MAKE[name](asked) for name in asked.methods if name in MAKE]
    if config.draft is not None:
        proposers.append(_small_model(config, config.draft, asked))
    stages = config.options.parallel.pipeline_parallel_size
    return Controller(proposers, step_times(config), asked.num_speculative_tokens, asked.adaptive, native.if_built(), stages)


def _small_model(config: ResolvedConfig, draft: DraftCheckpoint, asked: DraftOptions) -> SmallModel:
    """Its time is believed to be the model's, by the size of the weights, until it is measured."""
    own = step_model(replace(config, model=draft.config), 0)
    limit = min(config.max_model_len, draft.config.max_position_embeddings)
    return SmallModel(limit, lambda rows: own(rows, 0), asked.num_speculative_tokens)


def step_times(config: ResolvedConfig) -> Pace:
    """Nothing is measured yet."""
    graphs = GraphShapes(config.max_num_seqs, config.max_num_batched_tokens, MOST_VERIFIED) if config.graphs else None
    overlaps = config.depth > 0 and config.device != "cpu" and config.options.parallel.pipeline_parallel_size == 1
    return Pace(ShapeTimes(step_model(config, _key_bytes(config)), graphs, config.max_num_batched_tokens), overlaps)


def _key_bytes(config: ResolvedConfig) -> float:
    """Keys and values of one token in the layers that read all of them, one rank's share."""
    full = [group for group in config.groups if group.window is None]
    areas = [area for group in full for layer in group.layers for area in group.areas(config.kv_format, layer)]
    return sum(area.bytes for area in areas) / config.groups[0].block_size


def step_model(config: ResolvedConfig, key_bytes: float) -> Callable[[int, int], float]:
    """Seconds of a decode step by its tokens and the keys it reads: memory or compute, whichever takes longer."""
    model, ranks = config.model, config.options.parallel.tensor_parallel_size
    weights = sum(count * outputs * inputs for count, outputs, inputs in model.matrices) / ranks
    sheet = data_sheet(config.device_name) or (_FASTEST if config.device != "cpu" else None)
    known = sheet is not None and config.dtype in sheet.flops
    bandwidth = sheet.bandwidth if sheet is not None else _CPU_BYTES_S
    flops = sheet.rate(config.dtype) if sheet is not None and known else _CPU_FLOPS_S
    size = DTYPE_BYTES[config.dtype]

    def seconds(tokens: int, keys: int) -> float:
        return max(weights * size / bandwidth, 2 * weights * tokens / flops) + keys * key_bytes / bandwidth

    return seconds
