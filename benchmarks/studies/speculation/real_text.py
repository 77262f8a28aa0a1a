"""Speed of speculation on real text against the same engine without: edits of code, a JSON schema, copied code, free text.

    python benchmarks/studies/speculation/real_text.py --out real_text.json                    # the embedded model
    python benchmarks/studies/speculation/real_text.py --model FILE.gguf --widen --requests 1 32 --seconds 150 --out FILE

| case | a request | proposer |
|---|---|---|
| edit, prediction | rename a name in a piece of this repository's code; `prediction` is the piece as it was | prediction |
| edit, suffix | the same; another edit of the same piece was answered before | suffix |
| JSON schema | four products as JSON; the same grammar on and off | grammar |
| copied code | a file again, word for word | ngram |
| free text | a story | all of these |
| draft model | a story, with `--draft-model` | draft_model |

Every request of a block is another one, and so is that of the next pair: a piece of code, a kind of product, the hero of a story.
Each case has one proposer and a controller that begins with nothing but the measured times of steps.

Answers with drafts do not end together. With several requests at a time `--rounds` times as many are asked, so that others follow
those that have ended, as in a server: else the figure is that of the slowest row, with the others long gone. `decode` is not
measured there.

Blocks with and without drafts alternate in one process. A case's figure is the median of the ratios of neighbours, in time for
each token, prompts included. `decode`: the same from the last row's first token on. `equal`: the share of tokens that are the
same on and off, 1.0 where rounding does not depend on the number of rows. `first_token`: the mean time to the first token of an
answer, waiting included, on against off. `cached`: prompt tokens found in the prefix cache, which is emptied before each block.
Run it on a quiet machine, or on a busy one with `--cpu-time`: the processor time of this process, which is what a CPU engine's
steps take.

`--widen` writes a GGUF file as a directory with bfloat16 weights first, and runs that. The file itself may then be the draft
model: it has the same tokens, and shows that the path works, not that it pays.

It ends within `--seconds`: a case that would not end in time has fewer pairs, and none if there is no time for one. The record is
written after each case. `block_parts.py` runs the same and says where the time of each block went.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import json
import keyword
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ridgeline import LLM, SamplingParams
from ridgeline.bench.lab.device_log import gpu_facts
from ridgeline.bench.lab.record import PACKAGE, command, record, write
from ridgeline.draft_options import DRAFT_MODEL, draft_options
from ridgeline.engine.client.outputs import RequestOutput
from ridgeline.engine.core.drafters import MAKE
from ridgeline.messages import TokenDeltas
from ridgeline.ops.cpu import native
from ridgeline.quantize.hf_files import write_small_files
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.sampling_params import StructuredOutputs
from ridgeline.scheduler.drafts.controller import Controller
from ridgeline.scheduler.drafts.offer import Proposer
from ridgeline.scheduler.drafts.suffix import Suffix
from ridgeline.scheduler.policy import ContinuousBatching
from ridgeline.scheduler.sequence import Sequence

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
PRODUCT = {
    "type": "object", "additionalProperties": False, "required": ["identifier", "description", "category", "available"],
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 99999}, "description": {"type": "string", "maxLength": 40},
        "category": {"enum": ["electronics", "furniture", "clothing"]}, "available": {"type": "boolean"},
    },
}
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["products"],
    "properties": {"products": {"type": "array", "minItems": 4, "maxItems": 4, "items": PRODUCT}},
}
KINDS = ("tables", "coats", "phones", "chairs", "shirts", "lamps", "radios", "shelves")
HEROES = ("a fox", "a miller", "an old sailor", "a clockmaker", "two sisters", "a young queen", "a robot", "a beekeeper")
LINES = (16, 32)                     # of a piece of code
NEW_NAME = "renamed_value"
WARM = 8                             # requests that are kept apart, for what runs before the first pair


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, and another one that was answered earlier, where there is one."""

    content: str                     # of a user's message, or …
    params: SamplingParams
    earlier: str = ""
    plain: bool = False              # … the beginning of a text


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    proposers: tuple[str, ...]
    ask: Callable[[int], Ask]        # the n-th request


class Earlier(Suffix):
    """It learns from the requests before a pair only: a pair asks for the same answers twice, and it would know the second."""

    learning = False

    def ended(self, sequence: Sequence) -> None:
        if self.learning:
            super().ended(sequence)


