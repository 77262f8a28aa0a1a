"""`ridgeline bench grammar`: measures the cost of structured output.

Masks alone: matchers follow a JSON text through the vocabulary, and every mask is timed, for several batch sizes. In the engine:
the same requests with and without a grammar, of equal length, in turn. Host time per step shows where the cost is: while the
host finishes before the device, masks are free and only sampling takes longer.

A model given by --shape has no tokenizer: its vocabulary is generated from parts of English words, numbers, punctuation and
multi-byte letters, one for each logit.
"""

from __future__ import annotations

import argparse
import itertools
import pydoc_data.topics
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.record import finish, percentiles, record
from ridgeline.bench.lab.sweep import parse_options
from ridgeline.bench.workload.bench_engine import Engine, quality_of
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.engine.core.core import EngineCore, grammar_vocabulary, make_grammars
from ridgeline.engine.core.grammars import COPIES_PER_THREAD, Compiled
from ridgeline.grammar.compiler import compile_grammar, make_backend
from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary, Pieces
from ridgeline.grammar.masks import Masks, num_threads
from ridgeline.process import embedded
from ridgeline.sampling_params import SamplingParams, StructuredOutputs

# More items than any answer reaches, so constrained and free answers are equally long. Values are short, because a model with
# random weights would never end a longer string.
ITEM = {
    "type": "object", "additionalProperties": False, "required": ["id", "name", "price", "tags"],
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99999}, "name": {"type": "string", "maxLength": 24},
        "price": {"type": "number", "minimum": 0, "maximum": 1000},
        "tags": {"type": "array", "items": {"enum": ["new", "used", "rare"]}, "maxItems": 3},
        "note": {"type": "string", "maxLength": 80},
    },
}
ASKED = StructuredOutputs(json={"type": "array", "items": ITEM, "minItems": 1000})
TEXT = '[{"id": 17, "name": "A chair of oak", "price": 24.5, "tags": ["used", "rare"], "note": "one leg is short"}, {"id"'
PROMPT = 64                          # tokens


def run(args: argparse.Namespace) -> None:
    options: dict[str, Any] = {"max_num_seqs": max(1, args.requests), "max_model_len": 1024}
    if args.shape:
        model, options = str(write_shape(args.shape, args.layers)), options | {"load_format": "dummy"}
    else:
        model = args.model or str(embedded.require())
    engine = Engine(model, **options | parse_options(args.set))
    vocabulary = made_up(engine.config.model.vocab_size) if args.shape else grammar_vocabulary(engine.config)
    engine.core.use_grammars(make_grammars(engine.config, vocabulary))
    figures: dict[str, Any] = {"masks": masks_alone(vocabulary, args.rows)}
    for rows, times in figures["masks"].items():
        print(f"{rows:>4} rows: {times['us_per_row']['median']:.0f} µs a mask, p90 {times['us_per_row']['p90']:.0f}", flush=True)
    if args.requests:
        figures["engine"] = {}
        for temperature in args.temperature:
            figures["engine"][f"temperature {temperature:g}"] = made = in_the_engine(
                engine, args.requests, args.tokens, args.repeats, temperature
            )
            print(line(args.requests, temperature, made), flush=True)
    setting = {
        "rows": args.rows, "requests": args.requests, "tokens": args.tokens, "prompt": PROMPT, "options": args.set,
        "model": args.shape or engine.config.model_path.name, "layers": args.layers, "ids": len(vocabulary.pieces),
        "vocabulary": "made up" if args.shape else "the model's",
    }
    quality = quality_of(engine.config)
    engine.close()
    finish(record("grammar", setting, figures, quality, gpu_facts() or None), args)


def line(requests: int, temperature: float, made: dict[str, Any]) -> str:
    free, constrained = made["free"], made["constrained"]

    def step(of: dict[str, Any]) -> str:
        parts = ("plan", "launch", "wait", "follow", "update", "mask", "sample", "masked")
        return ", ".join(f"{part} {of[f'{part}_ms']['median']:.2f}" for part in parts if f"{part}_ms" in of)

    return (
        f"{requests} requests at temperature {temperature:g}: {free['tok_s']['median']:.0f} tok/s, with a grammar "
        f"{constrained['tok_s']['median']:.0f} ({made['cost']:+.1%}); medians of a step's parts on the host, ms: "
        f"{step(free)}; with a grammar: {step(constrained)}"
    )


