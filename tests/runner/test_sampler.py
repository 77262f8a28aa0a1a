"""Sampling against a plain per-row reference in float64, written here from the definitions, one id at a time."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.messages import RowAdded
from ridgeline.ops.cpu import native
from ridgeline.ops.registry import TRITON_INTERPRETED
from ridgeline.ops.sampling import greedy as greedy_ops
from ridgeline.ops.sampling import noise as noise_ops
from ridgeline.ops.sampling import sample as ops
from ridgeline.ops.sampling import sample_kernels
from ridgeline.runner import sampler as sampler_module
from ridgeline.runner.sampler import Sampler
from ridgeline.runner.to_host import Landing
from ridgeline.sampling_params import SamplingParams
from ridgeline.sizes.op_costs import Case
from ridgeline.sizes.sampling_costs import GREEDY_CASES, SAMPLE_CASES, sampling_bytes

EOS = {2, 3}


# ── the plain reference ──────────────────────────────────────────────────────────────────────────────────────────────

def plain_philox(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], 2**32)
        high2, low2 = divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high2 ^ counter[1] ^ key[0], low2, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


def plain_noise(seed: int, index: int, token: int) -> float:
    seed %= 2**64
    word = plain_philox([token // 4, index, 0, 0], [seed % 2**32, seed // 2**32])[token % 4]
    return -math.log1p(-(word + 0.5) / 2**32)


@dataclass
class Row:
    """A request as the sampler meets it, and what it has said so far."""

    params: SamplingParams
    seed: int = 0
    prompt: list[int] = field(default_factory=lambda: [5, 6, 5, 7])
    output: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)

    def added(self, row: int) -> RowAdded:
        tokens = np.array(self.prompt + self.output, np.int32)
        return RowAdded(row, tokens, len(self.prompt), 0, [], self.params, self.seed, self.bad_words)


def plain_logits(logits: list[float], row: Row) -> list[float]:
    """Everything that happens before the temperature."""
    params, output = row.params, row.output
    forbidden: set[int] = set()
    if params.allowed_token_ids is not None:
        forbidden |= set(range(len(logits))) - set(params.allowed_token_ids)
    for *begin, last in row.bad_words:
        if len(output) >= len(begin) and output[len(output) - len(begin) :] == begin:
            forbidden.add(last)
    if len(output) < params.min_tokens:
        forbidden |= EOS | set(params.stop_token_ids)
    logits = [-math.inf if token in forbidden else logit for token, logit in enumerate(logits)]
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in set(row.prompt + output):
        logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    return logits


def plain_survivors(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """id -> weight of what the filters leave."""
    best = max(logits)
    scaled = {token: (logit - best) / params.temperature for token, logit in enumerate(logits) if logit > -math.inf}
    if params.min_p:
        scaled = {token: value for token, value in scaled.items() if value >= math.log(params.min_p)}
    order = sorted(scaled, key=lambda token: (-scaled[token], token))[: params.top_k or None]
    if params.top_p < 1:
        order = until(order, {token: math.exp(scaled[token]) for token in order}, params.top_p)
    weight = {token: math.exp(scaled[token]) for token in order}
    if params.typical_p < 1:
        total = sum(weight.values())
        entropy = -sum(w / total * math.log(w / total) for w in weight.values())
        order = sorted(order, key=lambda token: (abs(math.log(weight[token] / total) + entropy), token))
        weight = {token: weight[token] for token in until(order, weight, params.typical_p)}
    return weight


def until(order: list[int], weight: dict[int, float], share: float) -> list[int]:
    """The shortest beginning that has this share of the weight."""
    goal, reached, kept = share * sum(weight.values()), 0.0, []
    for token in order:
        if reached >= goal:
            break
        kept.append(token)
        reached += weight[token]
    return kept


def plain_token(logits: list[float], row: Row) -> int:
    logits = plain_logits(logits, row)
    if row.params.temperature == 0:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    weight = plain_survivors(logits, row.params)
    score = {token: w / plain_noise(row.seed, len(row.output), token) for token, w in weight.items()}
    return max(score, key=lambda token: (score[token], -token))


# ── noise ────────────────────────────────────────────────────────────────────────────────────────────────────────────

# Random123's published answers for philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, expected: str) -> None:
    words = [int(word, 16) for word in (counter + " " + key).split()]
    answers = [int(word, 16) for word in expected.split()]
    assert plain_philox(words[:4], words[4:]) == answers
    assert list(noise_ops.philox4x32(*words)) == answers
    assert [int(word[0]) for word in noise_ops.philox4x32(*(np.array([word], np.uint64) for word in words))] == answers
    assert [int(word) for word in noise_ops.philox4x32(*(torch.tensor([word]) for word in words))] == answers


def choices(rows: int, **columns: Any) -> np.ndarray:
    how = np.zeros(rows, ops.CHOICE)
    how["top_p"] = how["typical_p"] = 1
    for name, value in columns.items():
        how[name] = value
    return how


def test_noise_is_keyed_by_seed_index_and_id() -> None:
    how = choices(3, seed=[1, 2**63 + 17, 2**64 - 1], index=[0, 5, 2**31 - 2])
    everything = noise_ops.exponential_noise_all(how, 72, torch.device("cpu"))
    for row, token in ((0, 0), (0, 71), (1, 6), (2, 33)):
        expected = plain_noise(int(how["seed"][row]), int(how["index"][row]), token)
        assert everything[row, token].item() == pytest.approx(expected, rel=1e-14)
    ids = torch.tensor([[71, 0, 8], [3, 3, 64], [1, 2, 70]])
    assert torch.equal(noise_ops.exponential_noise(how, ids), everything.gather(1, ids))


def test_noise_is_never_zero_or_infinite() -> None:
    ends = noise_ops.exponential(torch.tensor([0, 1, 2**32 - 1]))
    assert ends.isfinite().all() and (ends > 0).all()
    assert ends.tolist() == sorted(ends.tolist())


# ── one token at a time, against the plain reference ─────────────────────────────────────────────────────────────────

def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=None, **options)


WORDS = [[9], [5, 6], [7, 7, 1], [8, 1, 0, 4], [6]]
ROWS = {
    "greedy": Row(params(temperature=0)),
    "nearly-greedy": Row(params(temperature=1e-3)),
    "temperature": Row(params(temperature=0.7)),
    "hot": Row(params(temperature=3.0)),
    "top_k": Row(params(top_k=5)),
    "top_k-1": Row(params(top_k=1)),
    "top_k-wide": Row(params(top_k=149, temperature=2.0)),
    "top_k-all": Row(params(top_k=100_000)),
    "top_p": Row(params(top_p=0.8)),
    "top_p-narrow": Row(params(top_p=1e-9)),
    "top_p-wide": Row(params(top_p=0.999, temperature=4.0)),
    "min_p": Row(params(min_p=0.1)),
    "min_p-1": Row(params(min_p=1.0)),
    "typical": Row(params(typical_p=0.6)),
    "typical-wide": Row(params(typical_p=0.99, temperature=2.0)),
    "typical-narrow": Row(params(typical_p=0.05, temperature=2.0)),
    "all-filters": Row(params(temperature=1.5, top_k=40, top_p=0.9, min_p=0.01, typical_p=0.8)),
    "top_k-top_p": Row(params(top_k=20, top_p=0.7)),
    "top_k-min_p": Row(params(top_k=4, min_p=0.001)),
    "top_p-typical": Row(params(temperature=1.3, top_p=0.9, typical_p=0.7)),
    "repetition": Row(params(temperature=0, repetition_penalty=1.7)),
    "repetition-reward": Row(params(temperature=0.8, repetition_penalty=0.8)),
    "presence": Row(params(temperature=0, presence_penalty=1.5, allowed_token_ids=[1, 5, 9])),
    "frequency": Row(params(temperature=0, frequency_penalty=0.9, allowed_token_ids=[1, 5, 9])),
    "long-prompt": Row(params(temperature=0.5, repetition_penalty=1.5), prompt=list(range(40, 130))),
    "frequency-reward": Row(params(temperature=0.8, frequency_penalty=-0.9)),
    "penalties": Row(params(repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.6, top_p=0.9)),
    "bias": Row(params(logit_bias={4: 3.0, 5: -100.0, 149: 5.0})),
    "bias-penalty": Row(params(temperature=0, logit_bias={5: 9.0, 8: 8.0}, repetition_penalty=1.5)),
    "allowed": Row(params(allowed_token_ids=[149, 3, 11, 12, 50])),
    "allowed-greedy": Row(params(temperature=0, allowed_token_ids=[149, 3])),
    "bad-words": Row(params(allowed_token_ids=list(range(10))), bad_words=WORDS),
    "bad-words-penalty": Row(
        params(allowed_token_ids=list(range(10)), frequency_penalty=0.3), prompt=[8, 1, 0], bad_words=WORDS
    ),
    "min_tokens": Row(params(allowed_token_ids=[2, 3, 4, 8], stop_token_ids=[8, 20], min_tokens=4)),
    "min_tokens-longer": Row(params(temperature=0, allowed_token_ids=[2, 3, 4], min_tokens=8)),
    "seed-negative": Row(params(), seed=-(2**63)),
    "seed-big": Row(params(), seed=2**63 - 1),
}
VOCAB = 150                          # not whole blocks, not whole groups of four
STEPS = 12


def fresh_rows() -> list[Row]:
    return [Row(r.params, r.seed or 1000 + i, r.prompt, [], r.bad_words) for i, r in enumerate(ROWS.values())]


def step_logits(step: int, rows: int, vocab: int = VOCAB, quantised: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    logits = torch.randn(rows, vocab, generator=generator, dtype=torch.float64) * 3
    return (logits * 2).round() / 2 if quantised else logits


def run(rows: list[Row], which: list[int], logits: list[Tensor], sampler: Sampler | None = None) -> list[list[int]]:
    """The tokens of each step for some of the rows; their persistent rows are as numbered, their order is reversed."""
    if sampler is None:
        sampler = Sampler(len(rows), logits[0].shape[1], EOS, logits[0].device, logits[0].dtype)
        for place in which:
            sampler.add_row(place, rows[place].added(place))
    batch = np.array(which[::-1], np.int32)
    steps = []
    for step in logits:
        sampled = sampler.sample(step[batch], batch)
        assert not sampled.failed.any()
        steps.append(sampled.tokens.tolist()[::-1])
    return steps


@pytest.mark.parametrize(("quantised", "long_list"), [
    pytest.param(False, 3, id="distinct-long-lists"), pytest.param(True, 512, id="many-equal-short-lists"),
    pytest.param(False, 512, id="distinct-short-lists", marks=pytest.mark.slow),
    pytest.param(True, 3, id="many-equal-long-lists", marks=pytest.mark.slow),
])
def test_every_parameter_in_one_mixed_batch_is_what_it_says(
    quantised: bool, long_list: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler_module, "LONG_LIST", long_list)
    rows = fresh_rows()
    logits = [step_logits(step, len(rows), quantised=quantised) for step in range(STEPS)]
    steps = run(rows, list(range(len(rows))), logits)
    for step, tokens in zip(logits, steps, strict=True):
        for row, name, row_logits, token in zip(rows, ROWS, step.tolist(), tokens, strict=True):
            assert token == plain_token(row_logits, row), (name, row.output)
            row.output.append(token)


@pytest.mark.reliability("P-09")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_alone_says_what_it_says_in_a_batch(dtype: torch.dtype) -> None:
    rows = fresh_rows()
    logits = [step_logits(step, len(rows)).to(dtype) for step in range(4)]
    together = run(rows, list(range(len(rows))), logits)
    for place, name in enumerate(ROWS):
        assert [[tokens[place]] for tokens in together] == run(rows, [place], logits), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantised", [False, True], ids=["distinct", "many-equal"])
def test_a_gpu_gives_the_same_tokens(quantised: bool, dtype: torch.dtype) -> None:
    rows = fresh_rows()
    everyone = list(range(len(rows)))
    logits = [step_logits(step, len(rows), quantised=quantised).to(dtype) for step in range(STEPS)]
    assert run(rows, everyone, [step.cuda() for step in logits]) == run(rows, everyone, logits)


def test_a_row_that_comes_back_with_more_tokens_goes_on_as_before() -> None:
    rows = fresh_rows()
    everyone = list(range(len(rows)))
    logits = [step_logits(step, len(rows)) for step in range(STEPS)]
    expected = run(rows, everyone, logits)
    for stopped in (1, 5, STEPS - 1):
        restarted = Sampler(len(rows), VOCAB, EOS, "cpu", torch.float64)
        crowd = Row(params(top_k=3, presence_penalty=1.0, logit_bias={1: 2.0}), bad_words=[[4, 4, 4], [1]],
                    prompt=list(range(100, 150)), output=list(range(100)))
        for place, row in enumerate(rows):
            restarted.add_row(place, crowd.added(place))     # somebody else had the row before
            again = Row(row.params, row.seed, row.prompt, [tokens[place] for tokens in expected[:stopped]], row.bad_words)
            if place % 2:
                restarted.remove_row(place)
            restarted.add_row(place, again.added(place))
        assert run(rows, everyone, logits[stopped:], restarted) == expected[stopped:]


def test_rows_may_sit_out_a_step() -> None:
    """A row's state moves only when it is sampled."""
    rows = fresh_rows()
    everyone = list(range(len(rows)))
    logits = [step_logits(step, len(rows)) for step in range(4)]
    expected = run(rows, everyone, logits)
    sampler = Sampler(len(rows), VOCAB, EOS, "cpu", torch.float64)
    for place in everyone:
        sampler.add_row(place, rows[place].added(place))
    for step, tokens in zip(logits, expected, strict=True):
        for part in (everyone[::3], everyone[1::3], everyone[2::3]):
            assert run(rows, part, [step], sampler) == [[tokens[place] for place in part]]


