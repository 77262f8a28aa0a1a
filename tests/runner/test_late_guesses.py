"""Verification of drafts where a host must know more than the model's logits: of rows that are shorter than it assumed, what is
verified one by one is compared with the device's guesses; rows with a grammar are verified all at once, with the same tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.messages import RowAdded
from ridgeline.runner.sampler import Sampler
from ridgeline.runner.verify import Positions, verify
from ridgeline.sampling_params import SamplingParams, StructuredOutputs


class Said(NamedTuple):
    tokens: Tensor
    failed: Tensor
    none_left: Tensor | None = None


class Penalised:
    """A sampler whose rows all change their logits, so that each position waits for the one before it."""

    asked = 0

    def only_masked(self, rows: np.ndarray) -> np.ndarray:
        return np.zeros(len(rows), bool)

    def edits(self, rows: np.ndarray) -> np.ndarray:
        return np.ones(len(rows), bool)

    def sample(self, logits: Tensor, rows: np.ndarray, allowed: Tensor | None) -> Said:
        self.asked += 1
        return Said(logits.argmax(1), torch.zeros(len(logits), dtype=torch.bool))


def test_every_rank_compares_with_what_the_device_knows() -> None:
    """A rank that has packed the step before it took in the last has other guesses than rank 0, which must not change how often
    they meet: each position is one broadcast."""
    logits = torch.eye(8)[[3, 4, 5]]
    asked = []
    for stale in ([3, 4], [0, 0]):
        table = np.array([[*stale, -1]])
        positions = Positions(np.zeros(1, np.int64), np.array([2]), table, np.zeros(1, np.int64), 3, np.array([0, 1]))
        positions.late = torch.tensor([3, 4])
        sampler = Penalised()
        found = verify(sampler, logits, positions, None, lambda tokens: tokens)  # type: ignore[arg-type]
        assert found.accepted.tolist() == [2] and found.newest.tolist() == [5]
        asked.append(sampler.asked)
    assert asked == [3, 3]


VOCAB = 40


class OneByOne(Sampler):
    """Verifies rows with a grammar as it does those with penalties."""

    def only_masked(self, rows: np.ndarray) -> np.ndarray:
        return np.zeros(len(rows), bool)


def _sampler(kind: type[Sampler], params: list[SamplingParams]) -> Sampler:
    made = kind(len(params), VOCAB, {0}, "cpu", torch.float32, 64)
    for row, each in enumerate(params):
        made.add_row(row, RowAdded(row, np.array([1, 2], np.int32), 2, 0, [], each, 7 + row, []))
    return made


@pytest.mark.parametrize("seed", range(8))
def test_rows_with_a_grammar_are_verified_at_once_with_the_tokens_of_one_by_one(seed: int) -> None:
    """Rows with and without a grammar, greedy, sampled and filtered, one of them penalised besides."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    grammar = StructuredOutputs(regex="a*")
    params = [
        SamplingParams(temperature=0, structured_outputs=grammar), SamplingParams(temperature=1, structured_outputs=grammar),
        SamplingParams(temperature=1), SamplingParams(temperature=1, top_p=0.7, structured_outputs=grammar),
        SamplingParams(temperature=0, presence_penalty=1.5, structured_outputs=grammar),
    ]
    width = rng.integers(0, 5, len(params))
    own = 1 + width
    first, count = own.cumsum() - own, int(own.sum())
    logits = 3 * torch.randn(count, VOCAB, generator=generator)
    masks = torch.from_numpy(rng.random((count, VOCAB)) < 0.5)
    masks[:, 1] = True
    masks[first[2] : first[2] + own[2]] = True           # no grammar: all is allowed
    best = logits.masked_fill(~masks, -torch.inf).argmax(1).numpy()
    guesses = np.full((len(params), 1 + int(width.max())), -1, np.int64)
    for row, (begin, drafts) in enumerate(zip(first, width, strict=True)):
        guesses[row, :drafts] = np.where(rng.random(drafts) < 0.7, best[begin : begin + drafts], 1)
    found = []
    for kind in (Sampler, OneByOne):
        positions = Positions(np.arange(len(params)), width, guesses.copy(), first, count, np.zeros(0, np.int64))
        found.append(verify(_sampler(kind, params), logits, positions, masks, lambda tokens: tokens))
    one, other = found
    assert one.at_once.tolist() == [True, True, True, True, False]
    assert other.at_once.tolist() == [False, False, True, False, False]
    assert one.accepted.tolist() == other.accepted.tolist() and one.newest.tolist() == other.newest.tolist()
    for row, accepted in enumerate(one.accepted.tolist()):
        mine = slice(first[row], first[row] + accepted + 1)
        assert one.tokens[mine].tolist() == other.tokens[mine].tolist()
        assert one.failed[mine].tolist() == other.failed[mine].tolist()
