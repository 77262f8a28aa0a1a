"""`--recipe auto`: what linears cost, the best allocation under a budget, and a search that believes the card only."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import SIZES
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits

from ridgeline.errors import ConfigError
from ridgeline.evaluate.rounded_inputs import round_inputs
from ridgeline.evaluate.task import Task
from ridgeline.quant.format import Activation
from ridgeline.quantize import auto_search
from ridgeline.quantize.allocation import allocate
from ridgeline.quantize.auto_search import (
    Costs,
    Space,
    chosen_recipe,
    excess,
    measured,
    parse_fastest,
    refined,
    search,
    tried_options,
    trusted,
    within_bytes,
)
from ridgeline.quantize.blocks import write_blocks
from ridgeline.quantize.calibration import Calibration
from ridgeline.quantize.ct_writer import quantization_config, stored_bytes
from ridgeline.quantize.hf_files import write_small_files
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.quantize_model import Job, quantize
from ridgeline.quantize.recipes import QuantizeRecipe, exact_recipe, read_recipe
from ridgeline.quantize.sensitivity import PLAIN_BYTES, Measure, Texts, Unit, added_up
from ridgeline.quantize.workspace import Workspace

SEQUENCES = [random_tokens(20 + number, seed=number) for number in range(9)]
AUTO = read_recipe("auto")
SPACE = Space(AUTO)
TEXTS = Texts(read=[random_tokens(40, seed=number) for number in range(20, 26)], judged=SEQUENCES, alone=SEQUENCES)
LAST = len(auto_search.OPTIONS)                          # the option that leaves linears as they are
FP8 = auto_search.OPTIONS.index("fp8")


def costs_of(plain: Path, kept: Path, space: Space = SPACE) -> tuple[Costs, PlainModel, Measure]:
    model = PlainModel(plain)
    measure = Measure(model, TEXTS, False)
    return measured(measure, model, space, TEXTS, kept), model, measure


@pytest.mark.parametrize("seed", range(6))
def test_the_allocation_is_within_a_percent_of_an_exhaustive_search(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [sorted(draw.uniform(1, 10) for _ in range(4)) for _ in range(6)]
    costs = [[*sorted((draw.uniform(0, 5) for _ in range(3)), reverse=True), 0.0] for _ in range(6)]
    budget = draw.uniform(1, 12)
    found = allocate(sizes, costs, budget)
    assert found is not None and sum(cost[option] for cost, option in zip(costs, found, strict=True)) <= budget
    least = min(
        sum(size[option] for size, option in zip(sizes, options, strict=True))
        for options in itertools.product(range(4), repeat=6)
        if sum(cost[option] for cost, option in zip(costs, options, strict=True)) <= budget
    )
    assert sum(size[option] for size, option in zip(sizes, found, strict=True)) <= 1.01 * least


def test_budgets_of_nothing_and_of_plenty() -> None:
    sizes, costs = [[1.0, 4.0]] * 3, [[0.5, 0.0]] * 3
    assert allocate(sizes, costs, 0.0) == [1, 1, 1]
    assert allocate(sizes, costs, 100.0) == [0, 0, 0]
    assert allocate(sizes, [[0.5, 0.2]] * 3, 0.5) is None
    assert allocate([[1.0, 1.0, 4.0]] * 3, [[0.5, 0.2, 0.0]] * 3, 100.0) == [1, 1, 1]        # the same size for less


def kl_of(plain: Path, out: Path, activations: Mapping[str, Activation] | None = None) -> float:
    before, after, kls = load(plain), load(out), []
    assert round_inputs(after, activations or {}) == len(activations or {})
    for tokens in SEQUENCES:
        old, new = (teacher_forced_logits(each, tokens, len(tokens)).log_softmax(-1) for each in (before, after))
        kls.append((old.exp() * (old - new)).sum(-1))
    return float(torch.cat(kls).mean())


def test_what_a_linear_costs_is_its_kl_alone(tmp_path: Path) -> None:
    """Measured layer by layer, against whole models with one linear rounded, and with all of them."""
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES)
    found, model, measure = costs_of(plain, tmp_path / "costs.json")
    units = found.units
    assert len(units) == 4 * model.config.num_layers
    for unit in units:
        assert max(unit.sizes[:FP8]) < unit.sizes[FP8] < unit.sizes[LAST] and unit.costs[LAST] == 0 < unit.costs[FP8]
        assert unit.costs[FP8] < 0.2 * unit.costs[0]     # 8 bits
    for unit in units[1:2]:
        others = [f"^{module}$" for other in units if other is not unit for module in other.modules]
        quantize(Job(model=plain, recipe=read_recipe("int4-rtn", keep=others), out=tmp_path / "one", show=False))
        assert unit.costs[0] == pytest.approx(kl_of(plain, tmp_path / "one"), rel=2e-3), unit.modules
        shutil.rmtree(tmp_path / "one")
    for option in ("int4-rtn", "nvfp4"):
        quantize(Job(model=plain, recipe=read_recipe(option), out=tmp_path / option, show=False))
        assert found.uniform[auto_search.OPTIONS.index(option)] == pytest.approx(kl_of(plain, tmp_path / option), rel=2e-3)
    assert costs_of(plain, tmp_path / "costs.json")[0] == found          # from the file
    mixed = [number % LAST for number in range(len(units))]
    together = measure.recipes([model.linears(SPACE.of(units, [0] * len(units))), model.linears(SPACE.of(units, mixed))])
    assert together[0] == pytest.approx(found.uniform[0], rel=1e-5) and together[1] != pytest.approx(together[0], rel=1e-3)


@pytest.mark.parametrize("recipe", ["fp8", "w8a8"])
def test_what_a_format_rounds_of_activations_counts(recipe: str, tmp_path: Path) -> None:
    """As on the card: the output, with inputs of its linears rounded as the file asks for."""
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES)
    model = PlainModel(plain)
    linears = model.linears(read_recipe(recipe))
    quantize(Job(model=plain, recipe=read_recipe(recipe), out=tmp_path / "out", show=False))
    only_weights, activations = kl_of(plain, tmp_path / "out"), {
        linear.fused.removesuffix(".weight"): linear.format.activation for linear in linears
        if linear.format is not None and linear.format.activation is not None}
    whole = kl_of(plain, tmp_path / "out", activations)
    assert Measure(model, TEXTS, False).recipes([linears])[0] == pytest.approx(whole, rel=0.01)
    assert whole > 1.2 * only_weights


def test_a_linear_costs_more_where_its_inputs_are_rounded(tmp_path: Path) -> None:
    """w8a8 and w8a16 have the same codes."""
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES)
    found, _, _ = costs_of(plain, tmp_path / "costs.json", Space(AUTO, ("int4-rtn", "w8a8", "w8a16")))
    assert all(unit.costs[1] > 1.1 * unit.costs[2] > 0 for unit in found.units) and found.uniform[1] > found.uniform[2]


def test_awq_as_numbers_is_what_is_written(tmp_path: Path) -> None:
    """Scales are moved back: the same answers as the output, up to the rounding of what scales moved into."""
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES | {"num_hidden_layers": 1})
    model = PlainModel(plain)
    recipe = read_recipe("int4-awq")
    linears = model.linears(recipe)
    space = Workspace(tmp_path / "made", {}, len(model.blocks))
    write_blocks(model, linears, space, Calibration(model, TEXTS.read), False)
    space.write_index()
    write_small_files(plain, model.config, quantization_config(linears, model.others, "1"), space.folder)
    measure = Measure(model, TEXTS, False)
    assert measure.moves_scales()
    assert measure.recipes([linears])[0] == pytest.approx(kl_of(plain, space.folder), rel=0.02)


def test_costs_add_up_to_what_uniform_recipes_cost() -> None:
    uniform = [0.9, 0.5, 0.49, 0.45, 0.4, 0.35, 0.3, 0.2, 0.01, 0.008]
    scaled = added_up(UNITS, uniform)
    assert [sum(unit.costs[option] for unit in scaled) for option in range(LAST)] == pytest.approx(uniform)
    assert all(unit.costs[LAST] == 0 for unit in scaled)
    flat = trusted(UNITS, 0.0)
    assert {round(unit.costs[0], 9) for unit in flat} == {round(sum(unit.costs[0] for unit in UNITS) / len(UNITS), 9)}
    assert [unit.costs for unit in trusted(UNITS, 1.0)] == [unit.costs for unit in UNITS]


def test_a_uniform_recipe_that_is_better_is_taken() -> None:
    """Of those that are no larger: what was added up is not believed against what was measured."""
    costs = Costs(UNITS, [0.9, 0.5, 0.49, 0.1, 0.4, 0.3, 0.25, 0.2, 0.01, 0.008])
    most = sum(unit.sizes[5] for unit in UNITS)

    def pick(units: list[Unit]) -> list[int] | None:
        return within_bytes(units, most)

    units, found = refined(costs, SPACE, pick, lambda recipes: [0.15] * len(recipes), lambda line: None)
    assert found == [3] * len(UNITS)
    units, found = refined(costs, SPACE, pick, lambda recipes: [0.09 + 0.01 * number for number in range(len(recipes))],
                           lambda line: None)
    assert found == pick(units) and units == added_up(trusted(UNITS, auto_search.TRUSTS[0]), costs.uniform)


def test_a_gain_that_may_be_noise_is_no_reason_to_mix() -> None:
    costs = Costs(UNITS, [0.9, 0.5, 0.49, 0.45, 0.4, 0.3, 0.25, 0.2, 0.1, 0.008])
    mixed = [number % 2 for number in range(len(UNITS))]
    assert refined(costs, SPACE, lambda units: mixed, lambda recipes: [0.489], lambda line: None)[1] == [1] * len(UNITS)
    assert refined(costs, SPACE, lambda units: mixed, lambda recipes: [0.45], lambda line: None)[1] == mixed


def test_where_hardly_any_bytes_can_be_moved_a_mixture_must_gain_more() -> None:
    """As at the size of int4-awq on the embedded model: a gain on the search's text was none on the card's."""
    costs = Costs(UNITS, [0.9, 0.473, 0.49, 0.45, 0.4, 0.3, 0.25, 0.2, 0.1, 0.008])
    mixed, size = [1] * (len(UNITS) - 1) + [0], sum(unit.sizes[1] for unit in UNITS)
    for room, kl, expected in (
        (1.002 * size, 0.410, [1] * len(UNITS)), (1.002 * size, 0.37, mixed), (1.02 * size, 0.410, mixed), (0.0, 0.410, mixed),
    ):
        kl_of = partial(lambda found, recipes: [found], kl)
        found = refined(costs, SPACE, lambda units: mixed, kl_of, lambda line: None, room)
        assert found[1] == expected, (room, kl)


def test_a_uniform_recipe_that_fills_the_room_is_a_rival() -> None:
    """Also where the choice has left some of the bytes that it may take."""
    costs = Costs(UNITS, [0.9, 0.5, 0.49, 0.45, 0.4, 0.3, 0.25, 0.2, 0.1, 0.008])
    room, small = sum(unit.sizes[9] for unit in UNITS), [8] * len(UNITS)
    for given, expected in ((room, [9] * len(UNITS)), (0.0, small)):
        assert refined(costs, SPACE, lambda units: small, lambda recipes: [0.05], lambda line: None, given)[1] == expected


def test_many_linears_lose_little_of_the_room() -> None:
    """The better option fits for all of them, with 4 in a thousand left."""
    units = [Unit((f"model.layers.{number}.mlp.down_proj",), (500_000, 1_000_003), (1.0, 0.01)) for number in range(120)]
    assert within_bytes(units, 120 * 1_000_003 * 1.004) == [1] * len(units)


def test_the_least_cost_in_some_bytes() -> None:
    for most in (8e6, 9e6, 12e6, 32e6):
        found = within_bytes(UNITS, most)
        assert found is not None
        sizes = sum(unit.sizes[option] for unit, option in zip(UNITS, found, strict=True))
        assert 0.97 * most <= sizes <= most
    assert within_bytes(UNITS, 7.9e6) is None
    assert within_bytes(UNITS, 8e6) == [1] * len(UNITS)  # the better of two methods with the same bytes


def test_which_options_are_tried() -> None:
    assert tried_options(False, True) == auto_search.OPTIONS
    assert {"int4-gptq", "int4-gptq-asym", "int4-awq"} <= set(tried_options(True, True))
    assert not any("awq" in option for option in tried_options(True, False))
    assert len(tried_options(False, False)) == len(set(tried_options(False, False)))


SIZES_OF_OPTIONS = (1e6, 1e6, 1.01e6, 1.05e6, 1.05e6, 1.1e6, 1.2e6, 1.2e6, 2e6, 2.001e6, 4e6)
UNITS = [Unit((f"model.layers.{number}.mlp.down_proj",), SIZES_OF_OPTIONS,
              (*(each * number for each in (0.012, 0.01, 0.0099, 0.0095, 0.009, 0.008, 0.0065, 0.006)), 0.001, 0.0009, 0.0))
         for number in range(1, 9)]


def card_of(size: float, kl: float) -> dict[str, Any]:
    row = {"kl": kl, "kl_p99": kl, "top1": 1.0, "perplexity": 1.0, "reference_perplexity": 1.0}
    return {"quality": {"slices": {"prose": row}}, "size": {"output_bytes": size}}


def made_by(factor: float, tries: list[float]) -> Any:
    """Cards of a model whose KL is `factor` times what was predicted."""
    def make(recipe: Any) -> dict[str, Any]:
        kl = size = 0.0
        for unit, rule in zip(UNITS, recipe.rules, strict=True):
            options = [chosen_recipe([unit], cost * 1.001, SPACE) for cost in unit.costs]
            option = next(number for number, one in enumerate(options) if one is not None and one.rules[0] == rule)
            kl, size = kl + unit.costs[option] * factor, size + unit.sizes[option]
        tries.append(size)
        return card_of(size, kl)
    return make


@pytest.mark.parametrize("factor", [3.0, *(pytest.param(factor, marks=pytest.mark.slow) for factor in (0.3, 1.0))])
def test_the_search_corrects_its_budget_by_the_card(factor: float) -> None:
    """Costs that do not add up as predicted: the result meets the limit, and is near the smallest that does."""
    tries: list[float] = []
    found = search(UNITS, {"kl": 0.1}, SPACE, made_by(factor, tries))
    assert excess(found, {"kl": 0.1}) <= 1 and len(tries) <= auto_search.TRIES
    recipes = [chosen_recipe(UNITS, budget / 1000, SPACE) for budget in range(1, 400, 5)]
    cards = [made_by(factor, [])(recipe) for recipe in recipes if recipe is not None]
    least = min(card["size"]["output_bytes"] for card in cards if excess(card, {"kl": 0.1}) <= 1)
    assert found["size"]["output_bytes"] <= 1.1 * least


def test_a_first_try_that_is_smaller_than_later_ones_stays_the_best() -> None:
    """It may be a uniform recipe, which takes fewer bytes than its budget would."""
    first = chosen_recipe(UNITS, 0.1, SPACE)
    sizes = iter([1e6, 2e6, 3e6, 4e6])
    found = search(UNITS, {"kl": 0.1}, SPACE, lambda recipe: card_of(next(sizes), 0.02), first=first)
    assert found["size"]["output_bytes"] == 1e6


def test_a_search_that_is_stopped_keeps_what_met_the_limits() -> None:
    cards = iter([card_of(1e6, 0.02)])

    def make(recipe: Any) -> dict[str, Any]:
        for card in cards:
            return card
        raise KeyboardInterrupt

    assert search(UNITS, {"kl": 0.1}, SPACE, make)["size"]["output_bytes"] == 1e6
    with pytest.raises(KeyboardInterrupt):
        search(UNITS, {"kl": 0.1}, SPACE, make)


def test_figures_that_are_not_numbers_meet_no_limit() -> None:
    assert excess(card_of(1e6, float("nan")), {"kl": 0.1, "ppl": 0.1}) == float("inf")


def test_limits_that_nothing_meets_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no formats of auto meet the limits: the nearest has a slice at 5"):
        search(UNITS, {"kl": 0.1}, SPACE, lambda recipe: card_of(1e6, 0.5))


def test_the_least_time_is_not_the_fewest_bytes(tmp_path: Path) -> None:
    """With many rows products limit, and only fp8 makes them faster; with one row bytes do."""
    costs = (0.012, 0.01, 0.0099, 0.0095, 0.009, 0.008, 0.0065, 0.006, 0.002, 0.001, 0.0)
    units = [Unit((f"model.layers.{number}.mlp.down_proj",), SIZES_OF_OPTIONS, costs) for number in range(4)]

    def formats(rows: int | None) -> set[str]:
        recipe = chosen_recipe(units, 1.0, Space(AUTO, fastest=None if rows is None else parse_fastest(f"h200:{rows}")))
        assert recipe is not None
        return {"none" if rule.format is None else rule.format.grid for rule in recipe.rules}

    assert formats(None) == formats(1) == {"uint4"} and formats(4096) == {"e4m3"}
    for words in ("H200:0", "H200:x", "toaster"):
        with pytest.raises(ConfigError, match="--fastest"):
            parse_fastest(words)
    job = Job(model=tmp_path / "none", recipe=AUTO, out=tmp_path / "out", card=Task(), limits={"kl": 1.0}, fastest="H2000")
    with pytest.raises(ConfigError, match="--fastest H2000"):      # before the model is opened
        quantize(job)


@pytest.mark.slow
def test_the_search_is_within_five_percent_of_every_combination(tmp_path: Path) -> None:
    """A model of one layer with three matrices to choose for: all 125 combinations of formats are made and measured, as the
    search's tries are. Bytes are those of the linears alone: the rest is the same in all of them."""
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES | {"num_hidden_layers": 1})
    base = read_recipe("auto", keep=["o_proj"])
    space = Space(base, ("int4-rtn", "int4-awq", "nvfp4", "fp8"))
    last = len(space.options)
    found, _, _ = costs_of(plain, tmp_path / "costs.json", space)
    units = added_up(found.units, found.uniform)
    before = [teacher_forced_logits(load(plain), tokens, len(tokens)).log_softmax(-1) for tokens in SEQUENCES]
    known: dict[str, dict[str, Any]] = {}

    def make(recipe: QuantizeRecipe) -> dict[str, Any]:
        if str(recipe) not in known:
            known[str(recipe)] = measured(recipe)
        return known[str(recipe)]

    def measured(recipe: QuantizeRecipe) -> dict[str, Any]:
        model = PlainModel(plain)
        linears = model.linears(recipe)
        space = Workspace(tmp_path / "made", {}, len(model.blocks))
        write_blocks(model, linears, space, Calibration(model, TEXTS.read), False)
        space.write_index()
        write_small_files(plain, model.config, quantization_config(linears, model.others, "1"), space.folder)
        model.close()
        after = load(space.folder)
        kls = [(old.exp() * (old - teacher_forced_logits(after, tokens, len(tokens)).log_softmax(-1))).sum(-1)
               for old, tokens in zip(before, SEQUENCES, strict=True)]
        shutil.rmtree(space.folder)
        formats = {linear.module: linear for linear in linears}
        size = sum(PLAIN_BYTES * linear.outputs * linear.inputs if linear.format is None else stored_bytes(linear)
                   for unit in units for linear in map(formats.__getitem__, unit.modules))
        return card_of(size, float(torch.cat(kls).mean()))

    free = [unit for unit in units if len(set(unit.sizes)) > 1]
    assert len(free) == 3
    every = []
    for options in itertools.product(range(last + 1), repeat=len(free)):
        rules = {module: None if option == last else space.recipe(space.options[option]).rules[0]
                 for unit, option in zip(free, options, strict=True) for module in unit.modules}
        every.append(make(exact_recipe("auto", rules, base)))
    kls = sorted(card["quality"]["slices"]["prose"]["kl"] for card in every)
    for share in (0.2, 0.4, 0.6, 0.8):
        limit = kls[int(share * len(kls))]
        found = search(units, {"kl": limit}, space, make)
        least = min(card["size"]["output_bytes"] for card in every if excess(card, {"kl": limit}) <= 1)
        assert excess(found, {"kl": limit}) <= 1 and found["size"]["output_bytes"] <= 1.05 * least


def test_auto_needs_a_limit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-kl, --max-flips or --max-ppl-increase"):
        quantize(Job(model=tmp_path, recipe=AUTO, out=tmp_path / "out", card=Task(), show=False))
    with pytest.raises(ConfigError, match="--group cannot be given with auto"):
        read_recipe("auto", group=32)
