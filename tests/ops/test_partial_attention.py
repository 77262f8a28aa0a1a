"""Attention over parts of a context, added up, is attention over the context: whatever the ranks, windows, sinks and lengths."""

from __future__ import annotations

import pytest
import torch

from ridgeline.ops.attention.attention_reference import paged_attention_reference
from ridgeline.ops.attention.partial_attention import merged, partial_attention, slots_here

ROWS = [(1, 1), (1, 23), (5, 5), (4, 30)]                # queries and positions; of the first row only one rank has any
SIZE, HEADS, KV_HEADS, DIM = 3, 6, 2, 8                  # SIZE: tokens of a block on one rank


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("window", "softcap", "sinks"), [
    (None, None, False), (7, None, True), (2, 5.0, False), (-6, None, False),
])
def test_parts_add_up(ranks: int, window: int | None, softcap: float | None, sinks: bool) -> None:
    generator = torch.Generator().manual_seed(ranks)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    blocks = 10 * len(ROWS)
    whole = [random(1 + blocks, SIZE * ranks, KV_HEADS, DIM) for _ in range(2)]
    table = (torch.randperm(blocks, generator=generator) + 1).view(len(ROWS), -1).to(torch.int32)
    start = [0, *torch.tensor([count for count, _ in ROWS]).cumsum(0).tolist()]
    lengths = [length for _, length in ROWS]
    q, sink = random(start[-1], HEADS, DIM), random(HEADS) if sinks else None
    how = {"scale": DIM**-0.5, "window": window, "softcap": softcap}
    expected = paged_attention_reference(
        q, *whole, table, torch.tensor(start, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32),
        query_start_host=start, kv_len_host=lengths, sinks=sink, **how,
    )
    parts = []
    for rank in range(ranks):
        pages = [each[:, rank::ranks].contiguous() for each in whole]
        parts.append(partial_attention(q, *pages, table, start, lengths, rank=rank, ranks=ranks, **how))
    outs, totals = (torch.stack(each) for each in zip(*parts, strict=True))
    torch.testing.assert_close(merged(outs, totals, sink), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_token_is_written_on_one_rank(ranks: int) -> None:
    slots = torch.arange(SIZE * ranks, 5 * SIZE * ranks)                     # block 0 belongs to no sequence
    found = [slots_here(slots, SIZE, rank, ranks) for rank in range(ranks)]
    assert (sum((each > 0).int() for each in found) == 1).all()
    for each in found:
        assert sorted(each[each > 0].tolist()) == list(range(SIZE, 5 * SIZE))


def test_nothing_is_read_where_nothing_is() -> None:
    """Padding rows have no positions: their result is zero, not NaN."""
    pages = torch.full((2, SIZE, KV_HEADS, DIM), torch.nan)
    out, total = partial_attention(
        torch.ones(1, HEADS, DIM), pages, pages, torch.zeros(1, 1, dtype=torch.int32), [0, 1], [0], rank=0, ranks=2, scale=1.0
    )
    assert not merged(out[None], total[None]).any()
