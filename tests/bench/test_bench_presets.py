"""The GPU workloads: the very ids that other engines ran, their floors, and the records, on a tiny model on the CPU."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from served_model import write_model

from ridgeline.__main__ import main
from ridgeline.bench import idle, startup
from ridgeline.bench.gguf_shapes import ALIGNMENT, MIXES, TYPES
from ridgeline.bench.lab import device_log
from ridgeline.bench.lab.machine_log import Watch
from ridgeline.bench.lab.sweep import parse_options
from ridgeline.bench.options import offline_options, ops_options, studies_options, suite
from ridgeline.bench.workload import floors, presets, quality, shapes, workloads
from ridgeline.bench.workload.bench_engine import Engine
from ridgeline.bench.workload.floors import preset_floor, step_floor, workload_floor
from ridgeline.bench.workload.shapes import SHAPES, write_shape
from ridgeline.bench.workload.workloads import GPU_PRESETS, Lengths, Preset
from ridgeline.cli.config_options import OptionParser
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.gguf import DEFAULT_ALIGNMENT
from ridgeline.models.gguf_types import TENSOR_TYPES
from ridgeline.models.model_config import load_model_config
from ridgeline.ops.attention.attention_arguments import prefix_tile_rows
from ridgeline.ops.kernel_table import GATED_ROWS
from ridgeline.ops.linear.fp8_linear import expanded
from ridgeline.resolve import DeviceFacts, resolve
from ridgeline.roofline.decoder_shape import DecoderShape, decoder_shape
from ridgeline.roofline.step_cost import Peaks, step_cost
from ridgeline.runner import shared_prefix
from ridgeline.runner.start.gpu_names import gpu_names
from ridgeline.sizes.kv_format import KVFormat

H200_FACTS = DeviceFacts("cuda", 150_109_880_320, ("bfloat16",), runtime=800 << 20)
H200 = Peaks(4.38e12, 793e12)

# SHA-256 of json.dumps([[prompt, tokens_out], …]) as the workloads' own generator wrote them.
IDS = {
    ("latency_b1", 1): "7bc9e66c1a625a76", ("latency_b1", 2): "43348daacccd3bbb", ("latency_b1", 99): "6d280a8adaf7e43a",
    ("batch128", 1): "4cf08227dfa900e4", ("batch128", 2): "5db270327bd4d709", ("batch128", 99): "ee21267eca679374",
    ("throughput", 1): "dcf3f2b1af2a7c62", ("throughput", 2): "a366c8a7bf799507", ("throughput", 99): "a744e072a1620c63",
    ("prefix", 1): "1806107da0f29f44", ("prefix", 2): "df20a477167dddd8", ("prefix", 99): "39012b251a5aa94f",
}


@pytest.mark.parametrize("kind", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])        # it imports torch again
def test_a_check_in_a_process_of_its_own_fails_here(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context(kind)
    monkeypatch.setattr(quality.multiprocessing, "get_context", lambda asked: context)
    with pytest.raises(KeyError, match="no such shape"):
        quality.check_apart("no such shape")


@pytest.mark.parametrize(("name", "seed"), IDS)
def test_the_ids_are_the_ones_that_other_engines_ran(name: str, seed: int) -> None:
    asked = json.dumps(GPU_PRESETS[name].requests(seed)).encode()
    assert hashlib.sha256(asked).hexdigest()[:16] == IDS[name, seed]


def test_sizes_of_the_workloads() -> None:
    assert (workloads.TIMED, workloads.FIRST_TOKENS, workloads.WARM_UP) == (1, 2, 99)
    requests = {name: preset.requests(1) for name, preset in GPU_PRESETS.items()}
    for name, asked in requests.items():
        assert GPU_PRESETS[name].lengths(1) == [(len(prompt), out) for prompt, out in asked]
    sizes = {
        name: (len(asked), sum(len(prompt) for prompt, _ in asked), sum(out for _, out in asked))
        for name, asked in requests.items()
    }
    assert sizes == {
        "latency_b1": (1, 512, 256), "batch128": (128, 65_536, 32_768), "throughput": (1000, 289_264, 218_377),
        "prefix": (512, 512 * 2064, 512 * 64), "prefill_8k": (1, 8192, 1), "prefill_16k": (1, 16_384, 1),
        "decode_16x8k": (16, 16 * 8192, 16 * 128),
    }
    assert GPU_PRESETS["throughput"].longest() == 3072 and not GPU_PRESETS["throughput"].uniform
    assert max(token for prompt, _ in GPU_PRESETS["batch128"].requests(1, 500) for token in prompt) < 500


MIXTURES = {"qwen3-30b-a3b": 30.532, "mixtral-8x7b": 46.703, "gpt-oss-20b": 20.915, "gpt-oss-120b": 116.829,
            "deepseek-v2-lite": 15.706}


def test_shapes_are_the_public_models() -> None:
    billions = {name: load_model_config(write_shape(name)).num_parameters / 1e9 for name in set(SHAPES) - set(shapes.GGUF_SHAPES)}
    assert billions == pytest.approx(
        {"llama-3.1-8b": 8.030, "llama-3.2-1b": 1.236, "qwen3-8b": 8.191, "llama-3.1-70b": 70.554}
        | {name: 30.532 if name.startswith("qwen3-30b") else 8.030 for name in shapes.CODED} | {
            name + routing: size for routing in ("", "-zipf") for name, size in MIXTURES.items()
        }, abs=1e-3
    )
    assert load_model_config(write_shape("llama-3.1-70b", 2)).num_layers == 2


def test_the_suite_covers_every_shape_and_every_workload() -> None:
    groups = suite.SUITE.values()
    assert {group.shape for group in groups} == set(SHAPES) and set(presets.MODEL_OPTIONS) <= set(SHAPES)
    assert set(suite.SUITE["llama-3.1-8b"].presets) == set(GPU_PRESETS)
    parser = OptionParser(prog="bench")
    offline_options.add_arguments(parser)
    asked = parser.parse(["--preset", "h200", "--set", "step_time_ms=0"])
    asked.repeats = 2
    for name, group in suite.SUITE.items():
        args = parser.parse(presets.group_words(name, asked, 100.0))
        assert args.label == name and args.preset == list(group.presets) and args.shape == [group.shape]
        assert parse_options(args.set) == group.options | {"step_time_ms": 0.0}
        EngineConfig.of(**parse_options(args.set), **presets.MODEL_OPTIONS.get(group.shape, {}))
    # Idle time with one row and with 256, wherever there is room for them.
    assert all({"latency_b1", "batch128"} <= set(group.presets) for group in groups if group.shape != "llama-3.1-70b")
    modules = {"startup": startup, "studies": studies_options, "ops": ops_options}
    for name in suite.COMMANDS:
        command, *words = presets.command_words(name, asked)
        parser = OptionParser(prog="bench")
        modules[command].add_arguments(parser)
        assert parser.parse(words).out == f"benchmarks/h200/{name}.json"


# -- floors ------------------------------------------------------------------------------------------------------------


def llama_8b() -> DecoderShape:
    return decoder_shape(load_model_config(write_shape("llama-3.1-8b")), "bfloat16", 2.0)


@pytest.mark.parametrize("name", list(suite.SUITE))
def test_every_group_fits_on_the_card_it_is_for(name: str) -> None:
    group = suite.SUITE[name]
    longest = presets._context([GPU_PRESETS[preset] for preset in group.presets])
    options = {"max_model_len": longest, "dtype": "bfloat16", "device": "cuda", "load_format": "dummy"}
    options |= {"skip_tokenizer_init": True} | presets.MODEL_OPTIONS.get(group.shape, {}) | group.options
    assert resolve(EngineConfig.of(model=str(write_shape(group.shape)), **options), H200_FACTS).num_blocks * 16 >= longest


def test_our_count_agrees_with_the_published_floors() -> None:
    """Ours also counts norms, rotations and activations, as kernels of their own: a few percent above."""
    for name, published in floors.H200_FLOORS.items():
        preset = GPU_PRESETS[name]
        found = preset_floor(llama_8b(), preset, preset.requests(1), H200, 8192, 1024)
        for figure, value in published.items():
            assert found[figure] == pytest.approx(value, rel=0.12), (name, figure)


def test_a_step_at_its_floor_is_the_sum_of_its_parts() -> None:
    rows = [(1, 640)] * 4
    parts, cost = step_floor(llama_8b(), rows, H200)
    assert cost == step_cost(llama_8b(), rows).total.cost
    assert sum(parts.values()) == pytest.approx(cost.bytes / H200.read_bytes_s, rel=1e-9)    # nothing is compute-bound


def test_a_shared_prefix_is_read_once() -> None:
    shape = llama_8b()
    _, apart = step_floor(shape, [(1, 2100)] * 8, H200)
    _, shared = step_floor(shape, [(1, 2100)] * 8, H200, shared=2000)
    assert apart.bytes - shared.bytes == 7 * 2000 * shape.kv_bytes_per_token and apart.flops == shared.flops


def test_the_simulated_engine_computes_every_token_once() -> None:
    asked = [([1] * 30, 4), ([1] * 5, 1), ([1] * 12, 9)]
    floor = workload_floor(llama_8b(), asked, H200, budget=16, max_rows=2)
    whole = workload_floor(llama_8b(), asked, H200, budget=1000, max_rows=8)
    tokens = sum(len(prompt) + out - 1 for prompt, out in asked)
    answers = sum(out for _, out in asked)
    qkv = 4096 * 6144
    after = llama_8b().linear_weights // 32 - qkv        # of the last layer only what has logits goes through these
    linears = 2 * (32 * qkv * tokens + 31 * after * tokens + after * answers)
    head = 2 * 4096 * 128256 * answers
    assert whole.steps == 9 and floor.steps > 9
    assert linears + head < whole.cost.flops < 1.01 * (linears + head)
    assert floor.cost.flops == whole.cost.flops and floor.cost.bytes > whole.cost.bytes


def test_shares_of_a_floor_are_one_at_it() -> None:
    floor = {"decode_tok_s": 290, "first_tokens_s": 0.009, "output_tok_s": None}
    found = floors.shares({"decode_tok_s": 145.0, "first_tokens_s": 0.018, "output_tok_s": 3.0, "seconds": 1.0}, floor)
    assert found == {"decode_tok_s": 0.5, "first_tokens_s": 0.5}


# -- the run -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_presets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = [
        Preset("latency_b1", 1, 24, 6), Preset("prefix", 4, 8, 3, shared=64),
        Preset("throughput", 5, Lengths(2.0, 0.5, 4, 20), Lengths(1.5, 0.5, 2, 8)),
        Preset("prefill_8k", 1, 40, 1),
    ]
    for preset in tiny:
        monkeypatch.setitem(workloads.GPU_PRESETS, preset.name, preset)
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def test_presets_on_a_tiny_model(tiny_presets: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "tiny")
    words = ["--load-format", "dummy", "--directory", str(tmp_path / "records"), "--time-limit", "100000"]
    names = ["latency_b1", "prefix", "throughput", "prefill_8k"]
    # A budget that the first prompt fills: those after it find its prefix computed.
    options = ["--set", "max_num_seqs=8", "device=cpu", "max_num_batched_tokens=72"]
    assert main(["bench", "offline", str(model), "--preset", *names, *options, *words]) == 0
    made = json.loads((tmp_path / "records" / "offline-tiny.json").read_text())
    assert [line.split("|")[2].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| tiny")] == names
    assert made["commit"] is not None and made["source"] and made["quality"] == "exact" and "torch" in made["versions"]
    rows = made["figures"]["rows"]
    assert list(rows) == names and made["figures"]["not_measured"] == {}
    assert all(len(row["runs"]) == 2 for row in rows.values())
    assert set(rows["latency_b1"]["median"]) == {"output_tok_s", "first_tokens_s", "decode_tok_s"}
    assert set(rows["throughput"]["median"]) == {"output_tok_s"} and "decode_tok_s" not in rows["prefill_8k"]["median"]
    for name, row in rows.items():
        assert row["counted"]["bytes"] > 0 and row["counted"]["flops"] > 0
        assert all(0 < share < 1.5 for share in row["share_of_floor"]["counted"].values())
        first = row["first_pass"]
        assert first["of_median"] == pytest.approx(first["output_tok_s"] / row["median"]["output_tok_s"])
        assert 0 < first["first_token_ms"] / 1e3 <= first["seconds"]
        assert first["events"] == {}                             # a CPU compiles and captures nothing
        cached = {run["cached_tokens"] for run in row["runs"]}
        assert (cached == {0}) == (name != "prefix")             # only prompts of one run share
        assert {run["output_tokens"] for run in row["runs"]} == {row["tokens_out"]}
    run = rows["latency_b1"]["runs"][0]
    assert run["decode_tok_s"] == pytest.approx(5 / (run["seconds"] - run["first_tokens_s"]))


def test_the_record_of_a_gpu_holds_what_it_did(
    tiny_presets: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CPU in a GPU's clothes: a made trace, a made ledger, torch's counters."""
    monkeypatch.setitem(workloads.GPU_PRESETS, "batch128", Preset("batch128", 3, 24, 6))
    monkeypatch.setattr(presets, "PROFILED", {"latency_b1": (1,), "batch128": (3, 6)})
    monkeypatch.setattr(Engine, "config", property(lambda self: dataclasses.replace(self.core.config, device="cuda")))
    monkeypatch.setattr(idle, "_synchronise", lambda engine: None)
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(presets.torch.cuda, name, lambda: 1234)

    def traced(engine: Engine, steps: int, path: Path) -> list[int]:
        for _ in range(steps):
            engine.core.step()
        events = [
            {"ph": "X", "cat": "kernel", "name": "decode_kernel", "ts": 100.0 * step, "dur": 99.0, "args": {"correlation": step}}
            for step in range(steps)
        ]
        events += [event | {"cat": "cuda_runtime", "name": "cudaGraphLaunch"} for event in events]
        path.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 0}))
        return [int(1e5) * step for step in range(steps)]

    monkeypatch.setattr(idle, "_traced", traced)
    start = Engine.__init__

    def start_measured(self: Engine, model: str, **options: Any) -> None:
        start(self, model, **options)
        self.memory = {"weights": 90, "steps": 10}
        self.core.config.memory.clear()
        self.core.config.memory.update({"weights": 91, "steps": 10})

    monkeypatch.setattr(Engine, "__init__", start_measured)
    model = write_model(tmp_path / "tiny")
    words = ["--load-format", "dummy", "--directory", str(tmp_path), "--set", "max_num_seqs=4", "device=cpu"]
    assert main(["bench", "offline", str(model), "--preset", "latency_b1", "batch128", "prefix", *words]) == 0
    figures = json.loads((tmp_path / "offline-tiny.json").read_text())["figures"]
    assert figures["memory"]["error"] == pytest.approx(0.01) and figures["memory"]["measured"] == {"weights": 90, "steps": 10}
    assert "no reference" in figures["quality"]["not_checked"]
    one, many, sharing = (figures["rows"][name] for name in ("latency_b1", "batch128", "prefix"))
    for row in (one, many):
        assert row["launches_per_step"] == 1 and row["device_idle"]["idle_between_steps_share"] == pytest.approx(0.01, abs=1e-3)
        assert row["device_idle"]["step_ms"] > 0 and row["peak_memory_bytes"] == 1234
    assert many["device_idle_6_rows"] == {"not_measured": "max_num_seqs is 4"} and "device_idle" not in sharing
    assert "latency_b1 and batch128" in sharing["not_profiled"]
    assert "1 launches a step, idle between steps with 3 and 6 rows: 1.0% and not measured" in capsys.readouterr().out


