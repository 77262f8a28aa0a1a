"""Models by name: the local Hugging Face cache, `pull`, `list` and `rm`, against a hub in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_hub import COMMIT, FakeHub

from ridgeline.__main__ import main
from ridgeline.cli.models.cmd_pull import choose
from ridgeline.config import EngineConfig
from ridgeline.errors import ModelError
from ridgeline.process import embedded
from ridgeline.process.hub_cache import HubName, find_cached, hub_name, locate, matching_gguf, missing_parts
from ridgeline.process.integrity import has_hash, sha256_of
from ridgeline.resolve import model_path

FILES = {
    "config.json": b'{"a": 1}', "tokenizer.json": b"{}", "README.md": b"no", "model.safetensors": b"w" * 100_000,
    "pytorch_model.bin": b"no", "onnx/model.onnx": b"no", "original/consolidated.safetensors": b"no",
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path / "hub"


def cached(home: Path, repo: str, *files: str, commit: str = "c1") -> Path:
    folder = home / ("models--" + repo.replace("/", "--"))
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    for name in files:
        file = folder / "snapshots" / commit / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 10)
    return folder / "snapshots" / commit


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Qwen/Qwen3-8B", HubName("Qwen/Qwen3-8B")),
        ("hf.co/a/b", HubName("a/b")),
        ("hf.co/a/b-GGUF:Q4_K_M", HubName("a/b-GGUF", "Q4_K_M")),
        ("https://huggingface.co/a/b", HubName("a/b")),
        ("https://huggingface.co/a/b/tree/main", HubName("a/b")),
        ("https://huggingface.co/a/b/resolve/main/x-q4_0.gguf?download=true", HubName("a/b", "x-q4_0.gguf")),
        ("https://huggingface.co/a/b/blob/main/sub/x.gguf", HubName("a/b", "sub/x.gguf")),
        ("llama3.2", None), ("qwen3:8b", None), ("/models/a", None), ("./a/b", None), ("~/a", None), ("a/b.gguf", None),
        ("a/b/c", None), ("https://example.com/x.gguf", None),
    ],
)
def test_what_is_a_name_of_the_hub(text: str, meant: HubName | None) -> None:
    assert hub_name(text) == meant


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("Qwen/Qwen3-8B", "model Qwen/Qwen3-8B is not on this machine: fetch it with `ridgeline pull Qwen/Qwen3-8B` "
                          "(or `hf download Qwen/Qwen3-8B`), or give a directory"),
        ("hf.co/a/b:x.gguf", "fetch it with `ridgeline pull a/b:x.gguf` (or `hf download a/b x.gguf`)"),
        ("https://huggingface.co/a/b", "https://huggingface.co/a/b is not on this machine: fetch it with `ridgeline pull a/b`"),
        ("https://example.com/x.gguf", "model https://example.com/x.gguf is a URL, and nothing is downloaded while serving"),
        ("llama3.2", "names of Ollama's library are not known here. Fetch a model of the Hugging Face hub"),
        ("qwen3:8b", "such as `ridgeline pull Qwen/Qwen3-0.6B`"),
        ("/nowhere/model", "model /nowhere/model does not exist: give a directory"),
        ("model.gguf", "model model.gguf does not exist: give a directory"),
    ],
)
def test_a_model_that_is_not_here_says_how_to_fetch_it(model: str, says: str) -> None:
    with pytest.raises(ModelError) as caught:
        model_path(EngineConfig.of(model=model))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_the_cache_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cached(home, "a/b", "config.json", "model.safetensors")
    assert locate("a/b") == locate("https://huggingface.co/a/b") == folder
    (folder.parents[1] / "refs" / "main").write_bytes(b"\xff\xfe")       # cut short, or of something else
    assert find_cached(HubName("a/b")) == folder
    (folder.parents[1] / "refs" / "main").unlink()                       # downloaded by commit
    assert locate("a/b") == folder
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "elsewhere"))
    with pytest.raises(ModelError, match="ridgeline pull a/b"):
        locate("a/b")


@pytest.mark.parametrize("name", ["embedded", "SmolLM2-135M-Instruct"])
def test_the_embedded_model_has_two_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "require", lambda: Path("/its/file.gguf"))
    assert locate(name) == Path("/its/file.gguf")


def test_gguf_files_of_the_cache(home: Path) -> None:
    folder = cached(home, "a/b", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-f16.gguf")
    assert locate("a/b:q4_k_m") == folder / "m-Q4_K_M.gguf" and locate("a/b:m-Q8_0.gguf") == folder / "m-Q8_0.gguf"
    with pytest.raises(ModelError, match=r"several files; give one of them: a/b:m-Q4_K_M\.gguf, a/b:m-Q8_0\.gguf"):
        locate("a/b")
    assert find_cached(HubName("a/b", "Q5")) is None
    assert matching_gguf(["x-Q4_K_M.gguf", "x-Q4_K_S.gguf"], "Q4_K") == {}


def test_what_is_fetched() -> None:
    sizes = dict.fromkeys(FILES, 1)
    assert choose(HubName("a/b"), sizes) == ["config.json", "tokenizer.json", "model.safetensors"]
    ggufs = dict.fromkeys(["a-Q4_K_M.gguf", "a-Q8_0.gguf"], 1)
    assert choose(HubName("a/b"), ggufs) == ["a-Q4_K_M.gguf"] and choose(HubName("a/b", "q8_0"), ggufs) == ["a-Q8_0.gguf"]
    with pytest.raises(ModelError, match=r"has neither safetensors with a config\.json nor such a GGUF file"):
        choose(HubName("a/b", "Q2_K"), ggufs)


SPLIT = ["Q8_0/m-Q8_0-00001-of-00003.gguf", "Q8_0/m-Q8_0-00002-of-00003.gguf", "Q8_0/m-Q8_0-00003-of-00003.gguf"]


@pytest.mark.parametrize("tag", ["Q8_0", "q8_0", *SPLIT])
def test_all_parts_of_a_split_file_are_fetched(tag: str) -> None:
    sizes = dict.fromkeys(["m-Q4_K_M.gguf", *reversed(SPLIT)], 1)
    assert choose(HubName("a/b", tag), sizes) == SPLIT
    assert choose(HubName("a/b"), sizes) == ["m-Q4_K_M.gguf"]
    with pytest.raises(ModelError, match=r"lacks 1 of 3 parts, such as Q8_0/m-Q8_0-00002-of-00003\.gguf"):
        choose(HubName("a/b", "Q8_0"), dict.fromkeys([SPLIT[0], SPLIT[2]], 1))


def test_a_split_file_is_one_model(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find", lambda: None)
    with FakeHub("a/b", dict.fromkeys(["m-Q4_0.gguf", *SPLIT], b"w" * 20_000_000)) as hub:
        done = ridgeline(hub.url, "pull", "a/b:Q8_0")
    folder = home / "models--a--b" / "snapshots" / COMMIT
    assert done.returncode == 0 and done.stdout.strip() == str(folder / SPLIT[0]), done.stderr
    assert locate("a/b:Q8_0") == locate("a/b") == locate(f"a/b:{SPLIT[1]}") == folder / SPLIT[0]
    assert main(["list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 1 and listed[0].startswith(f"a/b:{SPLIT[0]} ") and "0.06 GB" in listed[0]
    (folder / SPLIT[1]).unlink()
    with pytest.raises(ModelError, match=rf"1 of its 3 parts are not .*, the first is {SPLIT[1]}: fetch them with .*{SPLIT[0]}`"):
        locate("a/b:Q8_0")
    assert main(["list"]) == 0 and "1 of 3 parts are missing" in capsys.readouterr().out
    assert main(["rm", "a/b:Q8_0"]) == 0 and not list(folder.rglob("*.gguf"))


def ridgeline(hub: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface_hub reads its variables when it is imported."""
    env = os.environ | {"HF_ENDPOINT": hub, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "ridgeline", *argv]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=120)


