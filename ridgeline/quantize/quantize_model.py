"""`ridgeline quantize` from end to end: layer by layer into a folder beside the output, then the card, then the rename.

    plain tensors of a block ─▶ codes ─▶ OUT.part/model-0000N … ─▶ config, tokenizer ─▶ card ─▶ OUT

Peak memory is one layer. A killed run goes on where it stopped.
"""

from __future__ import annotations

import platform as python_platform
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import ConfigError, ModelError
from ridgeline.evaluate.evaluation import evaluate
from ridgeline.evaluate.task import EMBEDDED, Task
from ridgeline.process import embedded
from ridgeline.process.progress import progress_bar
from ridgeline.quantize import card
from ridgeline.quantize.ct_writer import Linear, quantization_config, stored_bytes, stored_tensors
from ridgeline.quantize.hf_files import write_small_files
from ridgeline.quantize.plain_model import OUTSIDE, PlainModel
from ridgeline.quantize.recipes import QuantizeRecipe
from ridgeline.quantize.rounding import rounded
from ridgeline.quantize.workspace import Workspace
from ridgeline.sizes.op_costs import DTYPE_BYTES
from ridgeline.version import __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    model: Path
    recipe: QuantizeRecipe
    out: Path
    seed: int = 0
    card: Task | None = None         # what the card measures; None: no card
    show: bool = True


def quantize(job: Job) -> dict[str, Any] | None:
    """Writes the output; returns its card."""
    model = PlainModel(job.model)
    try:
        linears = model.linears(job.recipe)
        if not any(linear.format is not None for linear in linears):
            raise ConfigError(f"the recipe {job.recipe.name} quantises none of the {len(linears)} linears: {_reasons(linears)}")
        space = Workspace(job.out, _run(job, model), len(model.blocks))
        left = [place for place in range(space.blocks) if not space.is_done(place)]
        space.require_room(sum(_block_bytes(model, linears, model.blocks[place]) for place in left))
        _write_blocks(model, linears, space, left, job.show)
        space.write_index()
        config = quantization_config(linears, model.others, f"ridgeline {__version__}")
        write_small_files(job.model, model.config, config, space.folder)
        made = None
        if job.card is not None:
            made = make_card(job, model, linears, space.folder)
            card.write_card(made, space.folder)
        space.finish()
    finally:
        model.close()
    if made is not None:
        card.find_card(job.out)                          # hashes are remembered: the first start need not compute them
    return made


def _run(job: Job, model: PlainModel) -> dict[str, Any]:
    """What decides the weights that are written."""
    files = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in model.files()]
    return {"version": __version__, "input": files, "recipe": job.recipe.as_data(), "seed": job.seed}


# ── weights ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _write_blocks(model: PlainModel, linears: list[Linear], space: Workspace, left: list[int], show: bool) -> None:
    by_name = {linear.weight: linear for linear in linears if linear.format is not None}
    with progress_bar(f"quantising {model.path.name}", wanted=show) as tick:
        for place in left:
            tick(place, space.blocks)
            space.write(place, _block(model, by_name, model.blocks[place]))
        tick(space.blocks, space.blocks)


@torch.inference_mode()
def _block(model: PlainModel, by_name: dict[str, Linear], block: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in model.names(block):
        values = model.read(name)
        if name not in by_name:
            found[name] = values
            continue
        linear = by_name[name]
        assert linear.format is not None
        try:
            found |= stored_tensors(linear, rounded(values, linear.format))
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _block_bytes(model: PlainModel, linears: list[Linear], block: int) -> int:
    here = {linear.weight: linear for linear in linears if linear.format is not None
            and (linear.layer if linear.layer is not None else OUTSIDE) == block}
    plain = model.plain_bytes([name for name in model.names(block) if name not in here])
    return plain + sum(stored_bytes(linear) for linear in here.values())


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
    given = EMBEDDED if job.model == embedded.find() else str(job.model)
    found = evaluate({"model": str(folder)}, job.card, reference=given, show=job.show)
    quality = {name: found[name] for name in ("slices", "all", "by_position", "worst_decile", "texts", "context", "overlap")}
    quality["all"]["perplexity"] = quality["all"]["reference_perplexity"] * quality["all"]["perplexity_ratio"]
    files = model.files()
    return {
        "card": 1, "model": job.out.name, "recipe": job.recipe.as_data(), "seed": job.seed,
        "linears": formats_said(linears), "not_quantised": not_quantised_said(model, linears),
        "calibration": None, "quality": quality,
        "size": {
            "input_bytes": sum(file.stat().st_size for file in files),
            "plain_bytes": model.config.num_parameters * DTYPE_BYTES[model.config.dtype],
            "output_bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        },
        "notes": _notes(model, linears),
        "versions": {"ridgeline": __version__, "python": python_platform.python_version()}
        | {package: version(package) for package in ("torch", "safetensors", "tokenizers", "numpy")},
        "input": {"model": job.model.name, "dtype": model.config.dtype, "sha256": card.hashes(files)},
        "output": {"sha256": card.hashes(card.output_files(folder))},
    }


def _notes(model: PlainModel, linears: list[Linear]) -> list[str]:
    notes = []
    if model.gguf and model.config.quantisation is not None:
        notes.append("the input is a GGUF file of packed weights, which were expanded first: figures are against these, not "
                     "against the model from which the file was made.")
    kinds = {linear.format.activation.kind for linear in linears if linear.format and linear.format.activation}
    if kinds and not torch.cuda.is_available():
        notes.append(f"the figures were measured on a CPU, which keeps activations in float32; a GPU rounds them to {kinds.pop()} "
                     "as well, which these figures do not hold.")
    return notes