def test_long_texts_are_remembered() -> None:
    """More than the sampler first makes room for, in prompt and answer, beside a row that has said little."""
    penalties = params(temperature=0, presence_penalty=2.0, repetition_penalty=1.1)
    row, other = Row(penalties, prompt=list(range(400, 700))), Row(penalties)
    logits = torch.zeros(2, 2000, dtype=torch.float64)
    logits[0, :1500] = torch.linspace(2.0, 1.0, 1500)
    logits[1, 0], logits[1, 1] = 1.0, 0.95
    sampler = Sampler(2, 2000, EOS, "cpu", torch.float64)
    sampler.add_row(1, row.added(1))
    for _ in range(600):
        token = int(sampler.sample(logits[:1], np.array([1])).tokens)
        if len(row.output) % 100 == 50:
            assert token == plain_token(logits[0].tolist(), row)
        row.output.append(token)
        if len(row.output) == 150:
            sampler.add_row(0, other.added(0))
    assert len(set(row.output)) == 600                       # presence outweighs every difference: no id twice
    assert sampler.sample(logits, np.array([1, 0])).tokens.tolist() == [plain_token(logits[0].tolist(), row), 0]


def test_edited_rows_go_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = fresh_rows()
    everyone = list(range(len(rows)))
    logits = [step_logits(step, len(rows)) for step in range(4)]
    expected = run(rows, everyone, logits)
    monkeypatch.setattr(sampler_module, "edited_rows", lambda **sizes: 5)
    assert run(rows, everyone, logits) == expected


