"""What requests of every dialect have in common: fields that are refused by name, hints that are dropped, and metadata."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ridgeline.errors import BadRequest, Unsupported, shown

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512     # entries, and characters of each


def refuse(request: Any, fields: Mapping[str, tuple[Any, ...]]) -> None:
    """Unsupported for a field that is set to anything but one of its neutral values."""
    for name, neutral in fields.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            raise Unsupported(f"{name} is not supported by this server; leave it out", field=name)


def forget(request: Any, hints: Iterable[str]) -> None:
    """Free the hints: they may be megabytes, and an answer may take minutes."""
    for name in hints:
        setattr(request, name, None)


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """BadRequest for more than OpenAI's API takes: it is repeated in every answer, and stored with it."""
    given = metadata or {}
    if len(given) > MAX_METADATA:
        raise BadRequest(f"metadata has {len(given)} entries; at most {MAX_METADATA} are allowed", field="metadata")
    for name, value in given.items():
        if len(name) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            message = f"metadata: a key has at most {MAX_METADATA_KEY} characters, a value {MAX_METADATA_VALUE}"
            raise BadRequest(f"{message}; {shown(name[:MAX_METADATA_KEY])} has more", field="metadata")
