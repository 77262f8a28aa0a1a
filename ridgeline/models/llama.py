"""Llama 2 and 3, and everything that is Llama by another name (SmolLM2, TinyLlama, Mistral as GGUF)."""

from ridgeline.models.family import Family

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    gguf="llama",
    gguf_permuted=True,
)
