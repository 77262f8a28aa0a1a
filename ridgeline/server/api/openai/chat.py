"""`/v1/chat/completions`: a conversation. Requests and answers as types.

server/api/generation has what completions share, server/parse/tools the meaning of tools, and server/parse/reasoning the
parsing of an answer's text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import msgspec

from ridgeline.engine.client.outputs import AnswerDelta, CompletionOutput, RequestOutput
from ridgeline.engine.client.processor import ROLES
from ridgeline.engine.token_logprobs import TokenLogprobs
from ridgeline.errors import BadRequest, Unsupported, shown
from ridgeline.sampling_params import MAX_LOGPROBS, SamplingParams, StructuredOutputs
from ridgeline.server.api.generation import (
    GenerationRequest,
    Reply,
    Writer,
    ranked,
    structured_outputs,
)
from ridgeline.server.api.openai.chat_answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    FunctionCall,
    FunctionDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from ridgeline.server.api.other_names import GRAMMARS
from ridgeline.server.api.prompt_parts import encoded_alone, finite
from ridgeline.server.api.usage import Usage
from ridgeline.server.parse.incremental import CallArguments, CallStart, Content, Event, Reasoning
from ridgeline.server.parse.reasoning import MessageParser
from ridgeline.server.parse.tools import Reading, ToolUse, answer_or_calls_schema, only, plain_function, tool_use
from ridgeline.text.tokenizer import Tokenizer

BYTES_PER_PARSED = 16                # of JSON, that take as long as to parse a character in search of calls

MEDIA = frozenset({"image", "image_url", "audio", "input_audio", "video_url", "file", "file_id", "file_data", "file_url"})


# -- requests ----------------------------------------------------------------------------------------------------------


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None         # other names of it
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    # Clients send an assistant's message back as they got it, with these empty.
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    images: Any = None
    # Hints: notes of client libraries, or for servers that bill by the cache.
    parsed: Any = None
    provider_specific_fields: Any = None
    thinking_blocks: Any = None
    reasoning_details: Any = None
    reasoning_items: Any = None
    cache_control: Any = None
    metadata: Any = None
    is_error: Any = None

    def __post_init__(self) -> None:
        """Between two messages of a long conversation other threads may run: the decoder alone would not let them."""

    def plain(self, where: str, strict: bool = False) -> dict[str, Any]:
        """In the chat template's form. `developer` is the newer name of `system`, `function` the older of `tool`. `strict`: parts
        keep fields that a text does not have, and are refused for them."""
        if self.role not in ROLES:
            raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}; got {shown(self.role)}", field=f"{where}.role")
        for name in ("annotations", "audio", "images"):
            if getattr(self, name):
                raise Unsupported(f"{where}.{name} is not supported by this server; leave it out", field=f"{where}.{name}")
        message: dict[str, Any] = {
            "role": {"developer": "system", "function": "tool"}.get(self.role, self.role),
            "content": self._content(strict),
        }
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            if message["role"] != "tool":
                raise BadRequest(f"{where}.tool_call_id belongs to messages of role tool only", field=f"{where}.tool_call_id")
            message["tool_call_id"] = self.tool_call_id
        thoughts = (self.reasoning_content, self.reasoning, self.thinking)
        if (thought := next((each for each in thoughts if each is not None), None)) is not None:
            message["reasoning_content"] = thought
        if self.tool_calls or self.function_call:
            if self.role != "assistant":
                raise BadRequest(f"{where}.tool_calls belongs to messages of role assistant only", field=f"{where}.tool_calls")
            message["tool_calls"] = self._calls(where)
        return message

    def _content(self, strict: bool) -> str | list[dict[str, Any]] | None:
        if self.content is None:
            return self.refusal
        if isinstance(self.content, str):
            return self.content
        refusals = ({"type": "text", "text": part.get("refusal")} for part in self.content if part.get("type") == "refusal")
        parts = [next(refusals) if part.get("type") == "refusal" else part for part in self.content]
        return parts if strict else [only_text(part) for part in parts]

    def _calls(self, where: str) -> list[dict[str, Any]]:
        if self.tool_calls and self.function_call:
            raise BadRequest(f"{where} has tool_calls and function_call; give one of them", field=where)
        calls = self.tool_calls or [{"type": "function", "function": self.function_call}]
        for place, call in enumerate(calls):
            at = f"{where}.tool_calls[{place}]"
            match call:
                case {"function": {"name": str(name), "arguments": str() | Mapping()}} if name:
                    pass
                case _:
                    raise BadRequest(f"{at}.function must be an object with a name and arguments", field=f"{at}.function")
            if call.get("type", "function") != "function":
                raise BadRequest(f"{at}.type must be 'function'; got {shown(call['type'])}", field=f"{at}.type")
        return calls


class ThinkingSwitch(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """As clients of DeepSeek, GLM and Kimi send it. Only max_tokens limits the reasoning."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = None
    clear_thinking: bool | None = None   # of GLM: whether earlier thoughts are left out; the template decides
    keep: Any = None                     # of Kimi: the same


