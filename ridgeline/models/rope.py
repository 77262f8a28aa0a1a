"""Rotary position embedding as data: every kind of scaling becomes one divisor per frequency and one scale.

Knows the formulas and transformers' field names. Builds no tables (`models/decoder.py` does) and needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ridgeline.errors import ModelError, shown
from ridgeline.models.config_fields import MAX_NUMBER, MIN_NUMBER

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    dim: int                               # how many of a head's dimensions are rotated
    divisors: tuple[float, ...] = ()       # of the dim/2 frequencies; empty: none is scaled
    scale: float = 1.0                     # of cosine and sine
    long_divisors: tuple[float, ...] = ()  # longrope: these, where the engine's context is longer than the original
    original_context: int = 0

    @property
    def turns(self) -> bool:
        """False: the layer has no rope."""
        return math.inf not in self.divisors

    def frequencies(self, max_model_len: int) -> list[float]:
        """Radians per position of each pair. The choice of longrope is made once, by the longest context served."""
        divisors = self.divisors
        if self.long_divisors and max_model_len > self.original_context:
            divisors = self.long_divisors
        plain = plain_frequencies(self.theta, self.dim)
        return [f / d for f, d in zip(plain, divisors, strict=True)] if divisors else plain


def no_rope(dim: int) -> Rope:
    """A rotation by nothing, for layers without a rope: cosine 1 and sine 0 change no bit, and every kernel stays as it is."""
    return Rope(1.0, dim, (math.inf,) * (dim // 2))


def plain_frequencies(theta: float, dim: int) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


@contextmanager
def numbers_of(where: str) -> Iterator[None]:
    """ModelError for numbers that the formulas cannot use: each is valid alone, but a logarithm or a quotient of them is not."""
    try:
        yield
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ModelError(f"{where}: its rope cannot be computed from these numbers: {error}") from None


def rope_settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_scaling` (4). Where a config.json has both, the older one counts, as in
    transformers; it may leave the theta to the other."""
    found = []
    for name in ("rope_parameters", "rope_scaling"):
        given = config.get(name) or {}
        if not isinstance(given, dict):
            raise ModelError(f"{where}: {name} must be an object, got {shown(given)}")
        found.append(given)
    new, old = found
    return {"rope_theta": new.get("rope_theta"), **old} if old else new


def rope_kind(scaling: Mapping[str, Any], longrope: bool) -> str:
    """By its name of today. Phi-3's older names of longrope are "su" and "yarn", with longrope's factors."""
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str):
        return shown(kind)           # of no kind that is known
    if kind == "mrope":              # three positions for each part of an image, one and the same for text
        return "default"
    return "longrope" if longrope and kind in ("su", "yarn") and "short_factor" in scaling else kind


def alpha_theta(scaling: Mapping[str, Any], theta: float, dim: int, where: str) -> float:
    """Hunyuan's dynamic rope: an `alpha` stretches the theta for every length. Other families do not read it."""
    with numbers_of(where):
        if rope_kind(scaling, False) != "dynamic" or not scaling.get("alpha"):
            return theta
        return float(theta * _number(scaling, f"{where}: dynamic rope", "alpha") ** (dim / (dim - 2)))


def make_rope(
    scaling: Mapping[str, Any], theta: float, dim: int, max_position: int, longrope: bool, where: str
) -> Rope:
    """A rope from a `rope_scaling` or `rope_parameters` dictionary. `max_position` is the model's own, used where the
    dictionary does not name the original context.
    """
    with numbers_of(where):
        return _scaled_rope(scaling, theta, dim, max_position, longrope, where)


