"""What runs on one replica, and how long one more request would take there. The rule of docs/router.md is `predict`.

Pure: the caller says what happens and when, so tests and simulations use their own clocks.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from ridgeline.engine.replicas.learned_times import LearnedTimes, Pace
from ridgeline.engine.replicas.prefix_tree import Chain, Hit, PrefixTree, bytes_of, nodes_of
from ridgeline.engine.replicas.routed_prompt import RoutedPrompt

TOLERANCE_TOKENS = 128               # that a prediction of cached tokens may be wrong by: blocks are computed whole …
TOLERANCE_SHARE = 0.1                # … and text is only about proportional to tokens
USUAL_PROMPT = 256.0                 # tokens of a prompt, and …
MOST_PER_TOKEN = 16.0                # bytes: a prompt with more has a picture in it, or is mostly blanks
USUAL_OUTPUT = 128.0                 # … of an answer, until some have been seen
NEWEST = 0.05                        # weight of a new answer in the means
FEW = 64                             # times that are over and may be kept: numbers only


@dataclass(frozen=True, slots=True)
class Usage:
    """As an answer reports it; cached is None when the replica does not say."""

    prompt: int
    completion: int
    cached: int | None = None


@dataclass(slots=True)
class Habits:
    """What the requests of all replicas have in common."""

    bytes_per_token: float = 4.0
    prompt_tokens: float = USUAL_PROMPT  # of one prompt
    output_tokens: float = USUAL_OUTPUT

    def observe(self, prompt: RoutedPrompt, usage: Usage) -> None:
        if usage.prompt and prompt.text:
            self.prompt_tokens += NEWEST * (usage.prompt - self.prompt_tokens)
            ratio = min(MOST_PER_TOKEN, prompt.num_bytes / usage.prompt)
            # Of all bytes and all tokens, so that long prompts count more: a short one is mostly the tokens of its template.
            self.bytes_per_token += NEWEST * usage.prompt / self.prompt_tokens * (ratio - self.bytes_per_token)
        if usage.completion:
            self.output_tokens += NEWEST * (usage.completion - self.output_tokens)

    def output(self, prompt: RoutedPrompt) -> float:
        return min(self.output_tokens, prompt.most_output or self.output_tokens)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds, and the tokens they come from."""

    wait: float                      # until the requests before it have their first tokens
    prefill: float                   # of its own uncached tokens
    decode: float                    # of its own answer
    effect: float                    # what the requests there lose by it, all together
    uncached: float
    cached: float

    @property
    def first_token(self) -> float:
        return self.wait + self.prefill

    @property
    def total(self) -> float:
        return self.wait + self.prefill + self.decode + self.effect


@dataclass(slots=True, eq=False)
class Ticket:
    """One request on one replica."""

    prompt: RoutedPrompt
    predicted: Prediction
    hit: Hit
    number: int                      # of its prompt, in the replica's tree
    sent: float
    serial: int                      # of the requests sent to this replica
    first: float = 0.0               # when its first token came
    service: float = 0.0             # seconds from when the replica was free for it to its first token
    rows: float = 1.0                # requests that ran with it, at its first token
    prefills: float = 0.0            # the replica's `prefills` at its first token


