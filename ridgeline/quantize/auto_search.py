"""`--recipe auto`: the fewest bytes, or the least predicted time, that meet limits of quality.

    what each linear costs ─▶ formats that fit the budget ─▶ quantise ─▶ card ─▶ a better budget ─▶ …

The card decides, not the prediction: the first allocation is predicted, each further one is corrected by what the last card says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.quantize.allocation import STEPS, allocate
from ridgeline.quantize.card import LIMITS
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.recipes import QuantizeRecipe, exact_recipe, read_recipe
from ridgeline.quantize.sensitivity import PLAIN_BYTES, Unit, measure
from ridgeline.sizes.hardware import DEVICES, Device

# From small to large, with scales in 16 bits; the linears keep the model's dtype after the last.
OPTIONS = ("int4-gptq", "nvfp4", "int4-gptq-asym/32", "fp8")
TRIES = 4
BISECTIONS = 6                       # of the budget, to find formats that were not tried
FIRST = 0.5                          # of a limit of KL, that the first try may cost: the worst slice costs more than the text
CLOSE = 0.85                         # a result that uses this much of a limit is not tried to be made smaller
MARGIN = 0.93                        # of the limit that the next try aims at
PASSAGES = 1                         # of the calibration text, to measure what linears cost: it is read once for each linear


def option_recipe(option: str, base: QuantizeRecipe) -> QuantizeRecipe:
    name, _, group = option.partition("/")
    return read_recipe(name, int(group) if group else None, base.keep, base.keep_first, base.keep_last)


def measured_units(path: Path, base: QuantizeRecipe, passages: list[list[int]], kept: Path, show: bool) -> list[Unit]:
    """What each linear costs; kept in a file beside the output, so that a stopped run need not measure again."""
    model = PlainModel(path)
    try:
        if model.config.experts is not None:
            raise ConfigError(f"{path.name}: auto does not choose formats for mixtures of experts yet: give another --recipe")
        stamp = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in model.files()]
        key = json.loads(json.dumps([stamp, base.as_data(), OPTIONS, passages]))
        try:
            found = json.loads(kept.read_text())
            if found["key"] == key:
                return [Unit(**{name: tuple(value) for name, value in unit.items()}) for unit in found["units"]]
        except (OSError, ValueError, KeyError, TypeError):
            pass                                         # none, or of another run
        options = [model.linears(option_recipe(option, base)) for option in OPTIONS]
        plain = [replace(linear, format=None) for linear in options[0]]
        units = measure(model, [*options, plain], passages, show)
    finally:
        model.close()
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"key": key, "units": [asdict(unit) for unit in units]}))
    return units


@dataclass(frozen=True, slots=True)
class Fastest:
    """The least time of all linears in a step of `rows` rows on this device, by its data sheet, instead of the fewest bytes."""

    device: Device
    rows: int = 64

    def seconds(self, unit: Unit) -> tuple[float, ...]:
        """Of each option: reading the weights or multiplying, what takes longer. Only fp8 is multiplied as it is stored."""
        flops = 2 * self.rows * unit.sizes[-1] / PLAIN_BYTES
        rates = [self.device.rate(name if name == "fp8" else self.device.wide) for name in (*OPTIONS, "")]
        return tuple(max(size / self.device.bandwidth, flops / rate) for size, rate in zip(unit.sizes, rates, strict=True))


def parse_fastest(words: str) -> Fastest:
    """From words like H200 or H200:16."""
    name, _, rows = words.partition(":")
    found = next((device for device in DEVICES.values() if device.name.lower() == name.lower()), None)
    if found is None or not (rows or "64").isdigit() or int(rows or 64) < 1:
        raise ConfigError(f"--fastest {words}: write GPU or GPU:ROWS, such as H200:64, with one of {', '.join(DEVICES)}")
    return Fastest(found, int(rows or 64))


def chosen_recipe(
    units: list[Unit], budget: float, base: QuantizeRecipe, fastest: Fastest | None = None
) -> QuantizeRecipe | None:
    prices = [unit.sizes if fastest is None else fastest.seconds(unit) for unit in units]
    picked = allocate(prices, [unit.costs for unit in units], budget)
    if picked is None:
        return None
    formats = {}
    for unit, option in zip(units, picked, strict=True):
        for module in unit.modules:
            formats[module] = OPTIONS[option] if option < len(OPTIONS) else None
    return exact_recipe("auto", {
        module: None if option is None else option_recipe(option, base).rules[0] for module, option in formats.items()
    }, base)


def rounded_to_nearest(recipe: QuantizeRecipe) -> QuantizeRecipe:
    """GPTQ fits codes to its text, at the cost of other kinds of text, which the card reads as well. So it is for text of the
    user's own; without, the same formats are rounded to nearest, as their costs were measured."""
    rules = tuple(replace(rule, method="rtn") if rule.method == "gptq" else rule for rule in recipe.rules)
    return replace(recipe, rules=rules)


