"""Checked access to the fields of a model's configuration: config.json or GGUF metadata. Every error names the file and field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.errors import ModelError, shown
from ridgeline.models.family import Family
from ridgeline.sizes.op_costs import DTYPE_BYTES

# The largest that any field of this kind may be, far above every model: lists and tables of these lengths are made, and a
# file that lies must not fill the memory.
MAX_LAYERS = 1_024
MAX_HEADS = 65_536
MAX_HEAD_DIM = 16_384
MAX_HIDDEN = 1 << 20
MAX_INTERMEDIATE = 1 << 24
MAX_VOCABULARY = 1 << 24
MAX_POSITIONS = 1 << 30
MAX_EXPERTS = 4_096
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e18  # of factors, thetas and the like: products of them are float32 numbers, too

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
GATED = ("silu", "gelu", "gelu_tanh")                    # those that an MLP with a gate can have …
BEHIND_INNER_NORM = ("relu2",)                           # … and those that no kernel joins with its matrices
LEARNED = ("xielu",)                                     # with tensors, whose names their own families know


class Fields:
    """Checked access to a config's fields. `None` counts as absent, as it does in transformers."""

    def __init__(
        self, where: str, raw: Mapping[str, Any], defaults: Mapping[str, Any], spelled: Mapping[str, str] | None = None
    ) -> None:
        """`spelled`: names of fields that are other than ours."""
        self.where = where
        self.raw = raw
        self.defaults = defaults
        self.spelled = spelled or {}

    def get(self, name: str, default: Any = None) -> Any:
        name = self.spelled.get(name, name)
        value = self.raw.get(name)
        if value is None:
            value = self.defaults.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        value, name = self.get(name, default), self.spelled.get(name, name)
        if value is None:
            raise ModelError(f"{self.where}: {name} is missing")
        if isinstance(value, list) and value and isinstance(value[0], int) and value.count(value[0]) == len(value):
            value = value[0]                             # one for each layer, and all the same (Hunyuan)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ModelError(f"{self.where}: {name} must be an integer of at least {minimum}, got {shown(value)}")
        if value > maximum:                              # no model has it, and lists of that length would be made
            raise ModelError(f"{self.where}: {name} must be at most {maximum}, got {shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value, name = self.get(name, default), self.spelled.get(name, name)
        if value is None:
            raise ModelError(f"{self.where}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ModelError(f"{self.where}: {name} must be a positive number, got {shown(value)}")
        if not MIN_NUMBER <= value <= MAX_NUMBER:
            raise ModelError(f"{self.where}: {name} must be from {MIN_NUMBER:g} to {MAX_NUMBER:g}, got {shown(value)}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {name} must be true or false, got {shown(value)}")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**31 for each in ids):
            raise ModelError(f"{self.where}: {name} must be a token id or a list of them, got {shown(value)}")
        return tuple(ids)


def read_activation(fields: Fields, family: Family) -> str:
    """By our name; the family's own where the config does not say, or says no more than `legacy_act`."""
    act = fields.get("hidden_act")
    activation = fields.get("hidden_activation") or (family.activation if act in (None, family.legacy_act) else act)
    gated = (*GATED, *BEHIND_INNER_NORM) if family.inner_norms else GATED
    others = set(LEARNED) - {family.activation}
    known = [name for name, kind in ACTIVATIONS.items() if (kind in gated if family.gated else kind not in others)]
    if not isinstance(activation, str) or activation not in known:
        raise ModelError(f"{fields.where}: hidden_act {shown(activation)} is not supported; supported: {', '.join(known)}")
    return ACTIVATIONS[activation]


def read_dtype(fields: Fields) -> str:
    dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    dtype = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ModelError(f"{fields.where}: dtype {shown(dtype)} is not supported; supported: {', '.join(DTYPE_BYTES)}")
    return dtype


def read_intermediate(fields: Fields, hidden_size: int) -> int:
    # GPT-2 and its kin need not say it.
    usual = 4 * hidden_size if fields.spelled.get("intermediate_size") == "n_inner" or fields.get("attention_types") else None
    return fields.integer("intermediate_size", usual, maximum=MAX_INTERMEDIATE)


def check_heads(where: str, num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        raise ModelError(f"{where}: {num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")


def read_head_dim(fields: Fields, name: str, hidden_name: str, hidden_size: int, num_heads: int) -> int:
    if fields.get(name) is None and hidden_size % num_heads:
        raise ModelError(f"{fields.where}: {hidden_name} {hidden_size} is not a multiple of {num_heads} heads, and no "
                         f"{name} is given")
    return fields.integer(name, hidden_size // num_heads, maximum=MAX_HEAD_DIM)


# Models of vectors were made from language models by this: their tokens also see those behind them.
CAUSAL = {"is_causal": True, "use_bidirectional_attention": False}


# The same in GGUF, with what else llama.cpp reads of any file and this engine does not compute.
GGUF_ONLY = {"attention.causal": True, "attention.max_alibi_bias": 0.0, "rope.scaling.yarn_ext_factor": 1.0}


def check_gguf_only(fields: Fields, key: Callable[[str], str]) -> None:
    for name, value in GGUF_ONLY.items():
        if fields.get(key(name), value) != value:
            raise ModelError(f"{fields.where}: {key(name)} {shown(fields.get(key(name)))} is not supported; supported: {value!r}")


def check_only(fields: Fields, family: Family) -> None:
    for name, value in CAUSAL.items():
        if fields.get(name, value) != value:
            raise ModelError(f"{fields.where}: {name} {shown(fields.get(name))} is not supported: tokens that see those behind "
                             "them give vectors, not text")
    for name, value in family.only.items():
        if fields.get(name, value) != value:
            raise ModelError(
                f"{fields.where}: {name} {shown(fields.get(name))} is not supported for {family.name}; supported: {value!r}"
            )
