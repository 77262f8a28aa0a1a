"""docs/server.md has every path, and every field of every request with its state, as the code has them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.config import declared_options
from ridgeline.server.api.anthropic import messages_api as anthropic
from ridgeline.server.api.generation import GenerationRequest
from ridgeline.server.api.llamacpp.llama_requests import LlamaRequest
from ridgeline.server.api.ollama.ollama_requests import (
    EmbedRequest,
    OldEmbedRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    ShowRequest,
)
from ridgeline.server.api.openai import responses_answer
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.api.openai.completions import CompletionRequest
from ridgeline.server.api.openai.embeddings import EmbeddingRequest
from ridgeline.server.api.openapi import OPERATIONS
from ridgeline.server.api.vllm.batch_chat import BatchChatRequest
from ridgeline.server.api.vllm.score import ScoreRequest
from ridgeline.server.api.vllm.tokenize import DetokenizeRequest, TokenizeRequest
from ridgeline.server.app import make_app
from ridgeline.server.options import ServerOptions
from ridgeline.server.service import Service

PAGE = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")

# heading of a table -> the type, and the headings whose fields it has, too
TABLES: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "Chat and completions": (GenerationRequest, ()),
    "Chat": (ChatRequest, ("Chat and completions",)),
    "Completions": (CompletionRequest, ("Chat and completions",)),
    "Messages": (anthropic.MessagesRequest, ()),
    "Count tokens": (anthropic.CountRequest, ()),
    "Responses fields": (responses_answer.ResponsesRequest, ()),
    "Embedding fields": (EmbeddingRequest, ()),
    "Score fields": (ScoreRequest, ()),
    "Ollama chat": (OllamaChatRequest, ("Ollama chat and generate",)),
    "Ollama chat and generate": (OllamaRequest, ()),
    "Ollama generate": (OllamaGenerateRequest, ("Ollama chat and generate",)),
    "Ollama embed": (EmbedRequest, ()),
    "Ollama embeddings": (OldEmbedRequest, ()),
    "Ollama show": (ShowRequest, ()),
    "llama.cpp completion": (LlamaRequest, ()),
    "Tokenize": (TokenizeRequest, ()),
    "Detokenize": (DetokenizeRequest, ()),
}
ALSO_IGNORED = {ScoreRequest: {"user"}}


def documented(heading: str) -> dict[str, str]:
    """Fields and their states, from the table under a heading."""
    section = re.search(rf"^### {heading}\n(.*?)(?=^##)", PAGE + "\n##", re.M | re.S)
    assert section, heading
    fields: dict[str, str] = {}
    for names, state in re.findall(r"^\| (`[^|]+`) \| (\w+) \|", section[1], re.M):
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in fields, f"{name} stands twice under {heading}"
            fields[name] = state
    return fields


def state(kind: type[Any], field: str) -> str:
    if field in getattr(kind, "REFUSED", {}):
        return "no"
    return "ignored" if field in getattr(kind, "HINTS", ()) or field in ALSO_IGNORED.get(kind, ()) else "yes"


@pytest.mark.parametrize("heading", TABLES)
def test_fields_and_states(heading: str) -> None:
    kind, beside = TABLES[heading]
    documents = {name: each for other in (*beside, heading) for name, each in documented(other).items()}
    assert documents == {field: state(kind, field) for field in kind.__struct_fields__}


def test_no_table_is_left_out() -> None:
    same = {BatchChatRequest, dict[str, Any]}            # a batch has chat's fields; /invocations those of others
    assert {operation.takes for operation in OPERATIONS} - {None} - same <= {kind for kind, _ in TABLES.values()}
    tables = re.findall(r"^### (.+)\n(?:\n|(?!#).*\n)*?\| field \| state", PAGE, re.M)
    assert set(tables) == set(TABLES)


def test_every_path_is_documented() -> None:
    app = make_app(Service(SimpleNamespace(), ServerOptions(), "tiny"))      # type: ignore[arg-type]
    table = PAGE[PAGE.index("| path | what |") : PAGE.index("## Fields")]
    listed = {path for _, path in re.findall(r"`(GET|POST) (/[^`]*)`", table)}
    served = {getattr(route, "path", "").replace("{name:path}", "{name}") for route in app.routes}
    assert listed == served
    assert {operation.path for operation in OPERATIONS} <= served


def test_every_option_of_the_server_that_the_page_names_exists() -> None:
    named = {name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)", PAGE)}
    known = {each.name for each, _, _ in (*declared_options(ServerOptions), *declared_options())}
    unknown = {name for name in named if name not in known and name.removeprefix("no_") not in known}
    assert not unknown, unknown


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, anthropic.MessagesRequest, responses_answer.ResponsesRequest])
def test_declared_states_are_of_fields_that_exist(kind: Any) -> None:
    assert set(kind.REFUSED) | set(kind.HINTS) <= set(kind.__struct_fields__)
    assert not set(kind.REFUSED) & set(kind.HINTS)
