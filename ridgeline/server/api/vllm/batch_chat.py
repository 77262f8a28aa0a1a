"""vLLM's `/v1/chat/completions/batch`: several conversations in one request, one choice for each."""

from __future__ import annotations

from ridgeline.errors import BadRequest
from ridgeline.server.api.openai.chat import ChatMessage, ChatRequest


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

    def conversations(self) -> list[ChatRequest]:
        """A chat request for each."""
        shared = {name: getattr(self, name) for name in ChatRequest.__struct_fields__ if name != "messages"}
        return [ChatRequest(messages=messages, **shared) for messages in self.messages]
