"""What the references inside a JSON schema lead to.

Each path is followed once: in 64 KB, a thousand references may lead to one whose own path has 30,000 parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class References:
    """Of one schema, `root`."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._found: dict[str, Any] = {}                 # by paths

    def target(self, path: Any) -> Any:
        """The part of the schema at a path such as "#/$defs/name"; None where there is none."""
        if not isinstance(path, str) or not path.startswith("#"):
            return None
        if path not in self._found:
            self._found[path] = self._follow(path)
        return self._found[path]

    def _follow(self, path: str) -> Any:
        anchor, *names = path[1:].split("/")
        part = None if anchor else self.root             # names of parts instead of paths are not known here
        for name in names:
            if not isinstance(part, Mapping):
                return None
            part = part.get(name.replace("~1", "/").replace("~0", "~"))
        return part
