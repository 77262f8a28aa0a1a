"""What `speculative_config` asks for: vLLM's object and its keys, as plain settings.

`{"method": "ngram", "num_speculative_tokens": 4}`, or only the method's name. `num_speculative_tokens` is the most that a row
verifies in a step; how many it does verify is decided step by step (scheduler/drafts/controller). A draft model is named by
`model`, or by its path alone; what it must be like is checked in draft_checkpoint.py.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, fields, replace
from typing import Any

from ridgeline.errors import ConfigError, shown

OFF = ("", "none", "off")
AUTO = ("grammar", "prediction", "ngram", "suffix")      # in this order, where two promise the same
DRAFT_MODEL = "draft_model"          # a second, smaller model; in `auto` where one is given
METHODS = (*AUTO, DRAFT_MODEL)
MOST_DRAFTS = 15                     # of a row in one step: with its newest token 16 queries, which one tile of attention holds
_LATER = "needs a trained head, which no proposer runs yet"
_REFUSED = dict.fromkeys(("eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "deepseek_mtp", "dflash", "dspark"), _LATER)
# vLLM's keys that are about its own internals, or that the controller replaces: a draft is verified only where it pays.
_WITHOUT_EFFECT = (
    "disable_by_batch_size", "disable_logprobs", "disable_mqa_scorer", "disable_padded_drafter_batch", "enforce_eager",
    "suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob",
    "suffix_decoding_max_cached_requests", "draft_tensor_parallel_size",
)


@dataclass(frozen=True, slots=True)
class DraftOptions:
    methods: tuple[str, ...] = ()    # names of proposers; none: speculation is off
    num_speculative_tokens: int = MOST_DRAFTS
    prompt_lookup_min: int = 2       # tokens that an n-gram must have in common with the text …
    prompt_lookup_max: int = 8       # … and that are compared
    suffix_bytes: int = 64 * 2**20   # memory for earlier answers
    model: str = ""                  # the draft model: a directory, a .gguf file or a name of the Hugging Face hub
    adaptive: bool = True            # False: every draft that is offered is verified, to measure with

    @property
    def on(self) -> bool:
        return bool(self.methods)


def draft_options(given: str) -> DraftOptions:
    """From the option's text; ConfigError for what it cannot mean."""
    asked = _asked(given)
    methods = _methods(asked.pop("method", None), asked)
    _check_model(methods, asked.get("model"))
    named = {each.name for each in fields(DraftOptions)} - {"methods"}
    values = {name: value for name, value in asked.items() if value is not None and name not in _WITHOUT_EFFECT}
    for name in values:
        if name not in named:
            close = difflib.get_close_matches(name, named, 1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known are method, {', '.join(sorted(named))}"
            raise ConfigError(f"speculative_config has no key {name!r}{hint}")
    if "prompt_lookup_max" in values or "prompt_lookup_min" in values:   # as in vLLM, one of them sets both
        values.setdefault("prompt_lookup_min", values.get("prompt_lookup_max"))
        values.setdefault("prompt_lookup_max", values.get("prompt_lookup_min"))
    made = replace(DraftOptions(methods), **values)
    _check(made)
    return made if made.num_speculative_tokens else DraftOptions()


def _asked(given: str) -> dict[str, Any]:
    if given.strip() in OFF:
        return {"num_speculative_tokens": 0, "method": "auto"}
    if not given.lstrip().startswith("{"):
        named = given.strip()
        if "/" in named or named.endswith(".gguf"):      # as llama.cpp's --model-draft
            return {"method": DRAFT_MODEL, "model": named}
        return {"method": named.strip("[]")}
    try:
        asked = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"speculative_config must be a JSON object or a method's name; got {given[:80]!r}: {error}") from None
    return dict(asked)


def _methods(given: Any, asked: dict[str, Any]) -> tuple[str, ...]:
    """The proposers of a method; a list of names is accepted, too."""
    if given is None and asked.get("model") in ("ngram", "[ngram]"):         # vLLM's older spelling
        given = asked.pop("model").strip("[]")
    if given is None and asked.get("model"):             # as in vLLM
        given = DRAFT_MODEL
    everything = METHODS if asked.get("model") else AUTO
    names = everything if given == "auto" else _names(given)
    for name in names:
        if name in _REFUSED:
            raise ConfigError(f"speculative_config: method {name} {_REFUSED[name]}; use auto")
        if name not in METHODS:
            close = difflib.get_close_matches(str(name), [*METHODS, "auto"], 1)
            hint = f"did you mean {close[0]!r}?" if close else f"a draft model is given by its path, such as ./{name}"
            raise ConfigError(f"speculative_config: unknown method {name!r}; known are auto, {', '.join(METHODS)}; {hint}")
    return tuple(name for name in METHODS if name in names)


def _names(given: Any) -> tuple[str, ...]:
    names = given if isinstance(given, list) else [given]
    if given is None or not names:
        raise ConfigError(f"speculative_config needs a method: auto, {', '.join(METHODS)}")
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"speculative_config.method must be a name or a list of names, got {shown(given)}")
    return tuple(names)


def _check_model(methods: tuple[str, ...], model: Any) -> None:
    if model is not None and not isinstance(model, str):
        raise ConfigError(f"speculative_config.model must be a path or a name, got {model!r}")
    if DRAFT_MODEL in methods and not model:
        raise ConfigError('speculative_config: method draft_model needs "model", the draft model\'s directory or .gguf file')
    if model and DRAFT_MODEL not in methods:
        raise ConfigError(f"speculative_config: method {', '.join(methods)} uses no model; use draft_model, or auto for all")


def _check(made: DraftOptions) -> None:
    for name, low, high in (
        ("num_speculative_tokens", 0, MOST_DRAFTS), ("prompt_lookup_min", 1, 64), ("prompt_lookup_max", 1, 64),
        ("suffix_bytes", 0, 2**40),
    ):
        value = getattr(made, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"speculative_config.{name} must be an integer between {low} and {high}, got {value!r}")
    if made.prompt_lookup_min > made.prompt_lookup_max:
        raise ConfigError("speculative_config: prompt_lookup_min must not be greater than prompt_lookup_max")
    if not isinstance(made.adaptive, bool):
        raise ConfigError(f"speculative_config.adaptive must be true or false, got {made.adaptive!r}")
