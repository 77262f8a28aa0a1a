"""A file that the user names is read in full up to a bound, or refused in one line: no endless device, no wait for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from served_model import write_model

from ridgeline import user_files
from ridgeline.__main__ import main
from ridgeline.errors import ConfigError
from ridgeline.evaluate.reference import ReferenceFile
from ridgeline.evaluate.task import REFERENCE_MAGIC
from ridgeline.user_files import read_bytes, read_json, read_text

# Every option that reads a file of the user's own; @ is the file.
COMMANDS = [
    "eval MODEL --text @", "eval MODEL --slice-file a=@", "eval MODEL --choices @", "eval MODEL --reference @",
    "diagnose --from-trace @", "bench compare @ @",
    "plan --check @", "plan --fit @", "plan llama-3.1-8b --gpu H100 --count 2 --comm @", "serve --config @",
    "serve MODEL --api-key-file @", "serve MODEL --device cpu --port 0 --chat-template @", "quantize MODEL --recipe @ --out NEW",
    "quantize MODEL --recipe int4-gptq --out NEW --calibration @",
    "bench serve http://127.0.0.1:9 --dataset-path @",
]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_files, "WRITER_WAITS", 3)
    monkeypatch.setattr(user_files, "MOST_PIPED", 1 << 20)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """`serve` takes the process's signals over before it reads its files, and the tests behind this one have the same process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_such_file_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    (sparse := tmp_path / "sparse").touch()
    os.truncate(sparse, 10 << 30)
    (nested := tmp_path / "nested").write_text("[" * 200_000)
    (garbage := tmp_path / "garbage").write_bytes(bytes(range(128, 256)) * 100)
    model = str(write_model(tmp_path / "model"))
    is_text = any(f"--{name} " in command for name in ("text", "slice-file", "calibration", "api-key-file", "chat-template"))
    for file in (Path("/dev/zero"), fifo, sparse, tmp_path, garbage, *([] if is_text else [nested])):
        places = {"@": str(file), "MODEL": model, "NEW": str(tmp_path / "new")}
        words = command.split()
        for name, place in places.items():
            words = [word.replace(name, place) for word in words]
        assert main(words) == 2, words
        said = capsys.readouterr().err
        assert said.startswith("ridgeline: error: ") and said.count("\n") == 1 and len(said) < 600, said
        assert file.name in said


def test_records_and_references_that_are_damaged_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "file").write_text('{"benchmark": "serve", "figures": {"points": [{"setting": {}, "figures": []}]}}')
    assert main(["plan", "--check", str(file)]) == 2
    assert "file is not a record of `ridgeline bench serve`" in capsys.readouterr().err
    for header in (b"", b"[]", b'{"model": 1}', b"[" * 100_000):
        file.write_bytes(REFERENCE_MAGIC + header)
        with pytest.raises(ConfigError, match="damaged reference"):
            ReferenceFile(file)


@pytest.mark.parametrize("command", ["serve --config", "quantize --out new --recipe"])
def test_yaml_that_grows_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    for text, why in (("\n".join(lines), "an alias"), ("a: 2026-99-99", "month must be"), ("[" * 600, "nested too deeply")):
        (file := tmp_path / "file.yaml").write_text(text)
        assert main([*command.split(), str(file)]) == 2
        said = capsys.readouterr().err
        assert "file.yaml is not YAML: " in said and why in said


def test_pipes_are_read_to_their_end() -> None:
    reading, writing = os.pipe()

    def write() -> None:
        for part in (b"a" * 40_000, b"b" * 100_000):
            os.write(writing, part)
        os.close(writing)

    threading.Thread(target=write).start()
    assert read_bytes(f"/dev/fd/{reading}") == b"a" * 40_000 + b"b" * 100_000
    assert read_bytes(f"/dev/fd/{reading}") == b""       # its writer has left
    os.close(reading)


def test_a_fifo_whose_writer_comes_later_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    code = f"import time; file = open({str(fifo)!r}, 'w'); time.sleep(0.1); file.write('late')"
    writer = subprocess.Popen([sys.executable, "-c", code])
    try:
        assert read_text(fifo) == "late"
    finally:
        writer.wait()


def test_a_bound_holds_where_no_size_is_known(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"x" * 101)
    assert read_bytes(file, 101) == b"x" * 101
    with pytest.raises(ConfigError, match="more than"):
        read_bytes(file, 100)
    with pytest.raises(ConfigError, match="more than"):
        read_bytes("/dev/zero", 1 << 20)


def test_text_and_json(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"a\r\nb\rc\n")
    assert read_text(file) == file.read_text() == "a\nb\nc\n"
    with pytest.raises(ConfigError, match="is not a record: Expecting value"):
        read_json(file, "a record")
    file.write_text('{"a": [1]}')
    assert read_json(file) == {"a": [1]}


@pytest.mark.parametrize("words", [
    ["eval", "--text", "x" * 15_000], ["serve", "--config", "x" * 15_000], ["bench", "compare", "x" * 15_000, "y" * 15_000],
    ["x" * 15_000], ["serve", "m", "x" * 15_000], ["serve", "--" + "x" * 15_000], ["serve", "--port", "x" * 15_000],
    ["serve", "--dtype", "x" * 15_000], ["serve", "x" * 15_000], ["chat", "--url", "x://" + "x" * 15_000],
    ["plan", "x" * 15_000, "--gpu", "H100"], ["plan", "llama-3.1-8b", "--gpu", "x" * 15_000],
    ["bench", "serve", "http://127.0.0.1:9", "--out", "/missing/" + "x/" * 7_000],
])
def test_a_long_word_is_cut_in_the_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("ridgeline: error: ") and len(said) < 700, (len(said), said[:300])
