"""Fields of llama.cpp, SGLang and Mistral in chat and completions: other names of ours, hints, and samplers that are refused.

llama.cpp's own endpoint, /completion, is in server/api/llamacpp.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from ridgeline.errors import BadRequest

# The field that sets an answer's grammar -> its kind in StructuredOutputs.
GRAMMARS = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "json_schema": "json", "grammar": "grammar",
}


class OtherNames(msgspec.Struct, kw_only=True):
    n_predict: int | None = None         # max_tokens; -1: no limit
    repeat_penalty: float | None = None  # repetition_penalty
    repeat_last_n: int | None = None     # 0: no repeat_penalty; else it covers the whole text
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    random_seed: int | None = None       # Mistral's seed

    # Hints. There are no slots, samplers have one order, and a prompt is never shifted out of the context.
    cache_prompt: Any = None
    id_slot: Any = None
    n_keep: Any = None
    n_discard: Any = None
    n_cache_reuse: Any = None
    min_keep: Any = None
    samplers: Any = None
    timings_per_token: Any = None
    return_progress: Any = None
    sse_ping_interval: Any = None
    # Of SGLang: the routers of SGLang and of vLLM write it, and the two below, into every request that they pass on.
    stream_reasoning: Any = None

    # Not supported, unless they are off.
    mirostat: Any = None
    dynatemp_range: Any = None
    dry_multiplier: Any = None
    xtc_probability: Any = None
    top_n_sigma: Any = None
    no_stop_trim: Any = None
    return_hidden_states: Any = None
    safe_prompt: Any = None              # of Mistral: a system prompt of theirs

    HINTS: ClassVar[tuple[str, ...]] = (
        "cache_prompt", "id_slot", "n_keep", "n_discard", "n_cache_reuse", "min_keep", "samplers", "timings_per_token",
        "return_progress", "sse_ping_interval", "stream_reasoning",
    )
    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mirostat": (0,), "dynatemp_range": (0,), "dry_multiplier": (0,), "xtc_probability": (0,), "top_n_sigma": (-1, 0),
        "no_stop_trim": (False,), "return_hidden_states": (False,), "safe_prompt": (False,),
    }

    def take_other_names(self, request: Any) -> None:
        """Set `request`'s fields of our names, unless it has them."""
        if self.n_predict is not None and self.n_predict >= 0:
            if request.max_tokens not in (None, self.n_predict):
                raise BadRequest("max_tokens and n_predict are two names of the same field; give one", field="n_predict")
            request.max_tokens = self.n_predict
        if self.random_seed is not None and request.seed is None:
            request.seed = self.random_seed
        if self.repeat_penalty is not None and self.repeat_last_n != 0 and request.repetition_penalty is None:
            request.repetition_penalty = self.repeat_penalty
