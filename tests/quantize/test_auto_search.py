"""`--recipe auto`: what linears cost, the best allocation under a budget, and a search that believes the card only."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import SIZES
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits

from ridgeline.errors import ConfigError
from ridgeline.evaluate.task import Task
from ridgeline.quant.quality_card import CARD, hashes, output_files
from ridgeline.quantize import auto_search, quantize_model
from ridgeline.quantize.allocation import allocate
from ridgeline.quantize.auto_search import chosen_recipe, excess, measured_units, parse_fastest, search
from ridgeline.quantize.blocks import write_blocks
from ridgeline.quantize.calibration import Calibration
from ridgeline.quantize.ct_writer import quantization_config, stored_bytes
from ridgeline.quantize.hf_files import write_small_files
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.quantize_model import Job, quantize
from ridgeline.quantize.recipes import QuantizeRecipe, exact_recipe, read_recipe
from ridgeline.quantize.sensitivity import PLAIN_BYTES, Unit
from ridgeline.quantize.workspace import Workspace

SEQUENCES = [random_tokens(20 + number, seed=number) for number in range(9)]
AUTO = read_recipe("auto")


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


def test_what_a_linear_costs_is_its_kl_alone(tmp_path: Path) -> None:
    """Measured layer by layer, against whole models with one linear rounded."""
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES)
    units = measured_units(plain, AUTO, SEQUENCES, tmp_path / "costs.json", show=False)
    before = load(plain)
    assert len(units) == 4 * before.config.num_layers
    for unit in units:
        assert max(unit.sizes[:3]) < unit.sizes[3] < unit.sizes[4] and unit.costs[-1] == 0 < unit.costs[0] == max(unit.costs)
        assert unit.costs[3] < 0.2 * unit.costs[0]       # 8 bits
        others = [f"^{module}$" for other in units if other is not unit for module in other.modules]
        quantize(Job(model=plain, recipe=read_recipe("int4-rtn", keep=others), out=tmp_path / "one", show=False))
        after = load(tmp_path / "one")
        kls = []
        for tokens in SEQUENCES:
            old, new = (teacher_forced_logits(each, tokens, len(tokens)).log_softmax(-1) for each in (before, after))
            kls.append((old.exp() * (old - new)).sum(-1))
        assert unit.costs[0] == pytest.approx(float(torch.cat(kls).mean()), rel=2e-3), unit.modules
        shutil.rmtree(tmp_path / "one")
    again = measured_units(plain, AUTO, SEQUENCES, tmp_path / "costs.json", show=False)      # from the file
    assert again == units


SIZES_OF_OPTIONS = (1e6, 1.1e6, 1.2e6, 2e6, 4e6)
UNITS = [Unit((f"model.layers.{number}.mlp.down_proj",), SIZES_OF_OPTIONS,
              (0.01 * number, 0.008 * number, 0.006 * number, 0.001, 0.0)) for number in range(1, 9)]


def card_of(size: float, kl: float) -> dict[str, Any]:
    row = {"kl": kl, "kl_p99": kl, "top1": 1.0, "perplexity": 1.0, "reference_perplexity": 1.0}
    return {"quality": {"slices": {"prose": row}}, "size": {"output_bytes": size}}


def made_by(factor: float, tries: list[float]) -> Any:
    """Cards of a model whose KL is `factor` times what was predicted."""
    def make(recipe: Any) -> dict[str, Any]:
        kl = size = 0.0
        for unit, rule in zip(UNITS, recipe.rules, strict=True):
            options = [chosen_recipe([unit], cost * 1.001, AUTO) for cost in unit.costs]
            option = next(number for number, one in enumerate(options) if one is not None and one.rules[0] == rule)
            kl, size = kl + unit.costs[option] * factor, size + unit.sizes[option]
        tries.append(size)
        return card_of(size, kl)
    return make


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_the_search_corrects_its_budget_by_the_card(factor: float) -> None:
    """Costs that do not add up as predicted: the result meets the limit, and is near the smallest that does."""
    tries: list[float] = []
    found = search(UNITS, {"kl": 0.1}, AUTO, made_by(factor, tries))
    assert excess(found, {"kl": 0.1}) <= 1 and len(tries) <= auto_search.TRIES
    recipes = [chosen_recipe(UNITS, budget / 1000, AUTO) for budget in range(1, 400, 5)]
    cards = [made_by(factor, [])(recipe) for recipe in recipes if recipe is not None]
    least = min(card["size"]["output_bytes"] for card in cards if excess(card, {"kl": 0.1}) <= 1)
    assert found["size"]["output_bytes"] <= 1.1 * least


def test_a_search_that_is_stopped_keeps_what_met_the_limits() -> None:
    cards = iter([card_of(1e6, 0.02)])

    def make(recipe: Any) -> dict[str, Any]:
        for card in cards:
            return card
        raise KeyboardInterrupt

    assert search(UNITS, {"kl": 0.1}, AUTO, make)["size"]["output_bytes"] == 1e6
    with pytest.raises(KeyboardInterrupt):
        search(UNITS, {"kl": 0.1}, AUTO, make)


def test_figures_that_are_not_numbers_meet_no_limit() -> None:
    assert excess(card_of(1e6, float("nan")), {"kl": 0.1, "ppl": 0.1}) == float("inf")


def test_limits_that_nothing_meets_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no formats of auto meet the limits: the nearest has a slice at 5"):
        search(UNITS, {"kl": 0.1}, AUTO, lambda recipe: card_of(1e6, 0.5))


def test_formats_stay_where_linears_are_rounded_to_nearest() -> None:
    chosen = chosen_recipe(UNITS, 0.1, AUTO)
    assert chosen is not None and {rule.method for rule in chosen.rules} == {"gptq", "rtn"}
    plain = auto_search.rounded_to_nearest(chosen)
    assert [(rule.pattern, rule.format, rule.group) for rule in plain.rules] == \
        [(rule.pattern, rule.format, rule.group) for rule in chosen.rules]
    assert {rule.method for rule in plain.rules} == {"rtn"}


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats by linear in one output under its own name; tries and what linears cost are gone."""
    monkeypatch.setattr(quantize_model, "_calibration", lambda job, model, linears: Calibration(model, SEQUENCES))
    monkeypatch.setattr(quantize_model, "calibration_passages", lambda *given: SEQUENCES)
    monkeypatch.setattr(quantize_model.Tokenizer, "load", lambda path: None)
    monkeypatch.setattr(quantize_model, "slice_texts", lambda task: {})
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES)
    before = load(plain)

    def judged(job: Job, model: Any, linears: Any, folder: Path) -> dict[str, Any]:
        after, kls = load(folder), []
        for tokens in SEQUENCES:
            old, new = (teacher_forced_logits(each, tokens, len(tokens)).log_softmax(-1) for each in (before, after))
            kls.append((old.exp() * (old - new)).sum(-1))
        made = card_of(sum(file.stat().st_size for file in folder.glob("*.safetensors")), float(torch.cat(kls).mean()))
        made["quality"]["all"] = made["quality"]["slices"]["prose"]
        return made | {"recipe": job.recipe.as_data(), "model": job.name, "output": {"sha256": hashes(output_files(folder))}}

    monkeypatch.setattr(quantize_model, "make_card", judged)
    monkeypatch.setattr(quantize_model, "card_page", lambda made: "")
    monkeypatch.setattr(quantize_model.card, "write_card",
                        lambda made, folder, plots: (folder / CARD).write_text(json.dumps(made)))
    monkeypatch.setattr(quantize_model.card, "summary_line", lambda made: "")
    job = Job(model=plain, recipe=AUTO, out=tmp_path / "out", card=Task(), limits={"kl": 0.01}, show=False)
    made = quantize(job)
    assert made is not None and made["quality"]["all"]["kl"] <= 0.01 and made["model"] == "out"
    formats = {rule["format"] for rule in made["recipe"]["rules"]}
    assert {rule["method"] for rule in made["recipe"]["rules"]} == {"rtn"}      # GPTQ is for text of the user's own
    assert len(formats) > 1 and sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny"]
    assert load(tmp_path / "out") is not None
    with pytest.raises(ConfigError, match="exists already"):
        quantize(job)


