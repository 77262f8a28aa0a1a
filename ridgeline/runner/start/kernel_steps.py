"""The steps whose kernels are compiled before the first request: one of every kind.

Kernels have variants, and a few numbers of a step decide which one it launches. `kernel_steps` covers them all:

    linears, norms               by tokens: sizes of captured decodes, prompts, the largest steps
    decode attention             by rows: decodes alone, beside a prompt, after a shared prefix
    drafts                       by the most queries of a row; a step behind others whose result is not known
    experts                      by pairs of a token and an expert: tiles, and who sorts the pairs
    prefill attention            by the tokens of the longest prompt, where no one kernel serves all; with and without older keys
    greedy tokens                with every step
    sampling                     sampled, filtered, or greedy; one row or many; of the model's logits or of edited ones
    masks, log-probabilities     of sampled tokens and of prompts

The steps go through the runner while launches are only collected (ops/compile_ahead.py), with few layers, with KV pages that
are too few to run them, and before the weights are loaded. Kinds that cannot occur (a prefill kernel that the model does
not use, prefixes that are never long enough) are not compiled, since no step launches them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ridgeline.distributed.comm import Communicator
from ridgeline.draft_options import draft_options
from ridgeline.layers.linear import Linear
from ridgeline.messages import RowAdded, StepPlan, Want
from ridgeline.models.decoder import Decoder
from ridgeline.ops.compile_ahead import CompileAhead
from ridgeline.ops.experts.expert_tiles import MOST_PAIRS
from ridgeline.ops.kernel_table import GATED_ROWS
from ridgeline.resolve import ResolvedConfig
from ridgeline.runner.device_rows import DeviceRows
from ridgeline.runner.forward import EagerForward
from ridgeline.runner.kv_buffers import KVBuffers
from ridgeline.runner.runner import Runner
from ridgeline.runner.sampler import Sampler
from ridgeline.runner.shared_prefix import FEWEST_ROWS, FEWEST_SAVED
from ridgeline.sampling_params import SamplingParams, StructuredOutputs
from ridgeline.sizes.graph_shapes import GraphShapes, decode_sizes, most_queries
from ridgeline.sizes.kv_spec import groups_here

_NONE = np.zeros(0, np.int32)
FINE_SIZES = 256                     # up to here every captured number of decodes; beyond it cuBLAS computes the linears
COARSE_SIZES = {*(2**power for power in range(8)), *(2**power for power in range(9, 20, 2))}     # one in each class of attention
DRAFT_QUERIES = [2**power for power in range(1, most_queries(1).bit_length())]      # of a row; attention rounds up to these
SAMPLING_ROWS = (1, 16)              # few enough for the one-row sampling kernel, and more
# How tokens are sampled, and from what: the model's logits, edited ones, those that a grammar allows.
CHOSEN: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 5},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "logprobs": 1},
)
EDITED: tuple[dict[str, Any], ...] = (
    {}, {"repetition_penalty": 1.1}, {"structured_outputs": StructuredOutputs(regex="a")},
)


@dataclass(frozen=True, slots=True)
class KernelStep:
    counts: list[int]                # tokens of each row, decodes first
    past: int = 0                    # tokens that each row has already
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    want: Want = Want.TOKEN
    masked: bool = False
    added: bool = True               # False: its rows, decodes, go on from a step before
    used: bool = False               # others may have had its rows: their tables are pointed at block 0, which no sequence owns
    widths: tuple[int, ...] = ()     # drafts of each row, all of which decode; of none where it is empty
    again: bool = False              # with drafts: the same step follows before its result is known


def kernel_steps(
    max_rows: int, max_step_tokens: int, max_model_len: int, drafts: bool = False, experts_used: int = 0
) -> Iterator[KernelStep]:
    """The ones that take longest to compile first. `drafts`: rows may have some. `experts_used`: by a token, of a mixture."""
    num_rows, longest = min(max_rows, max_step_tokens), max_model_len - 1
    most = min(max_step_tokens, num_rows * longest)
    for tokens in dict.fromkeys([most, min(most, GATED_ROWS - 1), *_expert_sizes(most, experts_used)]):
        whole, rest = divmod(tokens, longest)
        yield KernelStep([rest] * (rest == 1) + [longest] * whole + [rest] * (rest > 1))
    yield from _sampling(num_rows)                       # whose kernels take up to 4 s, as prefill attention does
    shapes = GraphShapes(max_rows, max_step_tokens)
    yield from _decodes(shapes, num_rows, max_step_tokens, longest)
    beyond = [size for size in decode_sizes(FINE_SIZES) if size > num_rows]  # as many tokens, if not as many rows
    longest_chunk = min(longest, max_step_tokens)
    for tokens in sorted({2, 4, 8, 16, 32, *beyond, *shapes.prompt_tokens}):
        if tokens <= longest_chunk and (tokens <= FINE_SIZES or tokens in COARSE_SIZES):
            yield KernelStep([tokens])
    if drafts:
        for size in DRAFT_QUERIES:
            if size <= longest_chunk:
                yield KernelStep([1], widths=(size - 1,), again=size == DRAFT_QUERIES[0] and longest > 4)
    if longest_chunk > 1 and longest > 2:
        yield KernelStep([2], past=1)                    # a later chunk of a prompt
    scored = SamplingParams(temperature=0, prompt_logprobs=1)
    for rows in (15, *beyond):                           # rows of logits that the head computes
        if rows < longest_chunk:
            yield KernelStep([rows + 1], params=scored, want=Want.TOKEN | Want.PROMPT_LOGPROBS)


def _expert_sizes(most: int, used: int) -> list[int]:
    """Tokens beyond FINE_SIZES. From one size of tiles to the next are more than twice as many pairs; a kernel of ours sorts
    up to MOST_PAIRS of them."""
    if not used:
        return []
    powers = (2**power for power in range(FINE_SIZES.bit_length(), most.bit_length()))
    return [tokens for tokens in (*powers, MOST_PAIRS // used) if FINE_SIZES < tokens < most]


def _decodes(shapes: GraphShapes, num_rows: int, max_step_tokens: int, longest: int) -> Iterator[KernelStep]:
    """Decodes alone, beside a prompt, and after a shared prefix."""
    sizes = sorted({size for size in shapes.decodes if size <= num_rows} | {num_rows}, reverse=True)
    coarse = [size for size in sizes if size in COARSE_SIZES or size == num_rows]
    for size in sizes:
        if size <= FINE_SIZES or size in coarse:
            yield KernelStep([1] * size, added=size == num_rows or longest < len(sizes))
    for size in coarse:
        if 1 < size < max_step_tokens and longest > 1:
            yield KernelStep([1] * (size - 1) + [2])
    for size in sorted({size for size in (*coarse, FEWEST_ROWS) if FEWEST_ROWS <= size <= num_rows}, reverse=True):
        if (past := shared_past(size)) < longest:
            yield KernelStep([1] * size, past)


def shared_past(size: int) -> int:
    """Tokens of each row from which a prefix that all of them have is read once; the last block is not shared."""
    return -(-FEWEST_SAVED // (size - 1)) + 64


def _sampling(num_rows: int) -> Iterator[KernelStep]:
    for size in SAMPLING_ROWS:
        if size <= num_rows:
            for edits, chosen in itertools.product(EDITED, CHOSEN):
                want = Want.TOKEN | Want.LOGPROBS if "logprobs" in chosen else Want.TOKEN
                masked = "structured_outputs" in edits
                yield KernelStep([1] * size, params=SamplingParams(**edits, **chosen), want=want, masked=masked)


def collect_kernels(
    ahead: CompileAhead, config: ResolvedConfig, model: Decoder, rows: DeviceRows, sampler: Sampler, comm: Communicator
) -> None:
    """Begin to compile what steps of this model will launch. Rows and sampler are afterwards as before."""
    if not ahead.active:
        return
    chosen = _one_of_each(model)
    few = model.with_layers(chosen)
    buffers = KVBuffers(groups_here(config.groups, model.numbers_here), 2, config.kv_format, rows.device)
    pages = buffers.layers()
    forward = EagerForward(few, [pages[number] for number in chosen], rows.last_token, rows.late.surplus)
    runner = Runner(few, forward, rows, sampler, buffers, comm)
    drafts = draft_options(config.options.execution.speculative_config).on
    used = 0 if model.config.experts is None else model.config.experts.used
    with ahead.collecting():
        for step in kernel_steps(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, drafts, used):
            run_step(runner, len(config.groups), step)
    runner.remove(np.arange(config.max_num_seqs))
    rows.last_token.zero_()
    for prefixes in rows.prefixes:
        prefixes.steps = prefixes.saved = 0
    if rows.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()                         # what steps need is measured later, as if this had not been


def _one_of_each(model: Decoder) -> list[int]:
    """The first layer, which adds nothing to a stream; of those between one with each window, with and without a rope, and each
    set of weight formats; the last, of few tokens."""
    kinds = []
    for number, layer in zip(model.numbers_here, model.layers, strict=True):
        linears = [module for module in layer.modules() if isinstance(module, Linear)]
        seen = model.config.windows[number], model.config.ropes[number].turns
        kinds.append((*seen, *(id(linear.scheme) for linear in linears)))       # linears of one format share a scheme
    first = {kind: number for number, kind in reversed(list(enumerate(kinds))) if number}
    return sorted({0, len(kinds) - 1, *first.values()})


def run_step(runner: Runner, num_groups: int, step: KernelStep) -> None:
    rows = np.arange(len(step.counts), dtype=np.int32)
    added = []
    if step.added:
        tokens = np.zeros(step.past + (1 + step.again) * (max(step.counts) + max(step.widths, default=0)), np.int32)
        size = runner.rows.block_size
        added = [
            RowAdded(
                row, tokens[: step.past + count], step.past + count, step.past,
                [tokens[: -(-len(tokens) // size)] if step.used else _NONE] * num_groups, step.params, 0,
            )
            for row, count in enumerate(step.counts)
        ]
    want = np.full(len(rows), step.want, np.int8)
    width = np.array(step.widths or [0] * len(rows), np.int32)
    plan = StepPlan(0, _NONE, added, _NONE.reshape(0, 4), rows, np.array(step.counts, np.int32) + width, want)
    if step.widths:
        plan.width, plan.drafts = width, np.zeros((len(rows), int(width.max())), np.int32)
        plan.drafts_from = np.full(len(rows), step.past + 1, np.int32)
    runner.submit(plan)
    words = -(-runner.model.config.vocab_size // 32)
    runner.sample(np.full((len(rows), words), -1, np.int32) if step.masked else None)
    if step.again and runner.rows.depth:
        runner.submit(replace(plan, step=1, added=[]))
        runner.sample()
        runner.collect()
    runner.collect()
