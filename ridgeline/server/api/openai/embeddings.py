"""`/v1/embeddings`: a text as the hidden state of its last token, or as the mean of all, with length 1.

Types, and vectors as JSON; the engine pools. Any decoder gives a vector; whether distances between them mean anything
depends on what the model was trained for.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from ridgeline.engine.client.long_work import away_if_long, away_to_answer
from ridgeline.engine.client.outputs import RequestOutput
from ridgeline.engine.client.processor import Prompt, check_salt
from ridgeline.engine.client.prompt_limits import PromptTally
from ridgeline.engine.client.request_context import Caller
from ridgeline.errors import BadRequest
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.generation import FIT, Integer
from ridgeline.server.api.openai.vector_bytes import ByteOrder, EmbedType, vector_bytes
from ridgeline.server.api.prompt_parts import encode, encoded_alone
from ridgeline.server.api.request_checks import forget
from ridgeline.server.http.body import parse_body
from ridgeline.server.http.stream import Binary
from ridgeline.server.observe import prometheus
from ridgeline.server.service import Service

MOST_TEXTS = 2048                    # per request, OpenAI's limit
BYTES_PER_NUMBER = 20                # of a vector as JSON …
BASE64_PER_NUMBER = 6                # … and as text in it


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    input: str | list[str | Integer | list[Integer]]
    model: str | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: EmbedType | None = None
    endianness: ByteOrder | None = None
    dimensions: int | None = None
    pooling: Literal["last", "mean"] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    normalize: bool | None = None
    use_activation: bool | None = None                   # vLLM's name of the same
    user: Any = None                                     # hints
    request_id: Any = None
    mm_processor_kwargs: Any = None

    HINTS: ClassVar[tuple[str, ...]] = ("user", "request_id", "mm_processor_kwargs")

    def check(self) -> None:
        forget(self, self.HINTS)
        check_salt(self.cache_salt or "")
        if self.dimensions is not None and self.dimensions < 1:
            raise BadRequest(f"dimensions must be 1 or more, got {self.dimensions}", field="dimensions")
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise BadRequest("normalize and use_activation are two names of the same field; give one", field="normalize")

    @property
    def normalizes(self) -> bool:
        return self.normalize is not False and self.use_activation is not False

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
            truncate_prompt_tokens=cut, truncation_side=self.truncation_side or "left",
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
    id: str = ""
    created: int = 0


@dataclass(slots=True)
class Vectors:
    """The vectors of a request's texts, in their order."""

    request: EmbeddingRequest
    made: list[np.ndarray] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.hidden is not None
            self.made.append(self._finished(output.hidden.astype(np.float32)))
            self.num_tokens += len(output.prompt_token_ids)

    def _finished(self, vector: np.ndarray) -> np.ndarray:
        """With as many numbers as were asked for, and length 1."""
        if (wanted := self.request.dimensions) is not None:
            vector = vector[:wanted]
        length = float(np.linalg.norm(vector))
        return vector / length if length > 0 and self.request.normalizes else vector

    def as_bytes(self) -> list[bytes]:
        kind, order = self.request.embed_dtype or "float32", self.request.endianness or "native"
        return [vector_bytes(vector, kind, order) for vector in self.made]

    @property
    def num_json_bytes(self) -> int:
        each = BASE64_PER_NUMBER if self.request.encoding_format == "base64" else BYTES_PER_NUMBER
        return each * sum(map(len, self.made))

    def as_lists(self) -> list[list[float]]:
        """Each is encoded already: as objects, a number takes 32 bytes."""
        return [encoded_alone(vector.tolist()) for vector in self.made]

    def as_json(self) -> list[Embedding]:
        if self.request.encoding_format == "base64":
            written: list[Any] = [base64.b64encode(each).decode() for each in self.as_bytes()]
        else:
            written = self.as_lists()
        return [Embedding(place, each) for place, each in enumerate(written)]


class EmbeddingTokens(msgspec.Struct):
    """A request, and its prompts apart: a text, token ids, or token ids as bytes where another process has tokenised the text."""

    request: EmbeddingRequest
    prompts: list[Any]
    model: str = ""                  # its name in the request, where the answer repeats it


