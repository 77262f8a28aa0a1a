"""The embedded model, SmolLM2-135M in float32 on the CPU, at the bars of the correctness rows. [P-05, P-06, P-08, P-10]

transformers is the other side: it reads the same GGUF file with a reader of its own and computes with kernels of its own.
The texts are the beginnings of three novels whose authors have been dead for a century.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.nn.functional as F
import transformers
from served_model import ServerProcess
from torch import Tensor, nn

from ridgeline import LLM, RequestOutput, SamplingParams
from ridgeline.evaluate.perplexity import score_passages, summary
from ridgeline.evaluate.scoring import Scorer
from ridgeline.evaluate.texts import Passage
from ridgeline.quant.scheme import Unquantised
from ridgeline.runner import worker
from ridgeline.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.real_model, pytest.mark.timeout(900)]

NOVELS = {path.stem: path.read_text(encoding="utf-8") for path in sorted((Path(__file__).parents[1] / "texts").glob("*.txt"))}
# Nothing is rounded that transformers does not round: neither activations to 8 bits nor keys and values to 16.
EXACT: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_activations": "float32", "kv_cache_dtype": "float32"}
OPTIONS: dict[str, Any] = EXACT | {"max_model_len": 256, "kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 32}
ANSWER = 32
LONGEST_PROMPT = 128

# The bars.
LOGPROB_BAR = 1e-4                   # P-05: between any two ways to ask
LOGIT_BAR = 2e-3                     # P-06: between two float32 implementations
PERPLEXITY_BAR = 1e-3                # P-10: relative
WINDOW, WINDOWS = 512, 16            # P-10: 8,192 tokens of each text


@pytest.fixture(scope="module")
def tokenizer(embedded_model: Path) -> Tokenizer:
    return Tokenizer.load(embedded_model)


@pytest.fixture(scope="module")
def theirs(embedded_model: Path) -> Iterator[Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(embedded_model.parent), gguf_file=embedded_model.name, dtype=torch.float32
    )
    yield model.eval()


def their_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    assert logits.dtype == torch.float32
    return logits


def prompts(count: int) -> list[str]:
    """Beginnings of paragraphs of the three novels in turn, from a few words to some hundred characters."""
    paragraphs = {name: [each for each in text.split("\n\n") if len(each) > 60] for name, text in NOVELS.items()}
    made = []
    for number in range(count):
        which = list(paragraphs.values())[number % len(paragraphs)]
        made.append(which[number // len(paragraphs)][: 12 + (number * 37) % 400].strip())
    assert len(set(made)) == count
    return made


# -- P-05: however it is asked -----------------------------------------------------------------------------------------


@dataclass
class Answer:
    text: str
    tokens: list[int]
    logprobs: list[float]


def offline(output: RequestOutput) -> Answer:
    answer = output.outputs[0]
    assert answer.logprobs is not None
    chosen = [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True)]
    return Answer(answer.text, list(answer.token_ids), chosen)


def whole(url: str, body: dict[str, Any]) -> Answer:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return Answer(choice["text"], choice["token_ids"], choice["logprobs"]["token_logprobs"])


def streamed(url: str, body: dict[str, Any]) -> Answer:
    found = Answer("", [], [])
    with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=300) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        found.text += choice["text"]
        found.tokens += choice.get("token_ids") or []
        found.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
    assert len(lines) > 1, "nothing was streamed"
    return found


@pytest.mark.reliability("P-05b")
def test_streamed_whole_offline_and_batched_are_the_same(embedded_model: Path) -> None:
    """[P-05] 50 prompts, 32 tokens each: texts and ids exactly, log-probabilities within 1e-4."""
    asked = prompts(50)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, logprobs=1)
    llm = LLM(embedded_model, **OPTIONS)
    ways = {
        "alone": [offline(llm.generate(prompt, params, use_tqdm=False)[0]) for prompt in asked],
        "batched": [offline(output) for output in llm.generate(asked, params, use_tqdm=False)],
    }
    llm.close()
    body = {"temperature": 0, "max_tokens": ANSWER, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
    bodies = [body | {"prompt": prompt} for prompt in asked]
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    with ServerProcess(*settings) as server, ThreadPoolExecutor(16) as clients:
        ways["whole"] = list(clients.map(lambda each: whole(server.url, each), bodies))
        ways["streamed"] = list(clients.map(lambda each: streamed(server.url, each), bodies))
    furthest = 0.0
    for way, answers in ways.items():
        for prompt, answer, first in zip(asked, answers, ways["alone"], strict=True):
            assert (answer.text, answer.tokens) == (first.text, first.tokens), (way, prompt)
            assert len(answer.tokens) == len(answer.logprobs) == ANSWER, (way, prompt)
            furthest = max(furthest, *(abs(a - b) for a, b in zip(answer.logprobs, first.logprobs, strict=True)))
    print(f"log-probabilities differ by {furthest:.1e} at most")
    assert furthest <= LOGPROB_BAR


# -- P-06: against transformers ----------------------------------------------------------------------------------------


class Compared:
    """Takes our logits as the engine computes them; remembers the furthest from theirs."""

    def __init__(self, expected: list[Tensor]) -> None:
        self.expected = expected
        self.seen = [0] * len(expected)
        self.furthest = 0.0

    def take(self, place: int, start: int, logits: Tensor) -> None:
        expected = self.expected[place][start : start + len(logits)]
        self.furthest = max(self.furthest, float((logits.float() - expected).abs().max()))
        self.seen[place] += len(logits)


@pytest.mark.reliability("P-06b")
def test_logits_and_greedy_tokens_are_those_of_transformers(
    embedded_model: Path, theirs: Any, tokenizer: Tokenizer
) -> None:
    """[P-06] 20 prompts of up to 128 tokens and 32 tokens of answer to each, through prompts and through decode steps.

    A token that transformers finds likeliest behind the prompt and our answer so far is the one it would have said: that
    holds for the first token, and with it for each after it.
    """
    encoded = [tokenizer.encode(prompt)[:LONGEST_PROMPT] for prompt in prompts(20)]
    encoded[0] = tokenizer.encode(NOVELS["moby-dick"])[:LONGEST_PROMPT]
    llm = LLM(embedded_model, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in encoded], params, use_tqdm=False)
    llm.close()
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    sequences = [prompt + answer for prompt, answer in zip(encoded, answers, strict=True)]
    expected = [their_logits(theirs, sequence) for sequence in sequences]
    for prompt, answer, logits in zip(encoded, answers, expected, strict=True):
        assert len(answer) == ANSWER
        assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == answer

    furthest = {}
    for way, options in {"prompts": {}, "decode steps": {"max_num_batched_tokens": 1}}.items():
        scorer = Scorer({"model": str(embedded_model)} | EXACT | options, 160, show=False)
        compared = Compared(expected)
        scorer.score(sequences, compared.take)
        scorer.close()
        assert compared.seen == [len(sequence) - 1 for sequence in sequences]
        furthest[way] = compared.furthest
    print(f"furthest logits: {furthest}")
    assert max(furthest.values()) <= LOGIT_BAR


# -- P-08: whatever else is in the batch -------------------------------------------------------------------------------


class TilesOfRows(Unquantised):
    """Products of eight rows at a time, filled up with zeros, so that a library sees one shape whatever the batch: on a GPU
    deterministic mode has a kernel that sums in one order; a CPU's library chooses the order by the number of rows."""

    ROWS = 8

    def apply(self, linear: nn.Module, x: Tensor, batch: object) -> Tensor:
        filled = F.pad(x, (0, 0, 0, -len(x) % self.ROWS))
        tiles = [F.linear(tile, linear.weight, linear.bias) for tile in filled.split(self.ROWS)]
        return torch.cat(tiles)[: len(x)]


