"""`--recipe auto`: the fewest bytes, or the least predicted time, that meet limits of quality; or the best quality in some bytes.

    what each linear costs ─▶ formats that fit the budget ─▶ measured together ─▶ quantise ─▶ card ─▶ a better budget ─▶ …

Uniform recipes are measured as well, so that the search is not worse than they are on its text. The card decides, not the
prediction: the first allocation is predicted, each further one is corrected by what the last card says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.quantize.allocation import allocate, steps_of
from ridgeline.quantize.card import LIMITS, LimitsMissed
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.recipes import QuantizeRecipe, exact_recipe, read_recipe
from ridgeline.quantize.sensitivity import PLAIN_BYTES, Measure, Texts, Unit, added_up
from ridgeline.sizes.hardware import DEVICES, Device

# The first is the coarsest; the linears keep the model's dtype after the last. Where two have the same bytes, the better one is
# taken for each linear: so the method is a choice, too.
OPTIONS = (
    "int4-rtn", "int4-awq", "mxfp4", "int4-rtn-asym", "int4-awq-asym", "nvfp4", "int4-rtn-asym/32", "int4-awq-asym/32", "fp8",
    "w8a16",
)
# GPTQ fits codes to its text, at the cost of other kinds of text. So it is tried with text of the user's own.
WITH_TEXT = ("int4-gptq", "int4-gptq-asym", "int4-gptq-asym/32")
TRIES = 4
BETWEEN = (1 / 2, 3 / 4, 1 / 4, 7 / 8, 5 / 8, 3 / 8, 1 / 8)          # of two known budgets, to find formats that were not tried
FIRST = 0.5                          # of a limit of KL, that the first try may cost: the worst slice costs more than the text
CLOSE = 0.85                         # a result that uses this much of a limit is not tried to be made smaller
MARGIN = 0.93                        # of the limit that the next try aims at
CLEAR = 0.95                         # of a uniform recipe's KL, that a mixture must reach: a smaller gain may be noise
# Where the uniform recipe leaves less than this part of the bytes that a choice may take, there are hardly any to move, and a
# mixture must gain more: one with 0.87 of AWQ's KL on the search's text had 1.004 of it on the card's
# (benchmarks/studies/auto_methods/mixture_where_full.json).
LEFT, CLEAR_IF_FULL = 0.01, 0.8
TRUSTS = (1.0, 0.7, 0.4)             # powers of what a linear costs alone, beside the mean of its kind: little text makes noise


@dataclass(frozen=True, slots=True)
class Space:
    """What can be chosen, and by what."""

    base: QuantizeRecipe
    options: tuple[str, ...] = OPTIONS
    fastest: Fastest | None = None

    def recipe(self, option: str) -> QuantizeRecipe:
        name, _, group = option.partition("/")
        base = self.base
        return read_recipe(name, int(group) if group else None, base.keep, base.keep_first, base.keep_last)

    def of(self, units: list[Unit], picked: Sequence[int]) -> QuantizeRecipe:
        """The recipe with these options of the units."""
        rules = {option: self.recipe(option).rules[0] for option in self.options}
        return exact_recipe("auto", {
            module: rules[self.options[option]] if option < len(self.options) else None
            for unit, option in zip(units, picked, strict=True) for module in unit.modules
        }, self.base)


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured of a model."""

    units: list[Unit]
    uniform: list[float]             # KL of the whole model in each option

    def best_uniform(self, most_bytes: float) -> int | None:
        """The option with the least KL whose outputs fit."""
        fit = [option for option in range(len(self.uniform)) if sum(unit.sizes[option] for unit in self.units) <= most_bytes]
        return min(fit, key=self.uniform.__getitem__, default=None)


def tried_options(own_text: bool, moves_scales: bool) -> tuple[str, ...]:
    """Of a family whose scales cannot be moved, those of AWQ are rounded to nearest."""
    found = (*OPTIONS, *(WITH_TEXT if own_text else ()))
    return found if moves_scales else tuple(dict.fromkeys(option.replace("awq", "rtn") for option in found))


