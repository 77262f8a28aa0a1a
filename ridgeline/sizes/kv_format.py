"""What the KV cache stores: the dtypes of keys and values, the layers that stay wide, and calibrated scales.

A quantised key or value has a float32 scale for each token and KV head, computed when it is written. With calibrated scales,
which a checkpoint brings, every token has the same one and none is stored. Both halves of the engine, `plan` and the memory
ledger count bytes from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ridgeline.errors import ConfigError
from ridgeline.sizes.op_costs import DTYPE_BYTES, E4M3, INT8, QUANTISED_BYTES, SCALE_BYTES

NARROW = {"fp8": E4M3, "int8": INT8}                     # values of kv_cache_dtype, and the dtypes they store
NAMES = {dtype: name for name, dtype in NARROW.items()}
WINDOWED = "sliding_window"                              # of kv_cache_dtype_skip_layers: every layer with a window


@dataclass(frozen=True, slots=True)
class KVFormat:
    k: str                           # dtype of keys …
    v: str                           # … and of values
    wide: str = ""                   # dtype of both in the layers that are not quantised
    wide_layers: frozenset[int] = frozenset()
    scales: tuple[tuple[float, float], ...] = ()         # of each layer's K and V, calibrated; empty: one per token and head

    @property
    def quantised(self) -> bool:
        return self.k in QUANTISED_BYTES or self.v in QUANTISED_BYTES

    @property
    def name(self) -> str:
        """As logs, metrics and records show it."""
        name = self.k if self.k == self.v else f"k={NAMES.get(self.k, self.k)},v={NAMES.get(self.v, self.v)}"
        return name + (f", {len(self.wide_layers)} layers {self.wide}" if self.wide_layers else "")

    def of_layer(self, layer: int) -> tuple[str, str]:
        """The dtypes of a layer's keys and values."""
        return (self.wide, self.wide) if layer in self.wide_layers else (self.k, self.v)

    def of_stage(self, layers: range) -> KVFormat:
        """Of a pipeline's stage, whose layers are counted from 0."""
        return replace(
            self, wide_layers=frozenset(layer - layers.start for layer in self.wide_layers if layer in layers),
            scales=self.scales[layers.start : layers.stop],
        )

    def scale_bytes(self, dtype: str) -> int:
        """Of a stored key or value of one head."""
        return SCALE_BYTES if dtype in QUANTISED_BYTES and not self.scales else 0

    def vector_bytes(self, layer: int, dim: int) -> tuple[int, int]:
        """Of one head's key, and of its value, with their scales."""
        k, v = (dim * element_bytes(dtype) + self.scale_bytes(dtype) for dtype in self.of_layer(layer))
        return k, v

    def mean_bytes(self, layers: Sequence[int], dim: int) -> float:
        """Per element of the keys and values of these layers, with their scales."""
        layers = layers if self.wide_layers else layers[:1]  # without wide ones, all layers are alike
        return sum(sum(self.vector_bytes(layer, dim)) for layer in layers) / (2 * dim * len(layers))


def element_bytes(dtype: str) -> int:
    return QUANTISED_BYTES[dtype] if dtype in QUANTISED_BYTES else DTYPE_BYTES[dtype]


def cache_dtype(asked: str, dtype: str, device: str, kernels: str = "auto") -> str:
    """What keys or values are stored in. auto is the activations' dtype, but float16 on a CPU that computes in float32: half the
    bytes per token, which the native kernels widen as they read. `kernels=reference` is exact."""
    if asked != "auto":
        return NARROW.get(asked, asked)
    return "float16" if (device, dtype, kernels) == ("cpu", "float32", "auto") else dtype


def parse(asked: str) -> tuple[str, str]:
    """The values of keys and of values in `kv_cache_dtype`: one for both, or k=…,v=…; where one is not named, auto."""
    if "=" not in asked:
        found = {"k": asked, "v": asked}
    else:
        pairs = [each.strip().partition("=")[::2] for each in asked.split(",")]
        found = {"k": "auto", "v": "auto"} | dict(pairs)
        if len(found) != 2 or len({name for name, _ in pairs}) != len(pairs):
            raise ConfigError(f"kv_cache_dtype {asked!r} is not understood; use one format, or k=FORMAT,v=FORMAT")
    known = ("auto", *NARROW, "float32")
    for each in found.values():
        if each not in known:
            raise ConfigError(f"kv_cache_dtype {each!r} is unknown; known: {', '.join(known)}, or k=FORMAT,v=FORMAT")
    if "float32" in found.values() and found["k"] != found["v"]:
        raise ConfigError("kv_cache_dtype float32 is for keys and values together")
    return found["k"], found["v"]


def skipped_layers(asked: str, windows: Sequence[int | None]) -> frozenset[int]:
    """The layers of `kv_cache_dtype_skip_layers`: numbers and ranges such as 0,1,30-31, and `sliding_window` for every layer that
    has one."""
    count, found = len(windows), set[int]()
    for word in asked.replace(",", " ").split():
        if word == WINDOWED:
            found |= {layer for layer, window in enumerate(windows) if window is not None}
            continue
        first, dash, last = word.partition("-")
        try:
            numbers = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise ConfigError(
                f"kv_cache_dtype_skip_layers {word!r} is neither a layer, a range such as 0-3, nor {WINDOWED}"
            ) from None
        if not numbers or numbers[-1] >= count:
            raise ConfigError(f"kv_cache_dtype_skip_layers {word!r}: the model has layers 0 to {count - 1}")
        found |= set(numbers)
    return frozenset(found)
