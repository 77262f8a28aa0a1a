"""Pages of the KV cache: groups of one geometry or of several never overlap, and copies of blocks run all at once."""

from __future__ import annotations

import pytest
import torch

from ridgeline.messages import BlockOp
from ridgeline.runner.kv_buffers import KVBuffers
from ridgeline.sizes.kv_format import KVFormat
from ridgeline.sizes.kv_spec import KVGroupSpec, common_block_size, page_bytes
from ridgeline.sizes.op_costs import E4M3

BLOCKS, SIZE = 7, 4
FULL = KVGroupSpec((0, 2), None, SIZE, 2, 8)
WINDOW = KVGroupSpec((1, 3), 9, SIZE, 2, 8)
NARROW = KVGroupSpec((1,), 9, SIZE, 1, 8)
LATENT = KVGroupSpec((0, 1, 2), None, SIZE, 1, 24, latent_value=16)
OTHER_LATENT = KVGroupSpec((1, 2), None, SIZE, 1, 24, latent_value=16)
SETS = {
    "full": [KVGroupSpec((0, 1), None, SIZE, 2, 8)], "full and window": [FULL, WINDOW],
    "latent": [LATENT], "two widths": [FULL, NARROW],
    "latent beside full": [KVGroupSpec((0,), None, SIZE, 2, 8), OTHER_LATENT],
}


FORMATS = {
    "float32": KVFormat("float32", "float32"), "bf16": KVFormat("bfloat16", "bfloat16"), "fp8": KVFormat(E4M3, E4M3),
    "int8": KVFormat("int8", "int8"), "k=int8,v=fp8": KVFormat("int8", E4M3), "k=bf16,v=int8": KVFormat("bfloat16", "int8"),
    "but the first layer": KVFormat(E4M3, E4M3, "bfloat16", frozenset({0})),
    "calibrated": KVFormat(E4M3, E4M3, scales=((0.5, 0.25),) * 4),
}


def made(groups: list[KVGroupSpec], format: KVFormat = FORMATS["float32"]) -> KVBuffers:
    return KVBuffers(groups, BLOCKS, format, torch.device("cpu"))


def fill(buffers: KVBuffers, groups: list[KVGroupSpec]) -> dict[tuple[int, int, str], torch.Tensor]:
    """Every block belongs to one group, as a pool deals them out; each gets numbers of its own in that group's layers."""
    generator, layers, written = torch.Generator().manual_seed(0), buffers.layers(), {}
    for block in range(BLOCKS):
        group = groups[block % len(groups)]
        for layer in group.layers:
            pages = layers[layer]
            vectors = {"k": pages.k, "v": pages.v} if group.vectors == 2 else {"k": pages.k}
            for name, pages_of in vectors.items():
                values = torch.randint(-99, 99, pages_of.shape[1:], generator=generator).to(pages_of.dtype)
                pages_of.view(torch.uint8)[block] = values.view(torch.uint8)         # torch copies not every narrow float
                written[layer, block, name] = values
                scale = getattr(pages, f"{name}_scale")
                if scale is not None:
                    scale[block] = torch.rand(scale.shape[1:], generator=generator)
                    written[layer, block, f"{name}_scale"] = scale[block].clone()
    return written


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("format", ["float32", "k=bf16,v=int8", "but the first layer"])
def test_no_two_pages_overlap(name: str, format: str) -> None:
    groups = SETS[name]
    buffers = made(groups, FORMATS[format])
    written, layers = fill(buffers, groups), buffers.layers()
    for (layer, block, which), values in written.items():
        found = getattr(layers[layer], which)[block]
        assert torch.equal(found.float(), values.float()), (layer, block, which)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_block_takes_the_bytes_that_the_ledger_says(name: str, format: str) -> None:
    groups = SETS[name]
    assert made(groups, FORMATS[format]).nbytes == BLOCKS * page_bytes(groups, FORMATS[format])


def test_bytes_of_a_block_by_format() -> None:
    """Two layers of two heads of 8, blocks of 4 tokens: 64 keys and as many values a layer, each 8 of them with a scale."""
    groups = SETS["full"]
    found = {name: page_bytes(groups, format) for name, format in FORMATS.items()}
    assert found == {
        "float32": 2 * 2 * 64 * 4, "bf16": 2 * 2 * 64 * 2, "fp8": 2 * 2 * (64 + 8 * 4), "int8": 2 * 2 * (64 + 8 * 4),
        "k=int8,v=fp8": 2 * 2 * (64 + 8 * 4), "k=bf16,v=int8": 2 * (64 * 2 + 64 + 8 * 4),
        "but the first layer": 2 * 64 * 2 + 2 * (64 + 8 * 4), "calibrated": 2 * 2 * 64,
    }


def test_calibrated_scales_are_one_for_all_tokens() -> None:
    format = KVFormat(E4M3, E4M3, "bfloat16", frozenset({1}), ((0.5, 0.25), (1.5, 1.5)))
    first, skipped = made(SETS["full"], format).layers()
    assert first.k_scale is not None and first.v_scale is not None and skipped.k_scale is None and skipped.v_scale is None
    assert first.k_scale.shape == (BLOCKS, SIZE, 2) and first.k_scale.stride() == (0, 0, 1)
    assert first.k_scale.unique().tolist() == [0.5] and first.v_scale.unique().tolist() == [0.25]
    assert skipped.k.dtype == torch.bfloat16


def test_pages_of_one_geometry_are_contiguous() -> None:
    """Native kernels and TMA read them so."""
    for name in ("full", "full and window", "latent"):
        for pages in made(SETS[name]).layers():
            assert pages.k.is_contiguous() and pages.k.shape[:2] == (BLOCKS, SIZE)


def test_a_latent_is_key_and_value_at_once() -> None:
    pages = made([LATENT], FORMATS["fp8"]).layers()[1]
    assert pages.k.shape == (BLOCKS, SIZE, 1, 24) and pages.v.shape == (BLOCKS, SIZE, 1, 16)
    assert pages.v.data_ptr() == pages.k.data_ptr()
    assert pages.k_scale is not None and pages.v_scale is not None and pages.k_scale.data_ptr() == pages.v_scale.data_ptr()
    assert LATENT.kind == "latent" and WINDOW.kind == "window" and FULL.kind == "full"


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("format", ["float32", "but the first layer"])
def test_copies_read_every_source_before_any_target_is_written(name: str, format: str) -> None:
    groups = SETS[name]
    buffers = made(groups, FORMATS[format])
    fill(buffers, groups)
    before = [(pages.k.float().clone(), pages.v.float().clone()) for pages in buffers.layers()]
    count = len(groups)
    # The first target is the second's source: it is copied as it was. One step further around, in every group's own layers.
    buffers.run([BlockOp("copy", group, source, source + count) for group in range(count) for source in (group, group + count)])
    for group, spec in enumerate(groups):
        for layer in spec.layers:
            pages, (k, v) = buffers.layers()[layer], before[layer]
            for source in (group, group + count):
                assert torch.equal(pages.k.float()[source + count], k[source])
                assert torch.equal(pages.v.float()[source + count], v[source])


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(AssertionError, match="'swap'"):
        made([FULL]).run([BlockOp("swap", 0, 1, 2)])


def test_block_sizes_must_agree() -> None:
    with pytest.raises(ValueError):
        common_block_size([FULL, KVGroupSpec((1,), None, 2 * SIZE, 2, 8)])
