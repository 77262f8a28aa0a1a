"""Qwen2 and 2.5 (biases on q, k, v), and Qwen3 (norms on q and k). Their upper layers may have a sliding window."""

from ridgeline.models.family import LLAMA_NAMES, QK_NORM_NAMES, Family

QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    gguf="qwen2",
    qkv_bias=True,
    window="upper",
    defaults={"sliding_window": 4096, "max_window_layers": 28},
)

QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    gguf="qwen3",
    qk_norm=True,
    window="upper",
    defaults={"sliding_window": 4096, "max_window_layers": 28},
    names=LLAMA_NAMES | QK_NORM_NAMES,
)