def pieces() -> list[tuple[str, str]]:
    """Functions and classes of this repository, and in each a name that occurs often."""
    return [found for path in sorted(PACKAGE.rglob("*.py")) for found in _pieces(path.read_text())]


def _pieces(source: str) -> Iterator[tuple[str, str]]:
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and LINES[0] <= (node.end_lineno or 0) - node.lineno < LINES[1]:
            names = Counter(each.id for each in ast.walk(node) if isinstance(each, ast.Name))
            own = [name for name, count in names.most_common() if count >= 3 and len(name) > 3
                   and not keyword.iskeyword(name) and not hasattr(builtins, name)]
            if own:
                yield "\n".join(lines[node.lineno - 1 : node.end_lineno]), own[0]


def cases(tokens: int, draft_model: bool) -> list[Case]:
    def params(**more: Any) -> SamplingParams:
        return SamplingParams(temperature=0, **{"max_tokens": tokens} | more)

    code = pieces()

    def edit(number: int, prediction: bool) -> Ask:
        text, name = code[number * 7919 % len(code)]     # neighbours are of different files
        shown = f"```python\n{text}\n```\n\nAnswer with the whole code only."
        more = {"prediction": f"```python\n{text}\n```"} if prediction else {}
        return Ask(
            f"Rename `{name}` to `{NEW_NAME}` everywhere in this code:\n\n{shown}", params(max_tokens=2 * tokens, **more),
            f"Add the comment `# checked` above the last line of this code:\n\n{shown}",
        )

    def products(number: int) -> Ask:
        schema = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
        kind = KINDS[number % len(KINDS)]
        return Ask(f"Four {kind} of shop {number} as JSON.", params(max_tokens=2 * tokens, structured_outputs=schema))

    def copied(number: int) -> Ask:
        file = CODE.replace("Account", f"Account{number}")
        text = f"Here is a file:\n\n```python\n{file}```\n\nThe same file again, copied word for word:\n\n```python\n"
        return Ask(text, params(ignore_eos=True), plain=True)

    def story(number: int) -> Ask:
        text = f"Chapter {1 + number // len(HEROES)}. Once upon a time {HEROES[number % len(HEROES)]}"
        return Ask(text, params(ignore_eos=True), plain=True)

    listed = [
        Case("edit, prediction", ("prediction",), lambda number: edit(number, True)),
        Case("edit, suffix", ("suffix",), lambda number: edit(number, False)),
        Case("JSON schema", ("grammar",), products),
        Case("copied code", ("ngram",), copied),
        Case("free text", ("grammar", "prediction", "ngram", "suffix"), story),
    ]
    return [*listed, Case("draft model", (DRAFT_MODEL,), story)] if draft_model else listed


@dataclass(slots=True)
class Block:
    """What the requests of one block came to."""

    each: float                      # seconds for each token …
    decode: float                    # … and behind the first token of every row
    first: float                     # mean seconds to the first token
    answers: list[list[int]]
    cached: int


