"""From a request's body to what the engine runs: parsed, checked, its prompt as token ids, with the writer of its answer.

    body ─ parse_body ─▶ ChatRequest, CompletionRequest ─ params() ─▶ SamplingParams ─┐
                         other dialects ─ chat() ─▶ ChatRequest ─ chat template ─▶ prompts ─▶ Prepared

No ASGI, no engine: for long bodies these functions run in a process of their own (server/long_bodies). Sending a request to the
engine and its answer to the client is server/endpoints' work.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

from ridgeline.engine.client.long_work import away_if_long, checkpoint
from ridgeline.engine.client.processor import Prompt
from ridgeline.engine.client.prompt_limits import PromptTally
from ridgeline.engine.client.request_context import Caller
from ridgeline.errors import BadRequest
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.anthropic import messages_api as anthropic
from ridgeline.server.api.generation import FIT, GenerationRequest
from ridgeline.server.api.openai import responses_answer
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.api.openai.completions import CompletionRequest, middle_marks
from ridgeline.server.api.openai.responses_continued import Continued, recalled_bytes
from ridgeline.server.api.openai.responses_request import ResponsesRequest
from ridgeline.server.api.prepared import ChatForm, CompletionForm, MessagesForm, Prepared, ResponsesForm
from ridgeline.server.api.request_checks import forget
from ridgeline.server.api.vllm.batch_chat import BatchChatRequest
from ridgeline.server.api.vllm.tokenize import (
    DetokenizeReply,
    DetokenizeRequest,
    PlainTokens,
    TokenizeReply,
    TokenizeRequest,
)
from ridgeline.server.http.body import parse_body
from ridgeline.server.parse.formats.known_formats import needs_plain_text
from ridgeline.server.parse.tool_prompt import in_plain_text, mended, tells_of_tools
from ridgeline.server.parse.tools import Reading, reading
from ridgeline.server.service import Service

BYTES_PER_TOKEN = 16                 # of a list of tokens and their texts, as JSON


def templated(service: Service, request: ChatRequest) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A chat's messages, and what else its template gets. Tools that the model's template does not support are written into the
    messages."""
    checkpoint()
    messages, given = request.conversation(service.options.strict_messages), request.template()
    tokenizer = service.tokenizer
    if tokenizer is not None and (given["tools"] or any(map(tells_of_tools, messages))):
        templates = "\n".join(tokenizer.chat_templates.values())
        if needs_plain_text(service.options.tool_call_parser, templates):
            tools, given["tools"] = given["tools"] or [], None
            messages = in_plain_text(messages, tools, templates)
        elif any(message.get("tool_calls") for message in messages):
            messages = mended(messages)
    return messages, given


async def prompt_tokens(service: Service, request: ChatRequest, size: int) -> list[int]:
    """A chat's prompt, by the model's own template. `size`: the bytes of its body."""
    messages, given = await away_if_long(size, lambda: templated(service, request))
    return await service.llm.chat_tokens(messages, num_bytes=size, **given)


async def chat_prompt(
    service: Service, request: ChatRequest, params: SamplingParams, size: int
) -> tuple[list[int], Reading]:
    """A chat's prompt, and how its answers are parsed. `size`: the bytes of its body. The request forgets its prompt."""
    read = await away_if_long(size, lambda: reading(request.tool_use(), params, service.options, service.tokenizer))
    tokens = await prompt_tokens(service, request, size)
    fit(service, request, params)
    if service.tokenizer is not None:
        read.follow(tokens, params, service.tokenizer)
    request.forget_prompt()
    return tokens, read


def checked_params(service: Service, request: ChatRequest | CompletionRequest) -> SamplingParams:
    """The request's sampling parameters, checked."""
    service.check(request)
    with request.naming_its_grammar():
        return request.params(service.llm.sampling_defaults)


async def prepare_chat(service: Service, caller: Caller, body: bytes) -> Prepared:
    def work() -> tuple[ChatRequest, SamplingParams]:
        request = parse_body(ChatRequest, body, service.options.strict_messages)
        return request, checked_params(service, request)

    request, params = await away_if_long(len(body), work)
    tokens, read = await chat_prompt(service, request, params, len(body))
    return Prepared(ChatForm(request, read), params, [tokens], "chatcmpl-")


