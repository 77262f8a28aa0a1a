"""The process that reads long bodies: `python -m ridgeline.server.body_process`, with frames on its standard streams.

It runs the same functions as the server, with the same tokenizer and options, and has no engine and no keys. The first frame says
what is served. Started by server/long_bodies, which has the loop around it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.processor import Processor
from ridgeline.engine.client.request_context import Caller
from ridgeline.engine.ipc import Ready
from ridgeline.errors import BadRequest
from ridgeline.metrics import SPENT
from ridgeline.resolve import model_path
from ridgeline.server.api.openai.embeddings import EmbeddingTokens, token_bytes
from ridgeline.server.api.openai.responses_store import NeedsStored, ResponseStore
from ridgeline.server.api.prepared import Prepared
from ridgeline.server.api.vllm.score import Pairs
from ridgeline.server.body_work import FUNCTIONS
from ridgeline.server.long_bodies import Answers, Made, Recalled, Task, answer_bodies
from ridgeline.server.options import ServerOptions
from ridgeline.server.service import Service

KEPT = (Prepared, EmbeddingTokens, Pairs, list, str)          # what the server goes on with; anything else is the answer


class Settings(msgspec.Struct):
    """What is served, as the server knows it."""

    options: dict[str, Any]          # of the engine, where they are not the defaults
    server: ServerOptions            # without keys
    name: str
    ready: Ready
    hidden_size: int
    slots: int                       # answers that may run or wait at once


def settings_of(service: Service) -> bytes:
    llm, options = service.llm, replace(service.options, api_key="", api_key_file="", ssl_keyfile="")
    assert llm.ready is not None
    settings = Settings(llm.config.flat(), options, service.name, llm.ready, llm.hidden_size, service.slots.limit)
    return msgspec.msgpack.encode(settings, enc_hook=str)


class NoEngine(AsyncLLM):
    """The text side of an AsyncLLM: its tokenizer, its limits and its defaults."""

    def read_as(self, settings: Settings) -> None:
        self._processor = Processor.load(self.config.model, model_path(self.config))
        self.ready, self.hidden_size = settings.ready, settings.hidden_size

    async def start(self, on_loading: Any = None) -> None:
        """There is nothing to start."""

    def tokens(self, prompt: str, most: int | None, side: str) -> list[int]:
        """A text as the server would tokenise it for the engine; cut to `most` tokens, if there is a limit."""
        assert self._processor is not None
        if most is None:
            self._limits.check(prompt)
        ids = self._processor.prompt_tokens(prompt)[1]
        if most is None:
            self._limits.check_length(len(ids))
            return ids
        return ids[:most] if side == "right" else ids[-most:]


class LentResponses(ResponseStore):
    """The stored responses that came with a body; without them, NeedsStored says which it refers to."""

    def __init__(self, options: ServerOptions, lent: list[Recalled] | None) -> None:
        super().__init__(options.max_stored_responses, options.max_stored_bytes)
        self._is_lent = lent is not None
        for each in lent or ():
            self.put(each.name, each.key, each.response, each.input, each.before, each.items)

    def size_of(self, name: str | None, items: Any, key: int) -> int:
        items = list(items)
        if not self._is_lent and self.is_on and (name is not None or items):
            raise NeedsStored(name, items)
        return super().size_of(name, items, key)


async def answered(service: Service, task: Task, body: bytes) -> Made:
    began = SPENT["tokenising"]
    service.stored = LentResponses(service.options, task.recalled)
    made = await FUNCTIONS[task.function](service, Caller(key=task.key), body)
    if isinstance(made, Prepared | EmbeddingTokens):
        await asyncio.to_thread(tokenise, service, made)
    as_bytes = await asyncio.to_thread(written, made)
    is_answer = isinstance(made, bytes) or not isinstance(made, KEPT)
    return Made(as_bytes, is_answer, SPENT["tokenising"] - began)


def written(made: Any) -> bytes:
    if isinstance(made, bytes):
        return made
    try:
        return msgspec.msgpack.encode(made) if isinstance(made, KEPT) else msgspec.json.encode(made)
    except (OverflowError, RecursionError):
        raise BadRequest("the body holds numbers of more than 64 bits, or is nested too deep") from None


def tokenise(service: Service, made: Prepared | EmbeddingTokens) -> None:
    """Texts become token ids: the server would have to tokenise them."""
    llm = service.llm
    assert isinstance(llm, NoEngine) and llm.ready is not None
    params = made.params if isinstance(made, Prepared) else made.request.params(llm.ready.max_model_len)
    tally = llm.tally()
    for place, prompt in enumerate(made.prompts):
        ids = prompt
        if isinstance(prompt, str):
            ids = llm.tokens(prompt, params.truncate_prompt_tokens, params.truncation_side)
            tally.add(len(ids))
        if isinstance(made, Prepared):
            made.prompts[place] = {"prompt": prompt, "prompt_token_ids": ids} if ids is not prompt else prompt
        elif all(type(each) is int and 0 <= each < 2**32 for each in ids):
            made.prompts[place] = token_bytes(ids)


def begin(first: bytes) -> Answers:
    settings = msgspec.msgpack.decode(first, type=Settings)
    llm = NoEngine(**settings.options)
    llm.read_as(settings)
    service = Service(llm, settings.server, settings.name)
    service.slots.limit = settings.slots
    return partial(answered, service)


if __name__ == "__main__":
    answer_bodies(begin)
