"""`ridgeline quantize` from end to end: layer by layer into a folder beside the output, then the card, then the rename.

    plain tensors of a block ─▶ codes ─▶ OUT.part/model-0000N … ─▶ config, tokenizer ─▶ card ─▶ OUT

Peak memory is one layer, and with GPTQ the calibration's hidden states beside it. A killed run goes on where it stopped.
"""

from __future__ import annotations

import os
import platform as python_platform
import sys
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ridgeline.bench.lab.record import commit
from ridgeline.errors import ConfigError
from ridgeline.evaluate import needle
from ridgeline.evaluate.evaluation import evaluate
from ridgeline.evaluate.task import Task, slice_texts
from ridgeline.evaluate.texts import DEFAULT_TEXT, fingerprint
from ridgeline.process import embedded, platform
from ridgeline.quant import quality_card
from ridgeline.quant.format import WeightFormat, quantises_rows
from ridgeline.quantize import auto_search, card
from ridgeline.quantize.blocks import block_bytes, write_blocks
from ridgeline.quantize.calibration import (
    CONTEXT,
    Calibration,
    calibration_passages,
    calibration_text,
    halves,
)
from ridgeline.quantize.card import LimitsMissed
from ridgeline.quantize.card_page import page as card_page
from ridgeline.quantize.ct_writer import Linear, header_bytes, quantization_config
from ridgeline.quantize.duration import Forecast, Spent, Watch, forecast
from ridgeline.quantize.hf_files import small_files, write_small_files
from ridgeline.quantize.own_text import SEARCH_OPENINGS, own_passages
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.recipes import AUTO, FEWEST_TOKENS, OWN_TEXT, READ_TEXT, QuantizeRecipe
from ridgeline.quantize.sensitivity import Measure, Texts, Unit
from ridgeline.quantize.workspace import Tries, Workspace
from ridgeline.sizes.op_costs import DTYPE_BYTES
from ridgeline.text.tokenizer import Tokenizer
from ridgeline.version import __version__

# Tokens of text to choose formats by: that methods read, that whole models are judged by, of each passage for one linear alone,
# and how many such passages. A linear alone costs a pass through half of the model.
SEARCH_READ, SEARCH_JUDGED, SEARCH_ALONE, SEARCH_PASSAGES = 512, 512, 24, 8

FEWEST_JUDGED = 64                   # tokens of a text of the user's that a card reads: figures of fewer are noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    model: Path
    recipe: QuantizeRecipe
    out: Path
    seed: int = 0
    text: str = ""                   # a file to calibrate with, or OWN_TEXT; empty: a part of pydoc_data.topics
    tokens: int = 8192               # of it
    card: Task | None = None         # what the card measures; None: no card
    needles_if_they_fit: bool = False    # leave the card's needles out where its text is too short
    limits: dict[str, float] = field(default_factory=dict)   # of card.LIMITS, that every slice must meet
    most_bytes: float = 0.0          # of auto: that the weights of the output may take; 0: as many as the limits need
    fastest: str = ""                # of auto: the GPU (and rows) whose time counts, instead of bytes
    costs: Path | None = None        # of auto: a file for what was measured; None: beside the output, until that is complete
    name: str = ""                   # of the output on its card; empty: the directory's
    show: bool = True


def quantize(job: Job) -> dict[str, Any] | None:
    """Writes the output; returns its card."""
    small_files(job.model)                               # one that is too large is refused now, not after the work
    return _search(job) if job.recipe.name == AUTO and not job.recipe.rules else _quantize(job)


def _quantize(job: Job) -> dict[str, Any] | None:
    model = PlainModel(job.model)
    space: Workspace | None = None
    try:
        linears = model.linears(job.recipe)
        if not any(linear.format is not None for linear in linears):
            raise ConfigError(f"the recipe {job.recipe.name} quantises none of the {len(linears)} linears: {_reasons(linears)}")
        if job.card is not None:                         # what the card needs is missed now, not after the work
            job = replace(job, card=_checked_card(job, job.card, Tokenizer.load(job.model)))
        config = quantization_config(linears, model.others, f"ridgeline {__version__}", job.recipe.kv)
        calibration = _calibration(job, model, linears)
        space = Workspace(job.out, _run(job, model, calibration), len(model.blocks))
        expected = _forecast(job, model, linears, calibration, space)
        watch = Watch()
        write_blocks(model, linears, space, calibration, job.show, job.recipe.kv, device())
        space.write_index()
        write_small_files(job.model, model.config, config, space.folder)
        made, quantised = None, watch.lap()
        if job.card is not None:
            made = make_card(job, model, linears, space.folder)
            made["calibration"] = None if calibration is None else _calibration_facts(job, calibration)
            made["errors"] = space.errors()
            made["time"] = _times(expected, quantised, watch.lap())
            card.write_card(made, space.folder, card_page(made))
            if job.limits and job.recipe.name != AUTO:
                card.require_limits(made, job.limits, f"{space.folder} is complete but for its name")
        space.finish()
    finally:
        model.close()
        if space is not None:
            space.end()
    if made is not None:
        quality_card.find_card(job.out)                          # hashes are remembered: the first start need not compute them
    return made


