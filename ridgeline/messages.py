"""The messages between the two halves of the engine.

The host half (scheduler, cache) decides; the device half (runner, models, ops) computes. They meet only here. Every
message is a plain slotted dataclass of numbers, strings and numpy arrays, so it can be saved, replayed and sent over a
wire; nothing here knows torch, msgspec or sockets.

A StepPlan is a numbered *delta*. Per row the device owns the known tokens, the length, the penalty counts and the block
tables; the plan says what changed since the plan before it, and which rows compute how many tokens now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np

from ridgeline.sampling_params import SamplingParams


@dataclass(slots=True)
class Request:
    """One prompt as the engine core receives it: token ids only. `params.n` answers are produced from it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0                # lower runs earlier
    cache_salt: str = ""             # requests with different salts never share cached blocks
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    prefix_caching: bool = True      # may it reuse blocks that were computed for other requests?
    predicted_token_ids: list[int] = field(default_factory=list)         # the text that its answers are expected to follow
    # Of a request that an earlier engine began: the tokens it had produced, by answer. Answers not named have ended.
    resumed: dict[int, list[int]] | None = None


class Want(IntFlag):
    """What a scheduled row brings back from a step."""

    NOTHING = 0
    TOKEN = 1                        # a sampled token from the last position
    LOGPROBS = 2                     # its log-probability and the top-k beside it
    PROMPT_LOGPROBS = 4              # log-probabilities of the prompt tokens in this chunk
    HIDDEN = 8                       # the last position's hidden state (pooling)
    HIDDEN_SUM = 16                  # the sum of the prompt tokens' hidden states in this chunk


@dataclass(slots=True)
class RowAdded:
    """A sequence that takes a row: new, forked, or back after preemption."""

    row: int
    token_ids: np.ndarray            # int32: the prompt and whatever was produced before a preemption
    num_prompt: int                  # how many of them are prompt
    num_computed: int                # how many already have their KV in the blocks below
    block_ids: list[np.ndarray]      # int32, one table per KV group
    params: SamplingParams
    seed: int                        # key of the noise; the same after preemption and restart
    bad_words_token_ids: list[list[int]] = field(default_factory=list)
    predicted: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))     # int32: the answer that the client expects


@dataclass(slots=True)
class BlockOp:
    """A whole-block operation that runs before the forward pass."""

    kind: str                        # "copy"; later: requantise, swap, send, receive
    group: int
    source: int
    target: int


@dataclass(slots=True)
class StepPlan:
    """One step of work, as a delta. An empty plan is valid."""

    step: int
    removed: np.ndarray              # int32 rows that are free from now on
    added: list[RowAdded]
    appended: np.ndarray             # int32 [k, 4]: group, row, index in the row's table, block id
    rows: np.ndarray                 # int32 [R]: the rows that compute, in batch order
    num_tokens: np.ndarray           # int32 [R]: how many tokens each computes (an upper bound with drafts)
    want: np.ndarray                 # int8 [R]: Want flags
    block_ops: list[BlockOp] = field(default_factory=list)
    recomputed: int = 0              # of the tokens above, those that had their KV before a preemption
    # Drafts. A decode row with `width` w computes 1 + w tokens: its newest token and w guesses of what follows. The guesses are
    # a path: `drafts[r, i]` is the guess for position `drafts_from[r] + i` of the row. The host may know fewer tokens than the
    # device, whose own length says which part of the path comes next. -1: no guess; it is computed and never accepted.
    width: np.ndarray | None = None          # int32 [R]; None: no row has drafts
    drafts: np.ndarray | None = None         # int32 [R, P]; None: the device makes them all
    drafts_from: np.ndarray | None = None    # int32 [R]; -1: the device makes the row's drafts

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities at some consecutive positions of one row."""

    token_ids: np.ndarray            # int32 [n]: the token at each position
    logprobs: np.ndarray             # float32 [n]
    ranks: np.ndarray                # int32 [n]: 1 = the most likely
    top_ids: np.ndarray              # int32 [n, k]
    top_logprobs: np.ndarray         # float32 [n, k]


@dataclass(slots=True)
class StepResult:
    """What one step produced, in the order of the plan's rows."""

    step: int
    tokens: np.ndarray               # int32 [R, 1 + the largest width]
    num_new: np.ndarray              # int32 [R]: how many of them are valid: 1 + accepted drafts; 0 where no token was wanted
    lengths: np.ndarray              # int32 [R]: tokens of the row that now have their KV
    logprobs: dict[int, Logprobs] = field(default_factory=dict)          # by place in the batch
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    hidden: dict[int, np.ndarray] = field(default_factory=dict)          # float [hidden], for either way of pooling
    # Rows that failed alone, and why. Of a row with drafts, `num_new` tokens came before the failure.
    failed: dict[int, str] = field(default_factory=dict)
    overconstrained: list[int] = field(default_factory=list)             # those whose own settings leave no token
    useful: int = 0                  # token counts: what the step computed for the first time …
    recomputed: int = 0              # … again, after a preemption …
    padded: int = 0                  # … to fill up a captured shape …
    rejected: int = 0                # … and in vain, as drafts
    device_seconds: float = 0.0
    wall_seconds: float = 0.0        # since the result before, host time included; 0: not measured
    draft_seconds: float = 0.0       # of these, what the draft model took to propose …
    catch_up_seconds: float = 0.0    # … and before that, to compute tokens that it had not seen …
    caught_up: int = 0               # … this number of tokens
    typical: bool = True             # such steps take that long for now: no graph was captured, or missing (Forward.passing)
    shared: int = 0                  # KV positions that were read once although further rows have them, too
    experts: int = 0                 # of a mixture: experts that were read, all layers together
    replayed: bool = False           # the step was a CUDA graph
    communication: float = 0.0       # seconds in which ranks waited for each other, where that can be measured


