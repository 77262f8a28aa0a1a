"""Command R (Cohere) and Command R7B, Command A (Cohere-2): attention and MLP side by side behind one layer norm, scaled logits.
The full layers of Cohere-2 have no rope."""

from ridgeline.models.family import LLAMA_NAMES, Family

COHERE_NAMES = {name: target for name, target in LLAMA_NAMES.items() if "post_attention_layernorm" not in name}
EPSILON = {"rms_norm_eps": "layer_norm_eps"}

COHERE = Family(
    name="cohere",
    architectures=("CohereForCausalLM",),
    gguf="command-r",
    gguf_permuted=True,
    tied=True,
    norm="layer",
    parallel=True,
    interleaved=True,
    logit_scale=True,
    only={"use_qk_norm": False},     # Command R+ alone: a layer norm with weights of its own for every head
    spelled=EPSILON,
    defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 500_000.0},
    names=COHERE_NAMES,
)

COHERE2 = Family(
    name="cohere2",
    architectures=("Cohere2ForCausalLM",),
    gguf="cohere2",
    gguf_permuted=True,
    tied=True,
    norm="layer",
    parallel=True,
    interleaved=True,
    logit_scale=True,
    nope="full",
    window="pattern",
    full_every=4,
    only={"use_parallel_block": True, "use_qk_norm": False, "use_gated_activation": True},
    spelled=EPSILON,
    defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096},
    names=COHERE_NAMES,
)
