"""Whole runs of `--recipe auto` on a tiny model, also runs that are killed: the same bytes as those of an unbroken one.

    python test_whole_search.py MODEL OUT RECIPE MOMENT        # such a run, which kills itself at a moment; 0: at none
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_start
from quantised_models import SIZES
from safetensors.torch import load_file
from tiny_models import load, random_tokens, save_checkpoint, teacher_forced_logits

from ridgeline.errors import ConfigError
from ridgeline.evaluate.task import Task
from ridgeline.quant.quality_card import CARD, hashes, output_files
from ridgeline.quantize import auto_search, quantize_model
from ridgeline.quantize.calibration import Calibration
from ridgeline.quantize.quantize_model import Job, quantize
from ridgeline.quantize.recipes import read_recipe
from ridgeline.quantize.sensitivity import Texts
from ridgeline.quantize.workspace import RUN, Claim, Tries, Workspace

SEQUENCES = [random_tokens(20 + number, seed=number) for number in range(9)]
TEXTS = Texts(read=[random_tokens(40, seed=number) for number in range(20, 26)], judged=SEQUENCES, alone=SEQUENCES)
# Of the moments that a search passes: while it measures, in the first output, between two outputs, in a later one, at the end.
MOMENTS = (0.02, 0.2, 0.45, 0.6, 0.8, 0.95, 1.0)
FEW = (0.6,)


def judge_without_an_engine(patch: pytest.MonkeyPatch, plain: Path) -> None:
    """Cards of the tiny model, with its KL on SEQUENCES."""
    patch.setattr(quantize_model, "_calibration", lambda job, model, linears: Calibration(model, SEQUENCES))
    patch.setattr(quantize_model, "search_texts", lambda job: TEXTS)
    patch.setattr(quantize_model.Tokenizer, "load", lambda path: None)
    patch.setattr(quantize_model, "slice_texts", lambda task: {})
    before = load(plain)

    def judged(job: Job, model: Any, linears: Any, folder: Path) -> dict[str, Any]:
        after, kls = load(folder), []
        for tokens in SEQUENCES:
            old, new = (teacher_forced_logits(each, tokens, len(tokens)).log_softmax(-1) for each in (before, after))
            kls.append((old.exp() * (old - new)).sum(-1))
        kl = float(torch.cat(kls).mean())
        row = {"kl": kl, "kl_p99": kl, "top1": 1.0, "perplexity": 1.0, "reference_perplexity": 1.0}
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        return {"quality": {"slices": {"prose": row}, "all": row}, "size": {"output_bytes": size, "plain_bytes": size},
                "recipe": job.recipe.as_data(), "model": job.name, "output": {"sha256": hashes(output_files(folder))}}

    def write_card(made: dict[str, Any], folder: Path, plots: str) -> None:
        (folder / CARD).write_text(json.dumps(made | {"time": None}))

    patch.setattr(quantize_model, "make_card", judged)
    patch.setattr(quantize_model, "card_page", lambda made: "")
    patch.setattr(quantize_model.card, "write_card", write_card)


def job_of(plain: Path, out: Path, recipe: str = "auto") -> Job:
    return Job(model=plain, recipe=read_recipe(recipe), out=out, card=Task(), limits={"kl": 0.01 if recipe == "auto" else 9.0},
               show=False)


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats by linear in one output under its own name; tries and what linears cost are gone."""
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES)
    judge_without_an_engine(monkeypatch, plain)
    job = job_of(plain, tmp_path / "out")
    made = quantize(job)
    assert made is not None and made["quality"]["all"]["kl"] <= 0.01 and made["model"] == "out"
    formats = {rule["format"] for rule in made["recipe"]["rules"]}
    assert "gptq" not in {rule["method"] for rule in made["recipe"]["rules"]}    # it is for text of the user's own
    assert len(formats) > 1 and sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny"]
    assert load(tmp_path / "out") is not None
    with pytest.raises(ConfigError, match="exists already"):
        quantize(job)
    # A limit of bytes counts whole files: without headers, this output would be chosen again.
    most = sum(tensor.nbytes for file in (tmp_path / "out").glob("*.safetensors") for tensor in load_file(file).values())
    assert made["size"]["output_bytes"] > most
    smaller = quantize(dataclasses.replace(job, out=tmp_path / "smaller", limits={}, most_bytes=float(most)))
    assert smaller is not None and smaller["size"]["output_bytes"] <= most


