"""Cached files that were changed are not used, and a start does not hash large files twice. Secrets leave the environment."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ridgeline.errors import ConfigError, ModelError
from ridgeline.ops.cpu import native
from ridgeline.process import embedded, integrity, platform


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    return platform.cache_dir()


@pytest.mark.reliability("S-10d")
def test_a_damaged_embedded_model_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cache / embedded.FILE
    file.write_bytes(b"a model")
    monkeypatch.setattr(embedded, "SIZE", 7)
    monkeypatch.setattr(embedded, "SHA256", integrity.sha256_of(file))
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    hashed: list[Path] = []
    whole = integrity.sha256_of
    monkeypatch.setattr(integrity, "sha256_of", lambda path: hashed.append(path) or whole(path))
    assert embedded.find() == embedded.find() == file and len(hashed) == 1       # the second time nothing is hashed
    file.write_bytes(b"amodel!")
    assert embedded.find() is None
    with pytest.raises(ModelError, match="ridgeline pull"):
        embedded.require()


@pytest.mark.reliability("S-10d")
def test_a_library_that_was_changed_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.native_build, "compile_into", lambda target: target.write_bytes(b"code"))
    monkeypatch.setattr(native.native_build, "file_name", lambda: "kernels.native")  # not the one in the package: it is in use
    loaded: list[bytes] = []

    def load(file: str, **options: object) -> None:
        loaded.append(Path(file).read_bytes())
        raise OSError("enough")

    monkeypatch.setattr(native.ctypes, "CDLL", load)
    monkeypatch.setattr(native, "_openmp_runtimes", list)
    built = native.build()
    assert built.parent == cache and native._is_ours(built)
    built.write_bytes(b"other")
    assert not native._is_ours(built) and native.library.__wrapped__() is None
    assert loaded == [b"code"]                           # made anew
    built.chmod(0o777)
    assert not native._is_ours(built)
    built.chmod(0o700)
    native._note_of(built).unlink()
    assert not native._is_ours(built)


@pytest.mark.reliability("S-10d")
def test_the_library_is_compiled_once_however_many_start_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compiled it for itself: six starts took six times as long, and a checksum could stand beside another's build."""
    monkeypatch.setattr(native.native_build, "file_name", lambda: "kernels.native")
    compiling: list[Path] = []
    two = threading.Event()

    def compile_into(target: Path) -> None:
        compiling.append(target)
        if len(compiling) > 1:
            two.set()
        two.wait(0.5)                                    # for a second one, which would be here at once
        target.write_bytes(b"code")

    monkeypatch.setattr(native.native_build, "compile_into", compile_into)
    with ThreadPoolExecutor(4) as threads:               # each opens the folder for itself, as processes do
        built = list(threads.map(lambda _: native.build(), range(4)))
    assert len(compiling) == 1 and set(built) == {cache / "kernels.native"} and native._is_ours(built[0])


@pytest.mark.reliability("S-05")
def test_a_key_leaves_the_environment_that_others_can_read() -> None:
    program = (
        "import os\n"
        "from ridgeline.server.http.keys import load_keys\n"
        "from ridgeline.server.options import ServerOptions\n"
        "assert len(load_keys(ServerOptions())) == 2\n"
        "print(open('/proc/self/environ', 'rb').read())\n"
        "assert os.environ['AFTER'] == os.getenv('AFTER') == 'kept' and 'RIDGELINE_API_KEY' not in os.environ\n"
    )
    given = {"BEFORE": "kept", "RIDGELINE_API_KEY": "key-of-mine,other-key", "AFTER": "kept"}
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ} | given
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "BEFORE=kept" in done.stdout and "AFTER=kept" in done.stdout
    assert "key-of-mine" not in done.stdout and "other-key" not in done.stdout


@pytest.mark.reliability("S-10d")
@pytest.mark.parametrize("home", ["", "relative"])
def test_an_empty_home_is_not_the_working_directory(home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RIDGELINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", home)
    entry = type("Entry", (), {"pw_dir": str(tmp_path / "real")})
    monkeypatch.setattr(platform.pwd, "getpwuid", lambda number: entry)
    assert platform.cache_dir() == tmp_path / "real" / ".cache" / "ridgeline"
    assert [each.name for each in tmp_path.iterdir()] == ["real"]

    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setattr(platform.pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match="RIDGELINE_CACHE"):
        platform.cache_dir()


@pytest.mark.parametrize(
    ("flags", "unusable"),
    [
        ({"avx2"}, ("bfloat16",)), ({"asimd"}, ("bfloat16",)), ({"avx512bw", "avx512vl", "avx512dq"}, ()), ({"bf16"}, ()),
        (set(), ()),
    ],
)
def test_dtypes_that_a_cpu_cannot_multiply(flags: set[str], unusable: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "cpu_flags", lambda: frozenset(flags))
    assert platform.cpu_unusable_dtypes() == unusable


def test_the_scratch_folder_of_a_compilation_that_was_killed_is_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that was stopped while it compiled left its folder in the cache, each time another one."""
    build = native.native_build
    during: list[set[str]] = []

    def run(compiler: str, arguments: list[str], what: str) -> None:
        during.append({each.name for each in cache.iterdir()})
        build._remove_left_over(cache)                   # another start: the folder that is in use stays
        Path(arguments[-3] if arguments[0] == "-shared" else arguments[-1]).write_bytes(b"code")

    monkeypatch.setattr(build, "_check", lambda compiler: None)
    monkeypatch.setattr(build, "_knows", lambda *_: True)
    monkeypatch.setattr(build, "_run", run)
    left, new, other = cache / "compiling-a", cache / "compiling-b", cache / "kept"
    for each in (left, new, other):
        each.mkdir()
        (each / "some.o").touch()
    (cache / "compiling-c").symlink_to(other)
    os.utime(left, (1.0, 1.0))
    monkeypatch.setattr(build, "_LEFT_OVER_SECONDS", 1e6)
    build.compile_into(cache / "kernels.native")
    assert left.name not in during[0] and len(during[0]) == 4
    assert {each.name for each in cache.iterdir()} == {new.name, other.name, "compiling-c", "kernels.native"}
    assert (other / "some.o").exists()
    monkeypatch.setattr(build, "_LEFT_OVER_SECONDS", -1.0)
    build.compile_into(cache / "kernels.native")
    assert not new.exists() and (cache / "kernels.native").read_bytes() == b"code"
