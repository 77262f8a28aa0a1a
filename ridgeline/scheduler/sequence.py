"""A sequence: one answer in the making. A request with n answers has n of them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from ridgeline.cache.manager import SequenceBlocks
from ridgeline.messages import Logprobs, Request

if TYPE_CHECKING:                    # the library behind it is imported only where there are grammars
    from ridgeline.grammar.matcher import Matcher


class Sequence:
    """What the scheduler remembers of one answer.

    `tokens` holds the tokens whose values have arrived. While steps are in flight the sequence has more *known* tokens
    than that: each sampled token is counted when its step is planned, and its value follows.
    """

    __slots__ = (
        "admitted_at", "arrived_at", "blocks", "finished", "hidden", "index", "leader", "limit", "lost_tokens", "matcher",
        "num_cached", "num_promised", "num_prompt", "order", "priority", "prompt_done", "prompt_logprobs", "prompt_logprobs_sent",
        "request", "row", "seed", "stop_ids", "tokens",
    )  # fmt: skip

    def __init__(
        self, request: Request, index: int, order: int, limit: int, seed: int, stop_ids: frozenset[int]
    ) -> None:
        self.request = request
        self.index = index                               # which of the request's n answers
        self.order = order                               # arrival number
        self.priority = request.priority
        # Python converts unsigned numbers three times as fast, and they have been checked to be small enough for either.
        self.tokens = array("i", array("I", request.prompt_token_ids).tobytes())
        self.num_prompt = len(request.prompt_token_ids)
        self.limit = limit                               # most tokens it may come to, prompt included
        self.seed = seed
        self.stop_ids = stop_ids
        self.row = -1                                    # -1 = waiting
        self.blocks: SequenceBlocks | None = None
        self.leader: Sequence | None = None              # the first of n answers, whose prompt blocks are shared
        self.prompt_done = False
        self.finished = False
        self.num_promised = 0                            # tokens sampled by steps in flight
        self.num_cached = 0                              # prompt tokens that the prefix cache saved at first; a fork saves none
        self.lost_tokens = 0                             # tokens that were computed before a preemption
        self.arrived_at = 0                              # the step it arrived after; preemption makes nobody younger
        self.admitted_at = 0                             # the step it took its row after; later steps belong to this stay
        self.matcher: Matcher | None = None              # of a request with a grammar, once that is compiled
        self.prompt_logprobs: list[Logprobs] = []        # chunks that have arrived
        self.prompt_logprobs_sent = False
        self.hidden: np.ndarray | None = None            # pooled so far

    @property
    def ready(self) -> bool:
        """May it be admitted? Not while a token is in flight, before its grammar is there, or before the prompt it shares is
        computed."""
        if self.matcher is None and self.request.params.structured_outputs is not None:
            return False
        return self.num_promised == 0 and (self.leader is None or self.leader.prompt_done or self.leader.finished)
