"""Bugs planted in the host half, one at a time: each must be caught by the tests that are said to guard against it.

A plant is a change to the source text of one function, made for the length of a test. If the text is not there any more
the test says so: then the code has moved on, and the plant has to follow. Most are hunted with random traffic through
the simulation, which runs clean without them (test_scheduler.test_random_traffic has the same seeds); some need the one
test that was written for them.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType

import pytest
import test_batch_levelling
import test_drafted_steps
import test_fairness
import test_kv_manager
import test_prefix_cache
import test_scheduler
from host_simulation import SETUPS, run_random
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_block_pool import PoolMachine, SlabMachine

from ridgeline.cache import prefix_cache
from ridgeline.cache.block_pool import BlockPool, SlabPool
from ridgeline.cache.manager import KVManager
from ridgeline.cache.prefix_cache import PrefixCache
from ridgeline.scheduler import draft_slots, fairness
from ridgeline.scheduler import running as running_module
from ridgeline.scheduler import scheduler as scheduler_module
from ridgeline.scheduler.answers import Answers
from ridgeline.scheduler.bookkeeping import InFlight
from ridgeline.scheduler.joining import Joining
from ridgeline.scheduler.live_requests import LiveRequests
from ridgeline.scheduler.policy import ContinuousBatching, StaticBatching
from ridgeline.scheduler.row_table import Rows
from ridgeline.scheduler.running import Running
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.scheduler.sequence import Prefill, Sequence
from ridgeline.scheduler.waiting_queue import WaitingQueue
from ridgeline.sizes import batch_levelling
from ridgeline.sizes.batch_levelling import Level

CAUGHT = (AssertionError, LookupError, ValueError)       # a failed check (SlotError is one), or the code falls over

Hunt = Callable[[pytest.MonkeyPatch], None]


def traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests through every setup, at every depth."""
    for seed in range(6):
        for setup in SETUPS.values():
            for depth in (0, 1, 2):
                run_random(replace(setup, depth=depth), seed)


def drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with drafts."""
    for seed in range(4):
        for setup in SETUPS.values():
            for depth in (0, 1):
                run_random(replace(setup, depth=depth, alpha=0.7), seed)
    for name in ("test_the_limit_is_met_exactly", "test_a_stop_inside_an_accepted_run", "test_drafts_do_not_hold_up_prompts"):
        getattr(test_drafted_steps, name)()


def pool_model(monkeypatch: pytest.MonkeyPatch) -> None:
    run_state_machine_as_test(PoolMachine, settings=_quick)


def slab_model(monkeypatch: pytest.MonkeyPatch) -> None:
    run_state_machine_as_test(SlabMachine, settings=_quick)


def manager_model(monkeypatch: pytest.MonkeyPatch) -> None:
    run_state_machine_as_test(test_kv_manager.ManagerMachine, settings=_quick)


_quick = settings(                                       # found is enough: nothing is made smaller
    max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, phases=[Phase.generate]
)


def collisions(monkeypatch: pytest.MonkeyPatch) -> None:
    test_prefix_cache.test_forced_hash_collisions_never_reuse_a_wrong_block(8, monkeypatch)


def remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    test_prefix_cache.test_a_remembered_path_changes_nothing((None, 5))


def one(test: Callable[..., None], *arguments: object) -> Hunt:
    """A single test."""
    return lambda monkeypatch: test(*arguments)


@dataclass(frozen=True)
class Plant:
    name: str
    owner: type | ModuleType
    function: str
    old: str
    new: str
    hunt: Hunt = traffic


PLANTS = [
    # -- the pool
    Plant("release without waiting for steps in flight", BlockPool, "release", "self._retired < self._submitted", "False"),
    Plant("release waits for the oldest step only", BlockPool, "release", "(self._submitted, [])",
          "(self._retired + 1, [])"),
    Plant("an evicted block stays in the index", BlockPool, "allocate", "self._on_evict(block)", "pass"),
    Plant("the newest cached block is evicted first", BlockPool, "allocate", "last=False", "last=True", pool_model),
    Plant("cached blocks go before free ones", BlockPool, "allocate", "if self._free:", "if not self._cached:", pool_model),
    Plant("a held block stays evictable", BlockPool, "hold", "del self._cached[block]", "pass"),
    Plant("a released block is lost", BlockPool, "_drop", "self._free.append(block)", "pass"),
    Plant("a release drops only once", BlockPool, "_unheld_now", "np.subtract.at(self._counts, places, 1)",
          "self._counts[places] = 0"),
    Plant("a slab is free when its first block is", SlabPool, "_drop", "self._slab_left[first] == 0",
          "self._slab_left[first] == self._slab - 1", slab_model),
    # -- the prefix tree
    Plant("lookup ignores the salt", PrefixCache, "root", "salt.encode()", 'b""'),
    Plant("token ids are not compared", PrefixCache, "find", "node.tokens == tokens and ", "", collisions),
    Plant("parents are not compared", PrefixCache, "find", " and self._same(node.parent, parent)", "", collisions),
    Plant("roots are compared by hash", PrefixCache, "_same", "a.tokens == b.tokens", "a.key == b.key", collisions),
    Plant("a second commit replaces the block", PrefixCache, "insert", "not kept[group] and ", ""),
    Plant("an evicted block is still found", PrefixCache, "evict", "0 if each == block else each", "each"),
    Plant("a node goes though somebody stands on it", PrefixCache, "_prune", "not walk.users and ", ""),
    Plant("a node stays for ever", PrefixCache, "evict", "self._prune(node)", "pass"),
    # -- the manager
    Plant("the window frees one block too early", KVManager, "commit", "num_computed - window + 1",
          "num_computed - window + 1 + self.block_size"),
    Plant("the window is one token short", KVManager, "commit", "num_computed - window + 1", "num_computed - window + 2"),
    Plant("the window frees nothing", KVManager, "_slide", "if behind > done:", "if False:"),
    Plant("what the window freed is freed again", KVManager, "_slide", "table[done:behind] = [NULL_BLOCK] * (behind - done)",
          "pass"),
    Plant("a hit may lack the window's first block", KVManager, "_valid_length", "-(-(window - 1) // self.block_size)",
          "(window - 1) // self.block_size", one(test_kv_manager.test_a_hit_behind_a_window_needs_only_what_is_in_sight)),
    Plant("a hit may have holes", KVManager, "_valid_length", "if not block:", "if False:"),
    Plant("a hit holds too little of the window", KVManager, "_hit", "-(-(window - 1) // self.block_size)",
          "(window - 1) // self.block_size"),
    Plant("commit is one block ahead", KVManager, "publish", "num_computed // size",
          "num_computed // self.block_size + 1"),
    Plant("commit is one block behind", KVManager, "publish", "full = num_computed // size",
          "full = num_computed // self.block_size - 1", manager_model),
    Plant("commit takes the next block's tokens", KVManager, "publish", "tokens[index * size : index * size + size]",
          "tokens[(index + 1) * size : (index + 2) * size]"),
    Plant("a fork shares the partial block", KVManager, "fork", "limit // self.block_size", "-(-limit // self.block_size)"),
    Plant("a fork copies what is not computed yet", KVManager, "add_copy", "computed - hit.num_tokens",
          "self.block_size - 1"),
    Plant("a copy is not made", KVManager, "copies", "enumerate(hit.copied)", "()"),
    Plant("a copy goes to the wrong block", KVManager, "copies", "hit.num_tokens // self.block_size",
          "hit.num_tokens // self.block_size - 1"),
    Plant("a hit's blocks are not held", KVManager, "start", "self.pool.hold(shared)", "pass"),
    Plant("a hit is committed again", KVManager, "start", "hit.node, hit.num_tokens // self.block_size)", "hit.node, 0)"),
    Plant("a start does not see that blocks are short", KVManager, "start", "self.pool.num_allocatable < new", "False and new",
          manager_model),
    Plant("lookup goes past its limit", PrefixCache, "walk", "limit - size + 1", "limit + 1", remembered),
    Plant("a remembered path goes past what is the same", prefix_cache, "_in_common", "same // size - 1", "same // size",
          remembered),
    Plant("a remembered path goes past the limit", prefix_cache, "_in_common", "min(len(newest[0]), limit)",
          "len(newest[0])", remembered),
    Plant("a remembered block that is gone is taken", prefix_cache, "_in_common", "if gone in columns",
          "if False", remembered),
    Plant("no block for the last token", KVManager, "grow", "-(-num_tokens // self.block_size) - first",
          "num_tokens // self.block_size - first"),
    Plant("new blocks at the wrong place", KVManager, "grow", "(group, first + offset, block)", "(group, offset, block)"),
    Plant("a new block at the wrong place", Running, "grow_each", "table.num_blocks[chosen].tolist()",
          "(table.num_blocks[chosen] - 1).tolist()"),
    Plant("rows exchange their new blocks", KVManager, "grow_each", "taken[group::groups]", "taken[group::groups][::-1]"),
    Plant("only the first group is freed", KVManager, "free", "in blocks.tables", "in blocks.tables[:1]"),
    # -- the scheduler
    Plant("known is not incremented", Scheduler, "_plan", "table.known[rows[sampled]] += 1", "pass"),
    Plant("computed is not incremented", Scheduler, "_plan", "table.computed[rows] = ends", "pass"),
    Plant("a sample before all known tokens are computed", Scheduler, "_plan", "ends >= table.known[rows]",
          "ends >= table.num_prompt[rows]"),
    Plant("the limit is one too high", Answers, "_said", "len(sequence.tokens) >= sequence.limit",
          "len(sequence.tokens) > sequence.limit"),
    Plant("a row goes on at its limit", Scheduler, "_give_to_running", "table.known[rows] < table.limit[rows]",
          "table.known[rows] <= table.limit[rows]"),
    Plant("a stop is not noticed", Answers, "_said", "if token in sequence.stop_ids", "if False"),
    Plant("preemption loses the promised token", Answers, "_outcome", "if sequence.finished:",
          "if sequence.finished or sequence.row < 0:"),
    Plant("a sequence is back before its promised token", Sequence, "ready", "self.num_promised == 0 and ", "",
          one(test_scheduler.test_a_preempted_sequence_waits_for_its_promised_token)),
    Plant("an answer shares a prompt that is not computed", Sequence, "ready", "self.leader.prefill.done or ", "True or ",
          one(test_scheduler.test_answers_wait_until_their_prompt_is_computed)),
    Plant("a preempted leader still counts as done", Prefill, "restart", "self.done = False", "pass",
          one(test_scheduler.test_answers_wait_for_a_preempted_leader)),
    Plant("appended entries are lost", Running, "leave", "if entry[1] != row", "if False"),
    Plant("entries are appended to rows that are gone", Running, "leave", "if entry[1] != row", "if True"),
    Plant("the device is not told of removed rows", Running, "leave", "self.delta.removed.append(row)", "pass"),
    Plant("the blocks of an ended sequence are kept", Running, "leave", "self._manager.free(sequence.blocks)", "pass"),
    Plant("an ended sequence keeps its row", Answers, "end", "if sequence.row >= 0:", "if False:"),
    Plant("those who have ended stay in the queue", WaitingQueue, "tidy", "2 * self._num_ended > len(self.heap)", "False"),
    Plant("recomputed tokens count as new", Scheduler, "_write", "np.minimum(ends, table.lost[rows]) - starts",
          "np.minimum(ends, table.lost[rows]) - ends", one(test_scheduler.test_the_cheapest_running_sequence_is_preempted)),
    Plant("a level holds nobody back", Level, "places", "self.rows - num_running", "num_waiting",
          one(test_scheduler.test_short_answers_are_kept_to_run_beside_the_longest)),
    Plant("whoever leaves is replaced alone", Level, "places", "self.rows // _TOGETHER", "1",
          one(test_scheduler.test_rows_below_a_level_are_filled_together)),
    Plant("a level stays", ContinuousBatching, "places", "self._level = None", "pass",
          one(test_scheduler.test_a_level_ends_with_those_it_was_made_for)),
    Plant("a level is below what makes rows cheap", batch_levelling, "level_rows", "max(enough_rows, ", "max(0, ",
          lambda _: test_batch_levelling.test_so_many_rows_that_all_end_together([40] + [4] * 30, 8, 8)),
    Plant("a static batch goes on filling", StaticBatching, "places", "num_running == self._size and ", "",
          one(test_scheduler.test_a_static_batch_fills_while_prompts_take_several_steps)),
    Plant("every answer tells of the prompt", running_module, "wanted", "sequence.leader is None and ", ""),
    Plant("a finished request stays", LiveRequests, "remove", "live.remove(sequence)", "pass"),
    Plant("newcomers get the whole budget", Scheduler, "_give_to_running", "budget - spent", "budget"),
    Plant("the budget of a step is not shared", Scheduler, "_give_to_running", "budget - before",
          "self.limits.max_step_tokens"),
    Plant("a hit covers the last token", Running, "hit", "len(sequence.tokens) - 1", "len(sequence.tokens)"),
    Plant("the victim is the oldest", Running, "victim", "running()[1:]", "running()[:1]"),
    Plant("the only sequence preempts itself", Running, "victim", "else None", "else asking",
          one(test_scheduler.test_the_smallest_pool_that_fits_is_enough, 1)),
    Plant("the victim is the dearest", Running, "victim", "int(table.computed[each.row])",
          "-int(table.computed[each.row])", one(test_scheduler.test_the_cheapest_running_sequence_is_preempted)),
    Plant("a victim may be more important", Running, "victim", "sequence.turn.priority >= asking.turn.priority", "True",
          one(test_scheduler.test_a_victim_that_frees_nothing_is_passed_over)),
    Plant("admission forgets those who run", Joining, "_has_room", " + promised", "",
          one(test_scheduler.test_admission_leaves_room_for_those_who_run)),
    Plant("a hit pays for blocks it does not have", KVManager, "blocks_beyond", "- len(shared))", "- len(table))",
          one(test_kv_manager.test_blocks_beyond_a_hit)),
    Plant("preemption makes a request young again", Scheduler, "_preempt", "self._waiting.push(sequence)",
          "sequence.turn.arrived_at = self._step; self._waiting.push(sequence)",
          one(test_scheduler.test_preemption_makes_nobody_younger)),
    Plant("age is ignored", WaitingQueue, "promote_aged", "if aged:", "if False:",
          one(test_scheduler.test_a_stream_of_important_requests_starves_no_other, 0)),
    Plant("an old chunk commits blocks of the next stay", Answers, "_commit", " & there", "",
          one(test_scheduler.test_a_step_of_an_earlier_stay_commits_nothing)),
    Plant("prompt log-probabilities come twice", Prefill, "restart", "self.logprobs = ()", "pass",
          one(test_scheduler.test_prompt_logprobs_survive_a_preemption_in_the_prompt, 0)),
    Plant("a failed row's blocks stay in the cache", Answers, "_broken", "self._manager.distrust(sequence.blocks)", "pass",
          one(test_scheduler.test_a_failed_row_fails_alone, 0)),
    # -- drafts
    Plant("rejected drafts stay computed", Answers, "settle", "table.computed -= too_many", "pass", drafted),
    Plant("rejected drafts stay known", Answers, "settle", "table.known -= too_many", "pass", drafted),
    Plant("a later step keeps its end", InFlight, "shorten", "self.ends -= ", "_ = ", drafted),
    Plant("rejected drafts count as used slots", Answers, "settle", "table.num_used -= int(too_many.sum())", "pass", drafted),
    Plant("blocks of rejected drafts are published", Answers, "_commit_at", "result.lengths[places]",
          "flight.ends[places]", drafted),
    Plant("accepted drafts are published with other tokens", Answers, "_commit_at", "sequence.tokens, end",
          "sequence.tokens[::-1], end", drafted),
    Plant("what follows a stop is said", Answers, "_said", "del tokens[number:]", "pass", drafted),
    Plant("drafts go past the limit", scheduler_module, "give_drafts", "- known - 1", "- known + 2", drafted),
    Plant("a stop is overlooked", Answers, "_quick", " & ~ends", "", drafted),
    Plant("the limit is overlooked", Answers, "_quick", " & goes_on", "", drafted),
    Plant("tokens of a row are told of another sequence", Answers, "take_in",
          "flight.stays == self._running.rows.stay[flight.rows]", "flight.stays >= 0", drafted),
    Plant("a late token stays promised", Answers, "_outcome", "sequence.num_promised -= samples", "pass",
          one(test_scheduler.test_a_preempted_sequence_waits_for_its_promised_token)),
    Plant("a preempted sequence forgets its token in flight", Scheduler, "_preempt",
          "sequence.num_promised = sum(", "sequence.num_promised = 0 * sum(",
          one(test_scheduler.test_a_preempted_sequence_waits_for_its_promised_token)),
    Plant("rows do not count what has arrived", Answers, "_commit_said", "answers.arrived[sequence.row] = end + 1",
          "answers.arrived[sequence.row] += 0", drafted),
    Plant("drafts have no blocks", draft_slots, "_with_blocks", "+ 1 + width", "+ 1", drafted),
    Plant("guesses follow the wrong token", scheduler_module, "give_drafts", "DraftPlan(width, found.tokens,",
          "DraftPlan(width, np.roll(found.tokens, -1, 1),", one(test_drafted_steps.test_accepted_drafts_save_steps)),
    Plant("guesses follow the wrong token in a new batch", draft_slots, "_spread", "plan.tokens[places] = guesses",
          "plan.tokens[places, :-1] = guesses[:, 1:]", one(test_drafted_steps.test_accepted_drafts_save_steps)),
    Plant("drafted rows are not told apart in the order", draft_slots, "_ordered", "plan.start[order]", "plan.start", drafted),
    Plant("a result with too many tokens is taken", InFlight, "check", "(surplus >= 0) & ", "",
          one(test_drafted_steps.test_a_result_with_more_than_was_planned_is_an_error)),
    # -- fairness
    Plant("a cut prompt lends everything", fairness, "share", "left // LENT", "left",
          one(test_fairness.test_a_stream_of_short_prompts_makes_a_long_one_twice_as_long_at_most)),
    Plant("prompts of one length alternate", fairness, "overtakes", "SHORTER * prompt.rest <= cut.rest", "True",
          one(test_fairness.test_prompts_of_one_length_are_computed_in_order)),
    Plant("a blocked head is overtaken", Joining, "go_ahead",
          "if not self._has_room(self._hit(first), len(first.tokens), promised):", "if False:",
          one(test_fairness.test_the_first_in_line_is_not_overtaken_while_blocks_are_short)),
    Plant("cached tokens make a prompt long", Joining, "_look_up", "self._hit(sequence).num_tokens", "0",
          one(test_fairness.test_a_prompt_that_became_short_while_it_waited)),
    Plant("a running prompt never grows old", Running, "promote_aged", "if deadline > 0:", "if False:",
          one(test_fairness.test_a_running_prompt_grows_old_behind_important_ones)),
    Plant("those who go ahead stay in the queue", WaitingQueue, "remove", "if entry[1] is not sequence", ""),
    Plant("rows keep a stale order", Rows, "remove", "self._ranked = None", "pass"),
]


def planted(owner: type | ModuleType, name: str, old: str, new: str) -> object:
    """The function with its text changed, in the module it lives in."""
    found = inspect.getattr_static(owner, name)
    function = getattr(found, "fget", None) or getattr(found, "__func__", found)
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{name} has {old!r} {source.count(old)} times: the plant has to follow the code"
    made: dict[str, object] = {}
    code = compile("from __future__ import annotations\n" + source.replace(old, new), f"<planted {name}>", "exec")
    exec(code, sys.modules[function.__module__].__dict__, made)
    return made[name]


# Seconds each, until random traffic or a state machine comes upon them. Every function has a quick plant besides, and the traffic
# itself runs on every commit.
LONG_HUNTS = {
    "the budget of a step is not shared", "the newest cached block is evicted first", "a copy goes to the wrong block",
    "the window is one token short", "entries are appended to rows that are gone", "a hit may have holes",
    "cached blocks go before free ones", "commit is one block behind", "what the window freed is freed again",
    "parents are not compared",
}
assert {plant.name for plant in PLANTS} >= LONG_HUNTS
assert {(plant.owner, plant.function) for plant in PLANTS} == {
    (plant.owner, plant.function) for plant in PLANTS if plant.name not in LONG_HUNTS
}


@pytest.mark.reliability("P-16")
@pytest.mark.parametrize("plant", [
    pytest.param(plant, id=plant.name.replace(" ", "_"), marks=pytest.mark.slow if plant.name in LONG_HUNTS else ())
    for plant in PLANTS
])
def test_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plant.owner, plant.function, planted(plant.owner, plant.function, plant.old, plant.new))
    with pytest.raises(CAUGHT):
        plant.hunt(monkeypatch)
