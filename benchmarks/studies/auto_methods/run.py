"""`--recipe auto` beside uniform recipes of its size, on the embedded model: auto must have no more KL in no more bytes.

    python benchmarks/studies/auto_methods/run.py --work DIR [--cards benchmarks/cards] [--also w8a16]

auto gets each rival's bytes (`--max-gb`), and every rival a card. Sizes within a hundredth are one run of auto, with the fewest
of their bytes. The card's text is none of those by which auto chooses: these are the other half of the default text, which AWQ
reads, and what the model itself writes. `--cards` copies all cards there, under the names that scripts/make_quantize_tables.py
reads; with `--keep-cards` a card that is there already is not made again, and each row of the record names the commit of its
card. All must have read the same text.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

from ridgeline.bench.lab.record import commit
from ridgeline.config import EngineConfig
from ridgeline.evaluate.slices import SLICES
from ridgeline.evaluate.task import Task
from ridgeline.quant.quality_card import CARD
from ridgeline.quantize.ct_writer import stored_bytes
from ridgeline.quantize.plain_model import PlainModel
from ridgeline.quantize.quantize_model import Job, quantize
from ridgeline.quantize.recipes import AUTO, RECIPES, read_recipe
from ridgeline.quantize.sensitivity import PLAIN_BYTES
from ridgeline.resolve import model_path

RIVALS = ("nvfp4", "int4-awq", "int4-gptq", "int4-rtn", "mxfp4", "fp8", "w8a8", "w8a8-smooth")
SAME = 0.01                          # sizes that are one run of auto
HEADERS = 0.0012                     # of a size: auto counts headers of files, which the sizes here lack, at their largest
PREFIX = "smollm2-135m"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for outputs")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    parser.add_argument("--cards", type=Path, default=None, help="a folder to copy cards to")
    parser.add_argument("--keep-cards", action="store_true")
    parser.add_argument("--only", nargs="+", choices=RIVALS, default=list(RIVALS))
    parser.add_argument("--also", nargs="+", choices=RECIPES, default=[],
                        help="recipes whose cards are made as well, so that all cards of a table have read the same text")
    parser.add_argument("--model", default="", help="the embedded model's file, where it is not in its usual place")
    parser.add_argument("--tokens", type=int, default=512, help="of each slice of a card")
    parser.add_argument("--needle", type=int, default=256, help="tokens of texts with a hidden number; 0: none")
    args = parser.parse_args()
    for folder in filter(None, (args.work, args.cards)):
        folder.mkdir(parents=True, exist_ok=True)
    path = model_path(EngineConfig.of(model=args.model))
    task = Task(slices=tuple(SLICES), context=256, tokens=args.tokens, seed=0, needle=tuple(filter(None, [args.needle])),
                speed=True)
    sizes = {recipe: linear_bytes(path, recipe) for recipe in args.only}
    result: dict[str, Any] = {"tokens_per_slice": args.tokens, "rivals": {}, "auto": {}, "commit": commit()}
    for size in distinct(list(sizes.values())):
        name = f"auto-{size / 1e6:.1f}"
        card = kept_card(args, name) or made(args, Job(
            model=path, recipe=read_recipe(AUTO), out=args.work / f"{PREFIX}-{name}", card=task, needles_if_they_fit=True,
            most_bytes=round(size * (1 + HEADERS)), costs=args.work / "costs.json"))
        result["auto"][name] = figures(card) | {"weights_bytes": size, "most_bytes": card["limits"]["bytes"]}
        result["machine"], result["versions"] = card["machine"], card["versions"]
    for recipe in (*args.only, *args.also):
        card = kept_card(args, recipe) or made(args, Job(
            model=path, recipe=read_recipe(recipe), out=args.work / f"{PREFIX}-{recipe}", card=task, needles_if_they_fit=True))
        if recipe in sizes:
            result["rivals"][recipe] = figures(card) | {"weights_bytes": sizes[recipe]}
    compare(result)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


def linear_bytes(path: Path, recipe: str) -> int:
    """Of an output's tensors, without the headers of its files."""
    model = PlainModel(path)
    linears = model.linears(read_recipe(recipe))
    rest = model.plain_bytes([name for block in model.blocks for name in model.names(block)])
    rest -= sum(PLAIN_BYTES * linear.outputs * linear.inputs for linear in linears if linear.format is not None)
    model.close()
    return rest + sum(stored_bytes(linear) for linear in linears if linear.format is not None)


def distinct(sizes: list[int]) -> list[int]:
    """The smallest of those that are nearly the same."""
    found: list[int] = []
    for size in sorted(sizes):
        if not found or size > found[-1] * (1 + SAME):
            found.append(size)
    return found


def kept_card(args: argparse.Namespace, recipe: str) -> dict[str, Any] | None:
    file = (args.cards or args.work) / f"{PREFIX}-{recipe}.json"
    if not args.keep_cards or not file.is_file():
        return None
    print(f"{recipe}: the card {file} is taken", flush=True)
    return dict(json.loads(file.read_text(encoding="utf-8")))


def made(args: argparse.Namespace, job: Job) -> dict[str, Any]:
    """The card; of an output that is there already, its own."""
    if not (job.out / CARD).is_file():
        quantize(job)
    card = json.loads((job.out / CARD).read_text(encoding="utf-8"))
    if args.cards is not None:
        shutil.copy(job.out / CARD, args.cards / f"{job.out.name}.json")
    return dict(card)


def figures(card: dict[str, Any]) -> dict[str, Any]:
    quality = card["quality"]
    return {"output_bytes": card["size"]["output_bytes"], "kl": quality["all"]["kl"], "tokens": quality["all"]["tokens"],
            "texts": quality["texts"], "flips": 1 - quality["all"]["top1"], "perplexity": quality["all"]["perplexity"],
            "slices": {name: row["kl"] for name, row in quality["slices"].items()}, "linears": card["linears"],
            "commit": card["machine"]["commit"]}


def compare(result: dict[str, Any]) -> None:
    """Each rival with the auto of its size."""
    for name, rival in result["rivals"].items():
        fits = {key: row for key, row in result["auto"].items()
                if rival["weights_bytes"] / (1 + SAME) <= row["weights_bytes"] <= rival["weights_bytes"]}
        if not fits:
            continue
        key, mine = min(fits.items(), key=lambda each: each[1]["kl"])
        if (mine["texts"], mine["tokens"]) != (rival["texts"], rival["tokens"]):
            raise SystemExit(f"{name}: its card has read another text: make it again, without --keep-cards")
        rival |= {"auto": key, "auto_is_no_worse": mine["kl"] <= rival["kl"]}
        print(f"{name:10} {rival['weights_bytes'] / 1e6:7.2f} MB  KL {rival['kl']:.4f}   auto {mine['kl']:.4f}   worst slice "
              f"{max(rival['slices'].values()):.3f}   auto {max(mine['slices'].values()):.3f}", flush=True)


if __name__ == "__main__":
    main()