def measured(measure: Measure, model: PlainModel, space: Space, texts: Texts, kept: Path) -> Costs:
    """What each linear costs; kept in a file beside the output, so that a stopped run need not measure again."""
    key = json.loads(json.dumps([model.stamps(), space.base.as_data(), space.options, asdict(texts)]))
    try:
        found = json.loads(kept.read_text())
        if found["key"] == key:
            units = [Unit(**{name: tuple(value) for name, value in unit.items()}) for unit in found["units"]]
            return Costs(units, [float(kl) for kl in found["uniform"]])
    except (OSError, ValueError, KeyError, TypeError):
        pass                                             # none, or of another run
    options = [model.linears(space.recipe(option)) for option in space.options]
    plain = [replace(linear, format=None) for linear in options[0]]
    units, uniform = measure.units([*options, plain])
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps({"key": key, "units": [asdict(unit) for unit in units], "uniform": uniform}))
    return Costs(units, uniform)


def trusted(units: list[Unit], trust: float) -> list[Unit]:
    """Costs between what was measured of each linear (1) and the mean of linears of its kind (0)."""
    kinds: dict[str, list[Unit]] = {}
    for unit in units:
        if unit.costs[0] > 0:                            # others are kept as they are
            kinds.setdefault(unit.modules[0].rpartition(".")[2], []).append(unit)
    means = {kind: sum(unit.costs[0] for unit in same) / len(same) for kind, same in kinds.items()}
    found = []
    for unit in units:
        factor = (means[unit.modules[0].rpartition(".")[2]] / unit.costs[0]) ** (1 - trust) if unit.costs[0] > 0 else 1.0
        found.append(replace(unit, costs=tuple(cost * factor for cost in unit.costs)))
    return found


def refined(
    costs: Costs, space: Space, pick: Callable[[list[Unit]], list[int] | None],
    measure: Callable[[list[QuantizeRecipe]], list[float]], say: Callable[[str], None], room: float = 0.0,
) -> tuple[list[Unit], list[int] | None]:
    """The costs to go on with, and their choice: the one of least measured KL. Where a uniform recipe of no more bytes is better
    than all of them, or as good, that is the choice. `pick`: options by costs. `room`: bytes that a choice may take; 0: as few
    as it can."""
    ways = [added_up(trusted(costs.units, trust), costs.uniform) for trust in TRUSTS]
    picked: list[tuple[list[Unit], list[int]]] = []
    for units in ways:
        found = pick(units)
        if found is not None and found not in [others for _, others in picked]:
            picked.append((units, found))
    if not picked:
        return ways[0], None
    kls = measure([space.of(units, found) for units, found in picked])
    least, (units, choice) = min(zip(kls, picked, strict=True), key=lambda each: each[0])
    size = room or sum(unit.sizes[option] for unit, option in zip(units, choice, strict=True))
    same = costs.best_uniform(size) if space.fastest is None else None   # fewer bytes are not always faster
    rival = "none" if same is None else f"{space.options[same]} with {costs.uniform[same]:.3f}"
    say(f"KL on the search's text: {least:.3f}; the best uniform recipe of no more bytes: {rival}")
    if same is not None and costs.uniform[same] * _clear(units, same, room) < least:
        return units, [same] * len(units)
    return units, choice


def _clear(units: list[Unit], uniform: int, room: float) -> float:
    """Of that uniform recipe's KL, what a mixture must reach."""
    return CLEAR_IF_FULL if room and sum(unit.sizes[uniform] for unit in units) > (1 - LEFT) * room else CLEAR


def within_bytes(units: list[Unit], most: float) -> list[int] | None:
    """The least cost in this many bytes, of the linears alone. None: nothing is that small."""
    least = [min(unit.sizes) for unit in units]
    more = [[size - smallest for size in unit.sizes] for unit, smallest in zip(units, least, strict=True)]
    return allocate([unit.costs for unit in units], more, most - sum(least)) if most >= sum(least) else None


