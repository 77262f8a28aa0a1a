"""Runs a whole evaluation, of one model or against a reference, and returns one plain dictionary.

    passages of the text and of the slices ─▶ perplexity ─▶ (with a reference) divergence
    needle, multiple choice                  ─▶ shares

All random choices come from the seed, and the engine is greedy: the same seed gives the same figures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.evaluate import choices, divergence, needle, perplexity
from ridgeline.evaluate.reference import ReferenceFile, file_bytes, write_reference
from ridgeline.evaluate.scoring import Scorer, Scores
from ridgeline.evaluate.speed import ANSWER, measure_speed
from ridgeline.evaluate.task import Task, is_reference_file, reference_options, slice_texts
from ridgeline.evaluate.texts import DEFAULT_TEXT, Passage, fingerprint, passages, read_questions
from ridgeline.process.progress import progress_bar
from ridgeline.quant.format import Activation
from ridgeline.resolve import model_path
from ridgeline.text.tokenizer import Tokenizer


def evaluate(
    options: dict[str, Any], task: Task, reference: str = "", reference_options: dict[str, Any] | None = None,
    save_reference: str = "", show: bool = True, activations: Mapping[str, Activation] | None = None,
) -> dict[str, Any]:
    """`options` are the engine's; `reference` is a model, or a file that `save_reference` wrote. `activations`: of linears by
    their path in the decoder, to be rounded as kernels for their format do."""
    config = EngineConfig.of(**options)
    path = model_path(config)
    tokenizer = Tokenizer.load(config.model.tokenizer or path)
    texts = slice_texts(task)
    asked = _passages(texts, tokenizer, task)
    hidden = needle.trials(tokenizer, texts[DEFAULT_TEXT], task.needle, task.seed) if task.needle else []
    questions = read_questions(task.choices) if task.choices else []
    longest = max(len(passage.tokens) for passage in asked) + ANSWER * task.speed
    most = max(
        longest, needle.longest(hidden, tokenizer) if hidden else 0,
        choices.longest(tokenizer, questions) if questions else 0,
    )
    result: dict[str, Any] = {
        "model": path.name, "seed": task.seed, "context": task.context, "overlap": task.overlap,
        "texts": {name: fingerprint(text) for name, text in texts.items()},
    }
    with _scorer(options, most, show) as model:
        if reference:
            with _reference(reference, reference_options or {}, options, longest, show) as (other, name):
                result["reference"] = name
                result |= _speeds(task, model, other, asked)                 # before inputs are rounded, which costs time
                rounds = model.round_inputs(activations or {})
                result |= _beside(other, model, asked, tokenizer, show) | {"rounded_inputs": rounds}
        else:
            result["slices"] = _alone(model, asked, tokenizer, show)
        if save_reference:
            sequences = [passage.tokens for passage in asked]
            with progress_bar("reference", wanted=show) as tick:
                write_reference(save_reference, model, sequences, path.name, tick)
            result["saved_reference"] = {"file": save_reference, "bytes": file_bytes(sequences, model.vocab_size)}
        if hidden:
            with progress_bar("needles", wanted=show) as tick:
                result["needle"] = needle.run(model, tokenizer, hidden, tick)
        if questions:
            with progress_bar("choices", wanted=show) as tick:
                result["choices"] = choices.run(model, tokenizer, questions, tick)
    return result


def _alone(model: Scores, asked: list[Passage], tokenizer: Tokenizer, show: bool) -> dict[str, Any]:
    with progress_bar("passages", wanted=show) as tick:
        scores = perplexity.score_passages(model, asked, tick)
    names = dict.fromkeys(passage.slice for passage in asked)
    return {name: perplexity.summary(*_of_slice(asked, scores.logprobs, name), tokenizer) for name in names}


def _speeds(task: Task, model: Scorer, reference: Scores, asked: list[Passage]) -> dict[str, Any]:
    if not task.speed:
        return {}
    tokens = max((passage.tokens for passage in asked), key=len)
    found = {"after": measure_speed(model, tokens)}
    return {"speed": found | ({"before": measure_speed(reference, tokens)} if isinstance(reference, Scorer) else {})}


def _passages(texts: dict[str, str], tokenizer: Tokenizer, task: Task) -> list[Passage]:
    return [
        passage for name, text in texts.items()
        for passage in passages(
            name, text, tokenizer, context=task.context, overlap=task.overlap, tokens=task.tokens, seed=task.seed
        )
    ]


def _of_slice(asked: Sequence[Passage], values: Sequence[Any], name: str) -> tuple[list[Passage], list[Any]]:
    chosen = [place for place, passage in enumerate(asked) if passage.slice == name]
    return [asked[place] for place in chosen], [values[place] for place in chosen]


def _beside(
    reference: Scores, model: Scores, asked: list[Passage], tokenizer: Tokenizer, show: bool
) -> dict[str, Any]:
    with progress_bar("passages, twice", wanted=show) as tick:
        found = divergence.compare(reference, model, [passage.tokens for passage in asked], tick)
    slices = {}
    for name in dict.fromkeys(passage.slice for passage in asked):
        places = [place for place, passage in enumerate(asked) if passage.slice == name]
        slices[name] = perplexity.summary(*_of_slice(asked, found.model.logprobs, name), tokenizer)
        slices[name] |= divergence.summary(asked, found, places)
    return {
        "slices": slices,
        "all": divergence.summary(asked, found, range(len(asked))),
        "by_position": divergence.by_position(asked, found),
        "worst_decile": divergence.worst_decile(asked, found, tokenizer),
    }


@contextmanager
def _scorer(options: dict[str, Any], longest: int, show: bool) -> Iterator[Scorer]:
    scorer = Scorer(options, longest, show)
    try:
        yield scorer
    finally:
        scorer.close()


@contextmanager
def _reference(
    given: str, own: dict[str, Any], options: dict[str, Any], longest: int, show: bool
) -> Iterator[tuple[Scores, str]]:
    if is_reference_file(given):
        if own:
            raise ConfigError(f"{given} holds logits that are computed already; options of the reference change nothing")
        file = ReferenceFile(given)
        yield file, file.name
        return
    with _scorer(reference_options(given, own, options), longest, show) as scorer:
        yield scorer, scorer.path.name if not own else f"{scorer.path.name} ({_as_words(own)})"


def _as_words(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
