"""gpt-oss' messages: channels become reasoning, content and calls, however the text is cut."""

from __future__ import annotations

import pytest
from test_tools import Message, read

from ridgeline.server.parse.harmony import CHANNEL, START, HarmonyParser
from ridgeline.server.parse.json_text import MAX_WORD
from ridgeline.server.parse.reasoning import MessageParser
from ridgeline.server.parse.tools import tool_format

TEMPLATE = "{{ '<|start|>' + role + '<|channel|>' + channel + '<|message|>' }}"
ANALYSIS = "<|channel|>analysis<|message|>2 < 3, so |yes|.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes: 2 <| 3.<|return|>"
CALL = '<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'
CASES: list[tuple[str, Message]] = [
    (ANALYSIS + FINAL, ("Yes: 2 <| 3.", "2 < 3, so |yes|.", [])),
    (ANALYSIS + CALL, ("", "2 < 3, so |yes|.", [("get_weather", '{"city": "Oslo"}')])),
    # The recipient before the channel, a preamble without one, and two calls.
    ("<|channel|>commentary<|message|>I look it up.<|end|>"
     "<|start|>assistant to=functions.f<|channel|>commentary<|message|>{}<|call|>" + CALL,
     ("I look it up.", "", [("f", "{}"), ("get_weather", '{"city": "Oslo"}')])),
    ("plain text", ("plain text", "", [])),
    ("<|channel|>final<|message|>no end", ("no end", "", [])),
    ("<|channel|>analysis<|message|>think<|start|>assistant<|channel|>final<|message|>so", ("so", "think", [])),
    ("<|channel|>analysis", ("", "", [])),
]


def parser() -> MessageParser:
    return MessageParser(None, HarmonyParser(("f", "get_weather")))


@pytest.mark.parametrize(("text", "message"), CASES)
def test_channels_become_the_parts_of_a_message(text: str, message: Message) -> None:
    assert read(parser, [text]) == message
    assert read(parser, list(text)) == message
    for place in range(len(text)):
        assert read(parser, [text[:place], text[place:]]) == message


def test_a_mark_that_the_limit_cuts_off_is_no_text() -> None:
    for place in range(2, len("<|end|>")):
        assert read(parser, ["<|channel|>final<|message|>yes" + "<|end|>"[:place]], cut=True) == ("yes", "", [])


@pytest.mark.parametrize(("text", "content"), [
    (CHANNEL + "a" * 600, "a" * 600), (CHANNEL + "a " * 300 + FINAL, "a " * 300 + "Yes: 2 <| 3."),
    (START + CHANNEL + " " * 520, " " * 520), (CHANNEL + "[" * MAX_WORD + "<|message|>b", "[" * MAX_WORD + "b"),
    (CHANNEL * 60 + "final<|message|>b", "b"), (CHANNEL + "a" * 300 + CHANNEL + "b" * 300 + FINAL, "b" * 300 + "Yes: 2 <| 3."),
])
def test_a_header_that_is_too_long_is_text_however_it_is_cut(text: str, content: str) -> None:
    """Of one that came in pieces, more was left out."""
    for pieces in ([text], list(text), *(([text[at : at + size] for at in range(0, len(text), size)]) for size in (2, 255, 511))):
        assert read(parser, pieces) == (content, "", [])


def test_reasoning_tokens_end_where_the_answer_begins() -> None:
    made = parser()
    made.feed(ANALYSIS + FINAL)
    made.finish()
    begin = (ANALYSIS + FINAL).index("Yes")
    assert made.reasoning_tokens([0, 10, begin - 1, begin, begin + 5]) == 3
    unfinished = parser()
    unfinished.feed(ANALYSIS[:30])
    assert unfinished.reasoning_tokens([0, 10, 20]) == 3


def test_the_format_is_found_in_the_template() -> None:
    assert tool_format("auto", TEMPLATE) == "harmony" and tool_format("harmony", "") == "harmony"
