"""StarCoder2: layer norms and biases everywhere, an MLP without a gate."""

from ridgeline.models.families.llama import GGUF_PLAIN_MLP_NAMES, PLAIN_MLP_NAMES
from ridgeline.models.family import Family

STARCODER2 = Family(
    name="starcoder2",
    architectures=("Starcoder2ForCausalLM",),
    gguf="starcoder2",
    activation="gelu_tanh",
    tied=True,
    norm="layer+bias",
    gated=False,
    window="all",
    spelled={
        "rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias", "attention_out_bias": "use_bias", "mlp_bias": "use_bias",
    },
    defaults={"norm_epsilon": 1e-5, "use_bias": True},
    names={name: target for name, target in PLAIN_MLP_NAMES.items() if ".mlp." not in name} | {
        "model.layers.{}.mlp.c_fc": "layers.{}.mlp.up",
        "model.layers.{}.mlp.c_proj": "layers.{}.mlp.down",
    },
    gguf_names=GGUF_PLAIN_MLP_NAMES,
)