def test_after_the_time_limit_rows_are_named_as_not_measured(tiny_presets: None, tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    words = ["--load-format", "dummy", "--directory", str(tmp_path), "--time-limit", "-1", "--set", "max_num_seqs=8"]
    assert main(["bench", "offline", str(model), "--preset", "latency_b1", *words]) == 0
    figures = json.loads((tmp_path / "offline-tiny.json").read_text())["figures"]
    assert figures["rows"] == {} and figures["not_measured"] == {"latency_b1": "the time limit was reached"}


def test_the_suite_goes_on_after_a_group_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[tuple[str, ...]] = []

    class Child:
        def __init__(self, *words: str, **popen: Any) -> None:
            started.append(words)
            self.code = 1 if "qwen3-8b" in words else 0

        def wait(self) -> int:
            return self.code

        poll = wait

    monkeypatch.setattr(presets, "start_child", Child)
    groups = ["llama-3.2-1b", "qwen3-8b", "llama-3.1-70b"]
    assert main(["bench", "offline", "--preset", "h200", "--group", *groups]) == 1
    assert "these groups failed: qwen3-8b" in capsys.readouterr().err
    assert [words[words.index("--label") + 1] for words in started] == groups
    assert main(["bench", "offline", "--preset", "h200", "--time-limit", "-1"]) == 0
    assert len(started) == 3 and "not measured" in capsys.readouterr().out


def test_every_run_has_its_own_salt() -> None:
    assert presets._salt() != presets._salt()


def test_engine_options_in_words() -> None:
    found = parse_options(["max-num-seqs=64", "enable_prefix_caching=off", "gpu_memory_utilization=0.97", "dtype=float32"])
    assert found == {"max_num_seqs": 64, "enable_prefix_caching": False, "gpu_memory_utilization": 0.97, "dtype": "float32"}
    for word, message in (("nonsense=1", "not an engine option"), ("max_num_seqs", "name=value"), ("max_num_seqs=x", "int")):
        with pytest.raises(ConfigError, match=message):
            parse_options([word])


# -- quality -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_shape(monkeypatch: pytest.MonkeyPatch) -> str:
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": 400,
    }
    monkeypatch.setitem(shapes.SHAPES, "small", SHAPES["llama-3.1-8b"] | sizes)
    return "small"


