"""The options of `ridgeline bench serve`, and the settings, prompts and arrival times made from them.

Names are those of `vllm bench serve` where it has one. Every combination of options that are lists is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.bench.lab import price, sustain, table
from ridgeline.bench.lab.sweep import cross
from ridgeline.bench.load import arrivals
from ridgeline.bench.load.http_client import bearer
from ridgeline.bench.load.latency import Slo, parse_slo
from ridgeline.bench.load.prompts import Conversation, Length, PromptSource, Words, parse_length, read_rows
from ridgeline.bench.load.target import CHAT, COMPLETIONS
from ridgeline.errors import ConfigError

DATASETS = {"random": "random", "prefix": "prefix", "prefix_repetition": "prefix", "multi_turn": "multi_turn", "custom": "custom"}
BACKENDS = {"chat": CHAT, "openai-chat": CHAT, "completions": COMPLETIONS, "openai": COMPLETIONS, "vllm": COMPLETIONS}
PROMPTS = 200                        # requests of a run, where nothing says how many
WARM_UPS = 8
_RECORD = "--out FILE writes the record, with --save-detailed every request's times"
_PERCENTILES = "the record has P50, P90 and P99 of every figure"
_SAMPLING = "give it as a field of every request: --extra-body JSON"
_FILES = "requests of a data set are lines of a file: --dataset-path"
# Of `vllm bench serve`, and what to use instead.
_OTHERS = {
    _RECORD: "--save-result --append-result --result-dir --result-filename",
    _PERCENTILES: "--percentile-metrics --metric-percentiles",
    _SAMPLING: "--top-p --top-k --min-p --logprobs",
    _FILES: "--hf-name --hf-split --hf-subset --sharegpt-output-len --custom-output-len",
    "no code of models is run": "--trust-remote-code",
    "--model is the name": "--served-model-name",
    "use `ridgeline diagnose URL`": "--profile",
    "the server must be ready: /health says so": "--ready-check-timeout-sec",
}


class _Elsewhere(argparse.Action):
    """An option that is not here says what to use instead, its `const`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        raise ConfigError(f"{option_string} is not an option here: {self.const}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s URL [options]"
    parser.add_argument("url", nargs="?", default="", metavar="URL",
                        help="address of an OpenAI-compatible server, such as http://127.0.0.1:8000; also: --base-url")
    parser.add_argument("--base-url", "--url", default="", help=argparse.SUPPRESS)   # as in vllm and `ridgeline chat`
    parser.add_argument("--host", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help="the served model's name (default: the first that the server lists)")
    parser.add_argument("--backend", choices=BACKENDS, help="default: completions; chat if the prompts are messages or turns")
    parser.add_argument("--endpoint", help="path, if it is neither /v1/chat/completions nor /v1/completions")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="default: the variable OPENAI_API_KEY")
    parser.add_argument("--header", nargs="+", default=[], metavar="NAME=VALUE", help="additional HTTP headers")
    parser.add_argument("--insecure", action="store_true", help="do not verify the server's certificate")
    parser.add_argument("--extra-body", default="{}", metavar="JSON", help="additional fields of every request")
    parser.add_argument("--temperature", type=float, default=0.0, help="of every request (default: 0, greedy)")
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, help="default: on for generated prompts")
    parser.add_argument("--tokenizer", help="directory or .gguf file; needed if the server has neither /tokenize nor usage")
    for instead, names in _OTHERS.items():
        parser.add_argument(*names.split(), nargs="*", action=_Elsewhere, const=instead, dest="elsewhere",
                            default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    _add_load(parser)
    _add_prompts(parser)
    group = parser.add_argument_group("figures")
    group.add_argument("--slo", "--goodput", nargs="+", default=[], metavar="SLO",
                       help="latency objectives in milliseconds, such as ttft:500,tpot:50; adds goodput")
    group.add_argument("--num-warmups", type=int, default=WARM_UPS, help=f"requests before the timed ones (default: {WARM_UPS})")
    group.add_argument("--first-pass", action="store_true",
                       help="also measure a first run before each warm-up, as after a restart of the server")
    group.add_argument("--repeats", type=int, default=1,
                       help="runs of each setting; with several, figures are medians with P10 and P90")
    group.add_argument("--max-failed", default="10%", metavar="SHARE",
                       help="fail if more than this share of a setting's requests fail, as 10%% or 0.1 (default: 10%%)")
    group.add_argument("--quality", help='for the record, if the server does not report it: "exact" or its lossy techniques')
    group.add_argument("--save-detailed", action="store_true", help="store every request's times in the record")
    group.add_argument("--no-progress", "--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for one answer (default: 600)")
    sustain.add_arguments(parser)
    price.add_arguments(parser)
    table.add_format(parser)
    parser.add_argument("--html", metavar="FILE", help="write a report with plots: one file without external parts")
    parser.add_argument("--out", help="also write the record to this file")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--num-prompts", type=int, help=f"number of requests or conversations (default: {PROMPTS}, or the file's)")
    group.add_argument("--duration", type=float, metavar="S", help="run for this number of seconds instead")
    group.add_argument("--request-rate", type=float, nargs="+", default=[math.inf], help="requests per second; inf: all at once")
    group.add_argument("--burstiness", type=float, default=1.0, help="1: Poisson; below: burstier (gamma); inf: equal gaps")
    group.add_argument("--max-concurrency", type=int, nargs="+", default=[0],
                       help="limit of concurrent requests; without a rate: that number of users in a closed loop")
    group.add_argument("--ramp-up-strategy", choices=["linear", "exponential"], help="change the rate over the run")
    group.add_argument("--ramp-up-start-rps", type=float, help="with --ramp-up-strategy: requests per second at the start")
    group.add_argument("--ramp-up-end-rps", type=float, help="with --ramp-up-strategy: requests per second at the end")
    group.add_argument("--trace-speed", type=float, default=1.0, help="factor on a trace's speed; 2: twice as fast")
    group.add_argument("--trace-unit", choices=["s", "ms"], default="s", help="unit of the file's timestamps")
    group.add_argument("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default: 0)")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    lengths = "tokens: 256, uniform:LOW:HIGH, normal:MEAN:DEV[:LOW:HIGH], lognormal:MU:SIGMA[:LOW:HIGH], exponential:MEAN"
    group.add_argument("--dataset-name", choices=DATASETS, help="default: custom with --dataset-path, else random")
    group.add_argument("--dataset-path", metavar="FILE", help="JSONL: prompt or messages, output_tokens, timestamp (see docs)")
    group.add_argument("--random-input-len", "--input-len", nargs="+", default=["512"], metavar="LENGTH", help=lengths)
    group.add_argument("--random-output-len", "--output-len", nargs="+", default=["128"], metavar="LENGTH",
                       help="output tokens, in the same forms")
    group.add_argument("--random-range-ratio", type=float, default=0.0, help="vary fixed lengths by up to this share, both ways")
    group.add_argument("--prefix-len", "--random-prefix-len", type=int, default=0, help="tokens of a prefix that prompts share")
    group.add_argument("--num-prefixes", type=int, default=1, help="number of different prefixes")
    group.add_argument("--turns", default="4", metavar="LENGTH", help="with multi_turn: turns of a conversation")
    group.add_argument("--think-time", default="0", metavar="SECONDS", help="pause between an answer and the next turn")
    group.add_argument("--prompt-format", choices=["text", "ids"], default="text", help="ids: send token ids (completions only)")


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the sweep."""

    rate: float
    concurrency: int                 # 0: no limit
    input_len: str
    output_len: str
    from_file: bool = False          # lengths, and maybe times, are the file's own
    paced_by: str = ""               # a ramp or a trace, in the place of a rate

    def named(self) -> dict[str, Any]:
        rate = "inf" if math.isinf(self.rate) else self.rate
        return {
            "request_rate": self.paced_by or rate, "max_concurrency": self.concurrency or None,
            "input_len": None if self.from_file else self.input_len,
            "output_len": None if self.from_file else self.output_len,
        }


@dataclass(slots=True)
class Plan:
    """Everything that was asked for, checked."""

    args: argparse.Namespace
    dataset: str
    rows: list[dict[str, Any]]
    slo: Slo | None
    ramp: arrivals.Ramp | None
    extra: dict[str, Any]
    settings: list[Setting]
    duration: float | None

    @property
    def path(self) -> str:
        if self.args.endpoint:
            return str(self.args.endpoint)
        if self.args.backend:
            return BACKENDS[self.args.backend]
        talks = self.dataset == "multi_turn" or any(row["messages"] is not None for row in self.rows)
        return CHAT if talks else COMPLETIONS

    @property
    def timed_rows(self) -> bool:
        return bool(self.rows) and self.rows[0]["timestamp"] is not None

    @property
    def pace(self) -> str:
        """What says when requests are sent, where it is no rate."""
        if self.ramp is not None:
            return f"{self.ramp.start:g} to {self.ramp.end:g}"
        speed = self.args.trace_speed
        return "" if not self.timed_rows else "trace" if speed == 1 else f"trace × {speed:g}"

    def closed(self, setting: Setting) -> bool:
        return bool(setting.concurrency) and math.isinf(setting.rate) and self.ramp is None and not self.timed_rows

    def count(self) -> int:
        return self.args.num_prompts or len(self.rows) or PROMPTS

    def source(self, setting: Setting, words: Words) -> PromptSource:
        args = self.args
        if args.prompt_format == "ids" and not words.exact:
            raise ConfigError("--prompt-format ids needs a tokenizer: the server has no /tokenize; give --tokenizer")
        one = Length("fixed", (1.0,))
        return PromptSource(
            words, parse_length(setting.input_len).widened(args.random_range_ratio),
            parse_length(setting.output_len).widened(args.random_range_ratio),
            args.prefix_len, args.num_prefixes, parse_length(args.turns) if self.dataset == "multi_turn" else one,
            parse_length(args.think_time, 0), args.prompt_format == "ids", self.rows,
        )

    def conversations(self, source: PromptSource, seed: str) -> Iterator[Conversation]:
        """As many as a run has; a file that is too short is read again."""
        endless = itertools.chain.from_iterable(source.conversations(f"{seed}-{turn}") for turn in itertools.count())
        return endless if self.duration is not None else itertools.islice(endless, self.count())

    def arrivals(self, setting: Setting) -> arrivals.Arrivals:
        times = [row["timestamp"] / self.args.trace_speed for row in self.rows] if self.timed_rows else []
        return arrivals.checked(setting.rate, self.args.burstiness, self.ramp, times)

    def planned(self, setting: Setting, source: PromptSource, seed: str) -> list[tuple[float, Conversation]]:
        """An open loop's conversations with their times."""
        process, rng = self.arrivals(setting), random.Random(f"{seed}-arrivals")
        if self.timed_rows:
            conversations = itertools.islice(self.conversations(source, seed), len(self.rows))
            timed = [((each.at or 0.0) / self.args.trace_speed, each) for each in conversations]
            return [pair for pair in timed if self.duration is None or pair[0] < self.duration]
        count = self.count()
        if self.duration is not None:
            mean = self.ramp.duration(1) if self.ramp is not None else 1 / setting.rate
            count = max(1, math.ceil(self.duration / mean * (1.0 if self.ramp is not None else 1.5) + 10))
        times = [time for time in process.times(count, rng) if self.duration is None or time < self.duration]
        return list(zip(times, self.conversations(source, seed), strict=False))


def _address(args: argparse.Namespace) -> str:
    if (args.host or args.port) and (args.url or args.base_url):
        raise ConfigError(f"{args.url or args.base_url} and --host or --port are two addresses; give one")
    if args.host or args.port:                           # vllm's defaults
        return f"http://{args.host or '127.0.0.1'}:{args.port or 8000}"
    found = str(args.url or args.base_url)
    if args.url and args.base_url and args.url != args.base_url:
        raise ConfigError(f"{args.url} and --base-url {args.base_url} are two addresses; give one")
    if not found:
        raise ConfigError("give the address of a server: ridgeline bench serve http://127.0.0.1:8000")
    return found


def plan(args: argparse.Namespace) -> Plan:
    """The options, checked: one line says what is wrong before anything is sent."""
    args.url = _address(args)
    dataset = DATASETS[args.dataset_name] if args.dataset_name else "custom" if args.dataset_path else "random"
    _check_options(args, dataset)
    duration = 60 * args.sustain if args.sustain is not None else args.duration
    made = Plan(
        args, dataset, read_rows(args.dataset_path, 1e-3 if args.trace_unit == "ms" else 1.0) if args.dataset_path else [],
        parse_slo(args.slo), _ramp(args), _extra(args), _settings(args), duration,
    )
    if made.dataset == "multi_turn" and args.prompt_format == "ids":
        raise ConfigError("--prompt-format ids does not work with conversations: their answers are text")
    if args.prompt_format == "ids" and "chat" in made.path:
        raise ConfigError("--prompt-format ids needs completions: a chat has no token ids")
    if made.timed_rows and any(not math.isinf(setting.rate) for setting in made.settings):
        raise ConfigError("a trace has its own times: leave --request-rate out; --trace-speed changes their speed")
    made.settings = [replace(setting, paced_by=made.pace) for setting in made.settings]
    for setting in made.settings:
        _check_setting(made, setting)
    parse_length(args.turns)
    parse_length(args.think_time, 0)
    return made


def _check_setting(made: Plan, setting: Setting) -> None:
    ratio = made.args.random_range_ratio
    made.arrivals(setting)
    parse_length(setting.input_len).widened(ratio)
    parse_length(setting.output_len).widened(ratio)
    if made.duration is not None and math.isinf(setting.rate) and not (made.closed(setting) or made.ramp or made.timed_rows):
        raise ConfigError("--duration and --sustain need --request-rate, --max-concurrency, a ramp or a trace")


def _check_options(args: argparse.Namespace, dataset: str) -> None:
    sustain.check(args.sustain)
    price.check(args.price)
    if (dataset == "custom") != bool(args.dataset_path):
        raise ConfigError("--dataset-name custom and --dataset-path FILE need each other")
    if dataset == "prefix" and not args.prefix_len:
        raise ConfigError("--dataset-name prefix needs --prefix-len")
    if args.num_warmups < 1:
        raise ConfigError("--num-warmups must be 1 or more: a figure without warm-up would measure compilers and cold caches")
    for name in ("num_prompts", "duration", "trace_speed", "timeout", "repeats", "num_prefixes"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
    if any(limit < 0 for limit in args.max_concurrency) or args.prefix_len < 0:
        raise ConfigError("--max-concurrency and --prefix-len must not be negative")
    if sum(given is not None for given in (args.duration, args.num_prompts, args.sustain)) > 1:
        raise ConfigError("--num-prompts, --duration and --sustain all say when a run ends: give one")


def _settings(args: argparse.Namespace) -> list[Setting]:
    lists = {
        "input_len": args.random_input_len, "output_len": args.random_output_len, "concurrency": args.max_concurrency,
        "rate": args.request_rate,
    }
    return [Setting(**chosen, from_file=bool(args.dataset_path)) for chosen in cross(lists)]


def _ramp(args: argparse.Namespace) -> arrivals.Ramp | None:
    ends = (args.ramp_up_start_rps, args.ramp_up_end_rps)
    if args.ramp_up_strategy is None:
        if any(end is not None for end in ends):
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return None
    if any(end is None for end in ends):
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if any(not math.isinf(rate) for rate in args.request_rate):
        raise ConfigError("a ramp has its own rates: leave --request-rate out")
    return arrivals.Ramp(*ends, args.ramp_up_strategy)


def _extra(args: argparse.Namespace) -> dict[str, Any]:
    try:
        extra = json.loads(args.extra_body)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError("--extra-body must be a JSON object")
    return {"temperature": args.temperature} | extra


def headers(args: argparse.Namespace) -> dict[str, str]:
    found = {}
    for word in args.header:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"{word!r} is not a header of the form NAME=VALUE")
        found[name] = value
    return bearer(args.api_key) | found
