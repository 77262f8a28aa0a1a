"""`/v1/models` and `/tokenizer_info`: the served model as OpenAI's clients and as Anthropic's know it."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.server.api.anthropic import messages_api as anthropic
from ridgeline.server.api.vllm.tokenize import TokenizerInfo
from ridgeline.server.http.error_bodies import is_anthropic
from ridgeline.server.http.stream import json_response
from ridgeline.server.service import Service


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    root: str                            # what the server was started with: clients load their tokenizer from it
    object: str = "model"
    owned_by: str = "ridgeline"
    parent: None = None
    permission: tuple[()] = ()
    quality: str = ""                    # what quantised weights cost, from their card


def routes(service: Service) -> list[Route]:
    def card(name: str) -> ModelCard:
        service.require_ready()
        llm = service.llm
        assert llm.ready is not None
        return ModelCard(name, service.created, llm.ready.max_model_len, llm.config.model.model or service.name,
                         quality=service.quality)

    def anthropic_card(name: str) -> anthropic.ModelInfo:
        mine = card(name)
        return anthropic.ModelInfo.of(mine.id, mine.created, mine.max_model_len)

    async def models(request: Request) -> Response:
        if is_for_anthropic(request):
            return json_response(anthropic.ModelList.of([anthropic_card(name) for name in service.names]))
        return json_response({"object": "list", "data": [card(name) for name in service.names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        service.check_name(name)
        return json_response(anthropic_card(name) if is_for_anthropic(request) else card(name))

    async def tokenizer_info(request: Request) -> Response:
        longest = card(service.name).max_model_len
        return json_response(TokenizerInfo.of(service.llm.get_tokenizer(), longest))

    return [
        Route("/tokenizer_info", tokenizer_info),
        Route("/v1/models", models),
        Route("/v1/models/", models),        # else it is the model with an empty name
        Route("/v1/models/{name:path}", model),
    ]


def is_for_anthropic(request: Request) -> bool:
    return is_anthropic(request.scope["path"], request.scope["headers"])
