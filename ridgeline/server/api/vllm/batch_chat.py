"""vLLM's `/v1/chat/completions/batch`: several conversations in one request, one choice for each."""

from __future__ import annotations

import msgspec

from ridgeline.errors import BadRequest
from ridgeline.server.api.openai.chat import ChatMessage, ChatRequest
from ridgeline.server.http.json_size import MAX_PARTS, counted

MOST_REPEATED = 64 * 2**20           # bytes of JSON


class BatchChatRequest(ChatRequest, kw_only=True):
    """The fields of chat, which hold for every conversation."""

    messages: list[list[ChatMessage]]  # type: ignore[assignment]

    def check(self) -> None:
        super().check()
        if not self.messages or not all(self.messages):
            raise BadRequest("messages must be a list of conversations, each with at least one message", field="messages")
        for name, wrong in (("stream", self.stream), ("tools", self.tools or self.functions), ("n", (self.n or 1) > 1),
                            ("echo", self.echo)):
            if wrong:
                raise BadRequest(f"{name} is not possible in a batch; send its conversations one by one", field=name)
        for name in ("chat_template_kwargs", "documents"):
            self._check_repeated(name)

    def _check_repeated(self, name: str) -> None:
        """Every conversation is rendered with all of it: a short body must not become endless."""
        try:
            written = msgspec.json.encode(getattr(self, name))
        except (OverflowError, RecursionError):
            raise BadRequest(f"{name} holds numbers of more than 64 bits, or is nested too deep", field=name) from None
        count = len(self.messages)
        if count * len(written) > MOST_REPEATED or count * counted(written)[0] > MAX_PARTS:
            message = f"{name} is too large to be repeated for {count} conversations; send them in several requests"
            raise BadRequest(message, field=name)

    def conversations(self) -> list[ChatRequest]:
        """A chat request for each."""
        shared = {name: getattr(self, name) for name in ChatRequest.__struct_fields__ if name != "messages"}
        return [ChatRequest(messages=messages, **shared) for messages in self.messages]
