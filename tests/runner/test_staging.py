"""The integers of the largest steps fit into the buffer they are sent in, and every step of a shape puts them at the same
places. As on a GPU, without one: tensors on the meta device, a buffer that only counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.cache.manager import KVManager
from ridgeline.layers.batch import Batch, GroupBatch
from ridgeline.messages import Request, RowAdded, StepPlan, StepResult, Want
from ridgeline.ops.attention import kernel_prefill_hopper
from ridgeline.ops.attention.attention_arguments import partial_floats, prefix_shares
from ridgeline.runner import device_rows as module
from ridgeline.runner import shared_prefix
from ridgeline.runner.device_rows import DeviceRows
from ridgeline.runner.start.warm_up import warm_up
from ridgeline.runner.to_host import MOST_ROOMS, Landing
from ridgeline.sampling_params import MAX_LOGPROBS, SamplingParams
from ridgeline.scheduler.scheduler import Scheduler, SchedulerLimits
from ridgeline.sizes.graph_shapes import GraphShapes, Shape
from ridgeline.sizes.kv_spec import KVGroupSpec

NONE = np.zeros(0, np.int32)


class Counted:
    """Staging, of which only the places are kept."""

    def __init__(self, num_bytes: int, num_buffers: int, device: torch.device) -> None:
        self.room = num_bytes
        self.most = self.used = 0
        self.places: list[tuple[int, str, tuple[int, ...]]] = []

    def begin(self) -> None:
        self.used = 0
        self.places = []

    def put(self, values: np.ndarray) -> Tensor:
        self.places.append((self.used, str(values.dtype), values.shape))
        self.used = -(-(self.used + values.nbytes) // 16) * 16
        self.most = max(self.most, self.used)
        assert self.used <= self.room, f"{self.used} bytes are put where {self.room} fit"
        return torch.empty(values.shape, dtype=getattr(torch, str(values.dtype)), device="meta")

    def skip_to(self, place: int) -> None:
        self.used = place

    def send(self) -> None:
        """Nowhere."""

    def send_at_once(self) -> None:
        self.begin()


class Device:
    """Rows as a GPU has them, whose prompts are cut into tiles and whose prefixes are found."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, max_rows: int, max_step_tokens: int, *, heads: int = 32, kv_heads: int = 8,
        windows: tuple[int | None, ...] = (None,), block_size: int = 16, max_model_len: int = 4096,
        deterministic: bool = False,
    ) -> None:
        monkeypatch.setattr(module, "Staging", Counted)
        monkeypatch.setattr(kernel_prefill_hopper, "wants_tiles", lambda *model: True)
        monkeypatch.setattr(shared_prefix, "FEWEST_SAVED", 1)
        monkeypatch.setattr(shared_prefix, "FEWEST_ROWS", 2)
        groups = [KVGroupSpec((layer,), window, block_size, kv_heads, 128) for layer, window in enumerate(windows)]
        self.rows = DeviceRows(
            groups, max_rows, max_model_len, max_step_tokens, 1, torch.device("meta"), heads, True, deterministic
        )
        self.num_groups, self.block_size, self.max_model_len = len(groups), block_size, max_model_len

    @property
    def staging(self) -> Counted:
        staging = self.rows._staging
        assert isinstance(staging, Counted)
        return staging

    def pack(self, counts: list[int], past: int, shape: Shape | None = None, pairs: bool = False, skip: int = 0) -> Any:
        """A step of new rows, all with the same blocks, or two and two. All but the first `skip` sample."""
        numbers = np.arange(len(counts), dtype=np.int32)
        size = -(-(past + max(counts)) // self.block_size)
        blocks = [
            [np.arange(1, 1 + size, dtype=np.int32) + (row // 2 * size if pairs else 0)] * self.num_groups
            for row in range(len(counts))
        ]
        added = [
            RowAdded(row, np.zeros(past + (count if count > 1 else 0), np.int32), past, past, blocks[row], SamplingParams(), 0)
            for row, count in enumerate(counts)
        ]
        want = np.full(len(counts), Want.TOKEN, np.int8)
        want[:skip] = 0
        plan = StepPlan(0, NONE, added, NONE.reshape(0, 4), numbers, np.array(counts, np.int32), want)
        self.rows.apply(plan)
        return self.rows.pack(plan, shape)


def largest_steps(max_rows: int, budget: int) -> list[list[int]]:
    """Rows beside each other that put the most of everything: decodes, prompts of few tokens, prompts of many."""
    some = max(1, min(max_rows, budget) // 2)
    left = budget - some
    each = max(2, left // max(1, max_rows - some))
    prompts = min(max_rows - some, left // each)
    longest = [1] * (max_rows - 1) + [budget - max_rows + 1] if budget > max_rows else []
    return [counts for counts in (
        [1] * min(max_rows, budget), [each] * min(max_rows, budget // each), [1] * some + [each] * prompts, longest,
    ) if counts]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 64, 64, 64)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (128, 1)])
@pytest.mark.parametrize(("max_rows", "budget"), [(1, 2), (7, 512), (64, 64), (100, 48), (160, 2048)])
def test_the_largest_steps_fit(
    monkeypatch: pytest.MonkeyPatch, max_rows: int, budget: int, heads: int, kv_heads: int,
    windows: tuple[int | None, ...], deterministic: bool,
) -> None:
    device = Device(
        monkeypatch, max_rows, budget, heads=heads, kv_heads=kv_heads, windows=windows, deterministic=deterministic
    )
    shapes = GraphShapes(max_rows, budget)
    for counts in largest_steps(max_rows, budget):
        decodes = sum(count == 1 for count in counts)
        prompts = len(counts) - decodes
        for past in (16, 2000 if max(counts) < 2000 else 16):
            device.pack(counts, past, pairs=past == 16)
            shape = shapes.fit(decodes, prompts, sum(counts) - decodes)
            if shape is not None:
                device.pack(counts, past, shape)
    device.pack([1] * min(max_rows, budget), 16, Shape(max_rows))        # also where a step may not have as many tokens


@pytest.mark.parametrize(("windows", "deterministic"), [((None,), False), ((None,), True), ((None, 64), False)])
def test_steps_of_a_shape_put_the_same_things_at_the_same_places(
    monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, ...], deterministic: bool
) -> None:
    """All but the last five, which no graph reads: picks, single tokens and their rows, changes of the tables."""
    device = Device(monkeypatch, 32, 512, windows=windows, deterministic=deterministic)
    for shape, steps in {
        Shape(16): [[1] * 16, [1] * 9],
        Shape(8, 2, 128): [[1] * 8 + [100, 28], [1] * 5 + [2], [1, 3, 128 - 3], [17]],
        Shape(0, 4, 256): [[250, 2, 2, 2], [3]],
    }.items():
        found: dict[Any, list[Any]] = {}
        for counts in steps:
            for past, pairs in ((16, False), (1500, False), (1500, True)):
                batch = device.pack(counts, past, shape, pairs)
                read = [batch.tokens, batch.positions, batch.query_start, batch.kv_len, batch.table_rows, batch.query_tiles]
                key = tuple(group.prefix is not None for group in batch.groups)
                shapes = [None if each is None else each.shape for each in read]
                found.setdefault(key, []).append((device.staging.places[:-5], shapes))
        for alike in found.values():
            assert all(each == alike[0] for each in alike)


class Copied(DeviceRows):
    """Rows whose device is a memory of its own on the host, so that it can be looked at."""

    def __init__(self, groups: list[KVGroupSpec], max_rows: int, deterministic: bool) -> None:
        super().__init__(groups, max_rows, 400, 64, 1, torch.device("meta"), 8, True, deterministic)
        self.last_token = torch.zeros_like(self.last_token, device="cpu")
        self.tables.place_on_device(torch.zeros_like(self.tables.on_device, device="cpu"))
        self._ones = torch.arange(max_rows + 1, dtype=torch.int32)
        device = self._staging._device
        assert device is not None
        self._staging._device = torch.zeros_like(device, device="cpu")

    def seen(self, batch: Batch, shares: bool) -> dict[str, Any]:
        """Everything that a forward pass reads."""
        names = (
            "positions", "query_start", "kv_len", "logits_index", "sample_rows", "device_picks", "last_rows", "table_rows",
            "query_tiles",
        )
        found: dict[str, Any] = {name: getattr(batch, name) for name in names}
        for number, group in enumerate(batch.groups):
            found[f"slots {number}"] = group.slots
            if group.prefix is not None:
                found |= {f"prefix {number} {name}": getattr(group.prefix, name) for name in group.prefix.__slots__}
            if shares and group.shares is not None:
                found |= {f"share {number} {name}": getattr(group.shares, name) for name in group.shares.__slots__}
        found = {name: None if each is None else each.tolist() for name, each in found.items()}
        tables = self.tables.on_device[:, : self.max_rows].tolist()
        return found | {"picks": batch.picks.tolist(), "tables": tables}


slow = pytest.mark.slow


@pytest.mark.parametrize(("padded", "deterministic", "windows"), [
    # Each of them both ways on every commit, all together in the slow tests.
    pytest.param(padded, deterministic, windows, marks=() if (padded == deterministic) == (windows == (None,)) else slow)
    for padded in (False, True) for deterministic in (False, True) for windows in ((None,), (None, 24))
])
def test_rows_that_go_on_are_as_if_packed(
    monkeypatch: pytest.MonkeyPatch, padded: bool, deterministic: bool, windows: tuple[int | None, ...]
) -> None:
    """Two devices obey the same plans; one packs every step, the other only those in which something else happens."""
    monkeypatch.setattr(shared_prefix, "FEWEST_SAVED", 1)
    monkeypatch.setattr(shared_prefix, "FEWEST_ROWS", 2)
    groups = [KVGroupSpec((layer,), window, 4, 2, 64) for layer, window in enumerate(windows)]
    scheduler = Scheduler(SchedulerLimits(6, 64, 400), KVManager(groups, 900))
    packs, goes_on = Copied(groups, 6, deterministic), Copied(groups, 6, deterministic)
    shapes = GraphShapes(6, 64)
    rng, asked, advanced, key = np.random.default_rng(0), 0, 0, b""
    while asked < 9 or scheduler.has_work:
        if asked < 9 and rng.random() < 0.02 + 0.5 * (asked < 4):
            tokens = [7] * 9 + rng.integers(0, 50, rng.integers(1, 12)).tolist()
            scheduler.add(Request(str(asked), tokens, SamplingParams(max_tokens=int(rng.integers(1, 110)))))
            asked += 1
        plan = scheduler.schedule()
        if not len(plan.rows):
            continue
        decodes = int((plan.num_tokens == 1).sum()) if plan.total_tokens == len(plan.rows) else 0
        shape = shapes.fit(decodes, 0, 0) if padded and decodes else None
        before, key = key, plan.rows.tobytes() + plan.num_tokens.tobytes()
        same = key == before and not plan.added
        packs.apply(plan)
        goes_on.apply(plan)
        expected = packs.seen(packs.pack(plan, shape), shares=deterministic)
        batch = goes_on.advance() if same else None
        advanced += batch is not None
        batch = batch or goes_on.pack(plan, shape)
        assert goes_on.seen(batch, shares=deterministic) == expected
        np.testing.assert_array_equal(goes_on.length, packs.length)
        for group, window in zip(batch.groups, windows, strict=True):
            check_shares(group, batch.kv_len.tolist() if decodes else [], window)
        ones = np.ones(len(plan.rows), np.int32)
        samples = plan.want & np.int8(Want.TOKEN)
        scheduler.update(StepResult(plan.step, ones[:, None] * 3, samples.astype(np.int32), packs.length[plan.rows]))
    assert advanced > 150 and any(each.steps for each in goes_on.prefixes) != deterministic


@pytest.mark.parametrize("windows", [(None,), (None, 24)])
def test_a_single_prompt_is_as_if_packed_with_others(monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, ...]) -> None:
    monkeypatch.setattr(kernel_prefill_hopper, "wants_tiles", lambda *model: True)
    groups = [KVGroupSpec((layer,), window, 4, 2, 64) for layer, window in enumerate(windows)]
    packs, knows = Copied(groups, 6, deterministic=False), Copied(groups, 6, deterministic=False)
    rng, shape = np.random.default_rng(1), Shape(0, 1, 64)
    for step in range(12):
        row, past, count = int(rng.integers(0, 6)), int(rng.integers(0, 40)), int(rng.integers(2, 64))
        blocks = [rng.integers(1, 800, -(-(past + count) // 4)).astype(np.int32) for _ in groups]
        added = RowAdded(row, rng.integers(0, 99, past + count).astype(np.int32), past + count, past, blocks, SamplingParams(), 0)
        plan = StepPlan(
            step, NONE, [added], NONE.reshape(0, 4), np.array([row], np.int32), np.array([count], np.int32), np.ones(1, np.int8)
        )
        packs._prompts.clear()
        batches = []
        for rows in (packs, knows):
            rows.apply(plan)
            batches.append(rows.pack(plan, shape))
        expected, found = (rows.seen(batch, True) for rows, batch in zip((packs, knows), batches, strict=True))
        assert found == expected
        assert batches[1].tokens.tolist() == batches[0].tokens.tolist()
        assert batches[1].tokens[:count].tolist() == added.token_ids[past:].tolist()
        np.testing.assert_array_equal(packs.length, knows.length)
        last = [each.sampled for each in batches]
        assert last[0] is not None and last[1] is not None
        assert packs.seen(last[0], True) == knows.seen(last[1], True)


def test_prompt_tokens_that_come_one_by_one_are_packed() -> None:
    """They are the host's, each another one."""
    rows = Copied([KVGroupSpec((0,), None, 4, 2, 64)], 2, deterministic=False)
    one, nothing = np.ones(1, np.int32), np.zeros(1, np.int8)
    added = [RowAdded(0, np.array([5, 6, 7], np.int32), 3, 0, [one], SamplingParams(), 0)]
    for position in range(3):
        plan = StepPlan(position, NONE, added, NONE.reshape(0, 4), one - 1, one, nothing)
        rows.apply(plan)
        added = []
        assert rows.advance() is None
        batch = rows.pack(plan, Shape(1))
        assert (rows.last_token[0], batch.positions.tolist()) == (5 + position, [position])


def check_shares(group: GroupBatch, lengths: list[int], window: int | None) -> None:
    """Every share of every row that there is by now has a place in the list."""
    for row, length in enumerate(lengths):
        assert group.shares is not None
        prefix = 0 if group.prefix is None else int(group.prefix.prefix_len[row])
        read = length - prefix if window is None else min(length, window)
        used, first = max(1, -(-read // int(group.shares.size[row]))), int(group.shares.first_item[row])
        assert group.shares.item_row[first : first + used].tolist() == [row] * used


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (32, 8), (64, 64), (128, 1)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_workspace_suffices_for_every_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, deterministic: bool
) -> None:
    for max_rows in (1, 3, 17, 60):
        device = Device(monkeypatch, max_rows, 512, heads=heads, kv_heads=kv_heads, deterministic=deterministic)
        workspace = device.rows.schedule.workspace
        assert workspace is not None and len(workspace.arrived) == max_rows * kv_heads
        for count in range(1, max_rows + 1):
            (group,) = device.pack([1] * count, 600).groups
            cut = 0 if group.prefix is None else prefix_shares(count, heads // kv_heads, kv_heads, 132)
            needed = partial_floats(count * cut + len(group.shares.item_row), heads, 128)
            assert needed <= len(workspace.partials)
            assert deterministic or count == 1 or group.prefix is not None


@pytest.mark.parametrize(("max_rows", "budget", "max_model_len", "expected"), [
    (1024, 8192, 131072, [8192, 639, 1024, 1024, 1280, 1280, 1023, 1023]),
    (4, 8192, 1000, [3996, 639, 4, 4, 896, 896, 3, 3]),
    (8192, 8192, 100, [8192, 639, 8192, 8192, 64, 64, 8191, 8191]),
    (64, 48, 4096, [48, 48, 48, 1, 1, 47, 47]),          # gate and up are written in the largest step
    (2, 1024, 600, [1024, 639, 2, 2, 512, 512, 2, 2]),        # every number of decodes is recorded
    (1, 1024, 2000, [1024, 639, 1, 1, 1024, 1024, 1, 1]),
    (256, 300, 2000, [300, 256, 256, 256, 256, 255, 255]),
])
def test_what_is_run_before_the_first_request(max_rows: int, budget: int, max_model_len: int, expected: list[int]) -> None:
    plans: list[StepPlan] = []
    masked: list[int] = []

    class Recorder:
        model = SimpleNamespace(config=SimpleNamespace(vocab_size=100))
        rows = SimpleNamespace(device=torch.device("cpu"))

        def submit(self, plan: StepPlan) -> None:
            plans.append(plan)

        def sample(self, masks: np.ndarray | None) -> None:
            masked.append(0 if masks is None else masks.size)

        def collect(self) -> None: ...

        def remove(self, rows: np.ndarray) -> None:
            assert len(rows) == min(max_rows, budget)

    warm_up(Recorder(), 1, max_rows, budget, max_model_len)      # type: ignore[arg-type]
    assert [plan.total_tokens for plan in plans] == expected
    assert all(plan.num_tokens.max() < max_model_len and len(plan.rows) <= max_rows for plan in plans)
    costly = (0, len(plans) - 2)
    assert masked == [4 * len(plan.rows) * (place in costly) for place, plan in enumerate(plans)]
    assert all(plans[place].added[0].params.logprobs == MAX_LOGPROBS for place in costly)
    first = plans[0]
    # Log-probabilities of a prompt whose logits take as much as they may at once, as far as there are so many tokens.
    scored = min(257, max_model_len - 1, first.total_tokens - len(first.rows) + 1)
    assert first.num_tokens[-1] >= scored and bool(first.want[-1] & Want.PROMPT_LOGPROBS) == (scored > 1)
    assert not any((plan.want & Want.PROMPT_LOGPROBS).any() for plan in plans[1:])


def test_a_landing_does_not_grow_with_the_mixtures_of_drafts_it_has_seen() -> None:
    """There are some hundred thousand. What comes back is the same, before and after some are forgotten."""
    landing = Landing(64, torch.device("cpu"))
    mixtures = [(count, rows) for rows in range(1, 65) for count in range(rows, 8 * rows, 3)]
    assert len(mixtures) > 2 * MOST_ROOMS
    for count, rows in mixtures:
        whole, tokens, failed, accepted = landing.room(count, rows)
        tokens.copy_(torch.arange(count)), failed.copy_(torch.arange(count) % 3 == 0), accepted.copy_(torch.arange(rows) + 7)
        landing.fetch(whole, count)
        assert np.array_equal(landing.chosen()[0], np.arange(count))
        assert np.array_equal(landing.chosen()[1], np.arange(count) % 3 == 0)
        assert np.array_equal(landing.accepted(rows), np.arange(rows) + 7)
        assert len(landing._rooms) <= MOST_ROOMS
