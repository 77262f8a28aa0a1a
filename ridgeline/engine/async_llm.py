"""AsyncLLM: the engine core in another process, its answers as async streams here.

This side holds the tokenizer: prompts become token ids and tokens become text in this process, so the engine's process
only ever computes. Knows asyncio, one child process and its two sockets; no torch, and nothing of HTTP.

    stream()/generate() ─ Add, Abort ─▶ engine process          one frame each
    AnswerStream        ◀─ Deltas ──── engine process          one frame per step, for all requests

The engine's process is looked after (engine/watchdog). When it dies, or says nothing for too long, it is started again
as often as `supervision` allows; every open request then goes to the new one with the tokens that have arrived here, and
continues from there. What was handed on to readers is never handed on again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from ridgeline.config import EngineConfig
from ridgeline.engine.caller import CALLER, Caller
from ridgeline.engine.children import start_child
from ridgeline.engine.frontend import Frontend, Prompt, RequestState
from ridgeline.engine.ipc import (
    FROM_ENGINE,
    SHOW_STACKS,
    TO_ENGINE,
    Abort,
    Add,
    Alive,
    DecodeError,
    Deltas,
    EncodeError,
    ForgetPrefixes,
    FromEngine,
    Loading,
    PrefixesForgotten,
    Ready,
    Refused,
    Shutdown,
    SocketDir,
    Stats,
    Switch,
    Switched,
)
from ridgeline.engine.load import LoadMeter
from ridgeline.engine.outputs import AnswerDelta, CompletionOutput, LogprobsAt, RequestOutput
from ridgeline.engine.tokenizer import Tokenizer
from ridgeline.engine.watchdog import Pulse, Restarts, Supervision, loading_limit
from ridgeline.errors import BadRequest, ConfigError, EngineDead, Overloaded, RequestError, RidgelineError, TimedOut
from ridgeline.log import get_logger
from ridgeline.messages import Request, TokenDelta
from ridgeline.metrics import RequestTimes, ServingMetrics
from ridgeline.models.config import load_model_config
from ridgeline.resolve import model_path
from ridgeline.sampling_params import RequestOutputKind, SamplingParams

logger = get_logger("async_llm")

LONG_WORK = 2_000                    # characters that take about a millisecond to tokenise: more would hold up the loop
_TURN_SECONDS = 0.02                 # news are taken in for so long before the event loop gets a turn
_STOP_SECONDS = 5.0                  # how long an engine may take to leave when asked
_STACKS_SECONDS = 0.5                # for a hung engine to write its stacks
_MAX_REPLAYS = 2                     # a request that came no further in so many engines may be what ends them
_UNREAD = 256                        # deltas a slow reader is handed one by one; what comes on top is joined to them


class AnswerStream:
    """The growing answers to one or several prompts: an async iterator over batches of (prompt number, AnswerDelta).

    A batch is everything that came since the last one, so a slow reader gets fewer and larger batches. `outputs` holds
    the whole so far. Whoever stops reading early must call close(), which aborts what still runs.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self.outputs: list[RequestOutput] = []
        self._llm = llm
        self._unfinished: set[str] = set()               # wire ids
        self._new: list[tuple[int, AnswerDelta]] = []
        self._error: RidgelineError | None = None
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def __aiter__(self) -> AnswerStream:
        return self

    async def __anext__(self) -> list[tuple[int, AnswerDelta]]:
        await self._news.wait()
        if self._new:
            batch, self._new = self._new, []
            if not self._ended.is_set():
                self._news.clear()
            return batch
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def complete(self) -> list[RequestOutput]:
        """All answers, once they are whole; nobody is woken for the parts."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        return self.outputs

    def close(self) -> None:
        """Abort whatever still runs. Does nothing after the end."""
        unfinished, self._unfinished = self._unfinished, set()
        self._end()
        for wire_id in unfinished:
            self._llm._forget(wire_id, tell_engine=True)

    def _add(self, wire_id: str, state: RequestState) -> int:
        self.outputs.append(state.output)
        self._unfinished.add(wire_id)
        return len(self.outputs) - 1

    def _push(self, place: int, delta: AnswerDelta) -> None:
        if len(self._new) >= _UNREAD and _join(self._new, place, delta):
            return
        self._new.append((place, delta))
        self._news.set()

    def _finish(self, wire_id: str) -> None:
        self._unfinished.discard(wire_id)
        if not self._unfinished:
            self._end()

    def _fail(self, error: RidgelineError) -> None:
        """One request of the stream failed: the whole stream did."""
        if self._error is None:
            self._error = error
        self.close()

    def _end_at(self, moment: float) -> None:
        """It fails if it has not ended at that moment, by time.monotonic()."""
        error = TimedOut("the request was not answered in the time that this server gives to one")
        self._timer = asyncio.get_running_loop().call_later(max(0.0, moment - time.monotonic()), self._fail, error)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ended.set()
        self._news.set()


class _Open:
    """A request that is in the engine, or will be once there is one again."""

    __slots__ = ("begun", "place", "replayed_at", "replays", "request", "request_id", "state", "stream", "times")

    def __init__(
        self, request_id: str, request: Request, state: RequestState, stream: AnswerStream, place: int, times: RequestTimes
    ) -> None:
        self.begun = False                               # a token has come
        self.replays = 0                                 # engines it went to since it last came further …
        self.replayed_at = 0                             # … than so many tokens
        self.request_id = request_id
        self.request = request
        self.state = state
        self.stream = stream
        self.place = place
        self.times = times

    @property
    def num_unfinished(self) -> int:
        return sum(not answer.finished() for answer in self.state.output.outputs)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.state.output.outputs)

    def again(self) -> Request:
        """The request for another engine: it goes on from what has arrived here."""
        if not self.begun:
            return self.request
        answers = self.state.output.outputs
        return replace(
            self.request, resumed={answer.index: answer.token_ids for answer in answers if not answer.finished()}
        )


class AsyncLLM:
    """`AsyncLLM()` is the embedded model; options are those of `ridgeline.config`, names as in vLLM.

    `supervision` says what is done about an engine that dies or hangs; by default a dead one stays dead.
    """

    engine_module = "ridgeline.engine.process"           # what runs in the engine's process

    def __init__(
        self, model: str | Path | None = None, *, supervision: Supervision | None = None, **options: Any
    ) -> None:
        self.config = EngineConfig.of(model=model, **options)
        self.supervision = supervision or Supervision()
        self.load = LoadMeter()
        self.max_queued_tokens: int | None = None        # prompt tokens that may wait; None: any number
        self.num_restarts = 0
        self.num_aborted = 0                             # requests that were ended from this side
        self.ready: Ready | None = None                  # what the engine said of itself; None before start() is through
        self.running = 0                                 # sequences that have a row
        self.free_blocks = 0
        self.metrics = ServingMetrics()
        self._switched: dict[str, bool] = {}             # techniques, as they were last switched; for engines to come
        self._switching: deque[asyncio.Future[str]] = deque()    # switch() calls without an answer yet
        self._frontend: Frontend | None = None           # None: not loaded yet
        self._longest_piece = 0                          # bytes of the vocabulary's longest token
        self._open: dict[str, _Open] = {}                # by wire id: never used twice, whatever callers name theirs
        self._wire_ids: dict[str, str] = {}              # ids that callers chose -> wire ids
        self._forgetting: deque[asyncio.Future[bool]] = deque()  # reset_prefix_cache calls without an answer yet
        self._process: _EngineProcess | None = None
        self._is_up = False                              # the process is ready and not known to be gone
        self._pulse = Pulse(self.supervision.silence)
        self._supervising: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._on_loading: Callable[[int, int], None] = lambda done, total: None
        self._died: asyncio.Future[RidgelineError] | None = None

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self, on_loading: Callable[[int, int], None] | None = None) -> None:
        """Start the engine and wait until it is ready. `on_loading(done, total)` hears of the weights' bytes."""
        async with self._starting:
            if self._process is None:
                await self._start(on_loading)
        self._require_alive()

    async def _start(self, on_loading: Callable[[int, int], None] | None) -> None:
        if on_loading is not None:
            self._on_loading = on_loading
        path = model_path(self.config)
        await asyncio.to_thread(load_model_config, path)         # a wrong model is told at once, and by its own error
        loop = asyncio.get_running_loop()
        self._died = loop.create_future()
        began = time.monotonic()
        process = self._launch()
        try:
            await self.load_tokenizer()
            lost = await self._loaded(process, None)
            if lost is not None:
                self._die(lost)
            self._require_alive()
        except BaseException:
            await self.shutdown()
            raise
        self._opened(process.ready.result())             # last of all: from here on requests are taken
        self._supervising = loop.create_task(self._supervise(process, loading_limit(time.monotonic() - began)))

    def _launch(self) -> _EngineProcess:
        ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        process = _EngineProcess(
            self.engine_module, self.config, ready, lambda message: self._take(message, ready), self._lost
        )
        self._process = process
        return process

    def _lost(self) -> None:
        while self._switching:
            if not (waiting := self._switching.popleft()).done():
                waiting.set_result("the engine was lost before it answered; try again")
        self._is_up = False                              # _supervise is woken by the same news, a moment later

    async def _loaded(self, process: _EngineProcess, limit: float | None) -> RidgelineError | None:
        """Wait until the process is ready, or say why it is not."""
        assert self._died is not None
        news: list[asyncio.Future[Any]] = [process.ready, process.lost, self._died]
        await asyncio.wait(news, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if process.lost.done():
            return process.lost.result()
        return None if process.ready.done() else EngineDead(f"the engine was not ready after {limit:.0f} s")

    def _opened(self, ready: Ready) -> None:
        self.free_blocks = ready.num_blocks
        self.ready = ready
        self._pulse = Pulse(self.supervision.silence)
        self._is_up = True
        for technique, on in self._switched.items():
            self._switching.append(asyncio.get_running_loop().create_future())   # nobody waits for this answer
            self._send(TO_ENGINE.encode(Switch(technique, on)))

    async def _supervise(self, process: _EngineProcess, limit: float) -> None:
        """As long as engines may be started: put a new one in the place of one that is gone."""
        restarts = Restarts(self.supervision)
        while True:
            lost: RidgelineError | None = await self._until_lost(process)
            self._lost()
            self.running = 0
            while lost is not None:
                delay = restarts.next_delay()
                if delay is None:
                    often = f", after {restarts.recent} restarts" if restarts.recent else ""
                    self._die(type(lost)(f"{lost}{often}"))
                    return
                logger.error("%s; it is started again, %d requests wait for it", lost, len(self._open))
                await process.stop(at_once=True)
                await asyncio.sleep(delay)
                process = self._launch()
                lost = await self._loaded(process, limit)
            self.num_restarts += 1
            self._opened(process.ready.result())
            logger.info("the engine is back; %d requests go on", len(self._open))
            self._replay(is_last=restarts.recent >= self.supervision.max_restarts)

    async def _until_lost(self, process: _EngineProcess) -> RidgelineError:
        """Returns when the process is gone, or was given up because it says nothing."""
        tick = min(1.0, max(0.05, self.supervision.silence / 8))
        while True:
            began = time.monotonic()
            await asyncio.wait([process.lost], timeout=tick)
            if process.lost.done():
                return process.lost.result()
            if time.monotonic() - began > 2 * tick + 1:
                self._pulse.beat()                       # we were held up ourselves: its news may wait to be read
            elif self._pulse.stopped:
                self._lost()
                logger.error("the engine said nothing for %.1f s; its stacks follow", self._pulse.silent_for)
                await process.show_stacks()
                return EngineDead(f"the engine hung for {self._pulse.silent_for:.0f} s")

    def _replay(self, is_last: bool) -> None:
        """Everything open goes to the new engine, in the order in which it came.

        Into the last one that may be started goes nothing that may have ended the others: no token came of it in any.
        """
        for wire_id, opened in list(self._open.items()):
            tokens = opened.num_tokens
            opened.replays = 1 if tokens > opened.replayed_at else opened.replays + 1
            opened.replayed_at = tokens
            if is_last and opened.replays > _MAX_REPLAYS:
                opened.stream._fail(RequestError(f"the engine failed {opened.replays} times with this request in it"))
            elif wire_id in self._open:                  # else its stream failed with a part of it
                self._send(TO_ENGINE.encode(Add(opened.again())))
        for waiting in self._forgetting:
            if not waiting.done():
                waiting.set_result(True)                 # the new engine knows no prefixes
        self._forgetting.clear()

    async def load_tokenizer(self) -> None:
        """The tokenizer and chat template, which start() else loads beside the weights. Called before, it tells a mistake
        in them before there is an engine."""
        if self._frontend is not None:
            return
        frontend = await asyncio.to_thread(Frontend.load, self.config.model, model_path(self.config))
        if frontend.tokenizer is not None:
            self._longest_piece = max(map(len, frontend.tokenizer.token_pieces()), default=0)
        self._frontend = frontend

    @property
    def is_alive(self) -> bool:
        """Started to the end, and neither dead nor shut down. It may be on its way back; `state` says more."""
        return self.ready is not None and self._died is not None and not self._died.done()

    @property
    def state(self) -> str:
        """ok: a step was finished lately, or there is nothing to do. Else loading, stalled, restarting or dead."""
        if self._died is not None and self._died.done():
            return "dead"
        if self.ready is None:
            return "loading"
        if not self._is_up:
            return "restarting"
        return "stalled" if self._pulse.stopped else "ok"

    @property
    def num_open(self) -> int:
        """Requests in the engine, running or waiting."""
        return len(self._open)

    async def died(self) -> RidgelineError:
        """Waits until the engine is no more, and says why."""
        if self._died is None:
            raise EngineDead("the engine was not started")
        return await asyncio.shield(self._died)

    async def shutdown(self) -> None:
        """End the engine's process. Requests that still wait get EngineDead."""
        self._die(EngineDead("the engine was shut down"))
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.wait([self._supervising])
        if self._process is not None:
            gently, self._is_up = self._is_up, False
            await self._process.stop(gently)
        if self._frontend is not None and self._frontend.grammars is not None:
            self._frontend.grammars.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    def _require_alive(self) -> None:
        if self._died is not None and self._died.done():
            raise self._died.result()

    def _die(self, error: RidgelineError) -> None:
        """The first reason counts; every waiting request is told."""
        if self._died is None or self._died.done():
            return
        self._died.set_result(error)
        for opened in list(self._open.values()):
            opened.stream._fail(error)
        for waiting in self._forgetting:
            if not waiting.done():
                waiting.set_exception(error)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer as it grows: each output holds everything so far, or what `output_kind` says.

        Leaving the loop early aborts the request.
        """
        kind = (sampling_params or SamplingParams()).output_kind
        stream = await self.stream([prompt], sampling_params, request_id, priority)
        try:
            if kind is RequestOutputKind.FINAL_ONLY:
                yield (await stream.complete())[0]
                return
            async for batch in stream:
                output = stream.outputs[0]
                yield _copy(output) if kind is RequestOutputKind.CUMULATIVE else _news(output, batch)
        finally:
            stream.close()

    async def stream(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        arrived: float = 0.0,
    ) -> AnswerStream:
        """Send prompts to the engine. BadRequest when one cannot run, Overloaded when there is no room; then none does.

        Without `sampling_params` the model's own defaults count.
        The first prompt goes by `request_id`, further ones by `request_id`-1, -2 and so on. `arrived` is when its client
        had sent it all, by time.monotonic(); 0: now.
        """
        arrived = arrived or time.monotonic()
        await self.start()
        params = sampling_params or self.get_default_sampling_params()
        if params.truncate_prompt_tokens is None:        # else what is too long is made to fit
            for prompt in prompts:
                self._check_size(prompt)

        caller = CALLER.get()

        def make() -> list[tuple[Request, bytes, RequestState]]:
            return [self._make(prompt, params, priority, cache_salt, caller) for prompt in prompts]

        if params.structured_outputs is not None and self._frontend is not None and self._frontend.grammars is not None:
            await asyncio.wrap_future(self._frontend.grammars.check_soon(params.structured_outputs))
        made = await asyncio.to_thread(make) if _is_long(prompts, params) else make()
        # From here to the end nothing waits: the names that are free now are still free when they are taken.
        names = [request_id and (f"{request_id}-{place}" if place else request_id) for place in range(len(made))]
        taken = next((name for name in names if name in self._wire_ids), None)
        if taken is not None:
            raise BadRequest(f"request id {taken!r} is already running")
        self._require_alive()
        self._require_room(sum(len(request.prompt_token_ids) for request, _, _ in made), caller)
        stream = AnswerStream(self)
        try:
            for name, (request, frame, state) in zip(names, made, strict=True):
                self._submit(name, request, frame, state, stream, arrived)
        except BaseException:
            stream.close()
            raise
        if not made:
            stream._end()
        elif caller.ends is not None:
            stream._end_at(caller.ends)
        return stream

    async def chat_tokens(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        **template: Any,
    ) -> list[int]:
        """A conversation through the model's chat template, as the token ids of a prompt. Most templates write the special
        tokens themselves; `add_special_tokens` is for those that do not."""
        await self.start()
        tokenizer = self.get_tokenizer()

        def render() -> list[int]:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **template
            )
            self._check_text(text)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens)

        # A thread costs several switches, of 5 ms each when this one is busy; a short chat takes a tenth of that.
        return render() if not template.get("tools") and _is_brief(messages) else await asyncio.to_thread(render)

    async def text_tokens(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A text as token ids. Of what could be no prompt here, for its length, there are none: BadRequest."""
        await self.start()
        tokenizer = self.get_tokenizer()
        self._check_text(text)
        if len(text) < LONG_WORK:
            return tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)

    async def abort(self, request_id: str) -> None:
        """End one prompt's answers where they are, with the finish reason "abort"; other prompts of its stream go on.

        Unknown ids are no error: it may have finished meanwhile.
        """
        wire_id = self._wire_ids.get(request_id, request_id)
        opened = self._open.get(wire_id)
        if opened is None or opened.request_id != request_id:
            return
        self._forget(wire_id, tell_engine=True)
        output = opened.state.output
        for answer in output.outputs:
            if not answer.finished():
                last = TokenDelta(wire_id, answer.index, [], finish_reason="abort", num_cached_tokens=output.num_cached_tokens)
                opened.stream._push(opened.place, opened.state.take(last)[0])
        opened.stream._finish(wire_id)

    async def reset_prefix_cache(self) -> bool:
        """Forget every computed prefix. False, and nothing is forgotten, while requests hold part of the KV cache."""
        await self.start()
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._forgetting.append(answer)                  # the engine answers in order
        self._send(TO_ENGINE.encode(ForgetPrefixes()))
        return await answer

    async def switch(self, technique: str, on: bool) -> None:
        """Leave an exact technique out on the live engine, or take it in again; engines started later do the same.

        BadRequest for one that cannot be switched. `ready.techniques` has what is on.
        """
        await self.start()
        if not self._is_up:
            raise BadRequest("the engine is being started again; try later")
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._switching.append(answer)                   # the engine answers in order
        self._send(TO_ENGINE.encode(Switch(technique, on)))
        if refused := await answer:
            raise BadRequest(refused)
        self._switched[technique] = on

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The fields of SamplingParams that the model's generation_config.json sets; known once the tokenizer is loaded."""
        return {} if self._frontend is None else self._frontend.sampling_defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for; used where no SamplingParams are given."""
        return SamplingParams(**self.sampling_defaults)

    def get_tokenizer(self) -> Tokenizer:
        if self._frontend is None or self._frontend.tokenizer is None:
            raise BadRequest("there is no tokenizer: the engine is not started, or skip_tokenizer_init is set")
        return self._frontend.tokenizer

    def _check_size(self, prompt: Prompt) -> None:
        """Before any work is spent on it. The engine checks lengths too; this spares it a frame of a million tokens."""
        given = _given(prompt)
        if isinstance(given, str):
            self._check_text(given)
        elif isinstance(given, Sized):
            self._check_length(len(given))

    def _check_text(self, text: str) -> None:
        """No token is longer than the vocabulary's longest: of more text than that there is no need to know its tokens."""
        assert self.ready is not None
        most = self.ready.max_model_len * self._longest_piece
        # Counted in characters first: those are no more than the bytes, and cost nothing to count.
        if most and (len(text) > most or len(text.encode("utf-8", "surrogatepass")) > most):
            raise BadRequest(
                f"the prompt has more than {most} bytes of text, which cannot fit: "
                f"max_model_len is {self.ready.max_model_len}"
            )

    def _check_length(self, tokens: int) -> None:
        assert self.ready is not None
        if tokens >= self.ready.max_model_len:
            raise BadRequest(
                f"the prompt has {tokens} tokens, which leaves no room for an answer: "
                f"max_model_len is {self.ready.max_model_len}"
            )

    def _require_room(self, tokens: int, caller: Caller) -> None:
        """Overloaded when so many prompt tokens more are too many, or their first answer would come too late."""
        waiting, most, wait = self.load.waiting_tokens, self.max_queued_tokens, self.predicted_wait()
        if most is not None and waiting and waiting + tokens > most:     # whoever finds nobody waiting may always come
            raise Overloaded(f"{waiting} prompt tokens are waiting, of at most {most}; try again later", wait)
        if caller.ttft_deadline is not None and wait is not None and wait > caller.ttft_deadline:
            raise Overloaded(
                f"the first token would come after about {wait:.1f} s; the deadline is {caller.ttft_deadline:g} s", wait
            )

    def predicted_wait(self) -> float | None:
        """Seconds that a new request would wait before it begins; None while nothing is known."""
        return self.load.wait(self.ready.max_num_seqs) if self.ready is not None else None

    def _make(
        self, prompt: Prompt, params: SamplingParams, priority: int, cache_salt: str, caller: Caller
    ) -> tuple[Request, bytes, RequestState]:
        """(request, its frame for the engine, state here). Whatever can be wrong with a request is found here, before any other
        part of it exists."""
        assert self._frontend is not None
        request, state = self._frontend.request(prompt, params, priority=priority, cache_salt=cache_salt)
        self._check_length(len(request.prompt_token_ids))
        if caller.cache_salt:
            request.cache_salt = f"{caller.cache_salt}:{request.cache_salt}"
        request.prefix_caching = caller.prefix_caching
        try:
            return request, TO_ENGINE.encode(Add(request)), state
        except EncodeError as error:
            raise BadRequest(f"the request cannot be sent to the engine: {error}") from None

    def _submit(
        self, name: str | None, request: Request, frame: bytes, state: RequestState, stream: AnswerStream, arrived: float
    ) -> None:
        wire_id, output = request.request_id, state.output
        times = output.metrics = self.metrics.sent(len(output.prompt_token_ids), len(output.outputs), arrived)
        if not request.prefix_caching:
            times.off = ("prefix caching",)
        self._open[wire_id] = _Open(name or wire_id, request, state, stream, stream._add(wire_id, state), times)
        self.load.queued(len(request.prompt_token_ids), request.params.n)
        if name:
            self._wire_ids[name] = wire_id
            state.output.request_id = name
        self._send(frame)

    def _forget(self, wire_id: str, tell_engine: bool) -> None:
        opened = self._open.pop(wire_id, None)
        if opened is not None:
            if self._wire_ids.get(opened.request_id) == wire_id:
                del self._wire_ids[opened.request_id]
            request = opened.request
            self.load.left(len(request.prompt_token_ids), request.params.n, opened.begun, finished=not tell_engine)
            if tell_engine:
                self.num_aborted += 1
                self.metrics.left(opened.times, opened.num_unfinished, opened.stream._error is not None)
                self._send(TO_ENGINE.encode(Abort(wire_id)))

    def _send(self, frame: bytes) -> None:
        """Without an engine nothing is lost: what is open then is sent once there is one, in its state of that time."""
        if self._is_up and self._process is not None:
            self._process.send(frame)

    # -- news from the engine ------------------------------------------------------------------------------------------

    def _take(self, message: FromEngine, ready: asyncio.Future[Ready]) -> None:
        if isinstance(message, Deltas):
            self._pulse.stepped()
            self.running, self.free_blocks = message.running, message.free_blocks
            ended = message.ended or time.monotonic()
            for wire_id in message.started:
                if wire_id in self._open:
                    self.metrics.started(self._open[wire_id].times, message.began)
            for delta in message.deltas:
                opened = self._open.get(delta.request_id)
                if opened is not None:                   # else it was aborted while this was on its way
                    self._take_delta(opened, delta, ended)
        elif isinstance(message, Switched):
            if self.ready is not None:
                self.ready.techniques = message.active
            if self._switching and not (waiting_for := self._switching.popleft()).done():
                waiting_for.set_result(message.refused)
        elif isinstance(message, Stats):
            self.metrics.engine = message.stats
        elif isinstance(message, Alive):
            self._pulse.turned(message.steps, message.busy)
        elif isinstance(message, Refused):
            if message.request_id in self._open:
                self._open[message.request_id].stream._fail(BadRequest(message.reason))
        elif isinstance(message, PrefixesForgotten):
            waiting = self._forgetting.popleft()
            if not waiting.done():                       # whoever asked may have gone
                waiting.set_result(message.done)
        elif isinstance(message, Loading):
            self._on_loading(message.done, message.total)
        elif isinstance(message, Ready):
            self.metrics.engine_started()
            if not ready.done():
                ready.set_result(message)
        elif self._process is not None:
            self._process.lose(ConfigError(message.reason) if message.config else EngineDead(message.reason))

    def _take_delta(self, opened: _Open, delta: TokenDelta, ended: float) -> None:
        state = opened.state
        if state.output.outputs[delta.index].finished():
            return                                       # a stop string has ended it here
        if opened.replays:
            delta.num_cached_tokens = state.output.num_cached_tokens     # that of the first time counts
        if not opened.begun:
            opened.begun = True
            self.load.begun(len(opened.request.prompt_token_ids), opened.request.params.n)
        try:
            new, stop_here = state.take(delta)
        except RidgelineError as error:
            self.metrics.answered(opened.times, delta.index, "error")
            opened.stream._fail(error)
            return
        self.metrics.took(opened.times, delta.index, len(new.token_ids), ended)
        if new.finish_reason is not None:
            self.metrics.answered(opened.times, delta.index, new.finish_reason)
        if stop_here:
            self._send(TO_ENGINE.encode(Abort(delta.request_id, delta.index)))
        opened.stream._push(opened.place, new)
        if state.output.finished:
            self._forget(delta.request_id, tell_engine=False)
            opened.stream._finish(delta.request_id)


