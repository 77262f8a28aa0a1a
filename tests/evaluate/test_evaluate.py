"""`ridgeline eval`: perplexity, divergence, slices, needles and multiple choice, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from served_model import write_model
from tiny_models import save_checkpoint, teacher_forced_logits

from ridgeline.__main__ import main
from ridgeline.bench.workload.bench_engine import quality_of
from ridgeline.config import EngineConfig
from ridgeline.engine.core.executor import LocalExecutor
from ridgeline.errors import ConfigError
from ridgeline.evaluate import choices, divergence, needle, perplexity, rounded_inputs, texts
from ridgeline.evaluate.eval_report import _slices
from ridgeline.evaluate.evaluation import evaluate
from ridgeline.evaluate.quality_gate import judge, parse_gate
from ridgeline.evaluate.reference import ReferenceFile, write_reference
from ridgeline.evaluate.scoring import Scorer, Take, Tick
from ridgeline.evaluate.slices import SLICES
from ridgeline.evaluate.task import Task, slice_texts
from ridgeline.evaluate.texts import Passage, default_text, passages
from ridgeline.ops import registry
from ridgeline.quant.format import Activation
from ridgeline.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.load(model)


def options(model: Path, **more: object) -> dict[str, object]:
    return {"model": str(model), "load_format": "dummy", "dtype": "float64", "device": "cpu"} | more


class Given:
    """Scores with logits that a test wrote down, cut wherever it likes."""

    def __init__(self, logits: dict[tuple[int, ...], list[list[float]]], cut: int = 100) -> None:
        self.vocab_size = len(next(iter(logits.values()))[0])
        self._logits, self._cut = logits, cut

    def score(self, sequences: Sequence[Sequence[int]], take: Take, tick: Tick | None = None) -> None:
        for place, sequence in enumerate(sequences):
            rows = torch.tensor(self._logits[tuple(sequence)], dtype=torch.float64)
            for start in range(0, len(rows), self._cut):
                take(place, start, rows[start : start + self._cut])


def log(*values: float) -> list[float]:
    return [math.log(value) for value in values]


SEQUENCE = (0, 1, 2)
REFERENCE = Given({SEQUENCE: [log(0.5, 0.25, 0.25), log(0.2, 0.2, 0.6)]})
MODEL = Given({SEQUENCE: [log(0.25, 0.5, 0.25), log(0.2, 0.2, 0.6)]}, cut=1)
BY_HAND = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)       # of the first position; the second is 0


# ── scoring ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("step_tokens", [512, 7, 1])
def test_every_position_has_the_logits_of_the_decoder(model: Path, step_tokens: int) -> None:
    """Batched, cut into chunks or token by token: what is handed out is what the bare decoder computes."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 256, count).tolist() for count in (30, 2, 17)]
    sequences.append(sequences[0])                       # asked twice
    scorer = Scorer(options(model, max_num_batched_tokens=step_tokens), 30, show=False)
    found = [torch.full((len(each) - 1, scorer.vocab_size), torch.nan, dtype=torch.float64) for each in sequences]

    def take(place: int, start: int, logits: torch.Tensor) -> None:
        found[place][start : start + len(logits)] = logits

    scorer.score(sequences, take)
    executor = scorer.core.executor
    assert isinstance(executor, LocalExecutor)
    for sequence, logits in zip(sequences, found, strict=True):
        expected = teacher_forced_logits(executor.runner.model, sequence, len(sequence))[:-1]
        torch.testing.assert_close(logits, expected)
    scorer.close()


def test_sequences_that_do_not_fit_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len of 32 they have at most 31"):
        Scorer(options(model, max_model_len=32), 40, show=False)
    with pytest.raises(ConfigError, match="tensor_parallel_size 1"):
        Scorer(options(model, tensor_parallel_size=2), 40, show=False)


