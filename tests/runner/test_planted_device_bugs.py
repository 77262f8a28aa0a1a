"""Planted bugs in the device half: each must change an answer that the laws compare, or the laws prove nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_laws import PLAIN, USUAL, requests, run
from tiny_models import save_checkpoint

from ridgeline.layers import attention
from ridgeline.messages import StepPlan
from ridgeline.ops.attention import qkv_write
from ridgeline.runner.device_rows import DeviceRows
from ridgeline.runner.runner import Runner
from ridgeline.runner.sampler import Sampler
from ridgeline.sampling_params import SamplingParams

Patch = pytest.MonkeyPatch
OPTIONS = USUAL | {"max_num_batched_tokens": 24}


def change(patch: Patch, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    patch.setattr(owner, name, make(getattr(owner, name)))


def window_one_too_wide(patch: Patch) -> None:
    """A wrong mask: one position that should be behind the window is seen."""
    def make(attend: Any) -> Any:
        return lambda *args, window, **rest: attend(*args, window=window and window + 1, **rest)
    change(patch, attention, "paged_attention", make)


def softcap_forgotten(patch: Patch) -> None:
    def make(attend: Any) -> Any:
        return lambda *args, softcap, **rest: attend(*args, softcap=None, **rest)
    change(patch, attention, "paged_attention", make)


def own_token_unseen(patch: Patch) -> None:
    """A wrong mask: the KV length leaves out the token that was just written."""
    def make(attend: Any) -> Any:
        def shorter(q: Any, k: Any, v: Any, table: Any, start: Any, length: Any, **rest: Any) -> Any:
            if rest["kv_len_host"] is not None:          # steps of decodes alone have none
                rest["kv_len_host"] = [max(1, n - 1) for n in rest["kv_len_host"]]
            return attend(q, k, v, table, start, (length - 1).clamp(min=1), **rest)
        return shorter
    change(patch, attention, "paged_attention", make)


def values_of_last_token_not_written(patch: Patch) -> None:
    def make(write: Any) -> Any:
        def partly(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any) -> Any:
            v = v.clone()
            v[-1] = 0
            return write(k, v, k_cache, v_cache, slots)
        return partly
    change(patch, qkv_write, "kv_write", make)


def after_packing(edit: Callable[[DeviceRows, StepPlan, Any], None]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        def make(pack: Any) -> Any:
            def packed(self: DeviceRows, plan: StepPlan, *more: Any) -> Any:
                batch = pack(self, plan, *more)
                edit(self, plan, batch)
                return batch
            return packed
        change(patch, DeviceRows, "pack", make)
    return plant


def decode_position_ahead(rows: DeviceRows, plan: StepPlan, batch: Any) -> None:
    if len(batch.positions) == len(plan.rows):
        batch.positions = batch.positions + 1


def first_group_for_all(rows: DeviceRows, plan: StepPlan, batch: Any) -> None:
    """Every layer reads the first group's table and writes its own: a stale block."""
    for group in batch.groups[1:]:
        group.block_table = batch.groups[0].block_table


def last_slot_repeated(rows: DeviceRows, plan: StepPlan, batch: Any) -> None:
    """Two tokens of a chunk share a slot."""
    for group in batch.groups:
        if len(group.slots) > 1:
            group.slots[-2] = group.slots[-1]


def tokens_of_neighbours(rows: DeviceRows, plan: StepPlan, batch: Any) -> None:
    """Decodes take their last token from the wrong row."""
    if len(batch.tokens) == len(plan.rows):
        batch.last_rows = batch.last_rows.flip(0)


def lost_token(rows: DeviceRows, plan: StepPlan, batch: Any) -> None:
    """A chunk's first token is lost."""
    borders = batch.query_start.tolist()
    for place, (first, end) in enumerate(itertools.pairwise(borders)):
        if end - first > 2 and place == 0:
            batch.tokens[first] = batch.tokens[first + 1]


