"""What the package never does, read off its syntax: no pickle, no code from data, no shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[3] / "ridgeline"
FILES = sorted(PACKAGE.rglob("*.py"))

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "telnetlib", "pty"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
# By the last names of what is called, however it was imported.
CALLS = {
    "torch.load", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "numpy.load", "np.load", "multiprocessing.Queue",
    "multiprocessing.SimpleQueue", "multiprocessing.Pipe", "multiprocessing.Manager", "multiprocessing.Pool",
    "subprocess.getoutput", "subprocess.getstatusoutput", "torch.jit.load", "ctypes.pythonapi",
}
METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized", "extractall"}
LOOKED_AT = (ast.Import, ast.ImportFrom, ast.Call)
LEAVES = (ast.Name, ast.Constant, ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)
ENVIRONMENTS = {"Environment", "NativeEnvironment", "SandboxedEnvironment", "ImmutableSandboxedEnvironment", "Template"}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def full_names(nodes: list[ast.AST]) -> dict[str, str]:
    """Local names of what is imported, and what they stand for."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0]
                      for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def walk(tree: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, without names and constants, which hold no call: twice as fast."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for field in node._fields:
            value = getattr(node, field)
            for each in value if value.__class__ is list else (value,):
                if isinstance(each, ast.AST) and not isinstance(each, LEAVES):
                    left.append(each)


def offences(source: str, file_name: str = "made.py") -> Iterator[str]:
    nodes = [node for node in walk(ast.parse(source)) if isinstance(node, LOOKED_AT)]
    names = full_names(nodes)
    for node in nodes:
        where = f"{file_name}:{getattr(node, 'lineno', 0)}"
        for name in imported(node):
            if name.partition(".")[0] in MODULES or name in CALLS:
                yield f"{where}: imports {name}"
        if not isinstance(node, ast.Call):
            continue
        if any(each.arg == "shell" and not (isinstance(each.value, ast.Constant) and each.value.value is False)
               for each in node.keywords):
            yield f"{where}: shell"
        called = dotted(node.func)
        head, _, rest = called.partition(".")
        whole = names.get(head, head) + (f".{rest}" if rest else "")
        last = whole.rpartition(".")[2]
        if called in BUILTINS or whole in CALLS or last in METHODS:
            yield f"{where}: calls {called}"
        if whole.startswith("jinja2") and last in ENVIRONMENTS and file_name != "text/chat_template.py":
            yield f"{where}: makes a jinja2 environment"


@pytest.mark.reliability("S-01")
def test_the_package_does_none_of_it() -> None:
    found = [each for file in FILES for each in offences(file.read_text(), file.relative_to(PACKAGE).as_posix())]
    assert len(FILES) > 80 and found == []


@pytest.mark.parametrize("source", [
    "import pickle", "from pickle import loads", "import cloudpickle as c", "import dill", "import marshal", "import shelve",
    "eval('1')", "exec(x)", "compile(x, '', 'exec')", "__import__('os')",
    "import torch\ntorch.load(f)", "from torch import load\nload(f)", "import torch as t\nt.load(f)",
    "import numpy as np\nnp.load(f)", "socket.recv_pyobj()", "self.link.send_pyobj(x)", "sockets[0].send_pyobj(x)",
    "import multiprocessing\nmultiprocessing.Queue()", "from multiprocessing import Pipe",
    "import multiprocessing as mp\nmp.Pipe()",
    "import subprocess\nsubprocess.run('ls', shell=True)", "from subprocess import Popen\nPopen(x, shell=flag)",
    "import yaml\nyaml.load(f)", "import os\nos.system('ls')", "from os import system", "from os import popen as p",
    "import jinja2\njinja2.Environment()", "from jinja2 import Template\nTemplate(x)",
    "from jinja2.sandbox import ImmutableSandboxedEnvironment as E\nE()",
])
def test_the_scan_sees_it(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize("source", [
    "import re\nre.compile('x')", "import json\njson.load(f)", "import subprocess\nsubprocess.run(['ls'], shell=False)",
    "model.eval()", "Model.load(x).eval()", "self.load(f)", "from queue import Queue\nQueue()", "from os import path",
])
def test_the_scan_leaves_the_harmless_alone(source: str) -> None:
    assert not list(offences(source))


def test_templates_are_made_in_one_place() -> None:
    source = (PACKAGE / "text" / "chat_template.py").read_text()
    assert not list(offences(source, "text/chat_template.py")) and list(offences(source, "elsewhere.py"))
