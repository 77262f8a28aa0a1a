"""What the endpoints share: the engine, the options, the API keys, and whether requests are accepted now.

Knows no HTTP: it raises errors, and server/http/failures gives them their statuses.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.errors import BadRequest, shown
from ridgeline.process import embedded
from ridgeline.process.hub_cache import hub_name
from ridgeline.server.api.generation import GenerationRequest
from ridgeline.server.api.openai.responses_store import ResponseStore
from ridgeline.server.http.admission import HeldBodies, Slots
from ridgeline.server.http.keys import Keys
from ridgeline.server.long_bodies import BodyReader
from ridgeline.server.observe.tracing import NoTracing
from ridgeline.server.options import ServerOptions
from ridgeline.server.server_errors import STOPPED, ModelNotFound, Unavailable
from ridgeline.text.tokenizer import Tokenizer

ANY = "*"                            # at the end of a name in --served-model-name: every name that begins with the rest
NOT_READY = {
    "stopping": "the server is stopping",
    "loading": "the engine is not ready",
    "stalled": "the engine does not answer",
    "restarting": "the engine is restarting",
    "dead": STOPPED,
}


@dataclass(slots=True)
class Service:
    """What the endpoints share."""

    llm: AsyncLLM
    options: ServerOptions
    name: str                        # of the model
    keys: Keys = field(default_factory=Keys)
    slots: Slots = field(default_factory=Slots)
    reader: BodyReader = field(default_factory=BodyReader)
    tracing: NoTracing = field(default_factory=NoTracing)
    quality: str = ""                # of quantised weights, from their card
    stopping: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    bodies: HeldBodies = field(init=False)
    stored: ResponseStore = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = HeldBodies(longest=self.options.max_body_bytes)
        self.stored = ResponseStore(self.options.max_stored_responses, self.options.max_stored_bytes)

    def check(self, request: GenerationRequest) -> None:
        """What depends on this server, not on the request's type."""
        self.check_routing(request.model, request.priority)

    def check_routing(self, model: str | None, priority: int | None) -> None:
        if model:                                        # some clients send an empty name
            self.check_name(model)
        if priority and self.llm.config.scheduler.scheduling_policy != "priority":
            raise BadRequest("priority needs a server started with --scheduling-policy priority", field="priority")

    @property
    def names(self) -> list[str]:
        """All names of the model; the first is used in answers."""
        listed = _listed(self.options.served_model_name)
        return [self.name, *(name for name in listed if name != self.name and not name.endswith(ANY))]

    def check_name(self, name: str) -> None:
        if name == self.name or name in self.names or name == self.llm.config.model.model:
            return
        beginnings = tuple(each[:-1] for each in _listed(self.options.served_model_name) if each.endswith(ANY))
        if not beginnings or not name.startswith(beginnings):
            raise ModelNotFound(f"the model {shown(name)} is not served here; {self.name!r} is", field="model")

    def open(self) -> None:
        """The engine is ready: accept requests."""
        assert self.llm.ready is not None
        self.slots.predicted_wait = self.llm.predicted_wait
        self.llm.max_queued_tokens = self.options.max_queued_tokens
        self.slots.limit = self.options.max_queued_requests or 4 * self.llm.ready.max_num_seqs

    @property
    def state(self) -> str:
        """ok, or why no requests are accepted: stopping, loading, stalled, restarting or dead."""
        return "stopping" if self.stopping else self._engine_state

    @property
    def _engine_state(self) -> str:
        return self.llm.state if self.slots.limit else "loading"

    @property
    def num_open(self) -> int:
        """Answers that run or wait, and requests whose bodies arrive."""
        return self.slots.taken + self.bodies.num_reading

    def require_ready(self, is_new: bool = True) -> None:
        """Not `is_new`: the request came before this server began to stop, and is still answered."""
        state = self.state if is_new else self._engine_state
        if state != "ok":
            raise Unavailable(NOT_READY[state])

    @property
    def tokenizer(self) -> Tokenizer | None:
        return None if self.llm.config.model.skip_tokenizer_init else self.llm.get_tokenizer()


def model_name(llm: AsyncLLM, options: ServerOptions) -> str:
    path = Path(llm.config.model.model)
    if not llm.config.model.model:
        own = embedded.NAME
    elif not path.exists() and hub_name(llm.config.model.model):
        own = llm.config.model.model                     # as clients of vLLM call it
    else:
        own = path.stem if path.suffix == ".gguf" else path.resolve().name
    return next((name for name in _listed(options.served_model_name) if not name.endswith(ANY)), own)


def _listed(names: str) -> list[str]:
    return list(dict.fromkeys(name for each in names.split(",") if (name := each.strip())))