@dataclass
class ReplicaLoad:
    habits: Habits
    tree: PrefixTree = field(default_factory=PrefixTree)
    times: LearnedTimes = field(default_factory=LearnedTimes)
    waiting: dict[int, Ticket] = field(default_factory=dict)     # without a first token; the oldest first
    running: dict[int, Ticket] = field(default_factory=dict)
    # A heap: when answers in one piece should begin, with serials of their tickets, which hold prompts.
    silent: list[tuple[float, int]] = field(default_factory=list)
    waiting_tokens: float = 0.0      # uncached, of those that wait
    last_first: float = 0.0          # when a first token came last
    prefills: float = 0.0            # seconds of all prefills so far
    corrections: int = 0
    num_sent: int = 0

    @property
    def pending(self) -> int:
        return len(self.waiting) + len(self.running)

    def predict(self, prompt: RoutedPrompt, now: float, otherwise: Pace, coming: float = 0.0) -> Prediction:
        """`coming`: requests that will come and wait behind this one. The guess: as many as wait on a replica now, on average."""
        self._assume(now)
        pace, habits = self.times.pace(otherwise), self.habits
        tokens = prompt.num_bytes / habits.bytes_per_token
        cached = min(tokens, bytes_of(self.tree.match(prompt.chain)) / habits.bytes_per_token)
        prefill = pace.prefill(tokens - cached)
        output, others = habits.output(prompt), self.pending
        decode = output * pace.step(others + 1)
        # Running answers stand still while this prompt is computed, and those that wait or come wait for it. Without those that
        # come, a busy fleet computes a prefix again on a replica that is free for a moment, and later requests pay for that.
        # Then each step has one row more.
        effect = (others + coming) * prefill + others * output * pace.step_row
        return Prediction(self._wait(now, pace), prefill, decode, effect, tokens - cached, cached)

    def _assume(self, now: float) -> None:
        """An answer that comes in one piece does not say when it began: it runs from when it was predicted to."""
        while self.silent and now >= self.silent[0][0]:
            ticket = self.waiting.get(heapq.heappop(self.silent)[1])
            if ticket is not None:
                self._begin(ticket)
                self.running[ticket.serial] = ticket

    def _begin(self, ticket: Ticket) -> bool:
        """It waits no longer. False: it did not wait."""
        if self.waiting.pop(ticket.serial, None) is None:
            return False
        self.waiting_tokens = self.waiting_tokens - ticket.predicted.uncached if self.waiting else 0.0
        return True

    def _wait(self, now: float, pace: Pace) -> float:
        if not self.waiting:
            return 0.0
        oldest = next(iter(self.waiting.values()))
        first = pace.prefill(oldest.predicted.uncached)
        spent = min(now - max(oldest.sent, self.last_first), first)      # of the one that is being computed
        # A sum over all that wait, of a straight line: a thousand texts may be sent at once, and each looks at all before it.
        return len(self.waiting) * pace.prefill_fixed + pace.prefill_token * self.waiting_tokens - max(0.0, spent)

    # -- a request's life ----------------------------------------------------------------------------------------------

    def send(self, prompt: RoutedPrompt, now: float, otherwise: Pace) -> Ticket:
        predicted = self.predict(prompt, now, otherwise)
        # What an unanswered request sent before is being computed: that it is not cached yet says nothing about evictions.
        settled = next(iter(self.waiting.values())).number if self.waiting else None     # the oldest has the least number
        hit = self.tree.add(prompt.chain, settled)
        self.num_sent += 1
        ticket = Ticket(prompt, predicted, hit, self.tree.now, now, self.num_sent)
        self.waiting[ticket.serial] = ticket
        self.waiting_tokens += predicted.uncached
        if not prompt.streams:
            if len(self.silent) > 2 * len(self.waiting) + FEW:       # most have been answered
                self.silent = sorted(each for each in self.silent if each[1] in self.waiting)
            heapq.heappush(self.silent, (now + predicted.first_token, ticket.serial))
        return ticket

    def first_token(self, ticket: Ticket, now: float) -> bool:
        """Whether it is the first one."""
        if not self._begin(ticket):
            return False
        ticket.first, ticket.service = now, now - max(ticket.sent, self.last_first)
        self.last_first = now
        self.prefills += ticket.service
        ticket.prefills = self.prefills
        self.running[ticket.serial] = ticket
        ticket.rows = self.pending
        return True

    def finish(
        self, ticket: Ticket, now: float, usage: Usage | None = None, whole: Chain = (), is_usual: bool = True
    ) -> None:
        """The answer is complete; `whole` are the nodes of prompt and answer. Without a usage the replica's counts are guessed
        from the text. If it took an unusual time, that is not learned."""
        streamed = ticket.prompt.streams and ticket.serial in self.running
        rows = (ticket.rows + self.pending) / 2
        self.leave(ticket)
        if whole:
            self.tree.extend(whole)
        if usage is not None:
            self.habits.observe(ticket.prompt, usage)
            self._compare(ticket, usage)
        if not streamed or not is_usual:                 # of one body at the end the first token's time is not known
            return
        uncached = ticket.predicted.uncached
        if usage is not None and usage.cached is not None:
            uncached = usage.prompt - usage.cached
        self.times.prefill.observe(uncached, max(0.0, ticket.service))
        if usage is not None and usage.completion > 1:
            # Without the prefills of others in between: `effect` counts those apart.
            decoding = max(0.0, now - ticket.first - (self.prefills - ticket.prefills))
            self.times.decode.observe(rows, decoding / (usage.completion - 1))

    def leave(self, ticket: Ticket) -> None:
        """It failed, or its client has gone: nothing is learned."""
        self._begin(ticket)
        self.running.pop(ticket.serial, None)

    def _compare(self, ticket: Ticket, usage: Usage) -> None:
        if usage.cached is None or not usage.prompt:
            return
        chain, known = ticket.prompt.chain, ticket.hit.nodes
        per_byte = usage.prompt / max(1, ticket.prompt.num_bytes)
        expected = bytes_of(known) * per_byte
        close = expected - usage.cached <= max(TOLERANCE_TOKENS, TOLERANCE_SHARE * expected)
        cached = known if close else min(len(chain), known, nodes_of(usage.cached / per_byte))
        self.corrections += self.tree.correct(ticket.hit, cached)