PARTS = (
    quality.Part("one row", 3, 20, 6, together=False, alike=True), quality.Part("many rows", 8, 20, 6, alike=True),
    quality.Part("long prompt", 1, 600, 4, scored=8), quality.Part("shared prefix", 6, 20, 3, shared=64, compared=3),
)


def test_a_correct_engine_agrees_with_the_reference(small_shape: str) -> None:
    found = quality.check_quality(small_shape, "float32", PARTS, device="cpu")
    assert found["top1_agreement"] == found["top1_agreement_alike_rows"] == 1.0 and found["same_dtype_agreement"] is None
    # The prompt's positions 0, 8 … 592 and its answer; of the six that share a prefix every second.
    counts = {name: part["positions"] for name, part in found["by_part"].items()}
    assert counts == {"one row": 18, "many rows": 48, "long prompt": 75 + 4, "shared prefix": 9}
    assert found["positions"] == sum(counts.values())
    assert found["reached"] == ["chunked prefill", "prefix caching"] and found["kernels"] == []


SHORT = (quality.Part("many rows", 8, 20, 4, alike=True), quality.Part("long prompt", 1, 40, 4, scored=8))


def test_weights_that_are_codes_are_compared_with_the_numbers_that_they_stand_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF file's, and a mixture's. Both are measured by what their definitions give in the same dtype."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
             "vocab_size": 512}
    for name in ("llama-3.1-8b-q4_k_m", "gpt-oss-20b"):
        monkeypatch.setitem(shapes.SHAPES, name, SHAPES[name] | sizes)
        found = quality.check_quality(name, "float32", SHORT, device="cpu", cpu_activations="float32")       # its head: float16
        assert found["top1_agreement"] == 1.0 and "quantised weights" in found["reached"]
        assert found["same_dtype_agreement"] == 1.0 and found["least"] == quality.LEAST


