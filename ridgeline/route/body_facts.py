"""What the router has to know of a body: its prompt, the places of the two fields that it sets, and how to pass on the answer.

As plain data, because a long body is read in another process (route/facts_process), as a server's are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.engine.client.long_work import away_if_long
from ridgeline.engine.client.request_context import Caller
from ridgeline.route.body_fields import Places, changed, changes, fields_of, last_values, places_of
from ridgeline.route.prompt_text import PromptText, read_prompt
from ridgeline.server.http.json_size import check_size
from ridgeline.server.long_bodies import name_of

SALT, OPTIONS = "cache_salt", "stream_options"                   # the fields that are set
_ROUTED = frozenset({                                            # fields of a body that are read; all others are only passed on
    SALT, OPTIONS, "input", "logprobs", "max_completion_tokens", "max_tokens", "messages", "model", "n", "prompt",
    "return_token_ids", "seed", "stream", "system", "temperature", "text_1", "tools",
})
_decode = msgspec.json.Decoder().decode


class BodyFacts(msgspec.Struct):
    places: Places
    prompt: PromptText
    own_salt: str                    # the client's; empty: it has none
    with_usage: bytes                # of a stream whose client has not asked for its usage: the options that do; else empty
    is_exact: bool                   # sent again, it gives the same answer
    one_choice: bool


async def read_facts(service: object, caller: Caller, body: bytes) -> BodyFacts:
    """Raises BadRequest if it is not a JSON object."""
    return await away_if_long(len(body), lambda: facts_of(body))


RESULTS: dict[str, Any] = {name_of(read_facts): BodyFacts}


def facts_of(body: bytes) -> BodyFacts:
    check_size(body)
    fields = fields_of(body)
    values = last_values(body, fields, _ROUTED)
    request = {name: _read(name, value) for name, value in values.items()}
    own = request.get(SALT)
    return BodyFacts(
        places_of(body, fields, (SALT, OPTIONS)), read_prompt(request), own if isinstance(own, str) else "",
        _with_usage(request, values), is_exact(request), has_one_choice(request),
    )


def _read(name: str, value: bytes) -> Any:
    """A value that the router looks at. One that is no strict JSON, such as a text cut inside an emoji, goes on as it is: its
    bytes still tell a prompt from others."""
    try:
        return _decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = value.decode("latin-1")
        return [text] if name == "messages" else text


def is_exact(request: dict[str, Any]) -> bool:
    """Greedy or seeded, one answer, and nothing but its text."""
    temperature, seed = request.get("temperature"), request.get("seed")
    certain = (isinstance(temperature, int | float) and temperature == 0) or isinstance(seed, int)
    return certain and has_one_choice(request) and not request.get("logprobs") and not request.get("return_token_ids")


def has_one_choice(request: dict[str, Any]) -> bool:
    prompt = request.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return (request.get("n") or 1) == 1 and not several


def _with_usage(request: dict[str, Any], values: dict[str, bytes]) -> bytes:
    options = request.get(OPTIONS)
    if request.get("stream") is not True or not (options is None or isinstance(options, dict)):
        return b""
    if (options or {}).get("include_usage"):
        return b""
    asked = b"{}" if options is None else values[OPTIONS]
    name = "include_usage"
    return b"".join(changed([asked], changes(places_of(asked, fields_of(asked), (name,)), {name: b"true"})))
