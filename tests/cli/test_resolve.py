"""Settings that cannot fit are refused before anything is loaded, and the largest that would fit is named; and it fits."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from test_end_tokens import directory
from test_model_config import LLAMA
from test_stored_blocks import small_gguf

from ridgeline.bench.workload.shapes import write_shape
from ridgeline.config import EngineConfig
from ridgeline.engine.core.stats import active_techniques
from ridgeline.errors import ConfigError
from ridgeline.models.model_config import load_model_config
from ridgeline.models.stages import weight_bytes
from ridgeline.ops.attention.attention_arguments import workspace_floats
from ridgeline.resolve import GPU_STEP_TOKENS, DeviceFacts, ResolvedConfig, partial_bytes, resolve
from ridgeline.techniques import TECHNIQUES, Technique, turned_off

MIB = 2**20
MEMORY = {"cpu": 64 * MIB, "cuda": 160 * MIB}    # GPU: 96 are in reserve (sizes/ledger.py)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return directory(tmp_path, config=LLAMA)


def resolved(model: Path, memory: int | None = None, kind: str = "cpu", **options: Any) -> ResolvedConfig:
    fast = ("float32",) if kind == "cpu" else ("bfloat16", "float16", "float32")
    return resolve(EngineConfig.of(model=str(model), **options), DeviceFacts(kind, memory or MEMORY[kind], fast))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize(("name", "others"), [
    ("num_gpu_blocks_override", {}),
    ("kv_cache_memory_bytes", {"max_num_seqs": 10**3}),
    ("max_num_seqs", {"num_gpu_blocks_override": 32}),
    ("max_num_batched_tokens", {"num_gpu_blocks_override": 32}),
])
def test_the_largest_that_fits_is_named(model: Path, kind: str, name: str, others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} \d+ needs [\d.]+ GiB, .*; the largest that fits is \d+$") as caught:
        resolved(model, kind=kind, **others | {name: 10**9})
    largest = int(re.findall(r"\d+", str(caught.value))[-1])
    assert largest > 0
    if not others or name == "kv_cache_memory_bytes":
        resolved(model, kind=kind, **others | {name: largest})
    else:                            # the other parts need their share, too: they are named next
        with pytest.raises(ConfigError, match=r"; (the largest that fits is \d+|none fits)$"):
            resolved(model, kind=kind, **others | {name: largest})
    page = 16 * 1024
    with pytest.raises(ConfigError, match="largest that fits is"):
        resolved(model, kind=kind, **others | {name: largest + page})


def test_defaults_leave_room_for_everything(model: Path) -> None:
    for kind in ("cpu", "cuda"):
        for chunked in (True, False):
            config = resolved(model, kind=kind, enable_chunked_prefill=chunked, max_num_seqs=64)
            again = EngineConfig.of(**config.pinned().flat())
            assert resolve(again, DeviceFacts(kind, MEMORY[kind], ("float32",))).num_blocks == config.num_blocks > 10


def test_defaults_of_a_gpu_shrink_with_its_room(model: Path) -> None:
    """Half of what the weights leave should be the cache's. What was asked for stays, and is refused where it does not fit."""
    whole, small = resolved(model, 2**34, "cuda"), resolved(model, kind="cuda")
    assert (whole.max_num_seqs, whole.max_num_batched_tokens) == (1024, GPU_STEP_TOKENS)
    assert not {"max_num_seqs", "max_num_batched_tokens"} & set(whole.reasons)
    assert small.max_num_seqs < 1024 and small.max_num_seqs + 448 <= small.max_num_batched_tokens < GPU_STEP_TOKENS
    assert small.num_blocks > 10
    assert {"max_num_seqs", "max_num_batched_tokens"} <= set(small.reasons)
    asked = resolved(model, kind="cuda", max_num_batched_tokens=512)
    assert asked.max_num_batched_tokens == 512 and "max_num_batched_tokens" not in asked.reasons
    with pytest.raises(ConfigError, match="max_num_seqs 100000 needs"):
        resolved(model, kind="cuda", max_num_seqs=100_000)


GIB = 2**30


