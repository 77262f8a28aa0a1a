"""Errors as HTTP answers: the status, the body, and when to try again.

Clients read only words of this server. Why an engine died, and what an unexpected error says, goes to the log.
"""

from __future__ import annotations

import math
import random
import re
import secrets
from collections.abc import Mapping
from types import MappingProxyType

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.errors import (
    PROMPT,
    BadGateway,
    BadRequest,
    NotNow,
    Overloaded,
    PromptTooLong,
    RequestError,
    RidgelineError,
    TimedOut,
    TryAgain,
    UnknownField,
    Unsupported,
)
from ridgeline.process.log import get_logger
from ridgeline.process.memory_kills import is_out_of_threads
from ridgeline.server.http.error_bodies import body_for, error_body
from ridgeline.server.http.near_paths import elsewhere, suggestion
from ridgeline.server.http.stream import Headers
from ridgeline.server.server_errors import (
    STOPPED,
    ItemNotStored,
    ModelNotFound,
    NotStored,
    PreviousNotStored,
    Unavailable,
    WrongMediaType,
    WrongPath,
)

logger = get_logger("server")

ALONE = b"x-ridgeline-refused"       # a header of refusals that concern one request: a router sends others here all the same
NO_NAMES: Mapping[str, str] = MappingProxyType({})
_INVALID = "invalid_request_error"
# The first class that an error belongs to decides: status, type, code.
_KINDS: tuple[tuple[type[RequestError], int, str, str | None], ...] = (
    (ModelNotFound, 404, _INVALID, "model_not_found"),
    (WrongPath, 404, _INVALID, "not_found"),
    (NotStored, 404, _INVALID, "response_not_found"),
    (ItemNotStored, 404, _INVALID, "item_not_found"),
    (PreviousNotStored, 400, _INVALID, "previous_response_not_found"),
    (WrongMediaType, 415, _INVALID, None),
    (Overloaded, 429, "overloaded_error", "overloaded"),
    (BadGateway, 502, "service_unavailable_error", "replica_failed"),
    (TryAgain, 503, "service_unavailable_error", "try_again"),
    (TimedOut, 504, "timeout_error", "request_timeout"),
    (PromptTooLong, 400, _INVALID, "context_length_exceeded"),
    (BadRequest, 400, _INVALID, None),
    (Unsupported, 400, _INVALID, None),
    (RequestError, 500, "server_error", None),
)


def describe(
    error: Exception, prompt_field: str | None = None, names: Mapping[str, str] = NO_NAMES
) -> tuple[int, bytes, Headers]:
    """(status, body, headers). `prompt_field`: the request's name for the prompt; `names`: its names for chat's fields."""
    if is_out_of_threads(error):
        logger.warning("a request was refused: no further thread may be started here; raise `ulimit -u`")
        error = TryAgain("this server can start no further thread at the moment; try again later")
    retry = [(b"retry-after", retry_after(error))]
    if isinstance(error, NotNow | TryAgain):
        retry.append((ALONE, b"alone"))
    if isinstance(error, RequestError):
        error = as_requested(error, prompt_field, names)
        status, kind, code = next(row[1:] for row in _KINDS if isinstance(error, row[0]))
        body = error_body(str(error), kind, param_of(error), code, getattr(error, "details", None))
        return status, body, retry if status in (429, 502, 503) else []
    if isinstance(error, RidgelineError):
        # Why an engine died is for the operator only: the reason may quote a path, or another client's request.
        message = str(error) if isinstance(error, Unavailable) else STOPPED
        return 503, error_body(message, "service_unavailable_error", code="engine_not_available"), retry
    number = secrets.token_hex(4)
    logger.error("error %s in a request", number, exc_info=error)
    return 500, error_body(f"internal error {number}; the server's log has its cause", "server_error"), []


def as_requested(error: RequestError, prompt_field: str | None, names: Mapping[str, str]) -> RequestError:
    """The error with the field named as in the client's request, which may be in another dialect than the engine's."""
    if isinstance(error, UnknownField):
        return error
    if error.field == PROMPT and prompt_field is not None:
        return error.renamed(PROMPT, prompt_field)
    field = next((field for field in names if error.is_about(field)), None)
    return error if field is None else error.renamed(field, names[field])


def param_of(error: RequestError) -> str | None:
    """The request's own field that the error is about, for `error.param`."""
    if isinstance(error, UnknownField):
        return error.field
    return re.split(r"[.\[]", error.field, maxsplit=1)[0] if error.field not in ("", PROMPT) else None


def retry_after(error: Exception) -> bytes:
    """Whole seconds from 1 to 60: the predicted wait, or 1 to 5. Randomised, so that clients do not all return at once."""
    wait = error.retry_after if isinstance(error, Overloaded | TryAgain) else None
    seconds = random.uniform(1, 5) if wait is None else wait * random.uniform(1.0, 1.25)
    return str(min(60, max(1, math.ceil(seconds)))).encode()


async def http_error(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    method, path, allowed = request.method, request.scope["path"][:200], (error.headers or {}).get("Allow", "")
    message, code = f"{method} {path} does not exist here", "not_found"
    if elsewhere(path):                                  # a route with an id may have taken its last part for one
        error = HTTPException(404)
    known = {each.path for each in request.app.routes if isinstance(each, Route)}
    if error.status_code == 404 and (words := suggestion(path, known)):
        message += f"; {words}"
    if error.status_code == 405 and allowed:
        methods = sorted(allowed.split(", "))
        works = "works" if len(methods) == 1 else "work"
        message, code = f"{path} does not take {method}; {' and '.join(methods)} {works}", "method_not_allowed"
    body = error_body(message, "invalid_request_error", code=code)
    body = body_for(request.scope["path"], request.scope["headers"], error.status_code, body)
    return Response(body, error.status_code, media_type="application/json", headers=error.headers)
