"""The mesh: two processes over gloo give the logits of one, whatever does not divide by two. They divide every layer (tensor),
the stack of layers (pipeline), or the experts of a mixture; four divide layers and stack."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from folders import import_path
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits
from warm_start import WarmPopen

from ridgeline.distributed import meet as meet_module
from ridgeline.distributed.comm import Axis, Communicator
from ridgeline.distributed.meet import ProcessMesh, meet
from ridgeline.distributed.sharding import Shard, even_shard, head_shards
from ridgeline.errors import ConfigError
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config
from ridgeline.models.weights import load_weights
from ridgeline.sizes.mesh_shape import MeshShape, stage_layers

PREFILL, DECODE = 22, 3              # decodes begin in the middle of a page, and end in the next one
TOKENS = random_tokens(PREFILL + DECODE)
EPSILON_RATIO = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps

# llama: 4 heads, 2 KV heads, an odd vocabulary. llama-bias: one KV head for both ranks, and biases that must count once.
# olmo2 and olmoe: norms over all heads. mixtral: experts of an odd width. qwen2_moe: a shared expert. gpt_oss: sinks, and biases
# of experts that must count once. qwen3: likewise, with norms. smollm2: 9 heads and 3 KV heads, padded to 4.
# gemma3: tied, windows. llama4: chunks, and the queries' temperature. DeepSeek: every rank has the latent, and the heads are
# divided; 3 of them are padded to 4.
CASES = {
    "llama": {}, "llama-bias": {}, "qwen3": {"num_key_value_heads": 1}, "smollm2": {"intermediate_size": 81},
    "gemma3": {}, "olmo2": {"num_key_value_heads": 1}, "olmoe": {}, "mixtral": {"intermediate_size": 21}, "qwen2_moe": {},
    "gpt_oss": {}, "cohere2": {}, "llama4": {}, "deepseek_v2-lite": {"num_attention_heads": 3},
    "phi": {}, "gpt_neox": {}, "gpt2": {}, "apertus": {}, "hunyuan_v1_dense": {}, "phimoe": {},
    "bitnet": {"intermediate_size": 81}, "falcon": {}, "mistral4": {},
}


NARROW = ("llama", "smollm2", "gpt_oss", "deepseek_v2-lite")         # in float32, too

# Tied and not, windows whose groups lie across stages, layers of different kinds on the two stages, and a sum of two streams.
PIPELINE = ("llama", "gemma3", "mixtral", "qwen2_moe", "gpt_oss", "cohere2", "deepseek_v2-lite", "gpt2")
# 5, 6 and 8 experts for two ranks; biases, shared experts, a limit.
EXPERTS = ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v2-lite", "olmoe")

# One KV head for both ranks, heads that are padded, norms over all heads, windows and softcaps, sinks, latents.
CONTEXT = ("llama-bias", "smollm2", "gemma3", "olmo2", "gpt_oss", "cohere2", "llama4", "deepseek_v2-lite",
           "hunyuan_v1_dense", "bitnet")
CONTEXT_OF_FOUR = ("llama", "olmo2", "gpt_oss")          # two KV heads or one for four ranks


Logits = dict[tuple[str, torch.dtype], torch.Tensor]


def all_logits(
    mesh: Communicator, cases: Iterable[str], directory: Path, dtypes: tuple[torch.dtype, ...] = (torch.float64,)
) -> Logits:
    found = {}
    for name in cases:
        for dtype in dtypes:
            model = load(directory / name, dtype, comm=mesh)
            found[name, dtype] = teacher_forced_logits(model, TOKENS, PREFILL, mesh.tensor.size, mesh.context.size)
    return found


def leave(mesh: ProcessMesh) -> None:
    dist.barrier()                       # no rank leaves while another still computes
    mesh.close()


def rank_main(rank: int, size: int, directory: Path) -> None:
    """One process: run every case of every mesh, and keep what this rank has."""
    torch.set_num_threads(1)

    def mesh(name: str, tensor: int, pipeline: int, experts: bool = False, context: bool = False) -> ProcessMesh:
        return meet(MeshShape(tensor, pipeline), rank, directory / f"store-{name}", "gloo", 120, experts, context)

    found = {}
    if size == 2:
        both = mesh("tensor", 2, 1)
        mine = torch.full((3,), float(rank + 1))
        assert both.tensor.all_reduce(mine.clone()).tolist() == [3.0] * 3
        assert both.tensor.all_gather(mine[None, :2].T).tolist() == [[1.0, 2.0]] * 2
        assert both.tensor.broadcast(mine.clone(), source=1).tolist() == [2.0] * 3
        found["tensor"] = all_logits(both, CASES, directory) | all_logits(both, NARROW, directory, (torch.float32,))
        config = load_model_config(directory / "smollm2")
        dummy = Decoder(config, both, torch.float64, "cpu", 32)
        load_weights(dummy, directory, config, "dummy")
        found["tensor"]["dummy", torch.float64] = teacher_forced_logits(dummy, TOKENS, PREFILL, tp_size=size)
        leave(both)
        found["pipeline"] = all_logits(stages := mesh("pipeline", 1, 2), PIPELINE, directory)
        leave(stages)
        found["experts"] = all_logits(experts := mesh("experts", 2, 1, True), EXPERTS, directory)
        leave(experts)
        found["context"] = all_logits(context := mesh("context", 2, 1, context=True), CONTEXT, directory)
        leave(context)
    else:
        found["tensor x pipeline"] = all_logits(four := mesh("four", 2, 2), PIPELINE, directory)
        leave(four)
        found["experts x pipeline"] = all_logits(four := mesh("expert stages", 2, 2, True), EXPERTS, directory)
        leave(four)
        found["context"] = all_logits(four := mesh("context", 4, 1, context=True), CONTEXT_OF_FOUR, directory)
        leave(four)
        found["context x pipeline"] = all_logits(four := mesh("context stages", 2, 2, context=True), CONTEXT, directory)
        leave(four)
        found["long pipeline"] = all_logits(four := mesh("long", 1, 4), ("gemma3", "cohere2"), directory)
        leave(four)
    torch.save(found, directory / f"logits{size}-{rank}.pt")


def run_ranks(size: int, directory: Path, program: str = __file__) -> None:
    environment = {**os.environ, "PYTHONPATH": import_path()}
    words = [sys.executable, program]
    ranks = [WarmPopen([*words, str(rank), str(size), str(directory)], env=environment) for rank in range(size)]
    try:
        assert [process.wait(timeout=600) for process in ranks] == [0] * size
    finally:
        for process in ranks:
            process.kill()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mesh")
    for name, overrides in CASES.items():
        save_checkpoint(name, directory / name, dtype=torch.float64, **overrides)
    return directory


@pytest.fixture(scope="module")
def run(checkpoints: Path) -> Path:
    run_ranks(2, checkpoints)
    return checkpoints


def ranks_logits(run: Path, kind: str = "tensor", size: int = 2) -> list[Logits]:
    return [torch.load(run / f"logits{size}-{rank}.pt", weights_only=False)[kind] for rank in range(size)]


@cache
def alone(path: Path) -> tuple[dict[torch.dtype, torch.Tensor], float]:
    """One rank's logits, and how far rounding takes them in float32."""
    found = {dtype: teacher_forced_logits(load(path, dtype), TOKENS, PREFILL) for dtype in (torch.float32, torch.float64)}
    return found, float((found[torch.float32] - found[torch.float64]).abs().max())


