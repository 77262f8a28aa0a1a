"""SamplingParams: how the tokens of one request are sampled. Names and defaults follow vLLM's offline API."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from numbers import Integral, Real
from typing import Any

from ridgeline.errors import BadRequest, Unsupported, shown

MAX_N = 128                          # answers per prompt
MAX_LOGPROBS = 20                    # alternatives per position
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 1_024
MAX_STOP_TOKEN_IDS = 1_024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_LOGIT_BIASES = 1_024
MAX_TOKEN_ID = 2**31 - 1             # ids are int32; the engine checks them against the vocabulary
MAX_GRAMMAR_BYTES = 64 * 1024        # of a schema, a grammar, a structural tag, or all choices together
MAX_SCHEMA_DEPTH = 64
MAX_ENUM_VALUES = 1_000
MAX_PROPERTIES = 1_000               # per object; each makes every mask slower
MAX_REGEX_BYTES = 4 * 1024
MAX_CHOICES = 1_000

# vLLM's fields that are not supported -> their neutral values, and what to use instead.
_NOT_DONE: dict[str, tuple[tuple[Any, ...], str]] = {
    "logits_processors": (([],), "use logit_bias, allowed_token_ids or bad_words"),
    "guided_decoding": ((), "use structured_outputs, with the same json, regex, choice or grammar"),
    "extra_args": (({},), "leave it out"),
}
# Fields of other versions of vLLM, and of other engines, that are not fields here.
_GONE: dict[str, tuple[tuple[Any, ...], str]] = {
    "best_of": ((None, 1), "ask for n answers and take the one with the highest cumulative_logprob; /v1/completions has best_of"),
    "use_beam_search": ((None, False), "there is no beam search; use n answers, or temperature 0"),
    "beam_width": ((None, 1), "there is no beam search; use n answers, or temperature 0"),
    "length_penalty": ((None, 1.0), "it belongs to beam search, which is not there"),
    "early_stopping": ((None, False), "it belongs to beam search, which is not there"),
    "max_new_tokens": ((None,), "use max_tokens"),
    "do_sample": ((None, True), "temperature 0 is greedy"),
    "repeat_penalty": ((None,), "use repetition_penalty"),
    "response_format": ((None,), "use structured_outputs"),
    "flat_logprobs": ((None, False), "log-probabilities are a list of mappings"),
    "skip_reading_prefix_cache": ((None, False), "LLM(enable_prefix_caching=False) switches the prefix cache off"),
    "stream_interval": ((None, 1), "every step's tokens are sent at once"),
    "thinking_token_budget": ((None, -1), "there is no such limit; use max_tokens"),
    "repetition_detection": ((None,), "use repetition_penalty"),
    "prompt_logprob_token_ids": ((None,), "use prompt_logprobs"),
    "prompt_logprob_start": ((None, 0), "prompt_logprobs has every token of the prompt"),
    "trace_decode_token_ids": ((None,), "answers are always sampled; prompt_logprobs scores a given text"),
    "routed_experts_prompt_start": ((None, 0), "the routing of experts is not returned"),
    "skip_clone": ((None, False), "it concerns internals of the other engine"),
}
ONLY_THE_LIKELIEST = 1e-9            # as top_p: only the most likely token is left


class RequestOutputKind(Enum):
    """What each output of a stream holds. LLM.generate always returns complete answers."""

    CUMULATIVE = 0                   # everything so far
    DELTA = 1                        # what is new
    FINAL_ONLY = 2                   # only the complete answer


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The grammar of an answer: exactly one of these. Fields and names follow vLLM's.

    Sizes and shapes are checked here; engine/client/grammar_check compiles it. A schema or a structural tag given as an object
    is kept as its JSON text, so that equal ones compare equal.
    """

    json: str | dict[str, Any] | None = None                 # a JSON Schema
    json_object: bool = False                                # any JSON object
    regex: str | None = None                                 # for the whole answer, in the syntax of Rust's regex crate
    choice: list[str] | None = None                          # one of these texts
    grammar: str | None = None                               # Lark as llguidance takes it, or GBNF
    structural_tag: str | dict[str, Any] | None = None       # free text; after a trigger, a tag whose body has a schema
    disable_any_whitespace: bool = False                     # JSON without blanks between its parts

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                field = f"structured_outputs.{name}"
                raise BadRequest(f"{field} must be true or false, got {shown(getattr(self, name))}", field=field)
        kinds = ("json", "regex", "choice", "grammar", "structural_tag")
        given = [name for name in kinds if getattr(self, name) is not None] + ["json_object"] * self.json_object
        if len(given) != 1:
            names = "json, json_object, regex, choice, grammar or structural_tag"
            message = f"structured_outputs needs exactly one of {names}, got {' and '.join(given) or 'none'}"
            raise BadRequest(message, field="structured_outputs")
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            field = "structured_outputs.disable_any_whitespace"
            raise BadRequest(f"{field} goes with json or json_object only", field=field)
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text("structured_outputs.json", self.json))
        elif self.structural_tag is not None:
            name = "structured_outputs.structural_tag"
            object.__setattr__(self, "structural_tag", _schema_text(name, self.structural_tag))
        elif self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        elif self.regex is not None:
            _grammar_text("structured_outputs.regex", self.regex, MAX_REGEX_BYTES)
        elif self.grammar is not None:
            _grammar_text("structured_outputs.grammar", self.grammar, MAX_GRAMMAR_BYTES)

    @property
    def kind(self) -> str:
        """The name of the one field that is set."""
        kinds = ("json", "regex", "choice", "grammar", "structural_tag")
        return next((name for name in kinds if getattr(self, name) is not None), "json_object")

    @property
    def key(self) -> str:
        """Equal for equal grammars: the key of caches."""
        value = getattr(self, self.kind)
        text = json.dumps(value) if isinstance(value, list) else str(value)
        return f"{self.kind}{'-' if self.disable_any_whitespace else ':'}{text}"