class AtOnce(ContinuousBatching):
    """So many requests run; others follow as clients would send them."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def places(self, num_running: int, num_waiting: int) -> int:
        return max(0, min(num_waiting, self._rows - num_running))


class Study:
    """An engine whose drafter is another one for each case."""

    def __init__(self, args: argparse.Namespace) -> None:
        config: dict[str, Any] = {"method": ["grammar", "prediction", "ngram", "suffix"]}
        if args.draft_model:
            config = {"method": [*config["method"], DRAFT_MODEL], "model": args.draft_model}
        most = max(32, *args.requests)
        self.llm = LLM(
            args.model, speculative_config=config, max_model_len=args.context, max_num_seqs=most, dtype=args.dtype,
            load_format=args.load_format, use_tqdm_on_load=False,
        )
        drafter = self.llm.core.scheduler.drafter
        assert isinstance(drafter, Controller)
        self._whole, self._asked = drafter, draft_options(json.dumps(config))
        self._adaptive = not args.all_drafts
        self._pairs, self._end, self._rounds = args.pairs, args.end, args.rounds
        self._step, self._began = self.llm.core.step, 0.0
        self._longest = 0.0                              # seconds of the newest block
        self._firsts: dict[str, float] = {}
        self.llm.core.step = self._timed_step                    # type: ignore[method-assign]

    def prepare(self, seconds: float) -> None:
        """Captures graphs, as an idle server does."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.llm.core.prepare():
            pass

    def _timed_step(self) -> TokenDeltas:
        deltas = self._step()
        now, firsts = CLOCK() - self._began, self._firsts
        for request_id, _, _ in deltas.answers:
            firsts.setdefault(request_id, now)
        for delta in deltas.others:
            if delta.token_ids:
                firsts.setdefault(delta.request_id, now)
        return deltas

    def _drafter(self, names: tuple[str, ...]) -> tuple[Controller, Earlier | None]:
        """With these proposers, and the times of steps that are known."""
        earlier = None
        if "suffix" in names:
            earlier = Earlier(self._asked.suffix_bytes, getattr(native.if_built(), "suffix_drafts", None))
        library = native.if_built()                      # as the engine's own controller has it
        proposers: list[Proposer] = [MAKE[name](self._asked) for name in names if name in MAKE and name != "suffix"]
        if earlier is not None:
            proposers.append(earlier)
        if DRAFT_MODEL in names:
            proposers += [each for each in self._whole.proposers if each.name == DRAFT_MODEL]
        most = self._asked.num_speculative_tokens
        return Controller(proposers, self._whole.pace, most, self._adaptive, library), earlier

    def _answers(self, asks: list[Ask], earlier: bool = False) -> list[RequestOutput]:
        params = [ask.params for ask in asks]
        if asks[0].plain:
            return self.llm.generate([ask.content for ask in asks], params, use_tqdm=False)
        contents = [ask.earlier if earlier else ask.content for ask in asks]
        return self.llm.chat([[{"role": "user", "content": each}] for each in contents], params, use_tqdm=False)

    def _block(self, asks: list[Ask], drafter: Controller, on: bool) -> Block:
        self.llm.core.scheduler.drafter, drafter.active = drafter, on
        self.llm.reset_prefix_cache()
        self._firsts, began = {}, time.monotonic()
        self._began = CLOCK()
        outputs = self._answers(asks)
        took = CLOCK() - self._began
        self._longest = time.monotonic() - began
        answers = [output.outputs[0].token_ids for output in outputs]
        tokens = sum(map(len, answers))
        return Block(
            took / tokens, (took - max(self._firsts.values())) / max(1, tokens - len(answers)),
            statistics.mean(self._firsts.values()), answers,
            sum(output.num_cached_tokens for output in outputs),
        )

    def _too_late(self, blocks: int) -> bool:
        """Would that many more blocks end too late?"""
        return time.monotonic() + blocks * self._longest > self._end

    def measure(self, case: Case, requests: int) -> dict[str, Any] | None:
        """None: there is no time left."""
        drafter, suffix = self._drafter(case.proposers)
        count = requests * (self._rounds if requests > 1 else 1)
        self.llm.core.scheduler.admission = AtOnce(requests)
        warm = [case.ask(number % WARM) for number in range(count)]
        for on in (True, False, True):                   # kernels and grammars are compiled, step times known
            if self._too_late(2):
                return None
            self._block(warm, drafter, on)
        pairs: list[dict[bool, Block]] = []
        before = drafter.counters.draft_tokens, drafter.counters.accepted_tokens
        for number in range(self._pairs):
            if self._too_late(3 if suffix is not None else 2):
                break
            asks = [case.ask(WARM + number * count + place) for place in range(count)]
            if suffix is not None and asks[0].earlier:
                suffix.learning, self.llm.core.scheduler.drafter, drafter.active = True, drafter, False
                self._answers(asks, earlier=True)
                suffix.learning = False
            pairs.append({on: self._block(asks, drafter, on) for on in ((False, True) if number % 2 else (True, False))})
        counters = drafter.counters
        return _figures(case, requests, pairs) | {
            "drafts": counters.draft_tokens - before[0], "accepted": counters.accepted_tokens - before[1],
        } if pairs else None


