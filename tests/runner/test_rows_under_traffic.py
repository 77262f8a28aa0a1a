"""Random traffic through the scheduler and the runner, as on a GPU: the device is a memory of its own on the host, of which a
model without arithmetic reads what kernels would read. Rows join, leave, are preempted and come back between steps that are
packed and steps that only advance; answers must be those of `expected_answer`, whatever was in the batch before.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fake_runner import FakeRunner, next_token, stamp
from host_simulation import SETUPS, VOCAB, Setup, Simulation, random_request
from torch import Tensor

from ridgeline.distributed.pipeline import WHOLE
from ridgeline.layers.batch import Batch, GroupBatch
from ridgeline.messages import BlockOp, Request, StepPlan, StepResult
from ridgeline.ops.attention import kernel_prefill_hopper
from ridgeline.ops.sampling.greedy import greedy as choose_greedy
from ridgeline.runner import device_rows, shared_prefix
from ridgeline.runner.device_rows import EVERY_HIDDEN, DeviceRows, leading_decodes
from ridgeline.runner.forward import Computed, best_tokens
from ridgeline.runner.runner import Runner
from ridgeline.runner.sampler import Sampler
from ridgeline.runner.staging import Staging
from ridgeline.runner.to_host import greedy_bytes
from ridgeline.sizes.graph_shapes import PROMPT_ROWS, GraphShapes, Shape

CERTAIN = 1e4                        # the logit of the token that must come, where all others are 0


class LateCopies(Staging):
    """Whose device is a memory of its own. A GPU reads what is sent some time before its step is collected: until then the
    host's buffer has to stay as it is."""

    def __init__(self, num_bytes: int, num_buffers: int, device: torch.device) -> None:
        super().__init__(num_bytes, num_buffers, device)
        self._device = torch.zeros(num_bytes, dtype=torch.uint8)
        self._read: deque[list[tuple[Tensor, Tensor]]] = deque()     # by step: what is sent, and what it was

    def begin(self) -> None:
        super().begin()
        self._read.append([])

    def send(self) -> None:
        sent = self._host[self._turn][self._sent : self.used]
        super().send()
        self._read[-1].append((sent, sent.clone()))

    def send_at_once(self) -> None:
        super().send_at_once()
        self._read[-1].clear()

    def collected(self) -> None:
        assert all(torch.equal(sent, was) for sent, was in self._read.popleft()), "a buffer was filled before it was read"


class Rows(DeviceRows):
    """Whose device is a memory of its own."""

    def __init__(self, setup: Setup, groups: list[Any], deterministic: bool) -> None:
        super().__init__(
            groups, setup.max_rows, setup.max_model_len, setup.max_step_tokens, setup.depth, torch.device("meta"), 4, True,
            deterministic, drafts=setup.alpha is not None,
        )
        self.last_token = torch.zeros_like(self.last_token, device="cpu")
        self.tables.place_on_device(torch.zeros_like(self.tables.on_device, device="cpu"))
        self._ones = torch.arange(setup.max_rows + 1, dtype=torch.int32)
        self.advanced = self.known_prompts = 0

    def advance(self) -> Batch | None:
        batch = super().advance()
        self.advanced += batch is not None
        return batch

    def _pack_prompt(self, plan: StepPlan, shape: Shape) -> Batch:
        self.known_prompts += 1
        return super()._pack_prompt(plan, shape)


NOT_READ = {"picks", "device_picks", "query_start_host", "kv_len_host", "own_kernel"}     # by a graph


def what_a_graph_reads(part: Any, name: str = "batch") -> Iterator[Any]:
    """Of each tensor of a batch its place and form, and all numbers: a captured graph keeps them."""
    if isinstance(part, Tensor):
        yield name, part.data_ptr(), part.shape, part.stride(), part.dtype
    elif is_dataclass(part):
        for field in fields(part):
            if field.name not in NOT_READ:
                yield from what_a_graph_reads(getattr(part, field.name), f"{name}.{field.name}")
    elif isinstance(part, list | tuple):
        for number, each in enumerate(part):
            yield from what_a_graph_reads(each, f"{name}[{number}]")
    else:
        yield name, part


