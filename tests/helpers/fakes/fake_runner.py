"""A device half without arithmetic: it obeys plans, and checks that every KV slot a token would read is the right one.

Each slot is stamped with its group and a hash of all tokens up to its position. Before a row computes, every visible
position must carry the stamp of its own prefix; a stale block, a wrong table or a lost token shows at once. A step in
flight may touch its slots at any moment until it is collected, so they are checked when it is submitted and again when
it is collected: a block reused too early shows too. The next token is a function of the prefix alone, so answers can be
compared whatever else was in the batch.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ridgeline.messages import BlockOp, Logprobs, RowAdded, StepPlan, StepResult, Want
from ridgeline.sizes.kv_spec import KVGroupSpec

Held = tuple[int, int]                   # group, stamp


class SlotError(AssertionError):
    pass


def stamp(previous: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(8, "little", signed=True), previous)


def next_token(prefix_stamp: int, vocab: int) -> int:
    return zlib.crc32(b"next", prefix_stamp) % vocab


class _Row:
    def __init__(self, added: RowAdded) -> None:
        self.tokens: list[int] = []
        self.num_prompt = added.num_prompt
        self.length = added.num_computed
        self.tables = [table.tolist() for table in added.block_ids]
        self.stamp = 0                                   # of all tokens
        self.held: list[list[Held]] = [[] for _ in self.tables]      # by group and position: what its slot will hold
        for token in added.token_ids.tolist():
            self.push(token)

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self.stamp = stamp(self.stamp, token)
        for group, held in enumerate(self.held):
            held.append((group, self.stamp))


@dataclass(slots=True)
class _Step:
    """A step between submit and collect."""

    plan: StepPlan
    tokens: list[list[int]] = field(default_factory=list)            # by place in the batch: what was sampled
    rejected: int = 0
    lengths: list[int] = field(default_factory=list)
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    touched: list[tuple[list[int], list[Held]]] = field(default_factory=list)    # slots, and what each holds
    newest: set[int] = field(default_factory=set)                        # slots that it writes
    older: set[int] = field(default_factory=set)                         # slots that were written before, by whoever


class FakeRunner:
    def __init__(
        self, groups: list[KVGroupSpec], num_blocks: int, vocab: int = 64, fail_tokens: tuple[int, ...] = ()
    ) -> None:
        self.groups, self.vocab, self.fail_tokens = groups, vocab, fail_tokens
        self.num_blocks = num_blocks
        self.slots: dict[int, Held] = {}                 # one memory for all groups
        self.rows: dict[int, _Row] = {}
        self.reads = 0
        self.guessed = 0                                 # drafts that were computed
        self._submitted: _Step | None = None
        self._steps: deque[_Step] = deque()

    def submit(self, plan: StepPlan) -> None:
        for row in plan.removed.tolist():
            if row not in self.rows:
                raise SlotError(f"row {row} is removed, it was not there")
            del self.rows[row]
        for added in plan.added:
            if added.row in self.rows:
                raise SlotError(f"row {added.row} is added twice")
            self.rows[added.row] = _Row(added)
        for group, row, index, block in plan.appended.tolist():
            table = self.rows[row].tables[group]
            if index != len(table):
                raise SlotError(f"row {row} got table entry {index}, it has {len(table)}")
            table.append(block)
        self._copy(plan.block_ops)
        if len(set(plan.rows.tolist())) != len(plan.rows):
            raise SlotError("a row is scheduled twice")
        step = _Step(plan)
        work = zip(plan.rows.tolist(), plan.num_tokens.tolist(), plan.want.tolist(), strict=True)
        for place, (number, count, want) in enumerate(work):
            if number not in self.rows:
                raise SlotError(f"row {number} is scheduled, it is not there")
            row = self.rows[number]
            if plan.width is not None and plan.width[place]:
                self._verify(row, number, place, step)
                continue
            self._compute(row, number, count, step)
            if want & Want.PROMPT_LOGPROBS:
                first, last = row.length - count + 1, min(row.length + 1, row.num_prompt)
                if last > first:
                    step.prompt_logprobs[place] = fake_logprobs(row.tokens[first:last])
            step.tokens.append([self._sample(row, number)] if want & Want.TOKEN else [])
            step.lengths.append(row.length)
        # A kernel that has one token of each row writes and attends in one go.
        if plan.total_tokens == len(plan.rows) and step.newest & step.older:
            raise SlotError(f"step {plan.step}: a row sees what another one of single tokens writes")
        self._check(step)
        self._submitted = step

    def _copy(self, block_ops: list[BlockOp]) -> None:
        """All sources are read before any target is written."""
        if len({op.target for op in block_ops}) != len(block_ops):
            raise SlotError("two blocks are copied to the same place")
        copied = {}
        for op in block_ops:
            if op.kind != "copy" or not (0 < op.source < self.num_blocks and 0 < op.target < self.num_blocks):
                raise SlotError(f"{op} cannot be")
            size = self.groups[op.group].block_size
            for offset in range(size):
                held = self.slots.get(op.source * size + offset)
                if held is not None:
                    copied[op.target * size + offset] = held
        self.slots |= copied

    def _slots(self, row: _Row, group: int, first: int, end: int) -> list[int]:
        """Of positions, a block at a time: long prompts have millions."""
        size, table, slots = self.groups[group].block_size, row.tables[group], list[int]()
        for index in range(first // size, -(-end // size)):
            block, begin = table[index] if index < len(table) else -1, max(first, index * size)
            if not 0 < block < self.num_blocks:
                raise SlotError(f"group {group}: position {begin} has block {block}")
            shift = (block - index) * size
            slots += range(begin + shift, min(end, (index + 1) * size) + shift)
        return slots

    def _compute(self, row: _Row, number: int, count: int, step: _Step) -> None:
        start, end = row.length, row.length + count
        if count <= 0 or end > len(row.tokens):
            raise SlotError(f"row {number} computes {start}..{end} of {len(row.tokens)} known tokens")
        for group, spec in enumerate(self.groups):
            first = 0 if spec.window is None else max(0, start - spec.window + 1)
            slots, held = self._slots(row, group, first, end), row.held[group][first:end]
            self.slots.update(zip(slots[start - first :], held[start - first :], strict=True))
            step.newest.update(slots[start - first :])
            if step.plan.total_tokens == len(step.plan.rows):        # only then it matters
                step.older.update(slots[: start - first])
            step.touched.append((slots, held))
        row.length = end

    def _verify(self, row: _Row, number: int, place: int, step: _Step) -> None:
        """A row with drafts: the token at each position is sampled, and drafts count while they are equal."""
        plan, start = step.plan, row.length
        assert plan.width is not None and plan.drafts is not None and plan.drafts_from is not None
        width = int(plan.width[place])
        if plan.num_tokens[place] != 1 + width or start + 1 != len(row.tokens):
            raise SlotError(f"row {number} has {width} drafts, and computes {plan.num_tokens[place]} tokens from {start} on")
        path, first = plan.drafts[place].tolist(), start + 1 - int(plan.drafts_from[place])
        if first < 0:
            raise SlotError(f"row {number}: the drafts are for a position that is not reached yet")
        guesses = [path[index] if index < len(path) else -1 for index in range(first, first + width)]
        self.guessed += width
        said: list[int] = []
        self._compute(row, number, 1, step)
        for guess in [*guesses, None]:
            token = self._sample(row, number)
            said.append(token)
            if token in self.fail_tokens or guess != token:
                break
            self._compute(row, number, 1, step)
        for position in range(row.length, start + 1 + width):        # rejected: its KV is written, and never read
            for group in range(len(self.groups)):
                (slot,) = self._slots(row, group, position, position + 1)
                self.slots[slot] = (group, -1)
                step.newest.add(slot)
        step.rejected += start + 1 + width - row.length
        step.tokens.append(said)
        step.lengths.append(row.length)

    def _check(self, step: _Step) -> None:
        """Every slot the step reads or writes holds what it should."""
        for slots, held in step.touched:
            self.reads += len(slots)
            found = list(map(self.slots.get, slots))
            if found != held:
                slot, (group, _) = next(each for each in zip(slots, held, strict=True) if self.slots.get(each[0]) != each[1])
                raise SlotError(f"step {step.plan.step}, group {group}: slot {slot} holds somebody else's KV")

    def _sample(self, row: _Row, number: int) -> int:
        if row.length != len(row.tokens):
            raise SlotError(f"row {number} samples before its known tokens are computed")
        token = next_token(row.stamp, self.vocab)
        row.push(token)
        return token

    def sample(self, masks: None = None) -> None:
        assert self._submitted is not None
        self._steps.append(self._submitted)
        self._submitted = None

    def start_over(self) -> bool:
        """Rows and the step that could not be launched are forgotten; whoever goes on is added again."""
        assert not self._steps, "steps that ran are collected first"
        self._submitted = None
        self.rows.clear()
        return True

    def collect(self) -> StepResult:
        step = self._steps.popleft()
        self._check(step)
        most = 1 + (0 if step.plan.width is None else int(step.plan.width.max(initial=0)))
        values = np.full((len(step.tokens), most), -1, np.int32)
        num_new = np.zeros(len(step.tokens), np.int32)
        failed = {}
        for place, said in enumerate(step.tokens):
            values[place, : len(said)] = said
            num_new[place] = len(said)
            if said and said[-1] in self.fail_tokens:
                failed[place] = "planted"
                num_new[place] -= step.plan.width is not None and bool(step.plan.width[place])
        logprobs = {
            place: fake_logprobs(said)
            for place, said in enumerate(step.tokens)
            if said and step.plan.want[place] & Want.LOGPROBS
        }
        return StepResult(
            step=step.plan.step,
            tokens=values,
            num_new=num_new,
            lengths=np.array(step.lengths, np.int32),
            logprobs=logprobs,
            prompt_logprobs=step.prompt_logprobs,
            failed=failed,
            useful=step.plan.total_tokens - step.plan.recomputed - step.rejected,
            recomputed=step.plan.recomputed,
            rejected=step.rejected,
        )


def fake_logprobs(tokens: list[int]) -> Logprobs:
    """Log-probabilities that say nothing but which tokens they belong to."""
    ids = np.array(tokens, np.int32)
    return Logprobs(ids, -ids.astype(np.float32), np.ones_like(ids), ids[:, None], -ids[:, None].astype(np.float32))


def following(prefix: list[int], count: int, vocab: int = 64) -> list[int]:
    """The tokens that follow these."""
    return expected_answer(prefix, count, vocab=vocab)


def expected_answer(prompt: list[int], limit: int, stop_ids: frozenset[int] = frozenset(), vocab: int = 64) -> list[int]:
    """What a request must produce, whatever happens around it."""
    value, answer = 0, []
    for token in prompt:
        value = stamp(value, token)
    while len(answer) < limit:
        token = next_token(value, vocab)
        answer.append(token)
        value = stamp(value, token)
        if token in stop_ids:
            break
    return answer
