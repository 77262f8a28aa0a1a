"""`ridgeline bench grammar`: what structured output costs.

Masks alone: matchers follow a JSON text through the model's vocabulary, and every mask is timed, for several numbers of
rows. The engine: the same requests with and without a grammar, equally long, in turn.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from ridgeline.bench.record import finish, percentiles, record
from ridgeline.engine.core import grammar_vocabulary
from ridgeline.engine.llm import LLM
from ridgeline.grammar.compiler import compile_grammar, make_tokenizer
from ridgeline.grammar.matcher import Masks, Matcher
from ridgeline.sampling_params import SamplingParams, StructuredOutputs

# So many items that no answer gets to the end: constrained and free answers are equally long.
ITEM = {
    "type": "object", "additionalProperties": False, "required": ["id", "name", "price", "tags"],
    "properties": {
        "id": {"type": "integer"}, "name": {"type": "string"}, "price": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["new", "used", "rare"]}}, "note": {"type": "string", "maxLength": 80},
    },
}  # fmt: skip
ASKED = StructuredOutputs(json={"type": "array", "items": ITEM, "minItems": 1000})
TEXT = '[{"id": 17, "name": "A chair of oak", "price": 24.5, "tags": ["used", "rare"], "note": "one leg is short"}, {"id"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="", help="HF directory or .gguf file; default: the embedded model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128], help="numbers of rows whose masks are filled")
    parser.add_argument("--requests", type=int, default=8, help="requests that run at once; 0: masks only")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    parser.add_argument("--out", help="also write the record to this file")


def run(args: argparse.Namespace) -> None:
    llm = LLM(args.model or None, load_format=args.load_format, max_num_seqs=max(1, args.requests), max_model_len=1024)
    figures: dict[str, Any] = {"masks": masks_alone(llm, args.rows)}
    for rows, times in figures["masks"].items():
        print(f"{rows:>4} rows: {times['us_per_row']['median']:.0f} µs a mask, p90 {times['us_per_row']['p90']:.0f}", flush=True)
    if args.requests:
        figures["engine"] = engine = in_the_engine(llm, args.requests, args.tokens, args.repeats)
        print(
            f"{args.requests} requests: {engine['free_tok_s']['median']:.0f} tok/s, with a grammar "
            f"{engine['constrained_tok_s']['median']:.0f} ({engine['cost']:+.1%}), {engine['us_per_mask']:.0f} µs a mask"
        )
    llm.close()
    setting = {"rows": args.rows, "requests": args.requests, "tokens": args.tokens, "model": llm.core.config.model_path.name}
    finish(record("grammar", setting, figures), args.out)


def masks_alone(llm: LLM, numbers: list[int]) -> dict[str, Any]:
    """Microseconds per row of each step of TEXT. Rows are at different places of it, as they would be."""
    vocabulary = grammar_vocabulary(llm.core.config)
    compiled = compile_grammar(make_tokenizer(vocabulary), ASKED)
    tokens = llm.get_tokenizer().encode(TEXT, add_special_tokens=False)
    params = SamplingParams(structured_outputs=ASKED)
    figures: dict[str, Any] = {}
    for rows in numbers:
        matchers = [Matcher(compiled, params, vocabulary.end_ids) for _ in range(rows)]
        masks = Masks(len(vocabulary.pieces))
        per_row = []
        for step in range(len(tokens)):
            started = time.perf_counter()
            masks.fill(list(enumerate(matchers)), rows)
            for row, matcher in enumerate(matchers):
                if step >= row % 8:                      # the others begin later
                    matcher.accept(tokens[step - row % 8])
            per_row.append((time.perf_counter() - started) * 1e6 / rows)
        figures[str(rows)] = {"us_per_row": percentiles(per_row)}
    return figures


def in_the_engine(llm: LLM, requests: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Output tokens per second of the same requests, free and constrained, and what the grammar costs."""
    rates: dict[str, list[float]] = {"free": [], "constrained": []}
    for repeat in range(-1, repeats):                    # the first is warm-up
        for name, asked in (("free", None), ("constrained", ASKED)):
            params = SamplingParams(
                temperature=1.0, seed=repeat, max_tokens=tokens, ignore_eos=True, structured_outputs=asked
            )
            started = time.perf_counter()
            outputs = llm.generate([f"List number {n}: " for n in range(requests)], params, use_tqdm=False)
            produced = sum(len(output.outputs[0].token_ids) for output in outputs)
            if repeat >= 0:
                rates[name].append(produced / (time.perf_counter() - started))
    masks = llm.core.grammars.masks
    figures: dict[str, Any] = {f"{name}_tok_s": percentiles(values) for name, values in rates.items()}
    figures["cost"] = figures["free_tok_s"]["median"] / figures["constrained_tok_s"]["median"] - 1
    figures["us_per_mask"] = 1e6 * masks.seconds / max(1, masks.filled)
    return figures