# ── killed runs ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("recipe", "shares"), [
    ("auto", FEW), ("int4-gptq", FEW),
    *(pytest.param(recipe, MOMENTS, marks=pytest.mark.slow) for recipe in ("auto", "int4-gptq")),
])
def test_a_killed_run_goes_on_and_gives_the_same_bytes(recipe: str, shares: tuple[float, ...], tmp_path: Path) -> None:
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES)
    whole = tmp_path / "whole"
    whole.mkdir()
    passed = started(plain, whole / "out", recipe, 0)
    moments = int(re.findall(r"moments: (\d+)", passed.stdout)[0])
    assert moments > len(MOMENTS)
    for moment in (max(1, round(share * moments)) for share in shares):
        folder = tmp_path / str(moment)
        folder.mkdir()
        killed = started(plain, folder / "out", recipe, moment)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        if (folder / "out").exists():                    # killed after its end: complete, and refused as such
            assert "exists already" in started(plain, folder / "out", recipe, 0).stderr
        else:
            assert started(plain, folder / "out", recipe, 0).returncode == 0
        assert contents(folder) == contents(whole), moment


def test_a_stopped_search_of_other_limits_is_refused(tmp_path: Path) -> None:
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES)
    assert started(plain, tmp_path / "out", "auto", 20).returncode == -signal.SIGKILL
    with pytest.MonkeyPatch.context() as patch:
        judge_without_an_engine(patch, plain)
        with pytest.raises(ConfigError, match=r"out\.search belongs to a run with another .* or limit: delete it, or choose"):
            quantize(dataclasses.replace(job_of(plain, tmp_path / "out"), limits={"kl": 0.02}))


def test_blocks_of_an_unknown_run_are_not_taken(tmp_path: Path) -> None:
    """The machine stopped before run.json was on the disk."""
    folder = tmp_path / "out.part"
    Claim(folder, {"recipe": 1}, tmp_path / "out").end()
    (folder / RUN).write_text("")
    Claim(folder, {"recipe": 2}, tmp_path / "out").end()
    (folder / RUN).write_text("")
    (folder / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(ConfigError, match="belongs to a run with another"):
        Claim(folder, {"recipe": 2}, tmp_path / "out")


def test_a_search_that_made_nothing_is_not_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = save_checkpoint("llama", tmp_path / "tiny", **SIZES)
    judge_without_an_engine(monkeypatch, plain)
    job = job_of(plain, tmp_path / "out")
    with pytest.raises(ConfigError, match="the smallest formats of auto take"):
        quantize(dataclasses.replace(job, limits={}, most_bytes=1000.0))
    assert not (tmp_path / "out.search").exists()
    assert quantize(job) is not None


def started(plain: Path, out: Path, recipe: str, moment: int) -> Any:
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return warm_start.run([sys.executable, __file__, str(plain), str(out), recipe, str(moment)], 600, env=variables)


def contents(folder: Path) -> dict[str, bytes]:
    """Without the note that a run which is killed right after its last rename leaves."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*")
            if file.is_file() and file != folder / "out" / RUN}


class Moments:
    """Counts what a run passes, and kills it at one of them."""

    def __init__(self, last: int) -> None:
        self.passed, self._last = 0, last

    def pass_one(self) -> None:
        self.passed += 1
        if self.passed == self._last:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            self.pass_one()
            found = call(*args, **named)
            self.pass_one()
            return found
        return counted


def main() -> None:
    plain, out, recipe, last = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    patch, moments = pytest.MonkeyPatch(), Moments(last)
    judge_without_an_engine(patch, plain)
    for owner, name in ((auto_search, "measured"), (auto_search, "refined"), (Workspace, "write"), (Workspace, "add_errors"),
                        (Calibration, "save"), (quantize_model.card, "write_card"), (os, "rename"), (Tries, "choose"),
                        (Tries, "take"), (shutil, "rmtree")):
        patch.setattr(owner, name, moments.around(getattr(owner, name)))
    try:
        quantize(job_of(plain, out, recipe))
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    print(f"moments: {moments.passed}")


if __name__ == "__main__":
    main()
