"""On a CPU with packed weights, an answer that goes on elsewhere is the same to the last bit: its tokens are computed as decodes
again, not as a prompt, whose attention adds up in another order. Nor does it matter where a prompt is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_checkpoint

from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.messages import Request
from ridgeline.ops.cpu import native
from ridgeline.ops.registry import Site
from ridgeline.runner import device_rows
from ridgeline.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(
    not native.supports(Site("cpu", torch.float32, 0)), reason="this machine has no native kernels of this engine"
)
PROMPT = [(7 * place * place + 3 * place) % 60 + 3 for place in range(33)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32, which the native kernels take."""
    return save_checkpoint(
        "llama", tmp_path_factory.mktemp("own"), hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=256, tie_word_embeddings=False,
    )


def answer(model: Path, resumed: list[int] | None = None, **options: Any) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities."""
    core = EngineCore.start(EngineConfig.of(
        model=str(model), device="cpu", dtype="float32", quantization="int8", num_gpu_blocks_override=40, max_num_seqs=4,
        **options,
    ))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    core.add(Request("a", PROMPT, params, resumed=None if resumed is None else {0: resumed}))
    tokens: list[int] = []
    logprobs: list[float] = []
    while core.has_work:
        for delta in core.step():
            tokens += delta.token_ids
            logprobs += [float(each.logprobs[0]) for each in delta.logprobs]
    core.close()
    return tokens, logprobs


def test_an_answer_that_goes_on_elsewhere_is_the_same_to_the_last_bit(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, logprobs = answer(model)
    for said in (1, 17):
        assert answer(model, tokens[:said]) == (tokens[said:], logprobs[said:])
    assert answer(model, tokens[:17], max_num_batched_tokens=9) == (tokens[17:], logprobs[17:])
    assert answer(model, max_num_batched_tokens=32) == (tokens, logprobs), "one token of the prompt is left for the second step"
    monkeypatch.setattr(device_rows.DeviceRows, "_own_kernel", lambda *given: ())
    assert answer(model, tokens[:17])[1] != logprobs[17:], "both kernels add up in the same order: nothing was tested"
