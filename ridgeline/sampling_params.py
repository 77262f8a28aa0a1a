"""SamplingParams: how one request wants its tokens chosen. Names and defaults follow vLLM's offline API."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from ridgeline.errors import BadRequest

MAX_N = 128                          # answers per prompt
MAX_LOGPROBS = 20                    # alternatives per position
MAX_STOP_STRINGS = 32


@dataclass(slots=True)
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
        for name in (
            "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name} must be true or false, got {getattr(self, name)!r}")
        self._texts()
        self._token_ids("stop_token_ids", self.stop_token_ids)
        self._token_ids("allowed_token_ids", self.allowed_token_ids or [])
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise BadRequest("allowed_token_ids must not be empty; leave it out to allow every token")
        self._token_ids("logit_bias", self.logit_bias or {})

    def _texts(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise BadRequest(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise BadRequest("stop must hold non-empty strings")
        if self.stop and not self.detokenize:
            raise BadRequest("stop strings need detokenize=True; use stop_token_ids instead")
        if not all(isinstance(word, str) and word.strip() for word in self.bad_words):
            raise BadRequest("bad_words must hold non-empty strings")

    def _list(self, name: str) -> list[Any]:
        value = getattr(self, name)
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise BadRequest(f"{name} must be a list, got {value!r}")
        return list(value)

    def _biases(self) -> dict[int, float]:
        """JSON has no integer keys, so "42" is as good as 42. Like vLLM, beyond 100 is 100."""
        given: Any = self.logit_bias
        if not isinstance(given, Mapping):
            raise BadRequest(f"logit_bias must map token ids to numbers, got {given!r}")
        biases = {}
        for token, bias in given.items():
            try:
                number = float(bias)
                biases[int(token)] = min(100.0, max(-100.0, number))
            except (TypeError, ValueError, OverflowError):
                raise BadRequest(f"logit_bias must map token ids to numbers, got {token!r}: {bias!r}") from None
            if not math.isfinite(number):
                raise BadRequest(f"logit_bias values must be finite, got {bias!r} for token {token}")
        return biases

    def _token_ids(self, name: str, tokens: Iterable[Any]) -> None:
        """Not negative; whether the model has them is for the engine to say, which knows the model."""
        for token in tokens:
            if isinstance(token, bool) or not isinstance(token, Integral) or token < 0:
                raise BadRequest(f"{name} must hold token ids (integers from 0), got {token!r}")

    def _integer(self, name: str, low: int, high: int, hint: str = "") -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
            bound = f"at least {low}" if high == 2**31 - 1 else f"between {low} and {high}"
            raise BadRequest(f"{name} must be an integer {bound}{hint}, got {value!r}")
        setattr(self, name, int(value))

    def _number(self, name: str, low: float, high: float, above_low: bool = False) -> None:
        value = getattr(self, name)
        # Compared before it is converted: an integer may be too large for a float. A NaN is in no interval.
        ok = isinstance(value, Real) and not isinstance(value, bool)
        if not ok or not (low < value if above_low else low <= value) or not value <= high:
            interval = f"greater than {low:g} and at most {high:g}" if above_low else f"between {low:g} and {high:g}"
            raise BadRequest(f"{name} must be a number {interval}, got {value!r}")
        setattr(self, name, float(value))