def test_a_file_that_a_download_removes_meanwhile_ends_no_list(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cached(home, "a/b", "config.json", "model.safetensors")
    (folder / "gone.json").symlink_to("nowhere")
    monkeypatch.setattr(embedded, "find", lambda: None)
    monkeypatch.setattr(Path, "is_file", lambda path: True)              # it was there a moment ago
    assert main(["list"]) == 0
    assert capsys.readouterr().out.startswith("a/b ")


def test_parts_that_are_missing_are_found_in_linear_time() -> None:
    assert len(missing_parts([f"m-{number:05}-of-99999.gguf" for number in range(2, 99_999, 2)])) == 50_000


def test_pull_list_and_rm(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeHub("a/b", FILES) as hub:
        hub.cut = {"model.safetensors"}                  # huggingface_hub asks again for the rest
        done = ridgeline(hub.url, "pull", "a/b")
        first, hub.asked = hub.asked, []
        again = ridgeline(hub.url, "pull", "a/b", "--quiet")
    assert done.returncode == 0, done.stderr
    assert again.returncode == 0 and not again.stdout + again.stderr     # nothing is fetched twice
    assert not [asked for asked in hub.asked if asked.startswith("GET") and "/resolve/" in asked]
    assert done.stdout.strip() == str(home / "models--a--b" / "snapshots" / COMMIT)
    assert "3 of 3 files" in done.stderr and not any("README" in asked or ".bin" in asked for asked in first)
    assert (locate("a/b") / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert len([asked for asked in first if asked.startswith("GET") and "model.safetensors" in asked]) == 2

    monkeypatch.setattr(embedded, "find", lambda: None)
    assert main(["list"]) == 0 and "a/b" in capsys.readouterr().out
    assert main(["rm", "a/b"]) == 0 and not (home / "models--a--b").exists()
    assert main(["list"]) == 0
    assert "`ridgeline pull` fetches" in capsys.readouterr().err
    assert main(["rm", "a/b"]) == 2 and "is not in the cache" in capsys.readouterr().err


def test_rm_of_the_embedded_model_leaves_no_record_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.process.platform.cache_dir", lambda: tmp_path)
    file = tmp_path / embedded.FILE
    file.write_bytes(b"model")
    assert has_hash(file, sha256_of(file), tmp_path) and len(list(tmp_path.iterdir())) == 2
    assert main(["rm", "embedded"]) == 0 and not list(tmp_path.iterdir())


def test_rm_of_one_file_keeps_the_others(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cached(home, "a/b", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    blob = home / "models--a--b" / "blobs" / "123"
    blob.parent.mkdir()
    (folder / "m-Q8_0.gguf").rename(blob)
    (folder / "m-Q8_0.gguf").symlink_to(blob)
    assert main(["rm", "a/b:Q8_0"]) == 0
    assert not blob.exists() and (folder / "m-Q4_K_M.gguf").exists() and not (folder / "m-Q8_0.gguf").is_symlink()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("repo", "words", "says"),
    [
        ("a/b", ("pull", "a/c"), "there is no model a/c on "),
        ("a/b", ("pull", "a/b", "--revision", "v9"), "a/b has no revision 'v9'"),
        ("a/gated", ("pull", "a/gated"), "a/gated is gated: accept its licence"),
        ("a/b", ("pull", "llama3"), "llama3 is not a name on the Hugging Face hub"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(repo: str, words: tuple[str, ...], says: str) -> None:
    with FakeHub(repo, FILES) as hub:
        done = ridgeline(hub.url, *words)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_name_that_no_hub_takes_is_not_called_a_missing_network() -> None:
    done = ridgeline("http://127.0.0.1:9", "pull", "a/" + "x" * 5_000)
    assert done.returncode == 2 and "is not a name on the Hugging Face hub" in done.stderr and len(done.stderr) < 1_000


def test_ctrl_c_stops_a_download_as_it_stops_other_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", stopped)
    assert main(["pull", "mine/model", "--quiet"]) == 130
    assert capsys.readouterr().err == "the same command again resumes\nstopped\n"


def test_without_a_network_there_is_one_line() -> None:
    done = ridgeline("http://127.0.0.1:9", "pull", "a/b")
    assert done.returncode == 2 and "http://127.0.0.1:9 cannot be reached" in done.stderr and done.stderr.count("\n") == 1
