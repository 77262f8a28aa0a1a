"""Kernels compiled in processes of their own: this process then finds them in Triton's cache, and does without where that fails.

On a machine without a GPU: in a process with a pretended one (pretend_gpu.py).
"""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from folders import import_path

from ridgeline.ops.compile_child import CompileChild
from ridgeline.process import framed_child
from ridgeline.process.cold import cold_start

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

SCRIPT = """
import time
from types import SimpleNamespace
import pretend_gpu
pretend_gpu.install()
import torch
from ridgeline.ops import compile_ahead, registry, rms_norm
from ridgeline.ops.compile_child import CompileChild
from ridgeline.process.cold import cold_start

compile_ahead.platform.cpu_count = lambda: 1
registry.log_compilations()
compile_ahead.PATIENCE = 1000        # or the thread would compile while it waits
compiled = CompileChild.compile
answers, generated = [], []

def listened(child, *job):
    if len(answers) == 2:            # the third finds its process dead
        child._worker.process.kill()
    answers.append(compiled(child, *job))
    return answers[-1]

CompileChild.compile = listened
compile_ahead._stop_at_a_miss()
stopping = registry.triton.compiler.ASTSource.make_ir

def make_ir(source, *others):
    made = stopping(source, *others)
    generated.append(source.name)
    return made

make_ir.stops = True                 # it is not wrapped again
registry.triton.compiler.ASTSource.make_ir = make_ir

def norm(width):
    rms_norm.rms_norm_triton(torch.zeros(3, width, dtype=torch.bfloat16), torch.ones(width, dtype=torch.bfloat16), 1e-5)

def ahead_of(*widths):
    with compile_ahead.CompileAhead(torch.device("cuda", 0)) as ahead:
        with ahead.collecting():
            for width in widths:
                norm(width)
        ahead.finish()
        return list(ahead._builders._children)

children = ahead_of(64, 128, 256)
assert answers[:2] == ["", ""], answers
assert len(children) == 1 and children[0].ended()
assert answers[2] and generated == ["_rms_norm_kernel"], "a process that dies: the thread compiles"
assert registry.COMPILED_AHEAD == ["_rms_norm_kernel"] * 3
start = cold_start.compilers
def refused(count): raise OSError("no more processes")
cold_start.compilers = refused
assert ahead_of(512) == [] and len(generated) == 2, "no process at all: the thread compiles"
assert ahead_of(64) == [] and len(generated) == 2 and len(answers) == 3, "what is in the cache starts no process"
assert len(registry.COMPILED_AHEAD) == 4

cold_start.compilers = start
late = compile_ahead._Builders(1, torch.device("cuda", 0), 1)
late.close()
assert late._own_child() is None and late._children == [], "a thread that finds a miss after the end starts no process"
def unwanted(): raise AssertionError("nothing is compiled after the end: a start that fails would wait for it")
try:
    late._compiled(unwanted, compile_ahead._NotInCache(SimpleNamespace(name="late"), None, None))
except RuntimeError as error:
    assert "broken off" in str(error)
else:
    raise AssertionError("nothing was compiled, and no error said so")
del compile_ahead._thread.child
compile_ahead.platform.available_memory = lambda: int(0.9e9)
small = compile_ahead._Builders(1, torch.device("cuda", 0), 1)
assert small._own_child() is None, "no memory for a process: the thread compiles"
small.close()

del compile_ahead._thread.child
compile_ahead.platform.available_memory = lambda: 2**40
cold_start._compilers = begun = start(2)             # as a start does that finds no kernels
with compile_ahead.CompileAhead(torch.device("cuda", 0)) as ahead:
    assert ahead._builders._server is begun and cold_start.take_compilers() is None
    compile_ahead.PATIENCE = -1000
    with ahead.collecting():
        norm(1024)
    ahead.finish()
    assert len(generated) == 3, "processes that take too long to start: the thread compiles"
assert begun.process.poll() is not None
cold_start._compilers = unused = start(1)
assert not compile_ahead.CompileAhead(torch.device("cpu")).active and unused.process.poll() is not None
print("ok")
"""


def test_a_start_does_not_wait_for_a_process_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files with large numbers can be looked at: a server with many connections has more than the 1,024 that `select` knows."""
    monkeypatch.setattr(framed_child, "LOOK_SECONDS", 0.02)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1030)]
    server = cold_start.compilers(1)
    try:
        worker = server.worker()
        assert worker is not None and worker.process.stdout is not None and worker.process.stdout.fileno() > 1024
        child = CompileChild(worker)
        while not child.ready():                         # it has torch to import
            assert not child.ended()
            time.sleep(0.02)
        os.kill(worker.process.pid, signal.SIGSTOP)
        function, target = SimpleNamespace(__module__="a", __name__="b"), SimpleNamespace(backend="cuda", arch=90, warp_size=32)
        source = SimpleNamespace(fn=function, signature={}, constants={}, attrs={})
        assert child.compile(source, target, SimpleNamespace(num_warps=4), "key").startswith("Stopped") and child.ended()
    finally:
        server.end()
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_compiles_for_a_thread_and_the_thread_where_it_cannot(tmp_path: Path, run_script: Any) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": import_path()}
    done = run_script([sys.executable, "-c", SCRIPT], timeout=800, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "ok"
