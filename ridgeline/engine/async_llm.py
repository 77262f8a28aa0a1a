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
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from ridgeline.config import EngineConfig
from ridgeline.engine.children import start_child
from ridgeline.engine.frontend import Frontend, Prompt, RequestState
from ridgeline.engine.ipc import (
    FROM_ENGINE,
    TO_ENGINE,
    Abort,
    Add,
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
)
from ridgeline.engine.outputs import AnswerDelta, CompletionOutput, LogprobsAt, RequestOutput
from ridgeline.engine.tokenizer import Tokenizer
from ridgeline.errors import BadRequest, ConfigError, EngineDead, RidgelineError
from ridgeline.log import get_logger
from ridgeline.messages import TokenDelta
from ridgeline.models.config import load_model_config
from ridgeline.resolve import model_path
from ridgeline.sampling_params import RequestOutputKind, SamplingParams

logger = get_logger("async_llm")

LONG_WORK = 2_000                    # characters that take about a millisecond to tokenise: more would hold up the loop
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
        unfinished, self._unfinished = self._unfinished, set()
        self._end()
        for wire_id in unfinished:
            self._llm._forget(wire_id, tell_engine=True)

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

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self.config = EngineConfig.of(model=model, **options)
        self.ready: Ready | None = None                  # what the engine said of itself; None before start() is through
        self.running = 0                                 # sequences that have a row
        self.free_blocks = 0
        self._frontend: Frontend | None = None           # None: not loaded yet
        self._longest_piece = 0                          # bytes of the vocabulary's longest token
        self._open: dict[str, _Open] = {}                # by wire id: never used twice, whatever callers name theirs
        self._wire_ids: dict[str, str] = {}              # ids that callers chose -> wire ids
        self._forgetting: deque[asyncio.Future[bool]] = deque()  # reset_prefix_cache calls without an answer yet
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
        loop = asyncio.get_running_loop()
        self._died = loop.create_future()
        ready: asyncio.Future[Ready] = loop.create_future()
        self._process = _EngineProcess(
            self.config, lambda message: self._take(message, ready), lambda reason: self._die(EngineDead(reason))
        )
        try:
            await self.load_tokenizer()
            news: list[asyncio.Future[Any]] = [ready, self._died]
            await asyncio.wait(news, return_when=asyncio.FIRST_COMPLETED)
            self._require_alive()
        except BaseException:
            await self.shutdown()
            raise
        self.free_blocks = ready.result().num_blocks
        self.ready = ready.result()                      # last of all: from here on requests are taken

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
        """Started to the end, and neither dead nor shut down."""
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
    ) -> AnswerStream:
        """Send prompts to the engine. BadRequest when one cannot run; then none does.

        Without `sampling_params` the model's own defaults count.
        The first prompt goes by `request_id`, further ones by `request_id`-1, -2 and so on.
        """
        await self.start()
        params = sampling_params or self.get_default_sampling_params()
        if params.truncate_prompt_tokens is None:        # else what is too long is made to fit
            for prompt in prompts:
                self._check_size(prompt)

        def make() -> list[tuple[str, bytes, RequestState]]:
            return [self._make(prompt, params, priority, cache_salt) for prompt in prompts]

        made = await asyncio.to_thread(make) if _is_long(prompts, params) else make()
        # From here to the end nothing waits: the names that are free now are still free when they are taken.
        names = [request_id and (f"{request_id}-{place}" if place else request_id) for place in range(len(made))]
        taken = next((name for name in names if name in self._wire_ids), None)
        if taken is not None:
            raise BadRequest(f"request id {taken!r} is already running")
        self._require_alive()
        stream = AnswerStream(self)
        try:
            for name, (wire_id, frame, state) in zip(names, made, strict=True):
                self._submit(name, wire_id, frame, state, stream)
        except BaseException:
            stream.close()
            raise
        if not made:
            stream._end()
        return stream

    async def chat_tokens(
        self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **template: Any
    ) -> list[int]:
        """A conversation through the model's chat template, as the token ids of a prompt."""
        await self.start()
        tokenizer = self.get_tokenizer()

        def render() -> list[int]:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **template
            )
            self._check_text(text)
            return tokenizer.encode(text, add_special_tokens=False)

        return await asyncio.to_thread(render)

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

    def _make(self, prompt: Prompt, params: SamplingParams, priority: int, cache_salt: str) -> tuple[str, bytes, RequestState]:
        """(wire id, frame for the engine, state here). Whatever can be wrong with a request is found here, before any other
        part of it exists."""
        assert self._frontend is not None
        request, state = self._frontend.request(prompt, params, priority=priority, cache_salt=cache_salt)
        self._check_length(len(request.prompt_token_ids))
        try:
            return request.request_id, TO_ENGINE.encode(Add(request)), state
        except EncodeError as error:
            raise BadRequest(f"the request cannot be sent to the engine: {error}") from None

    def _submit(self, name: str | None, wire_id: str, frame: bytes, state: RequestState, stream: AnswerStream) -> None:
        self._open[wire_id] = _Open(name or wire_id, state, stream, stream._add(wire_id, state))
        if name:
            self._wire_ids[name] = wire_id
            state.output.request_id = name
        self._send(frame)

    def _forget(self, wire_id: str, tell_engine: bool) -> None:
        opened = self._open.pop(wire_id, None)
        if opened is not None:
            if self._wire_ids.get(opened.request_id) == wire_id:
                del self._wire_ids[opened.request_id]
            if tell_engine:
                self._send(TO_ENGINE.encode(Abort(wire_id)))

    def _send(self, frame: bytes) -> None:
        if self.is_alive and self._process is not None:
            self._process.send(frame)

    # -- news from the engine ------------------------------------------------------------------------------------------

    def _take(self, message: FromEngine, ready: asyncio.Future[Ready]) -> None:
        if isinstance(message, Deltas):
            self.running, self.free_blocks = message.running, message.free_blocks
            for delta in message.deltas:
                opened = self._open.get(delta.request_id)
                if opened is not None:                   # else it was aborted while this was on its way
                    self._take_delta(opened, delta)
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
            if not ready.done():
                ready.set_result(message)
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
            self._send(TO_ENGINE.encode(Abort(delta.request_id, delta.index)))
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
        self._child = start_child("ridgeline.engine.process", json.dumps(settings))
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

    async def stop(self, gently: bool) -> None:
        """Returns when the process is gone and nothing of it is left."""
        if self._cleanup.alive:
            if gently:
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


def _given(prompt: Prompt) -> Any:
    """A prompt's text or token ids, of whatever type they are."""
    if not isinstance(prompt, Mapping):
        return prompt
    tokens = prompt.get("prompt_token_ids")
    return prompt.get("prompt") if tokens is None else tokens


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
