"""llama.cpp on the same GGUF file with the same number of threads, for comparison, through `llama-cpp-python`.

Batches go through llama.cpp's own batch interface, a sequence for each request: one decode call per step for all of them. The
best token is found with numpy, which takes less time than llama.cpp's sampler. Ridgeline itself does not need this package.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import ConfigError

_CELLS = 256                         # positions to which llama.cpp rounds a sequence's context


class LlamaCppPeer:
    name = "llama.cpp"

    def __init__(self, path: Path, threads: int) -> None:
        if path.suffix != ".gguf":
            raise ConfigError(f"--against llama.cpp needs a .gguf file, which {path.name} is not")
        self._api = api = _package()
        self._threads = threads
        self._quiet = api.llama_log_callback(lambda level, text, data: None)     # kept: C calls it
        api.llama_log_set(self._quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(os.fsencode(path), parameters)
        if not self._model:
            raise ConfigError(f"llama.cpp cannot load {path.name}")
        self._vocab_size = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))
        self._contexts: dict[tuple[int, int], _Context] = {}

    def facts(self) -> dict[str, Any]:
        """What a record says of it: versions, and the settings that it ran with."""
        system = self._api.llama_print_system_info().decode(errors="replace")
        used = next(iter(self._contexts.values())).settings if self._contexts else {}
        return {"llama-cpp-python": _package_version(), "system_info": system, "threads": self._threads, **used}

    def bytes_per_weight(self, requests: int) -> float:
        return float(self._api.llama_model_size(self._model) / self._api.llama_model_n_params(self._model))

    def run(self, prompts: list[list[int]], tokens_out: int) -> list[float]:
        """The context is there before the clock starts: it belongs to the start, not to an answer."""
        length = max(map(len, prompts)) + tokens_out
        key = (len(prompts), -(-length // _CELLS) * _CELLS)
        if key not in self._contexts:
            self._contexts[key] = _Context(self._api, self._model, self._vocab_size, *key, self._threads)
        context = self._contexts[key]
        context.clear()
        start = time.perf_counter()
        tokens = context.decode([(sequence, 0, prompt) for sequence, prompt in enumerate(prompts)])
        first = time.perf_counter() - start              # all prompts are one call
        for step in range(tokens_out - 1):
            tokens = context.decode(
                [(sequence, len(prompts[sequence]) + step, [token]) for sequence, token in enumerate(tokens)]
            )
        return [first] * len(prompts) + [time.perf_counter() - start]


class _Context:
    """A KV cache for that many sequences of that length, and a batch that is filled anew for every step."""

    def __init__(self, api: Any, model: Any, vocab_size: int, sequences: int, length: int, threads: int) -> None:
        self._api, self._vocab_size = api, vocab_size
        parameters = api.llama_context_default_params()
        parameters.n_ctx = sequences * length
        parameters.n_batch = sequences * length          # prompts of all sequences in one call; n_ubatch cuts it up
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = api.llama_init_from_model(model, parameters)
        if not self._context:
            raise ConfigError(f"llama.cpp has no room for {sequences} sequences of {length} tokens")
        self._batch = batch = api.llama_batch_init(sequences * length, 0, 1)
        room = (sequences * length,)
        self._tokens, self._positions, self._wanted = (
            np.ctypeslib.as_array(each, room) for each in (batch.token, batch.pos, batch.logits)
        )
        np.ctypeslib.as_array(batch.n_seq_id, room)[:] = 1
        named = ("n_ubatch", "flash_attn_type", "type_k", "type_v", "kv_unified")
        self.settings = {name: getattr(parameters, name) for name in named if hasattr(parameters, name)}

    def clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)

    def decode(self, rows: list[tuple[int, int, list[int]]]) -> list[int]:
        """(sequence, position of the first token, tokens) of each row; the best next token of each."""
        batch, place, last = self._batch, 0, []
        for sequence, position, tokens in rows:
            end = place + len(tokens)
            self._tokens[place:end], self._positions[place:end] = tokens, np.arange(position, position + len(tokens))
            self._wanted[place:end] = 0
            self._wanted[end - 1] = 1
            for each in range(place, end):
                batch.seq_id[each][0] = sequence
            place = end
            last.append(end - 1)
        batch.n_tokens = place
        failed = self._api.llama_decode(self._context, batch)
        if failed:
            raise AssertionError(f"llama.cpp's decode returned {failed}")
        return [int(self._logits(place).argmax()) for place in last]

    def _logits(self, place: int) -> np.ndarray:
        return np.ctypeslib.as_array(self._api.llama_get_logits_ith(self._context, place), (self._vocab_size,))


def _package() -> Any:
    try:
        return importlib.import_module("llama_cpp")
    except ImportError:
        command = f"{sys.executable} -m pip install llama-cpp-python"
        raise ConfigError(f"--against llama.cpp needs llama-cpp-python, which builds for a while: {command}") from None


def _package_version() -> str:
    return str(getattr(_package(), "__version__", ""))
