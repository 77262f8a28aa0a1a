"""What a plan says first, and that it recommends what this engine can do: on a GPU, on one's own card, on this CPU."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_writer import write_gguf
from quantised_models import DIALECTS
from served_model import write_model

from ridgeline.__main__ import main
from ridgeline.cli.cmd_plan import _question, add_arguments
from ridgeline.cli.config_options import add_engine_options, engine_config
from ridgeline.config import EngineConfig
from ridgeline.plan import own_cpu, plan_report
from ridgeline.plan.capacity import Capacity
from ridgeline.plan.operation import Slo, Traffic, devices_for, operate
from ridgeline.plan.plan_report import Question, answer, objectives, text
from ridgeline.plan.precision import StoredWeights
from ridgeline.plan.prediction import Setup, decode_seconds, prefill_seconds, step_parts
from ridgeline.plan.public_models import CONFIGS, cpu_weights, find_model, packed_format
from ridgeline.plan.search import (
    MEMORY,
    NOT_TIMED,
    NOT_YET,
    OBJECTIVES,
    YES,
    advised,
    candidates,
    effects,
    helps,
    missing,
    options,
    recommended,
    weight_formats,
)
from ridgeline.plan.workload_steps import count_rows, decode_rows, gather
from ridgeline.process.platform import CoreSeconds
from ridgeline.resolve import DeviceFacts, resolve
from ridgeline.roofline.peaks import MachinePeaks
from ridgeline.sizes import ledger
from ridgeline.sizes.hardware import DEVICES, NO_LINK, Device, described, find_device


def setup(model: str = "llama-3.1-8b", gpu: str = "H100", **more: object) -> Setup:
    return replace(Setup(model=find_model(model), device=find_device(gpu)), **more)  # type: ignore[arg-type]


# -- time per output token ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "gpu"), [("llama-3.1-8b", "H100"), ("qwen3-32b", "H200")])
def test_one_users_tokens_come_at_the_decode_steps_pace(model: str, gpu: str) -> None:
    """8,192 in and 64 out: the own prompt is done before the second token, which TPOT begins with."""
    made = setup(model, gpu)
    traffic = Traffic(8192, 64)
    point = operate(made, 1, traffic)
    assert point.tpot == pytest.approx(decode_seconds(made, 1, traffic.mean_context), rel=1e-6)
    assert point.tok_s < 1 / point.tpot, "its throughput still pays for the prompt"


def test_others_prompts_are_in_a_users_steps() -> None:
    made, traffic = setup(), Traffic(8192, 64)
    decode = decode_seconds(made, 8, traffic.mean_context)
    point = operate(made, 8, traffic)
    assert point.tpot == pytest.approx(decode + 7 / 64 * point.prompt)


# -- what exists -------------------------------------------------------------------------------------------------------


FP8 = {"fp8 weights", "fp8 KV"}


@pytest.mark.parametrize(("gpu", "formats"), [
    ("H100", FP8 | {"int4 weights"}), ("L4", FP8), ("RTX4090", FP8), ("A100", {"int8 KV"}), ("B200", FP8),
])
def test_objectives_take_only_what_this_engine_has_here(gpu: str, formats: set[str]) -> None:
    """Weights of 4 bits where kernels are made for them, which is on Hopper; elsewhere they save memory, and no speed is said."""
    made = setup(gpu=gpu)
    points = candidates(made, Traffic(512, 128), 2, any_engine=False)
    assert {name for point in points for name in point.setup.lossy} == formats
    assert {point.setup.ranks for point in points} == {1, 2}
    assert not any(missing(point.setup) for point in points)
    found = {effect.technique: effect.here for effect in effects(made, Traffic(512, 128))}
    own = formats | {"int8 KV", "prefix hits 50%", "4 drafts, α = 0.7"} | ({"int8 weights"} if gpu == "H100" else set())
    by_sheet = {"fp8 weights"} if gpu not in ("H100", "A100") else set()
    assert {name for name, here in found.items() if here == YES} == own - by_sheet
    assert {name for name, here in found.items() if here == NOT_TIMED} == by_sheet
    assert {name for name, here in found.items() if here == MEMORY} == {
        "fp8 weights", "int8 weights", "int4 weights"} - own
    assert found["2:4 sparsity"] == NOT_YET


def test_a_device_that_the_engine_does_not_run_on() -> None:
    """AMD's GPUs can be planned: nothing is in this engine there, and nothing is recommended."""
    made = setup(gpu="MI300X")
    assert missing(made) == {"MI300X as a device"} and weight_formats(made) == {} and recommended(made) == ([], [])
    assert {point.setup.weights for point in candidates(made, Traffic(512, 128), 2, any_engine=False)} == {"bfloat16"}
    assert not any(effect.here == YES for effect in effects(made, Traffic(512, 128)))