def made_up(vocab_size: int) -> GrammarVocabulary:
    """A vocabulary similar to a large model's: every byte, then the most frequent parts of words, numbers, and pairs of letters
    of two and three bytes."""
    words = Counter(re.findall(r" ?[A-Za-z_]+|[^A-Za-z0-9\s]+|\s+", "\n".join(pydoc_data.topics.topics.values())))
    parts: Counter[str] = Counter()
    for word, count in words.items():
        for start in range(len(word)):
            for end in range(start + 2, min(len(word), start + 14) + 1):
                parts[word[start:end]] += count
    common = [part for part, _ in parts.most_common()]
    letters = [chr(code) for block in (range(0x430, 0x450), range(0x4E00, 0x4F00)) for code in block]
    pieces = dict.fromkeys(bytes([byte]) for byte in range(256))
    numbers = (f"{number:0{digits}d}" for digits in (2, 3) for number in range(10**digits))
    pairs = (one + two for one, two in itertools.product(letters, letters))
    for text in itertools.chain(common, numbers, (part.capitalize() for part in common if part[0].islower()), pairs):
        pieces[text.encode()] = None
    ends = [b"<|end|>"]
    return GrammarVocabulary.of(
        [*list(pieces)[: vocab_size - 1], *ends], frozenset({vocab_size - 1}), frozenset({vocab_size - 1}), vocab_size
    )


def masks_alone(vocabulary: GrammarVocabulary, numbers: list[int]) -> dict[str, Any]:
    """Microseconds per row of each step of TEXT, with rows at different places in it."""
    tokenizer = make_backend("llguidance", vocabulary)
    compiled = Compiled(lambda: compile_grammar(tokenizer, ASKED), COPIES_PER_THREAD * num_threads())
    tokens = Pieces(vocabulary)(TEXT)
    params = SamplingParams(structured_outputs=ASKED, ignore_eos=True)
    figures: dict[str, Any] = {}
    for rows in numbers:
        matchers = [compiled.start(params, vocabulary.end_ids, tokenizer.spell) for _ in range(rows)]
        masks = Masks(len(vocabulary.pieces))
        per_row = []
        for step in range(len(tokens)):
            started = time.perf_counter()
            masks.fill(list(enumerate(matchers)), rows)
            for row, matcher in enumerate(matchers):
                if step >= row % 8:                      # the others begin later
                    matcher.accept(tokens[step - row % 8])
            per_row.append((time.perf_counter() - started) * 1e6 / rows)
        figures[str(rows)] = {"us_per_row": percentiles(per_row), "steps": len(tokens)}
    return figures


@contextmanager
def stopwatches(core: EngineCore) -> Iterator[dict[str, list[float]]]:
    """Times every call of the parts of a step on the host, inside the `with`."""
    spent: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, tuple[Any, str]] = {
        "plan": (core.scheduler, "schedule"), "launch": (core.executor, "submit"), "sample": (core.executor, "sample"),
        "wait": (core.executor, "collect"), "update": (core.scheduler, "update"), "step": (core, "step"),
    }
    if core.grammars.has_masks:
        parts["follow"] = (core.grammars.masks, "advance")
        parts["mask"] = (core.grammars.masks, "fill")
        parts["masked"] = (core, "sample_masked")        # waiting for masks, what of them is left to fill, and sampling

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*given)
            finally:
                spent[name].append(time.perf_counter() - started)

        return call

    methods = {name: getattr(owner, method) for name, (owner, method) in parts.items()}
    for name, (owner, method) in parts.items():
        setattr(owner, method, timed(name, methods[name]))
    try:
        yield spent
    finally:
        for name, (owner, method) in parts.items():
            setattr(owner, method, methods[name])


def in_the_engine(engine: Engine, requests: int, tokens: int, repeats: int, temperature: float) -> dict[str, Any]:
    """Output tokens per second of the same requests, free and constrained, and the grammar's cost."""
    core, vocab_size = engine.core, engine.config.model.vocab_size
    made: dict[str, Any] = {}
    rates: dict[str, list[float]] = {"free": [], "constrained": []}
    spent: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in rates}
    for repeat in range(-1, repeats):                    # the first is warm-up
        for name, asked in (("free", None), ("constrained", ASKED)):
            rng = random.Random(repeat)
            prompts = [([rng.randrange(vocab_size) for _ in range(PROMPT)], tokens) for _ in range(requests)]
            with stopwatches(core) as parts:
                result = engine.serve(prompts, temperature=temperature, seed=repeat, structured_outputs=asked)
            engine.settle()
            if repeat >= 0:
                rates[name].append(result.tokens / result.seconds)
                for part, seconds in parts.items():
                    spent[name][part] += [1e3 * each for each in seconds]
    for name, values in rates.items():
        # Percentiles, not means: the first step of a batch prefills, and one that captures a graph takes as long as all others.
        per_step = {f"{part}_ms": percentiles(times) for part, times in spent[name].items()}
        made[name] = {"tok_s": percentiles(values), "rates": [round(value) for value in values]} | per_step
    made["cost"] = made["free"]["tok_s"]["median"] / made["constrained"]["tok_s"]["median"] - 1
    made["us_per_mask"] = 1e6 * core.grammars.masks.seconds / max(1, core.grammars.masks.filled)
    return made
