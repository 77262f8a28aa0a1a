"""Names of vLLM's Python API that are not here: classes, methods and arguments, with what to use instead."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any

_OPTIONS = "options are arguments of LLM() and AsyncLLM()"

CLASSES = {
    "AsyncLLMEngine": "use AsyncLLM(model, **options); its generate() streams",
    "LLMEngine": "use LLM(model, **options), or AsyncLLM, which streams",
    "EngineArgs": _OPTIONS,
    "AsyncEngineArgs": _OPTIONS,
    "PoolingParams": "use LLM.embed(prompts, pooling=..., normalize=...)",
    "ModelRegistry": "a model family is one file in ridgeline/models/families",
    "BeamSearchParams": "there is no beam search; ask for n answers",
    "GuidedDecodingParams": "use StructuredOutputsParams",
}

METHODS = {
    "encode": "use embed for vectors, or get_tokenizer().encode for token ids",
    "classify": "there are no classifiers; use score, or choice in structured_outputs",
    "reward": "there are no reward models; use score",
    "beam_search": "there is no beam search; ask for n answers",
    "sleep": "close() frees the memory",
    "wake_up": "close() frees the memory, and a new LLM loads again",
    "shutdown": "use close()",
    "start_profile": "use `ridgeline diagnose`",
    "stop_profile": "use `ridgeline diagnose`",
    "apply_model": "no code runs inside the workers",
    "collective_rpc": "no code runs inside the workers",
    "llm_engine": "the engine is `core`, which has none of vLLM's attributes",
    "model_config": "load the model's config.json",
    "get_metrics": "a server has them at /metrics",
    "set_tokenizer": "give LLM() the option tokenizer",
    "preprocess_chat": "get_tokenizer().apply_chat_template renders messages",
}

ASYNC_METHODS = {
    "chat": "generate({'prompt_token_ids': await llm.chat_tokens(messages)}, ...) answers a conversation",
    "encode": "hidden states and vectors are those of LLM.embed, or of a server's /v1/embeddings",
    "check_health": "require_alive() raises the reason if the engine has ended",
    "is_running": "use is_alive, or state",
    "is_stopped": "use is_alive, or state",
    "errored": "use is_alive, or state",
    "dead_error": "require_alive() raises it",
    "do_log_stats": "a server has figures at /metrics and /roofline",
    "sleep": "shutdown() frees the memory",
    "wake_up": "shutdown() frees the memory, and a new AsyncLLM loads again",
    "add_lora": "adapters are not applied at run time; merge them into the weights first",
    "collective_rpc": "no code runs inside the workers",
    "get_model_config": "load the model's config.json",
    "model_config": "load the model's config.json",
}

# Argument of a method -> values that ask for nothing, and what to use instead.
_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "prompt_token_ids": ((), 'give {"prompt_token_ids": [...]} as a prompt'),
    "chat_template_content_format": (("auto", "string", "openai"), "the format is found from the template"),
    "mm_processor_kwargs": (({},), "prompts are text only"),
    "tokenization_kwargs": (({},), "give token ids, or use truncate_prompt_tokens in SamplingParams"),
    "pooling_params": ((), "use the arguments pooling and normalize of embed"),
    "truncate_prompt_tokens": ((), "use truncate_prompt_tokens in SamplingParams, or shorten the texts"),
    "guided_options_request": ((), "use structured_outputs in SamplingParams"),
    "prompt_adapter_request": ((), "adapters are not applied at run time"),
}


_SHARED_ARGUMENTS = ("prompts", "messages", "sampling_params", "use_tqdm", "priority", "chat_template", "tools")


def require_neutral(method: str, given: dict[str, Any], sampling: Collection[str] = ()) -> None:
    """TypeError for an argument that the method does not have, unless it asks for nothing. `sampling`: names of SamplingParams,
    which other libraries take as arguments."""
    for name, value in given.items():
        neutral, instead = _ARGUMENTS.get(name, ((), ""))
        if name in _ARGUMENTS and (value is None or value in neutral):
            continue
        if not instead and name in sampling:
            instead = f"give SamplingParams({name}=...)"
        elif not instead and sampling and (close := difflib.get_close_matches(name, _SHARED_ARGUMENTS, 1)):
            instead = f"did you mean {close[0]!r}?"
        raise TypeError(f"LLM.{method}() has no argument {name!r}" + (f": {instead}" if instead else ""))
