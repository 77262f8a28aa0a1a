"""From the body of a request to Ollama's API to what the engine runs, and the answers of its embedding endpoints."""

from __future__ import annotations

import time
from typing import cast

import msgspec

from ridgeline.engine.client.long_work import away_if_long, away_to_answer
from ridgeline.engine.client.processor import Prompt
from ridgeline.engine.client.request_context import Caller
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.generation import FIT
from ridgeline.server.api.ollama.ollama_answers import empty_answer, nanoseconds
from ridgeline.server.api.ollama.ollama_requests import (
    EmbedRequest,
    OldEmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    plain_name,
)
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.api.openai.embeddings import EmbeddingRequest, EmbeddingTokens, embedding_of, vectors_of
from ridgeline.server.api.prepare import around_gaps, as_chat, chat_prompt
from ridgeline.server.api.prepared import OllamaForm, Prepared
from ridgeline.server.api.prompt_parts import encode
from ridgeline.server.http.body import parse_body
from ridgeline.server.parse.tools import Reading
from ridgeline.server.service import Service


class EmbedReply(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OldEmbedReply(msgspec.Struct):
    embedding: list[float]


async def prepare_chat(service: Service, caller: Caller, body: bytes) -> Prepared | bytes:
    def work() -> tuple[OllamaChatRequest, ChatRequest, SamplingParams] | bytes:
        asked = parse_body(OllamaChatRequest, body)
        if not asked.messages:
            return _loaded(service, asked, generates=False)
        return asked, *as_chat(service, asked)

    made = await away_if_long(len(body), work)
    if isinstance(made, bytes):
        return made
    asked, request, params = made
    tokens, read = await chat_prompt(service, request, params, len(body))
    return Prepared(OllamaForm(request, read, asked.model, False), params, [tokens], "ollama-")


async def prepare_generate(service: Service, caller: Caller, body: bytes) -> Prepared | bytes:
    def work() -> tuple[OllamaGenerateRequest, ChatRequest, SamplingParams] | bytes:
        asked = parse_body(OllamaGenerateRequest, body)
        if not asked.prompt and not asked.suffix:
            return _loaded(service, asked, generates=True)
        return asked, *as_chat(service, asked)

    made = await away_if_long(len(body), work)
    if isinstance(made, bytes):
        return made
    asked, request, params = made
    read, prompt = Reading(), cast(Prompt, asked.prompt or "")
    if not asked.is_raw:
        tokens, read = await chat_prompt(service, request, params, len(body))
        prompt = [*(asked.context or ()), *tokens]
    elif asked.suffix:
        prompt, = await around_gaps(service, [prompt], asked.suffix)
    elif asked.context:
        prompt = [*asked.context, *await service.llm.text_tokens(asked.prompt or "", False)]
    request.forget_prompt()
    return Prepared(OllamaForm(request, read, asked.model, True), params, [prompt], "ollama-")


def _loaded(service: Service, asked: OllamaRequest, generates: bool) -> bytes:
    """A request without a prompt asks only that the model be loaded, which it is."""
    service.check_name(plain_name(asked.model))
    return empty_answer(asked.model, generates, unloads=asked.keep_alive in (0, "0", "0s"))


async def read_embed(service: Service, caller: Caller, body: bytes) -> EmbeddingTokens:
    asked = await away_if_long(len(body), lambda: parse_body(EmbedRequest, body))
    service.check_name(plain_name(asked.model))
    texts = [asked.input] if isinstance(asked.input, str) else asked.input or []
    request = EmbeddingRequest(
        input=list(texts), dimensions=asked.dimensions or None, truncate_prompt_tokens=None if asked.truncate is False else FIT,
    )
    if not texts:
        return EmbeddingTokens(request, [], asked.model)
    return await embedding_of(service, request, len(body), asked.model)


async def embed(service: Service, caller: Caller, read: EmbeddingTokens) -> bytes:
    began = time.monotonic()
    vectors = await vectors_of(service, caller, read)

    def written() -> bytes:
        spent = nanoseconds(time.monotonic() - began)
        return encode(EmbedReply(read.model, vectors.as_lists(), spent, 0, vectors.num_tokens))

    return await away_to_answer(vectors.num_json_bytes, written)


async def read_old_embed(service: Service, caller: Caller, body: bytes) -> EmbeddingTokens:
    asked = await away_if_long(len(body), lambda: parse_body(OldEmbedRequest, body))
    service.check_name(plain_name(asked.model))
    request = EmbeddingRequest(input=asked.prompt or "", normalize=False, truncate_prompt_tokens=FIT)
    if not asked.prompt:
        return EmbeddingTokens(request, [])
    return await embedding_of(service, request, len(body))


async def old_embed(service: Service, caller: Caller, read: EmbeddingTokens) -> OldEmbedReply:
    vectors = (await vectors_of(service, caller, read)).as_lists()
    return OldEmbedReply(vectors[0] if vectors else [])
