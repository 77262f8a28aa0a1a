"""What becomes of a step's result: tokens of answers, stops, failures, full blocks. One small function for each outcome.

A step with drafts brings several tokens of a row. Those behind a stop are dropped, as tokens of late steps are.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ridgeline.cache.manager import KVManager
from ridgeline.messages import Logprobs, StepResult, TokenDelta, TokenDeltas
from ridgeline.scheduler.bookkeeping import DraftPlan, InFlight, SchedulerCounters
from ridgeline.scheduler.decodes import Decodes, Taken
from ridgeline.scheduler.drafting import Drafter
from ridgeline.scheduler.live_requests import LiveRequests
from ridgeline.scheduler.running import Running
from ridgeline.scheduler.sequence import Sequence
from ridgeline.scheduler.waiting_queue import WaitingQueue

if TYPE_CHECKING:
    from ridgeline.grammar.matcher import Matcher

_NAMES = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")


class Answers:
    def __init__(
        self, live: LiveRequests, waiting: WaitingQueue, running: Running, manager: KVManager, counters: SchedulerCounters,
        drafter: Drafter, decodes: Decodes,
    ) -> None:
        self.live = live
        self.drafter = drafter
        self.outgrown: list[Sequence] = []               # answers that need another matcher
        self._waiting = waiting
        self._running = running
        self._manager = manager
        self._counters = counters
        self._decodes = decodes

    def set_matcher(self, sequence: Sequence, matcher: Matcher) -> None:
        sequence.matcher = matcher
        if matcher.outgrown:
            self.outgrown.append(sequence)

    def wait(self, sequence: Sequence) -> bool:
        """The scheduler skips it until its next mask is there. False: a step in flight brings its next token first."""
        matcher, row, table = sequence.matcher, sequence.row, self._running.rows
        assert matcher is not None
        arrives = sequence.num_promised > 0 if row < 0 else bool(table.known[row] > len(sequence.tokens))
        if row >= 0:
            table.answers.wait(row, arrives or not matcher.is_ready)
        return not arrives

    def note_outgrown(self, flight: InFlight) -> None:
        """The answers of this step that need another matcher: else they would wait for ever."""
        self.outgrown += [each for _, each in flight.constrained if each.matcher is not None and each.matcher.outgrown]

    def masked(self, flight: InFlight, left_out: Set[Matcher]) -> list[TokenDelta]:
        """The masks of this step are filled, but these. Answers whose matcher has failed end."""
        deltas: list[TokenDelta] = []
        places = flight.sampled.nonzero()[0].tolist() if left_out else []
        for number, sequence in flight.constrained:
            matcher = sequence.matcher
            if matcher is None or sequence.finished:
                continue
            if matcher.error:
                deltas.append(self.fail(sequence, matcher.error, True))
                continue
            if matcher.outgrown:
                self.outgrown.append(sequence)
            if matcher in left_out:
                flight.left_out.add(places[number])
                self._leave_out(sequence)
        if left_out:                                     # they do not hear of the tokens
            kept = [each for each in flight.constrained if places[each[0]] not in flight.left_out]
            flight.steady = replace(flight.steady, constrained=kept)
        return deltas

    def _leave_out(self, sequence: Sequence) -> None:
        """Its token of the newest step is dropped. It waits, and runs again, as after a preemption."""
        self._counters.left_out += 1
        sequence.prefill.restart(int(self._running.rows.computed[sequence.row]))
        self._running.leave(sequence)
        self._waiting.push(sequence)

    def take_at_once(self, flight: InFlight, result: StepResult, later: Several[InFlight]) -> Taken | None:
        """The numbers of a step in which all rows decoded and brought nothing but tokens: settle() and the first part of
        take_in(), for all rows in one call. None: it is taken in part by part; so it is if the result is not what was planned."""
        if self._decodes.native is None or flight.num_prompt_tokens or len(later) > 1 or result.step != flight.step:
            return None
        if result.failed or result.prompt_logprobs or result.hidden or result.logprobs or not result.tokens.size:
            return None
        if not len(result.tokens) == len(result.num_new) == len(result.lengths) == len(flight.rows):
            return None
        followed, behind = flight.followed(result), later[0] if later else None
        if not followed:
            return self._decodes.take_in(flight, result, behind)
        rows, simple = flight.rows[[place for place, _ in followed]], self._running.rows.answers.simple
        before = simple[rows]                            # another sequence may have got a row
        simple[rows] = True                              # nothing is left to do for their grammars
        taken = self._decodes.take_in(flight, result, behind)
        simple[rows] = before
        if taken is not None:
            others = {*taken.others.tolist()}
            for place, matcher in followed:
                if place not in others:
                    matcher.passed()
        return taken

    def tell(self, flight: InFlight, result: StepResult, taken: Taken) -> TokenDeltas:
        """What that step brings."""
        self._running.rows.num_used -= taken.unused
        if flight.drafts is not None:
            self._report(flight, flight.drafts, result)
        texts, answers = flight.steady.texts, flight.steady.answers
        others = taken.others.tolist()
        if others:
            left_out = set(others)
            texts = [text for place, text in enumerate(texts) if place not in left_out]
            answers = [answer for place, answer in enumerate(answers) if place not in left_out]
        if len(taken.tokens) == len(texts):
            for text, token in zip(texts, taken.tokens.tolist(), strict=True):
                text.append(token)
        else:
            tokens, begin = taken.tokens.tolist(), 0
            for text, count in zip(texts, taken.counts.tolist(), strict=True):
                if count == 1:
                    text.append(tokens[begin])
                else:                                    # a quarter of what extend() takes
                    text.fromlist(tokens[begin : begin + count])
                begin += count
        deltas = TokenDeltas()
        deltas.answers, deltas.counts, deltas.tokens = answers, taken.counts, taken.tokens       # which need no check
        self._commit_at(flight, result, taken.full)
        for place in others:
            deltas.others += self._outcome(flight, result, place)
        return deltas

    def settle(
        self, flight: InFlight, drafts: DraftPlan, surplus: np.ndarray, result: StepResult, later: Iterable[InFlight]
    ) -> None:
        """Drafts were rejected: rows, and steps that were planned meanwhile, are that many tokens shorter than was assumed."""
        table = self._running.rows
        if np.count_nonzero(surplus):
            stays, too_many = np.zeros((2, len(table.stay)), np.int64)
            stays[flight.rows], too_many[flight.rows] = flight.stays, surplus
            for other in later:
                other.shorten(stays, too_many)
            too_many *= stays == table.stay                      # not of rows that their sequences have left
            table.known -= too_many
            table.computed -= too_many
            table.num_used -= int(too_many.sum())
        self._report(flight, drafts, result)

    def _report(self, flight: InFlight, drafts: DraftPlan, result: StepResult) -> None:
        """The drafter hears what became of its drafts."""
        told, width, new = flight.sequences, drafts.width, result.num_new
        if np.count_nonzero(width) < len(width):
            drafted = width.nonzero()[0]
            told, width, new = [told[place] for place in drafted.tolist()], width[drafted], new[drafted]
        self.drafter.observe(told, width, np.maximum(new - 1, 0), result.device_seconds)
        if int(drafts.start.min()) < 0 and len(made := drafts.on_device):
            self.drafter.proposed(len(made), int(drafts.width[made].max()), result)

    def take_in(self, flight: InFlight, result: StepResult) -> TokenDeltas:
        there = flight.stays == self._running.rows.stay[flight.rows]     # others have ended, or were preempted
        quick = self._quick(flight, result, there)
        deltas = self._say_more(flight, result, quick) if np.count_nonzero(quick) else TokenDeltas()
        self._commit(flight, result, there & (quick | ~flight.sampled))  # the others when it is known where their answers end
        for place in (~quick).nonzero()[0].tolist():
            deltas.others += self._outcome(flight, result, place)
        return deltas

    def _quick(self, flight: InFlight, result: StepResult, there: np.ndarray) -> np.ndarray:
        """bool [R]: rows whose answers go on, with nothing to tell but their tokens."""
        if result.failed or result.prompt_logprobs or result.hidden or result.logprobs or not result.tokens.size:
            return np.zeros(len(there), bool)
        rows, answers = flight.rows, self._running.rows.answers
        goes_on = answers.arrived[rows] + result.num_new < self._running.rows.limit[rows]
        ends = np.logical_or.reduce(answers.may_end(result.tokens), axis=1)      # of other rows' tokens, too: looked at again
        followed, simple = flight.followed(result), answers.simple[rows]
        simple[[place for place, _ in followed]] = True  # nothing is left to do for their grammars
        quick = there & flight.sampled & simple & goes_on & ~ends
        for place, matcher in followed:
            if quick[place]:
                matcher.passed()
        return np.asarray(quick)

    def _say_more(self, flight: InFlight, result: StepResult, quick: np.ndarray) -> TokenDeltas:
        """As _said() does for each, in a tenth of the time: nearly all tokens of nearly all steps come here."""
        rows, texts, answers = flight.rows, flight.steady.texts, flight.steady.answers
        tokens, counts = result.tokens, result.num_new
        if np.count_nonzero(quick) < len(quick):
            places = quick.nonzero()[0]
            rows, tokens, counts = rows[places], tokens[places], counts[places]
            texts, answers = [texts[place] for place in places.tolist()], [answers[place] for place in places.tolist()]
        self._running.rows.answers.arrived[rows] += counts
        most = tokens.shape[1]
        if most == 1:
            flat = tokens[:, 0]
            for text, token in zip(texts, flat.tolist(), strict=True):
                text.append(token)
        else:
            flat = tokens[np.arange(most) < counts[:, None]]
            for text, said, count in zip(texts, tokens.tolist(), counts.tolist(), strict=True):
                if count == 1:
                    text.append(said[0])
                else:                                    # a quarter of what extend() takes
                    text.fromlist(said if count == most else said[:count])
        return TokenDeltas(answers, counts.astype(np.int32, copy=False), flat.astype(np.int32, copy=False))

    def _outcome(self, flight: InFlight, result: StepResult, place: int) -> list[TokenDelta]:
        """Of one row, whatever it may be."""
        sequence, samples = flight.sequences[place], bool(flight.sampled[place])
        if sequence.finished:
            self._counters.late_tokens += samples
            return []
        if place in flight.left_out:
            return []
        counts = _counts(sequence, flight)
        if sequence.row < 0:
            sequence.num_promised -= samples
        tokens = result.tokens[place, : result.num_new[place]].tolist()
        if place in result.failed:
            drafted = flight.drafts is not None and bool(flight.drafts.width[place])
            return self._broken(sequence, place, result, tokens if drafted else [])
        if counts:
            _keep_prompt_outputs(sequence, place, result)
        return self._said(sequence, tokens, result.logprobs.get(place)) if samples else []

    def _commit(self, flight: InFlight, result: StepResult, there: np.ndarray) -> None:
        """Blocks that became full are offered to the prefix cache; those behind a window are freed."""
        table = self._running.rows
        full = result.lengths // self._manager.block_size
        places = ((full > table.committed[flight.rows]) & there).nonzero()[0]
        self._commit_at(flight, result, places)

    def _commit_at(self, flight: InFlight, result: StepResult, places: np.ndarray) -> None:
        """Of rows that have their sequences still, with all tokens up to there."""
        if failed := result.failed:
            places = places[[place not in failed for place in places.tolist()]]
        sequences, lengths, commit = flight.sequences, result.lengths[places], self._manager.commit
        for place, end in zip(places.tolist(), lengths.tolist(), strict=True):
            sequence = sequences[place]
            assert sequence.blocks is not None
            commit(sequence.blocks, sequence.tokens, end)
        # Not what was published for steps still in flight.
        self._running.rows.committed[flight.rows[places]] = lengths // self._manager.block_size

    def _commit_said(self, sequence: Sequence) -> None:
        """Of a row whose new tokens were looked at one by one. Without drafts the newest has no KV. With drafts it may have, and
        tokens behind the end of the answer, too: they are left out, so that prefix hits do not depend on drafts."""
        table, end = self._running.rows, len(sequence.tokens) - 1
        if sequence.row >= 0:
            table.answers.arrived[sequence.row] = end + 1
            if end // self._manager.block_size > table.committed[sequence.row]:
                assert sequence.blocks is not None
                self._manager.commit(sequence.blocks, sequence.tokens, end)
                table.committed[sequence.row] = end // self._manager.block_size

    def _broken(self, sequence: Sequence, place: int, result: StepResult, tokens: list[int]) -> list[TokenDelta]:
        """The row failed. Tokens of accepted drafts before the failure count, and may end the answer before it."""
        deltas: list[TokenDelta] = []
        if tokens:
            deltas = self._said(sequence, tokens, result.logprobs.get(place))
        if sequence.finished:
            return deltas
        if sequence.blocks is not None:
            self._manager.distrust(sequence.blocks)
        return [*deltas, self.fail(sequence, result.failed[place], place in result.overconstrained)]

    def _said(self, sequence: Sequence, tokens: list[int], logprobs: Logprobs | None) -> list[TokenDelta]:
        """New tokens of an answer that goes on."""
        delta = TokenDelta(
            sequence.request.request_id, sequence.index, tokens, num_cached_tokens=sequence.prefill.num_cached
        )
        if sequence.request.predicted_token_ids:
            delta.predicted = self.drafter.predicted(sequence)
        prefill = sequence.prefill
        if prefill.logprobs or prefill.hidden is not None:
            _add_prompt_outputs(sequence, delta)
        before, refused = len(sequence.tokens), False
        for token in tokens:
            sequence.tokens.append(token)
            if token in sequence.stop_ids:
                delta.finish_reason = "stop"
                delta.stop_reason = token if token in sequence.request.params.stop_token_ids else None
            elif sequence.matcher is not None and not self._matches(sequence, token, delta):
                refused = True
            elif delta.finish_reason is None and len(sequence.tokens) >= sequence.limit:
                delta.finish_reason = "length"
            if refused or delta.finish_reason:
                break
        self._commit_said(sequence)
        number = len(sequence.tokens) - before
        if refused:
            return self._refused(sequence, delta, number - 1, logprobs)
        if delta.finish_reason:
            self._counters.late_tokens += len(tokens) - number
            self._counters.finished += 1
            del tokens[number:]
            self.end(sequence)
        if logprobs is not None:
            delta.logprobs = _each(logprobs, len(tokens))
        return [delta]

    def _matches(self, sequence: Sequence, token: int, delta: TokenDelta) -> bool:
        """Feeds the token to the answer's grammar."""
        matcher = sequence.matcher
        assert matcher is not None
        if not matcher.accept(token):
            return False
        if matcher.outgrown:
            self.outgrown.append(sequence)
        if matcher.ended:
            delta.finish_reason, delta.grammar_ended = "stop", True
        return True

    def _refused(self, sequence: Sequence, delta: TokenDelta, count: int, logprobs: Logprobs | None) -> list[TokenDelta]:
        """Its grammar has failed on the token after the first `count`."""
        assert sequence.matcher is not None
        failed = self.fail(sequence, sequence.matcher.error, bad_request=True)
        del delta.token_ids[count:]
        if logprobs is not None:
            delta.logprobs = _each(logprobs, count)
        return [delta, failed] if count else [failed]

    def fail(self, sequence: Sequence, reason: str, bad_request: bool = False) -> TokenDelta:
        """One answer ends with an error that does not cast doubt on its KV. Its token in flight will be dropped."""
        self.end(sequence)
        delta = TokenDelta(sequence.request.request_id, sequence.index, [], finish_reason="error", error=reason)
        delta.bad_request = bad_request
        return delta

    def end(self, sequence: Sequence) -> None:
        """Finished, aborted or failed: forget it. Its blocks go once no step in flight can touch them."""
        sequence.finished = True
        if sequence.row >= 0:
            self._running.leave(sequence)
            self._running.vacated = True
        else:
            self._waiting.ended()
        self.live.remove(sequence)
        self.drafter.ended(sequence)


