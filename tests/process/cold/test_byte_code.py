"""Byte code compiled ahead of the imports: of what they will import, in their order, and as Python itself would write it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import marshal
import os
import subprocess
import sys
from pathlib import Path

import pytest
from served_model import one_thread

from ridgeline.process.cold import byte_code

ROOT = Path(__file__).parents[3]
FILES = {
    "whole/__init__.py": "import os\nfrom . import first, absent\n"
                         "from .inner.deep import (  # why\n    thing,\n    leaf as other,\n)\n",
    "whole/first.py": "from whole import second; import missing_module\ndef later():\n    import whole.never\n",
    "whole/second.py": "import json, whole.third as another\n",
    "whole/third.py": "from .. import beyond\nfrom ..... import far_beyond\n",
    "whole/never.py": "",
    "whole/inner/__init__.py": "from ..fourth import *\n",
    "whole/inner/deep/__init__.py": "thing = 1\n",
    "whole/inner/deep/leaf.py": "this is no Python\n",
    "whole/fourth.py": "from __future__ import annotations\n",
}
ORDER = [
    "__init__.py", "first.py", "second.py", "third.py", "inner/__init__.py", "fourth.py", "inner/deep/__init__.py",
    "inner/deep/leaf.py",
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    byte_code.source_of.cache_clear()
    return tmp_path / "whole"


def test_sources_are_found_in_the_order_of_their_imports(package: Path) -> None:
    found = [str(Path(path).relative_to(package)) for path in byte_code.sources(["whole"]) if Path(path).is_relative_to(package)]
    assert found == ORDER
    assert importlib.util.find_spec("json").origin in byte_code.sources(["whole"])       # type: ignore[union-attr]
    assert list(byte_code.sources(["missing_module", "whole.missing"])) == [str(package / "__init__.py"), *list(
        byte_code.sources(["whole"]))[1:]]


def test_byte_code_is_what_python_would_have_written(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    monkeypatch.setattr("sys.pycache_prefix", str(tmp_path / "by python"))
    kept = tmp_path / "kept"
    told = {**one_thread(), "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONPYCACHEPREFIX": str(kept), "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run([sys.executable, "-m", byte_code.__name__, str(os.getpid()), "whole"], check=True, env=told, timeout=120)
    written = {path.name.split(".")[0]: path for path in (kept / str(package).lstrip("/")).rglob("*.pyc")}
    assert set(written) == {"__init__", "first", "second", "third", "fourth"}            # not what cannot be compiled
    for name in ("second", "third"):
        source = package / f"{name}.py"
        code = importlib.machinery.SourceFileLoader(f"whole.{name}", str(source)).get_code(f"whole.{name}")      # writes it, too
        pythons = Path(importlib.util.cache_from_source(str(source))).read_bytes()
        ours = written[name].read_bytes()
        assert ours[:16] == pythons[:16] and marshal.loads(ours[16:]) == marshal.loads(pythons[16:]) == code


@pytest.mark.slow                    # imports all that an engine does
def test_most_of_what_an_engine_imports_is_found() -> None:
    """The roots name what is imported under a condition, and may grow old: then less is found, and Python compiles the rest."""
    code = "import sys, torch, ridgeline.engine.core.loop; print(*(m.__file__ for m in list(sys.modules.values()) " \
           "if str(getattr(m, '__file__', None)).endswith('.py')), sep='\\n')"
    told = {**one_thread(), "PYTHONPATH": str(ROOT)}
    said = subprocess.run([sys.executable, "-c", code], env=told, capture_output=True, text=True, timeout=300, check=True)
    imported = {path for path in said.stdout.splitlines() if Path(path).is_file()}
    found = set(byte_code.sources(byte_code.ROOTS))
    assert len(imported & found) > 0.85 * len(imported)
    assert len(found - imported) < 0.2 * len(imported)                                   # Triton is, where there is no GPU
