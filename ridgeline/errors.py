"""What can go wrong, in two kinds: one request failed, or the engine is dead.

A request error is told to that client and says what to change; nobody else notices. An engine error is told to every
waiting request. `ConfigError` and `ModelError` are raised before the engine exists. Each carries one line for a person.
"""


class RidgelineError(Exception):
    """Base of every error a user can meet. `str(error)` is one clear line."""


class ConfigError(RidgelineError):
    """A setting that cannot work, found before any weight is loaded."""


class ModelError(RidgelineError):
    """A model directory or file that cannot be served: missing, damaged, or of an unknown kind."""


class RequestError(RidgelineError):
    """This request failed; the engine and every other request go on."""


class BadRequest(RequestError):
    """The client asked for something invalid (HTTP 400)."""


class PromptTooLong(BadRequest):
    """More tokens than the model's context has; clients know this error by its code and shorten the conversation."""


class Unsupported(RequestError):
    """A valid request for something this engine does not do (HTTP 400)."""


class Overloaded(RequestError):
    """No room now; the same request may succeed later, in about `retry_after` seconds if that is known (HTTP 429)."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TimedOut(RequestError):
    """The request took longer than it may (HTTP 504)."""


class EngineDead(RidgelineError):
    """The engine has stopped; every request in it fails (HTTP 503)."""


def one_line(error: BaseException) -> str:
    """An error as one line for a person, whatever kind it is."""
    words = " ".join(str(error).split())
    return words if isinstance(error, RidgelineError) else f"{type(error).__name__}: {words[:300]}".rstrip(": ")