class ChatRequest(GenerationRequest, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None        # for templates that support them
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None        # the older names of tools and tool_choice
    function_call: Any = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None               # false: the reasoning is part of the content
    # The same by llama.cpp's values, and by Groq's: raw is part of the content, hidden is left out.
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy", "raw", "parsed", "hidden"] | None = None
    enable_thinking: bool | None = None                  # a variable of the template
    thinking: ThinkingSwitch | None = None

    prediction: Any = None               # text that the answer is expected to follow; it changes only the speed

    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    moderation: Any = None
    chat_template: Any = None

    TOLERANT: ClassVar[tuple[str, ...]] = ("messages",)
    REFUSED: ClassVar[dict[str, tuple[Any, ...]]] = GenerationRequest.REFUSED | {
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "moderation": (),
        "chat_template": (),
    }

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Without a limit in the request or the model's defaults, an answer may fill the context."""
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise BadRequest("max_tokens and max_completion_tokens differ; give one", field="max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs needs logprobs to be true", field="top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            message = f"top_logprobs must be an integer between 0 and {MAX_LOGPROBS}, got {self.top_logprobs}"
            raise BadRequest(message, field="top_logprobs")
        most = limits.pop() if limits else defaults.get("max_tokens")
        params = self.sampling(most, (self.top_logprobs or 0) if self.logprobs else None, defaults)
        params.structured_outputs = self._language()
        params.prediction = predicted_text(self.prediction)
        self.prediction = None                           # it may be megabytes, and is in the parameters
        return params

    @property
    def length_field(self) -> str:
        return super().length_field if self.max_completion_tokens is None else "max_completion_tokens"

    def _language(self) -> StructuredOutputs | None:
        """The answer's grammar: calls if they are required, else the requested one; with tools, either."""
        use, asked = self.tool_use(), self.structured()
        if (schema := use.schema()) is not None:
            given = next((name for name in ("structured_outputs", *GRAMMARS) if getattr(self, name) is not None), "")
            if given:                                    # response_format only concerns answers without calls
                message = f"{given} leaves no room for the calls that tool_choice requires; give one of the two"
                raise BadRequest(message, field=given)
            # Without blanks: a weak model may write them for ever.
            return structured_outputs("tools", json=schema, disable_any_whitespace=True)
        if asked is None or use.mode != "auto":
            return asked
        if asked.kind not in ("json", "json_object"):
            message = f"structured_outputs.{asked.kind} leaves no room for tools; set tool_choice to 'none'"
            raise BadRequest(message, field=f"structured_outputs.{asked.kind}")
        answer = json.loads(asked.json) if isinstance(asked.json, str) else {"type": "object"}
        return structured_outputs("tools", json=answer_or_calls_schema(answer, use))

    def tool_use(self) -> ToolUse:
        if not self.functions:
            if self.function_call not in (None, "none", "auto"):
                raise BadRequest("function_call needs functions", field="function_call")
            return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls is not False)
        if self.tools:
            raise BadRequest("tools and functions are two names of the same field; give one", field="tools")
        tools = [
            {"type": "function", "function": plain_function(each, f"functions[{place}]")}
            for place, each in enumerate(self.functions)
        ]
        match self.function_call:
            case None | "none" | "auto":
                choice: Any = self.function_call
            case {"name": str(name)} as named:
                only(named, "function_call", "name")
                choice = {"type": "function", "function": {"name": name}}
            case _:
                message = 'function_call must be "none", "auto" or {"name": …}; got ' + shown(self.function_call)
                raise BadRequest(message, field="function_call")
        return tool_use(tools, choice, parallel=False)

    def conversation(self, strict: bool = False) -> list[dict[str, Any]]:
        if not self.messages:
            raise BadRequest("messages must be a list with at least one message", field="messages")
        return [message.plain(f"messages[{place}]", strict) for place, message in enumerate(self.messages)]

    def template(self) -> dict[str, Any]:
        """The chat template's variables apart from the messages; a template reads those it knows."""
        variables: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            if self.reasoning_effort == "none":
                variables |= {"enable_thinking": False, "thinking": False}
        if self.thinking is not None:
            variables |= dict.fromkeys(("enable_thinking", "thinking"), self.thinking.type != "disabled")
        if self.enable_thinking is not None:
            variables["enable_thinking"] = self.enable_thinking
        if self.verbosity is not None:
            variables["verbosity"] = self.verbosity
        if self.documents is not None:
            variables["documents"] = self.documents
        variables |= self.chat_template_kwargs or {}
        given: dict[str, Any] = {
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
            "chat_template_kwargs": variables or None,
            "tools": list(self.tool_use().tools) or None,
        }
        if self.add_special_tokens is not None:
            given["add_special_tokens"] = self.add_special_tokens
        return given

    def forget_prompt(self) -> None:
        """Free what only the prompt needed: it is made, and the answer may take minutes."""
        self.messages = self.messages[-1:] if self.echo else []
        self.documents = self.tools = self.chat_template_kwargs = None
        self.functions = self.functions and self.functions[:1]           # answers have the names of that time
        self.forget_params()

    def echoed(self) -> str:
        """The text before the answer: the last message, if echo is set and the answer continues it."""
        if not self.echo:
            return ""
        last = self.messages[-1]
        if last.role != "assistant" or last.content is None:
            return ""
        return last.content if isinstance(last.content, str) else "\n".join(str(part.get("text")) for part in last.content)


def predicted_text(given: Any) -> str | None:
    """OpenAI's prediction: {"type": "content", "content": text or a list of text parts}."""
    match given:
        case None:
            return None
        case {"type": "content", "content": str(text)}:
            return text
        case {"type": "content", "content": list(parts)} if all(
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
        ):
            return "".join(part["text"] for part in parts)
    message = 'prediction must be {"type": "content", "content": …} with a text or a list of text parts; got ' + shown(given)
    raise BadRequest(message, field="prediction")


# -- answers -----------------------------------------------------------------------------------------------------------


class ChatWriter(Writer):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    one_prompt = True

    def __init__(
        self,
        request: ChatRequest,
        params: SamplingParams,
        request_id: str,
        model: str,
        tokenizer: Tokenizer | None,
        reading: Reading | None = None,
    ) -> None:
        super().__init__(request, params, request_id, model, tokenizer)
        self._reading = reading or Reading()
        self._parsers: dict[int, MessageParser | None] = {}      # by choice
        if self._reading.parses:
            self.bytes_per_character = BYTES_PER_PARSED
        self._echoed = request.echoed()
        self._old_names = bool(request.functions)                # function_call instead of tool_calls
        self._hide_reasoning = request.include_reasoning is False or request.reasoning_format == "hidden"
        self._joins_reasoning = request.separate_reasoning is False or request.reasoning_format in ("none", "raw")

    def prompt_bytes(self, output: RequestOutput) -> int:
        return super().prompt_bytes(output) + len(self._echoed)

    # -- streamed ------------------------------------------------------------------------------------------------------

    def _chunks(self, output: RequestOutput, index: int, delta: AnswerDelta) -> list[Any]:
        chunks = [] if index in self._begun else [self._first_chunk(output, index)]
        deltas, finish = self._new(index, delta)
        told = delta.logprobs or (self._wants_token_ids and delta.token_ids)
        if not deltas and (told or not (chunks or finish)):
            # Tokens without text. Where the text is parsed, an empty content would begin a part of the message.
            deltas.append(ChatDelta(content="" if self._parsers[index] is None else None))
        if finish:
            deltas.append(ChatDelta())                   # as OpenAI does: clients stop at a reason, and ignore text beside it
        news = [ChatChunkChoice(index, each) for each in deltas]
        if news:
            if delta.logprobs:
                news[0].logprobs = self._logprobs(delta.token_ids, delta.logprobs)
            if self._wants_token_ids:
                for chunk in news:
                    chunk.token_ids = []
                news[0].token_ids = delta.token_ids
            if finish:
                news[-1].finish_reason, news[-1].stop_reason = finish, delta.stop_reason
        return chunks + news

    def _first_chunk(self, output: RequestOutput, index: int) -> ChatChunkChoice:
        """The role, and what is sent once per choice."""
        self._begun.add(index)
        parser = self._parsers[index] = self._reading.parser()
        first = ChatChunkChoice(index, ChatDelta(role="assistant", content="" if parser is None else None))
        if self._echoed:
            first.delta.content = self._echoed
        if self._repeated.has_logprobs:
            first.prompt_logprobs = self._prompt_logprobs(output)
        return first

    def _new(self, index: int, delta: AnswerDelta) -> tuple[list[ChatDelta], str | None]:
        """(a delta's text as parts of the message, its finish reason)."""
        finish, parser = delta.finish_reason, self._parsers[index]
        if parser is None:
            return [ChatDelta(content=delta.text)] if delta.text else [], finish
        events = parser.feed(delta.text)
        if finish:
            events += parser.finish(_is_cut(finish, delta.stop_reason))
        return list(self._deltas(events)), self._finish(finish, parser)

    def _text_choice(self, index: int, text: str) -> ChatChunkChoice | None:
        return ChatChunkChoice(index, ChatDelta(content=text)) if self._parsers[index] is None else None

    def _deltas(self, events: list[Event]) -> Iterator[ChatDelta]:
        """Deltas of one kind each, in order: clients open and close the parts of a message as they come."""
        calls: list[ToolCallDelta] = []
        for event in events:
            match event:
                case CallStart(index, name):
                    calls.append(ToolCallDelta(index, FunctionDelta(name, ""), self._reading.new_id(), "function"))
                    continue
                case CallArguments(index, text):
                    if calls and calls[-1].index == index:
                        calls[-1].function.arguments = (calls[-1].function.arguments or "") + text
                    else:
                        calls.append(ToolCallDelta(index, FunctionDelta(arguments=text)))
                    continue
            if calls:
                yield self._call_delta(calls)
                calls = []
            if isinstance(event, Content) or self._joins_reasoning:
                yield ChatDelta(content=event.text)
            elif not self._hide_reasoning:
                yield ChatDelta(reasoning_content=event.text, reasoning=event.text)
        if calls:
            yield self._call_delta(calls)

    def _call_delta(self, calls: list[ToolCallDelta]) -> ChatDelta:
        return ChatDelta(function_call=calls[0].function) if self._old_names else ChatDelta(tool_calls=calls)

    def _finish(self, finish: str | None, parser: MessageParser) -> str | None:
        """`tool_calls` says that all of them can be made: not where a model ended its answer inside one, or broke one off."""
        if finish != "stop" or not parser.num_calls or not parser.calls_are_whole:
            return finish
        return "function_call" if self._old_names else "tool_calls"

    def _add_prompt_tokens(self, reply: Reply, outputs: list[RequestOutput]) -> None:
        super()._add_prompt_tokens(reply, outputs)
        if self._repeated.has_logprobs:
            reply.prompt_logprobs = self._prompt_logprobs(outputs[0])

    # -- whole ---------------------------------------------------------------------------------------------------------

    def _choice(self, output: RequestOutput, index: int, answer: CompletionOutput) -> ChatChoice:
        logprobs = None
        if answer.logprobs is not None:
            logprobs = self._logprobs(answer.token_ids, answer.logprobs)
        parser = self._parsers[index] = self._reading.parser()
        finish = answer.finish_reason
        if parser is None:
            message = AssistantMessage(answer.text)
        else:
            message = self._message(parser.feed(answer.text) + parser.finish(_is_cut(finish, answer.stop_reason)))
            finish = self._finish(finish, parser)
        if self._echoed:
            message.content = self._echoed + (message.content or "")
        choice = ChatChoice(index, message, logprobs, finish, answer.stop_reason, token_ids=None)
        if self._repeated.has_logprobs:
            choice.prompt_logprobs = self._prompt_logprobs(output)
        if self._wants_token_ids:
            choice.token_ids = answer.token_ids
        return choice

    def _message(self, events: list[Event]) -> AssistantMessage:
        shown = (Content, Reasoning) if self._joins_reasoning else (Content,)
        content = "".join(event.text for event in events if isinstance(event, shown))
        thought = "".join(event.text for event in events if isinstance(event, Reasoning) and Reasoning not in shown)
        calls: list[ToolCall] = []
        arguments: dict[int, list[str]] = {}
        for event in events:
            if isinstance(event, CallStart):
                calls.append(ToolCall(self._reading.new_id(), FunctionCall(event.name, "")))
            elif isinstance(event, CallArguments):
                arguments.setdefault(event.index, []).append(event.text)
        for place, call in enumerate(calls):
            call.function.arguments = "".join(arguments.get(place, []))
        message = AssistantMessage(content or None)
        if thought and not self._hide_reasoning:
            message.reasoning_content = message.reasoning = thought
        if calls and self._old_names:
            message.function_call = calls[0].function
        elif calls:
            message.tool_calls = calls
        return message

    # -- both ----------------------------------------------------------------------------------------------------------

    def _usage_of(self, outputs: list[RequestOutput]) -> Usage:
        return Usage.of(outputs, self.reasoning_tokens(outputs))

    def reasoning_tokens(self, outputs: list[RequestOutput]) -> int:
        """Of all answers, as far as they were parsed."""
        answers = [answer for output in outputs for answer in output.outputs]
        return sum(self._reasoning_tokens_of(index, answer) for index, answer in enumerate(answers))

    def _reasoning_tokens_of(self, index: int, answer: CompletionOutput) -> int:
        parser = self._parsers.get(index)
        return 0 if parser is None else parser.reasoning_tokens(answer.text_offsets)

    def _logprobs(self, token_ids: list[int], logprobs: TokenLogprobs) -> ChatLogprobs:
        """Each entry is encoded already: as objects, one with twenty alternatives takes 20 KB."""
        content = []
        for token, at in zip(token_ids, logprobs, strict=True):
            places = ranked(at, self._params.logprobs or 0)
            top = [TopLogprob(self._text(each), value, self._bytes(each)) for each, value in places]
            entry = TokenLogprob(self._text(token), finite(at[token].logprob), self._bytes(token), top)
            content.append(encoded_alone(entry))
        return ChatLogprobs(content)


def only_text(part: dict[str, Any]) -> dict[str, Any]:
    """A part of text without notes of its client. One that brings something else with it stays as it is, and is refused."""
    is_text = part.get("type") == "text" and "text" in part and not MEDIA & part.keys()
    return {"type": "text", "text": part["text"]} if is_text else part


def _is_cut(finish: str | None, stop: int | str | None) -> bool:
    """Whether the answer ended before the model did: at the length limit, or at a stop string."""
    return finish == "length" or (finish == "stop" and isinstance(stop, str))
