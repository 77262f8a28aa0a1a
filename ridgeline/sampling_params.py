"""SamplingParams: how one request wants its tokens chosen. Names and defaults follow vLLM's offline API."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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
    seed: int | None = None
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
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = list(self.stop or [])
        self.stop_token_ids = list(self.stop_token_ids or [])
        self.bad_words = list(self.bad_words or [])
        if self.top_k == -1:
            self.top_k = 0
        if self.logit_bias is not None:
            self.logit_bias = {int(token): float(bias) for token, bias in self.logit_bias.items()}
        self.validate()

    def validate(self) -> None:
        """Raise BadRequest naming the field, its value and what would work."""
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
            self._integer("seed", -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, 2**31 - 1)
        self._integer("min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(f"min_tokens ({self.min_tokens}) must not be greater than max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise BadRequest(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise BadRequest("stop must hold non-empty strings")
        if self.stop and not self.detokenize:
            raise BadRequest("stop strings need detokenize=True; use stop_token_ids instead")
        if not all(isinstance(word, str) and word.strip() for word in self.bad_words):
            raise BadRequest("bad_words must hold non-empty strings")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise BadRequest("allowed_token_ids must not be empty; leave it out to allow every token")
        for bias in (self.logit_bias or {}).values():
            if not math.isfinite(bias):
                raise BadRequest(f"logit_bias values must be finite, got {bias}")

    def _integer(self, name: str, low: int, high: int, hint: str = "") -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            bound = f"at least {low}" if high >= 2**31 - 1 else f"between {low} and {high}"
            raise BadRequest(f"{name} must be an integer {bound}{hint}, got {value!r}")

    def _number(self, name: str, low: float, high: float, above_low: bool = False) -> None:
        value = getattr(self, name)
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not ok or not (low < value if above_low else low <= value) or value > high:
            interval = f"greater than {low:g} and at most {high:g}" if above_low else f"between {low:g} and {high:g}"
            raise BadRequest(f"{name} must be a number {interval}, got {value!r}")
