"""How long a run will take: counted work times what small pieces took. A counting timer stands for the clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quantised_models import SIZES
from tiny_models import random_tokens, save_checkpoint

from ridgeline.evaluate.speed import ANSWER, PROMPT, measure_speed
from ridgeline.evaluate.task import Task
from ridgeline.quantize.calibration import Calibration
from ridgeline.quantize.duration import JUDGED, ROWS, TOKENS, Forecast, Spent, forecast
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.recipes import READ_TEXT, RECIPES, read_recipe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PlainModel:
    return PlainModel(save_checkpoint("llama", tmp_path_factory.mktemp("duration") / "tiny", **SIZES))


def a_second(work: Callable[[], Any]) -> Spent:
    work()
    return Spent(1.0, 2.0)


def told(model: PlainModel, recipe: str, passages: int = 8, task: Task | None = None, **more: Any) -> Forecast:
    linears = model.linears(read_recipe(recipe, **more))
    run = Calibration(model, [random_tokens(64, seed=number) for number in range(passages)]) if passages else None
    return forecast(model, linears, run, task, 3_000_000, model.path, timer=a_second)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_forecast(recipe: str, model: PlainModel) -> None:
    found = told(model, recipe, 8 if RECIPES[recipe][1] in READ_TEXT else 0)
    assert found.quantise.wall > 0 and found.quantise.cpu > found.quantise.wall and found.card == Spent()
    assert ("hessian" in found.parts) == (RECIPES[recipe][1] in ("gptq", "wanda", "sparsegpt"))


def test_work_grows_with_the_text_and_the_layers(model: PlainModel) -> None:
    some, more = told(model, "int4-gptq", 8), told(model, "int4-gptq", 16)
    layers = model.config.num_layers
    assert some.parts["forward"].wall == pytest.approx(2 * 8 * 64 * layers / TOKENS)
    for part in ("forward", "hessian"):
        assert more.parts[part].wall == pytest.approx(2 * some.parts[part].wall)
    for part in ("factor", "round", "read"):
        assert more.parts[part].wall == pytest.approx(some.parts[part].wall)
    for kept in ("keep_first", "keep_last"):             # a layer that is kept says nothing about the others
        half = told(model, "int4-gptq", 8, **{kept: 1})
        for part in ("round", "hessian", "factor"):
            assert half.parts[part].wall == pytest.approx(some.parts[part].wall / 2)


def test_the_error_of_weights_counts_for_every_method_that_rounds_at_once(model: PlainModel) -> None:
    """Every piece takes a second here: rounding, and comparing with what was there."""
    linears = len(model.linears(read_recipe("int4-rtn"))) - 1            # without the head
    for recipe in ("int4-rtn", "sparse24-magnitude", "sparse24-wanda"):
        assert told(model, recipe).parts["round"].wall == pytest.approx(2 * linears), recipe


def test_the_card_counts_slices_and_needles(model: PlainModel) -> None:
    cards = [told(model, "fp8", 0, Task(slices=slices, tokens=512, needle=needle)).card.wall
             for slices, needle in (((), ()), (("prose",), ()), (("prose",), (256,)))]
    assert cards[0] < cards[1] < cards[2]


def test_the_card_counts_what_is_done_with_logits(model: PlainModel) -> None:
    """Every piece takes a second here. What a token adds: two passes, two products for each model, two logarithms, a
    comparison."""
    def card(tokens: int) -> float:
        return told(model, "int4-rtn", 0, Task(slices=(), tokens=tokens)).card.wall

    layers = model.config.num_layers
    a_token = 2 * layers / TOKENS + 4 * 16 / ROWS + (2 + 1) / JUDGED
    assert card(200) - card(100) == pytest.approx(100 * a_token)


def test_words_for_people() -> None:
    assert Forecast(Spent(30, 60), Spent()).words() == "this takes about 30 s: quantising 30 s"
    assert Forecast(Spent(240, 0), Spent(60, 0)).words() == "this takes about 5.0 min: quantising 4.0 min, the card 60 s"


def test_speed_of_prompts_and_answers() -> None:
    """A fake engine and clock: 2 ms a token of the prompt, 10 ms a token of the answer after the first."""
    class Engine:
        now = 0.0

        def generate(self, prompts: list[list[int]], tokens: int, ignore_eos: bool = False) -> None:
            assert ignore_eos
            self.now += 0.002 * len(prompts[0]) + 0.010 * (tokens - 1)

    engine = Engine()
    found = measure_speed(engine, list(range(200)), lambda: engine.now)  # type: ignore[arg-type]
    assert found == {"prefill_tok_s": pytest.approx(500.0), "decode_tok_s": pytest.approx(100.0)}
    assert engine.now > 3 * (0.002 * PROMPT + 0.010 * ANSWER)


def test_text_of_the_models_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ridgeline.quantize import own_text

    asked: list[Any] = []

    class Writes:
        def __init__(self, options: dict[str, Any], longest: int, show: bool) -> None:
            assert options == {"model": str(tmp_path)} and longest == own_text.CONTEXT

        def generate(self, prompts: Any, tokens: int, tick: Any, ignore_eos: bool, seed: int) -> list[list[int]]:
            asked.append((len(prompts), seed, ignore_eos))
            return [[7] * tokens for _ in prompts]

        def close(self) -> None:
            asked.append("closed")

    class Words:
        @staticmethod
        def encode(text: str) -> list[int]:
            return list(range(len(text.split()) or 1))

    monkeypatch.setattr(own_text, "Scorer", Writes)
    monkeypatch.setattr(own_text.Tokenizer, "load", lambda path: Words)
    found = own_text.own_passages(tmp_path, 1000, seed=5, show=False)
    assert asked == [(4, 5, True), "closed"] and sum(map(len, found)) >= 1000 - 4
    assert all(len(passage) <= own_text.CONTEXT for passage in found)