def _scaled_rope(
    scaling: Mapping[str, Any], theta: float, dim: int, max_position: int, longrope: bool, where: str
) -> Rope:
    kind = rope_kind(scaling, longrope)
    if kind not in ROPE_TYPES or (kind == "longrope" and not longrope):
        raise ModelError(
            f"{where}: rope type {shown(kind)} is not supported; supported: {', '.join(ROPE_TYPES)} (Phi, MiniCPM3)"
        )
    number = partial(_number, scaling, f"{where}: {kind} rope")
    if kind == "default":
        return Rope(theta, dim)
    if kind == "linear":
        return Rope(theta, dim, (number("factor"),) * (dim // 2))
    if kind == "dynamic":            # it changes with the length beyond the model's own context, which is not stretched here
        return Rope(theta, dim)
    original = number("original_max_position_embeddings", max_position)
    if kind == "llama3":
        divisors = llama3_divisors(theta, dim, number("factor"), number("low_freq_factor"), number("high_freq_factor"),
                                   original)
        return Rope(theta, dim, divisors)
    factor = number("factor", max_position / original)
    if kind == "yarn":
        divisors = yarn_divisors(theta, dim, factor, original, number("beta_fast", 32.0), number("beta_slow", 1.0),
                                 bool(scaling.get("truncate", True)))
        return Rope(theta, dim, divisors, number("attention_factor", _declared_yarn_scale(scaling, number, factor)))
    scale = _longrope_scale(number, longrope_scale(factor, original), where)
    short, long = (_longrope_divisors(scaling, field, dim // 2, where) for field in ("short_factor", "long_factor"))
    return Rope(theta, dim, short, scale) if short == long else Rope(theta, dim, short, scale, long, int(original))


def _number(scaling: Mapping[str, Any], what: str, field: str, default: float | None = None) -> float:
    value = scaling.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ModelError(f"{what} needs a positive number as {field}, got {shown(value)}")
    if not MIN_NUMBER <= value <= MAX_NUMBER:
        raise ModelError(f"{what} needs a number from {MIN_NUMBER:g} to {MAX_NUMBER:g} as {field}, got {shown(value)}")
    return float(value)


def _longrope_scale(number: Callable[..., float], default: float, where: str) -> float:
    """Phi-3.5-MoE names its scale twice, for short and for long contexts."""
    named = [each for each in (number("short_mscale", 0.0), number("long_mscale", 0.0)) if each]
    if len(set(named)) > 1:
        raise ModelError(f"{where}: short_mscale {named[0]:g} and long_mscale {named[1]:g} must be the same")
    return named[0] if named else number("attention_factor", default)


def _declared_yarn_scale(scaling: Mapping[str, Any], number: Callable[..., float], factor: float) -> float:
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):          # 0 stands for none
        return yarn_scale(factor, number("mscale")) / yarn_scale(factor, number("mscale_all_dim"))
    return yarn_scale(factor, 1.0)


def _longrope_divisors(scaling: Mapping[str, Any], field: str, count: int, where: str) -> tuple[float, ...]:
    values = scaling.get(field)
    listed = values if isinstance(values, list) else []
    numbers = [each for each in listed if isinstance(each, (int, float)) and MIN_NUMBER <= each <= MAX_NUMBER]
    if len(numbers) != count or len(listed) != count:
        raise ModelError(f"{where}: longrope needs {count} positive numbers as {field}, got {_brief(values)}")
    return tuple(map(float, numbers))


def llama3_divisors(
    theta: float, dim: int, factor: float, low: float, high: float, original: float
) -> tuple[float, ...]:
    """Long waves are slowed by `factor`, short ones kept, those between blended by how often they turn."""
    divisors = []
    for frequency in plain_frequencies(theta, dim):
        turns = original * frequency / (2 * math.pi)      # within the original context
        if turns > high:
            divisors.append(1.0)
        elif turns < low:
            divisors.append(factor)
        else:
            keep = (turns - low) / (high - low)
            divisors.append(1.0 / ((1 - keep) / factor + keep))
    return tuple(divisors)


def yarn_divisors(
    theta: float, dim: int, factor: float, original: float, fast: float, slow: float, truncate: bool
) -> tuple[float, ...]:
    """Frequencies that turn more than `fast` times in the original context are kept, less than `slow` interpolated."""

    def pair_turning(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_turning(fast), pair_turning(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    divisors = []
    for pair in range(dim // 2):
        interpolated = min(max((pair - first) / (last - first), 0.0), 1.0)
        divisors.append(1.0 / (interpolated / factor + 1 - interpolated))
    return tuple(divisors)


def yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_score_scale(config: Mapping[str, Any], where: str) -> float:
    """What DeepSeek's models multiply attention scores by where their context is stretched: it makes up for a rope that is not
    scaled, on keys that are rotated only in part."""
    scaling = rope_settings(config, where)
    kind = rope_kind(scaling, longrope=False)
    if kind == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    number = partial(_number, scaling, f"{where}: {kind} rope")
    return yarn_scale(number("factor"), number("mscale_all_dim")) ** 2


def longrope_scale(factor: float, original: float) -> float:
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _brief(value: object) -> str:
    return f"{len(value)}" if isinstance(value, list) else shown(value)
