"""What drafts under a JSON schema can gain at most: how much of a model's answers its grammar forces, and step times.

    python benchmarks/studies/speculation/forced_runs.py --model FILE.gguf --requests 24 --out forced-runs.json

The requests are those of real_text.py. Answers are followed by a matcher: a run is the text that is forced behind a token, a free
step one whose token forces nothing. For one request on a GPU, with the milliseconds of steps that are written down in `TIMES`:

    waits     every step waits for the newest token, and verifies what that forces
    ahead     the next step is launched before the token is known: it computes a run's first token, and the one behind it the rest

`BEGIN`: prompt and tokenising, the same for all.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import real_text

from ridgeline import LLM
from ridgeline.bench.lab.record import command, record, write
from ridgeline.engine.core.grammars import Grammars
from ridgeline.grammar.compiler import compile_grammar
from ridgeline.grammar.matcher import Matcher

# One request, 1.5B in bfloat16 on an H200: json-steps-waited.json, json-steps-overlap.json (its fastest block, and their mean).
PLAIN, BEGIN = 1.14, 4.3
TIMES = {
    "waits": (1.67, 2.6), "ahead, fastest block": (1.21, 1.62), "ahead, mean": (1.33, 1.79), "no host in the way": (1.14, 1.47),
}
MOST = 15                            # drafts


def runs_of(tokens: list[int], matcher: Matcher) -> list[int]:
    """What is forced behind each token that was not forced itself; 0: nothing."""
    found, place = [], 0
    while place < len(tokens) - 1:
        matcher.accept(tokens[place])
        forced = matcher.forced(MOST)
        said = tokens[place + 1 : place + 1 + len(forced)]
        right = next((n for n, (draft, own) in enumerate(zip(forced, said, strict=False)) if draft != own), len(said))
        for token in tokens[place + 1 : place + 1 + right]:
            matcher.accept(token)
        found.append(right)
        place += 1 + right
    return found


def speed(answers: list[list[int]], way: str) -> float:
    free_ms, drafted_ms = TIMES[way]
    spent = tokens = 0.0
    for runs in answers:
        tokens += len(runs) + sum(runs)
        if way.startswith("ahead"):
            spent += sum(free_ms + drafted_ms * (run > 1) for run in runs)
            spent += sum(free_ms for run in runs if run == 1)
        else:
            spent += sum(drafted_ms if run else free_ms for run in runs)
    return (PLAIN * tokens + BEGIN * len(answers)) / (spent + BEGIN * len(answers))


def share_for(answers: list[list[int]], way: str, goal: float) -> float:
    """The share of forced tokens at which that speed is reached, with as many runs and tokens: free steps become drafts."""
    shares = [sum(map(sum, answers)) / sum(len(runs) + sum(runs) for runs in answers)]
    answers = [list(runs) for runs in answers]
    while speed(answers, way) < goal and any(0 in runs for runs in answers):
        for runs in answers:
            if 0 in runs and any(runs):
                runs.remove(0)
                runs[max(range(len(runs)), key=runs.__getitem__)] += 1
        shares.append(sum(map(sum, answers)) / sum(len(runs) + sum(runs) for runs in answers))
    return shares[-1]


def answers_of(model: str, count: int) -> list[list[int]]:
    llm = LLM(model, max_model_len=1024, max_num_seqs=8, use_tqdm_on_load=False)
    case = next(each for each in real_text.cases(160, False) if each.name == "JSON schema")
    asks = [case.ask(number) for number in range(count)]
    outputs = llm.chat([[{"role": "user", "content": ask.content}] for ask in asks], [ask.params for ask in asks], use_tqdm=False)
    grammars: Grammars = llm.core.grammars
    asked, backend = asks[0].params.structured_outputs, grammars._load()
    assert asked is not None
    compiled, ends = compile_grammar(backend, asked), llm.core.config.model.eos_token_ids
    fresh: Callable[[], Matcher] = lambda: Matcher(compiled, asks[0].params, ends, backend.spell)     # noqa: E731
    found = [runs_of(list(output.outputs[0].token_ids), fresh()) for output in outputs]
    llm.close()
    return found


def figures(answers: list[list[int]]) -> dict[str, Any]:
    tokens, forced = sum(len(runs) + sum(runs) for runs in answers), sum(map(sum, answers))
    return {
        "tokens_each": tokens / len(answers), "forced_share": forced / tokens,
        "runs_each": sum(run > 0 for runs in answers for run in runs) / len(answers),
        "free_steps_each": sum(run == 0 for runs in answers for run in runs) / len(answers),
        "lengths": dict(sorted(Counter(run for runs in answers for run in runs if run).items())),
        "speed": {way: speed(answers, way) for way in TIMES},
        "share_for_1.2": {way: share_for(answers, way, 1.2) for way in TIMES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--out", help="the record")
    args = parser.parse_args()
    found = figures(answers_of(args.model, args.requests))
    for name, value in found.items():
        print(name, value)
    if args.out:
        workload = {"command": command(args.out), "model": Path(args.model or "embedded").name, "times": TIMES, "plain": PLAIN}
        write(record("forced-runs", workload, found), Path(args.out))


if __name__ == "__main__":
    main()
