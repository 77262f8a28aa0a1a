"""Errors that only a server has. Their words are meant for clients; server/http/failures gives each a status."""

from __future__ import annotations

from ridgeline.errors import BadRequest, RequestError, RidgelineError

STOPPED = "the engine has stopped"


class Unavailable(RidgelineError):
    """The server takes no requests now (HTTP 503)."""


class ModelNotFound(RequestError):
    """The request names a model that is not served here (HTTP 404)."""


class WrongPath(RequestError):
    """The path is another API's, and the request shows that its client meant one of ours (HTTP 404)."""


class NotStored(RequestError):
    """The request asks for a stored response that does not exist (HTTP 404)."""


class ItemNotStored(RequestError):
    """The input refers to an item by its id, and no stored response has that item (HTTP 404)."""


class PreviousNotStored(BadRequest):
    """previous_response_id names no stored response (HTTP 400). Clients recognise the code and send the whole conversation."""


class WrongMediaType(RequestError):
    """The body is not declared as JSON (HTTP 415). Browsers cannot send JSON to a foreign site without asking first."""