def tight(gib: float, **options: Any) -> ResolvedConfig:
    """An 8B model on a GPU with so much memory, of which the weights take 15 GiB."""
    wanted = EngineConfig.of(model=str(write_shape("llama-3.1-8b")), gpu_memory_utilization=1.0, load_format="dummy", **options)
    return resolve(wanted, DeviceFacts("cuda", int(gib * GIB), ("bfloat16",), 760 * MIB))


def test_a_size_that_was_asked_for_does_not_ruin_the_other() -> None:
    """A budget has room for all rows and prompts beside them; and nothing is given up for next to nothing."""
    rows = tight(24, max_num_seqs=2048)
    assert (rows.max_num_seqs, rows.max_num_batched_tokens) == (2048, GPU_STEP_TOKENS)
    assert tight(21, max_num_seqs=1024, max_model_len=4096).max_num_batched_tokens >= 1024 + 448
    assert tight(24, max_num_batched_tokens=20_000).max_num_seqs >= 256


def test_a_cache_that_was_asked_for_decides() -> None:
    assert tight(22, kv_cache_memory_bytes=GIB).max_num_seqs == 1024, "it fits beside the usual sizes"
    small = tight(21.5, num_gpu_blocks_override=2000, max_model_len=8192)
    assert small.num_blocks == 2000 and small.max_num_seqs < 1024


def test_whole_prompts_count_in_what_is_left() -> None:
    whole = tight(17.2, enable_chunked_prefill=False, max_model_len=2048)
    budget = whole.max_num_batched_tokens
    same = tight(17.2, max_num_batched_tokens=budget, max_num_seqs=whole.max_num_seqs, max_model_len=2048)
    assert 2048 <= budget < GPU_STEP_TOKENS and whole.max_num_seqs < 1024
    assert whole.graph_bytes == same.graph_bytes and whole.num_blocks == same.num_blocks


def test_seventy_billion_weights_start_with_defaults() -> None:
    facts = DeviceFacts("cuda", 150_109_880_320, ("bfloat16",), 760 * MIB, 0, "NVIDIA H200")
    options = EngineConfig.of(
        model=str(write_shape("llama-3.1-70b")), gpu_memory_utilization=0.972, max_model_len=4096, load_format="dummy"
    )
    found = resolve(options, facts)
    assert found.max_num_seqs < 1024 and found.num_blocks * 16 > 4096


def test_weights_that_do_not_fit(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"the weights need .* GiB in float32, .*; use a smaller model, or end other programs$"):
        resolved(model, memory=100_000)