def test_the_least_time_is_not_the_fewest_bytes() -> None:
    """With many rows products limit, and only fp8 makes them faster; with one row bytes do."""
    costs = (0.01, 0.008, 0.006, 0.002, 0.0)
    units = [Unit((f"model.layers.{number}.mlp.down_proj",), SIZES_OF_OPTIONS, costs) for number in range(4)]

    def formats(rows: int | None) -> set[str]:
        recipe = chosen_recipe(units, 1.0, AUTO, None if rows is None else parse_fastest(f"h200:{rows}"))
        assert recipe is not None
        return {"none" if rule.format is None else rule.format.grid for rule in recipe.rules}

    assert formats(None) == formats(1) == {"uint4"} and formats(4096) == {"e4m3"}
    for words in ("H200:0", "H200:x", "toaster"):
        with pytest.raises(ConfigError, match="--fastest"):
            parse_fastest(words)


@pytest.mark.slow
def test_the_search_is_within_five_percent_of_every_combination(tmp_path: Path) -> None:
    """A model of one layer with three matrices to choose for: all 125 combinations of formats are made and measured, as the
    search's tries are. Bytes are those of the linears alone: the rest is the same in all of them."""
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES | {"num_hidden_layers": 1})
    base = read_recipe("auto", keep=["o_proj"])
    units = measured_units(plain, base, SEQUENCES, tmp_path / "costs.json", show=False)
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
        write_blocks(model, linears, space, Calibration(model, SEQUENCES), False)
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
    for options in itertools.product(range(len(auto_search.OPTIONS) + 1), repeat=len(free)):
        rules = {module: None if option == len(auto_search.OPTIONS)
                 else auto_search.option_recipe(auto_search.OPTIONS[option], base).rules[0]
                 for unit, option in zip(free, options, strict=True) for module in unit.modules}
        every.append(make(exact_recipe("auto", rules, base)))
    kls = sorted(card["quality"]["slices"]["prose"]["kl"] for card in every)
    for share in (0.2, 0.4, 0.6, 0.8):
        limit = kls[int(share * len(kls))]
        found = search(units, {"kl": limit}, base, make)
        least = min(card["size"]["output_bytes"] for card in every if excess(card, {"kl": limit}) <= 1)
        assert excess(found, {"kl": limit}) <= 1 and found["size"]["output_bytes"] <= 1.05 * least


def test_auto_needs_a_limit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--max-kl, --max-flips or --max-ppl-increase"):
        quantize(Job(model=tmp_path, recipe=AUTO, out=tmp_path / "out", card=Task(), show=False))
    with pytest.raises(ConfigError, match="--group cannot be given with auto"):
        read_recipe("auto", group=32)
