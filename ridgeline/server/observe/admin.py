"""The admin socket: commands of an operator to a running server, on a unix socket that only this user can open.

A line of JSON in, a line of JSON out; `ridgeline admin` is its client. HTTP clients cannot reach it. Off unless the server is
given a path.

    {"command": "techniques"}                                       ─▶ {"techniques": [...]}
    {"command": "switch", "technique": "overlap", "on": false}      ─▶ {"techniques": [...]}
    {"command": "load"}                                             ─▶ {"server_load": ...}
    {"command": "profile", "steps": 64}                             ─▶ {"trace": its file, "costs": ..., "overhead": ...}
    a command that fails                                            ─▶ {"error": "..."}
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.errors import BadRequest, ConfigError, RidgelineError
from ridgeline.process.log import get_logger
from ridgeline.server.observe.prometheus import load

logger = get_logger("server")

MAX_LINE = 4096                      # bytes
COMMANDS = ("techniques", "switch", "load", "profile")


class Command(msgspec.Struct, forbid_unknown_fields=True):
    command: str
    technique: str = ""
    on: bool = True
    steps: Annotated[int, msgspec.Meta(ge=1, le=2**31)] = 64     # the engine stops earlier (core/profile.py)


_decode = msgspec.json.Decoder(Command).decode
_encode = msgspec.json.Encoder().encode


async def obey(llm: AsyncLLM, line: bytes) -> Any:
    """The answer to a command; an error as its message."""
    try:
        asked = _decode(line)
        if asked.command == "load":
            return load(llm)
        if asked.command == "profile":
            found = await llm.profile(asked.steps)
            logger.info("%d steps were profiled on the admin socket: %s", asked.steps, found.trace)
            return {"trace": found.trace, "costs": found.costs, "overhead": found.overhead}
        if asked.command == "switch":
            await llm.switch(asked.technique, asked.on)
            logger.info("%s was switched %s on the admin socket", asked.technique, "on" if asked.on else "off")
        elif asked.command != "techniques":
            raise BadRequest(f"command must be one of {', '.join(COMMANDS)}; got {asked.command[:40]!r}")
        return {"techniques": llm.ready.techniques if llm.ready else []}
    except (RidgelineError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return {"error": str(error)}


async def beside(llm: AsyncLLM, path: str, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, with the admin socket beside it if a path is given."""
    if not path:
        return await work

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(_encode(await obey(llm, line)) + b"\n")
                await writer.drain()
        except (ValueError, ConnectionError):            # a line that is too long, or a lost client
            pass
        except asyncio.CancelledError:                   # the server ends; asyncio would log a traceback
            pass
        finally:
            writer.close()

    try:
        listener = _bind(Path(path))
    except BaseException:
        work.close()
        raise
    server = await asyncio.start_unix_server(talk, sock=listener, limit=MAX_LINE)
    try:
        await work
    finally:
        server.close()
        Path(path).unlink(missing_ok=True)


def _bind(path: Path) -> socket.socket:
    """A socket with private permissions from the start. The socket of a dead server is replaced; any other file is kept."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
    except OSError as error:
        listener.close()
        raise ConfigError(f"admin_socket {path} cannot be used: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True
