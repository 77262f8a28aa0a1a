"""Mistral: Llama with a sliding window on every layer."""

from ridgeline.models.family import Family

MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    window="all",
    defaults={"sliding_window": 4096},
)