def test_greedy_rows_may_be_chosen_for_by_others() -> None:
    rows = [Row(params(temperature=0)), Row(params(temperature=0, min_tokens=2)), Row(params(temperature=1.0))]
    rows.append(Row(params(temperature=0, logit_bias={3: 1.0})))
    sampler = Sampler(len(rows), VOCAB, EOS, "cpu", torch.float32)
    for place, row in enumerate(rows):
        sampler.add_row(place, row.added(place))
    assert [sampler.all_greedy(np.array([place])) for place in range(4)] == [True, False, False, False]
    for _ in range(2):
        sampler.sample(torch.zeros(1, VOCAB), np.array([1]))
    assert sampler.all_greedy(np.array([0, 1])) and not sampler.all_greedy(np.array([0, 2]))
    sampler.said_greedily(np.array([0, 1]))


# ── larger vocabularies: the ways around a full sort ─────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("quantised", [False, True], ids=["distinct", "many-equal"])
@pytest.mark.parametrize("options", [
    {"top_k": 1}, {"top_k": 30}, {"top_k": 94}, {"top_k": 95}, {"top_k": 3000}, {"top_p": 0.3}, {"top_p": 0.97},
    {"top_p": 0.97, "temperature": 5.0}, {"top_k": 200, "top_p": 0.6}, {"min_p": 0.02}, {"min_p": 0.3, "top_p": 0.9},
    {"typical_p": 0.5}, {"typical_p": 0.95, "temperature": 4.0}, {"top_k": 50, "typical_p": 0.5},
], ids=str)
def test_filters_on_a_large_vocabulary(options: dict[str, Any], quantised: bool) -> None:
    """6,016 ids are 94 blocks."""
    chosen = params(**options)
    check_filters(step_logits(7, 1, 6016, quantised), chosen)


