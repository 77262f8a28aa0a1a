"""Classes of racecheck reports: the compiler's, a library's, explained ones, and everything else, which is found."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ridgeline.ops import registry

ROOT = Path(__file__).parents[2]
LIBRARYS = "cudnn_generated_sm90_flash_fprop_kernel0_0"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize_kernels", ROOT / "scripts" / "sanitize_kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module                      # where its dataclasses look
    spec.loader.exec_module(module)
    return module


sanitize = load()
HANDED = sanitize.KNOWN[0]


def at(lines: tuple[str, ...], access: int) -> int:
    """Where the only such run of lines has its access."""
    source = [line.strip() for line in sanitize.op_file(HANDED.file).read_text().splitlines()]
    found = [place for place in range(len(source)) if tuple(source[place : place + len(lines)]) == lines]
    assert len(found) == 1, lines
    return found[0] + 1 + access % len(lines)


def outcome(*reports: list[str], end: str = "kernels: prompt_kernel wide_gemm_kernel") -> sanitize.Outcome:
    """Of a process whose log is that of racecheck; a report is places of accesses."""
    said = ["========= COMPUTE-SANITIZER"]
    for first, *others in reports:
        said += [f"========= Error: Race reported between {first}", *(f"=========     and {other}" for other in others)]
    said += [end, f"========= RACECHECK SUMMARY: {len(reports)} hazards displayed ({len(reports)} errors, 0 warnings)"]
    code = f"print({chr(10).join(said)!r}); raise SystemExit({sanitize.FOUND})"
    return sanitize.run([sys.executable, "-c", code, "racecheck"], 60)


def handed(write: int, read: int) -> list[str]:
    return [
        f"Write access at prompt_kernel+0xe5b0 in kernel_prefill_hopper.py:{write}",
        f"Read access at prompt_kernel+0xf4a0 in kernel_prefill_hopper.py:{read} [144 hazards]",
        f"Read access at prompt_kernel+0xf4c0 in kernel_prefill_hopper.py:{read} [192 hazards]",
    ]


def test_an_explained_pair_is_recorded_with_its_reason() -> None:
    result = outcome(handed(at(HANDED.write, 0), at(HANDED.read, -1)))
    assert result.state == result.found["prompt_kernel"] == sanitize.EXPLAINED
    (found,) = result.findings
    assert (found["hazards"], found["reason"]) == (336, HANDED.reason)
    assert sanitize.by_kernel({"racecheck a": result})["prompt_kernel"] == {"racecheck": sanitize.EXPLAINED}


def test_only_that_pair_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its accesses with others, not other accesses beside it, not the same pair after a change of the source."""
    write, read = at(HANDED.write, 0), at(HANDED.read, -1)
    assert outcome(handed(write, read + 2)).state == outcome(handed(write - 1, read)).state == "FOUND"
    assert outcome(handed(write, read)[::-1]).state == "FOUND"
    both = outcome(handed(write, read), [f"Write access at wide_gemm_kernel+0x10 in gemm_wide.py:{write}",
                                         f"Read access at wide_gemm_kernel+0x20 in gemm_wide.py:{read} [1 hazards]"])
    assert both.state == both.found["wide_gemm_kernel"] == "FOUND" and both.found["prompt_kernel"] == sanitize.EXPLAINED
    source = sanitize.op_file(HANDED.file).read_text().splitlines()
    assert source[write].strip() == "group_barrier()"
    source[write] = ""
    (tmp_path / HANDED.file).write_text("\n".join(source))
    monkeypatch.setattr(sanitize, "OPS", tmp_path)
    assert outcome(handed(write, read)).state == "FOUND"


def test_kernels_of_libraries_are_classified() -> None:
    def pair(kernel: str) -> list[str]:
        return [f"Read access at {kernel}+0x2e0", f"Write access at {kernel}+0x3c40 [8 hazards]"]

    result = outcome(pair(LIBRARYS), pair(f"void at::native::{LIBRARYS}<float, (int)4>(T1 *, int)"))
    assert result.state == sanitize.LIBRARYS and len(result.findings) == 2
    assert result.findings[0]["kernel"] == LIBRARYS
    assert outcome(pair(LIBRARYS), pair("wide_gemm_kernel")).state == "FOUND"           # ours, without a line
    assert outcome(pair("_both_write_kernel"), end="kernels: _both_write_kernel").state == "FOUND"
    assert outcome(pair(LIBRARYS), end="").state == "FOUND"                              # the log does not say which kernels ran
    assert outcome([f"Read access at {LIBRARYS}+0x1 in kernel_cases.py:3"]).state == "FOUND"


def test_what_cannot_be_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    explained = handed(at(HANDED.write, 0), at(HANDED.read, -1))
    assert outcome(explained, ["something else"]).state == outcome([*explained, "Read access at a place"]).state == "FOUND"
    assert outcome(explained, end="========= Target application returned an error").state == "FOUND"
    assert outcome().state == "FOUND"
    monkeypatch.setattr(sanitize, "PRINTED", 1)
    assert outcome(explained).state == "FOUND"                                           # there may be more


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None or registry.TRITON_INTERPRETED, reason="no compiler")
def test_the_explained_stores_are_in_order(tmp_path: Path) -> None:
    """What the reason says: between the warp's store and its first thread's arrival is a barrier of the warp, and the readers
    load behind their wait."""
    command = [sys.executable, str(ROOT / "tests/ops/test_kernel_prefill_hopper.py"), "64", "2", "narrow"]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    steps = r"st\.shared|ld\.shared|bar\.warp\.sync|mbarrier\.[a-z_]+(?:\.expect_tx)?"
    place = 0
    code: list[tuple[int, str]] = []                     # lines of the source, and what happens there
    for line in json.loads(run.stdout)["ptx"].splitlines():
        if moved := re.search(r"// (\S+\.py):(\d+):\d+", line):
            place = int(moved.group(2)) if moved.group(1) == HANDED.file else 0
        elif done := re.match(rf"\s*(?:@%p\d+ )?({steps})\b", line):
            code.append((place, done.group(1)))
    write, read = at(HANDED.write, 0), at(HANDED.read, -1)
    stores = [number for number, each in enumerate(code) if each == (write, "st.shared")]
    assert len(stores) == 2                              # of keys' scales and of values'
    for number in stores:
        behind = [each for each in code[number + 1 : number + 4] if each != (write + 2, "bar.warp.sync")]   # some add their own
        assert behind[:2] == [(write + 1, "bar.warp.sync"), (write + 2, "mbarrier.arrive.expect_tx")]
    loads = [number for number, each in enumerate(code) if each == (read, "ld.shared")]
    first_wait = at(HANDED.read, 0)
    assert loads and [what for _, what in code[loads[0] - 2 : loads[0]]] == ["mbarrier.try_wait"] * 2
    assert not any(each == (first_wait, "mbarrier.try_wait") for each in code[loads[0] :])
