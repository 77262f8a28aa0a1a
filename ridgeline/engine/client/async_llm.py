"""AsyncLLM: the engine core in another process, its answers as async streams in this one.

Tokenising and detokenising happen in this process; the engine's process only computes. Knows asyncio; no torch, no HTTP.

    stream()/generate() ─ Add, Abort ─▶ engine process          one frame each
    AnswerStream        ◀─ Deltas ──── engine process          one frame per step, for all requests

supervisor keeps the engine's process (engine_child) alive, open_requests resumes requests in the next process when one dies,
answer_stream is what readers get, and engine_commands sends what is not a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ridgeline.config import EngineConfig
from ridgeline.early_check import checked_model
from ridgeline.engine.client.answer_stream import AnswerStream, only_new, so_far
from ridgeline.engine.client.engine_commands import EngineCommands
from ridgeline.engine.client.long_work import CHATS, LONG_BYTES, away
from ridgeline.engine.client.open_requests import OpenRequests
from ridgeline.engine.client.outputs import RequestOutput
from ridgeline.engine.client.processor import Beside, Processor, Prompt, RequestState
from ridgeline.engine.client.prompt_limits import (
    LONG_WORK,
    PromptLimits,
    PromptTally,
    amount_of_work,
    is_brief,
    num_chars,
)
from ridgeline.engine.client.request_context import LOCAL, Caller
from ridgeline.engine.client.sampling_defaults import SamplingDefaults
from ridgeline.engine.client.supervisor import Listener, Supervisor
from ridgeline.engine.client.wait_estimate import LARGE, LoadMeter
from ridgeline.engine.client.watchdog import Supervision
from ridgeline.engine.ipc import (
    TO_ENGINE,
    Add,
    Deltas,
    EncodeError,
    FromEngine,
    PrefixesForgotten,
    Profiled,
    Ready,
    Refused,
    Stats,
    Switched,
    Vocabulary,
)
from ridgeline.errors import BadRequest, NotNow, Overloaded, RidgelineError, shown
from ridgeline.known_options.python_names import ASYNC_METHODS
from ridgeline.messages import Request
from ridgeline.metrics import ServingMetrics
from ridgeline.model_files import ServedFiles
from ridgeline.resolve import model_path
from ridgeline.roofline.live import LiveView
from ridgeline.sampling_params import RequestOutputKind, SamplingParams
from ridgeline.text.chat_template import RendererBusy, start_renderer
from ridgeline.text.tokenizer import Tokenizer


class AsyncLLM:
    """`AsyncLLM()` is the embedded model; options are those of `ridgeline.config`, names as in vLLM.

    `supervision`: how often an engine that dies or hangs is restarted; by default never.
    """

    engine_module = "ridgeline.engine.core.engine_process"           # what runs in the engine's process
    is_replica = False               # one of several engines that data_parallel_size asks for
    num_moved = 0                    # requests that went on in another engine, where there are several

    def __init__(
        self, model: str | Path | None = None, *, supervision: Supervision | None = None, **options: Any
    ) -> None:
        self.config = EngineConfig.of(model=model, **options)
        self.load = LoadMeter()
        self.metrics = ServingMetrics()
        self.roofline = LiveView()
        self.max_queued_tokens: int | None = None        # prompt tokens that may wait; None: any number
        self.ready: Ready | None = None                  # what the engine reported at its start; None before that
        self.hidden_size = 0                             # numbers of a prompt's hidden state; 0: not known yet
        self.running = 0                                 # sequences in the running batch
        self.free_blocks = 0
        listener = Listener(self._take, self._opened, self._lost, self._replay, self._dead, lambda: self.num_open)
        self._engine = Supervisor(self.engine_module, self.config, supervision or Supervision(), listener)
        self._open = OpenRequests(self.load, self.metrics, self._engine.send)
        self._commands = EngineCommands(self._engine)
        self._processor: Processor | None = None           # None: not loaded yet
        self._starting = asyncio.Lock()
        self._loading_tokenizer = asyncio.Lock()         # another lock: start() holds its own while the tokenizer is loaded

    def __getattr__(self, name: str) -> Any:
        """Methods of vLLM's class that are not here say what to use instead."""
        instead = f": {ASYNC_METHODS[name]}" if name in ASYNC_METHODS else ""
        raise AttributeError(f"AsyncLLM has no {name}{instead}")

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self, on_loading: Callable[[int, int], None] | None = None) -> None:
        """Start the engine and wait until it is ready. `on_loading(done, total)` is called with bytes of weights loaded."""
        async with self._starting:
            if self._engine.process is None:
                if not self.is_replica:
                    self.config.for_one_engine()
                if on_loading is not None:
                    self._engine.on_loading = on_loading
                self.hidden_size = (await asyncio.to_thread(checked_model, self.config)).hidden_size
                files = await asyncio.to_thread(ServedFiles, lambda: model_path(self.config))
                try:
                    await self._engine.start(meanwhile=self.load_tokenizer, changed=files.changed)
                except BaseException:
                    await self.shutdown()
                    raise
        self.require_alive()

    def require_alive(self) -> None:
        """Raises the reason if the engine has ended for good."""
        self._engine.require_alive()

    async def load_tokenizer(self) -> None:
        """Load the tokenizer and chat template; start() does it too, while the engine loads weights. Called before start(), a
        mistake in them is found before an engine is started."""
        async with self._loading_tokenizer:
            if self._processor is not None:
                return
            processor = await asyncio.to_thread(
                Processor.load, self.config.model, model_path(self.config), self.config.execution.speculative_config
            )
            if processor.tokenizer is not None:
                if self.config.model.prepares_grammars:
                    frame = await asyncio.to_thread(_vocabulary_frame, processor.tokenizer)
                    for engine in self.engines:
                        engine._engine.greet(frame)
                if processor.tokenizer.chat_template is not None:
                    await asyncio.to_thread(start_renderer)
            self._processor = processor

    @property
    def engines(self) -> Sequence[AsyncLLM]:
        """One for each engine's process: itself, unless a subclass has several."""
        return (self,)

    @property
    def is_alive(self) -> bool:
        """Started, and neither dead nor shut down. It may be restarting; see `state`."""
        return self.ready is not None and self._engine.is_alive

    @property
    def state(self) -> str:
        """ok: a step was finished lately, or there is nothing to do. Else loading, stalled, restarting or dead."""
        state = self._engine.state
        return "loading" if self.ready is None and state != "dead" else state

    @property
    def num_open(self) -> int:
        """Requests in the engine, running or waiting."""
        return len(self._open)

    @property
    def num_restarts(self) -> int:
        return self._engine.num_restarts

    @property
    def num_aborted(self) -> int:
        """Requests aborted by this process."""
        return self._open.num_aborted

    async def died(self) -> RidgelineError:
        """Wait for the engine's final end; the reason."""
        return await self._engine.died()

    async def shutdown(self) -> None:
        """End the engine's process. Open requests fail with EngineDead."""
        await self._engine.shutdown()
        if self._processor is not None and self._processor.grammars is not None:
            self._processor.grammars.close()

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        caller: Caller = LOCAL,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer as it grows: each output holds everything so far, or what `output_kind` says.

        Leaving the loop early aborts the request.
        """
        stream = await self.stream([prompt], sampling_params, request_id, priority, caller=caller)
        kind = (sampling_params or SamplingParams()).output_kind
        try:
            if kind is RequestOutputKind.FINAL_ONLY:
                yield (await stream.complete())[0]
                return
            async for batch in stream:
                output = stream.outputs[0]
                yield so_far(output) if kind is RequestOutputKind.CUMULATIVE else only_new(output, batch)
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
        must_fit: str = "",
        caller: Caller = LOCAL,
    ) -> AnswerStream:
        """Send prompts to the engine. BadRequest if one cannot run, Overloaded if there is no room; then none is sent.

        Without `sampling_params` the model's own defaults are used.
        The first prompt's id is `request_id`, further ones are `request_id`-1, -2 and so on. `arrived`: the time.monotonic() at
        which the whole request had arrived; 0: now. An answer ends at the latest where the context does. With `must_fit`, the
        name of the field that sets max_tokens, a request whose max_tokens do not fit into the context is refused instead.
        """
        arrived = arrived or time.monotonic()
        await self.start()
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise BadRequest(f"sampling_params must be SamplingParams, got {shown(params)}")
        params = params.clone()                          # checked again: callers change fields
        if params.truncate_prompt_tokens is None:        # else a long prompt is cut
            for prompt in prompts:
                self._limits.check(prompt)

        def make() -> list[tuple[Request, bytes, RequestState]]:
            assert self._processor is not None
            beside, tally, made = self._processor.beside(params), self.tally(), []
            for prompt in prompts:
                made.append(self._make(prompt, params, priority, cache_salt, caller, must_fit, beside))
                request, frame, _ = made[-1]
                tally.add(len(request.prompt_token_ids))
                if len(made) == 1:
                    self._limits.check_repeated(len(frame), len(request.prompt_token_ids), len(prompts))
            self._limits.check_logprobs([len(request.prompt_token_ids) for request, _, _ in made], params)
            return made

        await self._check_grammar(params, caller)
        amount = amount_of_work(prompts, params)
        made = await away(amount, make) if amount >= LONG_WORK or self._is_slow else make()
        return self._submit(made, request_id, arrived, caller)

    async def _check_grammar(self, params: SamplingParams, caller: Caller) -> None:
        """Compile a new grammar without holding up the event loop; afterwards its verdict is known."""
        if params.structured_outputs is not None and self._processor is not None and self._processor.grammars is not None:
            checker = self._processor.grammars
            checked = checker.check_soon(params.structured_outputs, lambda: self.num_open > 0, caller.ends)
            await asyncio.wrap_future(checked)

    def _submit(
        self, made: list[tuple[Request, bytes, RequestState]], request_id: str | None, arrived: float, caller: Caller
    ) -> AnswerStream:
        """Nothing awaits in here: ids that are free at the start are still free when they are taken."""
        names = [request_id and (f"{request_id}-{place}" if place else request_id) for place in range(len(made))]
        taken = next((name for name in names if any(name in each._open.wire_ids for each in self.engines)), None)
        if taken is not None:
            raise BadRequest(f"request id {taken!r} is already running")
        self.require_alive()
        self._require_room(sum(len(request.prompt_token_ids) for request, _, _ in made), caller)
        stream = AnswerStream(self._abandon)
        try:
            for name, (request, frame, state) in zip(names, made, strict=True):
                self._choose(request).submit(name, request, frame, state, stream, arrived)
        except BaseException:
            stream.close()
            raise
        if not made:
            stream.end()
        elif caller.ends is not None:
            stream.end_at(caller.ends)
        return stream

    def _choose(self, request: Request) -> OpenRequests:
        """Where the request goes: the open requests of an engine."""
        return self._open

    def _abandon(self, wire_id: str) -> None:
        self._open.abandon(wire_id)

    async def chat_tokens(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
        num_bytes: int | None = None,
        **template: Any,
    ) -> list[int]:
        """A conversation as prompt token ids, by the model's chat template. Most templates write the special tokens themselves;
        `add_special_tokens` is for those that do not. `num_bytes`: about how long it is, if that is known."""
        await self.start()
        tokenizer = self.get_tokenizer()

        def render(may_wait: bool = True) -> list[int]:
            return tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=add_generation_prompt, add_special_tokens=add_special_tokens,
                check=self._limits.check_text, may_wait=may_wait, **template,
            )

        # A thread costs several switches, of 5 ms each when this one is busy; rendering a short chat takes a tenth of that.
        if (num_bytes is None or num_bytes <= LONG_BYTES) and is_brief(messages, template) and not tokenizer.is_slow:
            try:
                return render(may_wait=False)
            except RendererBusy:
                return await CHATS.run(render)
        return await away(num_chars([messages, template]) if num_bytes is None else num_bytes, render, CHATS)

    async def text_tokens(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """A text as token ids. BadRequest if it is too long for a prompt."""
        await self.start()
        tokenizer = self.get_tokenizer()
        self._limits.check_text(text)
        if len(text) < LONG_WORK and not tokenizer.is_slow:
            return tokenizer.encode(text, add_special_tokens, parse_special)
        return await away(len(text), lambda: tokenizer.encode(text, add_special_tokens, parse_special))

    async def abort(self, request_id: str) -> None:
        """End one prompt's answers where they are, with the finish reason "abort"; other prompts of its stream go on.

        An unknown id is no error: the request may have finished.
        """
        self._open.abort(request_id)

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and nothing changes, while requests hold part of the KV cache."""
        await self.start()
        return await self._commands.reset_prefix_cache()

    async def switch(self, technique: str, on: bool) -> None:
        """Turn an exact technique off or on in the running engine; engines started later do the same.

        BadRequest for one that cannot be switched. `ready.techniques` lists what is on.
        """
        await self.start()
        await self._commands.switch(technique, on)

    async def profile(self, steps: int) -> Profiled:
        """Profile the engine's next steps while it serves; they take longer meanwhile. One profile at a time."""
        await self.start()
        return await self._commands.profile(steps)

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The sampling fields that the model brings, and where they come from; known once the tokenizer is loaded."""
        return SamplingDefaults() if self._processor is None else self._processor.sampling_defaults

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults; used where no SamplingParams are given."""
        return SamplingParams(**self.sampling_defaults)

    def get_tokenizer(self) -> Tokenizer:
        if self._processor is None or self._processor.tokenizer is None:
            raise BadRequest("there is no tokenizer: the engine is not started, or skip_tokenizer_init is set")
        return self._processor.tokenizer

    @property
    def _is_slow(self) -> bool:
        """Whether even short texts take this model's tokenizer long."""
        return self._processor is not None and self._processor.tokenizer is not None and self._processor.tokenizer.is_slow

    @property
    def _limits(self) -> PromptLimits:
        assert self.ready is not None
        return PromptLimits(self.ready.max_model_len, self._processor.longest_piece if self._processor is not None else 0)

    def tally(self) -> PromptTally:
        """Counts the tokens of a request's prompts. For those that are tokenised before they come to stream()."""
        return PromptTally(self._limits.max_model_len)

    def _require_room(self, tokens: int, caller: Caller) -> None:
        """Overloaded if the queue has no room for `tokens` more, or the first token would come after the caller's deadline."""
        waiting, most, wait = self.load.waiting_tokens, self.max_queued_tokens, self.predicted_wait()
        if most is not None and waiting and waiting + tokens > most:     # an empty queue takes any request
            kind = NotNow if tokens > LARGE * most and waiting < most else Overloaded        # of a large one, alone
            raise kind(f"{waiting} prompt tokens are waiting, of at most {most}; try again later", wait)
        if caller.ttft_deadline is not None and wait is not None and wait > caller.ttft_deadline:
            raise NotNow(
                f"the first token would come after about {wait:.1f} s; the deadline is {caller.ttft_deadline:g} s", wait
            )

    def predicted_wait(self) -> float | None:
        """Seconds that a new request would wait before it begins; None: not known yet."""
        return self.load.wait(self.ready.max_num_seqs) if self.ready is not None else None

    def _make(
        self, prompt: Prompt, params: SamplingParams, priority: int, cache_salt: str, caller: Caller, must_fit: str,
        beside: Beside,
    ) -> tuple[Request, bytes, RequestState]:
        """(request, its frame for the engine, its state here). Every check of a request is made here, before anything is sent."""
        assert self._processor is not None
        request, state = self._processor.request(prompt, params, priority=priority, cache_salt=cache_salt, beside=beside)
        self._limits.check_length(len(request.prompt_token_ids))
        if must_fit:
            self._limits.check_answer(len(request.prompt_token_ids), params.max_tokens, must_fit)
        if caller.cache_salt:
            request.cache_salt = f"{caller.cache_salt}:{request.cache_salt}"
        request.prefix_caching = caller.prefix_caching
        try:
            return request, TO_ENGINE.encode(Add(request)), state
        except EncodeError as error:
            raise BadRequest(f"the request cannot be sent to the engine: {error}") from None

    # -- messages from the engine --------------------------------------------------------------------------------------

    def _take(self, message: FromEngine) -> Iterator[None] | None:
        """Handle a message; for a step's tokens, the rest of the work is returned."""
        if isinstance(message, Deltas):
            self.running, self.free_blocks = message.running, message.free_blocks
            return self._open.take(message, message.ended or time.monotonic())
        if isinstance(message, Switched | PrefixesForgotten | Profiled):
            if isinstance(message, Switched) and self.ready is not None:
                self.ready.techniques = message.active
            self._commands.answered(message)
        elif isinstance(message, Stats):
            self.metrics.engine = message.stats
            if message.stats.roofline is not None:
                self.roofline.take(time.monotonic(), message.stats.roofline)
        elif isinstance(message, Refused):
            self._open.refuse(message.request_id, message.reason, message.field)
        elif isinstance(message, Ready):
            self.metrics.engine_started()
        return None

    def _opened(self, ready: Ready) -> None:
        self.free_blocks = ready.num_blocks
        self.ready = ready
        self._commands.opened()

    def _lost(self) -> None:
        self.running = 0
        self._commands.lost()

    def _replay(self, is_last: bool) -> None:
        self._open.replay(is_last)
        self._commands.replayed()

    def _dead(self, error: RidgelineError) -> None:
        self._open.fail_all(error)
        self._commands.failed(error)


def _vocabulary_frame(tokenizer: Tokenizer) -> bytes:
    return TO_ENGINE.encode(Vocabulary(tokenizer.token_pieces(), sorted(tokenizer.special_ids)))