def check_filters(logits: Tensor, chosen: SamplingParams) -> None:
    """The survivors are just the right ones, and 64 races between them end as they should."""
    weight = plain_survivors(logits[0].tolist(), chosen)
    draws = 64
    how = choices(draws, seed=np.arange(draws), temperature=chosen.temperature, top_k=chosen.top_k,
                  top_p=chosen.top_p, min_p=chosen.min_p, typical_p=chosen.typical_p)
    scaled = ops._scale(logits.clone(), logits.amax(-1, keepdim=True), how["temperature"][:1])
    _, ids = ops.survivors(scaled, how[:1])
    assert ids.tolist() == sorted(weight)
    tokens, failed = ops.sample_reference(logits.expand(draws, -1), how)
    assert not failed.any()
    weights = torch.tensor([weight[token] for token in ids.tolist()], dtype=torch.float64)
    score = weights / noise_ops.exponential_noise(how, ids.expand(draws, -1))
    assert torch.equal(tokens, ids[score.argmax(-1)])


@pytest.mark.skipif(native.library() is None, reason="no native kernels")
@pytest.mark.parametrize("quantised", [False, True], ids=["distinct", "many-equal"])
@pytest.mark.parametrize("width", [37, 6016])
def test_native_filters_give_the_tokens_of_the_definition(width: int, quantised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without sorting a row: with flat logits that took seconds of a step for the answers of one request."""
    mixed: list[dict[str, float]] = [
        {}, {"temperature": 0.0}, {"temperature": 100.0}, {"top_k": 1}, {"top_k": 30}, {"top_k": 94}, {"top_k": 95},
        {"top_k": 3000}, {"top_p": 0.3}, {"top_p": 0.97}, {"top_p": 1e-9}, {"top_p": 0.97, "temperature": 5.0},
        {"top_k": 200, "top_p": 0.6}, {"top_p": 0.999999, "temperature": 0.01}, {"min_p": 0.02}, {"min_p": 0.3, "top_p": 0.9},
        {"min_p": 1.0}, {"typical_p": 0.5}, {"typical_p": 0.95, "temperature": 4.0}, {"top_k": 50, "typical_p": 0.5},
        {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
    ]
    logits = step_logits(7, 4 * len(mixed), width, quantised).float()
    logits[::3, 5:20], logits[6], logits[9, 3] = -math.inf, -math.inf, math.nan
    how = choices(len(logits), seed=np.arange(len(logits)) * 2**33, index=np.arange(len(logits)), temperature=1)
    for place, options in enumerate(mixed):
        for name, value in options.items():
            how[name][place :: len(mixed)] = value
    expected = ops.sample_reference(logits, how)
    monkeypatch.setattr(ops, "descending", lambda values: pytest.fail(f"{values.numel()} values are sorted"))
    got = ops.sample_native(logits, how)
    assert [each.tolist() for each in got] == [each.tolist() for each in expected]
    assert got[1].sum() == 2


@pytest.mark.parametrize(("groups", "typical_p", "kept"), [
    ([(0.3, 1), (0.0003, 2000), (0.000025, 4000)], 0.65001, 4001),       # entropy 6.3: the most likely id comes last
    ([(0.9, 1), (0.1 / 6000, 6000)], 0.95001, 3002),                     # entropy 1.2: it comes first, far from the rest
])
def test_typical_ids_may_be_very_unlikely(groups: list[tuple[float, int]], typical_p: float, kept: int) -> None:
    logits = torch.tensor([math.log(share) for share, count in groups for _ in range(count)], dtype=torch.float64)
    chosen = params(typical_p=typical_p)
    check_filters(logits[None], chosen)
    assert len(plain_survivors(logits.tolist(), chosen)) == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0, 60.0])
def test_the_bounded_race_has_the_winners_of_the_full_one(dtype: torch.dtype, spread: float) -> None:
    scaled = (torch.rand(200, 4096, generator=torch.Generator().manual_seed(3)) * -spread).to(dtype)
    scaled[:, 5:9] = -torch.inf
    how = choices(200, seed=2**50, index=np.arange(200), temperature=1)
    full = scaled.double().exp() / noise_ops.exponential_noise_all(how, 4096, torch.device("cpu"))
    assert torch.equal(ops._race_bounded(scaled, how), full.argmax(-1))
    if native.library() is not None:
        scaled = torch.cat([scaled, scaled.new_zeros(200, 1)], dim=1)[:, :-1].float()    # rows farther apart than they are wide
        best = scaled.amax(-1, keepdim=True)
        full = (scaled - best).double().exp() / noise_ops.exponential_noise_all(how, 4096, torch.device("cpu"))
        assert torch.equal(ops.sample_native(scaled, how)[0], full.argmax(-1))


def test_answers_of_one_request_share_their_list_of_allowed_ids() -> None:
    ids = list(range(0, 2000, 2))
    masks, logits = sampler_module._Allowed(2000), torch.zeros(3, 2000)
    for row in (4, 7):
        masks.put(row, ids)
    masks.put(5, [1] * 600)
    assert masks._by_row[4] is masks._by_row[7]
    assert masks.apply(logits, np.array([7, 9, 4])).tolist() == [False, True, False]
    assert logits[1].isfinite().all() and logits[0].isfinite().nonzero()[:, 0].tolist() == ids
    assert torch.equal(logits[0], logits[2])


# ── distributions ────────────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.reliability("P-09")
@pytest.mark.parametrize("options", [
    {"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 7}, {"top_p": 0.85}, {"min_p": 0.08},
    {"typical_p": 0.7}, {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
], ids=str)
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    check_distribution(params(**options), lambda logits, how: ops.sample_reference(logits, how)[0])


def check_distribution(chosen: SamplingParams, draw: Callable[[Tensor, np.ndarray], Tensor]) -> None:
    """Chi-squared over 20,000 draws of one request (seed fixed, so this passes always or never), p > 0.001."""
    draws = 20_000
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(11)) * 2
    how = choices(draws, seed=20_231, index=np.arange(draws), temperature=chosen.temperature, top_k=chosen.top_k,
                  top_p=chosen.top_p, min_p=chosen.min_p, typical_p=chosen.typical_p)
    tokens = draw(logits.expand(draws, -1), how)
    weight = plain_survivors(logits[0].tolist(), chosen)
    counts = torch.bincount(tokens, minlength=100).double()
    expected = torch.zeros(100, dtype=torch.float64)
    for token, w in weight.items():
        expected[token] = draws * w / sum(weight.values())
    assert counts[expected == 0].sum() == 0
    rare = expected < 5                                      # too few to be normal: together they are one bin
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2) > 0.001


def test_neighbouring_ids_steps_and_seeds_are_independent() -> None:
    """Noise of 4,096 ids for 64 keys that differ in one bit: no two rows are correlated, their mean is 1."""
    seeds = np.array([1 << bit for bit in range(64)], np.uint64)
    noise = noise_ops.exponential_noise_all(choices(64, seed=seeds), 4096, torch.device("cpu"))
    correlation = torch.corrcoef(noise)
    # 2,016 pairs, each with a standard deviation of 1 / 64: five of them are passed once in 800 sets of keys.
    assert (correlation - torch.eye(64)).abs().max() < 5 / 64
    assert abs(noise.mean().item() - 1) < 4 / 512            # 2^18 draws with a deviation of 1


# ── rows that break, alone ───────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.reliability("B-19", "R-07")
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_broken_logits_fail_their_row_and_no_other(wrong: float, dtype: torch.dtype) -> None:
    rows = fresh_rows()
    everyone = list(range(len(rows)))
    logits = step_logits(1, len(rows)).to(dtype)
    expected = torch.tensor(run(rows, everyone, [logits])[0])
    for broken in everyone:
        poisoned = logits.clone()
        poisoned[broken] = -math.inf
        if wrong != -math.inf:
            poisoned[broken] = logits[broken]
            poisoned[broken, 77] = wrong
        sampler = Sampler(len(rows), VOCAB, EOS, "cpu", dtype)
        for place in everyone:
            sampler.add_row(place, rows[place].added(place))
        sampled = sampler.sample(poisoned, np.arange(len(rows)))
        assert sampled.failed.nonzero().tolist() == [[broken]]
        assert wrong == -math.inf or sampled.none_left is None or not sampled.none_left.any()    # the model's fault
        others = torch.arange(len(rows)) != broken
        assert torch.equal(sampled.tokens[others], expected[others])
        assert 0 <= sampled.tokens[broken] < VOCAB


def test_a_row_with_nothing_left_to_choose_fails() -> None:
    rows = [
        Row(params(allowed_token_ids=[4]), bad_words=[[4]]),
        Row(params(temperature=0, allowed_token_ids=[2, 3], min_tokens=1)),
        Row(params(temperature=0)),
    ]
    sampler = Sampler(3, 50, EOS, "cpu", torch.float32)
    for place, row in enumerate(rows):
        sampler.add_row(place, row.added(place))
    sampled = sampler.sample(torch.arange(50.0).expand(3, -1), np.arange(3))
    assert sampled.failed.tolist() == [True, True, False]
    assert sampled.none_left is not None and sampled.none_left.tolist() == [True, True, False]   # by their own settings
    assert sampled.tokens[2] == 49


def test_logits_are_left_as_they_are() -> None:
    rows = fresh_rows()
    logits = step_logits(1, len(rows))
    before = logits.clone()
    run(rows, list(range(len(rows))), [logits])
    assert torch.equal(logits, before)


# ── what it says on the tin, by hand ─────────────────────────────────────────────────────────────────────────────────

def greedy(logits: list[float], steps: int, bad_words: list[list[int]] | None = None, **options: Any) -> list[int]:
    row = Row(params(temperature=0, **options), prompt=[1], bad_words=bad_words or [])
    tensor = torch.tensor([logits])
    sampler = Sampler(1, len(logits), EOS, "cpu", torch.float32)
    sampler.add_row(0, row.added(0))
    return [int(sampler.sample(tensor, np.array([0])).tokens) for _ in range(steps)]


def test_ties_go_to_the_lowest_id() -> None:
    assert greedy([1, 4, 4, 4], 1) == [1]
    x = torch.zeros(3, 5000)
    x[1, 4321:] = 1
    x[2, 7], x[2, 4999] = math.nan, math.nan
    assert ops.argmax(x).tolist() == x.argmax(-1).tolist() == [0, 4321, 7]


def test_bad_words() -> None:
    logits = [9.0, 8, 0, 0, 7, 6]
    assert greedy(logits, 3, bad_words=[[0]]) == [1, 1, 1]
    assert greedy(logits, 4, bad_words=[[0, 0]]) == [0, 1, 0, 1]
    assert greedy(logits, 6, bad_words=[[0, 0, 0], [0, 1, 0]]) == [0, 0, 1, 1, 0, 0]
    assert greedy(logits, 4, bad_words=[[1, 0]]) == [0, 0, 0, 0]         # the prompt, [1], is not looked at
    assert greedy(logits, 3, bad_words=[[0, 1], [0, 0], [4, 1]]) == [0, 4, 0]


def test_min_tokens() -> None:
    logits = [0.0, 1, 9, 8, 7]                               # 2 and 3 are ends of text
    assert greedy(logits, 4, min_tokens=2) == [4, 4, 2, 2]
    assert greedy(logits, 4, min_tokens=2, stop_token_ids=[4]) == [1, 1, 2, 2]
    assert greedy(logits, 2, min_tokens=2, ignore_eos=True) == [4, 4]


def test_penalties() -> None:
    assert greedy([0.0, 4.0, 0, 0, 3.9], 2, repetition_penalty=1.1) == [4, 1]           # 1 is in the prompt
    assert greedy([0.0, 4.0, 0, 0, 3.9], 3, presence_penalty=0.2) == [1, 4, 1]
    assert greedy([0.0, 4.0, 0, 0, 3.95], 5, frequency_penalty=0.1) == [1, 4, 1, 4, 1]
    assert greedy([-1.0, -0.9, -9, -9, -9], 1, repetition_penalty=1.2) == [0]           # negative logits grow


def test_allowed_ids_and_bias() -> None:
    assert greedy([9.0, 8, 7, 6], 1, allowed_token_ids=[3, 2]) == [2]
    assert greedy([9.0, 8, 7, 6], 1, logit_bias={3: 4.0}) == [3]
    assert greedy([9.0, 8, 7, 6], 1, logit_bias={0: -100}) == [1]
    assert greedy([9.0, 8, 7, 6], 1, allowed_token_ids=[3, 2], logit_bias={0: 100, 3: 2.0}) == [3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks(temperature: float) -> None:
    vocab, rows = 70, 40
    sampler = Sampler(rows, vocab, EOS, "cpu", torch.float32)
    some = params(temperature=temperature, structured_outputs={"json_object": True})
    for row in range(rows):
        sampler.add_row(row, Row(some, seed=row).added(row))
    generator = torch.Generator().manual_seed(5)
    allowed = torch.rand(rows, vocab, generator=generator) < 0.1
    allowed[:, 69] = True
    allowed[0] = False
    logits = torch.randn(rows, vocab, generator=generator)
    bits = torch.zeros(rows, 96, dtype=torch.int64)
    bits[:, :vocab] = allowed
    words = (bits.view(rows, 3, 32) << torch.arange(32)).sum(-1)
    packed = (words - (words >> 31 << 32)).to(torch.int32)
    first = sampler.sample(logits, np.arange(rows), allowed)
    assert first.failed.tolist() == [True] + [False] * (rows - 1)
    assert all(allowed[row, token] for row, token in enumerate(first.tokens.tolist()) if row)
    expected = logits.masked_fill(~allowed, -math.inf)
    if temperature == 0:
        assert torch.equal(first.tokens[1:], expected.argmax(-1)[1:])
    for row in range(rows):
        sampler.add_row(row, Row(some, seed=row).added(row))
    again = sampler.sample(logits, np.arange(rows), packed)
    assert torch.equal(again.tokens, first.tokens) and torch.equal(again.failed, first.failed)


def test_a_batch_without_extras_runs_no_extra_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*args: Any) -> None:
        raise AssertionError("a stage ran that nobody asked for")

    for name in ("apply_mask", "apply_penalties", "keep_only"):
        monkeypatch.setattr(sampler_module, name, unexpected)
    monkeypatch.setattr(Sampler, "_edit_logits", unexpected)
    monkeypatch.setattr(ops, "_race_filtered", unexpected)
    sampler = Sampler(4, 50, EOS, "cpu", torch.float32)
    heavy = Row(params(top_k=3, repetition_penalty=1.5, min_tokens=4, logit_bias={1: 1.0}), bad_words=[[1, 2]])
    sampler.add_row(3, heavy.added(3))                       # a row that is not in the batch costs it nothing
    for row in (0, 1):
        sampler.add_row(row, Row(params(temperature=float(row)), seed=4).added(row))
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    sampler.sample(logits, np.array([1, 0]))
    monkeypatch.setattr(ops, "_race", unexpected)
    assert sampler.sample(logits[:1], np.array([0])).tokens.tolist() == [int(logits[0].argmax())]


# ── the declaration ──────────────────────────────────────────────────────────────────────────────────────────────────

@pytest.mark.parametrize("case", [case for case in SAMPLE_CASES if not case.timed], ids=lambda case: case.name)
def test_declared_cases_give_the_same_tokens_in_every_dtype(case: Case) -> None:
    for dtype in case.dtypes:
        (logits, how), _ = ops.sample.inputs(torch.Generator().manual_seed(1), getattr(torch, dtype), "cpu", **case.sizes)
        tokens, failed = ops.sample(logits, how)
        expected, _ = ops.sample(logits.double(), how)
        assert torch.equal(tokens, expected) and not failed.any()
        assert ops.sample.case_cost(case, dtype).bytes > logits.numel() * logits.element_size()


@pytest.mark.parametrize("case", [case for case in GREEDY_CASES if not case.timed], ids=lambda case: case.name)
@pytest.mark.parametrize("with_rows", [False, True])
def test_greedy_definition(case: Case, with_rows: bool) -> None:
    check_greedy(greedy_ops.greedy_reference, case, "float64", with_rows, "cpu")


def check_greedy(function: Any, case: Case, dtype: str, with_rows: bool, device: str) -> None:
    args, _ = greedy_ops.greedy.inputs(torch.Generator().manual_seed(1), getattr(torch, dtype), device, **case.sizes)
    logits, tokens, failed, rows, last_token = args
    function(logits, tokens, failed, *((rows, last_token) if with_rows else ()))
    for place, values in enumerate(logits.tolist()):
        broken = any(math.isnan(value) for value in values) or not math.isfinite(max(values))
        assert bool(failed[place]) == broken
        assert int(tokens[place]) == (0 if broken else values.index(max(values)))
    if with_rows:
        assert torch.equal(last_token[rows], tokens)
    assert int((last_token == -1).sum()) == 3 + (0 if with_rows else len(rows))


# ── the kernels, on a GPU or in the interpreter ──────────────────────────────────────────────────────────────────────

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
runs_triton = pytest.mark.skipif(not (CUDA or TRITON_INTERPRETED), reason="no GPU, and not in the interpreter")
slow = () if CUDA else pytest.mark.slow          # a case takes the interpreter seconds


@pytest.fixture
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small vocabulary has several of everything."""
    for name, value in {
        "BEST_TILE": 64, "RACE_TILE": 32, "GROUP": 8, "GROUPS_AT_ONCE": 4, "FINISH_TILE": 64, "CANDIDATES": 32,
        "FEW": 8, "PAIRS": 128, "RACE_SPAN": 2, "RACE_ALONE": 5, "SCAN_TILE": 64,
    }.items():
        monkeypatch.setattr(sample_kernels, name, value)
    monkeypatch.setattr(sample_kernels, "_workspaces", {})


@runs_triton
@pytest.mark.parametrize("options", [
    {"temperature": 0.7},
    {"temperature": [1.0, 3.0], "top_k": [1, 5, 20, 100]},
    {"temperature": [1.0, 3.0], "top_p": [1e-9, 0.5, 0.9, 0.99]},
    {"temperature": 2.0, "min_p": [0.01, 0.3, 1.0, 0.001]},
    {"temperature": 1.5, "top_k": [8, 40], "top_p": [0.5, 0.9, 0.95, 0.99]},
    {"temperature": 1.5, "min_p": 0.02, "top_k": [0, 2, 30, 0], "top_p": [0.9, 0.9, 0.99, 0.5]},
    {"temperature": [0.0, 1.0], "top_k": [0, 0, 0, 5], "typical_p": [1.0, 0.8, 1.0, 1.0]},
], ids=str)
@pytest.mark.parametrize("quantised", [pytest.param(False, marks=slow, id="distinct"), pytest.param(True, id="many-equal")])
@pytest.mark.usefixtures("tiny_tiles")
def test_triton_tokens_are_the_definitions(options: dict[str, Any], quantised: bool) -> None:
    """With few candidates, which are cut in registers, and with more than fit there."""
    logits = step_logits(9, 4, quantised=quantised).float()
    how = choices(4, seed=np.arange(4) * 2**40 + 7, index=np.arange(4))
    for name, values in options.items():
        how[name] = np.resize(values, 4)
    tokens, failed = ops.sample_on_gpu(logits.to(DEVICE), how)
    expected, _ = ops.sample_reference(logits, how)
    assert tokens.tolist() == expected.tolist() and not failed.any()


@runs_triton
@pytest.mark.usefixtures("tiny_tiles")
def test_triton_fails_broken_rows_alone() -> None:
    logits = step_logits(3, 6).float()
    logits[1], logits[2, 77], logits[3, 5] = -math.inf, math.nan, math.inf
    how = choices(6, seed=5, temperature=[1, 1, 1, 0, 1, 0], top_k=[0, 3, 0, 0, 3, 0])
    for got, wanted in zip(ops.sample_on_gpu(logits.to(DEVICE), how), ops.sample_reference(logits, how), strict=True):
        assert got.tolist() == wanted.tolist()


@runs_triton
@pytest.mark.parametrize(("dtype", "allowed"), [             # of the words: most tiles have none
    (torch.float32, 0.5), (torch.bfloat16, 0.02),
    pytest.param(torch.float32, 0.02, marks=slow), pytest.param(torch.bfloat16, 0.5, marks=slow),
])
@pytest.mark.usefixtures("tiny_tiles")
def test_triton_chooses_under_masks(dtype: torch.dtype, allowed: float) -> None:
    """As if what the mask does not allow were not there; a row that it leaves nothing, and broken ones, fail."""
    source = torch.Generator().manual_seed(0)
    logits = step_logits(5, 7, quantised=True).to(dtype)
    logits[1], logits[2, 77], logits[3, 5], logits[4, 149] = -math.inf, math.nan, math.inf, math.nan
    width = -(-logits.shape[1] // 32)
    words = torch.randint(-(2**31), 2**31, (7, width), generator=source) * (torch.rand(7, width, generator=source) < allowed)
    words[0] = words[6] = 0
    words[2:5], words[6, 3] = 1, 1 << 4                      # neither of the broken ones may be said; one id in the last row
    words = words.to(torch.int32)
    for temperature in ([0, 1, 1, 0, 1, 0, 1], [1, 1, 0, 1, 0, 1, 0]):
        how = choices(7, seed=np.arange(7) + 3, index=np.arange(7), temperature=temperature)
        tokens, failed = ops.sample_on_gpu(logits.to(DEVICE), how, words.to(DEVICE))
        expected, broken = ops.sample_reference(logits, how, words)
        assert tokens.tolist() == expected.tolist() and int(tokens[6]) == 100
        assert failed.tolist() == broken.tolist() and failed.tolist()[:5] == [True] * 5 and not failed[6]


@runs_triton
@pytest.mark.parametrize("options", [{"temperature": [0, 1]}, {"temperature": [0, 1], "top_k": [0, 5]}], ids=str)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.usefixtures("tiny_tiles")
def test_triton_kernels_choose_alone_what_the_sampler_does(
    options: dict[str, Any], masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, failures and the newest token of each row, step after step; filtered rows with a mask are left to the sampler."""
    grammar = {"structured_outputs": {"regex": "a"}} if masked else {}
    logits = [step_logits(step, 4, quantised=True).float() for step in range(2)]
    logits[0][1, 77] = math.nan
    words = torch.randint(-(2**31), 2**31, (4, -(-logits[0].shape[1] // 32)), generator=torch.Generator().manual_seed(1))
    mask = words.to(torch.int32) if masked else None
    defined, kernels = (Sampler(5, logits[0].shape[1], EOS, device, torch.float32) for device in ("cpu", DEVICE))
    for place, row in enumerate((4, 3, 2, 1)):
        given = {name: values[place % len(values)] for name, values in options.items()}
        for each in (defined, kernels):
            each.add_row(row, Row(params(**given | grammar), seed=place).added(row))
    rows, last_token = np.array([4, 3, 2, 1]), torch.full((5,), -1, device=DEVICE)
    _, tokens, failed, _ = Landing(5, torch.device(DEVICE)).room(4)
    for step in logits:
        expected = defined.sample(step, rows, mask)
        with monkeypatch.context() as patched:
            for module in (sampler_module, ops):
                patched.setattr(module, "has_kernels", lambda *site: True)
            ready = kernels.prepare(rows)
            assert not ready.lasting and ready.straight == (not masked or "top_k" not in options)
            if not ready.straight:
                return
            there = mask if mask is None else mask.to(DEVICE)
            places = torch.from_numpy(rows).to(DEVICE)
            kernels.sample_into(step.to(DEVICE), ready, there, (tokens, failed), places, last_token)
        assert tokens.tolist() == expected.tokens.tolist() == last_token[[4, 3, 2, 1]].tolist() and int(last_token[0]) == -1
        assert failed.tolist() == expected.failed.tolist()
        assert kernels.choices(rows)["index"].tolist() == defined.choices(rows)["index"].tolist()


@runs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [True, False])
def test_triton_masks_hide_no_broken_row(dtype: torch.dtype, masked: bool) -> None:
    logits = step_logits(5, 7).to(dtype)
    logits[1], logits[2, 77], logits[3, 5], logits[4, 149] = -math.inf, math.nan, math.inf, math.nan
    words = torch.randint(-(2**31), 2**31, (7, -(-logits.shape[1] // 32)), generator=torch.Generator().manual_seed(0))
    words[:, 77 // 32] = words[:, 0] = 0                     # neither of them may be said
    mask = words.to(DEVICE, torch.int32) if masked else None
    found, expected = [], []
    for function, results in ((ops.apply_mask_on_gpu, found), (ops.apply_mask_reference, expected)):
        out, broken = torch.empty(logits.shape, device=DEVICE), torch.ones(7, dtype=torch.bool, device=DEVICE)
        function(logits.to(DEVICE), mask, out, broken)
        results += [out, broken]
    assert torch.equal(found[0].nan_to_num(7), expected[0].nan_to_num(7))
    assert found[1].tolist() == expected[1].tolist() == [False, False, True, True, True, False, False]


@runs_triton
@pytest.mark.parametrize("case", [case for case in GREEDY_CASES if not case.timed], ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=slow), "bfloat16", pytest.param("float16", marks=slow)])
@pytest.mark.usefixtures("tiny_tiles")
def test_triton_greedy(case: Case, dtype: str) -> None:
    for with_rows in (False, True):                          # the second call finds the workspace as the first left it
        check_greedy(greedy_ops.greedy_on_gpu, case, dtype, with_rows, DEVICE)


@runs_triton
@pytest.mark.usefixtures("tiny_tiles")
def test_triton_in_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties, masks and all the rest beside the kernels: one step of the mixed batch."""
    rows = fresh_rows()
    which = list(range(0, len(rows), 1 if CUDA else 3))
    logits = [step_logits(0, len(rows)).float()]
    expected = run(rows, which, logits)
    monkeypatch.setattr(sampler_module, "sample", ops.sample_on_gpu)
    monkeypatch.setattr(sampler_module, "apply_mask", ops.apply_mask_on_gpu)
    assert run(rows, which, [step.to(DEVICE) for step in logits]) == expected


@runs_triton
@pytest.mark.parametrize("vocab", [150, 128_256])
def test_triton_workspace_is_what_the_ledger_says(vocab: int) -> None:
    space = sample_kernels.workspace(torch.device(DEVICE), 3, vocab)
    tensors = [getattr(space, name) for name in sample_kernels.Workspace.__slots__]
    sampler = Sampler(3, vocab, EOS, "cpu", torch.bfloat16)
    tensors += [sampler._known, sampler._counts, sampler._edited_logits]
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert held == sampling_bytes(rows=3, vocab=vocab, element_bytes=2, on_gpu=True)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"top_k": 7}, {"top_p": 0.85}, {"min_p": 0.08}], ids=str)
def test_triton_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    check_distribution(params(**options), lambda logits, how: ops.sample_on_gpu(logits.cuda(), how)[0].cpu())