@pytest.mark.parametrize("lacking", [setup(gpu="MI300X"), setup(gpu="H200", sparse=True)])
def test_what_cannot_run_has_no_command(lacking: Setup) -> None:
    found = objectives(Question(lacking, Traffic(512, 128), most_ranks=1, objective=OBJECTIVES["batch"]))["batch"]
    assert found["best"]["missing"] and "serve" not in " ".join(advised(found))
    assert helps([operate(lacking, 1, Traffic(512, 128))], Traffic(512, 128), False) == []


@pytest.mark.parametrize(("more", "utilization", "words"), [
    ({}, 0.9, []),
    ({"dtype": "float16", "weights": "float16"}, 0.97, ["--dtype float16", "--gpu-memory-utilization 0.97"]),
    ({"stages": 2, "nodes": 2}, 0.9, ["--pipeline-parallel-size 2", "--distributed-executor-backend ray"]),
    ({"drafts": 4}, 0.9, ["""--speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'"""]),
])
def test_a_command_gives_what_was_predicted(more: dict[str, Any], utilization: float, words: list[str]) -> None:
    """Whatever the engine would choose otherwise is in the command, and the engine takes it."""
    said = options(setup(**more), 1, False, utilization)
    assert said == " ".join(words)
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    engine_config(parser.parse_args(shlex.split(said)))
    assert ("docs/cluster.md" in " ".join(advised({"options": said}))) == ("nodes" in more)


def test_the_share_of_the_memory_reaches_the_command() -> None:
    one_user = OBJECTIVES["one-user"]
    question = Question(setup(weights="int4"), Traffic(512, 128), most_ranks=1, utilization=0.97, objective=one_user)
    assert objectives(question)["one-user"]["options"] == "--quantization int4 --gpu-memory-utilization 0.97"


@pytest.mark.parametrize("gpu", ["H200", "L4", "A100"])
@pytest.mark.parametrize("stored", ["fp8", "int4", "mxfp4"])
def test_the_codes_of_a_checkpoint_are_not_rounded_again(gpu: str, stored: str) -> None:
    made = replace(setup(gpu=gpu), weights=stored)
    assert recommended(made)[0] == [] and recommended(setup("gpt-oss-20b", gpu))[0] == []
    told = objectives(Question(made, Traffic(512, 128), most_ranks=1, own_format=True))
    said = [found.get("options", "") for found in told.values()]
    assert not any("--quantization" in each for each in said)


def test_recommendations_have_options_gain_and_loss() -> None:
    question = Question(setup(gpu="H200"), Traffic(512, 128), most_ranks=1)
    told = answer(question) | {"objectives": objectives(question)}
    one, many = told["helps"]
    assert (one["batch"], one["options"]) == (1, "--quantization int4") and one["losses"] == {"int4 weights": 0.4905}
    assert many["options"] == "--quantization fp8" and 1.2 < many["gain"] < 1.6 < one["gain"] < 2.1
    alone, batch = (told["objectives"][name] for name in ("one-user", "batch"))
    assert alone["options"] == "--quantization int4", "a KV cache of 8 bits gains nothing with one short request"
    assert batch["options"].startswith("--quantization fp8 --kv-cache-dtype fp8 --max-num-seqs ") and batch["gain"] > 1.5
    assert told["objectives"]["quality-first"]["options"] == "" and not told["objectives"]["quality-first"]["losses"]
    said = text(told)
    assert "ridgeline serve MODEL --quantization int4" in said and "loss with SmolLM2-135M: int4 weights KL 0.49" in said


