"""Mistral: Llama with a sliding window on every layer. Mixtral: with a mixture of experts."""

from ridgeline.models.family import GGUF_EXPERT_NAMES, GGUF_NAMES, LLAMA_NAMES, ExpertRule, Family

MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    window="all",
    defaults={"sliding_window": 4096},
)

MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    gguf="llama",                    # with experts
    gguf_permuted=True,
    window="all",
    experts=ExpertRule(normalise=True),
    names=LLAMA_NAMES | {
        "model.layers.{}.block_sparse_moe.gate": "layers.{}.mlp.router",
        "model.layers.{}.block_sparse_moe.experts.{}.w1": "layers.{}.mlp.experts.{}.gate_up:gate",
        "model.layers.{}.block_sparse_moe.experts.{}.w3": "layers.{}.mlp.experts.{}.gate_up:up",
        "model.layers.{}.block_sparse_moe.experts.{}.w2": "layers.{}.mlp.experts.{}.down",
    },
    gguf_names=GGUF_NAMES | GGUF_EXPERT_NAMES,
)
