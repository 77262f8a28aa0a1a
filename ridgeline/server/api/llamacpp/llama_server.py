"""llama.cpp's own endpoints: /completion, /props, /slots, /apply-template, and /infill, which is refused by name."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.engine.client.long_work import away_if_long
from ridgeline.engine.client.processor import Prompt
from ridgeline.engine.client.request_context import Caller
from ridgeline.errors import Unsupported
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.llamacpp.llama_answers import settings
from ridgeline.server.api.llamacpp.llama_requests import LlamaRequest, Slot, TemplateReply, prompt_of, prompts
from ridgeline.server.api.openai.chat import ChatRequest
from ridgeline.server.api.openai.completions import CompletionRequest
from ridgeline.server.api.prepare import checked_params, prompt_tokens
from ridgeline.server.api.prepared import LlamaForm, Prepared
from ridgeline.server.http.body import parse_body
from ridgeline.server.http.stream import json_response
from ridgeline.server.server_errors import Unavailable, WrongPath
from ridgeline.server.service import Service
from ridgeline.version import __version__


async def prepare_completion(service: Service, caller: Caller, body: bytes) -> Prepared:
    def work() -> tuple[LlamaRequest, CompletionRequest]:
        asked = parse_body(LlamaRequest, body)
        return asked, msgspec.convert(asked.completion(), CompletionRequest)

    asked, request = await away_if_long(len(body), work)
    tokenize = service.llm.text_tokens
    request.logit_bias = await asked.biases(tokenize) or None
    made: list[Prompt] = [await prompt_of(each, tokenize) for each in prompts(asked.prompt)]
    request.max_tokens = 1 if asked.limit == 0 else asked.limit
    params = checked_params(service, request)
    if asked.limit is None:
        params.max_tokens = service.llm.sampling_defaults.fields.get("max_tokens")
    asked.forget_prompt()
    request.forget_params()
    return Prepared(LlamaForm(request, asked), params, made, "cmpl-")


async def prepare_alias(service: Service, caller: Caller, body: bytes) -> Prepared:
    """/completions is another name of /completion in llama.cpp. OpenAI's clients with a base URL without /v1 arrive here:
    they name a model, and could not read the answer."""
    prepared = await prepare_completion(service, caller, body)
    if prepared.form.request.model:
        message = "POST /completions with a model does not exist here; did you mean /v1/completions, or llama.cpp's /completion?"
        raise WrongPath(message)
    return prepared


async def apply_template(service: Service, caller: Caller, body: bytes) -> TemplateReply:
    request = await away_if_long(len(body), lambda: parse_body(ChatRequest, body))
    service.check(request)
    return TemplateReply(service.llm.get_tokenizer().decode(await prompt_tokens(service, request, len(body))))


async def infill(service: Service, caller: Caller, body: bytes) -> None:
    raise Unsupported("/infill is not supported by this server; send prompt and suffix to /v1/completions")


def routes(service: Service) -> list[Route]:
    llm = service.llm

    async def props(request: Request) -> Response:
        service.require_ready()
        assert llm.ready is not None
        longest, tokenizer = llm.ready.max_model_len, service.tokenizer
        defaults = SamplingParams(**{"max_tokens": None} | dict(llm.sampling_defaults.fields))
        return json_response({
            "default_generation_settings": {
                "id": 0, "id_task": -1, "n_ctx": longest, "speculative": False, "is_processing": llm.running > 0,
                "params": settings(defaults, longest),
            },
            "total_slots": llm.ready.max_num_seqs, "model_alias": service.name,
            "model_path": llm.config.model.model or service.name,
            "chat_template": (tokenizer.chat_template or "") if tokenizer is not None else "",
            "bos_token": (tokenizer.bos_token or "") if tokenizer is not None else "",
            "eos_token": (tokenizer.eos_token or "") if tokenizer is not None else "",
            "modalities": {"vision": False, "audio": False}, "is_sleeping": False, "build_info": f"ridgeline-{__version__}",
        })

    async def slots(request: Request) -> Response:
        service.require_ready()
        assert llm.ready is not None
        count, longest = llm.ready.max_num_seqs, llm.ready.max_model_len
        if request.query_params.get("fail_on_no_slot") and llm.running >= count:
            raise Unavailable("no slot is free")
        return json_response([Slot(number, longest, number < llm.running) for number in range(count)])

    return [Route("/props", props), Route("/slots", slots)]


