"""SamplingParams: how one request wants its tokens chosen. Names and defaults follow vLLM's offline API."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from numbers import Integral, Real
from typing import Any

from ridgeline.errors import BadRequest, Unsupported

MAX_N = 128                          # answers per prompt
MAX_LOGPROBS = 20                    # alternatives per position
MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 1_024
MAX_STOP_TOKEN_IDS = 1_024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_LOGIT_BIASES = 1_024
MAX_TOKEN_ID = 2**31 - 1             # ids travel as int32; which of them the model has, the engine says

# vLLM's names for what is not done here -> the values that ask for nothing.
_NOT_DONE: dict[str, tuple[Any, ...]] = {
    "logits_processors": ([],),
    "guided_decoding": (),
    "structured_outputs": (),
    "extra_args": ({},),
}


class RequestOutputKind(Enum):
    """What each output of a stream holds. LLM.generate returns whole answers whatever is asked."""

    CUMULATIVE = 0                   # everything so far
    DELTA = 1                        # what is new
    FINAL_ONLY = 2                   # nothing before the end


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    n: int = 1
    temperature: float = 1.0         # 0 = greedy
    top_k: int = 0                   # 0 or -1 = off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None          # None or -1 = a different one for every request
    max_tokens: int | None = 16      # None = up to the model's context
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)            # a single string is accepted too
    stop_token_ids: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None                # keep only so many of the prompt's last tokens
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logits_processors: Any = None
    guided_decoding: Any = None
    structured_outputs: Any = None
    extra_args: Any = None

    def __post_init__(self) -> None:
        stop: Any = self.stop
        self.stop = [stop] if isinstance(stop, str) else stop
        for name in ("stop", "stop_token_ids", "bad_words"):
            setattr(self, name, self._list(name) if getattr(self, name) is not None else [])
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = self._list("allowed_token_ids")
        if self.logit_bias is not None:
            self.logit_bias = self._biases()
        if self.top_k == -1:
            self.top_k = 0
        if self.seed == -1:
            self.seed = None
        self.validate()

    def clone(self) -> SamplingParams:
        """A copy that shares nothing with this one."""
        return replace(self)

    def validate(self) -> None:
        """Raise BadRequest naming the field, its value and what would work. Numbers become plain ints and floats."""
        self._integer("n", 1, MAX_N)
        self._number("temperature", 0.0, 100.0)
        self._integer("top_k", 0, 2**31 - 1, hint=" (0 or -1 turns it off)")
        self._number("top_p", 0.0, 1.0, above_low=True)
        self._number("min_p", 0.0, 1.0)
        self._number("typical_p", 0.0, 1.0, above_low=True)
        self._number("repetition_penalty", 0.0, 100.0, above_low=True)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        if self.seed is not None:
            self._integer("seed", -(2**63), 2**63 - 1, hint=" (-1 or none: a different one each time)")
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, 2**31 - 1)
        self._integer("min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(f"min_tokens ({self.min_tokens}) must not be greater than max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0, MAX_LOGPROBS)
        if self.truncate_prompt_tokens is not None:
            self._integer("truncate_prompt_tokens", 1, 2**31 - 1)
        for name in (
            "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name} must be true or false, got {shown(getattr(self, name))}")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise BadRequest(f"output_kind must be a RequestOutputKind, got {shown(self.output_kind)}")
        for name, neutral in _NOT_DONE.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise Unsupported(f"{name} is not supported; leave it out")
            setattr(self, name, None)
        self._texts("stop", MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
        if self.stop and not self.detokenize:
            raise BadRequest("stop strings need detokenize=True; use stop_token_ids instead")
        self._texts("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
        if not all(word.strip() for word in self.bad_words):
            raise BadRequest("bad_words must hold more than blanks")
        self._tokens()

    def _tokens(self) -> None:
        self.stop_token_ids = plain_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise BadRequest("allowed_token_ids must not be empty; leave it out to allow every token")
            name, limit = "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS
            self.allowed_token_ids = plain_token_ids(name, self.allowed_token_ids, limit)
        plain_token_ids("logit_bias", list(self.logit_bias or {}), MAX_LOGIT_BIASES)

    def _texts(self, name: str, most: int, longest: int) -> None:
        texts = getattr(self, name)
        if len(texts) > most:
            raise BadRequest(f"{name} has {len(texts)} strings; at most {most} are allowed")
        for text in texts:
            if not isinstance(text, str) or not text:
                raise BadRequest(f"{name} must hold non-empty strings, got {shown(text)}")
            if len(text) > longest:
                raise BadRequest(f"{name} holds a string of {len(text)} characters; at most {longest} are allowed")
            if not is_unicode(text):
                raise BadRequest(f"{name} must hold valid Unicode, got {shown(text)}")

    def _list(self, name: str) -> list[Any]:
        value = getattr(self, name)
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise BadRequest(f"{name} must be a list, got {shown(value)}")
        return list(value)

    def _biases(self) -> dict[int, float]:
        """JSON has no integer keys, so "42" is as good as 42. Like vLLM, beyond 100 is 100."""
        given: Any = self.logit_bias
        if not isinstance(given, Mapping):
            raise BadRequest(f"logit_bias must map token ids to numbers, got {shown(given)}")
        if len(given) > MAX_LOGIT_BIASES:
            raise BadRequest(f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIASES} are allowed")
        biases = {}
        for token, bias in given.items():
            try:
                number = float(bias)
                biases[int(token)] = min(100.0, max(-100.0, number))
            except (TypeError, ValueError, OverflowError):
                raise BadRequest(f"logit_bias must map token ids to numbers, got {shown(token)}: {shown(bias)}") from None
            if not math.isfinite(number):
                raise BadRequest(f"logit_bias values must be finite, got {bias!r} for token {shown(token)}")
        return biases

    def _integer(self, name: str, low: int, high: int, hint: str = "") -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
            bound = f"at least {low}" if high == 2**31 - 1 else f"between {low} and {high}"
            raise BadRequest(f"{name} must be an integer {bound}{hint}, got {shown(value)}")
        setattr(self, name, int(value))

    def _number(self, name: str, low: float, high: float, above_low: bool = False) -> None:
        value = getattr(self, name)
        # Compared before it is converted: an integer may be too large for a float. A NaN is in no interval.
        ok = isinstance(value, Real) and not isinstance(value, bool)
        if not ok or not (low < value if above_low else low <= value) or not value <= high:
            interval = f"greater than {low:g} and at most {high:g}" if above_low else f"between {low:g} and {high:g}"
            raise BadRequest(f"{name} must be a number {interval}, got {shown(value)}")
        setattr(self, name, float(value))


def plain_token_ids(name: str, tokens: Sequence[Any], most: int | None = None) -> list[int]:
    """Token ids as plain integers from 0 to MAX_TOKEN_ID, or a BadRequest that begins with `name`."""
    if most is not None and len(tokens) > most:
        raise BadRequest(f"{name} has {len(tokens)} entries; at most {most} are allowed")
    if {*map(type, tokens)} <= {int} and (not tokens or (min(tokens) >= 0 and max(tokens) <= MAX_TOKEN_ID)):
        return list(tokens)                              # the usual case, at the speed of C
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) <= MAX_TOKEN_ID:
            raise BadRequest(f"{name} must hold token ids (integers from 0 to {MAX_TOKEN_ID}), got {shown(token)}")
    return [int(token) for token in tokens]


def is_unicode(text: str) -> bool:
    """Lone surrogates are no text: they can be neither sent nor tokenised."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: Any) -> str:
    """A value in an error message: short, on one line, whatever it is."""
    try:
        text = repr(value)
    except Exception:                                    # an integer of too many digits; an object that cannot show itself
        return f"a value of type {type(value).__name__}"
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."
