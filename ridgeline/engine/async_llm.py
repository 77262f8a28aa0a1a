"""AsyncLLM: the engine core in another process, its answers as async streams here.

This side holds the tokenizer: prompts become token ids and tokens become text in this process, so the engine's process
only ever computes. Knows asyncio, one child process and its two sockets; no torch, and nothing of HTTP.

    stream()/generate() ─ Add, Abort ─▶ engine process          one frame each
    AnswerStream        ◀─ Deltas ──── engine process          one frame per step, for all requests
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from ridgeline.config import EngineConfig
from ridgeline.engine.frontend import Frontend, Prompt, RequestState
from ridgeline.engine.ipc import (
    FROM_ENGINE,
    TO_ENGINE,
    Abort,
    Add,
    DecodeError,
    Deltas,
    Failed,
    Loading,
    Ready,
    Refused,
    Shutdown,
    SocketDir,
)
from ridgeline.engine.outputs import AnswerDelta, RequestOutput
from ridgeline.engine.tokenizer import Tokenizer
from ridgeline.errors import BadRequest, ConfigError, EngineDead, RidgelineError
from ridgeline.log import get_logger
from ridgeline.messages import Request, TokenDelta
from ridgeline.models.config import load_model_config
from ridgeline.resolve import model_path
from ridgeline.sampling_params import SamplingParams

logger = get_logger("async_llm")

LONG_TEXT = 2_000                    # characters that take about a millisecond to tokenise: more would hold up the loop
_FRAMES_PER_TURN = 64                # frames read before the event loop gets a turn
_STOP_SECONDS = 5.0                  # how long an engine may take to leave when asked


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
        for wire_id in list(self._unfinished):
            self._llm._forget(wire_id, tell_engine=True)
        self._unfinished.clear()
        self._end()

    def _add(self, wire_id: str, state: RequestState) -> int:
        self.outputs.append(state.output)
        self._unfinished.add(wire_id)
        return len(self.outputs) - 1

    def _push(self, place: int, delta: AnswerDelta) -> None:
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

    def _end(self) -> None:
        self._ended.set()
        self._news.set()


class _Open:
    """A request that is in the engine."""

    __slots__ = ("place", "request_id", "state", "stream")

    def __init__(self, request_id: str, state: RequestState, stream: AnswerStream, place: int) -> None:
        self.request_id = request_id
        self.state = state
        self.stream = stream
        self.place = place


class AsyncLLM:
    """`AsyncLLM()` is the embedded model; options are those of `ridgeline.config`, names as in vLLM."""

    def __init__(self, model: str | Path = "", **options: Any) -> None:
        self.config = EngineConfig.of(model=str(model), **options)
        self.ready: Ready | None = None                  # what the engine said of itself; None before
        self.running = 0                                 # sequences that have a row
        self.free_blocks = 0
        self._frontend = Frontend(None)
        self._open: dict[str, _Open] = {}                # by wire id: never used twice, whatever callers name theirs
        self._wire_ids: dict[str, str] = {}              # the callers' ids -> wire ids
        self._process: _EngineProcess | None = None
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
        self._died = asyncio.get_running_loop().create_future()
        is_ready = asyncio.Event()
        self._died.add_done_callback(lambda _: is_ready.set())
        self._process = _EngineProcess(
            self.config, lambda message: self._take(message, is_ready), lambda reason: self._die(EngineDead(reason))
        )
        try:
            self._frontend = await asyncio.to_thread(Frontend.load, self.config.model, path)
            await is_ready.wait()
            self._require_alive()
        except BaseException:
            await self.shutdown()
            raise

    @property
    def is_alive(self) -> bool:
        """Ready, and neither dead nor shut down."""
        return self.ready is not None and self._died is not None and not self._died.done()

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
        if self._process is not None:
            await self._process.stop(self.ready is not None)

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

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer as it grows: each output holds everything so far. Leaving the loop early aborts the request."""
        stream = await self.stream([prompt], sampling_params, request_id, priority)
        try:
            async for _ in stream:
                yield _copy(stream.outputs[0])
        finally:
            stream.close()

    async def stream(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AnswerStream:
        """Send prompts to the engine. BadRequest when one cannot run; then none does."""
        await self.start()
        params = sampling_params or SamplingParams()
        if request_id is not None and request_id in self._wire_ids:
            raise BadRequest(f"request id {request_id!r} is already running")

        def make() -> list[tuple[Request, RequestState]]:
            return [
                self._frontend.request(prompt, params, priority=priority, cache_salt=cache_salt) for prompt in prompts
            ]

        made = await asyncio.to_thread(make) if _is_long(prompts) else make()
        for request, _ in made:
            self._check_length(request)
        stream = AnswerStream(self)
        for number, (request, state) in enumerate(made):
            name = request.request_id if request_id is None else request_id if not number else f"{request_id}-{number}"
            state.output.request_id = name
            self._submit(name, request, state, stream)
        return stream

    async def chat_tokens(self, messages: list[dict[str, Any]], **template: Any) -> list[int]:
        """A conversation through the model's chat template, as the token ids of a prompt."""
        await self.start()
        return await asyncio.to_thread(self._frontend.chat_tokens, messages, **template)

    async def abort(self, request_id: str) -> None:
        """End a request before its time; its reader sees the answer end where it is. Unknown ids are no error."""
        opened = self._open.get(self._wire_ids.get(request_id, ""))
        if opened is not None:
            for answer in opened.state.output.outputs:
                answer.finish_reason = answer.finish_reason or "abort"
            opened.state.output.finished = True
            opened.stream.close()

    def get_tokenizer(self) -> Tokenizer:
        if self._frontend.tokenizer is None:
            raise BadRequest("there is no tokenizer: the engine is not started, or skip_tokenizer_init is set")
        return self._frontend.tokenizer

    def _check_length(self, request: Request) -> None:
        """The engine checks this too; here it spares the engine a frame of a million tokens."""
        assert self.ready is not None
        if len(request.prompt_token_ids) >= self.ready.max_model_len:
            raise BadRequest(
                f"the prompt has {len(request.prompt_token_ids)} tokens, which leaves no room for an answer: "
                f"max_model_len is {self.ready.max_model_len}"
            )

    def _submit(self, name: str, request: Request, state: RequestState, stream: AnswerStream) -> None:
        self._require_alive()
        wire_id = request.request_id
        self._open[wire_id] = _Open(name, state, stream, stream._add(wire_id, state))
        self._wire_ids[name] = wire_id
        self._send(Add(request))

    def _forget(self, wire_id: str, tell_engine: bool) -> None:
        opened = self._open.pop(wire_id, None)
        if opened is not None:
            self._wire_ids.pop(opened.request_id, None)
            if tell_engine:
                self._send(Abort(wire_id))

    def _send(self, message: Add | Abort | Shutdown) -> None:
        if self.is_alive and self._process is not None:
            self._process.send(message)

    # -- news from the engine ------------------------------------------------------------------------------------------

    def _take(self, message: Ready | Loading | Failed | Refused | Deltas, is_ready: asyncio.Event) -> None:
        if isinstance(message, Deltas):
            self.running, self.free_blocks = message.running, message.free_blocks
            for delta in message.deltas:
                opened = self._open.get(delta.request_id)
                if opened is not None:                   # else it was aborted while this was on its way
                    self._take_delta(opened, delta)
        elif isinstance(message, Refused):
            if message.request_id in self._open:
                self._open[message.request_id].stream._fail(BadRequest(message.reason))
        elif isinstance(message, Loading):
            self._on_loading(message.done, message.total)
        elif isinstance(message, Ready):
            self.ready, self.free_blocks = message, message.num_blocks
            is_ready.set()
        else:
            self._die(ConfigError(message.reason) if message.config else EngineDead(message.reason))

    def _take_delta(self, opened: _Open, delta: TokenDelta) -> None:
        state = opened.state
        if state.output.outputs[delta.index].finished():
            return                                       # a stop string has ended it here
        try:
            new, stop_here = state.take(delta)
        except RidgelineError as error:
            opened.stream._fail(error)
            return
        if stop_here:
            self._send(Abort(delta.request_id, delta.index))
        opened.stream._push(opened.place, new)
        if state.output.finished:
            self._forget(delta.request_id, tell_engine=False)
            opened.stream._finish(delta.request_id)


class _EngineProcess:
    """The child process and its sockets. Calls back, on the event loop, with each message and at the process's end."""

    def __init__(self, config: EngineConfig, on_message: Callable[[Any], None], on_exit: Callable[[str], None]) -> None:
        self._on_message = on_message
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
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
        # A session of its own: Ctrl-C in the terminal reaches this process alone, which then ends the engine in order.
        # It finds modules where this process does (-P: not also in whatever directory this happens to be).
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "ridgeline.engine.process", json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,
        )
        # Also when nobody calls stop(): at the latest when the interpreter ends.
        self._cleanup = weakref.finalize(self, _abandon, self._child, self._sockets)
        threading.Thread(target=self._watch, name="engine-exit", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, message: Add | Abort | Shutdown) -> None:
        try:
            self._to_engine.send(TO_ENGINE.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            pass                                         # the other end is gone; _watch says so in a moment

    async def stop(self, gently: bool) -> None:
        """Returns when the process is gone and nothing of it is left."""
        if self._cleanup.alive:
            if gently:
                self.send(Shutdown())
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
        if self._from_engine.closed:
            return
        for _ in range(_FRAMES_PER_TURN):
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
        self._on_exit(f"the engine's process {how}")
        self._exited.set()


def _abandon(child: subprocess.Popen[bytes], sockets: SocketDir) -> None:
    if child.poll() is None:
        child.kill()
        child.wait()
    sockets.close()


def _is_long(prompts: Sequence[Prompt]) -> bool:
    texts = [prompt.get("prompt") if isinstance(prompt, dict) else prompt for prompt in prompts]
    return sum(len(text) for text in texts if isinstance(text, str)) >= LONG_TEXT


def _copy(output: RequestOutput) -> RequestOutput:
    """As it is now: the original goes on growing."""
    answers = [
        replace(answer, token_ids=answer.token_ids.copy(), logprobs=answer.logprobs and answer.logprobs.copy())
        for answer in output.outputs
    ]
    return replace(output, outputs=answers)
