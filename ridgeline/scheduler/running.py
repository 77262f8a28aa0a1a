"""The running sequences: their rows, their KV blocks, and how both change on the device with the next plan.

How many tokens a row computes, and which sequences are admitted, is the scheduler's business.
"""

from __future__ import annotations

import numpy as np

from ridgeline.cache.manager import Hit, KVManager, SequenceBlocks
from ridgeline.messages import RowAdded, StepPlan, Want
from ridgeline.scheduler.bookkeeping import Delta, Steady
from ridgeline.scheduler.policy import AGED_PRIORITY
from ridgeline.scheduler.row_table import Rows
from ridgeline.scheduler.sequence import Sequence

NONE = np.zeros(0, np.int32)
NO_BLOCKS = NONE.reshape(0, 4)
ON_SAMPLED = np.int8(Want.TOKEN | Want.LOGPROBS | Want.HIDDEN)   # what comes with the last known token
SCORED = np.int8(Want.PROMPT_LOGPROBS)                           # prompt tokens that cost the head and passes over its logits
ON_PROMPT = np.int8(Want.PROMPT_LOGPROBS | Want.HIDDEN_SUM)      # what comes with every prompt token


class Running:
    def __init__(self, manager: KVManager, max_rows: int) -> None:
        self.rows = Rows(max_rows)
        self.delta = Delta()
        self.vacated = False                                             # a sequence has ended since rows were empty
        self._manager = manager
        self._unpublished: list[tuple[Sequence, SequenceBlocks, int]] = []       # and known tokens once the step has run

    def join(self, sequence: Sequence, hit: Hit, blocks: SequenceBlocks, step: int) -> int:
        """It gets a row with these blocks, the hit's among them."""
        table, start = self.rows, hit.num_tokens
        sequence.blocks = blocks
        sequence.turn.admitted_at = step
        row = table.add(sequence, wanted(sequence), len(sequence.tokens), start)
        table.hold(row, blocks.num_blocks)
        table.committed[row] = blocks.committed
        self.delta.added.append(row_added(sequence, start))
        self.delta.block_ops += self._manager.copies(hit, blocks)
        return row

    def leave(self, sequence: Sequence) -> None:
        """It gives back its row. Its blocks are free once no step in flight can touch them."""
        assert sequence.blocks is not None
        if self._manager.pool.in_flight:
            # These blocks became findable when the step was planned, but its result will not be checked for this sequence:
            # un-index them.
            self._manager.distrust(sequence.blocks, int(self.rows.committed[sequence.row]))
        self._manager.free(sequence.blocks)
        sequence.blocks = None
        row = self.rows.remove(sequence)
        self.delta.removed.append(row)
        self.delta.appended = [entry for entry in self.delta.appended if entry[1] != row]

    def append(self, row: int, blocks: SequenceBlocks, entries: list[tuple[int, int, int]]) -> None:
        """Its tables have grown, by these (group, index, block)."""
        self.delta.appended += [(group, row, index, block) for group, index, block in entries]
        self.rows.hold(row, blocks.num_blocks)

    def grow(self, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Blocks for these rows, up to this number of tokens, for all at once; for none, if the pool has too few or a row lacks
        several. Returns the places of rows that still lack blocks."""
        table, manager = self.rows, self._manager
        held = table.num_blocks[rows]
        missing = ends - held * manager.block_size               # tokens
        short = (missing > 0).nonzero()[0]
        if not len(short) or int(missing.max()) > manager.block_size:
            return short
        return short[:0] if self.grow_each(rows, short) else short

    def grow_each(self, rows: np.ndarray, short: np.ndarray) -> bool:
        """A block more for the rows at these places. False: the pool has too few, and nothing has changed."""
        if not len(short):
            return True
        table, manager, chosen = self.rows, self._manager, rows[short]
        listed, first = chosen.tolist(), table.num_blocks[chosen].tolist()
        sequences = [sequence for row in listed if (sequence := table.sequences[row]) is not None]
        if (taken := manager.grow_each([sequence.blocks for sequence in sequences if sequence.blocks is not None])) is None:
            return False
        groups = len(manager.groups)
        for group in range(groups):
            self.delta.appended += zip([group] * len(listed), listed, first, taken[group::groups], strict=True)
        table.num_blocks[chosen] += 1
        table.num_held += len(listed)
        return True

    def take_plan(self, step: int, steady: Steady, tokens: np.ndarray | None, recomputed: int = 0) -> StepPlan:
        """With what has changed since the plan before. `tokens`: of each row, where that is not what `steady` says."""
        delta, self.delta = self.delta, Delta()
        return StepPlan(
            step=step,
            removed=np.array(delta.removed, np.int32) if delta.removed else NONE,
            added=delta.added,
            appended=np.array(delta.appended, np.int32) if delta.appended else NO_BLOCKS,
            rows=steady.plan_rows,
            num_tokens=steady.num_tokens if tokens is None else tokens,
            want=steady.want,
            block_ops=delta.block_ops,
            recomputed=recomputed,
        )

    def publish_later(self, row: int, num_tokens: int) -> None:
        """The row computes that many prompt tokens in the step being planned: blocks that it fills can be shared at once.

        "At once" is before the next lookup; the step itself does not wait for it. Not for a row with one token: where all
        rows have one, a kernel writes and attends in one go, and no row may read what another has just written.
        """
        sequence = self.rows.sequences[row]
        assert sequence is not None and sequence.blocks is not None
        end = int(self.rows.computed[row]) + num_tokens
        self._unpublished.append((sequence, sequence.blocks, min(end, len(sequence.tokens))))

    def publish(self) -> None:
        for sequence, blocks, num_tokens in self._unpublished:
            if sequence.blocks is blocks:                        # it has them still
                self._manager.publish(blocks, sequence.tokens, num_tokens)
        self._unpublished.clear()

    def hit(self, sequence: Sequence, use_cache: bool) -> Hit:
        """What need not be computed: the last known token always is, to have logits to sample from."""
        salt, limit = sequence.request.cache_salt, len(sequence.tokens) - 1
        if wanted(sequence) & ON_PROMPT:
            limit = 0                                            # every prompt position needs its logits or hidden state
        hit = self._manager.lookup(sequence.tokens, salt, limit if use_cache and sequence.request.prefix_caching else 0)
        leader = sequence.leader
        if leader is not None and leader.blocks is not None:
            limit = min(limit, leader.num_prompt)
            forked = self._manager.fork(leader.blocks, salt, limit)
            if forked.num_tokens > hit.num_tokens:
                hit = forked
            self._manager.add_copy(hit, leader.blocks, min(limit, int(self.rows.computed[leader.row])))
        return hit

    def victim(self, asking: Sequence) -> Sequence | None:
        """The sequence to preempt: never the most important running one, never one more important than the one that asks.

        Among the rest the least important priority, then the cheapest to recompute. None: only the one that asks is left.
        """
        table = self.rows
        candidates = [sequence for sequence in table.running()[1:] if sequence.turn.priority >= asking.turn.priority]
        candidates.sort(key=lambda each: (-each.turn.priority, int(table.computed[each.row]), -each.turn.order))
        for sequence in candidates:
            if sequence.blocks is not None and self._manager.exclusive_blocks(sequence.blocks):
                return sequence
        return candidates[0] if candidates else None             # all are shared: several must go before a block is free

    def promote_aged(self, deadline: int) -> None:
        """As waiting ones (WaitingQueue.promote_aged): unfinished prompts must not starve behind more important ones either."""
        if deadline > 0:
            for sequence in self.rows.running():
                if not sequence.prefill.done and sequence.turn.arrived_at <= deadline:
                    sequence.turn.priority = AGED_PRIORITY
                    self.rows.rank_again()

    def promised(self, rows: np.ndarray) -> int:
        """Blocks that these rows will take to finish their prompts and sample one token."""
        table, manager = self.rows, self._manager
        if not manager.grows:
            return 0
        missing = -(-table.known[rows] // manager.block_size) - table.num_blocks[rows]
        return (int(np.maximum(missing, 0).sum()) + len(rows)) * len(manager.groups)


def wanted(sequence: Sequence) -> int:
    """Want flags."""
    params = sequence.request.params
    want = int(Want.TOKEN)
    if params.logprobs is not None:
        want |= Want.LOGPROBS
    # The n answers have one prompt: the first one reports it.
    if params.prompt_logprobs is not None and sequence.leader is None and not sequence.prefill.logprobs_sent:
        want |= Want.PROMPT_LOGPROBS
    if params.pooling is not None:
        want |= Want.HIDDEN if params.pooling == "last" else Want.HIDDEN_SUM
    return want


def row_added(sequence: Sequence, num_computed: int) -> RowAdded:
    assert sequence.blocks is not None
    return RowAdded(
        row=sequence.row,
        token_ids=np.frombuffer(sequence.tokens.tobytes(), np.int32),
        num_prompt=sequence.num_prompt,
        num_computed=num_computed,
        block_ids=[np.array(table, np.int32) for table in sequence.blocks.tables],
        params=sequence.request.params,
        seed=sequence.seed,
        bad_words_token_ids=sequence.request.bad_words_token_ids,
    )