def _figures(case: Case, requests: int, pairs: list[dict[bool, Block]]) -> dict[str, Any]:
    ratios = [pair[False].each / pair[True].each for pair in pairs]
    both = [each for pair in pairs for each in zip(pair[False].answers, pair[True].answers, strict=True)]
    same = sum(one == other for off, on in both for one, other in zip(off, on, strict=False))
    off_each, on_each = (statistics.median(pair[on].each for pair in pairs) for on in (False, True))
    return {
        "case": case.name, "proposers": list(case.proposers), "requests": requests, "speed": statistics.median(ratios),
        "ratios": ratios, "equal": same / sum(max(len(off), len(on)) for off, on in both),
        "asked": len(pairs[0][True].answers),
        "decode": statistics.median(pair[False].decode / pair[True].decode for pair in pairs)
        if len(pairs[0][True].answers) == requests else None,
        "first_token": statistics.median(pair[True].first / pair[False].first for pair in pairs),
        "cached_off": sum(pair[False].cached for pair in pairs), "cached_on": sum(pair[True].cached for pair in pairs),
        "off_tok_s": 1 / off_each, "on_tok_s": 1 / on_each,
        "tokens_each": statistics.mean(len(off) for off, _ in both),
    }


def widened(file: Path, folder: Path) -> Path:
    """A GGUF file as a directory with bfloat16 weights."""
    model = PlainModel(file)
    write_small_files(file, replace(model.config, dtype="bfloat16"), None, folder)
    tensors = {name: model.read(name).to(torch.bfloat16) for block in model.blocks for name in model.names(block)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["case                requests   speed  lowest highest  decode   equal  first token  drafts accepted  tokens/s (off)"]
    lines += [
        f"{row['case']:<18} {row['requests']:>9} {row['speed']:>6.2f}x {min(row['ratios']):>6.2f} {max(row['ratios']):>7.2f} "
        f"{'–' if row['decode'] is None else format(row['decode'], '.2f') + 'x':>7} "
        f"{row['equal']:>7.3f} {row['first_token']:>11.2f}x {row['drafts']:>7} {row['accepted']:>8}  "
        f"{row['on_tok_s']:.0f} ({row['off_tok_s']:.0f})"
        for row in rows
    ]
    return "\n".join(lines)


def main(kind: type[Study] = Study, title: str = "speculation-real-text") -> None:
    """`title`: of the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--draft-model", help="a model with the same tokens; adds the case `draft model`")
    parser.add_argument("--widen", action="store_true", help="run a GGUF file with bfloat16 weights")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--load-format", default="auto", help="`dummy`: what a grammar leaves free is random text")
    parser.add_argument("--all-drafts", action="store_true", help="verify every draft there is, whether it pays or not")
    parser.add_argument("--requests", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=160, help="of a story or a copy; twice as many of an edit at most")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3, help="requests for each that runs at a time, where there are several")
    parser.add_argument("--seconds", type=float, default=math.inf, help="it ends within that long")
    parser.add_argument("--prepare", type=float, default=30, help="seconds in which graphs may be captured before the first case")
    parser.add_argument("--cpu-time", action="store_true", help="processor time in the place of the clock")
    parser.add_argument("--cases", nargs="+", help="names of cases; default: all")
    parser.add_argument("--out", help="the record")
    args = parser.parse_args()
    args.end = time.monotonic() + args.seconds
    if args.cpu_time:
        global CLOCK
        CLOCK = time.process_time
    named = [case for case in cases(args.tokens, bool(args.draft_model)) if not args.cases or case.name in args.cases]
    if not named:
        parser.error(f"no case is named {args.cases}")
    with tempfile.TemporaryDirectory() as folder:
        name = Path(args.model or "embedded").name + (", widened to bfloat16" if args.widen else "")
        if args.widen:
            args.model = widened(Path(args.model), Path(folder))
        study = kind(args)
        rows, left = run(study, args, named, name, title)
    study.llm.close()
    print(table(rows) + (f"\nno time was left for: {', '.join(left)}" if left else ""))


def run(
    study: Study, args: argparse.Namespace, named: list[Case], model: str, title: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """The figures of cases, and cases for which no time was left."""
    study.prepare(min(args.prepare, args.seconds / 4))
    rows: list[dict[str, Any]] = []
    left = []
    workload = {"command": command(args.out), "model": model, "dtype": study.llm.core.config.dtype, "pairs": args.pairs}
    for case, requests in ((case, requests) for case in named for requests in args.requests):
        row = study.measure(case, requests)
        if row is None:
            left.append(f"{case.name} with {requests}")
            continue
        rows.append(row)
        print(json.dumps({name: value for name, value in row.items() if name != "blocks"}), flush=True)
        if args.out:
            write(record(title, workload, {"cases": rows}, gpu=gpu_facts() or None), Path(args.out))
    return rows, left


if __name__ == "__main__":
    main()