@pytest.mark.parametrize(("gpu", "timed"), [("L4", False), ("B200", False), ("H100", True)])
def test_gains_by_the_data_sheet_are_called_so(gpu: str, timed: bool) -> None:
    """Where cuBLAS multiplies by fp8 weights and no step was timed: in the table, in what helps and beside an objective."""
    question = Question(setup(gpu=gpu), Traffic(512, 128), most_ranks=1, objective=OBJECTIVES["one-user"])
    told = answer(question) | {"objectives": objectives(question)}
    assert "quantization" in told["objectives"]["one-user"]["options"]
    said = text(told)
    row = next(line for line in said.splitlines() if line.startswith("fp8 weights"))
    assert row.endswith("yes" if timed else "not timed") and ("?" in row) == (not timed)
    assert said.count("speed by the data sheet: not timed on this kind of GPU") == (0 if timed else 2)
    assert ("fp8" in told["untimed_formats"]) == (not timed)


def test_one_user_has_as_few_devices_as_fast_formats_need() -> None:
    """4 bits would fit on one of them: they are not fast there, and the objective says so."""
    made = setup("qwen3-32b", "RTX4090")
    assert Capacity.of(replace(made, weights="int4"), 640).fits and not weight_formats(made)["int4"]
    told = objectives(Question(made, Traffic(512, 128), most_ranks=2, objective=OBJECTIVES["one-user"]))["one-user"]
    assert told["best"]["label"].startswith("2 × RTX4090, fp8 weights") and "formats that are fast here" in told["what"]


def test_what_is_not_there_is_marked() -> None:
    question = Question(setup("qwen3-32b", "RTX4090"), Traffic(512, 128), most_ranks=1)
    assert not any(each["best"] for each in objectives(question).values()), "it fits on one of them in no format that is fast"
    told = answer(question) | {"objectives": objectives(question)}
    assert "`--any-engine` also considers" in text(told)
    assert "it fits with int4 weights (general kernels, not timed)" in text(told)
    question = replace(question, setup=setup("qwen3-32b", "A100"), any_engine=True)
    assert re.search(r"not in this engine yet: .*fp8 KV", text(answer(question) | {"objectives": objectives(question)}))
    found = devices_for(setup(), Traffic(512, 128), Slo(), 5, 4, any_engine=False)
    assert {each.point.setup.ranks for each in found} == {1, 2, 4}


# -- one's own card ----------------------------------------------------------------------------------------------------


def test_a_card_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    known = DEVICES["RTX3090"]
    own = described(None, bandwidth=936, memory=24, tflops=71, fp8_tflops=None)
    assert (own.bandwidth, own.memory, own.rate("bfloat16")) == (known.bandwidth, known.memory, known.rate("bfloat16"))
    assert "fp8" not in own.flops and described(own, None, None, None, 140).flops["fp8"] == 140e12
    more = described(DEVICES["RTX4090"], None, 48, None, None)
    assert more.memory == 48e9 and more.bandwidth == DEVICES["RTX4090"].bandwidth
    assert main(["plan", "llama-3.1-8b", "--bandwidth", "936", "--memory", "24", "--tflops", "71", "--most", "1"]) == 0
    assert "1 × own card" in capsys.readouterr().out
    assert main(["plan", "llama-3.1-8b", "--memory", "24"]) == 2
    assert "--bandwidth GB/s, --memory GB and --tflops" in capsys.readouterr().err
    assert main(["plan", "llama-3.1-8b", "--gpu", "H100", "--memory", "-1"]) == 2
    assert "--memory must be above 0" in capsys.readouterr().err