def test_a_mixture_may_differ_little_more_often_than_its_definitions() -> None:
    assert quality.least_of(None) == quality.least_of(1.0) == quality.least_of(0.995) == quality.LEAST
    assert quality.least_of(0.96) == pytest.approx(0.95)
    part = quality.Part("long prompt", 1, 5, 2, scored=2)
    heard = [quality.Heard(part, [1, 2, 3, 4, 5], [6, 7], [2, 3, 4, 5])]
    # Its positions: 0 and 2 of the prompt, and those that give the answer's two tokens.
    best, other = [[2, 3, 4, 5, 6, 7]], [[2, 9, 9, 9, 6, 8]]
    assert quality.same_tokens(heard, best, other) == (2, 4)
    assert quality.agreements(heard, best) == {"long prompt": (4, 4)}


@pytest.mark.parametrize("wrong", ["one row", "many rows", "long prompt", "shared prefix"])
def test_a_part_that_is_wrong_shows(wrong: str, small_shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of every answer, and every token that the engine expects in the long prompt."""
    answered = quality._answered

    def change(engine: Any, part: quality.Part, asked: Any, salt: str) -> list[quality.Heard]:
        heard = answered(engine, part, asked, salt)
        if part.name == wrong:
            for each in heard:
                each.answer[0] = (each.answer[0] + 1) % 400
                each.expected = [token + 1 for token in each.expected]
        return heard

    monkeypatch.setattr(quality, "_answered", change)
    found = quality.check_quality(small_shape, "float32", PARTS, device="cpu")
    assert found["by_part"][wrong]["top1_agreement"] < 0.9 and found["top1_agreement"] < quality.LEAST
    assert all(part["top1_agreement"] == 1.0 for name, part in found["by_part"].items() if name != wrong)


def test_the_check_reaches_what_only_long_and_many_rows_do() -> None:
    """On an H200: a step of the whole token budget and one of over a thousand behind it, and a prefix worth sharing."""
    parts = {part.name: part for part in quality.PARTS}
    budget = resolve(EngineConfig.of(model=str(write_shape("llama-3.1-8b", 2)), device="cuda"), H200_FACTS).max_num_batched_tokens
    assert budget >= GATED_ROWS and parts["long prompt"].tokens_in - budget >= 1024
    sharing = parts["shared prefix"]
    rows, prefix_blocks = sharing.count, sharing.shared // 16
    tables = np.arange(1, rows * 80 + 1, dtype=np.int32).reshape(rows, 80)
    tables[:, :prefix_blocks] = tables[0, :prefix_blocks]
    for heads in (4, 8):                                             # query heads of a KV head: 1B, 8B, Qwen3; 70B
        finder = shared_prefix.SharedPrefixes(16, prefix_tile_rows(heads))
        found = finder.find(tables, np.arange(rows), np.full(rows, sharing.shared + sharing.tokens_in // 2), rows)
        assert found is not None and int(found.length.max()) == sharing.shared


def test_what_was_reached_is_what_happened_since() -> None:
    options = SimpleNamespace(execution=SimpleNamespace(deterministic=False), model=SimpleNamespace(quantization="none"))
    model = SimpleNamespace(quantisation=None)
    config = SimpleNamespace(
        max_num_batched_tokens=64, depth=1, kv_dtype="bfloat16", kv_format=KVFormat("bfloat16", "bfloat16"),
        dtype="bfloat16", options=options, model=model, graphs=True,
    )
    runner = SimpleNamespace(forward=SimpleNamespace(replays=7), rows=SimpleNamespace(prefixes=[SimpleNamespace(steps=3)]))
    engine: Any = SimpleNamespace(config=config, runner=runner)
    heard = [quality.Heard(PARTS[0], [1] * 64, cached=0)]
    assert quality.reached(engine, (6, 2), heard) == ["overlap", "CUDA graphs", "shared-prefix attention"]
    assert quality.reached(engine, (7, 3), [quality.Heard(PARTS[0], [1] * 65, cached=0)]) == ["chunked prefill", "overlap"]


def test_a_wrong_engine_does_not(small_shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine under test runs with weights that the reference does not have."""
    copy = quality.copy_weights

    def copy_and_change(weights: dict[str, Any], target: Any) -> None:
        copy({name: value.roll(1, 0) if "mlp" in name else value for name, value in weights.items()}, target)

    monkeypatch.setattr(quality, "copy_weights", copy_and_change)
    found = quality.check_quality(small_shape, "float32", PARTS, device="cpu")
    assert all(part["top1_agreement"] < 0.9 for part in found["by_part"].values())


def test_a_float16_head_has_room_for_rows_of_different_lengths() -> None:
    """With all of the vocabulary of a real model: finite logits, long rows as far apart as in bfloat16, exact both ways."""
    wide, narrow = (quality.row_powers(128_256, dtype) for dtype in (torch.bfloat16, torch.float16))
    longest = wide > wide.max() - quality._FLOAT16_POWERS
    assert 20 < int(longest.sum()) < 1000 and torch.equal(narrow[longest] - narrow.max(), wide[longest] - wide.max())
    assert narrow.min() == 0 and int((narrow == 0).sum()) > 127_000
    weight = (torch.randn(128_256, 8, generator=torch.Generator().manual_seed(0)) / 64).half()
    spread = weight * torch.exp2(narrow).half()[:, None]
    assert spread.isfinite().all() and torch.equal(spread * torch.exp2(-narrow).half()[:, None], weight)
    assert 5 * 2.0 ** float(narrow.max()) < torch.finfo(torch.float16).max       # a logit of five deviations


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_head_of_codes_gets_rows_of_different_lengths_by_its_scales(dtype: torch.dtype) -> None:
    linear = torch.nn.Module()
    codes = (torch.randn(64, 16, generator=torch.Generator().manual_seed(0)) * 30).to(dtype)
    linear.weight = torch.nn.Parameter(codes.clone(), requires_grad=False)
    linear.scale = torch.nn.Parameter(torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.5, requires_grad=False)
    finished: list[bool] = []
    linear.finish = lambda: finished.append(True)  # type: ignore[assignment]
    before, model = expanded(linear.weight, linear.scale, torch.float32), SimpleNamespace(head=linear)
    head = quality.head_dtype(model)  # type: ignore[arg-type]
    quality.spread_head(model, head)  # type: ignore[arg-type]
    after = expanded(linear.weight, linear.scale, torch.float32)
    powers = quality.row_powers(64, head)
    assert powers.max() - powers.min() > 20 and torch.equal(after, before * torch.exp2(powers)[:, None])
    quality.spread_head(model, head, back=True)  # type: ignore[arg-type]
    assert torch.equal(expanded(linear.weight, linear.scale, torch.float32), before) and finished == [True, True]
    linear.scale = torch.nn.Parameter(torch.ones(1, 1), requires_grad=False)       # blocks: no row has a scale of its own
    with pytest.raises(AssertionError, match="one for each row"):
        quality.spread_head(model, head)  # type: ignore[arg-type]


@pytest.mark.parametrize("mix", MIXES)
def test_the_check_of_a_file_computes_in_the_dtype_of_its_engine(mix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(quality, "compare", lambda model, dtype, *_, **__: asked.append((model, dtype)))
    quality.check_quality(f"llama-3.1-8b-{mix}")
    ((checked, dtype),) = asked
    facts = DeviceFacts("cuda", 10**11, ("bfloat16", "float16"), 0)
    found = [
        resolve(EngineConfig.of(model=model, dtype=dtype, max_model_len=256, load_format="dummy"), facts).dtype
        for model in (checked, str(write_shape(f"llama-3.1-8b-{mix}")))
    ]
    assert dtype == "auto" and found == ["float16", "float16"]


def test_figures_of_a_wrong_engine_do_not_count(
    small_shape: str, tiny_presets: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are on disk with what was found, and the command fails; not so where a lossy technique was asked for."""
    parts = {"one row": {"top1_agreement": 0.97, "positions": 9}}
    agreement = {"top1_agreement": 0.97, "least": 0.99, "same_dtype_agreement": None, "top1_agreement_alike_rows": 0.9,
                 "positions": 9, "by_part": parts, "reached": [], "dtype": "float32"}
    monkeypatch.setattr(presets, "check_quality", lambda *_, **__: agreement)
    monkeypatch.setitem(shapes.SHAPES, "llama-3.1-8b", shapes.SHAPES[small_shape] | {"num_hidden_layers": 1})
    words = ["bench", "offline", "--preset", "latency_b1", "--shape", "llama-3.1-8b", "--directory", str(tmp_path)]
    words += ["--set", "device=cpu"]
    assert main(words) != 0
    assert "below 99.00%: these figures are invalid" in capsys.readouterr().err
    made = json.loads((tmp_path / "offline-llama-3.1-8b.json").read_text())
    assert made["figures"]["quality"] == agreement and made["figures"]["rows"]["latency_b1"]["runs"]
    assert main([*words, "--no-quality"]) == 0
    made = json.loads((tmp_path / "offline-llama-3.1-8b.json").read_text())
    assert made["figures"]["quality"] == {"not_checked": "left out"} and made["figures"]["memory"] == {}


# -- the device log ----------------------------------------------------------------------------------------------------


def test_a_record_has_the_power_and_the_clock_of_its_decode_steps(
    small_shape: str, tiny_presets: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From one run with one token each to the end of the run that is timed; the line and the table say what binds."""
    asked: list[tuple[tuple[float, float], ...]] = []
    log = {"samples": 9, "busy_power_w": 692.0, "power_limit_w": 700.0, "sm_clock_mean_mhz": 1275.0, "max_sm_clock_mhz": 1980.0,
           "power_capped": 1.0, "heat_capped": 0.0, "limited_by": "power"}
    monkeypatch.setattr(Watch, "gpu", lambda self, *ranges: asked.append(ranges) or log)
    words = ["bench", "offline", "--preset", "latency_b1", "--shape", small_shape, "--no-quality", "--directory", str(tmp_path)]
    assert main([*words, "--set", "device=cpu", "--repeats", "2"]) == 0
    [[whole], decoding] = asked
    assert len(decoding) == 2 and all(whole[0] < begin <= end <= whole[1] for begin, end in decoding)
    said = capsys.readouterr().out
    assert "power binds: 692 of 700 W, SM clock 1,275 of 1,980 MHz" in said and "clock limited by" in said
    row = json.loads((tmp_path / f"offline-{small_shape}.json").read_text())["figures"]["rows"]["latency_b1"]
    assert row["device_log"] == log | {"decode": log}


def test_without_a_gpu_there_is_no_log() -> None:
    if device_log.torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with Watch(gpu_names()) as watch:
        assert watch.gpu((0, 1e12)) == {} and watch.clocks((0, 1e12)) is None and device_log.gpu_facts() == {}


# ---- GGUF files of a shape: without weights, but with packed linears ---------------------------------------------------

GGUF_FORMATS = {
    "q8_0": {"int8-32": 129},
    # Half of the layers have v and down in Q6_K; the head has, too. q and k share their linear with v.
    "q4_k_m": {"uint4-32": 32 + 32 + 16 + 16, "q6-16": 16 + 16 + 1},
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_file_of_a_shape_takes_no_room_and_has_the_types_of_its_name(mix: str) -> None:
    path = write_shape(f"llama-3.1-8b-{mix}")
    assert path.stat().st_size > 4e9 and path.stat().st_blocks * 512 < 1e6
    config, wide = load_model_config(path), load_model_config(write_shape("llama-3.1-8b"))
    same = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "tied")
    assert all(getattr(config, name) == getattr(wide, name) for name in same)
    assert Counter(format.name for _, format in LinearFormats(config, "none", "cuda").shapes()) == GGUF_FORMATS[mix]


def test_types_of_a_files_shape_are_those_of_files() -> None:
    assert {name: (number, TENSOR_TYPES[number].block_size, TENSOR_TYPES[number].block_bytes)
            for name, (number, _, _) in TYPES.items()} == TYPES
    assert all(TENSOR_TYPES[number].name == name for name, (number, _, _) in TYPES.items()) and ALIGNMENT == DEFAULT_ALIGNMENT
