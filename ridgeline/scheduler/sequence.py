"""A sequence: one answer in the making. A request with n answers has n of them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ridgeline.cache.manager import SequenceBlocks
from ridgeline.draft_options import MOST_DRAFTS
from ridgeline.messages import Logprobs, Request

if TYPE_CHECKING:                    # its grammar library is imported only when a request has a grammar
    from ridgeline.grammar.matcher import Matcher


@dataclass(slots=True)
class Turn:
    """When a sequence's turn comes. Smaller priorities go first, then smaller orders."""

    priority: int
    order: int                       # arrival number
    arrived_at: int                  # the step it arrived after; a preemption does not change it
    admitted_at: int = 0             # the step it took its row after; later steps belong to this stay in the row


@dataclass(slots=True)
class Prefill:
    """What has been computed of a sequence's known tokens, and what the prompt's outputs are so far."""

    done: bool = False               # all known tokens have been computed, or a step that computes them is in flight
    lost_tokens: int = 0             # tokens that were computed before a preemption
    logprobs: tuple[Logprobs, ...] = ()                          # of the prompt: chunks that have arrived
    logprobs_sent: bool = False
    hidden: np.ndarray | None = None                             # pooled so far
    found: int = 0                   # tokens that the prefix cache held when it was last asked, while the sequence waited
    num_cached: int = 0              # prompt tokens that the prefix cache saved at first; a fork saves none
    looked_up: int = 0               # when that was, as a number that grows

    def restart(self, num_computed: int, has_token: bool = False) -> None:
        """A preemption: everything is computed again. `has_token`: a step in flight brings the next token, which may be the last.
        Then the prompt's outputs are complete with that step, and leave with it."""
        self.lost_tokens = max(self.lost_tokens, num_computed)
        self.done = False
        self.found = 0
        if not has_token:
            self.logprobs = ()
            self.hidden = None


class Sequence:
    """What the scheduler remembers of one answer.

    `tokens` holds the tokens whose values have arrived. While steps are in flight the sequence has more *known* tokens
    than that: each sampled token is counted when its step is planned, and its value follows. A step with drafts may bring
    several.
    """

    __slots__ = (
        "blocks", "finished", "index", "leader", "limit", "matcher", "num_promised", "prefill", "request", "row",
        "seed", "simple", "stop_ids", "tokens", "turn",
    )

    def __init__(self, request: Request, index: int, turn: Turn, limit: int, seed: int, stop_ids: frozenset[int]) -> None:
        self.request = request
        self.index = index                               # which of the request's n answers
        self.turn = turn
        # Python converts unsigned numbers three times as fast, and they have been checked to be small enough for either.
        self.tokens = array("i", array("I", request.prompt_token_ids).tobytes())
        self.limit = limit                               # most tokens it may come to, prompt included
        self.seed = seed
        self.stop_ids = stop_ids
        self.row = -1                                    # -1 = waiting
        self.blocks: SequenceBlocks | None = None
        self.leader: Sequence | None = None              # the first of n answers, whose prompt blocks are shared
        self.prefill = Prefill()
        self.finished = False
        self.num_promised = 0                            # while it waits: steps in flight that sample for it
        params = request.params
        # Nothing comes with its tokens, though a grammar may have to follow them. What became of its prediction comes with the
        # last of them, unless a stop string may end the answer in the front end, which then has no last one.
        counted = request.predicted_token_ids and params.stop
        self.simple = not (counted or params.pooling or params.prompt_logprobs is not None)
        self.matcher: Matcher | None = None              # of a request with a grammar, once that is compiled

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def most_drafts(self) -> int:
        """That a step may have for it. Sums of hidden states are of the prompt, and need no more than one token."""
        params = self.request.params
        if params.pooling is not None:
            return 0
        return MOST_DRAFTS if params.speculative is None else min(params.speculative, MOST_DRAFTS)

    @property
    def goes_on(self) -> bool:
        """Can the next step be launched before it is known what it says in this one? How much that is, which its noise depends
        on, the device knows; but typical_p is sampled by the host's numbers. A grammar's masks are made once it is known."""
        params = self.request.params
        edited = params.allowed_token_ids is not None or params.logit_bias or params.min_tokens
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        by_host = params.temperature and params.typical_p < 1
        return not (edited or self.request.bad_words_token_ids or penalties != (1.0, 0.0, 0.0) or by_host)

    @property
    def ready(self) -> bool:
        """May it be admitted? Not while a token is in flight, before its grammar is compiled, before a mask that takes long is
        filled, or before the prompt it shares is computed."""
        if self.request.params.structured_outputs is not None and (self.matcher is None or not self.matcher.is_ready):
            return False
        return self.num_promised == 0 and (self.leader is None or self.leader.prefill.done or self.leader.finished)

    @property
    def length_is_known(self) -> bool:
        """Will it answer with all the tokens it may?"""
        params = self.request.params
        return not (self.stop_ids or params.stop or params.structured_outputs)
