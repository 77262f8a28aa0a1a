"""Nemotron and Minitron: layer norms with an offset, an MLP without a gate whose activation is a squared ReLU. Jais 2: the same
with plain layer norms and biases."""

from ridgeline.models.families.llama import GGUF_PLAIN_MLP_NAMES, PLAIN_MLP_NAMES
from ridgeline.models.family import Family

NEMOTRON = Family(
    name="nemotron",
    architectures=("NemotronForCausalLM",),
    gguf="nemotron",
    activation="relu2",
    norm="layer+bias",
    norm_offset=1.0,
    gated=False,
    partial_rotary=True,
    spelled={"rms_norm_eps": "norm_eps"},
    defaults={"norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    names=PLAIN_MLP_NAMES,
    gguf_names=GGUF_PLAIN_MLP_NAMES,
)

JAIS2 = Family(
    name="jais2",
    architectures=("Jais2ForCausalLM",),
    gguf="jais2",
    activation="relu2",
    norm="layer+bias",
    gated=False,
    spelled={"rms_norm_eps": "layer_norm_eps"},
    defaults={"layer_norm_eps": 1e-5, "attention_bias": True, "mlp_bias": True},
    names=PLAIN_MLP_NAMES,
    gguf_names=GGUF_PLAIN_MLP_NAMES,
)
