"""The native CPU kernels beyond the op contract: long contexts, independence of neighbours and threads, broken rows, builds,
and other machines: `native_check.c` and `native_step_check.c` compare them with plain loops for every level of instructions,
under an emulator if need be.
"""

from __future__ import annotations

import itertools
import platform
import re
import resource
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_laws import USUAL, requests, run
from tiny_models import save_checkpoint

from ridgeline.errors import ConfigError
from ridgeline.ops.attention.attention_reference import paged_attention_reference
from ridgeline.ops.attention.paged_attention import paged_attention_native
from ridgeline.ops.cpu import native, native_build
from ridgeline.ops.registry import REGISTRY, Site
from ridgeline.ops.rms_norm import rms_norm_native
from ridgeline.process.platform import cpu_flags

LENGTHS = [3, native.SPLIT - 1, native.SPLIT, native.SPLIT + 1, 2 * native.SPLIT + 37]


@pytest.fixture(autouse=True)
def built() -> None:
    assert native.library() is not None, "make install builds the kernels"


def cache(lengths: list[int], heads: int = 6, kv_heads: int = 2, width: int = 64, size: int = 16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    blocks = [-(-length // size) for length in lengths]
    ids = (torch.randperm(sum(blocks), generator=generator) + 1).int()
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    for row, part in enumerate(ids.split(blocks)):
        table[row, : len(part)] = part
    shape = (sum(blocks) + 1, size, kv_heads, width)
    return {
        "q": torch.randn(len(lengths), heads, width, generator=generator),
        "k_cache": torch.randn(shape, generator=generator),
        "v_cache": torch.randn(shape, generator=generator),
        "block_table": table,
        "query_start": torch.arange(len(lengths) + 1, dtype=torch.int32),
        "kv_len": torch.tensor(lengths, dtype=torch.int32),
        "query_start_host": list(range(len(lengths) + 1)),
        "kv_len_host": lengths,
        "scale": width**-0.5,
    }


def row_of(inputs: dict[str, Any], row: int) -> dict[str, Any]:
    """The same row, alone."""
    one = slice(row, row + 1)
    return inputs | {
        "q": inputs["q"][one], "block_table": inputs["block_table"][one], "kv_len": inputs["kv_len"][one],
        "query_start": inputs["query_start"][:2], "query_start_host": [0, 1], "kv_len_host": inputs["kv_len_host"][one],
    }


def wide(inputs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 1, 100, native.SPLIT, native.SPLIT + 100])
@pytest.mark.parametrize("width", [64, 80, 128])
def test_long_contexts(width: int, window: int | None, softcap: float | None) -> None:
    inputs = cache(LENGTHS, width=width) | {"window": window, "softcap": softcap}
    expected = paged_attention_reference(**wide(inputs))
    # Sums of up to 1,061 products of weights that add up to 1 and values below 5, in float32.
    torch.testing.assert_close(paged_attention_native(**inputs).double(), expected, rtol=2e-6, atol=2e-6)


def test_a_row_does_not_depend_on_its_neighbours_or_on_threads() -> None:
    inputs = cache(LENGTHS)
    together = paged_attention_native(**inputs)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for row in range(len(LENGTHS)):
                assert torch.equal(paged_attention_native(**row_of(inputs, row))[0], together[row])
    finally:
        torch.set_num_threads(threads)


def test_decodes_and_chunks_in_one_batch() -> None:
    inputs = cache([40, 70, 33, 20])
    queries = [1, 1, 5, 1]
    starts = [0, 1, 2, 7, 8]
    inputs |= {
        "q": torch.randn(8, 6, 64), "query_start": torch.tensor(starts, dtype=torch.int32), "query_start_host": starts,
    }
    assert [end - start for start, end in itertools.pairwise(starts)] == queries
    expected = paged_attention_reference(**wide(inputs))
    torch.testing.assert_close(paged_attention_native(**inputs).double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("window", [None, 50])
def test_a_query_does_not_depend_on_its_chunk_or_on_threads(window: int | None) -> None:
    length, last = 200, 150
    generator = torch.Generator().manual_seed(4)
    queries = torch.randn(last, 6, 64, generator=generator)
    whole = chunk(cache([length]), queries, length) | {"window": window}
    together = paged_attention_native(**whole)
    torch.testing.assert_close(together.double(), paged_attention_reference(**wide(whole)), rtol=2e-6, atol=2e-6)
    threads = torch.get_num_threads()
    try:
        for count, size in itertools.product((1, 2), (7, 64, 149)):
            torch.set_num_threads(count)
            parts = [
                paged_attention_native(**whole | chunk(whole, part, length - last + start + len(part)))
                for start, part in zip(range(0, last, size), queries.split(size), strict=True) if len(part) > 1
            ]
            joined = torch.cat(parts)
            assert torch.equal(joined, together[: len(joined)])
    finally:
        torch.set_num_threads(threads)


def chunk(inputs: dict[str, Any], queries: torch.Tensor, kv_len: int) -> dict[str, Any]:
    """The only row of `inputs`, with these queries at the end of its first `kv_len` positions."""
    starts = [0, len(queries)]
    return inputs | {
        "q": queries, "query_start": torch.tensor(starts, dtype=torch.int32), "query_start_host": starts,
        "kv_len": torch.tensor([kv_len], dtype=torch.int32), "kv_len_host": [kv_len],
    }


def test_a_broken_row_stays_broken_and_alone() -> None:
    inputs = cache(LENGTHS)
    healthy = paged_attention_native(**inputs)
    inputs["k_cache"][inputs["block_table"][1, 2].item(), 3] = torch.nan
    broken = paged_attention_native(**inputs)
    assert broken[1].isnan().all()
    others = [row for row in range(len(LENGTHS)) if row != 1]
    assert torch.equal(broken[others], healthy[others])
    x = torch.randn(3, 40)
    x[1, 7] = torch.nan
    norm = rms_norm_native(x, torch.ones(40), 1e-5)
    assert isinstance(norm, torch.Tensor)
    assert norm[1].isnan().all() and norm[[0, 2]].isfinite().all()


def test_auto_takes_them_and_reference_does_not() -> None:
    site = Site("cpu", torch.float32, 64)
    for name in ("rms_norm", "gated_activation", "rotary_write", "paged_attention", "embedding", "soft_cap", "greedy"):
        assert REGISTRY[name].choose(site).name == "native"
        assert REGISTRY[name].choose(Site("cpu", torch.float64, 64)).name == "reference"


@pytest.mark.parametrize("name", ["gemma2", "qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "phi3"))])
def test_same_tokens_as_the_definitions(name: str, tmp_path: Path) -> None:
    """float32, where rounding could in principle decide: these seeds have no ties."""
    model = save_checkpoint(name, tmp_path, tie_word_embeddings=False)
    options = USUAL | {"dtype": "float32", "max_num_batched_tokens": 24}
    plain = run(model, options | {"kernels": "reference"}, requests()).answers
    assert run(model, options, requests()).answers == plain


def checks() -> list[Any]:
    """Per level: its products, and its other kernels where it has its own. Every commit runs the lowest level of its own machine
    and the one that is used on it, and slow tests those between and, with emulators, of other machines."""
    used = next(level for level in native_build.levels() if level.needs <= cpu_flags())
    every_commit = {"native_check.c": ("base", used.name), "native_step_check.c": ("base", used.falls_to or used.name)}
    return [
        pytest.param(name, machine, level, id=f"{name}-{machine}-{level.name}",
                     marks=() if machine == platform.machine() and level.name in every_commit[name] else pytest.mark.slow)
        for machine, levels in native_build.LEVELS.items() for level in levels
        for name in ("native_check.c", "native_step_check.c") if name == "native_check.c" or not level.falls_to
    ]


def declarations(folder: Path) -> Path:
    """Of the functions that the checks take from the library: the heads of their definitions."""
    made = folder / "declared.h"
    heads = [
        head for name in ("products/product.c", "step/decode_attention.c", "step/prefill_attention.c")
        for head in re.findall(r"^void KERNEL[^{;]+(?= {)", (native_build.SOURCES / name).read_text(), re.MULTILINE)
    ]
    made.write_text("\n".join(['#include "products/tiles.h"', '#include "step/kv.h"', *(f"{head};" for head in heads)]))
    return made


@pytest.mark.parametrize(("name", "machine", "level"), checks())
def test_every_level(name: str, machine: str, level: native_build.Level, tmp_path: Path) -> None:
    emulator: list[str] = []
    compiler = "cc"
    if platform.machine() != machine:
        compiler = f"{machine}-linux-gnu-gcc"
        emulators = [tool for tool in (f"qemu-{machine}-static", f"qemu-{machine}") if shutil.which(tool)]
        if shutil.which(compiler) is None or not emulators or level.name in ("vnni", "avx512"):  # no emulator knows these
            pytest.skip(f"another machine, and no {compiler} or emulator for it")
        emulator = [emulators[0], "-cpu", "max"]
    elif not level.needs <= cpu_flags():
        pytest.skip(f"this machine has no {level.name}")
    # -O1 and more take several times as long to compile as the check runs.
    own = {"-O3": "-Og", "-fopenmp": "-Wno-unknown-pragmas", "-fPIC": "-static" if emulator else "-pthread"}
    flags = [own.get(flag, flag) for flag in native_build.FLAGS] + [*level.flags, f"-DLEVEL={level.name}"]
    checked, libraries = tmp_path / "check", ["-lm"]
    if not emulator:                     # the library of this machine has all of its levels: the very code that engines run
        flags += [f'-DLIBRARY="{declarations(tmp_path)}"', f"-DSPLIT={native.SPLIT}"]
        libraries += [str(native.path()), "-fopenmp"]
    source = Path(__file__).with_name(name)
    subprocess.run([compiler, *flags, f"-I{native_build.SOURCES}", str(source), "-o", str(checked), *libraries], check=True)
    done = subprocess.run([*emulator, str(checked)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@needs_compiler
def test_a_selection_is_not_quadratic_in_any_order(tmp_path: Path) -> None:
    """400,000 members in the worst order: without a bound on its work it would take a quarter of an hour."""
    folder, made = Path(__file__).parent, tmp_path / "selection"
    sources = [folder / "draw_selection.c", native_build.SOURCES / "pool.c"]
    subprocess.run(["cc", *native_build.FLAGS, "-O2", "-DLEVEL=base", *map(str, sources), "-o", str(made), "-lm"], check=True)
    limit = partial(resource.setrlimit, resource.RLIMIT_CPU, (60, 60))       # of processor time: another's load does not count
    assert subprocess.run([made, "400000"], preexec_fn=limit).returncode == 0


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="these are flags of x86_64")
def test_the_base_level_compiles_where_the_compiler_assumes_more() -> None:
    """Some distributions' compilers have AVX, and not AVX2, by default."""
    for source in native_build.sources():
        if source.suffix == ".c" and source.name not in native_build.ONCE:
            flags = [*native_build.FLAGS, "-O0", "-DLEVEL=base", "-mavx", "-mno-avx2"]
            subprocess.run(["cc", *flags, "-fsyntax-only", str(source)], check=True)


def test_every_level_of_this_machine_is_in_the_library() -> None:
    for level in native_build.levels():
        assert set(vars(native.load(native.path(), level.name))) == set(vars(native.library()))
    flags = native.platform.cpu_flags()
    assert next(level for level in native_build.levels() if level.name == native.level()).needs <= flags


def test_another_source_or_machine_has_another_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = native.path()
    assert here.is_file()
    monkeypatch.setattr(native_build.platform, "machine", lambda: "another")
    assert native.path() != here
    monkeypatch.undo()
    changed = tmp_path / "src"
    shutil.copytree(native_build.SOURCES, changed)
    monkeypatch.setattr(native_build, "SOURCES", changed)
    assert native.path() == here
    (changed / "pool.h").write_text((changed / "pool.h").read_text() + "\n")
    assert native.path() != here


def test_a_build_in_the_package_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`pip install` has made it: neither a compiler nor the cache is needed."""
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    assert native.path().parent != tmp_path
    prebuilt = tmp_path / native_build.file_name()
    prebuilt.write_bytes(b"code")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert native.path() == native.build() == prebuilt


def test_without_a_compiler_the_error_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(native_build, "file_name", lambda: "native-other.native")        # none like it came with the package
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(ConfigError, match="no C compiler: no-such-compiler"):
        native.build()
    monkeypatch.setenv("CC", "false")
    with pytest.raises(ConfigError, match=r"false failed on \w+\.c"):
        native.build()
    assert not list(tmp_path.glob("native*"))
    compiler = tmp_path / "cc"                           # on a full disk
    compiler.write_text("#!/bin/sh\necho 'a.s: Assembler messages:\na.s: Fatal error: No space left on device' >&2; exit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(ConfigError, match=r"a\.s: Fatal error: No space left on device$"):
        native.build()


def test_without_a_cache_directory_an_engine_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native_build, "file_name", lambda: "native-other.native")
    (tmp_path / "file").touch()
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "file" / "cache"))
    assert native.if_built() is None


def test_an_engine_compiles_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`pip install` runs no `ridgeline build`: the first engine compiles, and says so; without a compiler it says that, too."""
    missing, built = tmp_path / "kernels.native", native.path()
    monkeypatch.setattr(native, "path", lambda: missing)
    monkeypatch.setattr(native, "build", lambda: built)
    monkeypatch.setattr(native.logger.parent, "propagate", True)
    caplog.set_level("INFO", "ridgeline")
    assert native.library.__wrapped__() is not None
    assert "compiling the CPU kernels for this machine (once" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(native, "path", lambda: missing)
    monkeypatch.setattr(native.logger.parent, "propagate", True)
    monkeypatch.setenv("CC", "no-such-compiler")
    assert native.library.__wrapped__() is None
    assert "decoding is slower: no C compiler: no-such-compiler" in caplog.text


def test_the_container_image_has_the_kernels() -> None:
    """setup.py compiles them into the package. In the cache alone they lie in a volume, which may be that of an older image."""
    root = Path(__file__).resolve().parents[3]
    copied = re.findall(r"^COPY (.+) \./$", (root / "Dockerfile").read_text(), re.MULTILINE)[0].split()
    let_in = re.findall(r"^!(.+)$", (root / ".dockerignore").read_text(), re.MULTILINE)
    assert "setup.py" in copied and set(copied) <= set(let_in) and all((root / name).is_file() for name in copied)
