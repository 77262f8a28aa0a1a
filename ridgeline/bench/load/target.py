"""The OpenAI-compatible server under load. Finds out what it supports before anything is timed.

Asked first: its model, its tokenizer (`/tokenize`, which vLLM and Ridgeline have), and the optional fields that it accepts: a
refused field is left out of a second attempt. Every record says how tokens were counted:

    usage             the server's own count, in the last event of the stream (stream_options.include_usage)
    token ids         of every event (return_token_ids)
    server tokenizer  the answer's text, tokenised again by the server
    local tokenizer   the same, by the tokenizer of --tokenizer
    events            one token per event is assumed: the only one of these that is not a count
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ridgeline.bench.load.http_client import EventStream, HttpClient, HttpFailure, Reply
from ridgeline.bench.load.latency import Outcome
from ridgeline.bench.load.prompts import Turn, Words, common_words, known_words, match_tokens
from ridgeline.errors import ConfigError, EngineDead
from ridgeline.quant.quality_card import with_card
from ridgeline.techniques import TECHNIQUES
from ridgeline.text.tokenizer import Tokenizer

UNKNOWN_QUALITY = "unknown: the server does not report its techniques"
_WORDS_AT_ONCE = 250
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Fields that OpenAI's own API or older servers do not have, in the order in which they are dropped.
OPTIONAL: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}}


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """Takes the events of one stream: when tokens came, how many, and what the server says of it."""

    __slots__ = ("_clock", "_keep", "error", "ids", "outcome", "parts", "usage")

    def __init__(self, outcome: Outcome, clock_start: float, keep_text: bool) -> None:
        self.outcome = outcome
        self.usage: _Usage | None = None
        self.ids = 0
        self.error = ""
        self.parts: list[str] = []
        self._clock = clock_start
        self._keep = keep_text

    def event(self, data: bytes, when: float) -> None:
        if data == b"[DONE]":
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError:
            self.error = f"an event that is not the JSON of a completion: {data[:100].decode('utf-8', 'replace')}"
            return
        if event.error:
            self.error = str(event.error.get("message", event.error) if isinstance(event.error, dict) else event.error)
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices or ():
            self._choice(choice, when - self._clock)

    def _choice(self, choice: _Choice, when: float) -> None:
        delta, outcome = choice.delta, self.outcome
        if delta is None:
            text, said, is_role = choice.text or "", bool(choice.text), False
        else:
            text, is_role = delta.content or "", delta.role is not None
            said = bool(text or delta.reasoning_content or delta.reasoning or delta.tool_calls)
        outcome.first_chunk = outcome.first_chunk or when
        if said:
            outcome.shown.append(when)
        if choice.token_ids:
            self.ids += len(choice.token_ids)
        # A chat's first event, with only a role, is no token. Later ones without text are tokens that have none.
        if said or choice.token_ids or not (is_role or choice.finish_reason):
            outcome.events.append(when)
        elif choice.finish_reason == "stop":                 # the token that ends an answer is counted and has no text
            self.outcome.stopped = when
        if self._keep and text:
            self.parts.append(text)


def quality_of_techniques(names: Collection[str]) -> str:
    """The quality of a server with these techniques: "exact", or those that may change answers."""
    lossy = [technique.name for technique in TECHNIQUES if not technique.exact and technique.name in names]
    return ", ".join(lossy) or "exact"


@dataclass(slots=True)
class Target:
    client: HttpClient
    path: str                        # of the endpoint
    model: str = ""
    body: dict[str, Any] = field(default_factory=dict)           # fields of every request
    optional: dict[str, Any] = field(default_factory=dict)       # those of OPTIONAL that the server takes
    timeout: float = 600.0
    max_model_len: int = 0
    owner: str = ""                  # who the server says it is
    card: str = ""                   # what its quantised weights cost
    words: Words = field(default_factory=lambda: Words(common_words()))
    counted_by: str = "events"
    quality: str = UNKNOWN_QUALITY
    memory: dict[str, Any] = field(default_factory=dict)
    tokenizer: Tokenizer | None = None

    @property
    def chats(self) -> bool:
        return "chat" in self.path

    # ── asking what the server is ────────────────────────────────────────────────────────────────────────────────────

    async def meet(self, ignore_eos: bool) -> None:
        """Find out what the server supports. EngineDead if there is no server."""
        try:
            await self._find_model()
            await self._learn_words()
            await self._try_fields(ignore_eos)
            await self._learn_quality()
        except HttpFailure as error:
            raise EngineDead(f"the server cannot be measured: {error.kind}: {error}") from None

    async def _find_model(self) -> None:
        try:
            reply = await self.client.get("/v1/models")
        except HttpFailure as error:
            raise EngineDead(f"no server answers at {self.client.url}: {error}") from None
        if reply.status == 401:
            raise ConfigError("the server requires a key: give --api-key, or set OPENAI_API_KEY")
        if reply.status != 200:
            if self.model:
                return                                       # not every gateway lists its models
            raise ConfigError(f"GET {self.client.url}/v1/models was answered with status {reply.status}: is that the server's "
                              "address? If it does not list its models, name one with --model")
        cards = reply.json().get("data") or [{}]
        card = next((card for card in cards if card.get("id") == self.model), cards[0])
        self.model = self.model or str(card.get("id", ""))
        self.max_model_len = int(card.get("max_model_len") or 0)
        self.owner, self.card = str(card.get("owned_by") or ""), str(card.get("quality") or "")

    async def _learn_words(self) -> None:
        """How many tokens words have, by the tokenizer that can be asked; else a word is taken for one token."""
        words = common_words()
        known: dict[str, list[int]] = {}
        for start in range(0, len(words), _WORDS_AT_ONCE):   # a server may limit a text's length
            some = words[start : start + _WORDS_AT_ONCE]
            found = await self._tokens(" " + " ".join(some))
            if found is None:
                return
            known |= match_tokens(some, *found)
        with suppress(ConfigError):                          # tokens that are no parts of words
            self.words = known_words(known, "local tokenizer" if self.tokenizer is not None else "server tokenizer")

    async def _tokens(self, text: str) -> tuple[list[int], list[str]] | None:
        if self.tokenizer is not None:
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            return ids, [self.tokenizer.convert_ids_to_tokens(token) or "" for token in ids]
        asked = {"model": self.model, "prompt": text, "add_special_tokens": False, "return_token_strs": True}
        reply = await self._ask("/tokenize", asked)
        found = reply.json() if reply is not None else {}
        if not isinstance(found, dict) or not found.get("token_strs") or len(found["token_strs"]) != len(found["tokens"]):
            return None                                      # none, or an older one without strings
        return found["tokens"], found["token_strs"]

    async def _try_fields(self, ignore_eos: bool) -> None:
        """One short answer with every optional field; without those that are refused."""
        fields = {name: value for name, value in OPTIONAL.items() if ignore_eos or name != "ignore_eos"}
        while True:
            self.optional = dict(fields)
            outcome = Outcome(0.0)
            answer = await self.ask([Turn(" hello", 4)], [], outcome, 0.0, keep_text=True)
            if outcome.ok:
                break
            if outcome.error not in ("http 400", "http 422") or not fields:
                raise EngineDead(f"a first request failed ({outcome.error}): {outcome.detail}")
            named = [name for name in fields if name in outcome.detail]
            del fields[named[0] if named else next(iter(fields))]
        if answer.usage is not None and answer.usage.completion_tokens:
            self.counted_by = "usage"
            fields.pop("return_token_ids", None)             # they would only cost both sides time
        elif answer.ids:
            self.counted_by = "token ids"
        elif self.tokenizer is not None:
            self.counted_by = "local tokenizer"
        elif self.words.exact:
            self.counted_by = "server tokenizer"
        self.optional = fields

    async def _learn_quality(self) -> None:
        """Ridgeline's server names the techniques that an answer was made with, and its memory."""
        if self.owner != "ridgeline":
            return
        asked = {"model": self.model, "prompt": " hello", "max_tokens": 1, "return_timings": True}
        reply = await self._ask(COMPLETIONS, asked)
        names = (reply.json().get("timings") or {}).get("techniques") if reply is not None else None
        if names is not None:
            self.quality = with_card(quality_of_techniques(names), self.card)

    async def _ask(self, path: str, body: dict[str, Any]) -> Reply | None:
        """A request to an endpoint that a server may not have: None then."""
        try:
            async with asyncio.timeout(self.timeout):
                reply = await self.client.post(path, json.dumps(body).encode())
        except (HttpFailure, TimeoutError):
            return None
        return reply if reply.status == 200 else None

    # ── asking for an answer ─────────────────────────────────────────────────────────────────────────────────────────

    def request(self, turns: list[Turn], answers: list[str]) -> bytes:
        """The body for the last of these turns, after the answers to those before it."""
        turn = turns[-1]
        body = {"model": self.model, "max_tokens": turn.tokens_out, "stream": True, **self.optional, **self.body}
        if self.chats:
            body["messages"] = turn.messages if turn.messages is not None else _messages(turns, answers)
        elif turn.messages is not None:
            body["prompt"] = "\n".join(str(message.get("content") or "") for message in turn.messages)
        elif turn.ids is not None:
            body["prompt"] = turn.ids
        else:
            past = "".join(before.text + said for before, said in zip(turns, answers, strict=False))
            body["prompt"] = past + turn.text
        return msgspec.json.encode(body)

    async def ask(
        self, turns: list[Turn], answers: list[str], outcome: Outcome, clock_start: float, keep_text: bool = False,
        now: Callable[[], float] | None = None,
    ) -> Answer:
        """One streamed answer, noted in `outcome`. Never raises for what the server does: that is an outcome too."""
        answer = Answer(outcome, clock_start, keep_text or self.counted_by.endswith("tokenizer"))
        try:
            async with asyncio.timeout(self.timeout):
                reply = await self.client.post(self.path, self.request(turns, answers), EventStream(answer.event))
            if reply.status != 200:
                outcome.error, outcome.detail = f"http {reply.status}", reply.body.decode("utf-8", "replace")[:500]
            elif answer.error:
                outcome.error, outcome.detail = "error event", answer.error
            elif not outcome.events:
                outcome.error, outcome.detail = "empty answer", "the stream ended without a token"
        except TimeoutError:
            outcome.error, outcome.detail = "timeout", f"no whole answer in {self.timeout:g} s"
        except HttpFailure as error:
            outcome.error, outcome.detail = error.kind, str(error)
        if now is not None:
            outcome.ended = now() - clock_start
        outcome.text = "".join(answer.parts)
        if outcome.ok:
            self._count(outcome, answer)
        return answer

    def _count(self, outcome: Outcome, answer: Answer) -> None:
        usage = answer.usage
        if usage is not None:
            outcome.tokens_in = usage.prompt_tokens
            details = usage.prompt_tokens_details
            outcome.cached = (details.cached_tokens or 0) if details is not None else 0
        if usage is not None and usage.completion_tokens:
            outcome.tokens_out = usage.completion_tokens
        elif answer.ids:
            outcome.tokens_out = answer.ids
        else:
            outcome.tokens_out = len(outcome.events)         # until count_texts() knows better

    async def count_texts(self, outcomes: list[Outcome]) -> None:
        """After a run: the tokens of answers whose server does not count them."""
        if not self.counted_by.endswith("tokenizer"):
            return
        for outcome in outcomes:
            if not outcome.ok or not outcome.text:
                continue
            if self.tokenizer is not None:
                outcome.tokens_out = len(self.tokenizer.encode(outcome.text, add_special_tokens=False))
                continue
            asked = {"model": self.model, "prompt": outcome.text, "add_special_tokens": False}
            reply = await self._ask("/tokenize", asked)
            if reply is not None:
                outcome.tokens_out = int(reply.json()["count"])


def _messages(turns: list[Turn], answers: list[str]) -> list[dict[str, str]]:
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn.text})
        if number < len(answers):
            messages.append({"role": "assistant", "content": answers[number]})
    return messages
