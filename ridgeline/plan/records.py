"""Reads benchmark records that predictions can be checked against: workloads, measured figures, and the setup.

Reads records of `ridgeline bench offline`, on a GPU (`--preset`) and on a CPU, and of `bench idle`. If all requests have equal
lengths, these follow from the record; for other presets the caller passes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ridgeline.errors import ConfigError
from ridgeline.plan.capacity import kernel_facts
from ridgeline.plan.precision import WEIGHT_FORMATS, StoredWeights
from ridgeline.plan.prediction import MOST_ROWS, STEP_TOKENS, Setup
from ridgeline.plan.public_models import CONFIGS, find_model, gpu_weights, table_name
from ridgeline.plan.workload_steps import Lengths
from ridgeline.sizes.abilities import packed_width
from ridgeline.sizes.hardware import NO_LINK, Device, Link, data_sheet
from ridgeline.user_files import read_json

# Measured peaks of the card that the constants refer to, TB/s and TFLOP/s.
TYPICAL_PEAKS = {"H200": (4.38, 793.0)}


HISTORY = "history"                  # records of older commits and other cards: history/COMMIT/NAME.json


def record_id(path: str | Path) -> str:
    """What identifies a record of this repository: its file name, with its commit if it is one of the history."""
    parts = Path(path).parts
    return "/".join(parts[-3:] if parts[-3:-2] == (HISTORY,) else parts[-1:])


def record_order(path: str | Path) -> tuple[bool, str]:
    """Sorts the newest records before those of the history."""
    return HISTORY in Path(path).parts, str(path)


def record_name(path: str | Path) -> str:
    """For tables: llama-3.1-8b, or llama-3.1-8b@COMMIT."""
    name, parts = Path(path).stem.removeprefix("offline-"), Path(path).parts
    return f"{name}@{parts[-2]}" if parts[-3:-2] == (HISTORY,) else name


def read_link(path: str, operation: str) -> Link:
    """From a record of `bench comm`: by this operation, or by the all-reduce where it was not measured."""
    try:
        figures = read_json(path, "a record")["figures"]
        found = figures.get(operation) or figures["all_reduce"]
        if found["gigabytes_per_s"] is None:
            raise ConfigError(f"{path} has no bandwidth: its times do not grow with the sizes; measure larger --sizes")
        return Link(found["gigabytes_per_s"] * 1e9, found["latency_us"] / 1e6)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no record of `ridgeline bench comm` ({error})") from None


class NotPredicted(ConfigError):
    """A valid record of a setting that the cost model does not cover."""


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One workload of a record."""

    workload: str
    asked: Lengths
    shared: int = 0
    seconds: float | None = None             # of the whole run …
    first_seconds: float | None = None       # … and of one with a token each
    tpot_seconds: float | None = None
    output_tok_s: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)     # seconds of kernels in a decode step, by part …
    parts_context: int = 0                   # … at this context length …
    step_seconds: float | None = None        # … and the whole step, untraced
    spread: Mapping[str, float] = field(default_factory=dict)    # by figure, its highest run over its lowest
    level: int | None = None                 # batch limit of a levelled run, longest answers first; None: no limit

    @property
    def is_mostly_prompts(self) -> bool:
        """TPOT is the difference of two runs: if prompts take most of both, 1 % of either is several per cent of TPOT."""
        return bool(self.first_seconds and self.seconds and self.first_seconds > self.seconds / 2)


@dataclass(frozen=True, slots=True)
class Record:
    name: str
    setup: Setup
    rows: list[MeasuredRow]
    budget: int = STEP_TOKENS
    max_rows: int = MOST_ROWS


def read_record(path: str | Path, lengths: Mapping[str, Lengths], file_of: Callable[[str], str] = str) -> Record:
    """`lengths`: of the presets whose requests differ, by name. `file_of`: of a shape that is a GGUF file, such a file; other
    names stay."""
    try:
        raw = read_json(path, "a record")
        if raw["benchmark"] == "idle":
            return _idle(raw, file_of)
        if raw["benchmark"] != "offline":
            raise ConfigError(f"{path} is a record of `bench {raw['benchmark']}`; plan knows those of `bench offline` and idle")
        return _gpu(raw, lengths, file_of) if "rows" in raw["figures"] else _cpu(raw)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a record of `ridgeline bench offline` ({type(error).__name__}: {error})") from None


