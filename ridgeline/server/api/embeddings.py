"""`/v1/embeddings`: a text as the hidden state of its last token, or as the mean of all, with length 1.

Types, and vectors as JSON; the engine pools. Any decoder gives a vector; whether distances between them mean anything
depends on what the model was trained for.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any, Literal

import msgspec
import numpy as np

from ridgeline.engine.client.long_work import away_if_long
from ridgeline.engine.client.outputs import RequestOutput
from ridgeline.engine.client.processor import Prompt
from ridgeline.engine.client.request_context import Caller
from ridgeline.errors import BadRequest, Unsupported
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.generation import FIT, Integer
from ridgeline.server.http.body import parse_body
from ridgeline.server.observe import prometheus
from ridgeline.server.service import Service

MOST_TEXTS = 2048                    # per request, OpenAI's limit


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    input: str | list[str | Integer | list[Integer]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["last", "mean"] | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    user: Any = None                                     # a hint
    dimensions: Any = None                               # not supported

    def check(self) -> None:
        if self.dimensions is not None:
            message = "dimensions is not supported by this server: vectors have the model's hidden size; leave it out"
            raise Unsupported(message, field="dimensions")

    def prompts(self) -> list[str | list[int]]:
        """A text, token ids, or a list of either."""
        if isinstance(self.input, str):
            return [self.input]
        kinds = {type(item) for item in self.input}
        if kinds == {int}:
            return [self.input]  # type: ignore[list-item]
        if kinds not in ({str}, {list}):
            message = "input must be a text, a list of texts, a list of token ids or a list of such lists"
            raise BadRequest(message, field="input")
        if len(self.input) > MOST_TEXTS:
            raise BadRequest(f"input has {len(self.input)} texts; at most {MOST_TEXTS} may come in one request", field="input")
        return self.input  # type: ignore[return-value]

    def params(self, longest: int) -> SamplingParams:
        """The engine always samples one token; it is dropped. `longest`: the context length."""
        cut = max(1, longest - 1) if self.truncate_prompt_tokens == FIT else self.truncate_prompt_tokens
        return SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True, pooling=self.pooling or "last",
            truncate_prompt_tokens=cut,
        )


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingReply(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"

    def add(self, outputs: list[RequestOutput], request: EmbeddingRequest) -> None:
        """Further vectors, in the order of their texts."""
        first = len(self.data)
        self.data += [Embedding(first + place, _written(output, request)) for place, output in enumerate(outputs)]
        self.usage.prompt_tokens += sum(len(output.prompt_token_ids) for output in outputs)
        self.usage.total_tokens = self.usage.prompt_tokens


def _written(output: RequestOutput, request: EmbeddingRequest) -> list[float] | str:
    assert output.hidden is not None
    vector = output.hidden.astype(np.float32)
    length = float(np.linalg.norm(vector))
    vector = vector / length if length > 0 and request.normalize is not False else vector
    written = request.encoding_format == "base64"
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if written else vector.tolist()


async def embed(service: Service, caller: Caller, body: bytes) -> EmbeddingReply:
    def work() -> tuple[EmbeddingRequest, SamplingParams, list[Prompt]]:
        request = parse_body(EmbeddingRequest, body)
        service.check_routing(request.model, request.priority)
        assert service.llm.ready is not None
        return request, request.params(service.llm.ready.max_model_len), list(request.prompts())

    request, params, prompts = await away_if_long(len(body), work)
    if request.add_special_tokens is False:
        prompts = [await plain_tokens(service, each) for each in prompts]
    reply = EmbeddingReply([], service.name, EmbeddingUsage(0, 0))
    # Clients send a thousand texts at once. Taking half of the slots at a time leaves the other half to other clients.
    most = max(1, service.slots.limit // 2)
    for begin in range(0, len(prompts), most):
        part = prompts[begin : begin + most]
        with service.slots.taking(len(part), already=1):
            stream = await service.llm.stream(
                part, params, priority=request.priority or 0, cache_salt=request.cache_salt or "", arrived=prometheus.arrived(),
                caller=caller,
            )
            try:
                outputs = await stream.complete()
            finally:
                stream.close()
        await asyncio.to_thread(reply.add, outputs, request)     # thousands of numbers per vector
    return reply


async def plain_tokens(service: Service, prompt: Prompt) -> Prompt:
    """A text as token ids, without special tokens."""
    await asyncio.sleep(0)                               # let streams go on between thousands of texts
    return await service.llm.text_tokens(prompt, False) if isinstance(prompt, str) else prompt
