"""The functions that may read a body in a process of their own (server/long_bodies), and what each returns."""

from __future__ import annotations

from typing import Any

from ridgeline.server.api import prepare
from ridgeline.server.api.llamacpp import llama_server
from ridgeline.server.api.ollama import ollama_models, ollama_prepare
from ridgeline.server.api.openai import embeddings
from ridgeline.server.api.prepared import Prepared
from ridgeline.server.api.vllm import score
from ridgeline.server.http.body import field_names
from ridgeline.server.long_bodies import Reads, name_of

# The types are bytes where the answer needs no engine: it comes back as JSON.
_WORK: tuple[tuple[Any, Reads], ...] = (
    (Prepared, prepare.prepare_chat),
    (Prepared, prepare.prepare_batch),
    (Prepared, prepare.prepare_completion),
    (Prepared, prepare.prepare_messages),
    (Prepared, prepare.prepare_response),
    (Prepared, ollama_prepare.prepare_chat),
    (Prepared, ollama_prepare.prepare_generate),
    (Prepared, llama_server.prepare_completion),
    (Prepared, llama_server.prepare_alias),
    (embeddings.EmbeddingTokens, embeddings.read_embedding),
    (embeddings.EmbeddingTokens, ollama_prepare.read_embed),
    (embeddings.EmbeddingTokens, ollama_prepare.read_old_embed),
    (score.Pairs, score.read_pairs),
    (list[str], field_names),
    (str, ollama_models.read_show),
    (bytes, prepare.count_tokens),
    (bytes, prepare.count_input),
    (bytes, prepare.tokenize),
    (bytes, prepare.detokenize),
    (bytes, llama_server.apply_template),
)

FUNCTIONS: dict[str, Reads] = {name_of(function): function for _, function in _WORK}
RESULTS: dict[str, Any] = {name_of(function): kind for kind, function in _WORK}
