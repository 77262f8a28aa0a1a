"""What is complete of a cut JSON object, in time that a client's or a model's text cannot make long."""

from __future__ import annotations

from typing import Any

import pytest
from counted_work import is_linear

from ridgeline.server.parse import partial_json, tool_prompt
from ridgeline.server.parse.partial_json import completed


class Searched(str):
    """A text that counts the characters which searches go through."""

    searched = 0

    def find(self, what: str, *span: Any) -> int:
        found = super().find(what, *span)
        begin, end = (*span, len(self))[:2] if span else (0, len(self))
        Searched.searched += (end if found < 0 else found) - begin
        return found


@pytest.mark.reliability("R-20")
@pytest.mark.parametrize("inner", ["\\n", '\\"', "\\\\", "x\\u00e9", "x"])
def test_a_text_full_of_escapes_is_searched_once(inner: str) -> None:
    """Its end was searched for behind each of them: 3 MB in a request took a reading process more than a minute."""
    counts = []
    for times in (100, 800):
        Searched.searched = 0
        text = '{"a":"' + inner * times + '","b":tr'
        end, closing = partial_json._last_complete(Searched(text))
        assert text[:end] + closing == '{"a":"' + inner * times + '"}'
        counts.append(Searched.searched)
    assert counts[1] <= 9 * counts[0], counts


def test_the_work_on_a_cut_object_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 million numbers took a reading process 48 s. What comes after the bound is left out."""
    monkeypatch.setattr(partial_json, "_MOST_STEPS", 100)
    assert completed('{"a": 1, "b": [' + "1," * 1000) == {"a": 1, "b": [1] * ((100 - 9) // 2)}
    assert completed('{"a": ' + "1" * 5000 + ', "b": tr') == {}
    assert completed('{"a": [' + "1," * 1000 + "1]}") == {"a": [1] * 1001}       # a whole one is read by a library


def test_the_cut_calls_of_a_conversation_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """160 of 90 KB took a reading process 53 s. Behind the bound, nothing of a cut call is kept."""
    monkeypatch.setattr(tool_prompt, "MOST_MENDED", 30)
    cut, whole = '{"a": 1, "b": [2', '{"c": 3}'
    calls = [{"function": {"name": "f", "arguments": each}} for each in (cut, whole, cut, cut)]
    given: list[dict[str, Any]] = [{"role": "assistant", "tool_calls": calls[:2]}, {"role": "user", "content": "a"},
                                   {"role": "assistant", "tool_calls": calls[2:]}]
    made = [call["function"]["arguments"] for message in tool_prompt.mended(given) for call in message.get("tool_calls", ())]
    assert made == [{"a": 1, "b": [2]}, whole, {"a": 1}, {}]
    assert calls[0]["function"]["arguments"] == cut      # what the client sent stays as it is


@pytest.mark.parametrize("text", ['"k",', "1,", "[", '{"a":', " ", "true,", "x"])
def test_work_on_a_cut_object_is_linear(text: str) -> None:
    good, few, many = is_linear(lambda count: completed('{"a": [' + text * count), 100)
    assert good, (few, many)
