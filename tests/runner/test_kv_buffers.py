"""Pages of the KV cache: groups of one geometry or of several never overlap, and copies of blocks run all at once."""

from __future__ import annotations

import pytest
import torch

from ridgeline.messages import BlockOp
from ridgeline.runner.kv_buffers import KVBuffers
from ridgeline.sizes.kv_spec import KVGroupSpec, common_block_size, page_bytes

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


def made(groups: list[KVGroupSpec], dtype: torch.dtype = torch.float32) -> KVBuffers:
    return KVBuffers(groups, BLOCKS, dtype, torch.device("cpu"))


def fill(buffers: KVBuffers, groups: list[KVGroupSpec]) -> dict[tuple[int, int, str], torch.Tensor]:
    """Every block belongs to one group, as a pool deals them out; each gets numbers of its own in that group's layers."""
    generator, layers, written = torch.Generator().manual_seed(0), buffers.layers(), {}
    for block in range(BLOCKS):
        group = groups[block % len(groups)]
        for layer in group.layers:
            pages = layers[layer]
            vectors = {"k": pages.k, "v": pages.v} if group.vectors == 2 else {"k": pages.k}
            for name, pages_of in vectors.items():
                values = torch.randn(pages_of.shape[1:], generator=generator)
                pages_of[block] = values
                written[layer, block, name] = values
    return written


@pytest.mark.parametrize("name", SETS)
def test_no_two_pages_overlap(name: str) -> None:
    groups = SETS[name]
    buffers = made(groups)
    written, layers = fill(buffers, groups), buffers.layers()
    for (layer, block, which), values in written.items():
        assert torch.equal(getattr(layers[layer], which)[block], values), (layer, block, which)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_block_takes_the_bytes_that_the_ledger_says(name: str, dtype: torch.dtype) -> None:
    groups = SETS[name]
    buffers = made(groups, dtype)
    taken = sum(each.nbytes for each in (buffers._pages, buffers._scales) if each is not None)
    assert taken == BLOCKS * page_bytes(groups, dtype.itemsize)


def test_pages_of_one_geometry_are_contiguous() -> None:
    """Native kernels and TMA read them so."""
    for name in ("full", "full and window", "latent"):
        for pages in made(SETS[name]).layers():
            assert pages.k.is_contiguous() and pages.k.shape[:2] == (BLOCKS, SIZE)


def test_a_latent_is_key_and_value_at_once() -> None:
    pages = made([LATENT], torch.float8_e4m3fn).layers()[1]
    assert pages.k.shape == (BLOCKS, SIZE, 1, 24) and pages.v.shape == (BLOCKS, SIZE, 1, 16)
    assert pages.v.data_ptr() == pages.k.data_ptr()
    assert pages.k_scale is not None and pages.v_scale is not None and pages.k_scale.data_ptr() == pages.v_scale.data_ptr()
    assert LATENT.kind == "latent" and WINDOW.kind == "window" and FULL.kind == "full"


@pytest.mark.parametrize("name", SETS)
def test_copies_read_every_source_before_any_target_is_written(name: str) -> None:
    groups = SETS[name]
    buffers = made(groups)
    fill(buffers, groups)
    before = [(pages.k.clone(), pages.v.clone()) for pages in buffers.layers()]
    count = len(groups)
    # The first target is the second's source: it is copied as it was. One step further around, in every group's own layers.
    buffers.run([BlockOp("copy", group, source, source + count) for group in range(count) for source in (group, group + count)])
    for group, spec in enumerate(groups):
        for layer in spec.layers:
            pages, (k, v) = buffers.layers()[layer], before[layer]
            for source in (group, group + count):
                assert torch.equal(pages.k[source + count], k[source]) and torch.equal(pages.v[source + count], v[source])


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(AssertionError, match="'swap'"):
        made([FULL]).run([BlockOp("swap", 0, 1, 2)])


def test_block_sizes_must_agree() -> None:
    with pytest.raises(ValueError):
        common_block_size([FULL, KVGroupSpec((1,), None, 2 * SIZE, 2, 8)])
