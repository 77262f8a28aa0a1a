"""Recipes of `ridgeline quantize`: which linear gets which weight format, by name or from a small YAML file. No torch.

Embeddings, norms and biases are never quantised; the head only where a pattern names it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.quant.format import FP8_BLOCK, FP8_ROW, GROUPS, INT8_ROW, MXFP4, Activation, Scales, WeightFormat, uint4
from ridgeline.user_files import read_yaml

METHODS = ("rtn", "gptq", "awq", "smoothquant")
SPARSE = ("magnitude", "wanda", "sparsegpt")                             # methods of 2:4
READ_TEXT = ("gptq", "awq", "smoothquant", "wanda", "sparsegpt", "static")           # methods that need calibration text
MOVES_SCALES = ("awq", "smoothquant")                                     # methods that change what writes a linear's inputs
KV_FORMATS = ("fp8", "int8")         # that scales of the KV cache can be for
OWN_TEXT = "model"                   # instead of a file to calibrate with: what the model itself writes
FEWEST_TOKENS = 1024                 # of text to calibrate with
HEAD = "lm_head"
AUTO = "auto"                        # formats by linear, the fewest bytes that meet limits of quality (auto_search.py)


@dataclass(frozen=True, slots=True)
class Rule:
    """What linears become that a pattern finds. A format of groups without a size takes the largest that divides the inputs."""

    pattern: str
    format: WeightFormat | None      # None: they keep the model's dtype
    method: str = "rtn"
    group: int | None = None         # None: the largest of GROUPS that divides the inputs


@dataclass(frozen=True, slots=True)
class Choice:
    """Of one linear: its format, or why it has none."""

    format: WeightFormat | None
    method: str = ""
    reason: str = ""


INT4, INT4_ASYMMETRIC = uint4(128), uint4(128, zero="code")
NVFP4 = WeightFormat("e2m1", Scales((1, 16), "float8_e4m3fn", outer=Scales((1, 0))))
# One scale for a whole matrix, and one for its inputs, from calibration text.
FP8_STATIC = replace(FP8_ROW, activation=Activation("fp8", "tensor", static=True))
INT8_STATIC = replace(INT8_ROW, activation=Activation("int8", "tensor", static=True))
INT8_WEIGHTS = replace(INT8_ROW, activation=None)
LLM_INT8 = replace(INT8_ROW, activation=Activation("int8", "token", outliers=6.0))
DENSE_24 = WeightFormat("bf16", sparse="2:4")
RECIPES: dict[str, tuple[WeightFormat, str, str]] = {
    "fp8": (FP8_ROW, "rtn", "8-bit floats, a scale for each output; activations in fp8 for each token"),
    "fp8-static": (FP8_STATIC, "static", "8-bit floats, one scale for a matrix and one for its activations, by calibration text"),
    "fp8-block": (FP8_BLOCK, "rtn", "8-bit floats, a scale for each block of 128 x 128; activations in groups of 128"),
    "w8a8": (INT8_ROW, "rtn", "8-bit integers, a scale for each output; activations in int8 for each token"),
    "w8a8-static": (INT8_STATIC, "static", "8-bit integers, one scale for a matrix and one for its activations, by text"),
    "w8a16": (INT8_WEIGHTS, "rtn", "8-bit integers, a scale for each output; activations as they are"),
    "llm-int8": (LLM_INT8, "rtn", "LLM.int8(): 8-bit integers; columns of activations above 6 in 16 bits; for bitsandbytes"),
    "int4-rtn": (INT4, "rtn", "4-bit integers in groups, symmetric, rounded to nearest"),
    "int4-rtn-asym": (INT4_ASYMMETRIC, "rtn", "4-bit integers in groups with zero points, rounded to nearest"),
    "int4-gptq": (INT4, "gptq", "4-bit integers in groups, symmetric, by GPTQ with calibration text"),
    "int4-gptq-asym": (INT4_ASYMMETRIC, "gptq", "4-bit integers in groups with zero points, by GPTQ with calibration text"),
    "int4-awq": (INT4, "awq", "4-bit integers in groups, symmetric, by AWQ with calibration text"),
    "int4-awq-asym": (INT4_ASYMMETRIC, "awq", "4-bit integers in groups with zero points, by AWQ with calibration text"),
    "w8a8-smooth": (INT8_ROW, "smoothquant", "w8a8 after SmoothQuant with calibration text"),
    "mxfp4": (MXFP4, "rtn", "4-bit floats in groups of 32 with a power of two as scale"),
    "nvfp4": (NVFP4, "rtn", "4-bit floats in groups of 16 with an 8-bit float as scale"),
    "sparse24-magnitude": (DENSE_24, "magnitude", "2:4 sparse, the smaller weights become zero; kept in the model's dtype"),
    "sparse24-wanda": (DENSE_24, "wanda", "2:4 sparse by Wanda with calibration text; kept in the model's dtype"),
    "sparse24-sparsegpt": (DENSE_24, "sparsegpt", "2:4 sparse by SparseGPT with calibration text; kept in the model's dtype"),
}


@dataclass(frozen=True, slots=True)
class QuantizeRecipe:
    name: str
    rules: tuple[Rule, ...]          # the first pattern that is found in a module's name counts
    keep: tuple[str, ...] = ()       # patterns of modules that stay as they are, before all rules
    keep_first: int = 0              # layers at the beginning that stay as they are
    keep_last: int = 0
    kv: str = ""                     # of KV_FORMATS: scales of the KV cache are calibrated for it

    def choose(self, module: str, inputs: int, layer: int | None, layers: int) -> Choice:
        """`layer`: None for the head, which is quantised only where a pattern names it."""
        if any(re.search(pattern, module) for pattern in self.keep):
            return Choice(None, reason="kept as asked")
        if layer is not None and (layer < self.keep_first or layer >= layers - self.keep_last):
            return Choice(None, reason="first or last layers, kept as asked")
        rule = next((rule for rule in self.rules if re.search(rule.pattern, module)), None)
        if rule is None:
            return Choice(None, reason="no pattern of the recipe")
        if (layer is None and not re.search(rule.pattern, HEAD)) or (layer is None and not rule.pattern):
            return Choice(None, reason="the head")
        if rule.format is None:
            return Choice(None, reason="kept as asked")
        choice = _fitted(rule, inputs)
        if layer is None and choice.method in READ_TEXT:                         # calibration ends with the last layer
            return replace(choice, method="rtn") if choice.method not in (*SPARSE, "static") else Choice(None, reason="the head")
        return choice

    def as_data(self) -> dict[str, Any]:
        """For the card, and to know whether a run is the same."""
        rules = [
            {"pattern": rule.pattern, "format": None if rule.format is None else rule.format.name, "method": rule.method,
             "group": rule.group,
             "symmetric": None if rule.format is None or rule.format.scales is None else rule.format.scales.zero is None}
            for rule in self.rules
        ]
        return {"name": self.name, "rules": rules, "keep": list(self.keep), "keep_first": self.keep_first,
                "keep_last": self.keep_last} | ({"kv": self.kv} if self.kv else {})


def _fitted(rule: Rule, inputs: int) -> Choice:
    format = rule.format
    assert format is not None
    fixed = 4 if format.scales is None or packs_bytes(format) else format.scales.block[1] if format.grid == "e2m1" else 1
    if inputs % fixed:
        return Choice(None, reason=f"{inputs} inputs do not divide into {fixed}s")
    if format.scales is None:
        return Choice(format, rule.method)
    if format.grid != "uint4":
        return Choice(format, rule.method)
    sizes = GROUPS if rule.group is None else (rule.group,)
    group = next((size for size in sizes if inputs % size == 0), None)
    if group is None:
        return Choice(None, reason=f"{inputs} inputs do not divide into groups of {' or '.join(map(str, sizes))}")
    return Choice(replace(format, scales=replace(format.scales, block=(1, group))), rule.method)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_recipe(
    given: str, group: int | None = None, keep: Iterable[str] = (), keep_first: int = 0, keep_last: int = 0, kv: str = ""
) -> QuantizeRecipe:
    """A name of RECIPES, or a YAML file of {pattern: name or {bits, group, …}}."""
    keep = tuple(keep)
    for pattern in keep:
        _check_pattern(pattern, "--keep")
    for option, number in (("--keep-first", keep_first), ("--keep-last", keep_last)):
        if number < 0:
            raise ConfigError(f"{option} must be at least 0, got {number}")
    if given == AUTO:
        if group is not None:
            raise ConfigError(f"--group cannot be given with {AUTO}, which chooses it")
        return QuantizeRecipe(AUTO, (), keep, keep_first, keep_last, kv)
    if given in RECIPES:
        rules: tuple[Rule, ...] = (_named("", given),)
    elif Path(given).suffix in (".yaml", ".yml", ".json"):
        rules = tuple(_rule(str(pattern), entry, given) for pattern, entry in _read_file(given).items())
        given = Path(given).name
    else:
        raise ConfigError(f"there is no recipe {given!r}{_near(given)}; there are {', '.join(RECIPES)}, {AUTO}, or give a .yaml "
                          "file")
    if group is not None:
        if not any(rule.format is not None and rule.format.grid == "uint4" for rule in rules):
            raise ConfigError(f"--group changes 4-bit integers; {given} has none")
        rules = tuple(replace(rule, group=_group(group, "--group")) for rule in rules)
    return QuantizeRecipe(given, rules, keep, keep_first, keep_last, kv)


def _near(given: str) -> str:
    close = difflib.get_close_matches(given, (*RECIPES, AUTO), 1)
    return f" (did you mean {close[0]}?)" if close else ""


def exact_recipe(name: str, rules: Mapping[str, Rule | None], base: QuantizeRecipe) -> QuantizeRecipe:
    """A rule for each module by its whole name; None: it keeps its dtype."""
    found = tuple(
        Rule(f"^{re.escape(module)}$", None) if rule is None else replace(rule, pattern=f"^{re.escape(module)}$")
        for module, rule in rules.items()
    )
    return QuantizeRecipe(name, found, base.keep, base.keep_first, base.keep_last, base.kv)


def _named(pattern: str, name: str) -> Rule:
    format, method, _ = RECIPES[name]
    return Rule(pattern, format, method)


def _read_file(path: str) -> Mapping[Any, Any]:
    found = read_yaml(path, "recipe")
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"recipe {path} must map patterns to formats, such as: mlp: {{bits: 4, group: 64}}")
    return found


def _rule(pattern: str, entry: Any, where: str) -> Rule:
    _check_pattern(pattern, where)
    if entry in (None, False, "none"):
        return Rule(pattern, None)
    if isinstance(entry, str):
        if entry not in RECIPES:
            raise ConfigError(f"{where}: {pattern}: there is no recipe {entry!r}{_near(entry)}; there are none, "
                              f"{', '.join(RECIPES)}")
        return _named(pattern, entry)
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: {pattern}: must be the name of a recipe or {{bits: …}}, got {str(entry)[:40]!r}")
    return _described(pattern, dict(entry), f"{where}: {pattern}")


def _described(pattern: str, entry: dict[str, Any], where: str) -> Rule:
    """{bits: 4 | 8 | 16, type: int | float, group, symmetric, method}"""
    bits, kind = entry.pop("bits", None), entry.pop("type", "int")
    group, symmetric, method = entry.pop("group", None), entry.pop("symmetric", True), entry.pop("method", "rtn")
    if entry:
        raise ConfigError(f"{where}: {next(iter(entry))!r} is not known; there are bits, type, group, symmetric, method")
    if method not in METHODS:
        raise ConfigError(f"{where}: method {method!r} is not known; there are {', '.join(METHODS)}")
    if not isinstance(symmetric, bool):
        raise ConfigError(f"{where}: symmetric must be true or false, got {symmetric!r}")
    if bits == 16:
        return Rule(pattern, None)
    formats: dict[tuple[Any, Any], WeightFormat] = {
        (8, "int"): INT8_ROW, (8, "float"): FP8_ROW, (4, "int"): INT4 if symmetric else INT4_ASYMMETRIC, (4, "float"): MXFP4,
    }
    if (bits, kind) not in formats:
        raise ConfigError(f"{where}: {bits!r} bits of type {kind!r} are not known; bits are 4, 8 or 16, and type int or float")
    format = formats[bits, kind]
    if method in ("gptq", "awq") and kind != "int":
        raise ConfigError(f"{where}: {method} rounds integers, not type {kind!r}")
    if method == "smoothquant" and (bits, kind) != (8, "int"):
        raise ConfigError(f"{where}: smoothquant is for 8-bit integers, whose activations are rounded, too")
    if not symmetric and (bits, kind) != (4, "int"):
        raise ConfigError(f"{where}: only 4-bit integers can be asymmetric")
    if group is not None and (bits, kind) != (4, "int"):
        raise ConfigError(f"{where}: only 4-bit integers have a group to choose")
    return Rule(pattern, format, method, None if group is None else _group(group, where))


def _group(group: Any, where: str) -> int:
    if not isinstance(group, int) or isinstance(group, bool) or group < 8 or group % 8:
        raise ConfigError(f"{where}: a group must be a multiple of 8, got {group!r}")
    return group


def _check_pattern(pattern: str, where: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{where}: {pattern!r} is no regular expression: {error}") from None


def stored_scales(format: WeightFormat, dtype: str) -> WeightFormat:
    """With scales in the model's dtype, as other engines expect them; those of 4-bit floats and of LLM.int8() stay."""
    scales = format.scales
    if scales is None or format.grid == "e2m1" or keeps_outliers(format):
        return format
    return replace(format, scales=Scales(scales.block, dtype, scales.zero))


def per_tensor(format: WeightFormat) -> bool:
    """A matrix has one scale, and so have its inputs."""
    return format.activation is not None and format.activation.per == "tensor"


def packs_bytes(format: WeightFormat) -> bool:
    """8-bit integers of weights alone: stored four to a word, which is where other engines look for them."""
    return format.grid == "int8" and format.activation is None


def keeps_outliers(format: WeightFormat) -> bool:
    """LLM.int8()"""
    return format.activation is not None and format.activation.outliers is not None


def require_new(out: Path) -> None:
    """The directory that is to be written must not be there."""
    if out.exists():
        raise ConfigError(f"{out} exists already: choose another --out, or delete it")
