"""Tensor parallelism: two processes over gloo give the logits of one, whatever does not divide by two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from folders import import_path
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits

from ridgeline.distributed.sharding import Shard, even_shard, head_shards
from ridgeline.models.decoder import Decoder
from ridgeline.models.model_config import load_model_config
from ridgeline.models.weights import load_weights

PREFILL, DECODE = 20, 6
TOKENS = random_tokens(PREFILL + DECODE)
EPSILON_RATIO = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps

# llama: 4 heads, 2 KV heads, an odd vocabulary. llama-bias: one KV head for both ranks, and biases that must count once.
# olmo2 and olmoe: norms over all heads. mixtral: experts of an odd width. qwen2_moe: a shared expert. gpt_oss: sinks, and biases
# of experts that must count once. qwen3: likewise, with norms. smollm2: 9 heads and 3 KV heads, padded to 4.
# gemma3: tied, windows. DeepSeek: every rank has the latent, and the heads are divided; 3 of them are padded to 4.
CASES = {
    "llama": {}, "llama-bias": {}, "qwen3": {"num_key_value_heads": 1}, "smollm2": {"intermediate_size": 81},
    "gemma3": {}, "olmo2": {"num_key_value_heads": 1}, "olmoe": {}, "mixtral": {"intermediate_size": 21}, "qwen2_moe": {},
    "gpt_oss": {}, "cohere2": {}, "deepseek_v2-lite": {"num_attention_heads": 3},
}


def rank_main(rank: int, size: int, directory: Path) -> None:
    """One process: run every case, and compare what the ranks hold."""
    from ridgeline.distributed.comm import ProcessGroup

    torch.set_num_threads(1)
    comm = ProcessGroup(rank, size, directory / "store", timeout_seconds=60)
    mine = torch.full((3,), float(rank + 1))
    assert comm.all_reduce(mine.clone()).tolist() == [3.0] * 3
    assert comm.all_gather(mine[None, :2].T).tolist() == [[1.0, 2.0]] * 2
    assert comm.broadcast(mine.clone(), source=1).tolist() == [2.0] * 3
    logits = {}
    for name in CASES:
        for dtype in (torch.float32, torch.float64):
            model = load(directory / name, dtype, comm=comm)
            logits[name, dtype] = teacher_forced_logits(model, TOKENS, PREFILL, tp_size=size)
    config = load_model_config(directory / "smollm2")
    dummy = Decoder(config, comm, torch.float64, "cpu", 32)
    load_weights(dummy, directory, config, "dummy")
    logits["dummy", torch.float64] = teacher_forced_logits(dummy, TOKENS, PREFILL, tp_size=size)
    torch.save(logits, directory / f"logits{rank}.pt")
    comm.all_reduce(torch.zeros(1))      # no rank leaves while another still computes
    comm.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tp")
    for name, overrides in CASES.items():
        save_checkpoint(name, directory / name, dtype=torch.float64, **overrides)
    environment = {**os.environ, "PYTHONPATH": import_path()}
    words = [sys.executable, __file__]
    ranks = [subprocess.Popen([*words, str(rank), "2", str(directory)], env=environment) for rank in range(2)]
    try:
        assert [process.wait(timeout=600) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    return directory


def ranks_logits(run: Path) -> list[dict[tuple[str, torch.dtype], torch.Tensor]]:
    return [torch.load(run / f"logits{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_logits_of_one(run: Path, name: str) -> None:
    first, second = ranks_logits(run)
    alone = {dtype: teacher_forced_logits(load(run / name, dtype), TOKENS, PREFILL)
             for dtype in (torch.float32, torch.float64)}
    noise = float((alone[torch.float32] - alone[torch.float64]).abs().max())
    for dtype, tolerance in ((torch.float32, 4 * noise), (torch.float64, 4 * noise * EPSILON_RATIO)):
        assert torch.equal(first[name, dtype], second[name, dtype])
        assert first[name, dtype].shape == alone[dtype].shape
        assert float((first[name, dtype] - alone[dtype]).abs().max()) <= tolerance


def test_dummy_weights_do_not_depend_on_the_sharding(run: Path) -> None:
    from ridgeline.distributed.comm import Communicator

    config = load_model_config(run / "smollm2")
    model = Decoder(config, Communicator(), torch.float64, "cpu", 32)
    load_weights(model, run, config, "dummy")
    alone = teacher_forced_logits(model, TOKENS, PREFILL)
    torch.testing.assert_close(ranks_logits(run)[0]["dummy", torch.float64], alone, rtol=0, atol=1e-12)


def test_a_rank_holds_its_share(tmp_path: Path) -> None:
    from ridgeline.distributed.comm import Communicator

    class Rank(Communicator):
        rank, size = 1, 2

    config = load_model_config(save_checkpoint("llama", tmp_path))
    model = Decoder(config, Rank(), torch.float32, "cpu", 32)
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


def test_scaled_shard() -> None:
    assert Shard(9, 6, 9, 6).scaled(4) == Shard(36, 24, 36, 24)


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