def check(run: Path, name: str, logits: Logits) -> None:
    expected, noise = alone(run / name)
    assert (name, torch.float64) in logits
    for dtype, tolerance in ((torch.float32, 4 * noise), (torch.float64, 4 * noise * EPSILON_RATIO)):
        if (name, dtype) not in logits:
            continue
        assert logits[name, dtype].shape == expected[dtype].shape
        assert float((logits[name, dtype] - expected[dtype]).abs().max()) <= tolerance


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_logits_of_one(run: Path, name: str) -> None:
    first, second = ranks_logits(run)
    check(run, name, first)
    dtypes = (torch.float32, torch.float64) if name in NARROW else (torch.float64,)
    assert all(torch.equal(first[name, dtype], second[name, dtype]) for dtype in dtypes)


@pytest.mark.parametrize("name", PIPELINE)
def test_two_stages_give_the_logits_of_one(run: Path, name: str) -> None:
    """Rank 0 is the last stage. The first one has no logits: it has sent its stream on."""
    last, first = ranks_logits(run, "pipeline")
    check(run, name, last)
    assert first[name, torch.float64].shape != last[name, torch.float64].shape


@pytest.mark.parametrize("name", EXPERTS)
def test_ranks_that_divide_the_experts_give_the_logits_of_one(run: Path, name: str) -> None:
    first, second = ranks_logits(run, "experts")
    check(run, name, first)
    assert torch.equal(first[name, torch.float64], second[name, torch.float64])


@pytest.mark.parametrize("name", CONTEXT)
def test_ranks_that_divide_the_context_give_the_logits_of_one(run: Path, name: str) -> None:
    """Prefill and decode: each rank has half of the positions, and of the first token's context one has none."""
    first, second = ranks_logits(run, "context")
    check(run, name, first)
    assert torch.equal(first[name, torch.float64], second[name, torch.float64])


@pytest.mark.slow
def test_four_ranks_give_the_logits_of_one(checkpoints: Path) -> None:
    run_ranks(4, checkpoints)
    kinds = ("tensor x pipeline", "experts x pipeline", "long pipeline", "context", "context x pipeline")
    for kind in kinds:
        first = ranks_logits(checkpoints, kind, 4)[0]
        for name, _ in first:
            check(checkpoints, name, first)