class _EngineProcess:
    """The child process and its sockets. Calls back, on the event loop, with each message and at its loss.

    `lost` is why it is of no use any more: it ended, it said that it failed, or it was stopped.
    """

    def __init__(
        self,
        module: str,
        config: EngineConfig,
        ready: asyncio.Future[Ready],
        on_message: Callable[[FromEngine], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.ready = ready
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[RidgelineError] = self._loop.create_future()
        self._exited = asyncio.Event()
        self._bad_frames = 0
        self._sockets = SocketDir()
        self._context = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._to_engine.setsockopt(zmq.SNDHWM, 0)        # as many as there are open requests; those are limited before
        self._to_engine.bind(self._sockets.address("to-engine"))
        self._from_engine = self._context.socket(zmq.PULL)
        self._from_engine.bind(self._sockets.address("from-engine"))
        self._fd: int = self._from_engine.FD
        self._loop.add_reader(self._fd, self._read)
        settings = {"options": config.flat(), "folder": str(self._sockets.path), "parent": os.getpid()}
        self._child = start_child(module, json.dumps(settings))
        # Also when nobody calls stop(): at the latest when the interpreter ends.
        self._cleanup = weakref.finalize(self, _abandon, self._child, self._sockets)
        threading.Thread(target=self._watch, name="engine-exit", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, frame: bytes) -> None:
        try:
            self._to_engine.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            pass                                         # the other end is gone; _watch says so in a moment

    def lose(self, why: RidgelineError) -> None:
        """The first reason counts. From now on nothing it says is heard."""
        if not self.lost.done():
            self.lost.set_result(why)
            self._loop.remove_reader(self._fd)           # what nobody reads would wake the event loop for ever
            self._on_lost()

    async def show_stacks(self) -> None:
        """Have the process write its stacks to the log. A stopped one is woken for it."""
        self.lose(EngineDead("the engine's process hung"))
        for number in (SHOW_STACKS, signal.SIGCONT):
            self._child.send_signal(number)
        await asyncio.sleep(_STACKS_SECONDS)

    async def stop(self, gently: bool = False, at_once: bool = False) -> None:
        """Returns when the process is gone and nothing of it is left."""
        self.lose(EngineDead("the engine's process was stopped"))
        if self._cleanup.alive:
            if at_once:
                self._child.kill()
            elif gently:
                self.send(TO_ENGINE.encode(Shutdown()))
            else:
                self._child.terminate()
            for force in (self._child.terminate, self._child.kill):
                try:
                    await asyncio.wait_for(self._exited.wait(), _STOP_SECONDS)
                    break
                except TimeoutError:
                    force()
            await self._exited.wait()
            self._loop.remove_reader(self._fd)
            self._context.destroy(linger=0)
            self._cleanup()

    def _read(self) -> None:
        """Take what has arrived. The descriptor signals changes only, so leave nothing unread without coming back."""
        if self._from_engine.closed or self.lost.done():
            return
        until = time.monotonic() + _TURN_SECONDS
        while time.monotonic() < until:
            try:
                frame = self._from_engine.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = FROM_ENGINE.decode(frame)
            except DecodeError as error:
                self._bad_frames += 1
                logger.warning("dropped a frame from the engine (%d so far): %s", self._bad_frames, error)
                continue
            self._on_message(message)
        self._loop.call_soon(self._read)

    def _watch(self) -> None:
        """In a thread: wait for the process's end."""
        code = self._child.wait()
        try:
            self._loop.call_soon_threadsafe(self._ended, code)
        except RuntimeError:
            pass                                         # the event loop is closed: nobody is left to be told

    def _ended(self, code: int) -> None:
        self._read()                                     # its last words say more than its exit code
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        self.lose(EngineDead(f"the engine's process {how}"))
        self._exited.set()


def _abandon(child: subprocess.Popen[bytes], sockets: SocketDir) -> None:
    if child.poll() is None:
        child.kill()
        child.wait()
    sockets.close()


def _join(unread: list[tuple[int, AnswerDelta]], place: int, delta: AnswerDelta) -> bool:
    """Add to the answer's newest delta in the list, if that is near its end. The reader gets it in one piece."""
    for at in range(len(unread) - 1, max(-1, len(unread) - 1 - _UNREAD), -1):
        old = unread[at][1]
        if unread[at][0] == place and old.index == delta.index:
            old.text += delta.text
            old.token_ids.extend(delta.token_ids)
            if old.logprobs is not None:
                old.logprobs.extend(delta.logprobs or [])
            old.finish_reason, old.stop_reason = delta.finish_reason, delta.stop_reason
            old.text_offsets.extend(delta.text_offsets)
            return True
    return False


def _given(prompt: Prompt) -> Any:
    """A prompt's text or token ids, of whatever type they are."""
    if not isinstance(prompt, Mapping):
        return prompt
    tokens = prompt.get("prompt_token_ids")
    return prompt.get("prompt") if tokens is None else tokens


def _is_brief(messages: list[dict[str, Any]]) -> bool:
    """Whether a conversation takes no time worth a thread: few messages, of little text each."""
    values = [value for message in messages[:17] for value in message.values() if value is not None]
    return len(messages) <= 16 and all(isinstance(each, str) for each in values) and sum(map(len, values)) < LONG_WORK


def _is_long(prompts: Sequence[Prompt], params: SamplingParams) -> bool:
    """Whether to make these requests away from the event loop."""
    given = sum(len(each) for each in map(_given, prompts) if isinstance(each, Sized))
    # Every prompt has bad words to tokenise and stop strings to prepare, every answer its own search for those.
    beside = sum(map(len, [*params.bad_words, *params.stop])) + params.n * (1 + len(params.stop))
    return given + len(prompts) * beside >= LONG_WORK


def _copy(output: RequestOutput) -> RequestOutput:
    """As it is now: the original goes on growing."""
    answers = [
        replace(answer, token_ids=answer.token_ids.copy(), logprobs=answer.logprobs and answer.logprobs.copy())
        for answer in output.outputs
    ]
    return replace(output, outputs=answers)


def _news(output: RequestOutput, batch: list[tuple[int, AnswerDelta]]) -> RequestOutput:
    """Only what is new: of answers with news, their new tokens and text."""
    answers: dict[int, CompletionOutput] = {}
    for _, delta in batch:
        whole = output.outputs[delta.index]
        logprobs = None if whole.logprobs is None else list[LogprobsAt]()
        new = answers.setdefault(
            delta.index, CompletionOutput(delta.index, cumulative_logprob=whole.cumulative_logprob, logprobs=logprobs)
        )
        new.text += delta.text
        new.token_ids.extend(delta.token_ids)
        new.text_offsets.extend(delta.text_offsets)
        if new.logprobs is not None:
            new.logprobs.extend(delta.logprobs or [])
        new.finish_reason, new.stop_reason = delta.finish_reason, delta.stop_reason
    return replace(output, outputs=list(answers.values()))