@pytest.mark.parametrize(("said", "found"), [
    ("3090", "RTX3090"), ("RTX 3090", "RTX3090"), ("geforce rtx 4080", "RTX4080"), ("A10", "A10"), ("t4", "T4"),
    ("RTX 6000 Ada", "RTX6000Ada"), ("GH200", "GH200"), ("NVIDIA A10", "A10"), ("Tesla T4", "T4"),
])
def test_cards_by_the_names_that_people_use(said: str, found: str) -> None:
    assert find_device(said).name == found


def test_help_has_no_empty_choice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "{," not in capsys.readouterr().out


# -- three lines on top ------------------------------------------------------------------------------------------------


def test_the_answer_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "--gpu", "H100", "--input", "8192", "--output", "64", "--most", "1"]) == 0
    first, second, third, fourth, empty, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("fits: 15.0 GiB of weights in ") and "53 requests of 8,256 tokens" in first
    assert re.match(r"how fast: one user waits \d+ ms for the first token, then 5\.\d ms for each", second)
    assert "at batch 1 reading the weights" in third and "at batch 53 computing prompts" in third and not empty
    assert fourth.startswith("what helps: at batch 1 --quantization fp8, 1."), "of long prompts 4 bits are slower"
    assert main(["plan", "llama-3.1-70b", "--gpu", "H100", "--most", "1"]) == 0
    head, ways, *_ = capsys.readouterr().out.splitlines()
    assert head.startswith("DOES NOT FIT: it needs 13")
    assert ways == "it fits with fp8 weights or with int8 weights or with int4 weights"


# -- this CPU ----------------------------------------------------------------------------------------------------------

CPU = Device("CPU", 64e9, 20e9, {"float32": 100e9}, NO_LINK, kind="cpu")


def test_a_cpu_reads_16_bit_numbers_as_they_are_stored() -> None:
    """Two bytes of each weight, whatever it computes in; ranks divide them as float32."""
    made = Setup(model=find_model("llama-3.2-1b"), device=CPU, dtype="float32", weights="float32")
    assert made.model.config.dtype == "bfloat16"
    assert (made.shape.weight_bytes, made.shape.head_element_bytes) == (2.0, 2.0)
    assert replace(made, ranks=2).shape.weight_bytes == 4.0 and replace(made, weights="int8").shape.weight_bytes == 1.0
    told = answer(Question(made, Traffic(64, 32), most_ranks=1))
    assert "weights in bfloat16, computed in float32" in text(told)


def test_a_cpus_memory_is_the_engines_own(tmp_path: Path) -> None:
    """Weights with their second layouts and stored blocks, a quarter of the rest for KV: what the engine itself would take."""
    path = write_model(tmp_path / "tiny")
    made = Setup(model=find_model(str(path)), device=CPU, dtype="float32", weights="float32")
    capacity = Capacity.of(made, 256)
    batch = 4
    options = EngineConfig.of(model=str(path), max_model_len=256, max_num_seqs=batch, load_format="dummy")
    resolved = resolve(options, DeviceFacts("cpu", CPU.usable, ("float32",)))
    mine = capacity.parts(batch)
    for part in (ledger.WEIGHTS, ledger.ROWS, ledger.STEPS):
        assert mine[part] == resolved.memory[part], part
    packed = Capacity.of(replace(made, weights="int4"), 256)
    codes = resolve(EngineConfig.of(
        model=str(path), max_model_len=256, max_num_seqs=batch, load_format="dummy", quantization="int4",
    ), DeviceFacts("cpu", CPU.usable, ("float32",)))
    assert packed.memory.weights == codes.memory[ledger.WEIGHTS] < mine[ledger.WEIGHTS]


