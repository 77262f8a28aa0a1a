"""Responses that no client waits for: `/v1/responses` with `background: true`, fetched by their id, and cancelled.

The response is stored before it begins, and again when it ends. Its answers keep their places in the queue meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.engine.client.long_work import away_if_long, away_to_answer
from ridgeline.engine.client.request_context import Caller
from ridgeline.errors import BadRequest, NotNow, Unsupported
from ridgeline.server.api.openai.responses_answer import ResponsesWriter
from ridgeline.server.api.openai.responses_continued import found
from ridgeline.server.api.prepared import Job
from ridgeline.server.endpoints import Generation, size_of
from ridgeline.server.http.failures import describe
from ridgeline.server.http.gate import caller_of
from ridgeline.server.http.hosts import Scope
from ridgeline.server.http.stream import JsonText, Send, send_json


class Kind(msgspec.Struct):
    """The part of a stored response that says whether it can be cancelled."""

    background: bool = False


class Responses(Generation):
    """The endpoint of /v1/responses, with or without a client that waits."""

    _tasks: dict[str, asyncio.Task[None]] | None = None

    @property
    def tasks(self) -> dict[str, asyncio.Task[None]]:
        """By the response's id; only those that run."""
        if self._tasks is None:
            self._tasks = {}
        return self._tasks

    def _run(self, scope: Scope, caller: Caller, job: Job, send: Send) -> Coroutine[Any, Any, None]:
        return (self._run_behind if job.background else super()._run)(scope, caller, job, send)

    async def _run_behind(self, scope: Scope, caller: Caller, job: Job, send: Send) -> None:
        writer = job.writer
        assert isinstance(writer, ResponsesWriter)
        with ExitStack() as places:
            places.enter_context(self._service.slots.taking(len(job.prompts) * job.params.n, already=1, goes_on=True))
            others = self._service.stored.num_running if writer.keeps else 0
            body = writer.stored_as("queued")
            if body is None and others:
                raise NotNow("the store is full of responses that run in the background; try again when one has ended")
            if body is None:
                raise Unsupported("background needs a place in the store of responses, and there is none", field="background")
            name = job.headers[0][1].decode()
            task = self.tasks[name] = asyncio.create_task(self._work(caller, job, writer, places.pop_all()))
            task.add_done_callback(lambda _: self.tasks.pop(name, None))
        await send_json(send, 200, body, job.headers)

    async def _work(self, caller: Caller, job: Job, writer: ResponsesWriter, places: ExitStack) -> None:
        with places:
            try:
                stream = await self._start(caller, job)
                try:
                    if writer.stored_as("in_progress") is None:
                        return                           # no client could fetch it
                    outputs = await stream.complete()
                    await away_to_answer(size_of(writer, outputs), lambda: writer.body(outputs))
                finally:
                    self._end(job, stream)
            except asyncio.CancelledError:
                writer.stored_as("cancelled")
            except Exception as error:
                _, body, _ = describe(error, self._prompt_field, self._dialect.names)
                writer.stored_as("failed", msgspec.json.decode(body)["error"]["message"])

    async def cancel(self, request: Request) -> Response:
        name, key = request.path_params["id"], caller_of(request.scope).key
        entry = found(self._service, name, key)          # also: whether it is this key's
        if await self.stop(name):
            entry = found(self._service, name, key)
        elif not await away_if_long(len(entry.response), lambda: msgspec.json.decode(entry.response, type=Kind).background):
            raise BadRequest("Cannot cancel a synchronous response: it was not sent with background: true")
        return JsonText(entry.response)                  # in pieces: it may have megabytes of tools

    async def stop(self, name: str) -> bool:
        """End the work on a response; False: it does not run."""
        if (task := self.tasks.get(name)) is None:
            return False
        task.cancel()
        await asyncio.wait((task,))
        return True
