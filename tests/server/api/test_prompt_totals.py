"""The tokens of all prompts of a request: bounded, and no further text is tokenised once there are too many."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from scripted_server import ScriptedServer
from served_model import write_model

from ridgeline.engine.client import prompt_limits
from ridgeline.engine.client.prompt_limits import MOST_TOKENS, PromptTally
from ridgeline.errors import PROMPT, BadRequest
from ridgeline.server.api.openai.embeddings import EmbeddingRequest, EmbeddingTokens
from ridgeline.server.body_process import NoEngine, tokenise
from ridgeline.text.tokenizer import Tokenizer

TEXT = "some words " * 40
MANY = [TEXT] * 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with ScriptedServer(write_model(tmp_path_factory.mktemp("model") / "tiny"), lambda prompt: "yes") as made:
        yield made


def conversations(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in texts]


def tally_of(most: int) -> PromptTally:
    tally = PromptTally(0)
    tally.most = most
    return tally


@pytest.mark.reliability("B-02")
@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": MANY, "add_special_tokens": False}),
    ("/v1/chat/completions/batch", {"messages": conversations(MANY)}),
    ("/v1/embeddings", {"input": MANY, "add_special_tokens": False}),
    ("/v1/score", {"text_1": "a", "text_2": MANY}),
])
def test_prompts_of_too_many_tokens_together_are_refused_before_all_are_tokenised(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """128 prompts of 120 KB, 15 MB: seven million token ids were decoded at once, with Python's lock held for half a second."""
    tokenizer, texts = server.llm.get_tokenizer(), []
    room = 5 * len(tokenizer.encode(TEXT))
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *more: Any, **named: Any) -> list[int]:
        texts.append(text)
        return encode(self, text, *more, **named)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    monkeypatch.setattr(server.llm, "tally", lambda: tally_of(room))
    answer = httpx.post(server.url + path, json=body, timeout=60)
    said = answer.json()["error"]
    assert answer.status_code == 400 and "send them in several requests" in str(said)
    assert 3 <= sum(TEXT in each for each in texts) <= 6


def test_the_process_for_long_bodies_stops_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []

    class Reader(NoEngine):
        def __init__(self) -> None:
            self.ready = SimpleNamespace(max_model_len=64)       # type: ignore[assignment]

        def tally(self) -> PromptTally:
            return PromptTally(64)

        def tokens(self, prompt: str, most: int | None, side: str) -> list[int]:
            texts.append(prompt)
            return [1] * 30

    monkeypatch.setattr(prompt_limits, "MOST_TOKENS", 100)
    made = EmbeddingTokens(EmbeddingRequest(input=""), ["a"] * 9)
    with pytest.raises(BadRequest, match="the first 4 prompts have 120 tokens together, and at most 100 may come"):
        tokenise(SimpleNamespace(llm=Reader()), made)            # type: ignore[arg-type]
    assert len(texts) == 4


def test_one_prompt_may_fill_the_context() -> None:
    longest = 4 * MOST_TOKENS
    tally = PromptTally(longest)
    tally.add(longest - 1)
    tally = PromptTally(8192)
    for _ in range(256):
        tally.add(4000)                                          # an evaluation's prompts
    with pytest.raises(BadRequest, match="at most 1,048,576") as error:
        for _ in range(256):
            tally.add(4000)
    assert error.value.field == PROMPT
