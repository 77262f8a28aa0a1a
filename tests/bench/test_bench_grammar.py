"""`bench grammar`: the made-up vocabulary is one that grammars can use, and the record has what the page says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from served_model import write_model

from ridgeline.__main__ import main
from ridgeline.bench.grammar import ASKED, TEXT, made_up, masks_alone
from ridgeline.grammar.compiler import compile_grammar
from ridgeline.grammar.grammar_vocabulary import Pieces
from ridgeline.grammar.llguidance_backend import LLGuidance
from ridgeline.grammar.matcher import Matcher
from ridgeline.sampling_params import SamplingParams


@pytest.mark.parametrize("size", [1000, *(pytest.param(size, marks=pytest.mark.slow) for size in (49152, 128256))])
def test_a_vocabulary_that_is_made_up(size: int) -> None:
    vocabulary = made_up(size)
    assert len(vocabulary.pieces) == size == len(set(vocabulary.pieces)) and all(vocabulary.pieces)
    assert vocabulary.end_ids == vocabulary.special_ids == [size - 1]
    tokens = Pieces(vocabulary)(TEXT)
    assert b"".join(vocabulary.pieces[token] for token in tokens).decode() == TEXT and len(tokens) < len(TEXT)
    at = Matcher(compile_grammar(LLGuidance(vocabulary), ASKED), SamplingParams(structured_outputs=ASKED), vocabulary.end_ids)
    assert all(at.accept(token) for token in tokens) and not at.ended
    assert made_up(size) == vocabulary


def test_masks_are_timed_for_every_number_of_rows() -> None:
    found = masks_alone(made_up(2000), [1, 9])
    assert list(found) == ["1", "9"] and all(each["us_per_row"]["median"] > 0 for each in found.values())


def test_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model, out = write_model(tmp_path / "tiny"), tmp_path / "grammar.json"
    how = ["--rows", "1", "--requests", "3", "--tokens", "4", "--repeats", "1", "--temperature", "1", "0", "--out", str(out)]
    main(["bench", "grammar", str(model), *how, "--set", "load_format=dummy", "num_gpu_blocks_override=100", "dtype=float32"])
    made = json.loads(out.read_text())
    assert made["workload"]["vocabulary"] == "the model's" and made["workload"]["ids"] == 260
    assert list(made["figures"]["engine"]) == ["temperature 1", "temperature 0"]
    for each in made["figures"]["engine"].values():
        free, constrained = each["free"], each["constrained"]
        assert "mask_ms" not in free and constrained["mask_ms"]["median"] > 0 and each["us_per_mask"] > 0
        assert constrained["masked_ms"]["median"] > max(constrained[f"{part}_ms"]["median"] for part in ("mask", "sample"))
        for run in (free, constrained):
            parts = [run[f"{name}_ms"]["median"] for name in ("plan", "launch", "sample", "wait", "update")]
            assert all(part > 0 for part in parts) and max(parts) < run["step_ms"]["p90"]
        assert each["cost"] == pytest.approx(free["tok_s"]["median"] / constrained["tok_s"]["median"] - 1)
