"""`ridgeline chat`: a conversation in the terminal, or over a pipe (a message per line in, an answer per message out)."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from typing import Any

from ridgeline.cli.config_options import add_engine_options, add_model, engine_config
from ridgeline.cli.sampling_options import add_sampling_options, sampling_given
from ridgeline.cli.terminal import require_model
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.errors import RequestError
from ridgeline.models.model_config import load_model_config
from ridgeline.process.progress import progress_bar
from ridgeline.resolve import model_path
from ridgeline.sampling_params import SamplingParams

HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
DEFAULTS = {"max_tokens": 1024, "temperature": 0.7, "top_p": 0.9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    add_sampling_options(parser)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> None:
    config = engine_config(args)
    params = SamplingParams(**DEFAULTS | sampling_given(args))
    require_model(config)
    llm = AsyncLLM(**config.flat())
    with asyncio.Runner() as runner:
        conversation = Conversation(llm, runner, params, args.system)
        try:
            load_model_config(model_path(config))        # a wrong model fails with its own error, not the tokenizer's
            conversation.try_template()
            with progress_bar("loading", in_bytes=True) as tick:
                runner.run(llm.start(tick))
            conversation.run()
        finally:
            runner.run(llm.shutdown())


class Conversation:
    def __init__(self, llm: AsyncLLM, runner: asyncio.Runner, params: SamplingParams, system: str) -> None:
        self._llm = llm
        self._runner = runner
        self._params = params
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages: list[dict[str, Any]] = list(self._start)
        self._interactive = sys.stdin.isatty()

    def try_template(self) -> None:
        """Fails before the weights load if the chat template refuses, or refuses this system message."""
        self._runner.run(self._llm.load_tokenizer())
        first = [*self._start, {"role": "user", "content": "Hello"}]
        self._llm.get_tokenizer().apply_chat_template(first, tokenize=False, add_generation_prompt=True)

    def run(self) -> None:
        if self._interactive:
            importlib.import_module("readline")          # line editing and history for input()
            print(HELP)
        while (text := self._ask()) is not None:
            match text.strip():
                case "":
                    continue
                case "/reset":
                    self._messages = list(self._start)
                case "/exit" | "/quit" | "/bye":
                    return
                case "/help":
                    print(HELP)
                case _:
                    self._reply(text)

    def _ask(self) -> str | None:
        while True:
            try:
                return input(">>> " if self._interactive else "")
            except EOFError:
                if self._interactive:
                    print()
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print(f"\n{HELP}")

    def _reply(self, text: str) -> None:
        """Stream the answer. An interrupted answer stays in the conversation; a refused message does not."""
        self._messages.append({"role": "user", "content": text})
        parts: list[str] = []
        try:
            self._runner.run(self._stream(parts))
        except RequestError as error:
            self._messages.pop()
            print(f"{error}" + ("; /reset starts over" if self._interactive else ""), file=sys.stderr)
            return
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        print("", flush=True)
        self._messages.append({"role": "assistant", "content": "".join(parts)})

    async def _stream(self, parts: list[str]) -> None:
        tokens = await self._llm.chat_tokens(self._messages)
        stream = await self._llm.stream([tokens], self._params)
        try:
            async for batch in stream:
                for _, delta in batch:
                    parts.append(delta.text)
                    sys.stdout.write(delta.text)
                sys.stdout.flush()
        finally:
            stream.close()
