"""What an engine's process does before its imports, and where byte code is kept that Python would not keep."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served_model import one_thread

from ridgeline.bench.startup import cold_environment

ROOT = Path(__file__).parents[2]


def child(code: str, without: str = "", says: str = "", **environment: str) -> list[str]:
    """What it prints; `says`: what it logs."""
    told = {name: value for name, value in one_thread().items() if name != without}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**told, **environment}
    )
    assert done.returncode == 0 and "ERROR" not in done.stderr, done.stderr[-3000:]
    assert says in done.stderr and "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.stdout.split()


IN_ONE_PROCESS = """
import gc, sys
from types import SimpleNamespace
from ridgeline.process import head_start
head_start.begin(gpu=False)
assert not gc.isenabled()
import torch
head_start.imported()
print(gc.isenabled(), gc.get_freeze_count() > 10_000)
from torch.utils._python_dispatch import TorchDispatchMode
class Count(TorchDispatchMode):
    calls = 0
    @classmethod
    def _should_skip_dynamo(cls):
        return False
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        Count.calls += 1
        return function(*args, **(kwargs or {}))
with torch.inference_mode(), Count():
    x = torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
    x = torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3).softmax(-1).multinomial
print("torch._decomp.decompositions" in sys.modules, Count.calls > 3)
from ridgeline.models.weights import _fill_dummy
piece = SimpleNamespace(target=torch.zeros(64), dummy=(0.0, 1.0), shape=(64,), store=None, kept=slice(None))
_fill_dummy({"a": piece}, 0, None)
print(piece.target.std().item() > 0.5, torch.rand(1, generator=torch.Generator().manual_seed(1)).item() > 0)
with torch.profiler.profile() as profile:
    torch.zeros(4).cumsum(0)
print(any(event.name == "aten::cumsum" for event in profile.events()))
"""


def test_a_cpu_engine_leaves_out_what_torch_has_for_compilers() -> None:
    """And what it uses is there: products, dispatch modes, inference mode, dummy weights, the profiler. Garbage is collected
    again, but not what was imported. One process has all of it: importing torch takes longest."""
    assert child(IN_ONE_PROCESS) == ["True", "True", "False", *["True"] * 4]


@pytest.mark.slow                    # torch's compilers take seconds to import
def test_a_compiler_finds_what_was_left_out_when_it_is_imported() -> None:
    code = """
import sys
from ridgeline.process import head_start
head_start.begin(gpu=False)
import torch
head_start.imported()
import torch._dynamo
print(torch.ones(2, 3, device="meta").cumsum(0).shape, "torch._decomp.decompositions" in sys.modules)
"""
    assert child(code) == ["torch.Size([2,", "3])", "True"]


def test_where_torch_is_imported_already_nothing_changes(tmp_path: Path, run_script: Any) -> None:
    code = """
import torch
from ridgeline.process import head_start
head_start.begin(gpu=False)
import torch._meta_registrations
print(hasattr(torch._meta_registrations, "register_meta"))
"""
    (tmp_path / "program.py").write_text(code)
    done = run_script([sys.executable, str(tmp_path / "program.py")], timeout=120, env={**one_thread(), "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr[-3000:]


@pytest.mark.parametrize(
    "module", ["ridgeline.engine.core.engine_process", "ridgeline.process.head_start", "ridgeline.bench.startup"]
)
def test_nothing_heavy_comes_before_it(module: str) -> None:
    loaded = child(f"import sys, {module}; print(*sys.modules)")
    assert not {"torch", "triton", "numpy", "zmq"} & set(loaded)


DRIVER = """
#include <stdio.h>
#include <stdlib.h>
static int said(const char *what) {
    FILE *file = fopen(getenv("RIDGELINE_TEST_CALLS"), "a");
    fprintf(file, "%s ", what);
    return fclose(file);
}
int cuInit(unsigned flags) { return said("init"), atoi(getenv("RIDGELINE_TEST_CODE")); }
int cuDeviceGet(int *device, int number) { *device = 40 + number; return said("device"); }
#ifndef NO_DRIVER
int cuDevicePrimaryCtxRetain(void **context, int device) { return said(device == 40 ? "context" : "another"); }
#endif
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("gpu", "code", "calls", "says"), [
    (True, "0", "init device context", ""),
    (True, "100", "init", "could not open the first GPU while importing (start-up is slower): the driver's code is 100"),
    (True, "no driver", "init device", "could not open the first GPU while importing (start-up is slower): AttributeError: "),
    (False, "0", "", ""),
])
def test_the_first_gpus_context_is_made_beside_the_imports(
    tmp_path: Path, gpu: bool, code: str, calls: str, says: str
) -> None:
    """What goes wrong there is told in a line, and ends nothing."""
    (tmp_path / "driver.c").write_text(DRIVER)
    (tmp_path / "torch.py").write_text("import builtins; builtins.order = ['torch']")
    (tmp_path / "triton" / "runtime").mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").write_text("")
    (tmp_path / "triton" / "runtime" / "__init__.py").write_text("")
    (tmp_path / "triton" / "runtime" / "cache.py").write_text("def triton_key(): order.append('hash')")
    options = ["-DNO_DRIVER"] if code == "no driver" else []
    subprocess.run(["gcc", "-shared", "-fPIC", *options, "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"], check=True)
    program = f"""
import builtins, threading
builtins.order = []
from ridgeline.process import head_start
head_start.begin(gpu={gpu})
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
print(*order)
"""
    path = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    told = {"RIDGELINE_TEST_CALLS": str(tmp_path / "calls"), "RIDGELINE_TEST_CODE": code, "LD_LIBRARY_PATH": path}
    assert child(program, says=says, PYTHONPATH=f"{tmp_path}:{ROOT}", **told) == (["torch", "hash"] if gpu else [])
    assert (tmp_path / "calls").read_text().split() == calls.split() if calls else not (tmp_path / "calls").exists()


