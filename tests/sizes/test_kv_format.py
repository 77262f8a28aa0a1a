"""What the options of the KV cache mean, and what each format costs per layer."""

from __future__ import annotations

import pytest

from ridgeline.errors import ConfigError
from ridgeline.roofline.decoder_shape import DecoderShape, step_counts
from ridgeline.roofline.step_cost import step_cost
from ridgeline.sizes.kv_format import KVFormat, cache_dtype, parse, skipped_layers
from ridgeline.sizes.op_costs import E4M3

WINDOWS = [None, 9, None, 9]


@pytest.mark.parametrize(("asked", "meant"), [
    ("auto", ("auto", "auto")), ("fp8", ("fp8", "fp8")), ("int8", ("int8", "int8")), ("k=int8,v=fp8", ("int8", "fp8")),
    ("v=int8", ("auto", "int8")), ("v=fp8, k=auto", ("auto", "fp8")),
])
def test_one_format_or_one_each(asked: str, meant: tuple[str, str]) -> None:
    assert parse(asked) == meant


@pytest.mark.parametrize(("asked", "says"), [
    ("int4", "'int4' is unknown; known: auto, fp8, int8"), ("k=int8,k=fp8", "is not understood"), ("q=int8", "is not understood"),
    ("k=float32,v=int8", "float32 is for keys and values together"), ("k=", "'' is unknown"),
])
def test_what_is_no_format_is_refused_in_one_line(asked: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse(asked)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("asked", "layers"), [
    ("", set()), ("0", {0}), ("0,2-3", {0, 2, 3}), ("0 1", {0, 1}), ("sliding_window", {1, 3}), ("0,sliding_window", {0, 1, 3}),
])
def test_layers_that_stay_wide(asked: str, layers: set[int]) -> None:
    assert skipped_layers(asked, WINDOWS) == layers


@pytest.mark.parametrize(("asked", "says"), [
    ("4", "the model has layers 0 to 3"), ("3-9", "layers 0 to 3"), ("3-1", "layers 0 to 3"), ("first", "neither a layer"),
    ("-1", "neither a layer"),
])
def test_layers_that_do_not_exist_are_refused(asked: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        skipped_layers(asked, WINDOWS)


def test_stored_dtypes() -> None:
    assert cache_dtype("int8", "bfloat16", "cuda") == "int8" and cache_dtype("fp8", "bfloat16", "cuda") == E4M3
    assert cache_dtype("auto", "float32", "cpu") == "float16" and cache_dtype("auto", "bfloat16", "cuda") == "bfloat16"


def test_bytes_of_every_layer_count() -> None:
    """Of four layers the first stays in 16 bits; keys have 8 bits and a scale, values 16."""
    mixed = KVFormat("int8", "bfloat16", "bfloat16", frozenset({0}))
    assert mixed.vector_bytes(0, 64) == (128, 128) and mixed.vector_bytes(1, 64) == (68, 128)
    assert mixed.mean_bytes(range(4), 64) == (256 + 3 * 196) / (4 * 128)
    assert KVFormat(E4M3, E4M3, scales=((1.0, 2.0),)).vector_bytes(0, 64) == (64, 64)
    assert mixed.name == "k=int8,v=bfloat16, 1 layers bfloat16" and KVFormat(E4M3, E4M3).name == E4M3


def test_a_step_reads_what_each_kind_of_layer_stores() -> None:
    """Layers with a window keep 16 bits: their keys cost twice as much as those of the others."""
    shape = DecoderShape(
        hidden=64, intermediate=64, heads=2, kv_heads=2, head_dim=32, layers=4, vocab=100, window=4, window_layers=2,
        kv_bytes=1.0, window_kv_bytes=2.0,
    )
    counts = step_counts(shape, [(1, 100)])
    assert step_cost(shape, [(1, 100)]).ops["attention"].kv_read == 2 * 2 * 32 * (2 * 100 * 1 + 2 * 4 * 2)
    assert counts.full.keys == 100 and counts.windowed.keys == 4
    assert shape.mean_kv_bytes == 1.5 and shape.kv_bytes_per_token == 4 * 2 * 2 * 32 * 1.5
