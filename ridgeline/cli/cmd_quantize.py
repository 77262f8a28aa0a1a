"""`ridgeline quantize`: compress a checkpoint, and measure what it cost. See docs/quantize.md."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import suppress
from pathlib import Path

from ridgeline import interrupt
from ridgeline.cli.config_options import add_model
from ridgeline.cli.terminal import require_model
from ridgeline.config import EngineConfig
from ridgeline.errors import ConfigError
from ridgeline.evaluate.slices import SLICES
from ridgeline.evaluate.task import Task, slice_texts
from ridgeline.evaluate.texts import read_text
from ridgeline.models.model_config import load_model_config
from ridgeline.quant.quality_card import summary_line
from ridgeline.quantize.card import PAGE, PLOTS, parse_limits
from ridgeline.quantize.recipes import AUTO, FEWEST_TOKENS, KV_FORMATS, OWN_TEXT, RECIPES, read_recipe, require_new
from ridgeline.report.columns import fitted
from ridgeline.resolve import model_path

CARD_TOKENS, CARD_CONTEXT, CARD_NEEDLE = 1024, 256, 256
LIMIT_OPTIONS = {
    "kl": ("--max-kl", "largest mean KL divergence, in nats: 0.05"),
    "flips": ("--max-flips", "largest share of positions with another top token: 5%%"),
    "ppl": ("--max-ppl-increase", "largest increase of the perplexity: 2%%"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, RECIPES))
    listed = "\n".join(f"  {name:<{width}}  {words}" for name, (_, _, words) in RECIPES.items())
    listed += f"\n  {AUTO:<{width}}  a format for each linear, the fewest bytes that meet the limits below"
    parser.epilog = fitted(
        f"recipes:\n{listed}\n\nThe input is only read. A run that was stopped goes on when it is started again."
    )
    group = parser.add_argument_group("quantisation")
    group.add_argument("--recipe", required=True, metavar="NAME|FILE.yaml",
                       help="one of the recipes below, or a file of {pattern: {bits, group, …}}")
    group.add_argument("--out", dest="folder", required=True, metavar="DIR", help="the directory to write; it must not exist")
    group.add_argument("--group", type=int, metavar="N",
                       help="inputs that share a scale at 4 bits (default: the largest of 128, 64, 32 that divides them)")
    group.add_argument("--keep", nargs="+", default=[], metavar="PATTERN",
                       help="linears to leave as they are, by regular expression: down_proj, layers.0.")
    group.add_argument("--keep-first", type=int, default=0, metavar="N", help="leave the first N layers as they are")
    group.add_argument("--keep-last", type=int, default=0, metavar="N", help="leave the last N layers as they are")
    group.add_argument("--seed", type=int, default=0, help="decides which texts are used (default: 0)")
    group.add_argument("--calibration", default="", metavar="FILE",
                       help='text to calibrate with: a text file, JSONL with a "text" per line, or the word model: what the '
                       'model itself writes (default: half of pydoc_data.topics)')
    group.add_argument("--calibration-tokens", type=int, default=8192, metavar="N",
                       help="tokens of it to use (default: %(default)s)")
    group.add_argument("--kv-scales", choices=KV_FORMATS, default="",
                       help="also calibrate scales of each layer's keys and values, for a KV cache in this format")
    limits = parser.add_argument_group("limits", "every slice of the card must meet them; with --recipe auto they choose formats")
    for name, (option, words) in LIMIT_OPTIONS.items():
        limits.add_argument(option, dest=f"limit_{name}", metavar="X", help=words)
    limits.add_argument("--max-gb", type=float, metavar="X",
                        help="with --recipe auto: the best quality whose weights take at most X GB (10^9 bytes, with "
                        "the headers of the files), instead of the fewest bytes")
    limits.add_argument("--fastest", default="", metavar="GPU[:ROWS]",
                        help="with --recipe auto: the least predicted time of the linears on this GPU, instead of the fewest "
                        "bytes, in steps of ROWS rows (64)")
    measured = parser.add_argument_group("card")
    measured.add_argument("--no-card", action="store_true", help="do not measure the quality; the output then has no card")
    measured.add_argument("--card-text", default="", metavar="FILE",
                          help="a text to measure on (default: half of pydoc_data.topics)")
    measured.add_argument("--card-tokens", type=int, default=CARD_TOKENS, metavar="N",
                          help="approximate number of tokens per slice (default: %(default)s)")
    measured.add_argument("--card-needle", type=int, nargs="+", metavar="N",
                          help="hide a number in texts of N tokens, and count how often it is found; 0: none (default: 256, or "
                          "none if --card-text is shorter)")
    measured.add_argument("--json", action="store_true", help="print the card as JSON")


def checked_limits(args: argparse.Namespace) -> dict[str, float]:
    """ConfigError: what does not go together."""
    given = {name: getattr(args, f"limit_{name}") for name in LIMIT_OPTIONS}
    limits = {name: _limit(name, value) for name, value in given.items() if value is not None}
    if limits and args.no_card:
        raise ConfigError("limits are checked on the card: leave out --no-card")
    if args.fastest and args.recipe != AUTO:
        raise ConfigError(f"--fastest chooses formats, which only --recipe {AUTO} does")
    if args.max_gb is not None and (args.recipe != AUTO or args.fastest or not args.max_gb > 0):
        raise ConfigError(f"--max-gb must be above 0, and is for --recipe {AUTO} without --fastest")
    for name, fewest in {"card_tokens": 2, "calibration_tokens": FEWEST_TOKENS}.items():
        if getattr(args, name) < fewest:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {fewest}, got {getattr(args, name)}")
    return limits


def _limit(name: str, value: str) -> float:
    if "," not in value:
        with suppress(ConfigError):
            return parse_limits(f"{name}:{value}")[name]
    option, meaning = LIMIT_OPTIONS[name]
    example = meaning.rpartition(": ")[2].replace("%%", "%")
    raise ConfigError(f"{option} must be a number of at least 0, such as {example}, got {value!r}")


def run(args: argparse.Namespace) -> int:
    recipe = read_recipe(args.recipe, args.group, args.keep, args.keep_first, args.keep_last, args.kv_scales)
    limits = checked_limits(args)
    out = Path(os.path.abspath(args.folder))
    config = EngineConfig.of(model=args.model)
    require_model(config)
    path = model_path(config)
    task = None if args.no_card else Task(
        text=args.card_text, slices=tuple(SLICES), context=CARD_CONTEXT, tokens=args.card_tokens, seed=args.seed,
        needle=tuple(filter(None, args.card_needle or [CARD_NEEDLE])), speed=True,
    )
    require_new(out)
    load_model_config(path)
    if task is not None:
        slice_texts(task)
    if args.calibration and args.calibration != OWN_TEXT:
        read_text(args.calibration)
    # This imports torch: errors in the command line are reported before.
    maker = interrupt.import_module("ridgeline.quantize.quantize_model")
    made = maker.quantize(maker.Job(
        model=path, recipe=recipe, out=out, seed=args.seed, text=args.calibration, tokens=args.calibration_tokens, card=task,
        needles_if_they_fit=args.card_needle is None, limits=limits, fastest=args.fastest,
        most_bytes=1e9 * (args.max_gb or 0), show=not args.json,
    ))
    if args.json:
        print(json.dumps(made))
        return 0
    print(fitted(f"{args.folder}: written" + ("; not measured, so it has no card" if made is None else "")))
    if made is not None:
        print(fitted(f"quality: {summary_line(made)}"))
        print(fitted("not quantised: " + "; ".join(made["not_quantised"])))
        print(fitted(f"card: {args.folder}/{PAGE}, with plots {args.folder}/{PLOTS}"))
    print(f"serve it: ridgeline serve {args.folder}")
    return 0
