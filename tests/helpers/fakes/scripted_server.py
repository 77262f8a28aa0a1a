"""A server in this process whose engine says what a test tells it: real HTTP, tokenizer and text, no model.

    with ScriptedServer(folder, script) as server: ...       # script(prompt text) -> the answer's text, or an exception
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.outputs import AnswerDelta, RequestOutput
from ridgeline.engine.client.processor import Prompt, RequestState
from ridgeline.engine.client.request_context import LOCAL, Caller
from ridgeline.engine.ipc import Ready
from ridgeline.errors import RidgelineError
from ridgeline.messages import Logprobs, TokenDelta
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.event_loop import new_event_loop
from ridgeline.server.http.keys import Keys
from ridgeline.server.lifecycle import HttpServer, address_of, bind
from ridgeline.server.options import ServerOptions
from ridgeline.server.service import Service

# Shows tools, calls and thoughts the way Qwen's templates do, so that answers are read for them.
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t.function.name }} {% endfor %}<|im_end|>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)

Script = Callable[[str], "str | tuple[str, RidgelineError]"]


def certain(token: int) -> Logprobs:
    """A token that was the only one possible."""
    top = np.array([[token]], np.int32), np.zeros((1, 1), np.float32)
    return Logprobs(np.array([token], np.int32), np.zeros(1, np.float32), np.ones(1, np.int32), *top)


class ScriptedStream:
    """As AnswerStream: one token a batch. A script's error comes after its text."""

    def __init__(self, states: list[tuple[RequestState, list[int]]], most: int, error: RidgelineError | None) -> None:
        self.outputs: list[RequestOutput] = [state.output for state, _ in states]
        self._batches = self._play(states, most)
        self._error = error

    def _play(self, states: list[tuple[RequestState, list[int]]], most: int) -> Any:
        for place, (state, tokens) in enumerate(states):
            for count, token in enumerate(tokens, 1):
                last = count == min(most, len(tokens)) and self._error is None
                finish = None if not last else "length" if len(tokens) > most else "stop"
                logprobs = [certain(token)] if state.output.outputs[0].logprobs is not None else []
                new, _ = state.take(TokenDelta("", 0, [token], logprobs, finish_reason=finish, num_cached_tokens=3))
                yield [(place, new)]
                if last or new.finish_reason:
                    break

    def __aiter__(self) -> ScriptedStream:
        return self

    async def __anext__(self) -> list[tuple[int, AnswerDelta]]:
        await asyncio.sleep(0)
        try:
            return next(self._batches)  # type: ignore[no-any-return]
        except StopIteration:
            if self._error is not None:
                raise self._error from None
            raise StopAsyncIteration from None

    async def complete(self) -> list[RequestOutput]:
        async for _ in self:
            pass
        return self.outputs

    def deliver_to(self, sink: Any) -> None:
        """All of it waits for its reader."""

    def num_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


class ScriptedLLM(AsyncLLM):
    def __init__(self, model: Path, script: Script, **options: Any) -> None:
        super().__init__(model, **options)
        self.script = script
        self.prompts: list[str] = []                     # as the engine would have got them
        self.params: list[SamplingParams] = []
        self.callers: list[Caller] = []

    async def start(self, on_loading: Any = None) -> None:
        await self.load_tokenizer()
        self.ready = self.ready or Ready(
            model="scripted", max_model_len=512, max_num_seqs=8, vocab_size=260, dtype="float32", device="cpu", num_blocks=64,
            block_size=16, seconds=0.0,
        )

    @property
    def is_alive(self) -> bool:
        return self.ready is not None

    @property
    def state(self) -> str:
        return "ok" if self.ready else "loading"

    async def stream(  # type: ignore[override]
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | None = None, *args: Any, **settings: Any
    ) -> ScriptedStream:
        assert self._processor is not None and sampling_params is not None
        tokenizer, states, error = self.get_tokenizer(), [], None
        most = sampling_params.max_tokens or 512
        for prompt in prompts:
            request, state = self._processor.request(prompt, sampling_params)
            if name := settings.get("must_fit"):
                self._limits.check_answer(len(request.prompt_token_ids), sampling_params.max_tokens, name)
            if sampling_params.max_tokens is not None:
                assert self.ready is not None
                most = min(most, max(1, self.ready.max_model_len - len(request.prompt_token_ids)))
            text = tokenizer.decode(request.prompt_token_ids)
            self.prompts.append(text)
            self.params.append(sampling_params)
            self.callers.append(settings.get("caller", LOCAL))
            said = self.script(text)
            if isinstance(said, tuple):
                said, error = said
            tokens = tokenizer.encode(said, add_special_tokens=False)
            states.append((state, tokens if error else [*tokens, min(tokenizer.eos_token_ids)]))
        return ScriptedStream(states, most, error)


class ScriptedServer:
    def __init__(
        self, model: Path, script: Script, *, server: ServerOptions | None = None, keys: Keys | None = None, **options: Any
    ) -> None:
        self.llm = ScriptedLLM(model, script, **options)
        self.service = Service(self.llm, server or ServerOptions(port=0), model.name, keys or Keys())
        self._listener = bind(self.service.options)
        self.url = address_of(self._listener, "http")
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:      # as a server's process does
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._server = HttpServer(self.service)
        self._loop = asyncio.get_running_loop()
        await self.llm.start()
        self.service.open()
        self._started.set()
        await self._server.serve(sockets=[self._listener])

    def run_what_is_due(self) -> None:
        """Some turns of the server's loop: callbacks that wait in it have run afterwards."""
        for _ in range(5):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(60)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._started.wait(60)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()


def connect(server: ScriptedServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(server.url).port or 0), timeout=60)


def post(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a request."""
    data = json.dumps(body).encode()
    place = path if path.startswith("/") else f"/v1/{path}"
    head = f"POST {place} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data
