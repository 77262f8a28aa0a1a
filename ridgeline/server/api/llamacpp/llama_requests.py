"""Requests of llama.cpp's own /completion as completion requests: its names, its prompts and its biases.

llama.cpp ignores fields that it does not know, and so does this. A sampler that this server does not have is refused by name if
it is switched on. Structs in, plain data out; no ASGI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Literal

import msgspec

from ridgeline.errors import BadRequest, Unsupported, shown
from ridgeline.server.api.request_checks import forget, refuse

NEVER = -100.0                       # the bias of a token that must not come
MOST_BIASES = 4096
MOST_FIELDS, LONGEST_FIELD = 128, 128                   # of response_fields: they are looked up in every answer of the request
MOST_BIAS, LONGEST_ID = 1e6, 10      # beyond these, a number is no bias and digits are no id
NAMES = {
    "max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs", "n": "n_cmpl",
    "structured_outputs.json": "json_schema", "structured_outputs.grammar": "grammar", "structured_outputs": "grammar",
}
Tokenize = Callable[[str, bool], Awaitable[list[int]]]   # a text, with the special tokens before it or without


class LlamaRequest(msgspec.Struct, kw_only=True):
    prompt: str | list[Any] | dict[str, Any]
    model: str | None = None
    n_predict: int | None = None         # -1: no limit; 0: only the prompt
    max_tokens: int | None = None        # another name of it
    n_cmpl: int | None = None
    stream: bool | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None     # 0: no penalties; else they cover the whole text
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    logit_bias: list[Any] | dict[str, Any] | None = None
    n_probs: int | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: list[str] | None = None
    # Hints. There are no slots, samplers have one order, and a prompt is never shifted out of the context.
    id_slot: Any = None
    n_keep: Any = None
    n_discard: Any = None
    min_keep: Any = None
    samplers: Any = None
    n_cache_reuse: Any = None
    return_progress: Any = None
    sse_ping_interval: Any = None
    # Not supported, unless they are off.
    mirostat: Any = None
    dynatemp_range: Any = None
    dry_multiplier: Any = None
    xtc_probability: Any = None
    top_n_sigma: Any = None
    adaptive_target: Any = None
    n_indent: Any = None
    t_max_predict_ms: Any = None
    post_sampling_probs: Any = None
    lora: Any = None

    HINTS: ClassVar[tuple[str, ...]] = (
        "id_slot", "n_keep", "n_discard", "min_keep", "samplers", "n_cache_reuse", "return_progress", "sse_ping_interval",
    )
    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mirostat": (0,), "dynatemp_range": (0,), "dry_multiplier": (0,), "xtc_probability": (0,), "top_n_sigma": (-1, 0),
        "adaptive_target": (-1,), "n_indent": (0,), "t_max_predict_ms": (0, -1), "post_sampling_probs": (False,), "lora": ([],),
    }

    def check(self) -> None:
        refuse(self, self.REFUSED)
        if self.grammar and self.json_schema is not None:
            raise BadRequest("grammar and json_schema each say what the answer must look like; give one", field="grammar")
        fields = self.response_fields or []
        if len(fields) > MOST_FIELDS or any(len(each) > LONGEST_FIELD for each in fields):
            message = f"response_fields may have at most {MOST_FIELDS} names of at most {LONGEST_FIELD} characters"
            raise BadRequest(message, field="response_fields")

    @property
    def limit(self) -> int | None:
        """Most tokens of an answer; None: as many as fit. 0 asks only that the prompt be computed."""
        given = self.max_tokens if self.n_predict is None else self.n_predict
        return None if given is None or given < 0 else given

    @property
    def many(self) -> bool:
        """Whether the answer is a list: there are several prompts, or several answers to one."""
        return len(prompts(self.prompt)) > 1 or (self.n_cmpl or 1) > 1

    def forget_prompt(self) -> None:
        """Free what only the prompts needed; their number stays."""
        self.prompt, self.grammar, self.json_schema, self.logit_bias = [""] * len(prompts(self.prompt)), None, None, None
        forget(self, self.HINTS)

    def completion(self) -> dict[str, Any]:
        """As fields of /v1/completions, but for the prompt, the limit and the biases, which need a tokenizer."""
        names = (
            "model", "stream", "stop", "seed", "temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty",
            "frequency_penalty", "ignore_eos",
        )
        made = {name: value for name in names if (value := getattr(self, name)) is not None}
        if made.get("top_k", 0) < 0:
            made["top_k"] = 0
        if self.repeat_last_n == 0:
            made = {name: value for name, value in made.items() if not name.endswith("_penalty")}
        elif self.repeat_penalty is not None:
            made["repetition_penalty"] = self.repeat_penalty
        if self.n_cmpl is not None:
            made["n"] = self.n_cmpl
        if self.n_probs:
            made["logprobs"] = self.n_probs
        if self.grammar:
            made["structured_outputs"] = {"grammar": self.grammar}
        elif self.json_schema is not None:
            made["structured_outputs"] = {"json": self.json_schema} if self.json_schema else {"json_object": True}
        if self.cache_prompt is False:
            made["techniques"] = {"prefix_caching": False}
        return made | {"prompt": ""}

    async def biases(self, tokenize: Tokenize) -> dict[int, float]:
        """By token id. A text stands for each of its tokens, and false for never."""
        given = self.logit_bias
        pairs = list(given.items()) if isinstance(given, dict) else given or []
        made: dict[int, float] = {}
        if len(pairs) > MOST_BIASES:
            raise BadRequest(f"logit_bias has {len(pairs)} entries; at most {MOST_BIASES} are possible", field="logit_bias")
        for place, pair in enumerate(pairs):
            if not _is_bias(pair):
                message = f"logit_bias must hold pairs of a token and a number, or false; got {shown(pair)}"
                raise BadRequest(message, field="logit_bias")
            token, bias = str(pair[0]), NEVER if pair[1] is False else float(pair[1])
            made |= dict.fromkeys([int(token)] if token.isdecimal() else await tokenize(token, False), bias)
            await _others_turn(place)
        return made


def _is_bias(pair: Any) -> bool:
    is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
    if not is_pair or not isinstance(pair[0], (int, str)) or not isinstance(pair[1], (int, float)):
        return False
    is_id = isinstance(pair[0], int) or pair[0].isdecimal()
    fits = len(pair[0]) <= LONGEST_ID if isinstance(pair[0], str) else abs(pair[0]) < 10**LONGEST_ID
    return (fits or not is_id) and abs(pair[1]) < MOST_BIAS


async def _others_turn(place: int) -> None:
    """Short texts are tokenised on the event loop: other requests get a turn now and then."""
    if place % 8 == 7:
        await asyncio.sleep(0)


def prompts(given: str | list[Any] | dict[str, Any]) -> list[Any]:
    """The prompts of a request. Each is a text, an object with one, or a list of token ids and texts."""
    if not isinstance(given, list):
        return [given]
    if all(isinstance(each, str) for each in given) and given:
        return list(given)                               # texts alone are prompts of their own
    return list(given) if any(isinstance(each, (list, dict)) for each in given) else [given]


async def prompt_of(given: Any, tokenize: Tokenize) -> str | list[int]:
    """One prompt as a text or as token ids."""
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            raise Unsupported("prompt.multimodal_data: this server takes text only", field="prompt")
        given = given.get("prompt_string")
    if isinstance(given, str):
        return given
    if not isinstance(given, list) or not all(isinstance(each, (int, str)) and not isinstance(each, bool) for each in given):
        message = "prompt must be a text, token ids, an object with a prompt_string, or a list of them"
        raise BadRequest(message, field="prompt")
    ids: list[int] = []
    for place, each in enumerate(given):
        ids += [each] if isinstance(each, int) else await tokenize(each, place == 0)
        await _others_turn(place)
    return ids


class TemplateReply(msgspec.Struct):
    """The prompt of a conversation."""

    prompt: str


class Slot(msgspec.Struct):
    """A row of the running batch. Requests have no fixed row."""

    id: int
    n_ctx: int
    is_processing: bool
    id_task: Literal[-1] = -1
    speculative: bool = False