@dataclass(frozen=True, slots=True)
class Fastest:
    """The least time of all linears in a step of `rows` rows on this device, by its data sheet, instead of the fewest bytes."""

    device: Device
    rows: int = 64

    def seconds(self, unit: Unit, options: tuple[str, ...]) -> tuple[float, ...]:
        """Of each option: reading the weights or multiplying, what takes longer. Only fp8 is multiplied as it is stored."""
        flops = 2 * self.rows * unit.sizes[-1] / PLAIN_BYTES
        rates = [self.device.rate(name if name == "fp8" else self.device.wide) for name in (*options, "")]
        return tuple(max(size / self.device.bandwidth, flops / rate) for size, rate in zip(unit.sizes, rates, strict=True))


def parse_fastest(words: str) -> Fastest:
    """From words like H200 or H200:16."""
    name, _, rows = words.partition(":")
    found = next((device for device in DEVICES.values() if device.name.lower() == name.lower()), None)
    if found is None or not (rows or "64").isdigit() or int(rows or 64) < 1:
        raise ConfigError(f"--fastest {words}: write GPU or GPU:ROWS, such as H200:64, with one of {', '.join(DEVICES)}")
    return Fastest(found, int(rows or 64))


def within_budget(units: list[Unit], budget: float, space: Space) -> list[int] | None:
    """The fewest bytes, or the least time, whose costs fit the budget."""
    prices = [unit.sizes if space.fastest is None else space.fastest.seconds(unit, space.options) for unit in units]
    return allocate(prices, [unit.costs for unit in units], budget)


def chosen_recipe(units: list[Unit], budget: float, space: Space) -> QuantizeRecipe | None:
    picked = within_budget(units, budget, space)
    return None if picked is None else space.of(units, picked)


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
    units: list[Unit], budget: float, spent: float, beyond: float, space: Space, tried: set[str]
) -> tuple[float, QuantizeRecipe | None]:
    """A budget with formats that were not tried: this one, or one between those that are known. None: there is none."""
    for each in (budget, *(spent + share * (beyond - spent) for share in BETWEEN)):
        recipe = chosen_recipe(units, each, space)
        if recipe is not None and str(recipe) not in tried:
            return each, recipe
    return budget, None


def _most(units: list[Unit]) -> float:
    """Any formats fit this budget: costs are rounded up."""
    return sum(max(unit.costs) for unit in units) * (1 + len(units) / steps_of(len(units)))


def first_budget(units: list[Unit], limits: dict[str, float]) -> float:
    return min(limits.get("kl", _most(units)) * FIRST, _most(units))


def _better(card: dict[str, Any], best: dict[str, Any] | None, space: Space) -> dict[str, Any]:
    """Of two that meet the limits, the later one unless it is larger."""
    larger = best is not None and space.fastest is None and card["size"]["output_bytes"] >= best["size"]["output_bytes"]
    return best if best is not None and larger else card


def search(
    units: list[Unit], limits: dict[str, float], space: Space,
    make: Callable[[QuantizeRecipe], dict[str, Any]], say: Callable[[str], None] = lambda line: None,
    first: QuantizeRecipe | None = None,
) -> dict[str, Any]:
    """`make` writes an output and returns its card. Returns the card of the smallest (or fastest) that met the limits: the one
    with the largest budget. `first`: what to try first, instead of what the costs say."""
    most = _most(units)
    budget = first_budget(units, limits)
    best: dict[str, Any] | None = None
    spent, beyond = 0.0, most                            # the largest budget that met the limits, the smallest that did not
    nearest: tuple[float, dict[str, Any]] | None = None
    tried: set[str] = set()
    for number in range(TRIES):
        budget, recipe = _next(units, budget, spent, beyond, space, tried) if first is None or number else (budget, first)
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
        elif budget > spent:                             # a larger budget takes no more bytes or time, but `first` had none
            best, spent = _better(card, best, space), budget
        if nearest is None or share < nearest[0]:
            nearest = share, card
        if CLOSE <= share <= 1 or (share <= 1 and budget >= most):
            break
        budget = min(budget * MARGIN / max(share, 1e-3), most)
    if best is None:
        said = "" if nearest is None else (f": the nearest has a slice at {nearest[0]:.2f} times its limit, "
                                           f"with {nearest[1]['size']['output_bytes'] / 1e9:.2f} GB")
        raise LimitsMissed(f"no formats of auto meet the limits{said}")
    return best
