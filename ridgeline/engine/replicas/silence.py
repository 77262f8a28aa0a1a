"""Replicas that take requests and do not answer them: a stopped process, or an engine that hangs behind a /health that works.

A request is late when something of its answer should have come, by how long requests usually wait. A replica is silent while one
of its requests is late and nothing has come of any other for SILENT_SECONDS. Others are chosen before it. If all late requests
have left it, it gets one request every SILENT_SECONDS, to find out. The first answer ends its silence. What requests took that
were there in a silence says nothing of the time that others will take. Streams that have begun are not late: they end when
nothing has come of any answer for a time that the caller gives.

Knows numbers only: no clock, no HTTP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

SILENT_SECONDS = 30.0                # no request is late before that: engines compile, and load what they did not need yet
MORE = 2.0                           # times the longest wait seen, or the predicted one, after which a request is late
FAR = 2.0                            # times that, after which it had better go elsewhere
MEMORY = 0.99                        # of the longest wait, at each observation


class Patience:
    """How long requests wait for the first of their answers, on all replicas."""

    def __init__(self) -> None:
        self._longest = {True: 0.0, False: 0.0}          # of streams, and of answers in one piece

    def observe(self, streams: bool, seconds: float) -> None:
        self._longest[streams] = max(seconds, MEMORY * self._longest[streams])

    def seconds(self, streams: bool, predicted: float) -> float:
        return max(SILENT_SECONDS, MORE * max(self._longest[streams], predicted))


@dataclass(slots=True, eq=False)
class Unanswered:
    """One request of whose answer nothing has come."""

    streams: bool
    sent: float
    patience: float
    move: Callable[[], None] | None  # sends it elsewhere, if that is possible

    def is_late(self, now: float) -> bool:
        return now > self.sent + self.patience


class Silence:
    """Of one replica. Its requests have numbers."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        # The oldest first: as replicas begin them in order, the oldest says whether any is late.
        self._streams: dict[int, Unanswered] = {}
        self._pieces: dict[int, Unanswered] = {}
        self._begun: dict[int, Callable[[], bool]] = {}  # streams of which something has come, and what ends each
        self._heard = float("-inf")                      # when something of an answer came last
        self._is_lost = False                            # a late request has left since then, or impatient ones in a row
        self._is_shown = False                           # … and one of them was a stream: it is not only slow
        self._tokens: tuple[float, float] | None = None  # how many its engine has made, and since when
        self._stands_still = False                       # it has made no more of them for too long: it is not only slow, either
        self._in_vain = 0.0                              # seconds in which there were requests that left before they were late
        self._left = 0.0                                 # when the last one did
        self._quiet_until = 0.0                          # then one more is tried
        self.ended = float("-inf")                       # when something came after a silence

    def sent(self, number: int, streams: bool, now: float, predicted: float, move: Callable[[], None] | None = None) -> None:
        """`predicted`: seconds until something of the answer should come."""
        of = self._streams if streams else self._pieces
        of[number] = Unanswered(streams, now, self._patience.seconds(streams, predicted), move)
        if self._is_lost:
            self._quiet_until = now + SILENT_SECONDS

    def heard(self, number: int, now: float, give_up: Callable[[], bool] | None = None) -> None:
        """Something of this answer has come. `give_up`: ends it; False: what has come waits for its client."""
        if give_up is not None:
            self._begun[number] = give_up
        request, since, long = self._pop(number), self._heard, self._patience.seconds(True, 0.0)
        if request is not None:
            since, long = max(since, request.sent), request.patience
            self._patience.observe(request.streams, now - request.sent)
        if now - since > long:                           # for as long nothing came, though this request was there
            self.ended = now
        self._heard, self._is_lost, self._is_shown, self._stands_still, self._in_vain = now, False, False, False, 0.0

    def left(self, number: int, now: float) -> None:
        """It failed or went elsewhere, or its client has gone; or its answer is complete. Where clients wait for less than a
        request needs to be late, one after the other counts as one that waits."""
        self._begun.pop(number, None)
        request = self._pop(number)
        if request is None:
            return
        self._in_vain += now - max(request.sent, self._left, self._heard)
        self._left = now
        if request.is_late(now) or self._in_vain > request.patience:
            self._is_lost, self._quiet_until = True, now + SILENT_SECONDS
            self._is_shown |= request.streams

    def _pop(self, number: int) -> Unanswered | None:
        return self._streams.pop(number, None) or self._pieces.pop(number, None)

    def note_tokens(self, now: float, made: float | None, seconds: float) -> None:
        """What its engine has made in all, as far as that is known, while a request is late. One that makes none for so long is
        not only slow."""
        if made is None:
            self._tokens = None
        elif self._tokens is None:
            self._tokens = made, now
        elif self._tokens[0] != made:
            self._tokens, self._stands_still = (made, now), False
        elif now - self._tokens[1] >= seconds:
            self._stands_still = True

    def is_silent(self, now: float) -> bool:
        if now < self._heard + SILENT_SECONDS:
            return False
        oldest = (next(iter(each.values()), None) for each in (self._streams, self._pieces))
        return any(each is not None and each.is_late(now) for each in oldest) or (self._is_lost and now < self._quiet_until)

    def give_up_begun(self, now: float, seconds: float) -> int:
        """End all begun streams if nothing has come of any answer for so long; how many. Not while it may be computing a prompt
        that was predicted to take as long."""
        if not self._begun or now < self._heard + seconds or ((self._streams or self._pieces) and not self.is_silent(now)):
            return 0
        ended = [number for number, give_up in self._begun.items() if give_up()]
        for number in ended:
            del self._begun[number]
        if ended:
            self._is_lost, self._is_shown, self._quiet_until = True, True, now + SILENT_SECONDS
        return len(ended)

    def late(self, now: float) -> list[Unanswered]:
        return [each for of in (self._streams, self._pieces) for each in of.values() if each.is_late(now)]

    def move_late(self, now: float, seconds: float = math.inf) -> int:
        """Send elsewhere what is far too late, and can go; how many. A replica that answers others is only full: elsewhere they
        would begin to wait again. A late answer in one piece may be a long one: it goes after so many seconds without a sign of
        the replica, if a stream has ended or left there without its answer, or its engine stands still."""
        if not self.is_silent(now):
            return 0
        far = [each for each in self._streams.values() if now > each.sent + FAR * each.patience]
        if (self._is_shown or self._stands_still) and now >= self._heard + seconds:
            far += [each for each in self._pieces.values() if each.is_late(now) and now >= each.sent + seconds]
        moves = [each.move for each in far if each.move is not None]
        for move in moves:
            move()
        return len(moves)
