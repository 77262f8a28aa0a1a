"""`/v1/score`: the likelihood of one text after another, as the sum of its tokens' log-probabilities.

Fields and shape are those of vLLM's endpoint of that name. There the score comes from a model trained to judge pairs; here it is
the likelihood that any decoder gives.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import msgspec

from ridgeline.engine.client.long_work import away, away_to_answer
from ridgeline.engine.client.outputs import RequestOutput
from ridgeline.engine.client.processor import check_salt, second_begins
from ridgeline.engine.client.prompt_limits import PromptLimits
from ridgeline.engine.client.request_context import Caller
from ridgeline.errors import BadRequest
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.openai.embeddings import EmbeddingUsage
from ridgeline.server.api.prompt_parts import finite
from ridgeline.server.api.request_checks import forget
from ridgeline.server.http.body import parse_body
from ridgeline.server.observe import prometheus
from ridgeline.server.service import Service

BYTES_PER_TOKEN = 64                 # as much work as that of a body: the log-probabilities of a token are read


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: Any = None                                     # a hint

    def check(self) -> None:
        """pairs() checks the texts."""
        forget(self, ("user",))
        check_salt(self.cache_salt or "")

    def pairs(self) -> list[tuple[str, str]]:
        """One with one, one with each of several, or several with equally many."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if not first or not second or (len(first) != len(second) and len(first) != 1):
            message = f"text_1 and text_2 must have equally many texts, or text_1 one; got {len(first)} and {len(second)}"
            raise BadRequest(message, field="text_1")
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


class Score(msgspec.Struct):
    index: int
    score: float                                         # the sum of its tokens' log-probabilities
    tokens: int
    greedy: bool                                         # whether each token was the most likely one
    object: str = "score"


class ScoreReply(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: str = "list"


async def tokens_of(service: Service, pairs: list[tuple[str, str]]) -> list[tuple[list[int], int]]:
    """(the tokens of both texts, where those of the second begin) for each pair."""
    made: list[tuple[list[int], int]] = []
    firsts: dict[str, list[int]] = {}
    assert service.llm.ready is not None
    limits, tally = PromptLimits(service.llm.ready.max_model_len, 0), service.llm.tally()
    for place, (first, second) in enumerate(pairs):
        await asyncio.sleep(0)                           # let streams go on between many pairs
        if first not in firsts:
            firsts[first] = await service.llm.text_tokens(first)
            limits.check_length(len(firsts[first]))      # before it is tokenised again with each second text
        whole = await service.llm.text_tokens(first + second)
        tally.add(len(whole))
        try:
            made.append((whole, second_begins(firsts[first], whole)))
        except BadRequest as error:
            raise BadRequest(f"pair {place} of text_1 and text_2: {error}", field="text_1") from None
    return made


class Pairs(msgspec.Struct):
    """A request with its texts as tokens: of both texts of a pair, and where those of the second begin."""

    request: ScoreRequest
    tokens: list[tuple[list[int], int]]


async def read_pairs(service: Service, caller: Caller, body: bytes) -> Pairs:
    def work() -> tuple[ScoreRequest, list[tuple[str, str]]]:
        request = parse_body(ScoreRequest, body)
        service.check_routing(request.model, request.priority)
        return request, request.pairs()

    request, texts = await away(len(body), work)
    service.slots.check(len(texts))
    pairs = await tokens_of(service, texts)
    request.text_1 = request.text_2 = ""                 # they are in the tokens
    return Pairs(request, pairs)


async def score(service: Service, caller: Caller, read: Pairs) -> ScoreReply:
    request, pairs = read.request, read.tokens
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True, prompt_logprobs=0)
    with service.slots.taking(len(pairs), already=1):
        stream = await service.llm.stream(
            [tokens for tokens, _ in pairs], params, priority=request.priority or 0, cache_salt=request.cache_salt or "",
            arrived=prometheus.arrived(), caller=caller,
        )
        try:
            outputs = await stream.complete()
        finally:
            stream.close()
    used = sum(len(tokens) for tokens, _ in pairs)
    data = await away_to_answer(BYTES_PER_TOKEN * used, lambda: [
        _scored(place, output, start) for place, (output, (_, start)) in enumerate(zip(outputs, pairs, strict=True))
    ])
    return ScoreReply(f"score-{secrets.token_hex(12)}", int(time.time()), service.name, data, EmbeddingUsage(used, used))


def _scored(place: int, output: RequestOutput, start: int) -> Score:
    assert output.prompt_logprobs is not None
    at = ((output.prompt_token_ids[place], output.prompt_logprobs[place]) for place in range(start, len(output.prompt_token_ids)))
    found = [known[token] for token, known in at if known is not None]
    return Score(place, sum(finite(each.logprob) for each in found), len(found), all(each.rank == 1 for each in found))
