"""API keys: loading them, and finding a request's key.

Only digests are kept. Every one is compared, in a time that does not depend on the keys. server/http/gate decides which paths
need a key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, MutableMapping
from contextlib import suppress
from pathlib import Path

from ridgeline.errors import ConfigError
from ridgeline.process.children import erase_variable
from ridgeline.process.log import get_logger
from ridgeline.server.options import ServerOptions
from ridgeline.user_files import read_text

logger = get_logger("server")

VARIABLE = "RIDGELINE_API_KEY"
MAX_KEYS = 1_000
MAX_KEY_CHARACTERS = 1_024
MAX_FILE_BYTES = 4 * 2**20      # with comments


class Keys:
    """The accepted keys; without any, every request is accepted."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key.encode()) for key in dict.fromkeys(keys)]
        self._secret = secrets.token_bytes(32)           # so that a salt reveals nothing of its key

    def __len__(self) -> int:
        return len(self._digests)

    def number_of(self, headers: Iterable[tuple[bytes, bytes]]) -> int | None:
        """Which of the keys, counted from 1, a request's headers carry; None: no valid one."""
        found = None
        for given in _given(headers):
            digest = _digest(given)
            for number, known in enumerate(self._digests, 1):
                if hmac.compare_digest(digest, known):
                    found = number                       # no break: the time must not depend on it
        return found

    def salt_of(self, number: int) -> str:
        """A cache salt per key: the speed of a prefix cache hit would reveal the prompts of other keys."""
        if len(self._digests) < 2:
            return ""
        return hashlib.blake2b(self._digests[number - 1], key=self._secret, digest_size=12).hexdigest()


def load_keys(options: ServerOptions, environment: MutableMapping[str, str] = os.environ) -> Keys:
    """All keys of the environment (removed from it), the file and the command line."""
    keys = [key.strip() for key in environment.pop(VARIABLE, "").split(",")]
    if environment is os.environ:
        erase_variable(VARIABLE)
    if options.api_key_file:
        keys += _lines(Path(options.api_key_file))
    if options.api_key:
        logger.warning("--api-key can be read in the list of processes; %s or --api-key-file cannot", VARIABLE)
        keys += [key.strip() for key in options.api_key.split(",")]
    keys = [key for key in keys if key]
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"there are {len(keys)} API keys; at most {MAX_KEYS} are allowed")
    for number, key in enumerate(keys, 1):
        if len(key) > MAX_KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"API key {number} must be at most {MAX_KEY_CHARACTERS} printable ASCII characters without blanks"
            )
    return Keys(keys)


def _lines(file: Path) -> list[str]:
    text = read_text(file, MAX_FILE_BYTES, "api_key_file")
    with suppress(OSError):
        if file.stat().st_mode & 0o077:
            logger.warning("%s can be read by other users; run chmod 600 on it", file)
    keys = [line.strip() for line in text.splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file {file} holds no key; it needs one per line")
    return keys


def _given(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Possible keys, from the headers of OpenAI's and of Anthropic's clients."""
    given = []
    for name, value in headers:
        if name == b"x-api-key":
            given.append(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer":
                given.append(key.strip())
    return given


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