def test_dummy_weights_do_not_depend_on_the_sharding(run: Path) -> None:
    config = load_model_config(run / "smollm2")
    model = Decoder(config, Communicator(), torch.float64, "cpu", 32)
    load_weights(model, run, config, "dummy")
    alone = teacher_forced_logits(model, TOKENS, PREFILL)
    torch.testing.assert_close(ranks_logits(run)[0]["dummy", torch.float64], alone, rtol=0, atol=1e-12)


def test_a_rank_holds_its_share(tmp_path: Path) -> None:
    class Rank(Axis):
        rank, size = 1, 2

    config = load_model_config(save_checkpoint("llama", tmp_path))
    model = Decoder(config, Communicator(Rank()), torch.float32, "cpu", 32)
    layer = model.layers[0]
    assert layer.attention.qkv.weight.shape == (48, 48) and layer.attention.output.weight.shape == (48, 24)
    assert layer.mlp.gate_up.weight.shape == (80, 48) and layer.mlp.down.weight.shape == (48, 40)
    assert model.embed.weight.shape == (66, 48) and model.head.weight.shape == (66, 48)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("total", [1, 2, 9, 16, 131])
def test_even_shards_cover_everything_once(total: int, size: int) -> None:
    shards = [even_shard(total, rank, size) for rank in range(size)]
    assert [item for shard in shards for item in range(shard.start, shard.stop)] == list(range(total))
    assert len({shard.size for shard in shards}) == 1 and all(shard.filled <= shard.size for shard in shards)


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [
    (4, 2, 1), (4, 2, 2), (4, 2, 4), (9, 3, 2), (8, 1, 4), (32, 8, 8), (6, 2, 4), (14, 2, 4), (5, 5, 2), (12, 3, 6),
])
def test_query_heads_stay_with_their_kv_head(heads: int, kv_heads: int, size: int) -> None:
    group = heads // kv_heads
    seen = []
    for rank in range(size):
        q, kv = head_shards(heads, kv_heads, rank, size)
        # On the rank, query head i reads KV head i // (q.size // kv.size).
        assert q.size % kv.size == 0
        for place, head in enumerate(range(q.start, q.stop)):
            assert kv.start + place // (q.size // kv.size) == head // group
            assert kv.start <= head // group < kv.stop
        seen += range(q.start, q.stop)
    assert sorted(seen) == list(range(heads))


@pytest.mark.parametrize("stages", [1, 2, 3, 7])
def test_stages_have_every_layer_once(stages: int) -> None:
    found = [stage_layers(7, stage, stages) for stage in range(stages)]
    assert [number for layers in found for number in layers] == list(range(7))
    assert max(map(len, found)) - len(found[-1]) <= 1 and len(found[0]) == max(map(len, found))


def test_rank_0_is_on_the_last_stage() -> None:
    shape = MeshShape(2, 3)
    assert [shape.stage(rank) for rank in range(shape.size)] == [2, 2, 1, 1, 0, 0]
    assert [shape.of_stage(stage) for stage in range(3)] == [[4, 5], [2, 3], [0, 1]]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size 4 is more than the model's 3 layers"):
        stage_layers(3, 0, 4)


def test_scaled_shard() -> None:
    assert Shard(9, 6, 9, 6).scaled(4) == Shard(36, 24, 36, 24)


class Met(Exception):
    pass


@pytest.fixture
def never_met(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Ranks that come no further than their environment."""
    def init(*_: object, **__: object) -> None:
        raise Met

    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "environ", {})
    return os.environ                                    # type: ignore[return-value]


@pytest.mark.parametrize(("store", "listens_at"), [("/tmp/store", "lo"), ("tcp://10.0.0.1:5000", None)])
def test_ranks_of_one_machine_listen_nowhere_else(store: str, listens_at: str | None, never_met: dict[str, str]) -> None:
    with pytest.raises(Met):
        meet(MeshShape(2, 1), 0, store, "nccl")
    assert never_met.get("NCCL_SOCKET_IFNAME") == listens_at and "NCCL_HOSTID" not in never_met


def test_a_rank_that_shares_a_gpu_does_not_keep_the_host_name_of_rank_0(never_met: dict[str, str]) -> None:
    """It inherits it when rank 0 had ranks before; NCCL refuses two ranks of one name on one GPU."""
    never_met["NCCL_HOSTID"] = "ridgeline-rank-0"
    with pytest.raises(Met):
        meet(MeshShape(4, 1), 3, "/tmp/store", "nccl")
    assert never_met["NCCL_HOSTID"] == "ridgeline-rank-3"


def test_leaving_nccl_does_not_wait_for_a_graph_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort waits for CUDA graphs that hold collectives, and one may be left."""
    left, calls = threading.Event(), []

    def abort() -> None:
        calls.append("abort")
        left.wait()

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
    monkeypatch.setattr(meet_module.distributed_c10d, "_abort_process_group", abort)
    monkeypatch.setattr(meet_module, "_ABORT_SECONDS", 0.01)
    mesh = ProcessMesh()
    mesh.give_up()
    mesh.close()
    assert calls == ["abort"]
    left.set()


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