async def prepare_batch(service: Service, caller: Caller, body: bytes) -> Prepared:
    """Several conversations, one choice each."""
    def work() -> tuple[list[ChatRequest], SamplingParams]:
        asked = parse_body(BatchChatRequest, body, service.options.strict_messages)
        requests = asked.conversations()
        return requests, checked_params(service, requests[0])

    requests, params = await away_if_long(len(body), work)
    service.slots.check(len(requests) * params.n)
    tokens, read = await chat_prompt(service, requests[0], params, len(body))
    prepared = Prepared(ChatForm(requests[0], read), params, [tokens], "chatcmpl-")
    tally = service.llm.tally()
    tally.add(len(tokens))
    for each in requests[1:]:
        await asyncio.sleep(0)                           # short conversations are rendered here: others get a turn between them
        tokens = await prompt_tokens(service, each, len(body))
        tally.add(len(tokens))
        prepared.prompts.append(tokens)
    return prepared


async def prepare_completion(service: Service, caller: Caller, body: bytes) -> Prepared:
    def work() -> tuple[CompletionRequest, SamplingParams, list[Prompt]]:
        request = parse_body(CompletionRequest, body)
        return request, checked_params(service, request), list(request.prompts())

    request, params, prompts = await away_if_long(len(body), work)
    service.slots.check(len(prompts) * params.n)
    if request.suffix:
        prompts = await around_gaps(service, prompts, request.suffix)
    elif request.add_special_tokens is False:
        tally = service.llm.tally()
        prompts = [await without_special(service, each, tally) for each in prompts]
    fit(service, request, params)
    request.prompt = request.suffix = ""                 # they are in the prompts
    request.forget_params()
    return Prepared(CompletionForm(request), params, prompts, "cmpl-")


async def around_gaps(service: Service, prompts: list[Prompt], suffix: str) -> list[Prompt]:
    """Prompts for filling in the middle, between each of `prompts` and `suffix`."""
    if not all(isinstance(each, str) for each in prompts):
        raise BadRequest("suffix needs a prompt of text", field="suffix")
    begin, hole, end = middle_marks(service.llm.get_tokenizer())
    behind = await service.llm.text_tokens(suffix, False)
    made: list[Prompt] = []
    tally = service.llm.tally()
    for prompt in map(str, prompts):
        before = await without_special(service, prompt, tally)
        tally.add(len(behind))
        made.append({"prompt": prompt, "prompt_token_ids": [begin, *before["prompt_token_ids"], hole, *behind, end]})
    return made


async def without_special(service: Service, prompt: Any, tally: PromptTally) -> Any:
    """A prompt's text as token ids, without special tokens."""
    if not isinstance(prompt, str):
        return prompt
    await asyncio.sleep(0)                               # let streams go on between many prompts
    ids = await service.llm.text_tokens(prompt, False)
    tally.add(len(ids))
    return {"prompt": prompt, "prompt_token_ids": ids}


def fit(service: Service, request: GenerationRequest, params: SamplingParams) -> None:
    """truncate_prompt_tokens -1: keep as many of the prompt's last tokens as leave room for max_tokens."""
    if request.truncate_prompt_tokens == FIT:
        assert service.llm.ready is not None
        params.truncate_prompt_tokens = max(1, service.llm.ready.max_model_len - (params.max_tokens or 1))


class ChatLike(Protocol):
    def chat(self) -> dict[str, Any]:
        """The same request in chat's form, as plain data."""


def as_chat(service: Service, asked: ChatLike) -> tuple[ChatRequest, SamplingParams]:
    """A request in another dialect as a chat request, checked like one."""
    checkpoint()
    try:
        plain = msgspec.json.encode(asked.chat())
    except (OverflowError, RecursionError):
        raise BadRequest("the body holds numbers of more than 64 bits, or is nested too deep") from None
    request = parse_body(ChatRequest, plain)
    return request, checked_params(service, request)


