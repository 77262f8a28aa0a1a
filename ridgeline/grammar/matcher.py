"""A matcher follows one answer through its grammar; masks.py fills the masks of tokens that may come next.

A matcher's state is on the host and depends on the answer's tokens alone, so preemption does not touch it. A matcher that
fails keeps its error; other answers go on. A matcher whose masks steps wait for has limits on its work. Where it needs more, the
answer has outgrown it: it gets one without those limits, whose masks are filled ahead of steps (engine/core/slow_answers.py).

`ignore_eos` and `min_tokens` are applied to its masks: they keep end tokens out for as long as the grammar allows any
other token. An answer whose grammar is complete ends whatever they ask: there is nothing valid to add.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ridgeline.grammar.interface import LibraryMatcher, in_words
from ridgeline.grammar.llguidance_backend import is_llguidance
from ridgeline.sampling_params import SamplingParams

Spell = Callable[[bytes], list[int]]
_SPECIAL = b"\xff"                   # begins a special token in the library's text; no UTF-8 has it
_LONGEST_TOKEN = 32                  # bytes: of a long forced text only as much is spelled as drafts may be
_FAILED = "the grammar of structured_outputs failed on this answer: "


class Family:
    """Copies of one compiled grammar. Inside llguidance they share a lock, and states of the lexer of which there may be only a
    certain number."""

    def __init__(self, compiled: LibraryMatcher) -> None:
        self.number = id(compiled)
        self.in_step = False                             # their work is limited, so an answer can outgrow them
        self.ahead_of_steps = False                      # there is one, whose masks are filled before its steps are planned
        self.is_spent = False                            # one failed, perhaps for want of states: no more are to begin


class Matcher:
    """The state of one answer in its grammar."""

    __slots__ = (
        "__weakref__", "_followed", "_guided", "_held", "_matcher", "_num_tokens", "_spell", "_stopped", "_unsure", "alone",
        "error", "family", "grammar", "mask", "origin", "outgrown",
    )

    def __init__(
        self, compiled: LibraryMatcher, params: SamplingParams, end_ids: Sequence[int], spell: Spell | None = None,
        family: Family | None = None,
    ) -> None:
        """`spell`: the tokens of a text, for `forced`. `family`: of other copies."""
        self._spell = spell
        self._matcher = compiled.deep_copy()
        self.family = Family(compiled) if family is None else family
        self.grammar = 0 if params.structured_outputs is None else hash(params.structured_outputs.key)
        self._guided = is_llguidance(self._matcher)
        self._num_tokens = 0
        self._followed = 0                               # its newest tokens for which accept() has not been called: by `follow…`
        self._stopped: bool | None = None                # behind those: other threads may have the library's matcher now
        # Until min_tokens these ids are held back, and then those: (word of the mask, bit).
        early = _bits({*end_ids, *params.stop_token_ids}) if params.min_tokens else []
        self._held = params.min_tokens, early, _bits(end_ids) if params.ignore_eos else []
        self._unsure: tuple[int, str] | None = None      # see doubt()
        self.alone = False                               # masks along guesses failed or took too long: no more drafts
        self.origin: Matcher | None = None               # of a copy behind drafts, see ahead()
        self.error = ""                                  # why it failed; final
        self.outgrown = False                            # steps do not wait for that much work: the answer needs another matcher
        self.mask: np.ndarray | None = None              # the next one, where it is filled ahead

    @property
    def is_ready(self) -> bool:
        """Can its answer be in the next step?"""
        return not self.outgrown and (self.mask is not None or not self.family.ahead_of_steps)

    def accept(self, token: int) -> bool:
        """Take the answer's next token. False: the grammar does not allow it, and `error` says why."""
        self.mask = None
        if self._followed:
            self._followed -= 1
        elif self._unsure is not None and self._num_tokens >= self._unsure[0]:
            self.error = self._unsure[1]
        elif not self.error:
            self._num_tokens += 1
            self._stopped = None
            try:
                if not self._matcher.consume_token(token):
                    self.fail(self._matcher.get_error())
            except Exception as error:                   # any failure of the library fails this answer alone
                self.fail(str(error))
        return not self.error

    def follow(self, token: int) -> None:
        """accept(), ahead of the call that asks for its outcome: see `goes_on`."""
        self.accept(token)
        self.was_told(self.ended)

    def was_told(self, stopped: bool) -> None:
        """The library has taken its newest token (`Masks.advance`), whether it allows it or not."""
        self._followed, self._stopped, self.mask = 1, stopped, None

    def follow_run(self, tokens: list[int]) -> bool:
        """accept() of tokens that a step with drafts brought, in one call and ahead of those that ask for each outcome. False:
        the answer ends with them, or its grammar refuses one: accept() will tell which. Only llguidance can do it."""
        if self.error or not self._guided or not tokens or self._unsure is not None:
            return False
        self._stopped = self.mask = None
        try:
            self._followed = int(self._matcher.try_consume_tokens(tokens))   # type: ignore[attr-defined]
            self._stopped = bool(self._matcher.is_stopped())
        except Exception as error:
            self.fail(str(error))
        self._num_tokens += self._followed
        return self._followed == len(tokens) and not self._stopped and not self.error

    @property
    def goes_on(self) -> bool:
        """Its newest token was followed, and more can come: accept() need not be called for it if `passed` is."""
        return bool(self._followed) and not self.error and not self._stopped and not self.outgrown

    def passed(self) -> None:
        self._followed = 0

    def forced(self, most: int) -> list[int]:
        """The next tokens, if its grammar leaves only one text; at most that many. Only llguidance can say.

        Its own tokens end before the last of that text, for what follows could become a part of it, and a long text is spelled to
        its end each time. Mostly nothing becomes a part, and these are drafts: so the beginning of the text is spelled here."""
        if self.error or not self._guided or self.alone:
            return []
        try:
            text = self._matcher.compute_ff_bytes()                          # type: ignore[attr-defined]
            if not text or self._spell is None:
                return list(self._matcher.compute_ff_tokens()[:most]) if text else []        # type: ignore[attr-defined]
            special = text.find(_SPECIAL)                # what comes behind it is the name of a token, not text
            return self._spell(text[: min(_LONGEST_TOKEN * most, special if special >= 0 else len(text))])[:most]
        except Exception:                                # drafts are a favour: the answer goes on without them
            return []

    def allowed(self, tokens: list[int]) -> int:
        """How many of these tokens may be drafts: those that its grammar allows, one after the other. xgrammar is not asked:
        masks will tell."""
        if self.alone:
            return 0
        if self.error or not self._guided:
            return len(tokens)
        try:
            return int(self._matcher.validate_tokens(tokens))                # type: ignore[attr-defined]
        except Exception:
            return 0

    def ahead(self, guesses: Iterable[int]) -> list[Matcher]:
        """Copies of this matcher after the first guess, after the second, and so on, as far as its grammar allows them and the
        answer goes on. This one stays as it is. For xgrammar: llguidance makes masks along guesses itself."""
        found: list[Matcher] = []
        newest = self
        for token in guesses:
            if newest.error:
                break
            copied = copy.copy(newest)
            copied._matcher, copied.origin = newest._matcher.deep_copy(), self
            if not copied.accept(token) or copied.ended:
                break
            found.append(copied)
            newest = copied
        return found

    @property
    def ended(self) -> bool:
        """The grammar is complete: only an end token can follow."""
        if self.error or self._followed or (self.outgrown and self._matcher.is_error()):
            return False
        return bool(self._matcher.is_stopped()) if self._stopped is None else self._stopped

    def fail(self, reason: str) -> None:
        self.family.is_spent |= self._guided and self._matcher.is_error()
        if self.family.in_step:
            self.outgrown = self.alone = True
        else:
            self.error = _FAILED + in_words(reason)

    def outgrow(self) -> bool:
        """Its masks take too long for a step. False: there is no other way to fill them."""
        self.outgrown |= self.family.in_step
        return self.family.in_step

    def doubt(self, later: int, reason: str) -> None:
        """There is no mask behind the next `later` tokens, which are guesses. Without drafts the answer would fail there: so it
        does if it gets there."""
        self.family.is_spent |= self._guided
        self.alone, known = True, self._unsure
        if known is None or self._num_tokens + later < known[0]:
            self._unsure = self._num_tokens + later, _FAILED + in_words(reason)

    def trust(self) -> None:
        """The step of that doubt is over."""
        self._unsure = None

    def held(self, later: int = 0) -> list[tuple[int, int]]:
        """End tokens to keep out of the mask, now or a number of tokens later: (word of the mask, bit)."""
        least, early, late = self._held
        return early if self._num_tokens + later < least else late


def _bits(ids: Iterable[int]) -> list[tuple[int, int]]:
    return [(token >> 5, 1 << (token & 31)) for token in sorted(ids)]
