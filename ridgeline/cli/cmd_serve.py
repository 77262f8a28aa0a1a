"""`ridgeline serve`: starts the OpenAI-compatible server, with a progress bar and a first curl example."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ridgeline.cli.config_options import add_engine_options, add_model, add_options, engine_config, options_of
from ridgeline.cli.other_engines import variable_notes
from ridgeline.cli.terminal import require_model
from ridgeline.config import EngineConfig
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.watchdog import Supervision
from ridgeline.engine.replicas.replica_llm import ReplicaLLM
from ridgeline.engine.replicas.replicated_llm import ReplicatedLLM
from ridgeline.errors import ConfigError
from ridgeline.models.model_config import load_model_config
from ridgeline.process.log import get_logger
from ridgeline.process.progress import progress_bar
from ridgeline.process.standard_streams import say
from ridgeline.process.start_phases import since_start
from ridgeline.quant.quality_card import find_card
from ridgeline.quantize.card import parse_limits, require_quality
from ridgeline.resolve import model_path
from ridgeline.server.http.keys import VARIABLE, Keys, load_keys
from ridgeline.server.lifecycle import run as run_server
from ridgeline.server.options import ServerOptions
from ridgeline.server.service import Service, model_name
from ridgeline.sizes.ledger import KV, WEIGHTS
from ridgeline.version import __version__

logger = get_logger("server")

# Titles of `--help` -> options of the server; the others are under "server".
GROUPS = {
    "security": (
        "api_key", "api_key_file", "insecure_no_auth", "allowed_host", "allowed_origins", "ssl_certfile", "ssl_keyfile",
        "admin_socket",
    ),
    "limits": (
        "max_connections", "max_queued_requests", "max_queued_tokens", "request_timeout", "max_body_bytes",
        "max_stored_responses", "max_stored_bytes", "drain_timeout", "max_engine_restarts", "engine_timeout",
    ),
    "parsers": ("tool_call_parser", "reasoning_parser"),
    "logs and traces": ("access_log", "otlp_traces_endpoint"),
}
_LOOPBACK = ("127.", "::1", "localhost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_options(parser, ServerOptions, "server", GROUPS)
    add_engine_options(parser)
    parser.epilog = "Options of vLLM, SGLang and llama.cpp are understood, too: docs/options.md lists what happens to each."


def run(args: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))        # until the server has its own handler
    config, options = engine_config(args, several=True), options_of(ServerOptions, args)
    for note in variable_notes(os.environ):
        print(f"note: {note}", file=sys.stderr)
    require_model(config)
    keys = load_keys(options)
    quality, path = quality_line(config, options.require_quality), model_path(config)
    headless = path.is_dir() and load_model_config(path).headless
    supervision = Supervision(max_restarts=options.max_engine_restarts, silence=float(options.engine_timeout))
    kind = ReplicatedLLM if config.parallel.data_parallel_size > 1 else AsyncLLM
    llm = kind(**config.flat(), supervision=supervision)
    require_authentication(options, keys)
    with ExitStack() as until_ready:
        tick = until_ready.enter_context(progress_bar(f"loading {model_name(llm, options)}", in_bytes=True))

        def on_ready(service: Service, address: str) -> None:
            until_ready.close()
            service.quality = quality
            if not say(welcome(service, address, quality, headless)):
                logger.warning("ready: %s/v1 (standard output cannot be written to)", address)

        run_server(llm, options, tick, on_ready, keys)
    print("stopped", file=sys.stderr, flush=True)


def require_authentication(options: ServerOptions, keys: Keys) -> None:
    """A server that other machines can reach needs API keys, or --insecure-no-auth."""
    if options.host.startswith(_LOOPBACK) or len(keys):
        return
    if not options.insecure_no_auth:
        raise ConfigError(
            f"other machines can reach {options.host}, and no API key is set: set {VARIABLE} or --api-key-file, "
            "or give --insecure-no-auth"
        )
    logger.warning("listening on %s without authentication: anyone who can reach it can use it", options.host)


def quality_line(config: EngineConfig, required: str = "") -> str:
    """Of the card beside a quantised model's weights; empty where there is none that belongs to them."""
    limits, path = parse_limits(required) if required else {}, model_path(config)
    found = find_card(path)
    if required:
        require_quality(found, limits, path.name)
    if found is not None and found.matches:
        return found.line
    quantised = load_model_config(path).quantisation if found is None and path.is_dir() else None
    if found is not None:
        logger.warning("%s", found.line)
    elif quantised is not None:
        logger.warning("the weights are quantised (%s) and have no quality card: the loss is not known", quantised.method)
    return ""


def welcome(service: Service, address: str, quality: str = "", headless: bool = False) -> str:
    """`headless`: the model gives vectors alone."""
    ready = service.llm.ready
    assert ready is not None
    facts = f"{service.name} in {ready.dtype} on {ready.device}, context {ready.max_model_len}, ready after {since_start():.1f} s"
    parts = [f"{part} {ready.memory[part] / 1e9:.2f} GB" for part in (WEIGHTS, KV) if part in ready.memory]
    engines = engine_lines(service.llm.engines)
    return "\n".join(
        [
            f"ridgeline {__version__}: {facts}",
            *([f"memory{' of each engine' if engines else ''}: {', '.join(parts)}"] if parts else []),
            *engines,
            *([f"quality: {quality}"] if quality else []),
            f"sampling defaults: {service.llm.sampling_defaults}",
            f"ready: {address}/v1  (Ctrl-C stops)",
            f"dashboard: {address}/dashboard",
            "",
            example(service, address, headless),
            "",
        ]
    )


def engine_lines(engines: Sequence[AsyncLLM]) -> list[str]:
    """Where each of several engines runs, and what it shares."""
    lines = []
    for each in engines if len(engines) > 1 else ():
        assert isinstance(each, ReplicaLLM) and each.ready is not None
        place, blocks = each.placement, each.ready.num_blocks
        shared = f", shared by {place.sharing} engines: no faster than one" if place.sharing > 1 else ""
        lines.append(f"engine {each.number}: {place.device}, {blocks * each.ready.block_size} tokens of KV cache{shared}")
    return lines


def example(service: Service, address: str, headless: bool) -> str:
    """A curl line that works with this model."""
    tokenizer = service.tokenizer
    path = "completions"
    body: dict[str, Any]
    if headless:
        path, body = "embeddings", {"input": [1, 2, 3] if tokenizer is None else "The sea is blue"}
    elif tokenizer is None:
        body = {"prompt": [1, 2, 3]}
    elif tokenizer.chat_template is None:
        body = {"prompt": "The capital of France is", "temperature": 0}
    else:
        path = "chat/completions"
        body = {"messages": [{"role": "user", "content": "What is the capital of Germany?"}], "temperature": 0}
    data = shlex.quote(json.dumps(body))
    key = f' -H "Authorization: Bearer ${VARIABLE}"' if len(service.keys) else ""
    return f"curl {address}/v1/{path}{key} -H 'Content-Type: application/json' -d {data}"
