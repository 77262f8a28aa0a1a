"""Kernels compiled in threads: launchers must not be mixed up, and a Triton that cannot do it is used without. What is compiled
ahead is in test_kernel_steps.py."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime import build

from ridgeline.ops import registry
from ridgeline.ops.compile_ahead import CompileAhead, load_launchers_apart

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")

NAME = "__launcher_of_a_test"
SOURCE = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_VARARGS, 0}}, {{0}}}};
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{name}", 0, -1, methods}};
PyMODINIT_FUNC PyInit_{name}(void) {{ return PyModule_Create(&module); }}
"""


def loaded(number: int) -> Any:
    return build.compile_module_from_src(SOURCE.format(number=number, name=NAME), NAME)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_load_module_from_path", build._load_module_from_path)       # undone afterwards
    yield


@pytest.mark.usefixtures("cache")
def test_a_launcher_stays_what_it_was() -> None:
    assert load_launchers_apart()
    first, second = loaded(1), loaded(2)
    again = loaded(1)
    assert [each.launch() for each in (first, second, again)] == [1, 2, 1]


@pytest.mark.usefixtures("cache")
def test_threads_get_their_own_launchers() -> None:
    assert load_launchers_apart() and load_launchers_apart()
    for number in range(4):
        loaded(number)
    with ThreadPoolExecutor(8) as pool:
        asked = [number % 4 for number in range(400)]
        assert list(pool.map(lambda number: loaded(number).launch(), asked)) == asked


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("missing", ["", "AsyncCompileMode", "JITFunction", "run", "_do_compile", "_load_module_from_path"])
def test_a_triton_that_lacks_something_compiles_at_the_first_launch(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is used of it and may be missing, one thing at a time. With everything there it is active."""
    function = type("JITFunction", (), {name: lambda *args: "launched" for name in ("run", "_do_compile") if name != missing})
    library = SimpleNamespace(AsyncCompileMode=lambda *args, **options: None, JITFunction=function)
    if hasattr(library, missing):
        delattr(library, missing)
    if missing == "_load_module_from_path":
        monkeypatch.delattr(build, missing)
    for name, value in {"triton": library, "HAS_TRITON": True, "TRITON_INTERPRETED": False}.items():
        monkeypatch.setattr(registry, name, value)
    monkeypatch.setattr("ridgeline.ops.compile_ahead.logger", SimpleNamespace(info=lambda *said: told.append(said)))
    told: list[tuple[str, ...]] = []
    with CompileAhead(torch.device("cuda")) as ahead:
        assert ahead.active is (not missing) and len(told) == bool(missing)
        if missing:
            with ahead.collecting():
                assert missing in ("run", "JITFunction") or function.run() == "launched"
            ahead.finish()
