"""Compiles the CPU kernels when the package is built or installed. Without a C compiler the package works, more slowly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("ridgeline/ops/cpu")
spec = importlib.util.spec_from_file_location("native_build", FOLDER / "native_build.py")
assert spec is not None and spec.loader is not None
native_build = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = native_build
spec.loader.exec_module(native_build)


class BuildKernels(build_ext):
    def _target(self) -> Path:
        root = Path() if self.inplace or self.editable_mode else Path(self.build_lib)
        return root / FOLDER / native_build.file_name()

    def run(self) -> None:
        target = self._target()
        target.parent.mkdir(parents=True, exist_ok=True)
        for old in target.parent.glob("native-*.native"):
            old.unlink()
        try:
            native_build.compile_into(target)
        except native_build.BuildError as error:
            print(f"the CPU kernels are not built, and decoding on a CPU will be slower: {error}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return [str(path) for path in (self._target(),) if path.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


sources = [str(path) for path in sorted((FOLDER / "src").rglob("*.c"))]
setup(ext_modules=[Extension("ridgeline.ops.cpu.kernels", sources)], cmdclass={"build_ext": BuildKernels})
