"""`GET /docs`: the OpenAPI document as a page, made on the server. No script, and no byte from elsewhere."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from html import escape
from typing import Any

from starlette.responses import Response

from ridgeline.server.api.openapi import document, made_once
from ridgeline.server.http.stream import InPieces
from ridgeline.server.observe.dashboard import headers

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
code, .path { font: 13px/1.5 ui-monospace, monospace; }
details { border: 1px solid #8884; border-radius: 6px; margin: .4rem 0; padding: .3rem .7rem; }
summary { cursor: pointer; } .method { display: inline-block; min-width: 4.2rem; font-weight: 600; }
.what { opacity: .75; } table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid #8882; }
"""
DEEPEST = 3                          # levels of a type that are spelt out


async def docs_page(root_path: str) -> Response:
    nonce = secrets.token_urlsafe(18)
    page = (await made_once(_page, root_path)).replace("{{nonce}}", nonce)
    return InPieces(page, media_type="text/html; charset=utf-8", headers=headers(nonce))


def _page(root_path: str) -> str:
    described = document(root_path)
    schemas = described["components"]["schemas"]
    operations = "\n".join(
        _operation(path, method, operation, schemas)
        for path, methods in described["paths"].items() for method, operation in methods.items()
    )
    title = f"{described['info']['title']} {described['info']['version']}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}: API</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<style nonce="{{{{nonce}}}}">{STYLE}</style></head><body><h1>{escape(title)}</h1>'
        f'<p>Base URL of OpenAI\'s clients: <code>{escape(root_path)}/v1</code>. '
        f'<a href="{escape(root_path)}/openapi.json">openapi.json</a>, <a href="{escape(root_path)}/dashboard">dashboard</a>.'
        f"</p>{operations}</body></html>"
    )


def _operation(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    parts = [f'<span class="method">{method.upper()}</span> <span class="path">{escape(path)}</span> '
             f'<span class="what">{escape(operation["summary"])}</span>']
    body = []
    asked = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if asked is not None:
        body.append("<h4>Request</h4>" + _table(_resolved(asked, schemas), schemas))
    if operation.get("parameters"):
        rows = "".join(f"<tr><td><code>{escape(each['name'])}</code></td><td>{escape(each['in'])}</td><td>"
                       f"{escape(_kind(each['schema'], schemas))}</td></tr>" for each in operation["parameters"])
        body.append(f"<h4>Parameters</h4><table>{rows}</table>")
    content = operation["responses"].get("200", {}).get("content", {})
    answer = content.get("application/json", {}).get("schema")
    if answer is not None:
        body.append("<h4>Answer</h4>" + _table(_resolved(answer, schemas), schemas))
    streams = [kind for kind in content if kind != "application/json"]
    if streams:
        body.append(f"<p>With <code>stream</code>: <code>{escape(', '.join(streams))}</code></p>")
    codes = ", ".join(code for code in operation["responses"] if code != "200")
    body.append(f'<p class="what">Errors: {escape(codes)}</p>')
    return f"<details><summary>{''.join(parts)}</summary>{''.join(body)}</details>"


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rsplit("/", 1)[-1]
    return schemas.get(name, schema)


def _table(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{'required' if name in required else ''}</td>"
        f"<td>{escape(_kind(each, schemas))}</td></tr>"
        for name, each in schema.get("properties", {}).items()
    )
    return f"<table>{rows}</table>" if rows else f"<p><code>{escape(_kind(schema, schemas))}</code></p>"


def _kind(schema: dict[str, Any], schemas: dict[str, Any], depth: int = 0) -> str:
    """A type in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        if depth >= DEEPEST:
            return str(name)
        inner = schemas.get(name, {})
        return f"{name} {{{', '.join(inner.get('properties', {}))}}}" if "properties" in inner else str(name)
    if "anyOf" in schema:
        return " | ".join(_kind(each, schemas, depth + 1) for each in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(map(repr, schema["enum"]))
    return " ".join(_words(schema, schemas, depth)) or "any JSON"


def _words(schema: dict[str, Any], schemas: dict[str, Any], depth: int) -> Iterator[str]:
    if (kind := schema.get("type")) is not None:
        yield str(kind)
    if isinstance(items := schema.get("items"), dict) and items:
        yield f"of {_kind(items, schemas, depth + 1)}"
    bounds = [f"{word} {schema[name]}" for name, word in (("minimum", "from"), ("maximum", "to")) if name in schema]
    yield from bounds
