"""`/v1/score`: how likely the model finds one text behind another, as the sum of its tokens' log-probabilities.

Fields and shape are those of vLLM's endpoint of that name. There the score comes from a model that was trained to judge pairs;
any decoder has a likelihood, which is what this server gives.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import msgspec

from ridgeline.engine.client.outputs import RequestOutput
from ridgeline.engine.client.request_context import Caller
from ridgeline.errors import BadRequest
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.embeddings import EmbeddingUsage
from ridgeline.server.api.generation import finite
from ridgeline.server.http.body import parse_body
from ridgeline.server.observe import prometheus
from ridgeline.server.service import Service


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: Any = None                                     # a hint

    def check(self) -> None:
        """What the types alone let through is told by pairs()."""

    def pairs(self) -> list[tuple[str, str]]:
        """One with one, one with each of several, or several with as many."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if not first or not second or (len(first) != len(second) and len(first) != 1):
            message = f"text_1 and text_2 must be as many as each other, or text_1 one; got {len(first)} and {len(second)}"
            raise BadRequest(message, field="text_1")
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


class Score(msgspec.Struct):
    index: int
    score: float                                         # log-probabilities of all its tokens, added up
    tokens: int
    greedy: bool                                         # each of them was the likeliest
    object: str = "score"


class ScoreReply(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: str = "list"


async def tokens_of(service: Service, pairs: list[tuple[str, str]]) -> list[tuple[list[int], int]]:
    """Of each pair the tokens of both texts, and where those of the second begin. They are read as one text: a token that reaches
    over the border counts for the second. The very first has nothing before it, so nothing says how likely it is."""
    made: list[tuple[list[int], int]] = []
    firsts: dict[str, list[int]] = {}
    for place, (first, second) in enumerate(pairs):
        if first not in firsts:
            firsts[first] = await service.llm.text_tokens(first)
        whole = await service.llm.text_tokens(first + second)
        mine = firsts[first]
        differ = (at for at, (one, other) in enumerate(zip(mine, whole, strict=False)) if one != other)
        shared = next(differ, min(len(mine), len(whole)))
        if not mine or shared == len(whole):
            message = f"text_1 and text_2 must have at least a token each; those of pair {place} have not"
            raise BadRequest(message, field="text_1")
        if len(whole) == 1:
            raise BadRequest(
                f"text_1 and text_2 are a single token together in pair {place}, without a likelihood: nothing stands before it",
                field="text_1",
            )
        made.append((whole, max(1, shared)))
    return made


async def score(service: Service, caller: Caller, body: bytes) -> ScoreReply:
    def work() -> tuple[ScoreRequest, list[tuple[str, str]]]:
        request = parse_body(ScoreRequest, body)
        service.check_routing(request.model, request.priority)
        return request, request.pairs()

    request, texts = await asyncio.to_thread(work)
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True, prompt_logprobs=0)
    with service.slots.taking(len(texts), already=1):
        pairs = await tokens_of(service, texts)
        stream = await service.llm.stream(
            [tokens for tokens, _ in pairs], params, priority=request.priority or 0, cache_salt=request.cache_salt or "",
            arrived=prometheus.arrived(), caller=caller,
        )
        try:
            outputs = await stream.complete()
        finally:
            stream.close()
    data = [_scored(place, output, start) for place, (output, (_, start)) in enumerate(zip(outputs, pairs, strict=True))]
    used = sum(len(tokens) for tokens, _ in pairs)
    return ScoreReply(f"score-{secrets.token_hex(12)}", int(time.time()), service.name, data, EmbeddingUsage(used, used))


def _scored(place: int, output: RequestOutput, start: int) -> Score:
    assert output.prompt_logprobs is not None
    at = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[start:]
    found = [known[token] for token, known in at if known is not None]
    return Score(place, sum(finite(each.logprob) for each in found), len(found), all(each.rank == 1 for each in found))
