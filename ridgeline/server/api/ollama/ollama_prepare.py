"""From the body of a request to Ollama's API to what the engine runs, and the answers of its embedding endpoints."""

from __future__ import annotations

import secrets
import time
from functools import partial

import msgspec

from ridgeline.engine.client.long_work import away_if_long
from ridgeline.engine.client.processor import Prompt
from ridgeline.engine.client.request_context import Caller
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.generation import FIT
from ridgeline.server.api.ollama.ollama_answers import OllamaWriter, empty_answer, nanoseconds
from ridgeline.server.api.ollama.ollama_requests import (
    EmbedRequest,
    OldEmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    plain_name,
)
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.api.openai.embeddings import EmbeddingRequest, vectors_of
from ridgeline.server.api.prepare import Job, around_gaps, as_chat, chat_job
from ridgeline.server.http.body import parse_body
from ridgeline.server.service import Service


class EmbedReply(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OldEmbedReply(msgspec.Struct):
    embedding: list[float]


async def prepare_chat(service: Service, caller: Caller, body: bytes) -> Job | bytes:
    def work() -> tuple[OllamaChatRequest, ChatRequest, SamplingParams] | bytes:
        asked = parse_body(OllamaChatRequest, body)
        if not asked.messages:
            return _loaded(service, asked, generates=False)
        return asked, *as_chat(service, asked)

    made = await away_if_long(len(body), work)
    if isinstance(made, bytes):
        return made
    asked, request, params = made
    return await chat_job(service, request, params, "ollama-", partial(OllamaWriter, asked.model, False), len(body))


async def prepare_generate(service: Service, caller: Caller, body: bytes) -> Job | bytes:
    def work() -> tuple[OllamaGenerateRequest, ChatRequest, SamplingParams] | bytes:
        asked = parse_body(OllamaGenerateRequest, body)
        if not asked.prompt and not asked.suffix:
            return _loaded(service, asked, generates=True)
        return asked, *as_chat(service, asked)

    made = await away_if_long(len(body), work)
    if isinstance(made, bytes):
        return made
    asked, request, params = made
    writer = partial(OllamaWriter, asked.model, True)
    if not asked.is_raw:
        job = await chat_job(service, request, params, "ollama-", writer, len(body))
        if asked.context:
            job.prompts = [[*asked.context, *job.prompts[0]]]
        return job
    prompt: Prompt = asked.prompt or ""
    if asked.suffix:
        prompt, = await around_gaps(service, [prompt], asked.suffix)
    elif asked.context:
        prompt = [*asked.context, *await service.llm.text_tokens(asked.prompt or "", False)]
    request_id = f"ollama-{secrets.token_hex(12)}"
    answer = writer(request, params, request_id, service.name, service.tokenizer)
    return Job(request, params, [prompt], answer, [(b"x-request-id", request_id.encode())])


def _loaded(service: Service, asked: OllamaRequest, generates: bool) -> bytes:
    """A request without a prompt asks only that the model be loaded, which it is."""
    service.check_name(plain_name(asked.model))
    return empty_answer(asked.model, generates, unloads=asked.keep_alive in (0, "0", "0s"))


async def embed(service: Service, caller: Caller, body: bytes) -> EmbedReply:
    began = time.monotonic()
    asked = await away_if_long(len(body), lambda: parse_body(EmbedRequest, body))
    service.check_name(plain_name(asked.model))
    texts = [asked.input] if isinstance(asked.input, str) else asked.input or []
    if not texts:
        return EmbedReply(asked.model, [], nanoseconds(time.monotonic() - began), 0, 0)
    request = EmbeddingRequest(
        input=list(texts), dimensions=asked.dimensions or None, truncate_prompt_tokens=None if asked.truncate is False else FIT,
    )
    vectors = await vectors_of(service, caller, request)
    listed = [vector.tolist() for vector in vectors.made]
    return EmbedReply(asked.model, listed, nanoseconds(time.monotonic() - began), 0, vectors.num_tokens)


async def old_embed(service: Service, caller: Caller, body: bytes) -> OldEmbedReply:
    asked = await away_if_long(len(body), lambda: parse_body(OldEmbedRequest, body))
    service.check_name(plain_name(asked.model))
    if not asked.prompt:
        return OldEmbedReply([])
    request = EmbeddingRequest(input=asked.prompt, normalize=False, truncate_prompt_tokens=FIT)
    return OldEmbedReply((await vectors_of(service, caller, request)).made[0].tolist())
