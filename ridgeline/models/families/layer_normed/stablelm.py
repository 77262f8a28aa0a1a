"""StableLM 2 and StableLM 3B: layer norms, heads rotated in part, and in the 12B model attention and MLP side by side."""

from ridgeline.models.family import Family

STABLELM = Family(
    name="stablelm",
    architectures=("StableLmForCausalLM",),
    gguf="stablelm",
    norm="layer+bias",
    parallel=True,                   # where use_parallel_residual says so
    partial_rotary=True,
    spelled={"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias", "attention_out_bias": ""},
    only={"qk_layernorm": False},    # a layer norm with weights of its own for every head
    defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_parallel_residual": False},
)