def test_weights_on_a_cpu_are_as_wide_as_they_are_kept() -> None:
    """7.6 G parameters: 14 GiB in the 16 bits in which they are stored, and less as codes."""
    model = find_model("qwen2.5-7b")
    plain, codes = (
        Capacity.of(Setup(model=model, device=replace(CPU, memory=12e9), dtype="float32", weights=weights), 1280)
        for weights in ("float32", "int4")
    )
    assert plain.memory.weights >= 2 * model.parameters > 2 * codes.memory.weights
    assert codes.fits and not plain.fits


@pytest.mark.parametrize(("stored", "planned"), [("Q4_1", "int4"), ("Q8_0", "int8"), ("Q4_0", "int4")])
def test_blocks_are_planned_as_they_are_kept(stored: str, planned: str, tmp_path: Path) -> None:
    matrix = np.zeros((256, 256), np.float32)
    path = write_gguf(tmp_path / "model.gguf", {"general.architecture": "llama"}, {"blk.0.w": (matrix, stored)})
    assert packed_format(str(path)) == planned


@pytest.mark.parametrize(
    ("dialect", "planned", "bits"), [("ct-w4a16", "int4", 5), ("ct-w8a16", "int8", 8), ("ct-fp8-channel", "fp8", 8)]
)
def test_a_quantised_checkpoint_is_planned_as_a_cpu_keeps_it(dialect: str, planned: str, bits: int, tmp_path: Path) -> None:
    """Its bytes are the engine's own, a step reads no more than they are, and codes of integers have their own rate."""
    path = write_model(tmp_path / "model", hidden_size=256)
    told = json.loads((path / "config.json").read_text()) | {"intermediate_size": 512, "torch_dtype": "bfloat16"}
    (path / "config.json").write_text(json.dumps(told | {"quantization_config": DIALECTS[dialect][0]}))
    model = find_model(str(path), as_stored=True)
    kept = cpu_weights(model, planned)
    made = Setup(model=model, device=CPU, dtype="float32", weights=planned, stored=kept)
    options = EngineConfig.of(model=str(path), max_model_len=256, max_num_seqs=4, load_format="dummy")
    resolved = resolve(options, DeviceFacts("cpu", CPU.usable, ("float32",)))
    assert packed_format(str(path)) == planned
    assert Capacity.of(made, 256).parts(4)[ledger.WEIGHTS] == resolved.memory[ledger.WEIGHTS]
    plain = cpu_weights(find_model(str(path)), planned)
    assert plain is None and kept is not None and bits / 8 <= kept.linears < 2
    fast = replace(CPU, flops={"float32": 100e9, "int4": 400e9, "int8": 300e9})
    gained = prefill_seconds(made, 256) / prefill_seconds(replace(made, device=fast), 256)
    assert gained > 1.2 if planned.startswith("int") else gained == 1


