"""EXAONE 4: norms only behind attention and MLP, norms on q and k, and no rope in full layers where others have a window."""

from ridgeline.models.families.olmo import BEHIND_NAMES
from ridgeline.models.family import QK_NORM_NAMES, Family

EXAONE4 = Family(
    name="exaone4",
    architectures=("Exaone4ForCausalLM",),
    gguf="exaone4",
    qk_norm=True,
    pre_norms=False,
    post_norms=True,
    nope="hybrid",
    window="pattern",
    full_every=4,
    spelled={"attention_bias": "", "attention_out_bias": "", "mlp_bias": ""},
    defaults={"sliding_window": 4096},
    names=BEHIND_NAMES | QK_NORM_NAMES,
)
