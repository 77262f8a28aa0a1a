"""The command line: what is printed, what is written, and exit codes. Commands run in this process where they can."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import select
import signal
import subprocess
import sys
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import warm_start
from served_model import CONTEXT, one_thread, wait_until, write_model

from ridgeline import LLM, SamplingParams
from ridgeline.__main__ import ALIASES, COMMANDS, main
from ridgeline.cli import cmd_serve
from ridgeline.cli.cmd_completion import script
from ridgeline.cli.cmd_generate import finished_ids
from ridgeline.cli.cmd_serve import GROUPS, welcome
from ridgeline.cli.config_options import OptionParser
from ridgeline.config import declared_options
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.sampling_defaults import SamplingDefaults
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.ipc import Ready
from ridgeline.errors import ConfigError
from ridgeline.ops.cpu import native, native_build
from ridgeline.process import embedded
from ridgeline.server.options import ServerOptions
from ridgeline.version import __version__

OPTIONS = ("--load-format", "dummy", "--num-gpu-blocks-override", "600", "--max-num-seqs", "4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


def ridgeline(*argv: str, **settings: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ridgeline", *argv]
    return warm_start.run(command, 60, **{"env": one_thread()} | settings)


# -- the command itself ------------------------------------------------------------------------------------------------


def test_help_imports_next_to_nothing() -> None:
    """Start-up time is imports: 150 ms allow the standard library, and nothing of ours but names."""
    code = "import sys; from ridgeline.__main__ import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"torch", "numpy", "msgspec", "zmq", "tokenizers", "rich", "starlette", "uvicorn", "asyncio", "argparse"}
    assert not heavy & set(done.stderr.split())
    assert all(f"  {command} " in done.stdout for command in COMMANDS)


def test_the_help_of_commands_that_can_do_without_torch_does() -> None:
    """All in one process: what one of them imported would be found behind it."""
    words = (["eval"], ["plan"], ["diagnose"], ["serve"], ["bench", "serve"], ["bench", "compare"])
    code = f"""
import sys; from ridgeline.__main__ import main
for words in {words!r}:
    try: main([*words, '--help'])
    except SystemExit: pass
    assert 'torch' not in sys.modules, words
"""
    subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=True)


def test_the_help_of_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    said = capsys.readouterr()
    assert not said.err and said.out.startswith("usage: ridgeline bench COMMAND")
    assert [line.split()[1] for line in said.out.splitlines() if line.startswith("  bench ")] == [
        name.split()[1] for name in COMMANDS if name.startswith("bench ")
    ]


@pytest.mark.slow
def test_help_is_fast() -> None:
    """Processor time beside a bare interpreter's, the least of five: neither depends much on who else uses the machine."""

    def seconds(*command: str) -> float:
        times = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(times)

    assert seconds("-m", "ridgeline", "--help") - seconds("-c", "pass") < 0.05


COMMAND_NAMES = [
    "serve", "route", "chat", "generate", "admin", "eval", "quantize", "plan", "diagnose", "pull", "list", "rm", "build",
    "completion", "bench serve", "bench offline", "bench host", "bench grammar", "bench ops", "bench frontend", "bench idle",
    "bench comm", "bench startup",
    "bench soak", "bench loop", "bench kernel", "bench compare", "bench studies",
]


def test_the_commands() -> None:
    assert list(COMMANDS) == COMMAND_NAMES


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and f"ridgeline {command}" in shown
    usage = shown.partition("\n\n")[0]
    assert len(usage.splitlines()) <= 3, "options are listed once, below"
    assert "[options]" in usage or "--" not in shown.replace("--help", "")


@pytest.mark.parametrize("command", COMMAND_NAMES)
def test_every_option_says_what_it_does(command: str) -> None:
    parser = ArgumentParser()
    import_module(COMMANDS[command][0]).add_arguments(parser)
    assert [action.dest for action in parser._actions if not action.help] == []


