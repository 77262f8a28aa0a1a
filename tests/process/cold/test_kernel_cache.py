"""A cache directory that cannot take compiled kernels makes a start longer and does not end it."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any, NoReturn

import pytest

from ridgeline.process.cold.kernel_cache import ROOM, VARIABLE, choose_kernel_cache

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache directory with room, whatever this machine has; and the log is heard."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2 * ROOM, 0, 2 * ROOM))
    monkeypatch.setattr(logging.getLogger("ridgeline"), "propagate", True)
    return tmp_path / "cache"


def chosen() -> Path:
    choose_kernel_cache()
    return Path(os.environ[VARIABLE])


def test_kernels_are_kept_beside_our_other_files(own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert chosen() == own_cache / "triton" and (own_cache / "triton").is_dir() and not caplog.messages


def test_a_users_own_folder_is_taken(monkeypatch: pytest.MonkeyPatch, own_cache: Path) -> None:
    monkeypatch.setenv(VARIABLE, "/somewhere/else")
    assert chosen() == Path("/somewhere/else") and not own_cache.exists()


@pytest.mark.parametrize("fault", ["full", "no room", "read-only", "a file", "open to others"])
def test_where_none_can_be_written_a_folder_of_the_process_is_taken(
    fault: str, monkeypatch: pytest.MonkeyPatch, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **options: Any) -> NoReturn:
        raise OSError(30, "Read-only file system")

    if fault == "full":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(ROOM, ROOM - 2**20, 2**20))
    elif fault == "read-only":
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    elif fault == "no room":
        monkeypatch.setattr(shutil, "disk_usage", refuse)
    elif fault == "a file":
        own_cache.write_text("")
    else:
        own_cache.mkdir()
        own_cache.chmod(0o777)
    folder = chosen()
    try:
        assert folder.is_dir() and folder.name.startswith("ridgeline-kernels-") and own_cache not in folder.parents
        (folder / "kernel").write_text("")
        assert len(caplog.messages) == 1 and "compiles those that are not there" in caplog.messages[0]
        assert "1 MiB are free" in caplog.messages[0] or fault != "full"
    finally:
        shutil.rmtree(folder)


def test_kernels_of_an_image_are_taken_along(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a read-only file system, and a cache that was filled when its image was made."""
    (own_cache / "triton" / "KEY").mkdir(parents=True)
    (own_cache / "triton" / "KEY" / "kernel.cubin").write_bytes(b"cubin")
    own_cache.chmod(0o700)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(ROOM, ROOM, 0))
    folder = chosen()
    try:
        assert folder != own_cache / "triton" and (folder / "KEY" / "kernel.cubin").read_bytes() == b"cubin"
    finally:
        shutil.rmtree(folder)


def test_a_cache_that_others_may_write_to_is_not_read(own_cache: Path) -> None:
    (own_cache / "triton" / "KEY").mkdir(parents=True)
    own_cache.chmod(0o777)
    folder = chosen()
    try:
        assert [*folder.iterdir()] == []
    finally:
        shutil.rmtree(folder)
