"""Llama 2 and 3, everything that is Llama by another name (SmolLM2, TinyLlama, Mistral as GGUF), and its near relatives: SmolLM3
(layers without a rope), Seed-OSS, ERNIE 4.5 and Arcee (no gate)."""

from ridgeline.models.family import GGUF_NAMES, LLAMA_NAMES, Family

# MLPs without a gate.
PLAIN_MLP_NAMES = {name: target for name, target in LLAMA_NAMES.items() if ".mlp." not in name} | {
    "model.layers.{}.mlp.up_proj": "layers.{}.mlp.up",
    "model.layers.{}.mlp.down_proj": "layers.{}.mlp.down",
}
GGUF_PLAIN_MLP_NAMES = {name: target for name, target in GGUF_NAMES.items() if "ffn_gate" not in name} | {
    "blk.{}.ffn_up": "layers.{}.mlp.up",
}

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    gguf="llama",
    gguf_permuted=True,
)

SMOLLM3 = Family(
    name="smollm3",
    architectures=("SmolLM3ForCausalLM",),
    tied=True,
    nope="listed",
    only={"use_sliding_window": False},
    defaults={"rope_theta": 2_000_000.0},
)

SEED_OSS = Family(
    name="seed_oss",
    architectures=("SeedOssForCausalLM",),
    spelled={"attention_out_bias": "attention_out_bias"},
    defaults={"attention_bias": True, "attention_out_bias": False, "head_dim": 128},
)

ERNIE = Family(
    name="ernie4_5",
    architectures=("Ernie4_5ForCausalLM",),
    tied=True,
    interleaved=True,
    spelled={"attention_bias": "use_bias", "attention_out_bias": "use_bias", "mlp_bias": "use_bias"},
    defaults={"head_dim": 128, "rope_theta": 500_000.0},
)

ARCEE = Family(
    name="arcee",
    architectures=("ArceeForCausalLM",),
    gguf="arcee",
    gguf_permuted=True,
    activation="relu2",
    gated=False,
    names=PLAIN_MLP_NAMES,
    gguf_names=GGUF_PLAIN_MLP_NAMES,
)