async def prepare_messages(service: Service, caller: Caller, body: bytes) -> Prepared:
    def work() -> tuple[anthropic.MessagesRequest, ChatRequest, SamplingParams]:
        asked = parse_body(anthropic.MessagesRequest, body, service.options.strict_messages)
        made = as_chat(service, asked)
        asked.messages, asked.system, asked.tools = [], None, None       # they are in the chat request …
        asked.output_config = asked.output_format = None
        forget(asked, asked.HINTS)                       # … and these in none
        return asked, *made

    asked, request, params = await away_if_long(len(body), work)
    tokens, read = await chat_prompt(service, request, params, len(body))
    return Prepared(MessagesForm(request, read, asked), params, [tokens], "msg_")


async def count_tokens(service: Service, caller: Caller, body: bytes) -> anthropic.TokenCount:
    def work() -> ChatRequest:
        return as_chat(service, parse_body(anthropic.CountRequest, body, service.options.strict_messages))[0]

    request = await away_if_long(len(body), work)
    return anthropic.TokenCount(len(await prompt_tokens(service, request, len(body))))


async def response_chat(
    service: Service, caller: Caller, body: bytes
) -> tuple[Continued, ChatRequest, SamplingParams, int]:
    """A request of the Responses API as a chat request, and the bytes of both. A short one may continue a long stored
    conversation."""
    asked = await away_if_long(len(body), lambda: parse_body(ResponsesRequest, body, service.options.strict_messages))
    key = caller.key

    def work() -> tuple[Continued, ChatRequest, SamplingParams]:
        continued = Continued(asked, service.stored, key)
        return continued, *as_chat(service, continued)

    size = len(body) + recalled_bytes(asked, service.stored, key)
    return *await away_if_long(size, work), size


async def prepare_response(service: Service, caller: Caller, body: bytes) -> Prepared:
    continued, request, params, size = await response_chat(service, caller, body)
    continued.asked.input = ""                           # it is in the chat request
    tokens, read = await chat_prompt(service, request, params, size)
    form = ResponsesForm(request, read, continued.asked, continued.kept)
    return Prepared(form, params, [tokens], "resp_", bool(continued.asked.background))


async def count_input(service: Service, caller: Caller, body: bytes) -> responses_answer.InputTokens:
    _, request, _, size = await response_chat(service, caller, body)
    return responses_answer.InputTokens(len(await prompt_tokens(service, request, size)))


async def tokenize(service: Service, caller: Caller, body: bytes) -> TokenizeReply | PlainTokens:
    def work() -> tuple[TokenizeRequest, ChatRequest | None]:
        request = parse_body(TokenizeRequest, body)
        if request.model is not None:
            service.check_name(request.model)
        return request, as_chat(service, request)[0] if request.messages is not None else None

    request, chat = await away_if_long(len(body), work)
    if request.content is not None:
        ids = await service.llm.text_tokens(request.content, bool(request.add_special), request.parse_special is not False)
        tokenizer, with_pieces = service.llm.get_tokenizer(), bool(request.with_pieces)
        return await away_if_long(BYTES_PER_TOKEN * len(ids) * with_pieces, lambda: PlainTokens.of(ids, tokenizer, with_pieces))
    if chat is not None:
        tokens = await prompt_tokens(service, chat, len(body))
    else:
        tokens = await service.llm.text_tokens(request.prompt or "", request.add_special_tokens is not False)
    assert service.llm.ready is not None
    longest, tokenizer = service.llm.ready.max_model_len, service.llm.get_tokenizer()
    wants_texts = bool(request.return_token_strs)
    return await away_if_long(
        BYTES_PER_TOKEN * len(tokens) * wants_texts, lambda: TokenizeReply.of(tokens, longest, tokenizer, wants_texts)
    )


async def detokenize(service: Service, caller: Caller, body: bytes) -> DetokenizeReply:
    def work() -> DetokenizeReply:
        request = parse_body(DetokenizeRequest, body)
        if request.model is not None:
            service.check_name(request.model)
        return DetokenizeReply.of(request.tokens, service.llm.get_tokenizer())

    return await away_if_long(len(body), work)
