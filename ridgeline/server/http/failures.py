"""Errors as answers: which status, which words, and when to come again.

What clients read is our own words. Why an engine died, and what an unexpected error says, goes to the log.
"""

from __future__ import annotations

import math
import random
import secrets

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.errors import BadRequest, Overloaded, PromptTooLong, RequestError, RidgelineError, TimedOut, Unsupported
from ridgeline.process.log import get_logger
from ridgeline.server.http.error_bodies import body_for, error_body
from ridgeline.server.http.stream import Headers
from ridgeline.server.protocol import param_of
from ridgeline.server.service import (
    STOPPED,
    ItemNotStored,
    ModelNotFound,
    NotStored,
    PreviousNotStored,
    Unavailable,
    WrongMediaType,
)

logger = get_logger("server")

_PROMPT_IDS = "prompt_token_ids"


def describe(error: Exception, prompt_field: str | None = None) -> tuple[int, bytes, Headers]:
    """(status, body, headers). What clients read is our own words; the rest goes to the log, under a number. `prompt_field`: what
    a prompt that is too long is called in the request."""
    retry = [(b"retry-after", retry_after(error))]
    message = str(error)
    if prompt_field is not None and message.startswith(_PROMPT_IDS):         # as the engine calls it
        message = prompt_field + message.removeprefix(_PROMPT_IDS)
    match error:
        case ModelNotFound():
            return 404, error_body(message, "invalid_request_error", "model", "model_not_found"), []
        case NotStored():
            return 404, error_body(message, "invalid_request_error", code="response_not_found"), []
        case ItemNotStored():
            return 404, error_body(message, "invalid_request_error", "input", "item_not_found"), []
        case PreviousNotStored():
            field, code = "previous_response_id", "previous_response_not_found"
            return 400, error_body(message, "invalid_request_error", field, code), []
        case WrongMediaType():
            return 415, error_body(message, "invalid_request_error"), []
        case Overloaded():
            return 429, error_body(message, "overloaded_error", code="overloaded"), retry
        case TimedOut():
            return 504, error_body(message, "timeout_error", code="request_timeout"), []
        case PromptTooLong():
            named = param_of(message) or prompt_field
            return 400, error_body(message, "invalid_request_error", named, "context_length_exceeded"), []
        case BadRequest() | Unsupported():
            details = getattr(error, "details", None)
            named = param_of(message) or (prompt_field if message.startswith("the prompt ") else None)
            return 400, error_body(message, "invalid_request_error", named, details=details), []
        case RequestError():
            return 500, error_body(message, "server_error"), []
        case RidgelineError():
            # Why an engine died is the operator's to know: its words may quote a path, or another client's request.
            told = message if isinstance(error, Unavailable) else STOPPED
            return 503, error_body(told, "service_unavailable_error", code="engine_not_available"), retry
    number = secrets.token_hex(4)
    logger.error("error %s in a request", number, exc_info=error)
    return 500, error_body(f"internal error {number}; the server's log has its cause", "server_error"), []


def retry_after(error: Exception) -> bytes:
    """Whole seconds, from 1 to 60: the predicted wait, or a few; spread, so that not all come back at once."""
    wait = error.retry_after if isinstance(error, Overloaded) else None
    seconds = random.uniform(1, 5) if wait is None else wait * random.uniform(1.0, 1.25)
    return str(min(60, max(1, math.ceil(seconds)))).encode()


async def http_error(request: Request, error: Exception) -> Response:
    """Paths and methods that do not exist."""
    assert isinstance(error, HTTPException)
    method, path, allowed = request.method, request.scope["path"][:200], (error.headers or {}).get("Allow", "")
    message, code = f"{method} {path} does not exist here", "not_found"
    if error.status_code == 405 and allowed:
        methods = sorted(allowed.split(", "))
        works = "works" if len(methods) == 1 else "work"
        message, code = f"{path} does not take {method}; {' and '.join(methods)} {works}", "method_not_allowed"
    body = error_body(message, "invalid_request_error", code=code)
    body = body_for(request.scope["path"], request.scope["headers"], error.status_code, body)
    return Response(body, error.status_code, media_type="application/json", headers=error.headers)
