"""One request's way: to the best replica, to another one when that fails, and its answer back to the client.

Before the client has got anything, any failed request may be sent again. A stream that has begun goes on from another replica if
the request is exact (greedy or seeded): the request is sent again, and the text that the client has is skipped. Otherwise the
stream ends with an error event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import closing, suppress
from functools import partial
from typing import Any

import msgspec

from ridgeline.engine.client.long_work import away_if_long
from ridgeline.engine.replicas.prefix_tree import Chain
from ridgeline.engine.replicas.replica_load import Ticket, Usage
from ridgeline.errors import BadGateway, Overloaded, TimedOut
from ridgeline.process.log import get_logger
from ridgeline.route.answer_events import AnswerEvents, Beginning, Differs, EventCutter, Part, ReplicaGaveUp, usage_of
from ridgeline.route.fleet import Fleet
from ridgeline.route.forwarded_request import ForwardedRequest
from ridgeline.route.prompt_text import with_answer
from ridgeline.route.replica import Replica
from ridgeline.route.upstream import Answer, NoConnection, ReplicaFailure
from ridgeline.server.http.error_bodies import body_for, error_body
from ridgeline.server.http.failures import ALONE
from ridgeline.server.http.stream import Send, send_part

logger = get_logger("route")

EVENTS_PER_TURN = 64                 # of one stream that are read before others have their turn: 3 ms
HELD_UP = 0.1                        # share of a stream's time in which its client may be slow, for the time to be the replica's
MOST_REFUSAL = 2**16                 # bytes of an answer that is kept while other replicas are asked
REFUSAL_SECONDS = 5.0                # between the head of a refusal and its end: nothing is computed for it
_EMPTY = (204, 304)                  # statuses of answers without a body
_BUSY = (429, 503)
_KEYS = (401, 403)
# Perhaps of this replica alone: its model was changed, its engine fails, it has another key, does not know the name by which the
# router calls it, or a proxy in front of it answers. Idle as it is, it would be chosen again and again. But it may be the
# request's mistake, so that no client can take replicas down by it.
_OF_REPLICA = (*_KEYS, 404, 405, 407, 421)
_OF_REQUEST = (200, 504)             # an answer, and the end of its time: to ask another would take as long again
# Of one connection, not of the answer; and those that the router writes itself.
_NOT_PASSED = frozenset({
    b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"date", b"server", b"te", b"trailer", b"upgrade",
    b"proxy-authenticate", b"x-request-id", b"request-id",
})
_CODINGS = frozenset({b"gzip", b"x-gzip", b"deflate", b"compress", b"x-compress", b"br", b"zstd"})       # some servers say "none"
_NO_REASON = "a replica refused the request, and its reason is too long to be passed on, or did not come"
_BROKEN = "the replica that wrote this answer has failed, and the answer cannot be continued exactly; send the request again"


def _is_perhaps(status: int) -> bool:
    """Whether it may be of the replica alone: also a redirection, and what only proxies say."""
    return status in _OF_REPLICA or not (status in (*_OF_REQUEST, *_BUSY, 502) or 400 <= status < 500)


def _check_form(answer: Answer) -> None:
    """ReplicaFailure if it is nothing that a client of the API can read."""
    if answer.media_type == b"text/html":
        raise ReplicaFailure("it answers with a page for browsers")          # of a proxy: a login, or a maintenance
    if _CODINGS & {each.strip() for each in answer.header(b"content-encoding").lower().split(b",")}:
        raise ReplicaFailure("its answer is compressed, although the request says that it may not be")


class AnswerCut(Exception):
    """The client has a part of an answer in one piece, and gets no more: only the end of its connection can tell it."""


class Delivery:
    def __init__(self, fleet: Fleet, request: ForwardedRequest, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        self.started = False                             # the client has got the beginning of an answer
        self.replica = ""                                # that was tried last, for the access log
        self._fleet = fleet
        self._request = request
        self._client_headers = headers
        self._send = send
        self._events = self._new_events()
        self._is_whole = False                           # the client has a part of an answer in one piece
        self._is_inside = False                          # the client has a part of a long event, but not its end
        self._tried = set[int]()                         # replicas
        self._limit: asyncio.Timeout | None = None       # of the replica that is tried, while the request can go elsewhere
        self._may_move = True                            # once: where all are slow, it would never be answered
        self._refusal: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None
        self._num_failed = 0                             # replicas that have failed in it, and may fail by it
        self._held_up = 0.0                              # seconds in which the client did not take what was there

    async def run(self) -> None:
        """Raises Overloaded, TryAgain or BadGateway when no replica is left to try, and none has refused in its own words."""
        fleet, tried = self._fleet, self._tried
        number: int | None = None
        while self._num_failed <= fleet.options.retries:
            failed, number = number, await fleet.choose_any(self._request.prompt, tried)
            if number is None:
                break
            if failed is not None:
                fleet.replicas[failed].counts["moved"] += 1
                fleet.counts["retries"] += not self.started
            tried.add(number)
            was_started = self.started
            if await self._try(number):
                fleet.counts["resumed_streams"] += was_started
                return
            if not self.started:
                self._events = self._new_events()
            elif self._events.finished and self._request.hide_usage:
                return await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
            elif self._is_whole or (self._events.shown and not self._events.resumable):
                break
            else:
                self._events.restart()
        await self._give_up(tried)

    def _new_events(self) -> AnswerEvents:
        return AnswerEvents(self._request.hide_usage, self._request.is_exact, self._request.one_choice)

    async def _give_up(self, tried: Collection[int]) -> None:
        if self.started or self._refusal is None or not _is_perhaps(self._refusal[0]):
            self._fleet.counts["broken_streams" if self.started else "refused"] += 1
        if self.started:
            await self.end_with_error(503, _BROKEN, "service_unavailable_error", "replica_failed")
        elif self._refusal is None and tried:
            failed = "a replica" if len(tried) == 1 else f"{len(tried)} replicas"
            raise BadGateway(f"{failed} failed in this request, and none answered it; try again later", 1.0)
        elif self._refusal is None:
            raise self._fleet.nothing_usable()
        else:
            await self._send_whole(*self._refusal)

    async def end_with_error(self, status: int, message: str, kind: str, code: str) -> None:
        """In place of the rest of a stream. `status`: what the answer would have had before its beginning."""
        if self._is_whole:
            raise AnswerCut
        path, headers = self._request.path, self._client_headers
        body = body_for(path, headers, status, error_body(message, kind, code=code))
        name = b"event: error\n" if path.startswith("/v1/messages") else b""
        name = b"\n\n" + name if self._is_inside else name       # or the error would be a part of that event
        await self._send({"type": "http.response.body", "body": name + b"data: " + body + b"\n\n"})

    # -- one replica ---------------------------------------------------------------------------------------------------

    async def _try(self, number: int) -> bool:
        """Whether the request has been answered."""
        fleet, request, replica = self._fleet, self._request, self._fleet.replicas[number]
        self.replica = replica.url
        ticket = self._sent(number)
        headers = request.headers if replica.upstream.key else [*request.headers, *request.key_headers]
        limit = self._limit = asyncio.timeout(None)
        try:
            async with limit, replica.upstream.ask(request.method, request.path, headers, request.parts) as answer:
                if answer.status == 200:
                    _check_form(answer)
                else:
                    self._stay()
                if answer.status == 200 and answer.media_type == b"text/event-stream":
                    await self._stream(replica, answer, ticket)
                    return True
                if answer.status not in (*_BUSY, 502) and not _is_perhaps(answer.status):
                    await self._whole(replica, answer, ticket)
                    return True
                await self._refused(replica, answer)
        except TimeoutError:
            if not limit.expired():
                raise
            self._left_late(number)
        except (ReplicaFailure, ReplicaGaveUp) as error:
            self._note_failure(replica, not isinstance(error, NoConnection))
            replica.fail(str(error))
            logger.warning("%s failed in request %s: %s", replica.url, request.request_id.decode("latin-1"), error)
        except Differs:
            self._num_failed += 1
            self._events.resumable = False
            logger.warning("%s gave a different answer to request %s", replica.url, request.request_id.decode("latin-1"))
        finally:
            replica.load.leave(ticket)                   # if it is still there: it failed, or its client has gone
            replica.silence.left(ticket.serial, fleet.now())
        return False

    def _sent(self, number: int) -> Ticket:
        fleet, prompt = self._fleet, self._request.prompt
        now, replica = fleet.now(), fleet.replicas[number]
        ticket = fleet.choice.send(number, prompt, now)
        if self._is_of_model:
            replica.doubts.sent(prompt.model, now)
        if self._request.is_computed:
            predicted = ticket.predicted.first_token + (0.0 if prompt.streams else ticket.predicted.decode)
            move = self._leave if self._may_move and not self.started else None
            replica.silence.sent(ticket.serial, prompt.streams, now, predicted, move)
        return ticket

    def _leave(self) -> None:
        """The replica is far too late, and another one answers."""
        if self._limit is not None:
            self._limit.reschedule(0.0)

    def _stay(self) -> None:
        """The client gets something of the answer."""
        if self._limit is not None:
            self._limit.reschedule(None)
            self._limit = None

    def _left_late(self, number: int) -> None:
        replica, self._may_move = self._fleet.replicas[number], False
        self._tried.discard(number)                      # if the others fail, it is still there
        replica.counts["moved_late"] += 1
        logger.warning("%s has not begun to answer request %s: it goes to another", replica.url,
                       self._request.request_id.decode("latin-1"))

    @property
    def _is_of_model(self) -> bool:
        """Whether its outcome says what others will meet: a server may have no page that counts tokens, and answer all else."""
        return self._request.is_computed or self._request.method == "GET"

    def _note_failure(self, replica: Replica, counts: bool = True) -> None:
        """`counts`: as a retry. Each replica may be asked that has no time, or cannot be reached."""
        self._num_failed += counts
        if self._is_of_model:
            replica.doubts.failed(self._request.prompt.model, self._fleet.now())

    async def _refused(self, replica: Replica, answer: Answer) -> None:
        # Clients sleep for what stands there: not for "nan", nor until a date by a clock that may be wrong.
        headers = [(name, b"1" if name == b"retry-after" and not value.isdigit() else value) for name, value in answer.headers]
        body = None
        with suppress(TimeoutError):
            async with asyncio.timeout(REFUSAL_SECONDS):
                body = await answer.short_body(MOST_REFUSAL)
        if body is None:                                 # some repeat the request's words: a long one is no failure of theirs
            headers = [each for each in headers if each[0] == b"retry-after"] + [(b"content-type", b"application/json")]
            body = error_body(_NO_REASON, "invalid_request_error" if answer.status < 500 else "server_error")
        refusal = answer.status, headers, body
        # A busy one's words go first: that another has no such model or key is no answer for the fleet.
        if self._refusal is None or self._refusal[0] not in _BUSY or answer.status in _BUSY:
            self._refusal = refusal
        if answer.status in (*_KEYS, 404):
            is_told = answer.status in _KEYS and bool(replica.upstream.key)
        else:
            is_told = _is_perhaps(answer.status)
        if is_told:
            request_id = self._request.request_id.decode("latin-1")
            logger.warning("%s answers %d to request %s", replica.url, answer.status, request_id)
        elif answer.status == 502:
            replica.fail(f"it answers {answer.status}")
        if answer.status not in _BUSY:
            self._note_failure(replica)
        elif self._request.has_deadline or answer.header(ALONE):
            self._num_failed += 1                        # of this request alone
        else:
            replica.asked_to_wait(answer.header(b"retry-after"))

    async def _whole(self, replica: Replica, answer: Answer, ticket: Ticket) -> None:
        """An answer in one piece. A long one is passed on as it comes, and as fast as its client reads."""
        if self.started:                                 # a stream that another replica does not continue as one
            raise ReplicaGaveUp(f"it answers {answer.status} to a request that was answered elsewhere")
        pieces, is_long = answer.pieces(), False
        with closing(Beginning()) as kept:
            try:
                async with asyncio.timeout(None if answer.status == 200 else REFUSAL_SECONDS):
                    async for piece in pieces:
                        if is_long := not kept.add(piece):
                            break
            except TimeoutError:
                raise ReplicaFailure(f"it answers {answer.status}, and no more comes") from None
            body = kept.close()
        self._stay()
        if answer.status == 200 and self._request.is_computed:
            replica.silence.heard(ticket.serial, self._fleet.now())
        if not is_long:
            return await self._short(replica, answer, ticket, body)
        if not answer.is_framed:
            raise ReplicaFailure("its long answer does not say where it ends")
        self._is_whole = True
        await self._start(answer, answer.header(b"content-length"))
        await send_part(self._send, body, more=True, behind=answer.held)
        del body
        async for piece in pieces:
            await send_part(self._send, piece, more=True, behind=answer.held)
        self._answered(replica, answer, ticket, None, None)
        await self._send({"type": "http.response.body", "body": b""})

    async def _short(self, replica: Replica, answer: Answer, ticket: Ticket, body: bytes) -> None:
        """One that was kept until its end."""
        if not answer.is_framed and answer.media_type == b"application/json" and not _is_json(body):
            raise ReplicaFailure("its answer was cut")
        usage = text = None
        if answer.status == 200 and self._request.is_counted:
            with suppress(Overloaded, TimedOut):         # threads are busy: statistics are left out, the answer is not
                usage, text = await away_if_long(len(body), lambda: _read(body))
        self._answered(replica, answer, ticket, usage, text)
        await self._send_whole(answer.status, answer.headers, body)

    def _answered(self, replica: Replica, answer: Answer, ticket: Ticket, usage: Usage | None, text: str | None) -> None:
        replica.answered()
        if answer.status == 200 and self._is_of_model:
            replica.doubts.answered(self._request.prompt.model)
        if answer.status == 200 and self._request.method == "POST":
            now = self._fleet.now()
            is_usual = replica.was_heard(ticket.sent) and self._held_up <= HELD_UP * (now - ticket.sent)
            is_usual &= self._events.began or not self._request.is_counted
            replica.load.finish(ticket, now, usage, self._whole_chain(text), is_usual)
            self._fleet.answered(replica, usage)

    async def _stream(self, replica: Replica, answer: Answer, ticket: Ticket) -> None:
        events, last = self._events, b""
        with closing(EventCutter()) as cutter:
            try:
                async for piece in answer.pieces():
                    parts = cutter.cut(piece)
                    last = parts[-1].data if parts else last
                    await self._pass(parts, replica, answer, ticket)
                await self._pass(cutter.last(), replica, answer, ticket)
            finally:
                self._is_inside = cutter.is_inside
        # Of Anthropic's events the router knows the last one only; it matters where nothing else tells that they are all.
        if events.is_open if self._request.is_counted else not answer.is_framed and b"message_stop" not in last:
            raise ReplicaFailure("its stream ended before the answer did")
        self._answered(replica, answer, ticket, events.usage, events.text)
        await self._start(answer)
        await self._send({"type": "http.response.body", "body": b""})

    async def _pass(self, parts: list[Part], replica: Replica, answer: Answer, ticket: Ticket) -> None:
        events, counted, passed = self._events, self._request.is_counted, list[bytes]()
        try:
            for number, part in enumerate(parts, 1):
                if number % EVENTS_PER_TURN == 0:
                    await asyncio.sleep(0)
                if counted:
                    passed.append(events.take(part.data) if part.is_short else await self._taken(part))
                else:
                    passed.append(part.data)
        finally:                                         # also what came before an event that fails: it counts as sent
            if events.began or (passed and not counted):
                self._began(replica, answer, ticket)
            if body := b"".join(passed):
                events.shown = events.shown or not counted
                before = self._fleet.now()
                if events.shown:                         # a tool's call, too: no text, and no time is learned of when it begins
                    self._stay()
                    replica.silence.heard(ticket.serial, before, answer.give_up_standing)
                    replica.load.first_token(ticket, before)
                await self._start(answer)
                await send_part(self._send, body, more=True, behind=answer.held)
                self._held_up += self._fleet.now() - before

    async def _taken(self, part: Part) -> bytes:
        """What the client shall get of a long event. One that threads have no time for is not read: all streams would wait."""
        if part.is_whole:
            with suppress(Overloaded, TimedOut):
                return await away_if_long(len(part.data), partial(self._events.take, part.data))
        return self._events.pass_on(part.data)

    def _whole_chain(self, text: str | None) -> Chain:
        return with_answer(self._request.prompt, text) if text else ()

    def _began(self, replica: Replica, answer: Answer, ticket: Ticket) -> None:
        now = self._fleet.now()
        replica.silence.heard(ticket.serial, now, answer.give_up_standing)       # also where the client has it from another one
        if replica.load.first_token(ticket, now):
            self._fleet.first_token.observe(ticket.first - ticket.sent)
            self._fleet.predicted_first_token.observe(ticket.predicted.first_token)

    # -- to the client -------------------------------------------------------------------------------------------------

    async def _start(self, answer: Answer, length: bytes = b"") -> None:
        if not self.started:
            self.started = True
            headers = self._headers(answer.headers, length)
            await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def _send_whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.started = True
        length = b"" if status in _EMPTY else b"%d" % len(body)
        await self._send({"type": "http.response.start", "status": status, "headers": self._headers(headers, length)})
        await send_part(self._send, body)

    def _headers(self, headers: list[tuple[bytes, bytes]], length: bytes) -> list[tuple[bytes, bytes]]:
        named = {each.strip().lower() for name, value in headers if name == b"connection" for each in value.split(b",")}
        passed = [
            each for each in headers
            if each[0] not in _NOT_PASSED and each[0] not in named and not each[0].startswith(b"access-control-")
        ]
        passed.append((b"x-request-id", self._request.request_id))
        return [*passed, (b"content-length", length)] if length else passed


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except (ValueError, RecursionError):
        return False
    return True


def _read(body: bytes) -> tuple[Any, str]:
    """Usage and text of an answer that was not streamed; nothing of what it cannot read."""
    try:
        content = msgspec.json.decode(body)
        choice = content["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (ValueError, RecursionError, KeyError, IndexError, TypeError):
        return None, ""
    return usage_of(content), text if isinstance(text, str) else ""