def last_layer_goes_on_with_others(rows: DeviceRows, plan: StepPlan, batch: Any) -> None:
    """Of several rows that sample, the last layer sees each with its neighbour's past."""
    if batch.sampled is not None:
        for group in batch.sampled.groups:
            group.block_table = group.block_table.flip(0)


def logits_of_first_token(rows: DeviceRows, plan: StepPlan, batch: Any) -> None:
    batch.logits_index = (batch.logits_index - (batch.logits_index > 0).long()).clamp(min=0)


def appended_blocks_forgotten(patch: Patch) -> None:
    def make(apply: Any) -> Any:
        def forget(self: DeviceRows, plan: StepPlan) -> None:
            plan.appended = plan.appended[1:]
            apply(self, plan)
        return forget
    change(patch, DeviceRows, "apply", make)


def hit_not_skipped(patch: Patch) -> None:
    """A row that joins with a cached prefix starts one token too early."""
    def make(apply: Any) -> Any:
        def early(self: DeviceRows, plan: StepPlan) -> None:
            apply(self, plan)
            for added in plan.added:
                self.length[added.row] = max(0, added.num_computed - 1)
        return early
    change(patch, DeviceRows, "apply", make)


def token_kept_for_the_wrong_row(patch: Patch) -> None:
    def make(sample: Any) -> Any:
        def rolled(self: Runner, masks: Any = None) -> None:
            sample(self, masks)
            self.rows.last_token.copy_(self.rows.last_token.roll(1))
        return rolled
    change(patch, Runner, "sample", make)


BUGS = [
    window_one_too_wide, softcap_forgotten, own_token_unseen, values_of_last_token_not_written,
    appended_blocks_forgotten, hit_not_skipped, token_kept_for_the_wrong_row,
    *(after_packing(edit) for edit in (
        decode_position_ahead, first_group_for_all, last_slot_repeated, tokens_of_neighbours, lost_token,
        logits_of_first_token, last_layer_goes_on_with_others,
    )),
]
NAMES = [
    *(bug.__name__ for bug in BUGS[:7]), "decode_position_ahead", "first_group_for_all", "last_slot_repeated",
    "tokens_of_neighbours", "lost_token", "logits_of_first_token", "last_layer_goes_on_with_others",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("gemma2", tmp_path_factory.mktemp("bugs"), tie_word_embeddings=False)


@pytest.fixture(scope="module")
def reference(model: Path) -> dict[tuple[str, int], list[int]]:
    return run(model, PLAIN, requests()).answers


def test_without_a_bug_the_answers_agree(model: Path, reference: dict[tuple[str, int], list[int]]) -> None:
    assert run(model, OPTIONS, requests()).answers == reference


@pytest.mark.reliability("P-16")
@pytest.mark.parametrize("plant", BUGS, ids=NAMES)
def test_bug_is_caught(
    plant: Callable[[Patch], None], model: Path, reference: dict[tuple[str, int], list[int]], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    try:
        answers = run(model, OPTIONS, requests()).answers
    except (AssertionError, IndexError, RuntimeError, ValueError):
        return                                           # it broke outright: caught too
    assert answers != reference


def test_noise_that_depends_on_the_row_is_caught(model: Path, monkeypatch: Patch) -> None:
    asked = requests()
    for number, request in enumerate(asked):
        request.params = SamplingParams(temperature=1.0, max_tokens=8, seed=number)
    alone = run(model, PLAIN, asked).answers
    assert run(model, OPTIONS, asked).answers == alone

    def make(add_row: Any) -> Any:
        def by_row(self: Sampler, row: int, added: Any) -> None:
            added.seed = np.uint64(added.seed) ^ np.uint64(row)
            added.seed = int(added.seed)
            add_row(self, row, added)
        return by_row

    change(monkeypatch, Sampler, "add_row", make)
    assert run(model, OPTIONS, asked).answers != alone
