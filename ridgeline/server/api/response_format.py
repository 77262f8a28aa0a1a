"""`response_format`: what OpenAI's clients send, and the forms of other servers' clients, as fields of StructuredOutputs.

| form | of |
|---|---|
| `{"type": "json_object", "schema": …}` | llama.cpp, Fireworks |
| `{"type": "json_schema", "schema": …}` | Together |
| `{"type": "json_object", "value": …}`, `{"type": "json", "value": …}` | TGI; huggingface_hub writes every JSON schema so |
| `{"type": "regex", "value": …}`, `{"type": "regex", "pattern": …}` | TGI; Together |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.errors import BadRequest, shown
from ridgeline.server.parse.closed_schema import closed

TYPES = ("text", "json_object", "json_schema", "regex")


def asked_format(given: Any) -> dict[str, Any] | None:
    """None if the answer may be any text."""
    if given is None:
        return None
    form = _as_openai_writes(given) if isinstance(given, Mapping) else {}
    kind = form.get("type")
    if kind not in TYPES:
        message = f"response_format.type must be text, json_object, json_schema or regex; got {shown(given)}"
        raise BadRequest(message, field="response_format.type")
    for name, value in form.items():
        if name == "json_schema" and kind != name and value is not None:
            message = f"response_format.json_schema belongs to the type json_schema; this one is {kind}"
            raise BadRequest(message, field="response_format.json_schema")
        if name not in ("type", "json_schema", *(("pattern",) if kind == "regex" else ())) and value is not None:
            raise BadRequest(f"response_format has the unknown field {shown(name)}", field="response_format")
    if kind == "regex":
        return {"regex": _pattern_of(form)}
    if kind == "json_schema":
        return {"json": closed(_schema_of(form.get("json_schema")))}
    return {"json_object": True} if kind == "json_object" else None


def _as_openai_writes(given: Mapping[str, Any]) -> dict[str, Any]:
    """With a schema as `json_schema`, and a regular expression as `pattern`."""
    match given:
        case {"type": "json_object" | "json_schema", "schema": Mapping() as schema, **rest} if rest.get("json_schema") is None:
            return {name: value for name, value in rest.items() if name != "json_schema"} | _json_schema(schema)
        case {"type": "json_object" | "json", "value": Mapping() as schema, **rest}:
            return rest | _json_schema(schema)
        case {"type": "regex", "value": str(pattern), **rest} if rest.get("pattern") is None:
            return rest | {"type": "regex", "pattern": pattern}
    return dict(given)


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _pattern_of(form: Mapping[str, Any]) -> str:
    pattern = form.get("pattern")
    if not isinstance(pattern, str):
        raise BadRequest("response_format of the type regex needs a pattern, which is a text", field="response_format.pattern")
    return pattern


def _schema_of(given: Any) -> Mapping[str, Any]:
    """The schema in response_format.json_schema."""
    match given:
        case {"schema": Mapping() as schema, **rest}:
            for name in rest:
                if name not in ("name", "description", "strict"):
                    message = f"response_format.json_schema has the unknown field {shown(name)}"
                    raise BadRequest(message, field="response_format.json_schema")
            return schema
    message = "response_format.json_schema needs a name and a schema, which is an object"
    raise BadRequest(message, field="response_format.json_schema")