async def read_embedding(service: Service, caller: Caller, body: bytes) -> EmbeddingTokens:
    request = await away_if_long(len(body), lambda: parse_body(EmbeddingRequest, body))
    return await embedding_of(service, request, len(body))


async def embedding_of(service: Service, request: EmbeddingRequest, size: int, model: str = "") -> EmbeddingTokens:
    """All that can be refused before the engine is asked. `size`: bytes of the body."""
    service.check_routing(request.model, request.priority)
    longest = service.llm.hidden_size
    if longest and request.dimensions is not None and request.dimensions > longest:
        message = f"dimensions must be between 1 and {longest}, which this model's vectors have; got {request.dimensions}"
        raise BadRequest(message, field="dimensions")
    prompts: list[Prompt] = await away_if_long(size, lambda: list(request.prompts()))
    if request.add_special_tokens is False:
        tally = service.llm.tally()
        prompts = [await plain_tokens(service, each, tally) for each in prompts]
    request.input = ""
    return EmbeddingTokens(request, prompts, model)


async def embed(service: Service, caller: Caller, read: EmbeddingTokens) -> bytes | Binary:
    request = read.request
    vectors = await vectors_of(service, caller, read)
    name, now = f"embd-{secrets.token_hex(12)}", int(time.time())
    usage = EmbeddingUsage(vectors.num_tokens, vectors.num_tokens)
    if request.encoding_format in ("bytes", "bytes_only"):
        return await asyncio.to_thread(_binary, vectors, name, now, service.name, usage)

    def written() -> bytes:
        return encode(EmbeddingReply(vectors.as_json(), service.name, usage, id=name, created=now))

    return await away_to_answer(vectors.num_json_bytes, written)


def _binary(vectors: Vectors, name: str, now: int, model: str, usage: EmbeddingUsage) -> Binary:
    """All vectors as bytes, with a header that says where each one begins; `bytes_only` has none."""
    parts, request = vectors.as_bytes(), vectors.request
    if request.encoding_format == "bytes_only":
        return Binary(b"".join(parts))
    ends = list(accumulate(map(len, parts)))
    items = [
        {"index": place, "embed_dtype": request.embed_dtype or "float32", "endianness": request.endianness or "native",
         "start": end - len(part), "end": end, "shape": [len(vectors.made[place])]}
        for place, (part, end) in enumerate(zip(parts, ends, strict=True))
    ]
    about = {"id": name, "created": now, "model": model, "data": items, "usage": usage}
    return Binary(b"".join(parts), [(b"metadata", msgspec.json.encode(about))])


async def vectors_of(service: Service, caller: Caller, read: EmbeddingTokens) -> Vectors:
    request, prompts = read.request, read.prompts
    assert service.llm.ready is not None
    params = request.params(service.llm.ready.max_model_len)
    vectors = Vectors(request)
    # Clients send a thousand texts at once. Taking half of the slots at a time leaves the other half to other clients.
    most = max(1, service.slots.limit // 2)
    for begin in range(0, len(prompts), most):
        part = [token_ids(each) if isinstance(each, bytes) else each for each in prompts[begin : begin + most]]
        with service.slots.taking(len(part), already=1):
            stream = await service.llm.stream(
                part, params, priority=request.priority or 0, cache_salt=request.cache_salt or "", arrived=prometheus.arrived(),
                caller=caller,
            )
            try:
                outputs = await stream.complete()
            finally:
                stream.close()
        await asyncio.to_thread(vectors.add, outputs)    # thousands of numbers per vector
    return vectors


def token_bytes(ids: list[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def token_ids(data: bytes) -> list[int]:
    return np.frombuffer(data, "<u4").tolist()


async def plain_tokens(service: Service, prompt: Prompt, tally: PromptTally) -> Prompt:
    """A text as token ids, without special tokens."""
    await asyncio.sleep(0)                               # let streams go on between thousands of texts
    if not isinstance(prompt, str):
        return prompt
    ids = await service.llm.text_tokens(prompt, False)
    tally.add(len(ids))
    return ids