def test_without_a_driver_nothing_happens() -> None:
    code = """
import ctypes, sys
from ridgeline.process import head_start
def missing(name): raise OSError(name)
ctypes.CDLL = missing
head_start.begin(gpu=True)
print(*{"torch", "triton"} & set(sys.modules))
"""
    assert child(code) == []


# ---- byte code -------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """An installation with a torch of one line and an empty cache."""
    (tmp_path / "site" / "torch").mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("print('imported')\n")
    path = f"{tmp_path / 'site'}:{ROOT}"
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "RIDGELINE_CACHE": str(tmp_path / "cache")}     # not the current directory


KEPT = "from ridgeline.process import head_start; print(head_start.byte_code_folder())"


def test_byte_code_is_kept_in_our_cache_where_nobody_else_would(tmp_path: Path, place: dict[str, str]) -> None:
    told = place | {"PYTHONDONTWRITEBYTECODE": "1"}
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ridgeline" / "process", tmp_path / "site" / "ridgeline" / "process", ignore=without)
    for file in (ROOT / "ridgeline").glob("*.py"):
        shutil.copy(file, tmp_path / "site" / "ridgeline")
    assert child(KEPT, **told) == [str(tmp_path / "cache" / "bytecode")]
    assert child(KEPT, PYTHONPYCACHEPREFIX=str(tmp_path / "chosen"), **told) == ["None"]
    assert child(KEPT, "PYTHONDONTWRITEBYTECODE", **place) == ["None"]       # Python writes it beside the source
    (tmp_path / "cache").chmod(0o777)
    assert child(KEPT, **told) == ["None"]                                   # others could write there what we would run
    (tmp_path / "cache").chmod(0o700)
    child("import torch", "PYTHONDONTWRITEBYTECODE", **place)
    assert list((tmp_path / "site" / "torch" / "__pycache__").glob("*.pyc"))
    assert child(KEPT, **told) == ["None"]                                   # it lies beside the source already
    shutil.rmtree(tmp_path / "site" / "ridgeline" / "process" / "__pycache__")
    assert child(KEPT, **told) == ["None"]                                   # torch would be compiled again for our few files


def test_children_are_told_and_so_are_theirs(tmp_path: Path, place: dict[str, str]) -> None:
    (tmp_path / "site" / "one.py").write_text("import torch\nfrom ridgeline.process.children import start_child\n"
                                              "if __name__ == '__main__': start_child('another').wait()\n")
    (tmp_path / "site" / "another.py").write_text("import one, torch\n")
    start = "from ridgeline.process.children import start_child; raise SystemExit(start_child('one').wait())"
    assert child(start, PYTHONDONTWRITEBYTECODE="1", **place) == ["imported", "imported"]
    kept = {path.name.split(".")[0] for path in (tmp_path / "cache" / "bytecode").rglob("*.pyc")}
    assert {"__init__", "one", "children"} <= kept           # "one" is imported by the child's child alone
    assert not list((tmp_path / "site").rglob("*.pyc"))


def test_the_command_itself_keeps_it_too(tmp_path: Path, place: dict[str, str]) -> None:
    code = "import sys; from ridgeline.__main__ import main; main(['plan', '--help'])"
    with_help = child(f"try:\n    {code}\nexcept SystemExit: pass", PYTHONDONTWRITEBYTECODE="1", **place)
    assert "usage:" in with_help
    kept = {path.name.split(".")[0] for path in (tmp_path / "cache" / "bytecode").rglob("*.pyc")}
    assert "cmd_plan" in kept and "head_start" not in kept       # what was imported before is not known


def test_a_cold_start_finds_none_of_it(tmp_path: Path, place: dict[str, str]) -> None:
    """And keeps what it compiles, as every other first start does: its children would compile it again."""
    code = "from ridgeline.bench.startup import cold_environment\n" \
           "print(*(f'{name}={value}' for name, value in sorted(cold_environment('/empty').items())))"
    kernels = "TRITON_CACHE_DIR=/empty/triton"
    kept = ["PYTHONDONTWRITEBYTECODE=", "PYTHONPYCACHEPREFIX=/empty/bytecode", kernels]
    assert child(code, PYTHONDONTWRITEBYTECODE="1", **place) == kept
    assert child(code, "PYTHONDONTWRITEBYTECODE", **place) == [kernels]
    assert cold_environment("/empty")["TRITON_CACHE_DIR"] == "/empty/triton"