def _add_prompt_outputs(sequence: Sequence, delta: TokenDelta) -> None:
    """They leave with the first token."""
    prefill = sequence.prefill
    if prefill.logprobs:
        chunks = prefill.logprobs
        delta.prompt_logprobs = Logprobs(*(np.concatenate([getattr(chunk, name) for chunk in chunks]) for name in _NAMES))
        prefill.logprobs, prefill.logprobs_sent = (), True
    if prefill.hidden is not None:
        mean = sequence.request.params.pooling == "mean"
        delta.hidden = prefill.hidden / np.float32(sequence.num_prompt) if mean else prefill.hidden
        prefill.hidden = None


def _each(whole: Logprobs, count: int) -> list[Logprobs]:
    """Of several positions, one by one."""
    if len(whole.token_ids) == count == 1:
        return [whole]
    return [Logprobs(*(getattr(whole, name)[place : place + 1] for name in _NAMES)) for place in range(count)]


def _counts(sequence: Sequence, flight: InFlight) -> bool:
    """Do the prompt's outputs of that step count? Not after a preemption, even if it is back: they are computed again. But those
    of steps up to a token in flight do, because that token may be the last."""
    return sequence.turn.admitted_at < flight.step and (sequence.row >= 0 or sequence.num_promised > 0)


def _keep_prompt_outputs(sequence: Sequence, place: int, result: StepResult) -> None:
    """They come chunk by chunk."""
    if place in result.prompt_logprobs:
        sequence.prefill.logprobs += (result.prompt_logprobs[place],)
    if place in result.hidden:
        chunk = result.hidden[place]
        sequence.prefill.hidden = chunk if sequence.prefill.hidden is None else sequence.prefill.hidden + chunk
