"""A model that this command loads, in a process of its own."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any

from ridgeline.cli.chat.talk import Message, Reply
from ridgeline.config import EngineConfig
from ridgeline.early_check import checked_model
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.process import embedded
from ridgeline.process.progress import progress_bar
from ridgeline.resolve import model_path
from ridgeline.sampling_params import SamplingParams

MAX_TOKENS = 1024                    # of an answer where nothing else is asked for, and the context has room


class LocalModel:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._llm = AsyncLLM(**{"grammars_at_start": False} | config.flat())     # a chat has none
        self._runner = asyncio.Runner()

    def __enter__(self) -> LocalModel:
        self._runner.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._llm.shutdown())
        self._runner.close()

    def load(self, beginning: list[Message]) -> None:
        """Fails before the weights load if the model, its tokenizer or its chat template cannot be used."""
        checked_model(self._config)
        self._runner.run(self._llm.load_tokenizer())
        first = [*beginning, {"role": "user", "content": "Hello"}]
        self._llm.get_tokenizer().apply_chat_template(first, tokenize=False, add_generation_prompt=True)
        with progress_bar("loading", in_bytes=True) as tick:
            self._runner.run(self._llm.start(tick))

    def describe(self) -> str:
        ready = self._llm.ready
        assert ready is not None
        name = model_path(self._config).name if self._config.model.model else embedded.NAME
        return f"{name} in {ready.dtype} on {ready.device}, context {ready.max_model_len}; {self._llm.sampling_defaults}"

    def reply(self, messages: list[Message], settings: dict[str, Any], write: Callable[[str], None]) -> Reply:
        asked = {"max_tokens": None, **self._llm.sampling_defaults, **settings}
        loop = self._runner.get_loop()
        answer: asyncio.Task[Reply] | None = None

        def stop(*_: object) -> None:                    # an exception here could hit a task that other answers need
            if answer is not None:
                loop.call_soon_threadsafe(answer.cancel)

        before = signal.signal(signal.SIGINT, stop)
        try:
            answer = loop.create_task(self._stream(messages, SamplingParams(**asked), write))
            return loop.run_until_complete(answer)
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            signal.signal(signal.SIGINT, before)

    async def _stream(self, messages: list[Message], params: SamplingParams, write: Callable[[str], None]) -> Reply:
        asked = time.monotonic()
        prompt = await self._llm.chat_tokens(messages)
        if params.max_tokens is None:
            assert self._llm.ready is not None
            params.max_tokens = max(1, min(MAX_TOKENS, self._llm.ready.max_model_len - len(prompt)))
        stream = await self._llm.stream([prompt], params)
        tokens, first, last, finish = 0, asked, asked, None
        try:
            async for batch in stream:
                last = time.monotonic()
                first = first if tokens else last
                for _, delta in batch:
                    tokens += len(delta.token_ids)
                    finish = delta.finish_reason
                write("".join(delta.text for _, delta in batch))
        finally:
            stream.close()
        return Reply(tokens, finish, first - asked, last - asked, params.max_tokens)