@pytest.mark.skipif(CUDA or TRITON_INTERPRETED, reason="the kernels run in this process")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("marked", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_triton_kernels_in_the_interpreter(marked: str, run_interpreted: Any) -> None:
    """Every kernel on every commit; the slow test has the other types, and logits that are all different."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "test_triton", "-m", marked]
    finished = run_interpreted(command)
    assert finished.returncode == 0 and " passed" in finished.stdout, finished.stdout[-5000:] + finished.stderr[-2000:]


def test_the_workspace_is_reserved_for_every_position_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = list[int]()
    monkeypatch.setattr(sampler_module, "reserve", lambda device, dtype, rows, vocab: reserved.append(rows))
    Sampler(4, 77, EOS, "cpu", torch.float32)
    Sampler(4, 77, EOS, "cpu", torch.float32, 9)
    assert reserved == [4, 9]
    few, more = (sampling_bytes(rows=4, vocab=77, element_bytes=2, on_gpu=True, verified=count) for count in (0, 9))
    kept = sampling_bytes(rows=4, vocab=77, element_bytes=2, on_gpu=False)
    assert 4 * (more - kept) == 9 * (few - kept)


def test_a_workspace_does_not_grow_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory would be of the graphs' pool, where graphs that were captured before write."""
    monkeypatch.setattr(sample_kernels, "_workspaces", {})
    here = torch.device("cpu")
    space = sample_kernels.workspace(here, 4, 77)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert sample_kernels.workspace(here, 3, 77) is space
    with pytest.raises(AssertionError, match="reserve it before"):
        sample_kernels.workspace(here, 5, 77)