@pytest.mark.parametrize(
    ("command", "option", "said"),
    [("bench soak", "--minutes", "10"), ("bench idle", "--batch", "1 256"), ("bench serve", "--request-rate", "inf"),
     ("bench frontend", "--rate", "20000 30000 40000"), ("eval", "--tokens", "2048"), ("bench serve", "--max-concurrency", ""),
     ("bench serve", "--model", "the first that the server lists"), ("chat", "--max-tokens", "the model's, or 1024"),
     ("generate", "--max-tokens", "the model's, or 256")],
)
def test_help_says_an_option_s_default_once(command: str, option: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    explained = capsys.readouterr().out.partition(f"\n  {option}")[2].partition("\n  -")[0]
    assert re.findall(r"\(default:\s(.*?)\)", " ".join(explained.split())) == ([said] if said else [])


def test_the_overview_names_what_other_programs_call_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Ollama's users type `run`."""
    main(["--help"])
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    for other, name in ALIASES.items():
        assert f"(also: {other})" in lines[name]


def test_a_model_is_a_name_a_directory_or_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "a name in the Hugging Face cache, a directory or a .gguf file; default: the embedded SmolLM2-135M-Instruct" in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0 and capsys.readouterr().out == f"ridgeline {__version__}\n"


def test_serve_takes_every_declared_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    for declared, kind, _ in declared_options():
        if declared.name != "model":
            flag = f"--{declared.name.replace('_', '-')}"
            assert flag in shown and (kind is not bool or f"--no-{flag[2:]}" in shown)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serv"], "unknown command 'serv'; did you mean 'serve'?"),
        (["xyzzy"], "unknown command 'xyzzy'; the commands are serve"),
        (["bench"], "bench needs one of: serve, offline, host, grammar, ops, "
                    "frontend, idle, comm, startup, soak, loop, kernel, compare, studies"),
        (["build", "all"], "unexpected argument 'all'"),
        (["serve", "--max-modl-len", "5"], "unknown option --max-modl-len; did you mean --max-model-len?"),
        (["serve", "--max_modl_len=5"], "unknown option --max-modl-len; did you mean --max-model-len?"),
        (["serve", "--max-model", "5"], "unknown option --max-model; did you mean --max-model-len?"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "--port", "eighty"], "argument --port: invalid int value: 'eighty'"),
        (["serve", "--port", "70000", "--load-format", "dummy"], "port must be between 0 and 65535, got 70000"),
        (["serve", "--max_model_len", "1"], "max_model_len must be at least 2, got 1"),
        (["serve", "--dtype", "int3"], "dtype must be one of auto, float32, bfloat16, float16, float64; got 'int3'"),
        (["serve", "--port", "0", "--allowed-host", "http://box"], "allowed_host must list host names or addresses"),
        (["serve", "/nowhere/model"], "model /nowhere/model does not exist"),
        (["serve", "x" * 5000], f"{'x' * 200} ...: File name too long"),
        (["admin", "/nowhere/socket", "profile"], "no server answers at /nowhere/socket: No such file or directory"),
        (["route", "http://[::1"], "'http://[::1' is not the address of a server"),
        (["route", "http://x:99999"], "'http://x:99999' is not the address of a server"),
        (["rm", ""], "a model without a name is not in the cache"),
        (["chat", "/nowhere/model"], "model /nowhere/model does not exist"),
        (["chat", "--temperature", "-1"], "temperature must be a number between 0 and 100, got -1.0"),
        (["generate", "/nowhere.jsonl", "/tmp/out.jsonl"], "/nowhere.jsonl: No such file or directory"),
        (["generate", "only-one"], "the following arguments are required: OUTPUT.jsonl; see ridgeline generate --help"),
        (["admin", "http://127.0.0.1:8000", "load"], "http://127.0.0.1:8000 is a URL; admin takes the path that"),
        (["admin"], "the following arguments are required: SOCKET, command; see ridgeline admin --help"),
        (["chat", "--base-url", "http://127.0.0.1:1"], "no server answers at http://127.0.0.1:1/v1"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_mistakes_are_one_line(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "find", lambda: Path("here"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"ridgeline: error: {says}") and captured.err.count("\n") == 1
    assert captured.out == ""


# -- the embedded model ------------------------------------------------------------------------------------------------


def test_pull(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find", lambda: Path("/here/model.gguf"))
    assert main(["pull", "--quiet"]) == 0 and capsys.readouterr().out == ""
    assert main(["pull"]) == 0 and capsys.readouterr().out == "/here/model.gguf\n"


def test_build(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    compiled: list[list[str]] = []

    def compiler(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        compiled.append(command)
        if "-o" in command:
            Path(command[command.index("-o") + 1]).touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(native_build.subprocess, "run", compiler)
    monkeypatch.setattr(native_build, "file_name", lambda: "kernels.native")     # none like it came with the package
    for _ in range(2):                                   # the second time it is there
        assert main(["build"]) == 0
        assert capsys.readouterr().out == f"CPU kernels for this machine: {native.path()}\n" and native.path().parent == tmp_path
    linked = [command for command in compiled if "-shared" in command]
    assert len(linked) == 1 and len(compiled) > 10 and native.path().is_file()       # compiled for every level and linked, once


def test_without_the_embedded_model_there_is_one_line(tmp_path: Path) -> None:
    done = ridgeline("serve", "--port", "0", env=one_thread() | {"RIDGELINE_CACHE": str(tmp_path)}, stdin=subprocess.DEVNULL)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.endswith("fetch it with: ridgeline pull\n")


def test_on_a_terminal_the_embedded_model_is_offered(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ridgeline", "chat"]
    environment = one_thread() | {"RIDGELINE_CACHE": str(tmp_path)}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = b""
        while b"[Y/n]" not in seen:
            seen += os.read(ours, 1000)
        os.write(ours, b"n\n")
        assert process.wait(60) == 2
    os.close(ours)
    assert b"98 MB" in seen


# -- generate ----------------------------------------------------------------------------------------------------------


def generate(source: Path, target: Path, model: Path, *more: str) -> int:
    return main(["generate", str(source), str(target), "--model", str(model), *OPTIONS, *more])


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((record if isinstance(record, str) else json.dumps(record)) + "\n" for record in records))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    assert path.read_bytes().endswith(b"\n")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_generate_answers_every_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = {"temperature": 0, "ignore_eos": True}
    source = write_lines(tmp_path / "in.jsonl", [
        {"prompt": "abc", "max_tokens": 5, "id": "first", **common},
        {"prompt_token_ids": [1, 2, 3], "n": 2, "seed": 1, "max_tokens": 4},
        "",
        {"messages": [{"role": "user", "content": "Hello"}], "id": 77, "logprobs": 1, "max_tokens": 3, **common},
        "not json",
        {"prompt": "abc", "temprature": 1},
        {"prompt": "", "id": "empty"},
        {"id": "nothing"},
        {"prompt": "abc", "temperature": "hot", "id": "typed"},
        {"prompt": "abc", "id": "first"},
        {"prompt_token_ids": [99999], "id": "range"},
        {"prompt": "x" * CONTEXT, "id": "long"},
        {"prompt": "abc", "stop": "zzz", "id": ["list"]},
        {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}, "id": "batch"},
        *[{"prompt": f"number {n}", "id": f"n{n}", **common} for n in range(20)],
    ])
    target = tmp_path / "out.jsonl"
    assert generate(source, target, model, "--max-tokens", "7") == 0
    assert capsys.readouterr().err.endswith("23 answered, 10 failed, 0 already answered before\n")
    records = {json.dumps(record["id"]) + ("!" if "error" in record else ""): record for record in read_lines(target)}
    assert len(records) == 33
    offline = LLM(model, load_format="dummy", num_gpu_blocks_override=600)
    expected = offline.generate(["abc"], SamplingParams(temperature=0, ignore_eos=True, max_tokens=5), use_tqdm=False)
    assert records['"first"']["outputs"][0]["text"] == expected[0].outputs[0].text
    assert records['"first"']["outputs"][0]["token_ids"] == expected[0].outputs[0].token_ids
    assert records['"first"']["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "cached_tokens": 0}
    assert [len(each["token_ids"]) for each in records["2"]["outputs"]] == [4, 4]
    assert len(records["77"]["outputs"][0]["logprobs"]) == 3
    assert records['"n3"']["usage"]["completion_tokens"] == 7
    errors = {"5!": "line 5", "6!": "'temprature'", '"empty"!': "empty", '"nothing"!': "exactly one", '"typed"!': "float",
              '"first"!': "earlier line", '"range"!': "99999", '"long"!': "max_model_len", '13!': "id must be",
              '"batch"!': "its body"}
    for name, says in errors.items():
        assert says in records[name]["error"]


def test_generate_goes_on_where_it_stopped(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [{"prompt": f"number {n}", "id": n, "temperature": 0, "max_tokens": 6, "ignore_eos": True} for n in range(12)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    whole, target = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert generate(source, whole, model) == 0
    complete = whole.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(complete[:5]) + complete[5][:-10])           # killed in the middle of the sixth
    assert generate(source, target, model) == 0
    assert capsys.readouterr().err.endswith("7 answered, 0 failed, 5 already answered before\n")
    assert sorted(target.read_bytes().splitlines()) == sorted(line.rstrip() for line in complete)
    monkeypatch.setattr("ridgeline.cli.cmd_generate.Processor.load", None)           # with nothing to do no model is loaded
    assert generate(source, target, model) == 0
    assert capsys.readouterr().err.endswith("0 answered, 0 failed, 12 already answered before\n")


@pytest.mark.parametrize("left", [1, 4, 6, 8, 12, 20, -1])
def test_generate_asks_again_for_the_half_written_line(
    model: Path, tmp_path: Path, left: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Id 0 among them: it is an id as good as any."""
    lines = [{"prompt": f"number {n}", "id": n, "temperature": 0, "max_tokens": 3, "ignore_eos": True} for n in range(2)]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert generate(source, target, model) == 0
    whole = {record["id"]: record for record in read_lines(target)}
    zero, one = (json.dumps(whole[n], separators=(",", ":")).encode() + b"\n" for n in range(2))
    target.write_bytes(one + zero[:left])
    assert generate(source, target, model) == 0
    assert capsys.readouterr().err.endswith("1 answered, 0 failed, 1 already answered before\n")
    again = read_lines(target)
    assert [record["id"] for record in again] == [1, 0] and {record["id"]: record for record in again} == whole


@pytest.mark.parametrize("text", [
    "dear diary\ntoday\n", "dear diary", '{"name": 5}\n', '{"id":\n', '{"id":[]}\n',
    # Files of prompts, with and without the end of their last line.
    '{"id":7,"prompt":"the only copy"}\n', '{"id":7,"prompt":"the only copy"}', '{"id": 7, "prompt": "the only copy"}',
    '{"id":"a\\"b","prompt":"the only copy"}',
])
def test_generate_does_not_overwrite_other_files(
    model: Path, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write_lines(tmp_path / "in.jsonl", [{"prompt": "abc"}]), tmp_path / "notes.txt"
    target.write_text(text)
    assert generate(source, target, model) == 2
    assert "notes.txt, line 1 was not written by this command" in capsys.readouterr().err
    assert target.read_text() == text


def test_generate_does_not_write_into_its_input(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, link = tmp_path / "in.jsonl", tmp_path / "link.jsonl"
    source.write_text('{"id":1,"prompt":"a","outputs":1}\n{"id":2,"prompt":"b"}')
    link.symlink_to(source)
    for target in (source, link):
        assert generate(source, target, model) == 2
        assert f"{target} is both INPUT and OUTPUT" in capsys.readouterr().err
    assert source.read_text().endswith('"b"}')


def test_generate_finds_a_bad_tokenizer_before_weights_load(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineCore, "start", None)       # not even called
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "abc"}])
    for option in ("--tokenizer", "--chat-template"):
        assert generate(source, tmp_path / "out.jsonl", model, option, str(tmp_path / "nowhere")) == 2
        error = capsys.readouterr().err
        assert str(tmp_path / "nowhere") in error and error.count("\n") == 1


def test_generate_between_pipes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`… | ridgeline generate /dev/stdin /dev/stdout | …`: counting the lines of a pipe would leave none to answer."""
    (source, written), (answers, target) = os.pipe(), os.pipe()
    with os.fdopen(written, "w") as file:
        file.write('{"prompt": "abc", "max_tokens": 2}\n' * 3)
    assert generate(Path(f"/dev/fd/{source}"), Path(f"/dev/fd/{target}"), model) == 0
    os.close(source)
    os.close(target)
    with os.fdopen(answers) as file:
        assert [json.loads(line)["id"] for line in file] == [1, 2, 3]
    assert "3 answered, 0 failed" in capsys.readouterr().err


def test_generate_reads_no_line_without_end(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first line of /dev/zero would fill the memory."""
    monkeypatch.setattr("ridgeline.cli.cmd_generate.MOST_LINE", 2**20)
    (tmp_path / "zeros").write_bytes(bytes(2**20))
    for source in (tmp_path / "zeros", Path("/dev/zero")):
        assert generate(source, tmp_path / "out.jsonl", model) == 2
        assert f"{source}, line 1 has 1 MiB or more: is this JSONL?" in capsys.readouterr().err


def test_generate_goes_on_after_a_record_of_any_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's log-probabilities made a record that the next run refused as no JSONL."""
    monkeypatch.setattr("ridgeline.cli.cmd_generate.MOST_LINE", 1000)
    whole = json.dumps({"id": 1, "outputs": ["x" * 5000]}, separators=(",", ":")) + '\n{"id":"b","error":"e"}\n'
    for half in ("", "{", '{"id":', '{"id":3,"outputs":["' + "x" * 5000):
        (tmp_path / "out.jsonl").write_text(whole + half)
        assert finished_ids(tmp_path / "out.jsonl") == {1, "b"} and (tmp_path / "out.jsonl").read_text() == whole
    for other in ("\n", '{"no": 1}\n', '{"id":null}\n', '{"id":[1]}\n', '{"id":1\n', "x" * 5000):
        (tmp_path / "out.jsonl").write_text(whole + other)
        with pytest.raises(ConfigError, match="line 3 was not written by this command"):
            finished_ids(tmp_path / "out.jsonl")


# -- serve -------------------------------------------------------------------------------------------------------------


def test_what_a_ready_server_says() -> None:
    ready = Ready("x", 2048, 4, 100, "float32", "cpu", 9, 16, 3.0, memory={"weights": 1_600_000_000, "KV cache": 4_700_000_000})
    defaults = SamplingDefaults({"temperature": 0.2, "top_p": 0.9}, "the model's card")
    llm = SimpleNamespace(ready=ready, sampling_defaults=defaults, engines=())
    service: Any = SimpleNamespace(name="tiny", llm=llm, tokenizer=None, keys=())
    lines = welcome(service, "http://here:1").splitlines()
    assert lines[0].startswith(f"ridgeline {__version__}: tiny in float32 on cpu, context 2048, ready after ")
    assert lines[1:5] == [
        "memory: weights 1.60 GB, KV cache 4.70 GB", "sampling defaults: temperature 0.2, top_p 0.9 (the model's card)",
        "ready: http://here:1/v1  (Ctrl-C stops)", "dashboard: http://here:1/dashboard",
    ]
    assert lines[-1].startswith("curl http://here:1/v1/completions ")
    assert "/v1/embeddings " in welcome(service, "http://here:1", headless=True).splitlines()[-1]


def test_the_help_of_serve_is_in_groups_with_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for title in (
        "server", "security", "limits", "parsers", "logs and traces", "model", "memory and KV cache", "scheduling", "execution",
        "parallelism", "file",
    ):
        assert f" {title}: --" in said
    listed = {name for names in GROUPS.values() for name in names}
    assert listed <= {declared.name for declared, _, _ in declared_options(ServerOptions)}
    assert "together (default: auto)" in said and "current one runs; auto: on a GPU (default: auto)" in said


def test_ctrl_c_says_that_it_stopped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ridgeline.cli.models.cmd_list.local_models", stopped)
    assert main(["list"]) == 130 and capsys.readouterr().err == "stopped\n"


# -- completion --------------------------------------------------------------------------------------------------------


def test_completion(tmp_path: Path) -> None:
    parser = OptionParser(prog="ridgeline serve")
    cmd_serve.add_arguments(parser)
    file = tmp_path / "completion.bash"
    others = {name: OptionParser(prog=name) for name in ("bench ops", "bench host")}
    file.write_text(script({"serve": parser, "chat": parser} | others))

    def completed(*words: str) -> set[str]:
        quoted = " ".join(f"'{word}'" for word in words)
        code = f'source {file}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _ridgeline; echo "${{COMPREPLY[@]}}"'
        return set(subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split())

    assert completed("ridgeline", "s") == completed("ridgeline", "help", "s") == {"serve"}
    assert completed("ridgeline", "bench", "") == {"ops", "host"}
    assert completed("ridgeline", "serve", "--dtype", "b") == {"bfloat16"}
    assert completed("ridgeline", "serve", "--max-m") == completed("ridgeline", "run", "--max-m") == {"--max-model-len"}
    assert completed("ridgeline", "serve", "") == set()          # a file


# -- chat --------------------------------------------------------------------------------------------------------------


def test_chat_over_a_pipe(model: Path) -> None:
    offline = LLM(model, load_format="dummy", num_gpu_blocks_override=600)
    greedy = SamplingParams(temperature=0, max_tokens=5)
    first = offline.chat([{"role": "user", "content": "Hello"}], greedy, use_tqdm=False)[0].outputs[0].text
    history = [("user", "Hello"), ("assistant", first), ("user", "More")]
    messages = [{"role": role, "content": content} for role, content in history]
    second = offline.chat(messages, greedy, use_tqdm=False)[0].outputs[0].text

    told = "Hello\n\n/reset\n" + "x" * CONTEXT + "\nHello\nMore\n/exit\nHello\n"
    done = ridgeline("chat", str(model), *OPTIONS, "--temperature", "0", "--max-tokens", "5", input=told)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{first}\n{first}\n{second}\n"
    said = [line for line in done.stderr.splitlines() if not line.startswith("loading: ")]       # on a busy machine
    assert said.count("cut at max_tokens 5") == 3 and len(said) == 4 and "max_model_len" in said[1]


@pytest.mark.parametrize(
    ("option", "content", "says"),
    [
        ("--chat-template", None, "cannot be read"),
        ("--chat-template", "{{ raise_exception('no system messages, please') }}", "no system messages, please"),
        ("--tokenizer", None, "nowhere"),
    ],
    ids=["no file", "refusing template", "no tokenizer"],
)
def test_chat_finds_a_bad_template_before_weights_load(
    model: Path, tmp_path: Path, option: str, content: str | None, says: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AsyncLLM, "start", None)         # not even called
    file = tmp_path / "nowhere"
    if content is not None:
        file.write_text(content)
    assert main(["chat", str(model), *OPTIONS, "--system", "Be brief.", option, str(file)]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_chat_on_a_terminal_survives_ctrl_c(model: Path) -> None:
    """Ctrl-C ends an answer, not the conversation; Ctrl-D ends the conversation."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "ridgeline", "chat", str(model), *OPTIONS, "--max-tokens", str(CONTEXT)]
    # A session of its own, with the terminal as its controlling one: so Ctrl-C arrives as from a keyboard.
    process = warm_start.WarmPopen(
        [*warm_start.ON_TERMINAL, *command], stdin=theirs, stdout=theirs, stderr=theirs, env=one_thread()
    )
    os.close(theirs)
    seen = b""

    def read_until(mark: bytes) -> None:
        nonlocal seen
        while mark not in seen:
            seen += os.read(ours, 4096)
        seen = seen.split(mark, 1)[1]

    read_until(b">>> ")
    os.write(ours, b"Hello\n")
    read_until(b"Hello\r\n")
    while len(seen) < 50:
        seen += os.read(ours, 4096)                      # the answer has begun
    os.write(ours, b"\x03" * 3)                          # as a held key does
    read_until(b">>> ")
    while b"Ctrl-D leaves" not in seen:                  # readline misses a signal between its prompt and its wait for keys
        os.write(ours, b"\x03")
        if select.select([ours], [], [], 2.0)[0]:
            seen += os.read(ours, 4096)
    read_until(b"Ctrl-D leaves")
    read_until(b">>> ")

    def leaves() -> bool:
        os.write(ours, b"\x04")                          # again: a late Ctrl-C of the loop above flushes the input
        return process.poll() is not None

    wait_until(leaves)
    os.close(ours)
    assert process.returncode == 0