def of_card(device: Device, read_tb_s: float, tflop_s: float) -> Device:
    """The device with the record's own measured peaks: cards of one kind differ by some per cent."""
    if device.name not in TYPICAL_PEAKS:
        return device
    read, computed = (own / usual for own, usual in zip((read_tb_s, tflop_s), TYPICAL_PEAKS[device.name], strict=True))
    rates = {name: rate * computed for name, rate in device.flops.items()}
    return replace(device, bandwidth=device.bandwidth * read, flops=rates)


def _setup(raw: dict[str, Any], file_of: Callable[[str], str]) -> Setup:
    """The model and the device of a record made on a GPU."""
    workload, options = raw["workload"], raw["workload"]["options"]
    if options.get("deterministic"):
        raise NotPredicted(f"{workload['model']} ran in deterministic mode, which has other kernels and is not predicted")
    if str(workload["model"]).endswith("-zipf"):
        raise NotPredicted(f"{workload['model']} prefers few experts, and records are planned with even routing")
    device = data_sheet(raw["machine"]["gpu"]["name"])
    if device is None:
        raise ConfigError(f"the record's {raw['machine']['gpu']['name']} is not in the table of devices")
    peaks = raw["figures"].get("peaks")
    if peaks:
        device = of_card(device, peaks["read_tb_s"], peaks["tflop_s"])
    file, ranks = file_of(workload["model"]), options.get("tensor_parallel_size", 1)
    has_codes = file != workload["model"]                # a shape that has its own
    model = find_model(_model_name(file), as_stored=has_codes)
    made, facts = options.get("quantization", "none"), kernel_facts(device)
    mixed = "=" in made                                  # parts of the model have formats of their own
    kept = None
    if has_codes or model.config.packed or mixed:
        kept = gpu_weights(model, workload["dtype"], ranks, facts, made if mixed else "none")
    chosen = made if made in WEIGHT_FORMATS else workload["dtype"]
    return Setup(
        model=model, device=device, dtype=workload["dtype"], weights=chosen if kept is None else kept.format, stored=kept,
        ranks=ranks, kv=options.get("kv_cache_dtype", "auto"),
    )


def _gpu(raw: dict[str, Any], lengths: Mapping[str, Lengths], file_of: Callable[[str], str]) -> Record:
    workload, figures = raw["workload"], raw["figures"]
    rows = [
        _gpu_row(name, row, lengths) for name, row in figures["rows"].items()
        if name in lengths or not row["tokens_in"] % row["requests"]
    ]
    return Record(workload["model"], _setup(raw, file_of), rows, workload["max_num_batched_tokens"], workload["max_num_seqs"])


def _idle(raw: dict[str, Any], file_of: Callable[[str], str]) -> Record:
    """Decode steps at several numbers of rows, kernel by kernel."""
    context = raw["workload"]["context"]
    rows = [
        MeasuredRow(
            f"decode {batch}", [(context, 2)] * batch, step_seconds=found["step_ms"] / 1e3, parts_context=context,
            parts={part: micros / 1e6 for part, micros in found["us_per_step_by_part"].items()},
        )
        for batch, found in ((int(name.removeprefix("batch_")), found) for name, found in raw["figures"].items())
    ]
    return Record(raw["workload"]["model"], _setup(raw, file_of), rows)


def _model_name(label: str) -> str:
    """Records are named after the model, and after what else is special: llama-3.1-8b-fp8-kv."""
    fits = [name for name in CONFIGS if label == name or label.startswith(f"{name}-")]
    return max(fits, key=len) if fits else label