def needle_in_batches(llm: LLM) -> tuple[bool, float]:
    """Whether the needle's tokens are the same alone and in batches of 2 to 32, and the furthest of its log-probabilities."""
    first, *others = [prompt[:60] for prompt in prompts(32)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    alone = offline(llm.generate(first, params, use_tqdm=False)[0])
    same, furthest = True, 0.0
    for size in range(2, 33):
        place = random.Random(size).randrange(size)
        batch = [*others[: size - 1][:place], first, *others[: size - 1][place:]]
        assert len(batch) == size
        found = offline(llm.generate(batch, params, use_tqdm=False)[place])
        same &= found.tokens == alone.tokens
        furthest = max(furthest, *(abs(a - b) for a, b in zip(found.logprobs, alone.logprobs, strict=True)))
    return same, furthest


INVARIANT = OPTIONS | {"enable_prefix_caching": False, "max_num_batched_tokens": 8192, "deterministic": True}


@pytest.mark.reliability("P-08b")
def test_a_needle_in_batches_of_2_to_32_is_bitwise_the_same(embedded_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """[P-08] With products that do not depend on the number of rows nothing else of a step does."""
    monkeypatch.setattr(worker, "plain_scheme", lambda *_: TilesOfRows())
    llm = LLM(embedded_model, **INVARIANT)
    same, furthest = needle_in_batches(llm)
    llm.close()
    assert same and furthest == 0.0, furthest


@pytest.mark.reliability("P-08c")
def test_a_needle_in_batches_says_the_same_with_the_libraries_products(embedded_model: Path) -> None:
    """[P-08] As a CPU serves: a library sums in another order for more rows, which shows in the last bits alone."""
    llm = LLM(embedded_model, **INVARIANT)
    same, furthest = needle_in_batches(llm)
    llm.close()
    print(f"log-probabilities differ by {furthest:.1e} at most")
    assert same and furthest <= LOGPROB_BAR


# -- P-10: perplexity --------------------------------------------------------------------------------------------------


def windows(name: str, tokenizer: Tokenizer) -> list[Passage]:
    """The first 8,192 tokens of a text, in windows without overlap."""
    tokens = tokenizer.encode(NOVELS[name], add_special_tokens=False, parse_special=False)[: WINDOW * WINDOWS]
    assert len(tokens) == WINDOW * WINDOWS, f"{name} is too short"
    return [Passage(name, place, tokens[place * WINDOW : (place + 1) * WINDOW], 1) for place in range(WINDOWS)]


@pytest.mark.reliability("P-10")
@pytest.mark.parametrize("name", ["moby-dick", "pride-and-prejudice", "sherlock-holmes"])
def test_perplexity_is_that_of_transformers(name: str, embedded_model: Path, theirs: Any, tokenizer: Tokenizer) -> None:
    """[P-10] Within 0.1 %, through the scheduler, the paged KV cache and the kernels that serve."""
    asked = windows(name, tokenizer)
    scorer = Scorer({"model": str(embedded_model)} | EXACT, WINDOW, show=False)
    scores = score_passages(scorer, asked)
    ours = summary(asked, scores.logprobs, tokenizer)["perplexity"]
    scorer.close()
    total = 0.0
    for passage in asked:
        logits, targets = their_logits(theirs, passage.tokens)[:-1], torch.tensor(passage.tokens[1:])
        total += float(F.cross_entropy(logits.double(), targets, reduction="sum"))
    expected = math.exp(total / (WINDOWS * (WINDOW - 1)))
    print(f"{name}: {ours:.6f}, transformers {expected:.6f}, {ours / expected - 1:+.1e}")
    assert abs(ours / expected - 1) <= PERPLEXITY_BAR
