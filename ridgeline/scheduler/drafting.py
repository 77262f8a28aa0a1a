"""Drafts of a step: what the scheduler asks of a drafter, and what it gets.

The scheduler asks once per step, for the rows that decode in it, after prompts have their tokens. The answer says how many
guesses each row computes, and which. A guess is never trusted: the step samples the model's own token at every position, and
accepts guesses while they are equal. So a drafter changes the time of an answer, never its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ridgeline.messages import StepResult
from ridgeline.scheduler.sequence import Sequence


@dataclass(slots=True)
class DecodingRows:
    """The rows that decode in the step being planned, in the order of the plan."""

    sequences: list[Sequence]        # `tokens` holds what has arrived; steps in flight will bring more
    most: np.ndarray                 # int64 [D]: drafts that each may have, by its own limit and its request; 0: none
    pending: np.ndarray              # int64 [D]: most tokens that steps in flight will add to `tokens` before this step
    room: int                        # drafts that all may have together, by the token budget
    num_tokens: int                  # what the step computes without drafts, prompts included
    keys: int                        # tokens of these rows that have their KV, all together
    constrained: list[int] = field(default_factory=list)                 # places of rows with a grammar
    num_prompts: int = 0             # rows of the step that do not decode
    waited: bool = False             # all tokens have arrived: the device has nothing to do until this step


@dataclass(slots=True)
class Drafts:
    """By place in DecodingRows."""

    width: np.ndarray                # int32 [D]: guesses that the row computes, <= most; together <= room
    # int32 [D, P]: guesses for the tokens after `sequence.tokens`; -1: none. Long enough for the tokens in flight, too: row r
    # uses `width[r]` of them behind the true tokens. None: the device makes them all.
    tokens: np.ndarray | None
    on_device: np.ndarray | None = None      # bool [D]: rows whose drafts the device makes; None: no row's


class Drafter(Protocol):
    active: bool                     # False: it is not asked, and steps cost what they cost without it

    @property
    def waits(self) -> bool:
        """With a grammar among the rows: is the next step to be planned only once all tokens have arrived? The device waits
        meanwhile, but what a grammar forces to follow is known only then."""

    @property
    def will_look(self) -> bool:
        """What awake() will say next."""

    def awake(self) -> bool:
        """Is it to be asked for this step? Once per step."""

    def plan(self, rows: DecodingRows) -> Drafts | None:
        """None: no row has drafts in this step, which then is as if there were no drafter."""

    def observe(self, sequences: list[Sequence], width: np.ndarray, accepted: np.ndarray, seconds: float) -> None:
        """A step with drafts has come back: of each row that had some, how many, and how many were accepted."""

    def slept(self, rows: int) -> bool:
        """A step without prompts has come back, with so many rows. True: its time is not asked for."""

    def timed(
        self, rows: int, tokens: int, queries: int, keys: int, seconds: float, rejected: int, waited: bool = False
    ) -> None:
        """A step without prompts has come back: its rows, its tokens, the most of a row (1: no row had drafts), the tokens whose
        KV they read, its time without that of a draft model, its drafts that were rejected, and see DecodingRows.waited."""

    def proposed(self, rows: int, width: int, result: StepResult) -> None:
        """The draft model has proposed in a step, for so many rows, at most `width` tokens each."""

    def predicted(self, sequence: Sequence) -> tuple[int, int]:
        """Drafts from the client's prediction so far: accepted, and rejected."""

    def ended(self, sequence: Sequence) -> None:
        """The answer has ended, with `sequence.tokens`."""


class NoDrafter:
    """The off version."""

    active = waits = will_look = False

    def awake(self) -> bool:
        return False

    def plan(self, rows: DecodingRows) -> Drafts | None:
        return None

    def observe(self, sequences: list[Sequence], width: np.ndarray, accepted: np.ndarray, seconds: float) -> None:
        """It learns nothing."""

    def slept(self, rows: int) -> bool:
        return True

    def timed(
        self, rows: int, tokens: int, queries: int, keys: int, seconds: float, rejected: int, waited: bool = False
    ) -> None:
        """It compares no times."""

    def proposed(self, rows: int, width: int, result: StepResult) -> None:
        """It has no draft model."""

    def predicted(self, sequence: Sequence) -> tuple[int, int]:
        return 0, 0

    def ended(self, sequence: Sequence) -> None:
        """It remembers nothing."""