def test_memory_that_others_have_is_named(model: Path) -> None:
    def refused(free: int) -> str:
        device = DeviceFacts("cuda", 2**32, ("bfloat16",), runtime=MIB, free=free)
        with pytest.raises(ConfigError) as caught:
            resolve(EngineConfig.of(model=str(model), gpu_memory_utilization=0.5), device)
        return str(caught.value)

    weights = weight_bytes(load_model_config(model), "bfloat16", "cuda")
    assert re.search(r"^the weights need .* \(other processes use 2\.00 GiB of its share\);", refused(weights // 2))
    none_fits = refused(weights + MIB)
    assert re.search(r"^max_num_seqs \d+ needs .* \(other processes use 2\.00 GiB .*\); none fits$", none_fits)
    with pytest.raises(ConfigError, match=r"^max_num_seqs \d+ needs .* are left for it; none fits$"):
        resolved(model, memory=int((weights + MIB) / 0.9), kind="cuda", dtype="bfloat16")


def test_the_blocks_of_a_gguf_file_are_counted(tmp_path: Path) -> None:
    """On the CPU in float32 they stay packed, and nothing else is kept."""
    path = small_gguf(tmp_path / "m.gguf", "Q8_0")
    model = load_model_config(path)
    plain = dataclasses.replace(model, packed=())
    for dtype, device, ranks in (("bfloat16", "cpu", 1), ("float32", "cuda", 1), ("float32", "cpu", 2)):
        assert weight_bytes(model, dtype, device, ranks) == weight_bytes(plain, dtype, device, ranks)
    needed = weight_bytes(model, "float32", "cpu")
    matrices = sum(count * outputs * inputs for count, outputs, inputs in model.matrices)
    norms = 4 * (model.num_parameters - matrices)
    # Groups of 16 outputs, and 40 tokens fill three of them; a group of 96 inputs ends 32 bytes before a multiple of 64.
    kept = (matrices + 8 * 64) * 34 // 32 + 2 * 4 * 32
    assert sum(matrix.nbytes for matrix in model.packed) == kept
    assert needed == norms + kept < weight_bytes(plain, "float32", "cpu") // 3
    with pytest.raises(ConfigError, match="the weights need"):
        resolved(path, memory=needed)


def test_only_what_helps_on_this_device_is_recommended(model: Path) -> None:
    for dtype, words in (("float32", "dtype bfloat16, or more GPUs"), ("bfloat16", "quantization fp8, or more GPUs"),
                         ("float16", "use a smaller model, or more GPUs")):
        with pytest.raises(ConfigError, match=words):
            resolved(model, 2**10, "cuda", dtype=dtype)


def test_a_dtype_that_the_cpu_cannot_multiply_is_refused(model: Path) -> None:
    facts = DeviceFacts("cpu", 2**34, ("float32",), unusable=("bfloat16",))
    with pytest.raises(ConfigError, match=r"no instructions for bfloat16.*use dtype float32"):
        resolve(EngineConfig.of(model=str(model), dtype="bfloat16"), facts)
    assert resolve(EngineConfig.of(model=str(model)), facts).dtype == "float32"


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_ledger_knows_the_workspace_of_attention(model: Path, deterministic: bool) -> None:
    config = load_model_config(model)
    for heads, kv_heads, head_dim in ((32, 8, 128), (64, 8, 128), (14, 2, 64), (16, 16, 96), (40, 1, 256)):
        shape = dataclasses.replace(config, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
        taken = 4 * workspace_floats(
            1024, heads, kv_heads, head_dim, multiprocessors=132, prefix_tiles=1, deterministic=deterministic
        )
        assert 1024 * partial_bytes(shape, deterministic) == pytest.approx(taken, rel=0.02)
    kept = {kind: resolved(model, 2**34, kind, dtype="float32", max_num_seqs=64, enforce_eager=True) for kind in ("cpu", "cuda")}
    assert kept["cuda"].memory["rows"] - kept["cpu"].memory["rows"] >= 64 * partial_bytes(config, False)


def test_ranks_on_a_cpu_share_its_memory(model: Path) -> None:
    """What fits once does not fit twice, when each rank has a KV cache of half the size per block."""
    alone = resolved(model)
    weights = weight_bytes(alone.model, "float32", "cpu")
    blocks = int((64 * MIB - weights) * 0.7) // (2 * 2 * 16 * 4 * 16 * 2)
    assert resolved(model, num_gpu_blocks_override=blocks).num_blocks == blocks
    assert resolved(model, num_gpu_blocks_override=blocks, tensor_parallel_size=2).num_blocks == blocks
    with pytest.raises(ConfigError, match="num_gpu_blocks_override"):
        resolved(model, num_gpu_blocks_override=2 * blocks, tensor_parallel_size=2)


def test_ranks_on_several_machines_do_not_share_memory(model: Path) -> None:
    far = resolved(model, pipeline_parallel_size=2, distributed_executor_backend="ray")
    assert far.num_blocks > resolved(model, pipeline_parallel_size=2).num_blocks


@pytest.mark.parametrize("share", [1.01, 90.0, float("nan"), float("inf")])
def test_share_of_the_gpu(model: Path, share: float) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization must be"):
        resolved(model, kind="cuda", gpu_memory_utilization=share)
    assert resolved(model, kind="cuda", gpu_memory_utilization=1.0).num_blocks > 2


def test_an_impossible_pair_of_sizes(model: Path) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        resolved(model, num_gpu_blocks_override=8, kv_cache_memory_bytes=MIB)


def test_a_technique_without_what_it_needs_is_off(model: Path) -> None:
    config = resolved(model, kv_layout="contiguous", enable_prefix_caching=True)
    assert not config.prefix_caching
    assert config.reasons["enable_prefix_caching"] == "off: prefix caching needs paged KV"
    assert resolved(model).prefix_caching and not resolved(model, enable_prefix_caching=False).prefix_caching


def test_requirements_and_exclusions() -> None:
    def technique(name: str, **fields: Any) -> Technique:
        return Technique(name, {name: True}, {name: False}, "compute", True, "", "", **fields)

    made = (
        technique("a"), technique("b", requires=("a",)), technique("c", requires=("b",)), technique("d", excludes=("a",)),
        technique("e", adds_nothing_to=("b", "d")),
    )
    options = {"a": True, "b": True, "c": True, "d": True, "e": True}
    assert turned_off(options, "cpu", made) == {"d": "does not work with a", "e": "adds nothing to b"}
    assert turned_off(options | {"b": False, "c": False}, "cpu", made) == {"d": "does not work with a"}
    options |= {"e": False}
    assert turned_off(options | {"a": False}, "cpu", made) == {"b": "needs a", "c": "needs b"}
    assert turned_off(options | {"a": None, "b": None, "c": None}, "cpu", made) == {}
    names = {technique.name for technique in TECHNIQUES}
    assert all({*each.requires, *each.excludes, *each.adds_nothing_to} <= names for each in TECHNIQUES)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("stages", [2, 3])
def test_overlap_adds_nothing_to_a_pipeline(tmp_path: Path, kind: str, stages: int) -> None:
    """As many steps are in flight as there are stages, whatever is asked for; the reason is given."""
    model = directory(tmp_path, config=LLAMA | {"num_hidden_layers": 3})
    for asked in (True, False, None):
        config = resolved(model, 2**34, kind, pipeline_parallel_size=stages, async_scheduling=asked)
        assert config.depth == stages - 1
        assert config.reasons["async_scheduling"] == "off: overlap adds nothing to pipeline parallelism"
        assert config.pinned().scheduler.async_scheduling is False
        assert "overlap" not in active_techniques(config)
    assert [resolved(model, 2**34, kind, async_scheduling=asked).depth for asked in (True, False)] == [1, 0]


@pytest.mark.parametrize(("options", "says"), [
    ({"tensor_parallel_size": 4, "decode_context_parallel_size": 2}, "must be 1 or tensor_parallel_size, which is 4"),
    ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "kv_cache_dtype": "int8"}, "set kv_cache_dtype auto"),
])
def test_contexts_that_cannot_be_divided_are_refused(options: dict[str, Any], says: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        resolved(model, **options)


def test_divided_contexts_store_every_kv_head_once(model: Path) -> None:
    """Blocks have as many tokens on every rank, and the same bytes in all as one rank's."""
    whole, divided = resolved(model), resolved(model, tensor_parallel_size=4, decode_context_parallel_size=4)
    (one,), (part,) = ({group.block_size for group in each.groups} for each in (whole, divided))
    assert part == 4 * one and divided.groups[0].tokens_here == one
    assert divided.groups[0].num_kv_heads == whole.groups[0].num_kv_heads
    assert not divided.shared_prefixes and not divided.graphs


# ── the KV cache's format ────────────────────────────────────────────────────────────────────────────────────────────


def test_formats_of_the_kv_cache(model: Path) -> None:
    found = resolved(model, kv_cache_dtype="k=int8,v=fp8", kv_cache_dtype_skip_layers=["0"])
    assert found.kv_format.of_layer(0) == ("float16", "float16") and found.kv_format.of_layer(1) == ("int8", "float8_e4m3fn")
    assert "a scale for every token and head" in found.reasons["kv_cache_dtype"]
    assert "slower" in found.reasons["kv_cache_dtype"]   # on a CPU, where no native kernel reads it
    assert resolved(model).kv_format.quantised is False


@pytest.mark.parametrize(("options", "says"), [
    ({"kv_cache_dtype_skip_layers": "0"}, "needs a quantised KV cache; set kv_cache_dtype"),
    ({"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": "99"}, "the model has layers 0 to"),
    ({"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": "0-1"}, "names every layer"),
])
def test_layers_that_cannot_be_skipped_are_refused(options: dict[str, str], says: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        resolved(model, **options)