@dataclass(slots=True)
class TokenDelta:
    """New tokens of one answer, from the core to the client of its request."""

    request_id: str
    index: int                       # which of the n answers
    token_ids: list[int]
    logprobs: list[Logprobs] = field(default_factory=list)               # one per token when asked for
    prompt_logprobs: Logprobs | None = None
    finish_reason: str | None = None # stop, length, abort, error
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str = ""
    bad_request: bool = False        # what its request asked for is the cause of the error
    grammar_ended: bool = False      # it stops because its grammar is complete: its last token is text, not an end token
    hidden: np.ndarray | None = None # float32 [hidden]: the prompt, pooled, with the first token
    predicted: tuple[int, int] = (0, 0)                                  # drafts of its prediction so far: accepted, rejected


_NO_NUMBERS = np.zeros(0, np.int32)
_NO_NUMBERS.flags.writeable = False


@dataclass(slots=True)
class TokenDeltas:
    """What steps brought, in order: answers of which there is nothing to tell but their new tokens, then the others.

    The former are nearly all rows of nearly all steps. They are arrays: an object for each would take longer to make and to send
    than the step takes to plan. Iterating makes the objects.
    """

    answers: list[tuple[str, int, int]] = field(default_factory=list)            # request_id, index, num_cached_tokens
    counts: np.ndarray = field(default_factory=lambda: _NO_NUMBERS)              # int32 [answers]: new tokens of each
    tokens: np.ndarray = field(default_factory=lambda: _NO_NUMBERS)              # int32: theirs, behind each other
    others: list[TokenDelta] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.counts is self.tokens is _NO_NUMBERS and not self.answers:
            return                                       # there is one for each step
        fits = self.counts.shape == (len(self.answers),) and self.tokens.ndim == 1
        if not fits or not self.counts.dtype == self.tokens.dtype == np.int32:   # as a damaged frame may have them
            raise ValueError("counts and tokens of answers are int32 arrays, one count for each answer")
        if (len(self.counts) and self.counts.min() < 0) or int(self.counts.sum()) != len(self.tokens):
            raise ValueError("the counts of answers are not those of their tokens")

    def __len__(self) -> int:
        return len(self.answers) + len(self.others)

    def __iter__(self) -> Iterator[TokenDelta]:
        for (request_id, index, num_cached), token_ids in self.plain():
            yield TokenDelta(request_id, index, token_ids, [], None, None, None, num_cached)     # by place: half the time
        yield from self.others

    def plain(self) -> Iterator[tuple[tuple[str, int, int], list[int]]]:
        """The answers of which there is nothing to tell but their new tokens, without an object for each."""
        tokens, begin = self.tokens.tolist(), 0
        for answer, count in zip(self.answers, self.counts.tolist(), strict=True):
            end = begin + count
            yield answer, tokens[begin:end]
            begin = end

    def __iadd__(self, later: Iterable[TokenDelta]) -> TokenDeltas:
        if isinstance(later, TokenDeltas) and not len(self):
            self.answers, self.counts, self.tokens, self.others = later.answers, later.counts, later.tokens, later.others
        else:
            self.others.extend(later)
        return self
