"""Errors as answers: `param` and the names of fields come from the error's own field, never from its words."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from ridgeline.errors import (
    PROMPT,
    BadRequest,
    NotNow,
    Overloaded,
    PromptTooLong,
    RequestError,
    TryAgain,
    UnknownField,
    Unsupported,
)
from ridgeline.server.api.dialects import ANTHROPIC, CHAT, RESPONSES, Dialect
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.http.body import parse_body
from ridgeline.server.http.failures import ALONE, describe


def told(error: Exception, prompt_field: str | None = None, dialect: Dialect = CHAT) -> dict[str, Any]:
    _, body, _ = describe(error, prompt_field, dialect.names)
    return dict(json.loads(body)["error"])


@pytest.mark.parametrize("words", ["top_p is wrong", "reworded", "temperature and top_p: other fields' names", ""])
@pytest.mark.parametrize(("field", "param"), [
    ("max_tokens", "max_tokens"), ("messages[0].content[1].text", "messages"), ("text_1", "text_1"),
    ("response_format.json_schema", "response_format"), ("", None),
])
def test_param_is_the_errors_field_whatever_its_words(words: str, field: str, param: str | None) -> None:
    for kind in (BadRequest, Unsupported, PromptTooLong):
        assert told(kind(words, field=field)) | {"code": None} == {
            "message": words, "type": "invalid_request_error", "param": param, "code": None,
        }


def test_the_prompt_goes_by_its_name_in_the_request() -> None:
    error = BadRequest("prompt_token_ids holds -1", field=PROMPT)
    assert told(error, "input") | {"type": "", "code": ""} == {
        "message": "input holds -1", "type": "", "param": "input", "code": "",
    }
    assert told(error)["param"] is None
    assert told(PromptTooLong("the prompt is too long", field=PROMPT), "messages")["param"] == "messages"


@pytest.mark.parametrize(("dialect", "field", "message", "renamed", "param"), [
    (RESPONSES, "max_completion_tokens", "max_completion_tokens must be 1", "max_output_tokens must be 1", "max_output_tokens"),
    (RESPONSES, "response_format.json_schema", "response_format.json_schema needs", "text.format needs", "text"),
    (RESPONSES, "response_format.type", "response_format.type must", "text.format.type must", "text"),
    (RESPONSES, "max_tokens_of_another_kind", "max_tokens_of_another_kind", "max_tokens_of_another_kind",
     "max_tokens_of_another_kind"),
    (ANTHROPIC, "stop", "unstoppable: stop has 50", "unstoppable: stop_sequences has 50", "stop_sequences"),
    (CHAT, "stop", "stop has 50", "stop has 50", "stop"),
])
def test_fields_have_the_names_of_their_dialect(dialect: Dialect, field: str, message: str, renamed: str, param: str) -> None:
    found = told(BadRequest(message, field=field), dialect=dialect)
    assert (found["message"], found["param"]) == (renamed, param)


def test_a_field_that_is_not_there_keeps_the_name_it_was_sent_with() -> None:
    found = told(UnknownField("unknown field 'logprobs'", field="logprobs"), dialect=RESPONSES)
    assert (found["message"], found["param"]) == ("unknown field 'logprobs'", "logprobs")
    with pytest.raises(UnknownField) as caught:
        parse_body(ChatRequest, b'{"messages": [], "a.b[0]": 1}')
    assert told(caught.value)["param"] == "a.b[0]"


def test_errors_keep_their_fields_when_copied() -> None:
    error = Overloaded("full", 3.0)
    for each in (copy.copy(error), pickle.loads(pickle.dumps(error)), error.renamed("a", "b")):
        assert (str(each), each.retry_after) == ("full", 3.0)
    assert pickle.loads(pickle.dumps(RequestError("x", field="stop"))).field == "stop"


def test_a_thread_that_cannot_be_started_is_no_fault_of_the_request() -> None:
    status, body, headers = describe(RuntimeError("can't start new thread"))
    assert status == 503 and json.loads(body)["error"]["code"] == "try_again" and dict(headers)[b"retry-after"]


def test_a_refusal_says_whether_it_concerns_one_request() -> None:
    for error, alone in ((Overloaded("full"), False), (NotNow("no time for a grammar"), True), (TryAgain("it was killed"), True)):
        status, _, headers = describe(error)
        assert status in (429, 503) and b"retry-after" in dict(headers) and (ALONE in dict(headers)) == alone
