"""Fixtures shared by the tests."""

from __future__ import annotations

import functools
import gc
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.process import embedded

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
# The rows that every commit is held to: `make test-reliability` runs their tests, and ends them after five minutes.
PER_COMMIT = {
    "S-01", "S-02", "S-03", "S-04", "S-05", "S-11", "H-01", "H-03", "R-01", "R-05", "P-01", "P-02", "P-03", "P-05", "P-12",
}  # fmt: skip

# A shell without a terminal starts what it puts into the background with Ctrl-C ignored, and whoever is started inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def per_commit_tests() -> set[str]:
    """`file.py::test` of every test that the page names for these rows and that is not slow."""
    rows = re.findall(r"^\| ([A-Z]-\d\d) \|[^|]*\| ([^|]*) \| commit \|$", PAGE.read_text(encoding="utf-8"), re.M)
    return {name for row, names in rows if row in PER_COMMIT for name in re.findall(r"`([^`]+)`", names)}


@pytest.hookimpl(tryfirst=True)      # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    named = per_commit_tests()
    for item in items:
        test = item.nodeid.split("::")[1].split("[")[0]
        if f"{item.path.name}::{test}" in named:
            item.add_marker("reliability")


def pytest_collection_finish() -> None:
    """Work that tests would repeat thousands of times.

    Modules and test items stay to the end, so no garbage collection needs to look at them: engines and benchmarks start many
    collections, of half a second each. For the same reason a benchmark must not take them out of the frozen set again.
    """
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None
    if transports := sys.modules.get("httpx._transports.default"):
        # Every httpx.get and httpx.post reads all certificates of the machine anew: 50 ms, and tests send thousands.
        transports.create_ssl_context = functools.cache(transports.create_ssl_context)
        for name in ("connect", "read", "write", "pool"):                # a busy machine may take longer than the usual 5 s
            setattr(sys.modules["httpx._config"].DEFAULT_TIMEOUT_CONFIG, name, 60.0)


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """SmolLM2-135M-Instruct; `make install` has fetched it."""
    return embedded.require()


@pytest.fixture(autouse=True)
def usual_kernels() -> Iterator[None]:
    """An engine with kernels=reference switches them for the whole process: the next test starts as if it were alone."""
    yield
    if registry := sys.modules.get("ridgeline.ops.registry"):
        registry.set_kernels("auto")