def _checked_card(job: Job, task: Task, tokenizer: Tokenizer) -> Task:
    """ConfigError: texts that cannot be read, too little of the user's, and needles that fit into none, unless they may be left
    out."""
    texts = slice_texts(task)
    if task.text and (count := len(tokenizer.encode(texts[DEFAULT_TEXT]))) < FEWEST_JUDGED:
        raise ConfigError(f"too little text to measure on: --card-text has {count} tokens, at least {FEWEST_JUDGED} are needed")
    if not task.needle:
        return task
    try:
        needle.trials(tokenizer, texts[DEFAULT_TEXT], task.needle, task.seed,
                      advice="give a longer --card-text, or --card-needle 0")
    except ConfigError as error:
        if not job.needles_if_they_fit:
            raise
        if job.show:
            say(f"the card hides no numbers: {str(error).partition(';')[0]}")
        return replace(task, needle=())
    return task


def device() -> str:
    """Where weights are rounded and text is read."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _forecast(
    job: Job, model: PlainModel, linears: list[Linear], calibration: Calibration | None, space: Workspace
) -> Forecast | None:
    """None: a part of the work is done already, and what is left is not predicted."""
    if done := sum(space.is_done(place) for place in range(space.blocks)):
        if job.show:
            say(f"going on with {space.folder}: {done} of {space.blocks} files are there")
        return None
    by_name = {linear.weight: linear for linear in linears if linear.format is not None}
    size = sum(block_bytes(model, by_name, block) for block in model.blocks)
    space.require_room(size)
    found = forecast(model, linears, calibration, job.card, size, space.folder, device())
    if job.show:
        say(found.words())
    return found


def _times(expected: Forecast | None, quantised: Spent, judged: Spent) -> dict[str, Any]:
    """What was predicted at the start, and what it was. `load`: how many processes wanted a core meanwhile."""
    found = {"quantise": quantised.as_data(), "card": judged.as_data(), "cores": torch.get_num_threads(),
             "load": round(os.getloadavg()[1], 1), "device": device()}
    if expected is None:
        return found | {"resumed": True}
    return found | {"predicted": {"quantise": expected.quantise.as_data(), "card": expected.card.as_data()}}


def _search(job: Job) -> dict[str, Any]:
    """Several whole outputs, each beside the final place; the smallest that meets the limits gets its name. A search that was
    stopped goes on with the tries that are there. Where nothing meets the limits, they are of no use."""
    if job.card is None or not (job.limits or job.most_bytes):
        raise ConfigError("the recipe auto needs a limit that the card can check: --max-kl, --max-flips or --max-ppl-increase; "
                          "or --max-gb")
    if job.fastest:
        auto_search.parse_fastest(job.fastest)           # a wrong name, before minutes of work
    job = replace(job, card=_checked_card(job, job.card, Tokenizer.load(job.model)))
    tries, complete = Tries(job.out, _searched(job)), list[tuple[Path, dict[str, Any]]]()

    def make(recipe: QuantizeRecipe) -> dict[str, Any]:
        folder, made = tries.place(recipe.as_data())
        if made is None:
            made = _quantize(replace(job, recipe=recipe, out=folder, name=job.out.name))
        elif job.show:
            say(f"{folder}: complete since an earlier start, its card is taken")
        assert made is not None
        complete.append((folder, made))
        return made

    kept = job.costs or job.out.with_name(f"{job.out.name}.costs.json")
    try:
        if (found := tries.chosen()) is not None:
            folder, made = found
        else:
            made = _chosen(job, kept, make)
            folder = next(folder for folder, its in complete if its is made)
            tries.choose(folder)
        if job.costs is None:
            kept.unlink(missing_ok=True)
        tries.take(folder)
    except LimitsMissed:
        tries.remove()
        raise
    finally:
        tries.end()
    quality_card.find_card(job.out)
    return made


def _searched(job: Job) -> dict[str, Any]:
    """What decides a search."""
    assert job.card is not None
    text = OWN_TEXT if job.text == OWN_TEXT else fingerprint(calibration_text(job.text))
    judged = {name: fingerprint(each) for name, each in slice_texts(job.card).items()}
    with closing(PlainModel(job.model)) as model:
        return {"version": __version__, "input": model.stamps(), "recipe": job.recipe.as_data(), "seed": job.seed, "text": text,
                "tokens": job.tokens, "card": [asdict(job.card), judged], "limits": job.limits, "bytes": job.most_bytes,
                "fastest": job.fastest}


def _chosen(job: Job, kept: Path, make: Callable[[QuantizeRecipe], dict[str, Any]]) -> dict[str, Any]:
    """The card of the formats that `auto` found."""
    words = say if job.show else lambda line: None
    texts = search_texts(job)
    model = PlainModel(job.model)
    try:
        if model.config.experts is not None:
            raise ConfigError(f"{job.model.name}: auto does not choose formats for mixtures of experts yet: give another "
                              "--recipe")
        measure = Measure(model, texts, job.show, device())
        space = auto_search.Space(job.recipe, auto_search.tried_options(bool(job.text), measure.moves_scales()),
                                  auto_search.parse_fastest(job.fastest) if job.fastest else None)
        costs = auto_search.measured(measure, model, space, texts, kept)
        modules = [linear.module for linear in model.linears(job.recipe)]
        rest = _beside(model, modules) - sum(unit.sizes[-1] for unit in costs.units)

        def pick(units: list[Unit]) -> list[int] | None:
            if job.most_bytes:
                return auto_search.within_bytes(units, job.most_bytes - rest)
            return auto_search.within_budget(units, auto_search.first_budget(units, job.limits), space)

        units, picked = auto_search.refined(
            costs, space, pick, lambda recipes: measure.recipes([model.linears(recipe) for recipe in recipes]), words,
            max(job.most_bytes - rest, 0.0))
    finally:
        model.close()
    first = None if picked is None else space.of(units, picked)
    if not job.most_bytes:
        return auto_search.search(units, job.limits, space, make, words, first)
    if first is None:
        least = rest + sum(min(unit.sizes) for unit in units)
        raise ConfigError(f"--max-gb {job.most_bytes / 1e9:g}: the smallest formats of auto take {least / 1e9:.4g} GB")
    made = make(first)
    if job.limits:
        card.require_limits(made, job.limits, f"the best that auto found in {job.most_bytes / 1e9:g} GB")
    return made


def _beside(model: PlainModel, modules: Collection[str]) -> int:
    """Bytes of the output without codes, with the headers of its files at their largest: a limit counts whole files."""
    names = [model.names(block) for block in model.blocks]
    headers = sum(header_bytes({name: model.shape(name) for name in each}, modules) for each in names)
    return model.plain_bytes([name for each in names for name in each]) + headers


def search_texts(job: Job) -> Texts:
    """To choose formats: the user's text, a part of which no method reads; or the default text to read, and what the model itself
    writes in several languages to judge by, since the card reads more than one kind of text."""
    if job.text and job.text != OWN_TEXT:
        found = _passages(job, max(SEARCH_READ + SEARCH_JUDGED, FEWEST_TOKENS))
        count = len(found) // 2
        return Texts(found[count:], found[:count], [each[:SEARCH_ALONE] for each in found[:count]][:SEARCH_PASSAGES])
    length = SEARCH_JUDGED // len(SEARCH_OPENINGS)
    judged = own_passages(job.model, SEARCH_JUDGED, job.seed + 1, job.show, length, SEARCH_OPENINGS)
    alone = [each[:SEARCH_ALONE] for each in judged[:SEARCH_PASSAGES]]
    return Texts(_passages(job, FEWEST_TOKENS)[: SEARCH_READ // CONTEXT], judged, alone)


def _run(job: Job, model: PlainModel, calibration: Calibration | None) -> dict[str, Any]:
    """What decides the weights that are written."""
    return {"version": __version__, "input": model.stamps(), "recipe": job.recipe.as_data(), "seed": job.seed,
            "calibration": None if calibration is None else _calibration_facts(job, calibration)}


def _calibration(job: Job, model: PlainModel, linears: list[Linear]) -> Calibration | None:
    if not job.recipe.kv and not any(linear.method in READ_TEXT for linear in linears if linear.format is not None):
        return None
    return Calibration(model, _passages(job, job.tokens), device())


def _passages(job: Job, tokens: int) -> list[list[int]]:
    if job.text == OWN_TEXT:
        return own_passages(job.model, max(tokens, FEWEST_TOKENS), job.seed, job.show)
    return calibration_passages(job.text, Tokenizer.load(job.model), tokens, job.seed)


def _calibration_facts(job: Job, calibration: Calibration) -> dict[str, Any]:
    own = job.text == OWN_TEXT
    text = "what the model wrote" if own else Path(job.text).name if job.text else "the first half of pydoc_data.topics"
    return {
        "text": text, "fingerprint": fingerprint(str(calibration.groups) if own else calibration_text(job.text)),
        "passages": sum(map(len, calibration.groups)), "tokens": sum(len(each) for group in calibration.groups for each in group),
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ── what is said ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _reasons(linears: list[Linear]) -> str:
    counted = Counter(linear.reason for linear in linears if linear.format is None)
    return "; ".join(f"{count} × {reason}" for reason, count in counted.items())


def formats_said(linears: list[Linear]) -> list[dict[str, Any]]:
    """Linears by format, with the last part of their names."""
    rows: dict[tuple[str, str], list[str]] = {}
    for linear in linears:
        if linear.format is not None:
            kind = "" if linear.format.scales is None or linear.format.scales.zero is None else ", asymmetric"
            rows.setdefault((linear.format.name + kind, linear.method), []).append(linear.module.rpartition(".")[2])
    return [
        {"count": len(names), "modules": ", ".join(dict.fromkeys(names)), "format": format, "method": method}
        for (format, method), names in rows.items()
    ]


def not_quantised_said(model: PlainModel, linears: list[Linear]) -> list[str]:
    found = ["embeddings" + (" (they are the head, too)" if model.config.tied else ""), "norms and biases"]
    reasons: dict[str, list[str]] = {}
    for linear in linears:
        if linear.format is None:
            reasons.setdefault(linear.reason, []).append(linear.module)
    for reason, modules in reasons.items():
        shown = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
        found.append(f"{shown} ({reason})")
    return found


def make_card(job: Job, model: PlainModel, linears: list[Linear], folder: Path) -> dict[str, Any]:
    """Measured with the engine that serves: the output against the input, on the same tokens."""
    assert job.card is not None
    given = embedded.SHORT_NAME if job.model == embedded.find() else str(job.model)
    task, judged = job.card, folder / "judged.writing"
    if not task.text:                                    # not what may have calibrated
        judged.write_text(halves()[1], encoding="utf-8")
        task = replace(task, text=str(judged))
    activations = {linear.fused.removesuffix(".weight"): linear.format.activation for linear in linears
                   if linear.format is not None and linear.format.activation is not None and not _rounds(linear.format)}
    found = evaluate({"model": str(folder)}, task, reference=given, show=job.show, activations=activations)
    parts = ("slices", "all", "by_position", "worst_decile", "texts", "context", "overlap", "needle", "rounded_inputs")
    quality = {name: found[name] for name in parts if name in found}
    quality["all"]["perplexity"] = quality["all"]["reference_perplexity"] * quality["all"]["perplexity_ratio"]
    files = model.files()
    return {
        "card": 1, "model": job.name or job.out.name, "recipe": job.recipe.as_data(), "seed": job.seed,
        "limits": job.limits | ({"bytes": job.most_bytes} if job.most_bytes else {}),
        "linears": formats_said(linears), "not_quantised": not_quantised_said(model, linears),
        "quality": quality, "speed": found.get("speed"),
        "size": {
            "input_bytes": sum(file.stat().st_size for file in files),
            "plain_bytes": model.config.num_parameters * DTYPE_BYTES[model.config.dtype],
            "output_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        },
        "notes": _notes(model, linears, job.recipe.kv, bool(quality.get("rounded_inputs"))),
        "machine": {"commit": commit(), "system": python_platform.machine(), "cpu": platform.cpu_name(), "gpu": _gpu()},
        "versions": {"ridgeline": __version__, "python": python_platform.python_version()}
        | {package: version(package) for package in ("torch", "safetensors", "tokenizers", "numpy")},
        "input": {"model": job.model.name, "dtype": model.config.dtype, "sha256": quality_card.hashes(files)},
        "output": {"sha256": quality_card.hashes(quality_card.output_files(folder))},
    }


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _rounds(format: WeightFormat) -> bool:
    """Kernels of this machine round activations by themselves."""
    return torch.cuda.is_available() and quantises_rows(format)


def _notes(model: PlainModel, linears: list[Linear], kv: str, rounds: bool) -> list[str]:
    """`rounds`: activations were rounded where kernels of this device keep them."""
    notes = []
    if model.gguf and model.config.quantisation is not None:
        notes.append("the input is a GGUF file of packed weights, which were expanded first: figures are against these, not "
                     "against the model from which the file was made.")
    formats = [linear.format for linear in linears if linear.format is not None]
    kinds = {format.activation.kind for format in formats if format.activation and not _rounds(format)}
    if kinds:
        words = " and ".join(sorted(kinds))
        notes.append(f"the figures hold the error of activations rounded to {words}, as the file asks for and as kernels for it "
                     "compute; on a CPU this engine keeps more of them." if rounds else
                     f"the figures were measured with activations as they are; an engine that rounds them to {words}, as the "
                     "file asks for, adds an error that these figures do not hold.")
    if kinds and rounds and model.config.experts is not None:
        notes.append("the activations of the experts were not rounded: that error is not in the figures.")
    if kv:
        notes.append(f"the file has scales for a KV cache in {kv}; the figures were measured with KV in the model's dtype.")
    return notes
