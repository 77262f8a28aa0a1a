"""What a person finds who opens the server's address: `/` and `/v1` lead to the dashboard, `/docs` lists the API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ridgeline.server.api.docs_page import docs_page
from ridgeline.server.http.root_path import plain_prefix
from ridgeline.server.http.stream import json_response
from ridgeline.server.service import Service
from ridgeline.version import __version__


def routes(service: Service) -> list[Route]:
    prefix = plain_prefix(service.options.root_path)
    places = {
        "openai_base_url": f"{prefix}/v1", "docs": f"{prefix}/docs", "openapi": f"{prefix}/openapi.json",
        "dashboard": f"{prefix}/dashboard", "health": f"{prefix}/health",
    }

    async def index(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse(f"{prefix}/dashboard", 307)
        return json_response({"name": "Ridgeline", "version": __version__, **places})

    async def with_slash(request: Request) -> Response:
        return RedirectResponse(f"{prefix}/dashboard", 307)

    async def docs(request: Request) -> Response:
        return await docs_page(prefix)

    return [Route("/", index), Route("/v1", index), Route("/v1/", index), Route("/docs", docs), Route("/dashboard/", with_slash)]