@pytest.mark.parametrize(
    ("kind", "stored", "computed"),
    [("float", "fp8", "fp8"), ("float", "fp8", "bfloat16"), ("int", "int8", "int8"), ("int", "int8", "bfloat16")],
)
def test_eight_bits_beside_wide_activations_have_not_the_rate_of_eight_bits(
    kind: str, stored: str, computed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint of weights alone: few rows read 8 bits, and prompts are no faster than in 16 bits."""
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": kind, "strategy": "channel"}}
    if computed != "bfloat16":
        group["input_activations"] = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True}
    own = {"quant_method": "compressed-tensors", "format": f"{kind}-quantized", "config_groups": {"a": group}}
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama-3.1-8b"] | {"quantization_config": own}))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    made = _question(parser.parse_args([str(tmp_path), "--gpu", "H200"])).setup
    wide = setup(gpu="H200")
    assert made.computed == computed and made.weights == stored
    assert 1.3 * decode_seconds(made, 1, 512) < decode_seconds(wide, 1, 512)
    assert (prefill_seconds(made, 2048) < prefill_seconds(wide, 2048)) == (computed != "bfloat16")
    assert main(["plan", str(tmp_path), "--gpu", "H200", "--most", "1", "--objective", "chat"]) == 0
    assert (", multiplied in bfloat16" in capsys.readouterr().out) == (computed == "bfloat16")


def test_packed_products_have_a_rate_of_their_own_and_the_head_is_packed_too() -> None:
    """Of a file whose weights take 0.72 bytes: its bytes bind one row, its products many, and one row unpacks for itself."""
    fast = replace(CPU, flops={"float32": 100e9, "int4": 400e9})
    packed = Setup(model=find_model("smollm2-135m"), device=fast, dtype="float32", weights="int4",
                   stored=StoredWeights("int4", 0.72, 0.72, 0.72))
    assert packed.shape.head_bytes == packed.shape.weight_bytes == 0.72
    wide_head, slow = replace(packed, stored=None), replace(packed, device=CPU)
    read = 0.72 * packed.model.parameters / (fast.bandwidth * packed.used.linear_read)
    assert read < decode_seconds(packed, 1, 8) < decode_seconds(wide_head, 1, 8)
    assert prefill_seconds(slow, 512) > 1.5 * prefill_seconds(packed, 512)
    free = replace(packed, device=replace(fast, bandwidth=1e15))
    free = replace(free, constants=replace(free.used, kernel_one_s=0.0, kernel_many_s=0.0))
    one, eight = (
        step_parts(free, gather(free.shape, [count_rows(free.shape, decode_rows(rows, 8))], free.model))["linears"][0]
        for rows in (1, 8)
    )
    assert eight / one == pytest.approx((8 + 1) / (1 + 1), rel=0.01)


@pytest.mark.parametrize(("seconds", "digits", "said"), [
    (0.0268, 0, "27 ms"), (0.00534, 1, "5.3 ms"), (9.9994, 0, "9,999 ms"), (9.9996, 0, "10 s"), (12.5434, 1, "12.5 s"),
    (827.35, 0, "827 s"), (999.7, 0, "1,000 s"), (12345.0, 0, "12,345 s"),
])
def test_long_waits_are_said_in_seconds(seconds: float, digits: int, said: str) -> None:
    assert plan_report._duration(seconds, digits) == said


def test_a_busy_machine_is_called_busy() -> None:
    quiet = Question(Setup(model=find_model("smollm2-135m"), device=CPU, dtype="float32", weights="float32"), Traffic(64, 16), 1)
    busy = replace(quiet, setup=replace(quiet.setup, device=replace(CPU, taken=0.83)))
    assert "busy" not in text(answer(quiet))
    assert "this machine is busy: other programs had 83% of its cores" in text(answer(busy))


def test_what_others_take_is_what_the_machine_did_beside_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    before = CoreSeconds(100.0, 10.0, 50.0)
    assert CoreSeconds(108.0, 12.0, 52.0).others_since(before) == pytest.approx((8 - 2) / (2 * 4))
    assert CoreSeconds(101.0, 12.0, 52.0).others_since(before) == 0.0
    assert CoreSeconds(130.0, 10.0, 52.0).others_since(before) == 1.0


def test_peaks_that_an_engine_has_remembered_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    known = MachinePeaks("x", 37e9, {"float32": 73e9, "bfloat16": 9e9, "int4": 250e9, "int8": 150e9}, 1e-6, "then")
    monkeypatch.setattr(own_cpu, "cached_peaks", lambda key: known)
    found = own_cpu.best_known(replace(CPU, bandwidth=17e9, taken=0.8))
    assert (found.bandwidth, found.taken) == (37e9, 0.8), "the better of each; both may have been measured at a busy time"
    assert found.flops == {"float32": 100e9, "int4": 250e9, "int8": 150e9}
    monkeypatch.setattr(own_cpu, "cached_peaks", lambda key: None)
    assert own_cpu.best_known(replace(CPU, taken=0.8)).taken == 0.8
