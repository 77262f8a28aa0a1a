"""Command lines written for vLLM, SGLang and llama.cpp: what is taken, what is ignored with a note, what is refused and why."""

from __future__ import annotations

import argparse
import asyncio
import re
from functools import cache
from pathlib import Path

import pytest

from ridgeline.__main__ import ALIASES, COMMANDS, find_command, main
from ridgeline.cli import cmd_diagnose, cmd_serve
from ridgeline.cli.chat import cmd_chat
from ridgeline.cli.config_options import OptionParser, engine_config, options_of
from ridgeline.cli.other_engines import variable_notes
from ridgeline.config import EngineConfig
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.errors import ConfigError
from ridgeline.known_options.option_table import KNOWN, SHORT
from ridgeline.known_options.other_commands import INSTEAD
from ridgeline.server.options import ServerOptions


@cache
def parser() -> OptionParser:
    made = OptionParser(prog="ridgeline serve")
    cmd_serve.add_arguments(made)
    return made


def serve(*words: str) -> argparse.Namespace:
    return parser().parse(list(words))


def options(*words: str) -> dict[str, object]:
    """What the engine gets."""
    return engine_config(serve(*words)).flat()


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("--model X", {"model": "X"}),
        ("-m X --port 9", {"model": "X"}),
        ("-hf org/name:Q4_K_M", {"model": "org/name:Q4_K_M"}),
        ("X --model Y", {"model": "X"}),
        ("X -tp 2", {"model": "X", "tensor_parallel_size": 2}),
        ("X --tensor_parallel_size=2", {"model": "X", "tensor_parallel_size": 2}),
        ("--ctx-size 4096 X", {"model": "X", "max_model_len": 4096}),
        ("-c 0 X", {"model": "X"}),
        ("--max-model-len 4k --max-num-batched-tokens 8K", {"max_model_len": 4000, "max_num_batched_tokens": 8192}),
        ("X --max-model-len auto", {"model": "X"}),
        ("X --dtype half", {"model": "X", "dtype": "float16"}),
        ("X --dtype auto", {"model": "X"}),
        ("X -np 4 -b 512", {"model": "X", "max_num_seqs": 4, "max_num_batched_tokens": 512}),
        ("X --guided-decoding-backend xgrammar", {"model": "X", "structured_outputs_backend": "xgrammar"}),
        ("X --structured-outputs-config.backend guidance", {"model": "X", "structured_outputs_backend": "guidance"}),
        ('X --structured-outputs-config {"backend":"guidance"}', {"model": "X", "structured_outputs_backend": "guidance"}),
        ("X --temp 0.5 --top-k 3", {"model": "X", "override_generation_config": '{"temperature": 0.5, "top_k": 3}'}),
        ("X --chat-template-file t.jinja", {"model": "X", "chat_template": "t.jinja"}),
        ("X --pipeline-parallel-size 1 --no-trust-remote-code --task generate", {"model": "X"}),
        ("X --kv-cache-dtype fp8_e4m3", {"model": "X", "kv_cache_dtype": "fp8"}),
        ("X -md small.gguf", {"model": "X", "speculative_config": "small.gguf"}),
        ("X --speculative-model org/small", {"model": "X", "speculative_config": "org/small"}),
        ("X --dtype bf16 --load-format safetensors", {"model": "X", "dtype": "bfloat16"}),
        ("--model-path X --mem-fraction-static 0.8", {"model": "X", "gpu_memory_utilization": 0.8}),
        ("--model-path X --tp 2", {"model": "X", "tensor_parallel_size": 2}),
        ("--model-path X --context-length 4096 --max-running-requests 8 --chunked-prefill-size 512",
         {"model": "X", "max_model_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 512}),
        ("X --disable-radix-cache --disable-cuda-graph", {"model": "X", "enable_prefix_caching": False, "enforce_eager": True}),
        ("X --chunked-prefill-size -1", {"model": "X", "enable_chunked_prefill": False}),
        ("X --chunked_prefill_size=-1", {"model": "X", "enable_chunked_prefill": False}),
        ("X --base-gpu-id 0 --gpu-id-step 1 --nnodes 1 --node-rank 0 --presence-penalty 0.0", {"model": "X"}),
        ("X --disable-overlap-schedule --page-size 32", {"model": "X", "async_scheduling": False, "block_size": 32}),
    ],
)
def test_the_same_option_by_another_name(words: str, meant: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    assert options(*words.split()) == meant and not capsys.readouterr().err


def test_switches_that_turn_one_of_ours_off_work_in_python_and_in_files(tmp_path: Path) -> None:
    assert EngineConfig.of(disable_radix_cache=True).flat() == {"enable_prefix_caching": False}
    assert EngineConfig.of(disable_radix_cache=False, disable_overlap_schedule=False).flat() == {}
    assert EngineConfig.of(chunked_prefill_size=-1).flat() == {"enable_chunked_prefill": False}
    file = tmp_path / "serve.yaml"
    file.write_text("disable-radix-cache: true\ndisable-overlap-schedule: false\n")
    assert options("X", "--config", str(file)) == {"model": "X", "enable_prefix_caching": False}


def test_names_of_the_server_may_be_several_words() -> None:
    made = options_of(ServerOptions, serve("X", "--served-model-name", "a", "b", "--allowed-origins", '["x", "y"]', "--alias=c"))
    assert made.served_model_name == "c" and made.allowed_origins == "x,y"
    assert options_of(ServerOptions, serve("--served-model-name", "a", "b", "--port", "7")).served_model_name == "a,b"


def test_a_command_that_is_a_client_has_one_key() -> None:
    """An empty one opens no server, and a word behind the key is the server's address."""
    made = OptionParser(prog="ridgeline diagnose")
    cmd_diagnose.add_arguments(made)
    assert made.parse(["http://x", "--api-key", ""]).api_key == ""
    args = made.parse(["--api-key", "secret", "http://x"])
    assert (args.api_key, args.model) == ("secret", "http://x")


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3", "deepseek-r1"])
def test_parsers_for_the_same_marks_are_one(name: str) -> None:
    assert options_of(ServerOptions, serve("--reasoning-parser", name)).reasoning_parser == "think"
    assert options_of(ServerOptions, serve("--tool-call-parser", "hermes")).tool_call_parser == "hermes"
    assert options_of(ServerOptions, serve("--tool-call-parser", "qwen25")).tool_call_parser == "hermes"


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("--enable-auto-tool-choice", "note: --enable-auto-tool-choice is ignored: tool choice is always on"),
        ("--disable-log-requests", "note: --disable-log-requests is ignored: prompts are never logged"),
        ("--swap-space 4", "note: --swap-space is ignored"),
        ("-ngl 99", "note: -ngl is ignored: all layers are on one device"),
        ("-O3", "note: -O3 is ignored"),
        ("-cc.mode 3", "note: -cc.mode is ignored"),
        ("-fa", "note: -fa is ignored"),
        ("-fa on", "note: -fa is ignored"),
        ("--no-mmap", "note: --no-mmap is ignored"),
        ("--limit-mm-per-prompt {}", "note: --limit-mm-per-prompt is ignored: prompts are text only"),
        ("--cuda-graph-max-bs 64", "note: --cuda-graph-max-bs is ignored"),
        ("--enable-metrics", "note: --enable-metrics is ignored: /metrics always has the counters"),
    ],
)
def test_what_changes_nothing_is_one_note(words: str, note: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert options(*words.split(), "X") == {"model": "X"}
    said = capsys.readouterr().err
    assert said.startswith(note) and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--enable-lora", "--enable-lora is not supported: LoRA adapters are not applied at run time; merge the adapter"),
        ("--trust-remote-code", "Ridgeline never runs code from model directories"),
        ("--spec-type eagle", "drafts are switched by --speculative-config"),
        ("-pcp 2", "-pcp 2 is not supported: prompts are divided as contexts are: use --decode-context-parallel-size"),
        ("-dp 4 -dpl 2", "`ridgeline route` is for several machines"),
        ("-dpb ray", "`ridgeline route` is for several machines"),
        ("--nnodes 2", "--distributed-executor-backend ray"),
        ("--node-rank 1", "--distributed-executor-backend ray"),
        ("--base-gpu-id 1", "set CUDA_VISIBLE_DEVICES"),
        ("--presence-penalty 1", "send it with each request"),
        ("--worker-use-ray", "--distributed-executor-backend ray"),
        ("--revision main", "ridgeline pull NAME --revision REV"),
        ("--lora a.gguf", "merge the adapter"),
        ("-ctk q8_0", "use --kv-cache-dtype fp8, int8 or k=FORMAT,v=FORMAT"),
        ("--system-prompt hi", "--system-prompt is --system here, and this command has no such option"),
        ("--grammar x", "send it with each request: structured_outputs"),
        ("--lora-modules", "--lora-modules needs a value"),
        ("--lora-paths a=b", "merge the adapter"),
        ("--ep-size 4", "use --enable-expert-parallel"),
        ("--max-total-tokens 99", "use --num-gpu-blocks-override"),
        ("--speculative-algorithm EAGLE", "no trained head runs yet"),
        ("--api-key", "--api-key needs a value"),
        ("--api-key= --port 7", "--api-key is empty, and every request would be accepted"),
        ("--temp warm", "--temp must be a number, got 'warm'"),
        ("--structured-outputs-config xgrammar", "--structured-outputs-config must be a JSON object"),
        ("--max-modl-len 5", "unknown option --max-modl-len; did you mean --max-model-len?"),
        ("--frobnicate", "unknown option --frobnicate; see ridgeline serve --help"),
    ],
)
def test_what_is_refused_says_what_to_do(words: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_config(serve("X", *words.split()))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_several_engines_are_for_serve_alone() -> None:
    args = serve("X", "-dp", "2")
    assert engine_config(args, several=True).parallel.data_parallel_size == 2
    with pytest.raises(ConfigError, match="is for `ridgeline serve`; only one engine"):
        engine_config(args)
    with pytest.raises(ConfigError, match="is for `ridgeline serve`"):
        asyncio.run(AsyncLLM(data_parallel_size=2).start())


def test_every_known_name_is_answered_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Never "unknown option": each is taken, ignored with a note, or refused with its reason."""
    for name, known in [*KNOWN.items(), *((short, KNOWN.get(long.removeprefix("no_"))) for short, long in SHORT.items())]:
        flag = name if name.startswith("-") else "--" + name.replace("_", "-")
        try:
            engine_config(serve("X", flag, *(["1"] if known is None or known.takes_value else [])))
        except ConfigError as error:
            assert "unknown option" not in str(error) and (known is None or known.kind != "ignored"), flag
        noted = capsys.readouterr().err
        assert bool(noted) == (known is not None and known.kind == "ignored"), flag


def test_a_value_is_not_taken_for_an_option() -> None:
    parser = OptionParser(prog="ridgeline chat")
    cmd_chat.add_arguments(parser)
    args = parser.parse(["--system", "--enable-lora", "-n", "7", "--temp", "0.5"])
    assert args.system == "--enable-lora" and (args.sampling_max_tokens, args.sampling_temperature) == (7, 0.5)


def test_options_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    lines = ["model: X", "max-model-len: 4096", "enable_prefix_caching: false", "served-model-name: [a, b]", "port: 7",
             "swap-space: 4"]
    file.write_text("\n".join(lines))
    args = serve("--config", str(file), "--port", "8")
    assert engine_config(args).flat() == {"model": "X", "max_model_len": 4096, "enable_prefix_caching": False}
    made = options_of(ServerOptions, args)
    assert (made.port, made.served_model_name) == (8, "a,b")             # the command line comes first
    assert "--swap-space is ignored" in capsys.readouterr().err
    assert engine_config(serve("Y", f"--config={file}")).model.model == "Y"


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot be read"), ("[1, 2]", "must hold options"), ("a: [", "is not YAML"), ("port: x", "invalid int value"),
     ("frob: 1", "unknown option --frob")],
)
def test_a_bad_file_of_options_is_one_line(content: str | None, says: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=says):
        serve("--config", str(file))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("bench ofline", "compare, studies; did you mean 'bench offline'?"),
        ("bench throughput", "unknown command 'bench throughput'; use `ridgeline bench offline MODEL`"),
        ("ps", "unknown command 'ps'; GET /v1/models of a running server has its model"),
        ("launch_server --model-path x", "unknown command 'launch_server'; use `ridgeline serve MODEL`"),
        ("run-batch -i x", "unknown command 'run-batch'; use `ridgeline generate IN.jsonl OUT.jsonl --model MODEL`"),
        ("help serv", "unknown command 'serv'; did you mean 'serve'?"),
        ("removed x", "unknown command 'removed'; did you mean 'remove'?"),
    ],
)
def test_commands_of_other_engines_are_one_line(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


def test_what_replaces_a_command_exists() -> None:
    assert not INSTEAD.keys() & (COMMANDS.keys() | ALIASES.keys())
    for says in INSTEAD.values():
        for words in re.findall(r"`ridgeline ([a-z][^`]*)`", says):
            find_command(words.split())                  # ConfigError for one that does not exist


def test_help_of_a_command_in_either_order(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for words in (["help", "plan"], ["plan", "--help"]):
        with pytest.raises(SystemExit):
            main(words)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and shown[0].startswith("usage: ridgeline plan")
    assert main(["help"]) == main(["--help"]) == main(["help", "bench"]) == 0


def test_variables_of_other_engines_are_named_once() -> None:
    """A key that only another engine reads would leave the server open."""
    assert variable_notes({"PATH": "/bin", "OPENAI_API_KEY": "x", "HF_HOME": "/x", "RIDGELINE_LOG": "INFO"}) == []
    assert variable_notes({"VLLM_API_KEY": "x", "VLLM_USE_V1": "1", "OLLAMA_HOST": "x"}) == [
        "VLLM_API_KEY is ignored: RIDGELINE_API_KEY holds the server's keys", "OLLAMA_HOST is ignored: use --host and --port",
        "VLLM_USE_V1 is ignored: docs/options.md lists the environment variables",
    ]
    many, = variable_notes({f"VLLM_{number}": "" for number in range(7)})
    assert many.startswith("VLLM_0, VLLM_1, VLLM_2, VLLM_3, VLLM_4 and 2 more are ignored")
