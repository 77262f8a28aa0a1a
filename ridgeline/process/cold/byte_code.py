"""Compiles the byte code of what an engine imports, by several processes, beside the imports: `python -m … PARENT [MODULE…]`.

Imports run in one thread, which would compile 1,400 modules one after the other. This process reads the statements of imports
from the sources, in the order in which they will be needed, and its children compile them ahead of the importing process, which
then finds the byte code. What they do not reach in time, it compiles as ever.

Only statements that begin a line are followed: those in functions are for later, or for never.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import py_compile
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ridgeline.process.orphans import end_at_once
from ridgeline.process.platform import engines_here, granted_cores

# Beyond what their first is found to import: modules that a condition or a function of these packages imports.
ROOTS = (
    "torch", "torch._meta_registrations", "numpy._core.numeric", "numpy.lib._npyio_impl", "numpy.lib._function_base_impl",
    "triton.experimental.gluon", "triton.backends.nvidia.compiler", "triton.backends.nvidia.driver", "ridgeline.engine.core.loop",
)
MOST_PROCESSES = 10                  # more than this, and they wait for the one that reads
_RECORD = 1024                       # bytes: writes and reads of this size are whole, with many readers of a pipe, too
_DEEPEST = 10_000                    # imports within imports
_IMPORT = re.compile(rb"^(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n#;]*)|import[ \t]+([^\n#;]*))", re.MULTILINE)
_COMMENT = re.compile(rb"#[^\n]*")


def sources(roots: Sequence[str]) -> Iterator[str]:
    """Files of these modules and of what they import, each once, before those that it imports."""
    seen = set[str]()

    def visit(module: str) -> Iterator[str]:
        parts = module.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[:length])
            path = source_of(name)
            if path is None:
                return
            if name not in seen:
                seen.add(name)
                yield path
                for imported in _imported_by(name, path):
                    yield from visit(imported)

    for root in roots:
        yield from visit(root)


def _imported_by(module: str, path: str) -> Iterator[str]:
    """Names that may be modules, in the order of the source."""
    with open(path, "rb") as file:
        text = file.read()
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    for statement in _IMPORT.finditer(text):
        source, names, plain = (b"" if part is None else _COMMENT.sub(b"", part).strip(b"()") for part in statement.groups())
        first = [words[0].decode(errors="replace") for piece in (plain or names).split(b",") if (words := piece.split())]
        if plain:
            yield from first
            continue
        relative = source.decode(errors="replace")
        name = relative.lstrip(".")
        if up := len(relative) - len(name):
            above = package.split(".")[: len(package.split(".")) + 1 - up]
            name = ".".join([*above, *filter(None, [name])])
        yield name
        yield from (f"{name}.{each}" for each in first if each.isidentifier())


@functools.cache
def source_of(module: str) -> str | None:
    """None: it has no source in Python, or is no module."""
    parent, _, name = module.rpartition(".")
    above = source_of(parent) if parent else ""
    if above is None or (above and not above.endswith("__init__.py")):
        return None
    for folder in [os.path.dirname(above)] if above else sys.path:
        for path in (os.path.join(folder, name, "__init__.py"), os.path.join(folder, f"{name}.py")):
            if os.path.isfile(path):
                return path
    return None


def compile_from(pipe: int) -> None:
    """Until no more files are named there."""
    while record := os.read(pipe, _RECORD):
        path = os.fsdecode(record.rstrip(b"\0"))
        with suppress(Exception):                        # a template, a full disk: its import says so, if it is imported
            if not os.path.exists(importlib.util.cache_from_source(path)):
                py_compile.compile(path, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)


def main(parent: int, roots: Sequence[str]) -> None:
    end_at_once()
    if os.getppid() != parent:                           # it had ended before
        return
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)        # no child is left to read
    sys.setrecursionlimit(_DEEPEST)
    reader, writer = os.pipe()
    here, started = os.getpid(), 0
    with suppress(OSError):                              # no more processes may be started: fewer do it
        for _ in range(max(1, min(MOST_PROCESSES, granted_cores() // engines_here() - 2))):
            if not os.fork():
                end_at_once()
                os.close(writer)
                if os.getppid() == here:
                    compile_from(reader)
                os._exit(0)
            started += 1
    os.close(reader)
    if started:
        for path in sources(roots):
            if len(record := os.fsencode(path)) <= _RECORD:
                os.write(writer, record.ljust(_RECORD, b"\0"))
    os.close(writer)
    for _ in range(started):
        os.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:] or ROOTS)
