"""Speed of speculation on real text against the same engine without: copied code, a predicted edit, a JSON schema, free text.

    python benchmarks/studies/speculation/real_text.py > real_text.json                        # the embedded model
    python benchmarks/studies/speculation/real_text.py --model DIRECTORY --requests 1 32

Blocks with and without drafts alternate in one process; a case's figure is the median of the ratios of neighbours. `equal`: the
share of tokens that are the same on and off, 1.0 where rounding does not depend on the number of rows. Run it on a quiet machine,
or on a busy one with `--cpu-time`: the processor time of this process, which is what a CPU engine's steps take.

The proposer `suffix` is left out: every block asks for the same answers, which it would know from the block before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from ridgeline import LLM, SamplingParams
from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.record import record, write
from ridgeline.sampling_params import StructuredOutputs
from ridgeline.scheduler.drafts.controller import Controller

CLOCK = time.perf_counter
CODE = '''class Account:
    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("the balance is too small")
        self.balance -= amount
        return self.balance
'''
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["identifier", "description", "category", "available"],
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 99999}, "description": {"type": "string", "maxLength": 40},
        "category": {"enum": ["electronics", "furniture", "clothing"]}, "available": {"type": "boolean"},
    },
}
COPY = f"Here is a file:\n\n```python\n{CODE}```\n\nThe same file again, copied word for word:\n\n```python\n"
EDIT = f"Here is a file:\n\n```python\n{CODE}```\n\nThe same file with Account renamed to Wallet:\n\n```python\n"


def cases(tokens: int) -> dict[str, tuple[str, SamplingParams]]:
    def params(**more: Any) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, **more)

    schema = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    return {
        "copied code": (COPY, params()),
        "edit with prediction": (EDIT, params(prediction=CODE.replace("Account", "Wallet"))),
        "JSON schema": ("A product as JSON:\n", params(structured_outputs=schema)),
        "free text": ("Once upon a time", params()),
    }


def seconds(llm: LLM, prompt: str, params: SamplingParams, requests: int, on: bool) -> tuple[float, list[list[int]]]:
    llm.core.scheduler.drafter.active = on
    began = CLOCK()
    outputs = llm.generate([prompt] * requests, params, use_tqdm=False)
    return CLOCK() - began, [output.outputs[0].token_ids for output in outputs]


def measure(llm: LLM, prompt: str, params: SamplingParams, requests: int, pairs: int) -> dict[str, Any]:
    ratios, same, tokens = [], 0, 0
    seconds(llm, prompt, params, requests, True)         # kernels and grammars are compiled, step times known
    seconds(llm, prompt, params, requests, False)
    drafter = llm.core.scheduler.drafter
    assert isinstance(drafter, Controller)
    before = drafter.counters.draft_tokens, drafter.counters.accepted_tokens
    for number in range(pairs):
        order = (False, True) if number % 2 else (True, False)
        took = {on: seconds(llm, prompt, params, requests, on) for on in order}
        ratios.append(took[False][0] / took[True][0])
        for off, on in zip(took[False][1], took[True][1], strict=True):
            same += sum(one == other for one, other in zip(off, on, strict=False))
            tokens += len(off)
    drafted, accepted = drafter.counters.draft_tokens - before[0], drafter.counters.accepted_tokens - before[1]
    return {
        "requests": requests, "speed": statistics.median(ratios), "ratios": ratios, "equal": same / tokens,
        "drafts": drafted, "accepted": accepted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--requests", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--speculative-config", default='{"method": ["grammar", "prediction", "ngram"]}')
    parser.add_argument("--cpu-time", action="store_true", help="processor time in the place of the clock")
    parser.add_argument("--cases", nargs="+", help="names of cases; default: all")
    parser.add_argument("--out", help="the record")
    args = parser.parse_args()
    if args.cpu_time:
        global CLOCK
        CLOCK = time.process_time
    llm = LLM(args.model, speculative_config=args.speculative_config, max_model_len=2048, use_tqdm_on_load=False)
    rows = [
        {"case": name} | measure(llm, prompt, params, requests, args.pairs)
        for name, (prompt, params) in cases(args.tokens).items() for requests in args.requests
        if not args.cases or name in args.cases
    ]
    print(json.dumps({"model": str(args.model or "embedded"), "options": vars(args), "cases": rows}, indent=2))
    if args.out:
        command = " ".join(word for word in sys.argv if word not in ("--out", args.out))
        workload = {"command": command, "model": str(args.model or "embedded")}
        write(record("speculation-real-text", workload, {"cases": rows}, gpu=gpu_facts() or None), Path(args.out))
    llm.close()


if __name__ == "__main__":
    main()