class StampForward:
    """A slot of the KV memory holds a group, a token, and a stamp of all tokens up to it."""

    def __init__(self, rows: Rows, setup: Setup, padded: bool) -> None:
        self._rows, self._setup = rows, setup
        self._shapes = GraphShapes(setup.max_rows, setup.max_step_tokens, setup.max_step_tokens) if padded else None
        if self._shapes is not None:                     # small steps are recorded, too
            self._shapes.prompt_tokens = sorted({4, 8, setup.max_step_tokens})
            self._shapes.most_tokens = setup.max_step_tokens + setup.max_rows
        self._kv: dict[int, tuple[int, int, int]] = {}
        self._random, self.larger = random.Random(setup.max_rows), 0
        self.replays = self.prefixes = self.drafted = self.padded_drafts = 0
        self.stood_in = self.passing = False
        self._shape: Shape | None = None                 # of the newest step
        self.read: dict[Any, list[Any]] = {}             # by graph: what it reads, and where that is
        self.shared: deque[int] = deque()                # of each step: KV positions that are not read again

    def shape(self, plan: StepPlan, greedy: bool) -> Shape | None:
        self._shape = self._shape_of(plan)
        return self._shape

    def _shape_of(self, plan: StepPlan) -> Shape | None:
        if self._shapes is None or (plan.want & EVERY_HIDDEN).any():
            return None
        decodes = leading_decodes(plan)
        if plan.width is not None:
            alone = decodes == len(plan.rows)
            return self._shapes.fit_drafts(decodes, plan.total_tokens, 1 + int(plan.width.max())) if alone else None
        own = self._shapes.fit(decodes, len(plan.rows) - decodes, plan.total_tokens - decodes)
        return own if own is None or not own.prompts else self._stand_in(own)

    def _stand_in(self, own: Shape) -> Shape:
        """For prompts a larger shape in each second step, as a graph that is captured may be larger than a step's own."""
        assert self._shapes is not None
        most, tokens = self._setup.max_rows, self._shapes.prompt_tokens
        made = (Shape(*each) for each in itertools.product(range(own.decodes, most), PROMPT_ROWS, tokens))
        larger = [each for each in made if each.holds(own) and each != own and each.decodes + each.prompts <= most
                  and each.tokens <= self._shapes.most_tokens]
        if not larger or self._random.random() < 0.5:
            return own
        self.larger += 1
        return self._random.choice(larger)

    def prepare(self) -> bool:
        return False

    def run(self, batch: Batch, greedy: bool) -> Computed:
        last_token = self._rows.last_token
        if self._shape is not None:                      # GraphForward would replay a graph of the first such step
            key = (self._shape, greedy, tuple(group.prefix is not None for group in batch.groups))
            found = list(what_a_graph_reads(batch))
            assert self.read.setdefault(key, found) == found, f"{key}: a graph would read other places"
            self.replays += self.read[key] is not found
        if batch.last_rows is not None:
            batch.tokens[: len(batch.last_rows)] = last_token[batch.last_rows]
        if batch.newest is not None:
            assert batch.last_rows is None and batch.work is not None and batch.work.queries > 1
            batch.tokens[batch.newest >= 0] = last_token[batch.newest[batch.newest >= 0]]
            self.drafted += 1
            self.padded_drafts += len(batch.tokens) > int(batch.query_start[-1])
        assert batch.table_rows is not None
        borders, lengths = batch.query_start.tolist(), batch.kv_len.tolist()
        chosen = torch.zeros((len(batch.tokens), VOCAB))
        for place, (row, length) in enumerate(zip(batch.table_rows.tolist(), lengths, strict=True)):
            for token in range(borders[place], borders[place + 1]):
                position = length - borders[place + 1] + token
                if length:
                    assert int(batch.positions[token]) == position
                    self._write(batch, row, token, position)
                    chosen[token, next_token(self._check(batch, place, row, position), VOCAB)] = CERTAIN
                else:
                    assert row == self._setup.max_rows
                    assert all(int(group.slots[token]) < self._setup.block_size for group in batch.groups)
        for group in batch.groups:
            assert (group.slots[borders[-1] :] < self._setup.block_size).all()       # of nobody
        self._check_sampled(batch, borders, lengths)
        self.shared.append(max(_saved(group) for group in batch.groups))
        logits = chosen[batch.logits_index]
        if not len(logits):
            return Computed(chosen, None)
        if not greedy:
            return Computed(chosen, logits)
        room = torch.empty(greedy_bytes(len(last_token)), dtype=torch.uint8)

        def choose(tokens: torch.Tensor, failed: torch.Tensor, rows: torch.Tensor | None) -> None:
            choose_greedy(logits, tokens, failed, rows, None if rows is None else last_token)

        return Computed(chosen, None, best_tokens(choose, batch, room, last_token, self._rows.late.surplus))

    def copy(self, block_ops: list[BlockOp]) -> None:
        """All sources are read before any target is written."""
        size = self._setup.block_size
        pairs = [(op.source * size + offset, op.target * size + offset) for op in block_ops for offset in range(size)]
        self._kv |= {target: self._kv[source] for source, target in pairs if source in self._kv}

    def _slot(self, group: int, row: int, position: int) -> int:
        size = self._setup.block_size
        block = int(self._rows.tables.on_device[group, row, position // size])
        assert block, "a token is in nobody's block"
        return block * size + position % size

    def _write(self, batch: Batch, row: int, token: int, position: int) -> None:
        value = self._kv[self._slot(0, row, position - 1)][2] if position else 0
        for number, group in enumerate(batch.groups):
            slot = int(group.slots[token])
            assert slot == self._slot(number, row, position)
            self._kv[slot] = (number, int(batch.tokens[token]), stamp(value, int(batch.tokens[token])))

    def _check(self, batch: Batch, place: int, row: int, position: int) -> int:
        """Every visible position goes on from the one before it, and everybody's share of the reading is listed."""
        value = 0
        for number, (group, window) in enumerate(zip(batch.groups, self._setup.windows, strict=True)):
            first = 0 if window is None else max(0, position - window + 1)
            seen = [self._kv[self._slot(number, row, each)] for each in range(first, position + 1)]
            before = 0 if first == 0 else None
            for owner, token, value in seen:
                assert owner == number and (before is None or value == stamp(before, token))
                before = value
            if group.shares is not None and place < len(group.shares.size):
                self._check_reads(group, place, row, position + 1, window)
        return value

    def _check_reads(self, group: GroupBatch, place: int, row: int, length: int, window: int | None) -> None:
        prefix, shares = group.prefix, group.shares
        assert shares is not None
        shared = 0
        if prefix is not None and int(prefix.prefix_len[place]):
            self.prefixes += 1
            shared = int(prefix.prefix_len[place])
            members, starts = prefix.members.tolist(), zip(prefix.tile_first.tolist(), prefix.tile_count.tolist(), strict=True)
            tiles = [tile for tile, (first, count) in enumerate(starts) if place in members[first : first + count]]
            assert len(tiles) == 1 and int(prefix.tile_len[tiles[0]]) == shared < length
            blocks = shared // self._setup.block_size
            table = self._rows.tables.on_device[0]
            assert torch.equal(table[int(prefix.tile_row[tiles[0]]), :blocks], table[row, :blocks])
        read = length - shared if window is None else min(length, window)
        used, first = max(1, -(-read // int(shares.size[place]))), int(shares.first_item[place])
        assert shares.item_row[first : first + used].tolist() == [place] * used

    def _check_sampled(self, batch: Batch, borders: list[int], lengths: list[int]) -> None:
        """The last layer's view of the step: the same rows, one query each."""
        ends = {end - 1: place for place, end in enumerate(borders[1:]) if end > borders[place]}
        if batch.newest is not None:                     # every position of a row with drafts
            ends = {token: place for place, end in enumerate(borders[1:]) for token in range(borders[place], end)}
        for at, row in zip(batch.logits_index.tolist(), batch.sample_rows.tolist(), strict=True):
            if row != self._setup.max_rows:              # padding may have anybody's
                assert batch.table_rows is not None and int(batch.table_rows[ends[at]]) == row
        last = batch.sampled
        if last is not None and last.table_rows is not None:
            assert last.table_rows.tolist() == batch.sample_rows.tolist()
            for place, (at, length) in enumerate(zip(batch.logits_index.tolist(), last.kv_len.tolist(), strict=True)):
                if length:
                    assert length == int(batch.positions[at]) + 1
                    for group, window in zip(last.groups, self._setup.windows, strict=True):
                        self._check_reads(group, place, int(last.table_rows[place]), length, window)


def _saved(group: GroupBatch) -> int:
    if group.prefix is None:
        return 0
    return int(((group.prefix.tile_count - 1).clamp(min=0) * group.prefix.tile_len).sum())


class Traffic(Simulation):
    """The simulation, with the real runner beside the fake one that checks the plans."""

    def __init__(self, setup: Setup, padded: bool, deterministic: bool) -> None:
        super().__init__(setup)
        self.rows = Rows(setup, self.groups, deterministic)
        self.forward = StampForward(self.rows, setup, padded)
        sampler = Sampler(setup.max_rows, VOCAB, set(setup.eos), "cpu", torch.float32)
        model: Any = SimpleNamespace(logits=lambda hidden: hidden, expert_reads=None, stage=WHOLE)
        comm: Any = SimpleNamespace(size=1, waited=0.0, tensor=SimpleNamespace(size=1, broadcast=lambda tokens: tokens))
        buffers: Any = SimpleNamespace(run=self.forward.copy)
        runner = Runner(model, self.forward, self.rows, sampler, buffers, comm)
        runner.knows_at_once = True                     # its logits are on the CPU
        fake, self.runner = self.runner, _Both(self.runner, runner, self.forward, self.rows._staging)      # type: ignore[assignment]
        self.fake = fake

    def check_index(self) -> None:
        """The fake runner's memory is looked at."""
        both, self.runner = self.runner, self.fake
        super().check_index()
        self.runner = both


class _Both:
    def __init__(self, fake: FakeRunner, runner: Runner, forward: StampForward, staging: Any) -> None:
        self._fake, self._runner, self._forward, self._staging = fake, runner, forward, staging

    def submit(self, plan: StepPlan) -> None:
        self._fake.submit(plan)
        self._runner.submit(plan)

    def sample(self, masks: None = None) -> None:
        self._fake.sample()
        self._runner.sample()

    def collect(self) -> StepResult:
        self._staging.collected()
        expected, found = self._fake.collect(), self._runner.collect()
        for name in ("tokens", "num_new", "lengths"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert found.shared == self._forward.shared.popleft()
        assert found.logprobs.keys() == expected.logprobs.keys()
        assert found.prompt_logprobs.keys() == expected.prompt_logprobs.keys()
        return found


def greedy_or_drawn(rng: random.Random, name: str, setup: Setup, stems: list[list[int]]) -> Request:
    request = random_request(rng, name, setup, stems)
    params = request.params
    params.temperature = rng.choice([0.0, 0.0, 0.0, 1.0])
    if rng.random() < 0.5:                               # most steps go on from the one before: let some answers be long
        params.max_tokens, params.logprobs, params.prompt_logprobs, params.ignore_eos = None, None, None, True
    return request


def run_traffic(setup: Setup, seed: int, padded: bool, deterministic: bool, num_requests: int = 10) -> Traffic:
    rng = random.Random(seed)
    traffic = Traffic(setup, padded, deterministic)
    stems = [[rng.randrange(VOCAB) for _ in range(rng.randrange(4, 28))] for _ in range(2)]
    left = num_requests
    while left or traffic.scheduler.has_work:
        while left and rng.random() < 0.15:
            left -= 1
            traffic.add(greedy_or_drawn(rng, f"r{left}", setup, stems))
        if traffic.open and rng.random() < 0.02:
            name, index = rng.choice(sorted(traffic.open))
            traffic.abort(name, index if rng.random() < 0.4 else None)
        traffic.step()
        assert traffic.steps < 200 * num_requests, "somebody never ends"
    traffic.check_end()
    return traffic


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of any length are shared, prompts are cut into tiles, and copies take their time."""
    monkeypatch.setattr(shared_prefix, "FEWEST_SAVED", 1)
    monkeypatch.setattr(shared_prefix, "FEWEST_ROWS", 2)
    monkeypatch.setattr(kernel_prefill_hopper, "wants_tiles", lambda *model: True)
    monkeypatch.setattr(device_rows, "Staging", LateCopies)


def check_seeds(seeds: range, setup: Setup) -> None:
    for seed in seeds:
        traffic = run_traffic(setup, seed, padded=seed % 2 == 0, deterministic=seed % 3 == 2)
        assert traffic.rows.advanced, "no step went on from the one before"


NAMES = [name for name in SETUPS if name != "failures"]  # this model's logits are always finite


@pytest.mark.parametrize(("name", "depth"), [(name, place % 2) for place, name in enumerate(NAMES)])
def test_answers_are_right_whatever_joins_and_leaves(name: str, depth: int) -> None:
    """Every setup, with and without a step in flight by turns; the slow test has all of them, and many seeds."""
    first = NAMES.index(name) + depth
    check_seeds(range(first, first + 1), replace(SETUPS[name], depth=depth))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_many_answers_are_right_whatever_joins_and_leaves(name: str, depth: int) -> None:
    check_seeds(range(100, 108), replace(SETUPS[name], depth=depth))


@pytest.mark.parametrize(("name", "depth"), [
    ("plain", 0), ("windows", 1),
    *(pytest.param(name, depth, marks=pytest.mark.slow) for name in NAMES for depth in (0, 1)),
])
def test_answers_are_right_with_drafts(name: str, depth: int) -> None:
    """In any mixture of widths, filled up to shapes and not, beside prompts and alone."""
    drafted = padded = replays = 0
    for seed in (1, 2):
        traffic = run_traffic(replace(SETUPS[name], depth=depth, alpha=0.6), seed, seed == 1, False, num_requests=6)
        drafted += traffic.forward.drafted
        padded += traffic.forward.padded_drafts
        replays += traffic.forward.replays
    assert (drafted > 5 and padded and replays > 5) or SETUPS[name].max_step_tokens < 4


def test_the_traffic_has_what_it_is_for() -> None:
    """Steps that advance, prompts in a shape that was seen and in one larger than their own, shared prefixes, and rows that were
    taken and came back."""
    runs = [run_traffic(replace(SETUPS[name], depth=1), 0, True, False) for name in ("plain", "tight_windows")]
    assert sum(run.rows.advanced for run in runs) > 100
    assert all(run.scheduler.counters.preemptions for run in runs)
    assert sum(run.rows.known_prompts for run in runs) and sum(run.forward.prefixes for run in runs)
    assert sum(run.forward.larger for run in runs) > 10 and all(run.forward.replays > 50 for run in runs)


def test_a_row_that_somebody_else_has_now_is_not_taken_for_the_one_before() -> None:
    """The plan's rows, tokens and wishes are those of the step before; only the answer is another's, and its token the host's."""
    traffic = Traffic(replace(SETUPS["plain"], num_blocks=40, eos=frozenset()), padded=True, deterministic=False)
    traffic.ask("a", [1, 2, 3], 20, temperature=0)
    traffic.ask("b", [4, 5, 6], 6, temperature=0)
    plans = []
    while len(plans) < 20 and traffic.scheduler.has_work:
        if ("b", 0) in traffic.ends and len(traffic.requests) == 2:
            traffic.ask("c", [7], 6, temperature=0)
        plans.append(traffic.step())
    joined = next(step for step, plan in enumerate(plans) if step and plan.added)
    before, after = plans[joined - 1 : joined + 1]
    assert [before.rows.tolist(), before.num_tokens.tolist()] == [after.rows.tolist(), after.num_tokens.tolist()]
    traffic.drain()
    assert traffic.rows.advanced > 5