def _gpu_row(name: str, row: dict[str, Any], lengths: Mapping[str, Lengths]) -> MeasuredRow:
    count, median = row["requests"], row["median"]
    asked = lengths.get(name) or [(row["tokens_in"] // count, row["tokens_out"] // count)] * count
    level = row.get("level")
    if level is not None:
        asked = sorted(asked, key=lambda each: -each[1])
    tokens_out = sum(out for _, out in asked)
    output = median.get("output_tok_s")
    idle = row.get("device_idle", {})
    decode = median.get("decode_tok_s")
    return MeasuredRow(
        name, asked, row["shared_prefix"], tokens_out / output if output else None, median.get("first_tokens_s"),
        count / decode if decode else None, output,
        {part: micros / 1e6 for part, micros in idle.get("us_per_step_by_part", {}).items()}, asked[0][0] + 10,
        spread={name: row["p90"][name] / row["p10"][name] for name in row.get("p90", {}) if row["p10"].get(name)},
        level=level,
    )


# For records without measured rates, an assumption: the fastest prompts, attention and all else included, reach this share of the
# rate of packed products with 64 rows. The fitted share of that rate goes with it (fitted_cpu.json). Chosen so that a CPU with
# VNNI, whose records have measured rates, is met; with half of the rate, prompts there were predicted up to 76 % too slow.
PROMPT_SHARE = 0.82
_CPU_SIZES = {"latency": (1, 128, 128), "batch8": (8, 128, 128), "batch32": (32, 128, 128), "prefill": (1, 512, 1)}
_CPU_SIZE = re.compile(r"(\d+)x(\d+)\+(\d+)")            # as `bench offline --requests` names its workloads


def _cpu_size(name: str) -> tuple[int, int, int] | None:
    """Requests, tokens in and out of each; settings may stand behind the workload's name."""
    name = name.partition(",")[0]
    if found := _CPU_SIZE.fullmatch(name):
        count, tokens_in, tokens_out = map(int, found.groups())
        return count, tokens_in, tokens_out
    return _CPU_SIZES.get(name)


def _cpu(raw: dict[str, Any]) -> Record:
    """Bandwidth as the record measured it; the rate of products is the measured one, or follows from its fastest prompts."""
    workload, figures = raw["workload"], raw["figures"]
    model = find_model(table_name(workload["model"]) or workload["model"])
    rows, formats = [], set()
    for name, measured in figures.items():
        size = _cpu_size(name)
        if size is None or not isinstance(measured, dict):
            continue
        count, tokens_in, tokens_out = size
        found = measured["ridgeline"]
        formats.add(found.get("bytes_per_weight"))
        first = count * tokens_in / found["prefill_tok_s"]["median"]
        tpot = found["tpot_ms"]["median"] / 1e3 if "tpot_ms" in found else None
        output = found["output_tok_s"]["median"] if "output_tok_s" in found else None
        spread = {"first_tokens_s": "prefill_tok_s", "decode_tok_s": "decode_tok_s", "output_tok_s": "output_tok_s"}
        rows.append(MeasuredRow(
            name, [(tokens_in, tokens_out)] * count, 0, None, first, tpot, output,
            spread={mine: found[theirs]["p90"] / found[theirs]["p10"] for mine, theirs in spread.items() if theirs in found},
        ))
    if not rows:
        raise ConfigError("the record has no known workload: latency, batch8, batch32, prefill, or one named by its sizes")
    rate = max(
        2 * model.linear_parameters * sum(tokens_in for tokens_in, _ in row.asked) / row.first_seconds
        for row in rows if row.first_seconds
    )
    bandwidth = figures["read_bandwidth_gb_s"] * 1e9
    # The engine multiplies the file's own blocks. Prompts alone say nothing of their width.
    stored = min(formats - {None}, default=4.0)
    width = packed_width(8 * stored)
    rates = figures.get("peak_flops_s") or {"float32": rate / PROMPT_SHARE, width or "float32": rate / PROMPT_SHARE}
    device = Device("CPU", 0, bandwidth, rates, NO_LINK, kind="cpu", architecture=raw.get("machine", {}).get("architecture", ""))
    kept = StoredWeights(width, stored, stored, stored) if width else None
    setup = Setup(model=model, device=device, dtype="float32", weights=width or "float32", stored=kept)
    return Record(workload["model"], setup, rows, 512, 128)
