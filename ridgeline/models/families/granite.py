"""Granite 3 and 4 (dense and mixtures): Llama with multipliers of embeddings, scores, logits, and of what each half of a layer
adds. Of Granite 4 those that have attention in every layer; the others are refused for their state-space layers. HyperCLOVA X has
the same multipliers."""

from dataclasses import replace

from ridgeline.models.family import (
    GGUF_EXPERT_NAMES,
    GGUF_NAMES,
    GGUF_STACKED,
    LLAMA_NAMES,
    ExpertRule,
    Family,
    FusedExperts,
)

UNSCALED = {"attention_multiplier": 1.0}                 # what stands for it in a config that does not say it

GRANITE = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    gguf="granite",
    gguf_permuted=True,
    multipliers=True,
    defaults=UNSCALED,
)

# Norms also behind attention and MLP; its logits are multiplied, Granite's are divided.
HYPERCLOVAX = Family(
    name="hyperclovax",
    architectures=("HyperCLOVAXForCausalLM",),
    post_norms=True,
    multipliers=True,
    logit_scale=True,
    spelled={"logit_scale": "logits_scaling"},
    defaults={"logits_scaling": 1.0},
    names=LLAMA_NAMES | {
        "model.layers.{}.post_norm1": "layers.{}.post_attention_norm",
        "model.layers.{}.post_norm2": "layers.{}.post_mlp_norm",
    },
)

GRANITE_MOE = Family(
    name="granitemoe",
    architectures=("GraniteMoeForCausalLM",),
    gguf="granitemoe",
    gguf_permuted=True,
    multipliers=True,
    defaults=UNSCALED,
    experts=ExpertRule(normalise=True),
    fused_experts=(
        FusedExperts(r"(model\.layers\.\d+\.block_sparse_moe)\.(input_linear|output_linear)\.weight", r"\1.experts.{}.\2.weight"),
        GGUF_STACKED,
    ),
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES,
    names=LLAMA_NAMES | {
        "model.layers.{}.block_sparse_moe.router.layer": "layers.{}.mlp.router",
        "model.layers.{}.block_sparse_moe.experts.{}.input_linear": "layers.{}.mlp.experts.{}.gate_up:gate+up",
        "model.layers.{}.block_sparse_moe.experts.{}.output_linear": "layers.{}.mlp.experts.{}.down",
        # As llm-compressor 0.14 saves them.
        "model.layers.{}.block_sparse_moe.experts.{}.gate_proj": "layers.{}.mlp.experts.{}.gate_up:gate",
        "model.layers.{}.block_sparse_moe.experts.{}.up_proj": "layers.{}.mlp.experts.{}.gate_up:up",
        "model.layers.{}.block_sparse_moe.experts.{}.down_proj": "layers.{}.mlp.experts.{}.down",
    },
)

GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    name="granitemoeshared",
    gguf="",                         # as granitemoe
    architectures=("GraniteMoeSharedForCausalLM",),
    names={
        **GRANITE_MOE.names,
        "model.layers.{}.shared_mlp.input_linear": "layers.{}.mlp.shared.gate_up:gate+up",
        "model.layers.{}.shared_mlp.output_linear": "layers.{}.mlp.shared.down",
    },
)

# Granite 4 without experts: the MLP of every layer is the one that its mixtures share.
GRANITE_4 = Family(
    name="granitemoehybrid",
    architectures=("GraniteMoeHybridForCausalLM",),
    gguf="granitehybrid",            # without experts
    gguf_permuted=True,
    multipliers=True,
    spelled={"intermediate_size": "shared_intermediate_size"},
    only={"num_local_experts": 0, "position_embedding_type": "rope"},
    defaults=UNSCALED | {"num_local_experts": 8, "position_embedding_type": "none"},
    names={name: target for name, target in LLAMA_NAMES.items() if ".mlp." not in name} | {
        "model.layers.{}.shared_mlp.input_linear": "layers.{}.mlp.gate_up:gate+up",
        "model.layers.{}.shared_mlp.output_linear": "layers.{}.mlp.down",
    },
)