def excess(card: dict[str, Any], limits: dict[str, float]) -> float:
    """The worst slice's figure as a share of its limit; at most 1: all limits are met."""
    worst = 0.0
    for name, limit in limits.items():
        for row in card["quality"]["slices"].values():
            value = LIMITS[name](row)
            share = value / limit if limit > 0 else (0.0 if value <= 0 else math.inf)
            worst = max(worst, math.inf if math.isnan(share) else share)     # NaN never passes
    return worst


def _next(
    units: list[Unit], budget: float, spent: float, beyond: float, base: QuantizeRecipe, fastest: Fastest | None, tried: set[str]
) -> tuple[float, QuantizeRecipe | None]:
    """A budget with formats that were not tried: this one, or one between those that are known. None: there is none."""
    for _ in range(BISECTIONS):
        recipe = chosen_recipe(units, budget, base, fastest)
        if recipe is not None and str(recipe) not in tried:
            return budget, recipe
        budget = (spent + beyond) / 2 if not spent < budget < beyond else (budget + beyond) / 2
    return budget, None


def search(
    units: list[Unit], limits: dict[str, float], base: QuantizeRecipe,
    make: Callable[[QuantizeRecipe], dict[str, Any]], say: Callable[[str], None] = lambda line: None,
    fastest: Fastest | None = None,
) -> dict[str, Any]:
    """`make` writes an output and returns its card. Returns the card of the smallest (or fastest) that met the limits: the one
    with the largest budget."""
    most = sum(max(unit.costs) for unit in units) * (1 + len(units) / STEPS)     # any formats fit: costs are rounded up
    budget = min(limits.get("kl", most) * FIRST, most)
    best: dict[str, Any] | None = None
    spent, beyond = 0.0, most                            # the largest budget that met the limits, the smallest that did not
    nearest: tuple[float, dict[str, Any]] | None = None
    tried: set[str] = set()
    for number in range(TRIES):
        budget, recipe = _next(units, budget, spent, beyond, base, fastest, tried)
        if recipe is None:
            break
        tried.add(str(recipe))
        try:
            card = make(recipe)
        except KeyboardInterrupt:
            if best is None:
                raise
            say("stopped: the smallest that met the limits so far is kept")
            break
        share, size = excess(card, limits), card["size"]["output_bytes"]
        say(f"try {number + 1}: {size / 1e9:.3f} GB, the worst slice is at {share:.0%} of its limit")
        if share > 1:
            beyond = min(beyond, budget)
        elif budget > spent:                             # a larger budget never takes more bytes or time
            best, spent = card, budget
        if nearest is None or share < nearest[0]:
            nearest = share, card
        if CLOSE <= share <= 1 or (share <= 1 and budget >= most):
            break
        budget = min(budget * MARGIN / max(share, 1e-3), most)
    if best is None:
        said = "" if nearest is None else (f": the nearest has a slice at {nearest[0]:.2f} times its limit, "
                                           f"with {nearest[1]['size']['output_bytes'] / 1e9:.2f} GB")
        raise ConfigError(f"no formats of auto meet the limits{said}")
    return best
