"""Reads a file that the user names: all of it, or an error if it is larger than a bound.

A wrong name must not fill the memory or wait for ever: a device has no end, a sparse file has 10 GB, a FIFO may have no writer.
Every failure is a ConfigError of one line. Small files of a model are read by `model_files`.
"""

from __future__ import annotations

import errno
import json
import os
import select
import stat
import time
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError, shown_path

MOST_BYTES = 1 << 30                 # of a text, a trace or a record
MOST_PIPED = 256 << 20               # of what says its size only by its end: a pipe or a device, which may have none
MOST_SETTINGS = 1 << 20              # of options or a recipe, in YAML: its parser reads about 1 MB in ten seconds
WRITER_WAITS = 500                   # for a process that opens the FIFO to write: ten seconds
_WAIT_SECONDS = 0.02
_CHUNK = 1 << 20


def read_bytes(path: str | Path, most: int = MOST_BYTES, label: str = "") -> bytes:
    """`label`: the option's name, for the error."""
    name = f"{label} {shown_path(path)}".strip()
    try:
        # Without O_NONBLOCK the call waits for a FIFO's writer; O_NOCTTY: a terminal must not become this process's own.
        descriptor = os.open(Path(path).expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(found.st_mode):
                most = min(most, MOST_PIPED)
            if found.st_size > most:
                raise _too_large(name, most)
            return _all(descriptor, name, most)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror or error}") from None
    except ValueError as error:                          # a NUL in the path
        raise ConfigError(f"{name} cannot be read: {error}") from None


def read_text(path: str | Path, most: int = MOST_BYTES, label: str = "") -> str:
    """In UTF-8; line ends as `open` has them."""
    try:
        text = read_bytes(path, most, label).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{f'{label} {shown_path(path)}'.strip()} is not text in UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_json(path: str | Path, kind: str = "JSON") -> Any:
    """`kind`: what the file should be, for the error."""
    content = read_bytes(path)
    try:
        return json.loads(content)
    except RecursionError:
        raise ConfigError(f"{shown_path(path)} is not {kind}: its values are nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{shown_path(path)} is not {kind}: {' '.join(str(error).split())[:200]}") from None


def read_yaml(path: str | Path, label: str) -> Any:
    """Settings in YAML or JSON. No aliases: ten lines of them stand for a billion values."""
    import yaml  # here: few commands read such a file

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("an alias (*name) is not allowed here; write the value out")
            return super().compose_node(parent, index)

    text = read_text(path, MOST_SETTINGS, label)
    try:
        loader = Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except RecursionError:
        raise ConfigError(f"{label} {shown_path(path)} is not YAML: its values are nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:        # ValueError: a date such as 2026-99-99
        raise ConfigError(f"{label} {shown_path(path)} is not YAML: {' '.join(str(error).split())[:200]}") from None


def _all(descriptor: int, name: str, most: int) -> bytes:
    """What a descriptor that never blocks gives to its end. A writer that is silent is waited for: Ctrl-C ends the wait."""
    is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    poll, waits, content = select.poll(), 0, bytearray()
    poll.register(descriptor, select.POLLIN)
    while len(content) <= most:
        try:
            part = os.read(descriptor, _CHUNK)
        except BlockingIOError:                          # a writer has it open
            poll.poll()
            continue
        content += part
        if not part:
            # A FIFO without a writer reads as ended, too, but it has hung up only if there was a writer.
            if content or not is_pipe or poll.poll(0):
                return bytes(content)
            if (waits := waits + 1) > WRITER_WAITS:
                raise ConfigError(f"{name} cannot be read: it is a pipe, and no process writes to it")
            time.sleep(_WAIT_SECONDS)
    raise _too_large(name, most)


def _too_large(name: str, most: int) -> ConfigError:
    return ConfigError(f"{name} cannot be read: it has more than {most >> 20:,} MiB")