def test_recorded_steps_do_not_replay_inputs_that_were_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint("mistral", tmp_path, tie_word_embeddings=False)
    given = {"model": str(path), "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    scorer = Scorer(given, 40, show=False)
    executor = scorer.core.executor
    assert isinstance(executor, LocalExecutor)
    runner = executor.runner
    scorer.generate([[5, 6, 7]], 9, ignore_eos=True)
    recorded = runner.forward.replays
    assert recorded > 3
    rounds: list[int] = []
    monkeypatch.setattr(rounded_inputs, "rounded", lambda x, activation: rounds.append(len(x)) or x)
    assert scorer.round_inputs({"layers.0.mlp.down": Activation("int8")}) == 1
    scorer.generate([[5, 6, 7]], 9, ignore_eos=True)
    assert rounds == [3] + [1] * 8                       # the prompt, and every token of the answer but the last
    scorer.close()


# ── perplexity ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_perplexity_by_hand(tokenizer: Tokenizer) -> None:
    asked = [Passage("s", 0, list(SEQUENCE), 1)]
    scores = perplexity.score_passages(REFERENCE, asked)
    np.testing.assert_allclose(scores.logprobs[0], log(0.25, 0.6))
    assert scores.best[0].tolist() == [0, 2]
    found = perplexity.summary(asked, scores.logprobs, tokenizer)
    assert found["perplexity"] == pytest.approx((0.25 * 0.6) ** -0.5)
    assert found["bits_per_byte"] == pytest.approx(-math.log2(0.25 * 0.6) / 2)       # a byte for each token
    assert found["tokens"] == 2 and found["perplexity_error"] is None


def test_the_error_of_a_perplexity_is_that_of_the_passages_means(tokenizer: Tokenizer) -> None:
    asked = [Passage("s", number, list(SEQUENCE), 1) for number in range(3)]
    losses = [1.0, 2.0, 6.0]
    found = perplexity.summary(asked, [np.full(2, -loss) for loss in losses], tokenizer)
    assert found["perplexity_error"] == pytest.approx(math.exp(3) * statistics.stdev(losses) / math.sqrt(3))
    broken = perplexity.summary(asked, [np.full(2, -loss) for loss in (1.0, 2.0, 1e4)], tokenizer)
    assert broken["perplexity"] == math.inf


def test_tokens_that_are_only_read_do_not_count(tokenizer: Tokenizer) -> None:
    asked = [Passage("s", 0, list(SEQUENCE), 2)]
    scores = perplexity.score_passages(REFERENCE, asked)
    assert perplexity.summary(asked, scores.logprobs, tokenizer)["perplexity"] == pytest.approx(1 / 0.6)


def test_passages_cover_the_text_and_follow_the_seed(tokenizer: Tokenizer) -> None:
    text = "".join(chr(97 + place % 26) for place in range(1000))
    every = passages("t", text, tokenizer, context=100, overlap=20, tokens=10**6, seed=0)
    counted = [token for passage in every for token in passage.tokens[20:]]
    assert counted == tokenizer.encode(text)[20:]        # each token once, with 20 before it
    few = [passages("t", text, tokenizer, context=50, overlap=0, tokens=200, seed=seed) for seed in (1, 1, 2)]
    assert few[0] == few[1] != few[2]
    assert sum(len(passage.tokens) for passage in few[0]) == 200
    with pytest.raises(ConfigError, match="leaves nothing to judge"):
        passages("t", text, tokenizer, context=10, overlap=10, tokens=5, seed=0)


# ── divergence ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_divergence_by_hand() -> None:
    found = divergence.compare(REFERENCE, MODEL, [SEQUENCE])
    np.testing.assert_allclose(found.kl[0], [BY_HAND, 0.0], atol=1e-15)
    assert found.agree(0).tolist() == [False, True]
    summary = divergence.summary([Passage("s", 0, list(SEQUENCE), 1)], found, [0])
    assert summary["kl"] == pytest.approx(BY_HAND / 2)
    assert summary["top1"] == 0.5
    assert summary["perplexity_ratio"] == pytest.approx(math.sqrt(0.25 / 0.5))
    assert summary["perplexity_ratio_error"] == pytest.approx(math.sqrt(0.25 / 0.5) * math.log(2) / 2)  # ln 2 and 0


def test_divergence_agrees_with_torch_and_ignores_what_the_reference_rules_out() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, 300, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(divergence.kl_divergence(p, q), expected)
    ruled_out = torch.tensor([[0.0, -math.inf]])
    assert divergence.kl_divergence(ruled_out, torch.tensor([log(0.5, 0.5)])).item() == pytest.approx(math.log(2))


def test_divergence_by_position_and_the_worst_tenth(tokenizer: Tokenizer) -> None:
    tokens = [[place] * 6 for place in range(11)]
    asked = [Passage("s", place, each, 1) for place, each in enumerate(tokens)]
    found = divergence.Divergence(tokens)
    for place in range(11):
        found.kl[place][:] = [place, 1, 1, 2, 2]
        found.reference.best[place][:] = 1
        found.model.best[place][:] = [1, 1, 0, 1, 1]
    rows = divergence.by_position(asked, found)
    assert [(row["from"], row["to"], row["tokens"]) for row in rows] == [(1, 1, 11), (2, 3, 22), (4, 7, 22)]
    assert [row["kl"] for row in rows] == [5.0, 1.0, 2.0]
    assert [row["top1"] for row in rows] == [1.0, 0.5, 1.0]
    worst = divergence.worst_decile(asked, found, tokenizer)
    assert [row["number"] for row in worst["passages"]] == [10, 9]
    assert worst["kl"] == pytest.approx((16 / 5 + 15 / 5) / 2)


def test_vocabularies_must_be_the_same() -> None:
    with pytest.raises(ConfigError, match="vocabulary"):
        divergence.compare(REFERENCE, Given({SEQUENCE: [[0.0] * 4] * 2}), [SEQUENCE])


def test_groups_are_small_and_nothing_is_lost(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group holds one sequence; the two engines cut theirs in different places."""
    monkeypatch.setattr(divergence, "KEPT_BYTES", 1)
    sequences = [list(range(start, start + 40)) for start in range(3)]
    reference = Scorer(options(model, max_num_batched_tokens=9), 40, show=False)
    other = Scorer(options(model, max_num_batched_tokens=16, seed=5), 40, show=False)
    found = divergence.compare(reference, other, sequences)
    assert all((kl > 0).all() for kl in found.kl)
    same = divergence.compare(reference, reference, sequences)
    assert all((kl == 0).all() for kl in same.kl)
    reference.close()
    other.close()


def test_each_of_two_engines_computes_with_its_own_kernels(model: Path) -> None:
    """The choice of kernels belongs to the process: a reference by definition must not turn the model into one."""
    seen: dict[str, set[str]] = {"reference": set(), "auto": set()}
    engines = {name: Scorer(options(model, kernels=name), 20, show=False) for name in ("auto", "reference")}
    for name in ("reference", "auto", "reference"):
        engines[name].score([[1, 2, 3, 4]], lambda *_, name=name: seen[name].add(registry._kernels))
    assert seen == {"reference": {"reference"}, "auto": {"auto"}}
    for engine in engines.values():
        engine.close()
    assert registry._kernels == "auto"


def test_a_reference_file_gives_the_same_figures(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "reference"
    write_reference(path, REFERENCE, [SEQUENCE], "by hand")
    file = ReferenceFile(path)
    found = divergence.compare(file, MODEL, [SEQUENCE])
    np.testing.assert_allclose(found.kl[0], [BY_HAND, 0.0], atol=1e-7)
    assert file.name == "by hand"
    with pytest.raises(ConfigError, match="other tokens"):
        file.score([(2, 1, 0)], lambda *_: None)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="write it again"):
        ReferenceFile(path)


# ── slices, needle, choices ──────────────────────────────────────────────────────────────────────────────────────────


def test_slices_are_there_and_follow_the_seed() -> None:
    assert list(SLICES) == ["prose", "code", "mathematics", "multilingual", "extraction"]
    for name, make in SLICES.items():
        assert make(0) == make(0) and len(make(0)) > 3000, name
    assert SLICES["extraction"](0) != SLICES["extraction"](1)
    for block in SLICES["extraction"](3).split("\n\n"):
        note, facts = block.split("\nJSON: ")
        assert all(str(value) in note for value in json.loads(facts).values())
    assert len(default_text()) > 300_000
    with pytest.raises(ConfigError, match="no slice 'poems'"):
        slice_texts(Task(slices=("poems",)))


def test_a_needle_lies_where_it_should(tokenizer: Tokenizer) -> None:
    made = needle.trials(tokenizer, "x" * 2000, [300], 0, depths=(0.0, 0.5, 1.0), count=1)
    places = []
    for trial in made:
        text = tokenizer.decode(trial.prompt)
        assert len(trial.prompt) == 300 and text.endswith(" is")
        assert text.count(trial.number) == 1 and not any(other in text for other in trial.others)
        hay = text.partition("\n\nQuestion")[0]
        before, _, after = hay.partition("\nThe secret number")
        places.append(len(before) / (len(before) + after.count("x")))
    assert places == pytest.approx([0.0, 0.5, 1.0], abs=0.01)
    assert made == needle.trials(tokenizer, "x" * 2000, [300], 0, depths=(0.0, 0.5, 1.0), count=1)
    with pytest.raises(ConfigError, match="cannot be hidden in 20 tokens"):
        needle.trials(tokenizer, "x" * 2000, [20], 0)


def test_choices_by_hand(tokenizer: Tokenizer) -> None:
    """The endings are " b" and " cccc": the sum prefers the short one, per byte the long one is likelier."""
    question = texts.Question("a", ("b", "cccc"), 1)
    tokens = {ending: tuple(tokenizer.encode("a" + ending)) for ending in (" b", " cccc")}

    def rows(sequence: tuple[int, ...], chance: float) -> list[list[float]]:
        others = math.log((1 - chance) / 259)
        return [[math.log(chance) if token == target else others for token in range(260)] for target in sequence[1:]]

    scores = Given({tokens[" b"]: rows(tokens[" b"], 0.1), tokens[" cccc"]: rows(tokens[" cccc"], 0.3)})
    found = choices.run(scores, tokenizer, [question])
    assert found["picked"] == [0]                        # 0.1² against 0.3⁵
    assert found["accuracy"] == 0.0 and found["accuracy_by_byte"] == 1.0 and found["chance"] == 0.5


@pytest.mark.parametrize(("line", "words"), [
    ("{", "not JSON"), ('{"question": "a", "choices": ["b"], "answer": 0}', "two texts"),
    ('{"question": "a", "choices": ["b", "c"], "answer": 2}', "index from 0 to 1"),
])
def test_bad_questions_are_named_by_line(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "a", "choices": ["b", "c"], "answer": "c"}\n\n' + line)
    with pytest.raises(ConfigError, match=f"line 3.*{words}"):
        texts.read_questions(path)


# ── the whole, and the gate ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_gate_looks_at_the_worst_slice() -> None:
    result = {"slices": {"a": {"kl": 0.1, "top1": 0.9}, "b": {"kl": 0.2, "top1": 0.95}}}
    verdicts = judge(result, parse_gate("kl:0.15,top1:0.9"))
    assert [(each["worst"], each["passed"]) for each in verdicts] == [("b", False), ("a", True)]
    broken = {"slices": {"a": {"kl": 0.1}, "b": {"kl": math.nan}, "c": {"kl": 0.2}}}
    assert [(each["worst"], each["passed"]) for each in judge(broken, {"kl": 0.5})] == [("b", False)]
    with pytest.raises(ConfigError, match="not a gate"):
        parse_gate("kl")


TASK = Task(slices=("prose", "extraction"), context=48, tokens=90)


# On every commit the next test finds the same figures twice, and passages and slices follow the seed (above).
@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures(model: Path) -> None:
    runs = [
        evaluate(options(model, seed=seed), Task(slices=("extraction",), context=48, tokens=90, seed=seed), show=False)
        for seed in (0, 0, 1)
    ]
    assert runs[0] == runs[1]
    assert runs[0]["slices"] != runs[2]["slices"]


def test_a_model_against_itself_and_against_another(model: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "logits")
    alone = evaluate(options(model), TASK, save_reference=path, show=False)
    itself = evaluate(options(model), TASK, reference=str(model), reference_options={"dtype": "float64"}, show=False)
    assert itself["all"]["kl"] == 0.0 and itself["all"]["top1"] == 1.0
    assert itself["slices"]["prose"]["perplexity"] == alone["slices"]["prose"]["perplexity"]
    by_file = evaluate(options(model, seed=5), TASK, reference=path, show=False)
    assert by_file["all"]["kl"] > 0.01 and set(by_file["slices"]) == {"text", "prose", "extraction"}
    own = {"dtype": "float64", "seed": 0}
    beside = evaluate(options(model, seed=5), TASK, reference=str(model), reference_options=own, show=False)
    assert by_file["all"] == pytest.approx(beside["all"], rel=1e-5)      # the file holds float32


def test_the_command_prints_a_table_and_fails_at_the_gate(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"question": "One and one is", "choices": ["two", "three"], "answer": "two"}\n')
    words = ["eval", str(model), "--load-format", "dummy", "--dtype", "float32", "--slices", "prose", "--context", "40",
             "--tokens", "60", "--choices", str(questions), "--needle", "160"]
    assert main([*words, "--gate", "perplexity:1e9,choices:0"]) == 0
    printed = capsys.readouterr().out
    assert "prose" in printed and "needle:" in printed and "choices:" in printed and "passed" in printed
    assert main([*words, "--gate", "perplexity:1.5", "--json"]) == 3
    made = json.loads(capsys.readouterr().out)
    figures = made["figures"]
    assert made["workload"]["options"]["model"] == model.name            # no path of this machine
    assert figures["gate"][0]["passed"] is False and figures["needle"]["trials"] == 10
    assert main([*words, "--gate", "kl:0.1"]) == 2
    assert "needs --reference" in capsys.readouterr().err
    assert main([*words, "--slice-file", f"text={questions}"]) == 2
    assert "a name that is not taken" in capsys.readouterr().err


def test_texts_may_come_from_pipes(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They are checked before an engine starts, and a pipe can be read once."""
    question = '{"question": "One and one is", "choices": ["two", "three"], "answer": "two"}\n'
    ends = [_pipe(held) for held in ("One and one is two. " * 20, "Two and one is three. " * 20, question)]
    try:
        text, own, questions = (f"/dev/fd/{end}" for end in ends)
        assert main(["eval", str(model), "--load-format", "dummy", "--device", "cpu", "--slices", "none", "--context", "16",
                     "--tokens", "16", "--text", text, "--slice-file", f"own={own}", "--choices", questions, "--json"]) == 0
    finally:
        for end in ends:
            os.close(end)
    measured = json.loads(capfd.readouterr().out.splitlines()[-1])["figures"]
    assert set(measured["slices"]) == {"text", "own"} and measured["choices"]


def _pipe(held: str) -> int:
    read, write = os.pipe()
    os.write(write, held.encode())
    os.close(write)
    return read


def test_a_record_names_what_may_change_answers() -> None:
    assert quality_of(EngineConfig.of()) == "exact"
    assert quality_of(EngineConfig.of(kv_cache_dtype="fp8")) == "fp8 KV"


@pytest.mark.slow
@pytest.mark.real_model
def test_the_embedded_model_reads_english_and_finds_a_needle(embedded_model: Path) -> None:
    scorer = Scorer({"model": str(embedded_model)}, 140, show=False)
    tokenizer = scorer.tokenizer
    assert tokenizer is not None
    asked = passages("text", default_text(), tokenizer, context=128, overlap=0, tokens=120, seed=0)
    asked += [Passage("noise", 0, [(17 * place * place) % 49000 for place in range(64)], 1)]
    scores = perplexity.score_passages(scorer, asked)
    text, noise = (perplexity.summary([each], [found], tokenizer) for each, found in zip(asked, scores.logprobs, strict=True))
    assert 2 < text["perplexity"] < 100 < noise["perplexity"]
    made = needle.trials(tokenizer, default_text(), [120], 0, depths=(0.5,), count=2)
    assert needle.run(scorer, tokenizer, made)["picked"] == 1.0
    scorer.close()


def test_perplexities_of_any_size_have_their_column() -> None:
    found = {"tokens": 510, "perplexity": 5536128.957, "perplexity_error": 113775.8, "bits_per_byte": 22.4,
             "reference_perplexity": 5530042.741, "kl": 5e-4, "kl_p99": 9e-4, "top1": 0.9745}
    head, line = _slices({"slices": {"text": found}, "all": found, "reference": "x"})[:2]
    assert line.split() == ["text", "510", "5.536e+06", "1.1e+05", "22.400", "5.53e+06", "0.0005", "0.0009", "97.45%"]
    assert len(line) == len(head)
    assert "14.785" in _slices({"slices": {"text": found | {"perplexity": 14.7851}}})[1]
