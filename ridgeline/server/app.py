"""The server's routes: every endpoint, over one AsyncLLM. No torch, no pydantic.

server/http/connection_limits limits what a connection may cost; server/lifecycle starts and ends the process.
"""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.errors import RidgelineError
from ridgeline.server.api import first_contact, model_cards, openapi, prepare
from ridgeline.server.api.dialects import ANTHROPIC, LLAMA, OLLAMA, RESPONSES
from ridgeline.server.api.llamacpp import llama_server
from ridgeline.server.api.ollama import ollama_models, ollama_prepare
from ridgeline.server.api.openai import responses_continued
from ridgeline.server.api.openai.embeddings import embed, read_embedding
from ridgeline.server.api.vllm.score import read_pairs, score
from ridgeline.server.background_responses import Responses
from ridgeline.server.endpoints import Generation, Invocations, Question
from ridgeline.server.http.error_bodies import body_for
from ridgeline.server.http.failures import describe, http_error
from ridgeline.server.http.root_path import plain_prefix
from ridgeline.server.http.stream import JsonText, json_response
from ridgeline.server.observe import dashboard, fleet_endpoint, health, prometheus, roofline_endpoint
from ridgeline.server.service import Service
from ridgeline.version import __version__


def make_app(service: Service) -> Starlette:
    chat = Generation(service, prepare.prepare_chat, prompt_field="messages")
    completion = Generation(service, prepare.prepare_completion, prompt_field="prompt")
    messages = Generation(service, prepare.prepare_messages, ANTHROPIC)
    responses = Responses(service, prepare.prepare_response, RESPONSES, "input")
    embeddings = Question(service, read_embedding, prompt_field="input", then=embed)
    scores = Question(service, read_pairs, then=score)
    app = Starlette(
        routes=[
            _post("/v1/chat/completions", chat),
            _post("/v1/chat/completions/batch", Generation(service, prepare.prepare_batch, prompt_field="messages")),
            _post("/v1/completions", completion),
            _post("/v1/messages", messages),
            _post("/v1/messages/count_tokens", Question(service, prepare.count_tokens, ANTHROPIC)),
            _post("/v1/responses", responses),
            _post("/v1/responses/input_tokens", Question(service, prepare.count_input, RESPONSES, "input")),
            _post("/v1/responses/{id}/cancel", responses.cancel),
            *responses_continued.routes(service, responses.stop),
            _post("/v1/embeddings", embeddings),
            _post("/v1/score", scores),
            _post("/invocations", Invocations(
                service, {"messages": chat, "prompt": completion, "input": embeddings, "text_1": scores},
            )),
            _post("/tokenize", Question(service, prepare.tokenize)),
            _post("/detokenize", Question(service, prepare.detokenize)),
            *model_cards.routes(service),
            *first_contact.routes(service),
            *_ollama(service),
            *_llamacpp(service),
            *health.routes(service),
            *_pages(service),
        ],
        exception_handlers={HTTPException: http_error, RidgelineError: _failed, Exception: _failed},
    )
    app.router.redirect_slashes = False
    return app


def _post(path: str, endpoint: Any) -> Route:
    return Route(path, endpoint, methods=["POST"])


def _ollama(service: Service) -> list[Route]:
    models = ollama_models.Models(service)
    return [
        _post("/api/chat", Generation(service, ollama_prepare.prepare_chat, OLLAMA, "messages")),
        _post("/api/generate", Generation(service, ollama_prepare.prepare_generate, OLLAMA, "prompt")),
        _post("/api/embed", Question(service, ollama_prepare.read_embed, OLLAMA, "input", ollama_prepare.embed)),
        _post("/api/embeddings", Question(
            service, ollama_prepare.read_old_embed, OLLAMA, "prompt", ollama_prepare.old_embed,
        )),
        _post("/api/show", Question(service, ollama_models.read_show, OLLAMA, then=models.show)),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.running),
        Route("/api/version", models.version),
    ]


def _llamacpp(service: Service) -> list[Route]:
    return [
        _post("/completion", Generation(service, llama_server.prepare_completion, LLAMA, "prompt")),
        _post("/completions", Generation(service, llama_server.prepare_alias, LLAMA, "prompt")),
        _post("/apply-template", Question(service, llama_server.apply_template, prompt_field="messages")),
        _post("/infill", Question(service, llama_server.infill)),
        *llama_server.routes(service),
    ]


def _pages(service: Service) -> list[Route]:
    """Documents about this server."""
    llm = service.llm

    async def document(request: Request) -> Response:
        return JsonText(await openapi.made_once(openapi.as_json, plain_prefix(service.options.root_path)))

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def metrics_page(request: Request) -> Response:
        return prometheus.metrics_response(llm, service.name, request)

    async def load(request: Request) -> Response:
        return json_response(prometheus.load(llm))

    async def roofline(request: Request) -> Response:
        seconds = roofline_endpoint.window_seconds(request.query_params.get("seconds"))
        engine = roofline_endpoint.chosen(llm, request.query_params.get("engine"))
        found = roofline_endpoint.document(engine, service.name, service.state, seconds, service.quality)
        found.engines = len(llm.engines)
        return json_response(found)

    async def fleet(request: Request) -> Response:
        return json_response(fleet_endpoint.fleet(llm))

    async def page(request: Request) -> Response:
        return dashboard.page()

    return [
        Route("/openapi.json", document),
        Route("/version", version),
        Route("/metrics", metrics_page),
        Route("/load", load),
        Route("/roofline", roofline),
        Route("/fleet", fleet),
        Route("/dashboard", page),
    ]


async def _failed(request: Request, error: Exception) -> Response:
    status, body, headers = describe(error)
    body = body_for(request.scope["path"], request.scope["headers"], status, body)
    response = Response(body, status, media_type="application/json")
    response.raw_headers.extend(headers)
    return response
