"""What a client may have meant by a path that does not exist here: usually one without its /v1.

Knows paths as text; server/app has the routes.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator

OTHER_API = "this is {} API; the server answers clients of OpenAI (base URL with /v1), of Anthropic and of Ollama"
GEMINI = OTHER_API.format("Gemini's")
GEMINI_VERBS = (":generateContent", ":streamGenerateContent", ":embedContent", ":batchEmbedContents", ":countTokens")
# Paths that clients of other servers know, and that no spelling leads to.
ELSEWHERE = {
    "/embedding": "did you mean /v1/embeddings?",
    "/v1/health": "did you mean /health?",
    **dict.fromkeys(
        ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs"),
        "this server serves the one model it was started with; `ridgeline serve MODEL` serves another",
    ),
    **dict.fromkeys(
        ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking", "/classify", "/pooling"),
        "it needs a model trained for it, which this server does not run; /v1/score and /v1/embeddings work with any model",
    ),
    **dict.fromkeys(
        ("/v2/chat", "/v1/chat", "/v2/embed", "/v1/embed"),
        OTHER_API.format("Cohere's"),
    ),
    "/v1/completion": "did you mean /v1/completions?",  # not llama.cpp's /completion
    "/model": "did you mean /v1/models?",               # below it are Bedrock's paths
    **dict.fromkeys(("/v1/fim/completions", "/fim/completions"), "/v1/completions with `suffix` fills in the middle"),
    **dict.fromkeys(("/get_model_info", "/server_info", "/info"), "/v1/models and /health tell of the model and its state"),
    "/lora-adapters": "adapters are not supported; merge them into the model",
    "/v1/responses/compact": "conversations are not shortened here; send fewer items",
}
# Parts of OpenAI's API that are not here, with all paths below them.
BELOW = {
    "/v1/chat/completions": "chat completions are not stored; /v1/responses stores its answers",
    **dict.fromkeys(
        ("/v1/assistants", "/v1/threads", "/v1/conversations"),
        "/v1/responses with previous_response_id continues a conversation",
    ),
    **dict.fromkeys(
        ("/v1/files", "/v1/uploads", "/v1/batches", "/v1/messages/batches"),
        "no files are kept here; `ridgeline generate` answers a file of prompts",
    ),
    **dict.fromkeys(
        ("/v1/vector_stores", "/v1/containers", "/v1/skills"),
        "no files are kept here, and no tools are run here; send texts in the request, and tools as functions",
    ),
    "/v1/fine_tuning": "this server does not train",
    "/v1/evals": "`ridgeline eval` evaluates a model",
    **dict.fromkeys(
        ("/v1/moderations", "/v1/images", "/v1/audio", "/v1/videos", "/v1/realtime"),
        "this server only generates text",
    ),
    **dict.fromkeys(("/v1beta", "/v1alpha", "/v1beta1"), GEMINI),
    **dict.fromkeys(
        ("/generate", "/generate_stream", "/v1/generate"),
        "this is the own API of TGI and SGLang; /v1/completions and /v1/chat/completions do the same",
    ),
    "/model": "this is Bedrock's API; use the client for OpenAI, with a base URL that ends with /v1",
    "/api/v0": "this is LM Studio's own API; use the client for OpenAI, with a base URL that ends with /v1",
    "/v1/engines": "these paths are old; /v1/models lists the model, /v1/completions answers",
    "/openai/deployments": "this is Azure's path; use the client for OpenAI, with a base URL that ends with /v1",
}
CLOSE = 0.8                          # of difflib: the share of characters that two paths have in common


def elsewhere(path: str) -> str:
    """What to say about a path of another API, even if a route with an id takes its last part for one; empty: it is none."""
    return GEMINI if path.endswith(GEMINI_VERBS) else ELSEWHERE.get(path.rstrip("/"), "")


def suggestion(path: str, known: Collection[str]) -> str:
    """What to say about the unknown `path`; empty if nothing is near it."""
    if words := elsewhere(path):
        return words
    near = next((each for each in _spellings(path) if each in known), None)
    if near is None and (words := next((each for parent, each in BELOW.items() if f"{path}/".startswith(f"{parent}/")), "")):
        return words
    if near is None:
        near = next(iter(difflib.get_close_matches(path[:200], [each for each in known if "{" not in each], 1, CLOSE)), None)
    return f"did you mean {near}?" if near is not None and near != path else ""


def _spellings(path: str) -> Iterator[str]:
    """The usual mistakes in a base URL: no /v1, a doubled one, one behind another prefix, a slash at the end."""
    bare = "/" + path.strip("/")
    yield bare
    yield f"/v1{bare}"
    if (place := bare.rfind("/v1/")) > 0:
        yield bare[place:]
    if rest := bare[1:].partition("/")[2]:
        yield f"/{rest}"
        yield f"/v1/{rest}"
