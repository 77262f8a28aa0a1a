"""The card beside quantised weights: its line, its page, and when it is no card."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from quantised_models import save_quantised

from ridgeline.bench.workload.bench_engine import quality_of
from ridgeline.cli import cmd_serve
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.plan import plan_page
from ridgeline.process import platform
from ridgeline.quant.quality_card import CARD, find_card, hashes, output_files, with_card
from ridgeline.quantize.card import PAGE, PLOTS, format_words, limits_said, parse_limits, planned_card, write_card
from ridgeline.quantize.card_page import page

ROW = {"tokens": 510, "kl": 0.0123, "kl_p99": 0.2, "top1": 0.97, "reference_perplexity": 14.0, "perplexity": 14.5}


def card(folder: Path) -> dict[str, Any]:
    return {
        "model": "tiny-int4", "recipe": {"name": "int4-rtn"}, "seed": 7,
        "quality": {"all": ROW, "slices": {"code": ROW}, "worst_decile": {"kl": 0.05}},
        "size": {"input_bytes": 2 * 10**9, "plain_bytes": 2 * 10**9, "output_bytes": 6 * 10**8},
        "linears": [{"count": 14, "modules": "q_proj", "format": "uint4-64", "method": "rtn"}],
        "not_quantised": ["embeddings", "norms and biases"], "notes": [],
        "versions": {"ridgeline": "1", "torch": "2"}, "input": {"model": "tiny", "dtype": "bfloat16", "sha256": {"a": "b"}},
        "output": {"sha256": hashes(output_files(folder))},
    }


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setattr(platform, "cache_dir", lambda: cache)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-00001-of-00001.safetensors").write_bytes(b"weights")
    return folder


def test_no_card(model: Path) -> None:
    assert find_card(model) is None and find_card(model / "config.json") is None


def test_a_card_says_what_it_cost(model: Path) -> None:
    write_card(card(model), model)
    found = find_card(model)
    assert found is not None and found.matches
    assert found.line == "int4-rtn: KL 0.0123 (P99 0.2), top-1 flips 3.0%, perplexity 14.00 → 14.50, 2.00 → 0.60 GB"
    page = (model / PAGE).read_text()
    assert found.line in page and "| code | 510 |" in page and "seed 7" in page
    assert "| 14 q_proj | uint4-64 | 4-bit integers, a scale for 64 inputs | rtn |" in page


@pytest.mark.parametrize("change", ["weights", "config", "more", "less"])
def test_a_card_of_other_weights_is_no_card(model: Path, change: str, caplog: pytest.LogCaptureFixture) -> None:
    write_card(card(model), model)
    weights = model / "model-00001-of-00001.safetensors"
    assert find_card(model).matches                      # type: ignore[union-attr]
    {
        "weights": lambda: weights.write_bytes(b"wEights"), "config": lambda: (model / "config.json").write_text('{"a": 1}'),
        "more": lambda: (model / "other.safetensors").write_bytes(b""), "less": weights.unlink,
    }[change]()
    found = find_card(model)
    assert found is not None and not found.matches and "does not belong to these weights" in found.line
    assert cmd_serve.quality_line(EngineConfig.of(model=str(model))) == ""
    assert "does not belong to these weights" in caplog.text


@pytest.mark.parametrize("content", ["{", "[]", "{}", json.dumps({"output": {"sha256": {}}})])
def test_a_damaged_card_is_ignored(model: Path, content: str) -> None:
    (model / CARD).write_text(content)
    found = find_card(model)
    assert found is not None and not found.matches and "cannot be read" in found.line


def test_a_card_that_cannot_be_shown_or_held_is_ignored(model: Path) -> None:
    huge = json.loads(json.dumps(card(model)))
    huge["quality"]["all"]["kl"] = 10**400
    (model / CARD).write_text(json.dumps(huge))
    assert "OverflowError" in find_card(model).line      # type: ignore[union-attr]
    os.truncate(model / CARD, 1 << 40)
    assert "ModelError" in find_card(model).line         # type: ignore[union-attr]


def test_serve_prints_the_line(model: Path) -> None:
    write_card(card(model), model)
    assert cmd_serve.quality_line(EngineConfig.of(model=str(model))).startswith("int4-rtn: KL 0.0123")


# ── --require-quality ────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_cache_a_card_is_checked_at_every_start(model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_card(card(model), model)
    for cache in (tmp_path / "file", tmp_path / "folder"):
        (tmp_path / "folder").mkdir(mode=0o700, exist_ok=True)
        (tmp_path / "folder" / "cards").touch()
        (tmp_path / "file").touch()
        monkeypatch.setenv("RIDGELINE_CACHE", str(cache))
        found = find_card(model)
        assert found is not None and found.matches, cache


def test_limits_that_the_card_meets_or_not(model: Path) -> None:
    config = EngineConfig.of(model=str(model))
    with pytest.raises(ConfigError, match="it has no card"):
        cmd_serve.quality_line(config, "kl:0.02")
    write_card(card(model), model)
    assert cmd_serve.quality_line(config, "kl:0.02,flips:4%,kl_p99:0.2,ppl:0.05")
    for limits, said in (("kl:0.01", r"kl of the slice code is 0\.0123, the limit is 0\.01"), ("kl:1,ppl:1%", "ppl of the"),
                         ("flips:2%", "flips of the slice code")):
        with pytest.raises(ConfigError, match=said):
            cmd_serve.quality_line(config, limits)
    (model / "config.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="does not belong to these weights"):
        cmd_serve.quality_line(config, "kl:1")


def test_nan_meets_no_limit(model: Path) -> None:
    made = card(model)
    made["quality"]["slices"] = {"code": ROW, "prose": ROW | {"kl": float("nan")}}
    write_card(made, model)
    with pytest.raises(ConfigError, match="kl of the slice prose is nan"):
        cmd_serve.quality_line(EngineConfig.of(model=str(model)), "kl:100")


@pytest.mark.parametrize("words", ["kl", "kl:", "kl:x", "speed:1", "kl:-1", "kl:nan", ","])
def test_words_that_are_no_limits(words: str) -> None:
    with pytest.raises(ConfigError, match="is no limit of quality"):
        parse_limits(words)


def test_a_quantised_model_without_a_card_is_a_warning(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_quantised("ct-w4a16", model.parent / "made")
    assert cmd_serve.quality_line(EngineConfig.of(model=str(model.parent / "made/quantised"))) == ""
    assert "(compressed-tensors) and have no quality card" in caplog.text
    caplog.clear()
    assert cmd_serve.quality_line(EngineConfig.of(model=str(model.parent / "made/plain"))) == "" and not caplog.text


def test_the_page_of_plots(model: Path) -> None:
    made = card(model)
    passages = [{"slice": "code", "number": 1, "kl": 0.5, "top1": 0.9, "begins": "def <f>"}]
    made["quality"] |= {
        "by_position": [{"from": 1, "to": 1, "tokens": 2, "kl": 0.3, "top1": 1.0}, {"from": 2, "to": 3, "tokens": 4, "kl": 0.1,
                                                                                   "top1": 1.0}],
        "worst_decile": {"kl": 0.5, "passages": passages},
        "needle": {"found": 0.5, "picked": 1.0, "trials": 2,
                   "cells": [{"length": 256, "depth": 0.5, "found": 0.5, "picked": 1.0}]},
    }
    made["errors"] = {f"model.layers.{layer}.mlp.down_proj": 0.1 + layer / 100 for layer in range(4)}
    shown = page(made)
    assert "Error of the weights by layer" in shown and "KL by position" in shown and "def &lt;f&gt;" in shown
    assert "picked among others" in shown and "tiny-int4: what quantisation cost" in shown
    write_card(made, model, shown)
    assert (model / PLOTS).read_text() == shown and find_card(model).matches     # type: ignore[union-attr]
    made["quality"] |= {"by_position": [], "worst_decile": {}}
    del made["errors"], made["quality"]["needle"]
    assert "<svg height" not in page(made)


def test_records_and_plans_take_the_card(model: Path) -> None:
    speed = {"after": {"prefill_tok_s": 90.0, "decode_tok_s": 42.0}}
    made = card(model) | {"speed": speed, "machine": {"cpu": "a CPU", "gpu": ""}}
    write_card(made, model)
    said = quality_of(EngineConfig.of(model=str(model)))
    assert said.startswith("exact; weights: int4-rtn: KL 0.0123") and with_card("fp8 KV", "") == "fp8 KV"
    found = planned_card(model / CARD)
    assert (found.format, found.kl, found.decode_tok_s, found.machine) == ("int4", 0.0123, 42.0, "a CPU")
    point = {"weights": "int4", "batch": 1, "ranks": 1, "tok_s": 700.0}
    told = {"cards": [asdict(found)], "device": "H200", "points": [point, point | {"batch": 8, "tok_s": 9e3}]}
    shown = "".join(plan_page._cards(told))
    assert "700" in shown and "42.0 on a CPU" in shown and "9,000" not in shown and not plan_page._cards({"points": []})
    (model / CARD).write_text("{}")
    with pytest.raises(ConfigError, match="is no card of ridgeline quantize"):
        planned_card(model / CARD)


def test_the_page_says_speed_needles_and_time(model: Path) -> None:
    made = card(model)
    made["quality"] |= {"needle": {"found": 0.5, "picked": 1.0, "trials": 10}}
    before, after = {"prefill_tok_s": 900.0, "decode_tok_s": 40.0}, {"prefill_tok_s": 950.0, "decode_tok_s": 81.0}
    made["speed"] = {"before": before, "after": after}
    spent = {"wall_s": 61.0, "cpu_s": 100.0}
    made["time"] = {"quantise": spent, "card": spent, "cores": 2, "load": 0.5, "predicted": {"quantise": spent, "card": spent}}
    write_card(made, model)
    said = (model / PAGE).read_text()
    assert "| one request here, answer, tokens/s | 40 | 81 |" in said and "50% of 10 numbers hidden" in said
    assert "Quantising took 61 s, the card 61 s (predicted: 61 s and 61 s), on 2 threads at a load of 0.5 (" in said


def test_words_of_formats_and_limits() -> None:
    assert format_words("uint4-32, asymmetric") == "4-bit integers, a scale for 32 inputs and a zero point"
    assert format_words("e4m3-row") == "8-bit floats, a scale for each output"
    assert format_words("bf16 2:4") == "half of the weights are zero" and format_words("q9") == ""
    assert limits_said({"kl": 0.4, "bytes": 116.4e6}) == "kl ≤ 0.4, 116.4 MB of weights"
