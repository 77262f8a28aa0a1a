"""A request that was parsed and checked, as plain data: what to run, and in which form its answers are written.

Plain data can be made in another process (server/body_process). `job()` adds what only this process has: the writer of the
answer, which knows the tokenizer, and the store of responses.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from ridgeline.engine.client.processor import Prompt
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.anthropic.messages_api import MessagesRequest, MessagesWriter
from ridgeline.server.api.generation import GenerationRequest, Writer
from ridgeline.server.api.llamacpp.llama_answers import LlamaWriter
from ridgeline.server.api.llamacpp.llama_requests import LlamaRequest
from ridgeline.server.api.ollama.ollama_answers import OllamaWriter
from ridgeline.server.api.openai.chat import ChatRequest, ChatWriter
from ridgeline.server.api.openai.completions import CompletionRequest, CompletionWriter
from ridgeline.server.api.openai.responses_answer import ResponsesWriter
from ridgeline.server.api.openai.responses_continued import Keeper, Kept
from ridgeline.server.api.openai.responses_request import ResponsesRequest
from ridgeline.server.http.stream import Headers
from ridgeline.server.parse.tools import Reading
from ridgeline.server.service import Service
from ridgeline.text.tokenizer import Tokenizer

About = tuple[SamplingParams, str, str, Tokenizer | None]        # what a writer knows besides: also its id and the model's name


@dataclass(slots=True)
class Job:
    """What to run, and the writer of its answer."""

    request: GenerationRequest
    params: SamplingParams
    prompts: list[Prompt]
    writer: Writer
    headers: Headers
    background: bool = False         # the client does not wait for the answer


class ChatForm(msgspec.Struct, tag="chat"):
    request: ChatRequest
    reading: Reading

    def writer(self, service: Service, *about: *About) -> Writer:
        return ChatWriter(self.request, *about, self.reading)


class MessagesForm(ChatForm, tag="messages"):
    asked: MessagesRequest

    def writer(self, service: Service, *about: *About) -> Writer:
        return MessagesWriter(self.asked, self.request, *about, self.reading)


class ResponsesForm(ChatForm, tag="responses"):
    asked: ResponsesRequest
    kept: Kept | None                # what is stored with the answer

    def writer(self, service: Service, *about: *About) -> Writer:
        keep = None if self.kept is None else Keeper(service.stored, self.kept)
        return ResponsesWriter(self.asked, keep, self.request, *about, self.reading)


class OllamaForm(ChatForm, tag="ollama"):
    model: str                       # as the request names it
    generates: bool                  # for /api/generate

    def writer(self, service: Service, *about: *About) -> Writer:
        return OllamaWriter(self.model, self.generates, self.request, *about, self.reading)


class CompletionForm(msgspec.Struct, tag="completion"):
    request: CompletionRequest

    def writer(self, service: Service, *about: *About) -> Writer:
        return CompletionWriter(self.request, *about)


class LlamaForm(CompletionForm, tag="llama"):
    asked: LlamaRequest

    def writer(self, service: Service, *about: *About) -> Writer:
        assert service.llm.ready is not None
        return LlamaWriter(self.asked, service.llm.ready.max_model_len, self.request, *about)


class Prepared(msgspec.Struct):
    form: ChatForm | MessagesForm | ResponsesForm | OllamaForm | CompletionForm | LlamaForm
    params: SamplingParams
    prompts: list[Any]               # of engine/client/processor.Prompt
    prefix: str                      # of the request's id
    background: bool = False

    def job(self, service: Service) -> Job:
        request = self.form.request
        request_id = f"{self.prefix}{secrets.token_hex(12)}"
        writer = self.form.writer(service, self.params, request_id, service.name, service.tokenizer)
        if service.options.enable_force_include_usage and request.stream_options is None:
            writer.force_usage()
        return Job(request, self.params, self.prompts, writer, [(b"x-request-id", request_id.encode())], self.background)
