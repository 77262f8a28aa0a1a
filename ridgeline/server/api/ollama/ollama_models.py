"""Ollama's /api/tags, /api/ps, /api/show and /api/version: the one served model as Ollama's clients list it."""

from __future__ import annotations

import asyncio
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.engine.client.long_work import away_if_long
from ridgeline.engine.client.request_context import Caller
from ridgeline.models.model_config import load_model_config
from ridgeline.process.hub_cache import gguf_groups
from ridgeline.resolve import model_path
from ridgeline.server.api.ollama.ollama_answers import timestamp
from ridgeline.server.api.ollama.ollama_requests import LATEST, ShowRequest, plain_name
from ridgeline.server.http.body import parse_body
from ridgeline.server.http.stream import json_response
from ridgeline.server.parse.formats.known_formats import reasoning_format
from ridgeline.server.service import Service
from ridgeline.version import __version__

# Clients compare it with the version that they need. It is Ollama's whose API this is; `ridgeline` beside it is ours.
OLLAMA_VERSION = "0.12.6"
# At the end of a GGUF file's name, before the number of a part.
_QUANTIZATION = re.compile(r"[-._]((?:I?Q\d|B?F16|F32)\w*)(?:-\d{5}-of-\d{5})?$", re.IGNORECASE)
NEVER = "2318-01-01T00:00:00Z"       # when the model is unloaded: it is not


class Details(msgspec.Struct):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str
    context_length: int
    embedding_length: int


class ListedModel(msgspec.Struct):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    capabilities: list[str]


class ListedModels(msgspec.Struct):
    models: list[ListedModel]


class RunningModel(msgspec.Struct):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(msgspec.Struct):
    models: list[RunningModel]


class Shown(msgspec.Struct):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct):
    version: str
    ridgeline: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What the model's files say; read once."""

    details: Details
    info: dict[str, Any]
    num_bytes: int
    digest: str                      # of the files' names and sizes: hashing their contents would take minutes
    modified: str
    capabilities: list[str]
    template: str


def read_facts(service: Service) -> Facts:
    path = model_path(service.llm.config)
    config = load_model_config(path)
    files = model_files(Path(path))
    sizes = [(file.name, file.stat()) for file in files if file.is_file()]
    listed = "\n".join(f"{name} {stat.st_size}" for name, stat in sizes)
    family, count = config.family.name, config.num_parameters
    assert service.llm.ready is not None
    longest = service.llm.ready.max_model_len
    is_gguf = Path(path).suffix == ".gguf"
    quantization = _QUANTIZATION.search(Path(path).stem) if is_gguf else None
    details = Details(
        "", "gguf" if is_gguf else "safetensors", family, [family], _short(count),
        quantization[1].upper() if quantization else service.llm.ready.dtype, longest, config.hidden_size,
    )
    info = {
        "general.architecture": family, "general.parameter_count": count, "general.basename": service.name,
        f"{family}.context_length": longest, f"{family}.embedding_length": config.hidden_size,
        f"{family}.block_count": config.num_layers, f"{family}.attention.head_count": config.num_heads,
        f"{family}.attention.head_count_kv": config.num_kv_heads, f"{family}.vocab_size": config.vocab_size,
    }
    template = (service.tokenizer.chat_template or "") if service.tokenizer is not None else ""
    # "embedding" alone of models that do nothing else: clients leave those that have it out of their lists for chat.
    capabilities = ["embedding"] if config.headless else ["completion", *(["tools"] if template else [])]
    if not config.headless and reasoning_format("auto", template) is not None:
        capabilities.append("thinking")
    modified = max((stat.st_mtime for _, stat in sizes), default=service.created)
    digest = hashlib.sha256(listed.encode()).hexdigest()
    total = sum(stat.st_size for _, stat in sizes)
    return Facts(details, info, total, digest, timestamp(modified), capabilities, template)


def model_files(path: Path) -> list[Path]:
    """Of a directory, or of a GGUF file with all of its parts."""
    if path.is_dir():
        return sorted(path.iterdir())
    groups = gguf_groups(each.name for each in path.parent.glob("*.gguf"))
    return [path.with_name(part) for part in groups.get(path.name, [path.name])]


def _short(count: int) -> str:
    """A number of parameters as in model names: 135M, 1.5B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


async def read_show(service: Service, caller: Caller, body: bytes) -> str:
    """The model's name, which is known here."""
    asked = await away_if_long(len(body), lambda: parse_body(ShowRequest, body))
    service.check_name(plain_name(asked.model or asked.name or ""))
    return service.name


class Models:
    """The endpoints about the model."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._facts: Facts | None = None

    async def _known(self) -> Facts:
        self._service.require_ready()
        if self._facts is None:
            self._facts = await asyncio.to_thread(read_facts, self._service)
        return self._facts

    def _names(self) -> list[str]:
        return [name if ":" in name else name + LATEST for name in self._service.names]

    async def tags(self, request: Request) -> Response:
        facts = await self._known()
        return json_response(ListedModels([
            ListedModel(name, name, facts.modified, facts.num_bytes, facts.digest, facts.details, facts.capabilities)
            for name in self._names()
        ]))

    async def running(self, request: Request) -> Response:
        facts = await self._known()
        longest, on_gpu = facts.details.context_length, self._service.llm.ready and self._service.llm.ready.device != "cpu"
        in_vram = facts.num_bytes if on_gpu else 0
        return json_response(RunningModels([
            RunningModel(name, name, facts.num_bytes, facts.digest, facts.details, NEVER, in_vram, longest)
            for name in self._names()[:1]
        ]))

    async def show(self, service: Service, caller: Caller, asked: str) -> Shown:
        facts = await self._known()
        defaults = service.llm.sampling_defaults.fields
        return Shown(
            f"FROM {service.name}\n", "\n".join(f"{name} {value}" for name, value in defaults.items()), facts.template,
            facts.details, facts.info, facts.capabilities, facts.modified,
        )

    async def version(self, request: Request) -> Response:
        return json_response(OllamaVersion(OLLAMA_VERSION, __version__))
