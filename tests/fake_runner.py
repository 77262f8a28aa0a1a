"""A device half without arithmetic: it obeys plans, and checks that every KV slot a token would read is the right one.

Each slot is stamped with a hash of all tokens up to its position. Before a row computes, every visible position must carry
the stamp of its own prefix; a stale block, a wrong table, a lost token or a block reused too early shows at once. The
next token is a function of the prefix alone, so answers can be compared whatever else was in the batch.
"""

from __future__ import annotations

import zlib
from collections import deque

import numpy as np

from ridgeline.kv_spec import KVGroupSpec
from ridgeline.messages import RowAdded, StepPlan, StepResult, Want


class SlotError(AssertionError):
    pass


def stamp(previous: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(8, "little", signed=True), previous)


def next_token(prefix_stamp: int, vocab: int) -> int:
    return zlib.crc32(b"next", prefix_stamp) % vocab


class _Row:
    def __init__(self, added: RowAdded) -> None:
        self.tokens = added.token_ids.tolist()
        self.length = added.num_computed
        self.tables = [table.tolist() for table in added.block_ids]
        self.stamps = [0]
        for token in self.tokens:
            self.stamps.append(stamp(self.stamps[-1], token))

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self.stamps.append(stamp(self.stamps[-1], token))


class FakeRunner:
    def __init__(self, groups: list[KVGroupSpec], num_blocks: int, vocab: int = 64, fail_tokens: tuple[int, ...] = ()) -> None:
        self.groups, self.vocab, self.fail_tokens = groups, vocab, fail_tokens
        self.slots = [dict[int, int]() for _ in groups]
        self.num_blocks = num_blocks
        self.rows: dict[int, _Row] = {}
        self.results: deque[StepResult] = deque()
        self.reads = 0
        self._sampled: tuple[StepPlan, list[int | None]] | None = None

    def submit(self, plan: StepPlan) -> None:
        for row in plan.removed.tolist():
            self.rows.pop(row, None)
        for added in plan.added:
            if added.row in self.rows:
                raise SlotError(f"row {added.row} is added twice")
            self.rows[added.row] = _Row(added)
        for group, row, index, block in plan.appended.tolist():
            table = self.rows[row].tables[group]
            if index != len(table):
                raise SlotError(f"row {row} got table entry {index}, it has {len(table)}")
            table.append(block)
        if len(set(plan.rows.tolist())) != len(plan.rows):
            raise SlotError("a row is scheduled twice")
        tokens: list[int | None] = []
        for row, count, want in zip(plan.rows.tolist(), plan.num_tokens.tolist(), plan.want.tolist(), strict=True):
            tokens.append(self._compute(row, count, Want(want)))
        self._sampled = (plan, tokens)

    def _slot(self, row: _Row, group: int, position: int) -> int:
        size = self.groups[group].block_size
        block = row.tables[group][position // size]
        if not 0 < block < self.num_blocks:
            raise SlotError(f"group {group}: position {position} has block {block}")
        return block * size + position % size

    def _compute(self, number: int, count: int, want: Want) -> int | None:
        row = self.rows[number]
        start, end = row.length, row.length + count
        if count <= 0 or end > len(row.tokens):
            raise SlotError(f"row {number} computes {start}..{end} of {len(row.tokens)} known tokens")
        for group, spec in enumerate(self.groups):
            for position in range(start, end):
                self.slots[group][self._slot(row, group, position)] = row.stamps[position + 1]
            first = 0 if spec.window is None else max(0, start - spec.window + 1)
            for position in range(first, end):
                self.reads += 1
                if self.slots[group].get(self._slot(row, group, position)) != row.stamps[position + 1]:
                    raise SlotError(f"row {number}, group {group}: position {position} holds somebody else's KV")
        row.length = end
        if not want & Want.TOKEN:
            return None
        if end != len(row.tokens):
            raise SlotError(f"row {number} samples before its known tokens are computed")
        token = next_token(row.stamps[-1], self.vocab)
        row.push(token)
        return token

    def sample(self, masks: None = None) -> None:
        assert self._sampled is not None
        plan, tokens = self._sampled
        self._sampled = None
        values = np.array([[-1 if token is None else token] for token in tokens], np.int32).reshape(-1, 1)
        self.results.append(
            StepResult(
                step=plan.step,
                tokens=values,
                num_new=(values[:, 0] >= 0).astype(np.int32),
                lengths=np.array([self.rows[row].length for row in plan.rows.tolist()], np.int32),
                failed={i: "planted" for i, token in enumerate(tokens) if token in self.fail_tokens},
                useful=plan.total_tokens,
            )
        )

    def collect(self) -> StepResult:
        return self.results.popleft()


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
