"""Where the second text of a score begins, with a tokenizer whose tokens reach over the border."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.engine.client.prompt_limits import PromptTally
from ridgeline.errors import BadRequest, PromptTooLong
from ridgeline.server.api.vllm.score import tokens_of


class Words:
    """A token is a word with the blank before it, as byte-pair encodings have them; a blank at the end stands alone."""

    ready = SimpleNamespace(max_model_len=64)

    def __init__(self, begins: bool) -> None:
        self.begins = begins
        self.known: dict[str, int] = {}
        self.ready = SimpleNamespace(max_model_len=512)

    def tally(self) -> PromptTally:
        return PromptTally(self.ready.max_model_len)

    async def text_tokens(self, text: str) -> list[int]:
        found = re.findall(r" ?[^ ]+| ", text)
        return [0] * self.begins + [1 + self.known.setdefault(each, len(self.known)) for each in found]


def counted(first: str, second: str, begins: bool = False) -> list[str]:
    """The tokens that count for the second text."""
    llm = Words(begins)
    service: Any = SimpleNamespace(llm=llm)
    (whole, start), = asyncio.run(tokens_of(service, [(first, second)]))
    names = {number + 1: name for name, number in llm.known.items()}
    return [names[token] for token in whole[start:]]


@pytest.mark.parametrize(("first", "second", "tokens"), [
    ("The sky is", " blue and wide", [" blue", " and", " wide"]),
    ("The capital of France is ", "Paris and more", [" Paris", " and", " more"]),
    ("a ", "b", [" b"]),
    ("say hel", "lo", [" hello"]),
    ("say hel", "lo there", [" hello", " there"]),
    ("hel", "lo there", [" there"]),                     # nothing stands before the first token
])
def test_a_token_over_the_border_counts_for_the_second_text(first: str, second: str, tokens: list[str]) -> None:
    assert counted(first, second) == tokens


def test_behind_a_first_token_of_the_models_own_every_token_has_a_likelihood() -> None:
    assert counted("hel", "lo", begins=True) == ["hello"] and counted("", "hello", begins=True) == ["hello"]


@pytest.mark.parametrize(("first", "second", "says"), [
    ("hel", "lo", "pair 0 of text_1 and text_2: both texts are a single token together"),
    ("", "lo there", "pair 0 of text_1 and text_2: both texts must have at least one token"),
    ("hello", "", "pair 0 of text_1 and text_2: both texts must have at least one token"),
])
def test_pairs_without_a_score(first: str, second: str, says: str) -> None:
    with pytest.raises(BadRequest, match=says):
        counted(first, second)


def test_a_first_text_that_is_too_long_is_tokenised_once() -> None:
    """Not again with each of a thousand second texts."""
    llm = Words(False)
    calls: list[str] = []
    tokens = llm.text_tokens

    async def watched(text: str) -> list[int]:
        calls.append(text)
        return await tokens(text)

    llm.text_tokens = watched                            # type: ignore[method-assign]
    service: Any = SimpleNamespace(llm=llm)
    with pytest.raises(PromptTooLong):
        asyncio.run(tokens_of(service, [("a " * 600, "b")] * 1000))
    assert len(calls) == 1