StructuredOutputsParams = StructuredOutputs             # vLLM's name


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
    logprob_token_ids: list[int] | None = None               # with logprobs: these tokens' instead of the most likely ones'
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None                # keep only this many of the prompt's tokens …
    truncation_side: str = "left"                            # … the last of them; "right" keeps the first
    speculative: int | None = None   # drafts per step, at most: 0 or False is off; None or True, as the engine was started
    prediction: str | list[int] | None = None                # text or tokens that the answer is expected to follow
    pooling: str | None = None       # "last" or "mean": also give the prompt's hidden states as one vector
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logits_processors: Any = None
    guided_decoding: Any = None
    structured_outputs: StructuredOutputs | None = None      # a mapping with its fields is accepted too
    extra_args: Any = None

    def __post_init__(self) -> None:
        if _are_checked:
            return
        stop: Any = self.stop
        self.stop = [stop] if isinstance(stop, str) else stop
        for name in ("stop", "stop_token_ids", "bad_words"):
            setattr(self, name, self._list(name) if getattr(self, name) is not None else [])
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = self._list("allowed_token_ids")
        if self.logit_bias is not None:
            self.logit_bias = self._biases()
        self.structured_outputs = _structured_outputs(self.structured_outputs)
        if isinstance(self.speculative, bool):
            self.speculative = None if self.speculative else 0
        if self.top_k == -1:
            self.top_k = 0
        if self.top_p == 0 and not isinstance(self.top_p, bool):         # OpenAI's range includes 0
            self.top_p = ONLY_THE_LIKELIEST
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
        self._number("repetition_penalty", 0.001, 100.0)      # a logit divided by less may be infinite
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        if self.seed is not None:
            self._integer("seed", -(2**63), 2**63 - 1, hint=" (-1 or none: a different one each time)")
        self._lengths()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._integer(name, 0, MAX_LOGPROBS)
        self._prompt()
        for name in (
            "ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
            "include_stop_str_in_output",
        ):
            if not isinstance(getattr(self, name), bool):
                raise BadRequest(f"{name} must be true or false, got {shown(getattr(self, name))}", field=name)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise BadRequest(f"output_kind must be a RequestOutputKind, got {shown(self.output_kind)}", field="output_kind")
        for name, (neutral, instead) in _NOT_DONE.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise Unsupported(f"{name} is not supported; {instead}", field=name)
            setattr(self, name, None)
        self._texts("stop", MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
        if self.stop and not self.detokenize:
            raise BadRequest("stop strings need detokenize=True; use stop_token_ids instead", field="stop")
        self._texts("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)
        if not all(word.strip() for word in self.bad_words):
            raise BadRequest("bad_words must hold more than blanks", field="bad_words")
        self._tokens()
        self._drafts()

    def _lengths(self) -> None:
        if self.max_tokens is not None:
            self._integer("max_tokens", 1, 2**31 - 1)
        self._integer("min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens ({self.min_tokens}) must not be greater than max_tokens ({self.max_tokens})"
            raise BadRequest(message, field="min_tokens")

    def _prompt(self) -> None:
        """What concerns the prompt."""
        if self.truncate_prompt_tokens is not None:
            self._integer("truncate_prompt_tokens", 1, 2**31 - 1)
        if self.truncation_side not in ("left", "right"):
            message = f"truncation_side must be 'left' or 'right', got {shown(self.truncation_side)}"
            raise BadRequest(message, field="truncation_side")
        if self.pooling not in (None, "last", "mean"):
            raise BadRequest(f"pooling must be 'last' or 'mean', got {shown(self.pooling)}", field="pooling")
        if self.pooling is not None and (self.n, self.max_tokens) != (1, 1):
            raise BadRequest("pooling needs n and max_tokens to be 1: its answer is the prompt's vector", field="pooling")

    def _drafts(self) -> None:
        if self.speculative is not None:
            self._integer("speculative", 0, 2**31 - 1, hint=" (false turns it off)")
        if isinstance(self.prediction, (list, tuple)):
            self.prediction = plain_token_ids("prediction", list(self.prediction))
        elif self.prediction is not None and not (isinstance(self.prediction, str) and is_unicode(self.prediction)):
            raise BadRequest(f"prediction must be a text, got {shown(self.prediction)}", field="prediction")

    def _tokens(self) -> None:
        self.stop_token_ids = plain_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                message = "allowed_token_ids must not be empty; leave it out to allow every token"
                raise BadRequest(message, field="allowed_token_ids")
            name, limit = "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS
            self.allowed_token_ids = plain_token_ids(name, self.allowed_token_ids, limit)
        plain_token_ids("logit_bias", list(self.logit_bias or {}), MAX_LOGIT_BIASES)
        if self.logprob_token_ids is not None:
            given = plain_token_ids("logprob_token_ids", self._list("logprob_token_ids"), MAX_LOGPROB_TOKEN_IDS)
            self.logprob_token_ids = list(dict.fromkeys(given)) or None
        if self.logprob_token_ids is not None:
            self.logprobs = 0                            # none by their rank

    def _texts(self, name: str, most: int, longest: int) -> None:
        texts = getattr(self, name)
        if len(texts) > most:
            raise BadRequest(f"{name} has {len(texts)} strings; at most {most} are allowed", field=name)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise BadRequest(f"{name} must hold non-empty strings, got {shown(text)}", field=name)
            if len(text) > longest:
                message = f"{name} holds a string of {len(text)} characters; at most {longest} are allowed"
                raise BadRequest(message, field=name)
            if not is_unicode(text):
                raise BadRequest(f"{name} must hold valid Unicode, got {shown(text)}", field=name)

    def _list(self, name: str) -> list[Any]:
        value = getattr(self, name)
        if not isinstance(value, (list, tuple, set, frozenset)):
            raise BadRequest(f"{name} must be a list, got {shown(value)}", field=name)
        return list(value)

    def _biases(self) -> dict[int, float]:
        """JSON has no integer keys, so "42" counts as 42. As in vLLM, values are clamped to ±100."""
        given: Any = self.logit_bias
        if not isinstance(given, Mapping):
            raise BadRequest(f"logit_bias must map token ids to numbers, got {shown(given)}", field="logit_bias")
        if len(given) > MAX_LOGIT_BIASES:
            message = f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIASES} are allowed"
            raise BadRequest(message, field="logit_bias")
        try:                                             # a thousand, without a Python loop: each copy is made anew
            biases = dict(zip(map(int, given), map(float, given.values()), strict=True))
        except (TypeError, ValueError, OverflowError):
            biases = {0: math.nan}
        if not all(map(math.isfinite, biases.values())):
            raise _wrong_bias(given)
        if biases and (min(biases.values()) < -100.0 or max(biases.values()) > 100.0):
            return {token: min(100.0, max(-100.0, bias)) for token, bias in biases.items()}
        return biases

    def _integer(self, name: str, low: int, high: int, hint: str = "") -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
            too_large = isinstance(value, Integral) and int(value) > high
            bound = f"at least {low}" if high == 2**31 - 1 and not too_large else f"between {low} and {high}"
            raise BadRequest(f"{name} must be an integer {bound}{hint}, got {shown(value)}", field=name)
        setattr(self, name, int(value))

    def _number(self, name: str, low: float, high: float, above_low: bool = False) -> None:
        value = getattr(self, name)
        # Compared before the conversion: an integer may be too large for a float. NaN is in no interval.
        ok = isinstance(value, Real) and not isinstance(value, bool)
        if not ok or not (low < value if above_low else low <= value) or not value <= high:
            interval = f"greater than {low:g} and at most {high:g}" if above_low else f"between {low:g} and {high:g}"
            raise BadRequest(f"{name} must be a number {interval}, got {shown(value)}", field=name)
        setattr(self, name, float(value))


def _wrong_bias(given: Mapping[Any, Any]) -> BadRequest:
    for token, bias in given.items():
        try:
            int(token)
            is_number = math.isfinite(float(bias))
        except (TypeError, ValueError, OverflowError):
            return BadRequest(f"logit_bias must map token ids to numbers, got {shown(token)}: {shown(bias)}", field="logit_bias")
        if not is_number:
            break
    return BadRequest(f"logit_bias values must be finite, got {bias!r} for token {shown(token)}", field="logit_bias")


_generated_init = SamplingParams.__init__


@functools.wraps(_generated_init)
def _init(self: SamplingParams, **given: Any) -> None:
    """The dataclass's own, after an answer to names that are not fields."""
    if not given.keys() <= _FIELDS:
        given = _known_fields(given)
    _generated_init(self, **given)


_FIELDS = frozenset(each.name for each in dataclasses.fields(SamplingParams))
SamplingParams.__init__ = _init  # type: ignore[method-assign]


def _known_fields(given: dict[str, Any]) -> dict[str, Any]:
    for name in given.keys() - _FIELDS:
        if name not in _GONE:
            close = difflib.get_close_matches(name, [*_FIELDS, *_GONE], 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise BadRequest(f"SamplingParams has no field {name!r}{hint}", field=name)
        neutral, instead = _GONE[name]
        if not any(given[name] is each or given[name] == each for each in neutral):
            raise Unsupported(f"{name} is not a field of SamplingParams: {instead}", field=name)
    return {name: value for name, value in given.items() if name in _FIELDS}


def _structured_outputs(given: Any) -> StructuredOutputs | None:
    if given is None or isinstance(given, StructuredOutputs):
        return given
    if not isinstance(given, Mapping):
        raise BadRequest(f"structured_outputs must be an object, got {shown(given)}", field="structured_outputs")
    known = StructuredOutputs.__dataclass_fields__
    for name in given:
        if name not in known:
            message = f"structured_outputs has no field {shown(name)}; it has {', '.join(known)}"
            raise BadRequest(message, field="structured_outputs")
    return StructuredOutputs(**given)


_are_checked = False                 # the sender of this process's requests has checked them


def take_params_as_checked() -> None:
    """Skip all checks in this process: a large schema and a thousand biases take milliseconds of the engine's time."""
    global _are_checked
    _are_checked = True


def _schema_text(name: str, given: Any) -> str:
    """A schema as compact JSON text, its size and shape checked. The order of properties is kept: answers follow it."""
    if isinstance(given, str):
        if _are_checked:
            return given
        _grammar_text(name, given, MAX_GRAMMAR_BYTES)
    elif not isinstance(given, Mapping):
        raise BadRequest(f"{name} must be an object or its JSON text, got {shown(given)}", field=name)
    try:
        value = json.loads(given) if isinstance(given, str) else given
        if not isinstance(value, Mapping):
            raise BadRequest(f"{name} must be a JSON object, got {shown(value)}", field=name)
        _check_shape(name, value)
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise BadRequest(f"{name} is nested more than {MAX_SCHEMA_DEPTH} deep", field=name) from None
    except (TypeError, ValueError) as error:
        raise BadRequest(f"{name} is not JSON: {shown(str(error))}", field=name) from None
    _grammar_text(name, text, MAX_GRAMMAR_BYTES)
    return text


_LEAVES = (str, int, float, type(None))      # of JSON; other types fail when the schema is written


def _check_shape(name: str, value: Any) -> None:
    """Level by level, without recursion; a cyclic schema ends at the greatest depth."""
    level = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        below: list[Any] = []
        for each in level:
            if not each:                                 # a hostile schema has thousands of them
                continue
            if isinstance(each, (dict, Mapping)):        # dict first: the check is faster
                enum, properties = each.get("enum"), each.get("properties")
                if isinstance(enum, list) and len(enum) > MAX_ENUM_VALUES:
                    message = f"{name} has an enum of {len(enum)} values; at most {MAX_ENUM_VALUES} are allowed"
                    raise BadRequest(message, field=name)
                if isinstance(properties, (dict, Mapping)) and len(properties) > MAX_PROPERTIES:
                    message = f"{name} has an object of {len(properties)} properties; at most {MAX_PROPERTIES} are allowed"
                    raise BadRequest(message, field=name)
                below += [child for child in each.values() if not isinstance(child, _LEAVES)]
            else:
                below += [child for child in each if not isinstance(child, _LEAVES)]
        if len(below) > MAX_GRAMMAR_BYTES:
            raise BadRequest(f"{name} is larger than {MAX_GRAMMAR_BYTES} bytes", field=name)
        if not below:
            return
        level = below
    raise BadRequest(f"{name} is nested more than {MAX_SCHEMA_DEPTH} deep", field=name)


def _choices(given: Any) -> list[str]:
    name = "structured_outputs.choice"
    if not isinstance(given, (list, tuple)) or not given:
        raise BadRequest(f"{name} must be a list of texts, got {shown(given)}", field=name)
    if len(given) > MAX_CHOICES:
        raise BadRequest(f"{name} has {len(given)} entries; at most {MAX_CHOICES} are allowed", field=name)
    for text in given:
        _grammar_text(name, text, MAX_GRAMMAR_BYTES)
    if sum(len(text.encode()) for text in given) > MAX_GRAMMAR_BYTES:
        raise BadRequest(f"{name} is larger than {MAX_GRAMMAR_BYTES} bytes", field=name)
    return list(given)


def _grammar_text(name: str, text: Any, most: int) -> None:
    if not isinstance(text, str) or not text.strip():
        raise BadRequest(f"{name} must be a text that is not blank, got {shown(text)}", field=name)
    if not is_unicode(text):
        raise BadRequest(f"{name} must be valid Unicode, got {shown(text)}", field=name)
    size = len(text.encode())
    if size > most:
        raise BadRequest(f"{name} has {size} bytes; at most {most} are allowed", field=name)


def plain_token_ids(name: str, tokens: Sequence[Any], most: int | None = None) -> list[int]:
    """Token ids as plain integers from 0 to MAX_TOKEN_ID, or a BadRequest that begins with `name`."""
    if most is not None and len(tokens) > most:
        raise BadRequest(f"{name} has {len(tokens)} entries; at most {most} are allowed", field=name)
    if {*map(type, tokens)} <= {int} and (not tokens or (min(tokens) >= 0 and max(tokens) <= MAX_TOKEN_ID)):
        return list(tokens)                              # the usual case, without a Python loop
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) <= MAX_TOKEN_ID:
            message = f"{name} must hold token ids (integers from 0 to {MAX_TOKEN_ID}), got {shown(token)}"
            raise BadRequest(message, field=name)
    return [int(token) for token in tokens]


def is_unicode(text: str) -> bool:
    """False with lone surrogates, which can be neither sent nor tokenised."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
