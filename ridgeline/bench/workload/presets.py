"""`ridgeline bench offline --preset …`: the GPU workloads, each with its floor, device log and quality check.

Every figure is measured twice or more. Per repeat:

    first tokens    a run with other prompts of the same lengths that answers with one token each
    decode tok/s    requests × (out − 1) / (time of the run − time of that one)
    output tok/s    all output tokens / time of the run

The prefix cache is on, as when serving, and every run has its own salt: no run finds blocks of another, so only prompts of
one run can share (`cached_tokens` counts them; only the prefix preset has any).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ridgeline.bench.idle import profile_decode
from ridgeline.bench.lab import price, sustain, table
from ridgeline.bench.lab.device_log import device_kind, gpu_facts
from ridgeline.bench.lab.machine_log import Watch, limited
from ridgeline.bench.lab.record import percentiles, record, write
from ridgeline.bench.lab.sweep import cross, figure, parse_options, settings
from ridgeline.bench.options.suite import COMMANDS, DIRECTORY, SUITE
from ridgeline.bench.workload import workloads
from ridgeline.bench.workload.bench_engine import EXACT, Engine, Run, quality_of
from ridgeline.bench.workload.floors import H200_FLOORS, H200_FLOORS_FOR, preset_floor, shares
from ridgeline.bench.workload.quality import check_apart, check_quality
from ridgeline.bench.workload.shapes import write_shape
from ridgeline.bench.workload.workloads import GPU_PRESETS, Asked, Preset
from ridgeline.errors import ConfigError, EngineDead, RidgelineError
from ridgeline.models.checkpoints.linear_formats import expert_bytes
from ridgeline.process.children import start_child
from ridgeline.roofline.decoder_shape import decoder_shape
from ridgeline.roofline.peaks import MachinePeaks
from ridgeline.roofline.step_cost import Peaks
from ridgeline.runner.start.gpu_names import gpu_names
from ridgeline.runner.start.measure_peaks import machine_peaks
from ridgeline.sizes import ledger

# One GPU barely holds 70B in bf16: there is room for one long request or a few short ones.
MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "llama-3.1-70b": {"gpu_memory_utilization": 0.972, "max_num_seqs": 16, "max_num_batched_tokens": 2048},
}
# Presets whose decode steps are also profiled kernel by kernel, at these batch sizes.
PROFILED: dict[str, tuple[int, ...]] = {"latency_b1": (1,), "batch128": (128, 256)}
PROFILED_STEPS = 20
_IDLE = ("idle_share", "idle_between_steps_share", "idle_share_untraced", "step_ms", "us_per_step_by_part")


def run(args: argparse.Namespace) -> None:
    if "h200" in args.preset:
        run_suite(args)
        return
    started = time.monotonic()
    lists = {"shape": args.shape or [""], "dtype": args.dtype, "set": [tuple(words) for words in settings(args.set)]}
    combinations = cross(lists)
    if args.out and len(combinations) > 1:
        raise ConfigError("--out holds one record: give --directory for several combinations")
    rows: list[dict[str, Any]] = []
    for chosen in combinations:
        one = argparse.Namespace(**vars(args) | {"dtype": chosen["dtype"], "set": list(chosen["set"])})
        if len(combinations) > len(lists["shape"]):      # the shape alone does not tell them apart
            one.label = "-".join(filter(None, [args.label or chosen["shape"], chosen["dtype"], *chosen["set"]]))
        made = measure_model(chosen["shape"], one, list(dict.fromkeys(args.preset)), started)
        rows += [table_row(made["workload"]["model"], name, row) for name, row in made["figures"]["rows"].items()]
        if args.out:
            write(made, Path(args.out))
    print(table.rendered(rows, args.format, made))


def run_suite(args: argparse.Namespace) -> None:
    """One process per group, so that no memory of one engine is left for the next."""
    started = time.monotonic()
    failed = []
    for name in args.group or [*SUITE, *COMMANDS]:
        left = args.time_limit - (time.monotonic() - started)
        if left <= 0:
            print(f"{name}: not measured, the time limit was reached", flush=True)
            continue
        words = ["offline", *group_words(name, args, left)] if name in SUITE else command_words(name, args)
        child = start_child("ridgeline", "bench", *words, stdout=sys.stderr)
        try:
            if child.wait() != 0:
                failed.append(name)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    if failed:
        raise EngineDead(f"these groups failed: {', '.join(failed)}")


def group_words(name: str, args: argparse.Namespace, left: float) -> list[str]:
    """The command line of a group's own process."""
    group = SUITE[name]
    words = ["--preset", *group.presets, "--shape", group.shape, "--label", name, "--time-limit", f"{left:.0f}"]
    words += ["--directory", args.directory or DIRECTORY, "--repeats", str(args.repeats), "--dtype", *args.dtype]
    words += ["--no-quality"] if args.no_quality else []
    words += ["--price", str(args.price)] if args.price is not None else []
    words += ["--sustain", str(args.sustain)] if args.sustain is not None else []
    settings = [*(f"{option}={value}" for option, value in group.options.items()), *args.set]
    return [*words, "--set", *settings] if settings else words


def command_words(name: str, args: argparse.Namespace) -> list[str]:
    return [*COMMANDS[name], "--out", str(Path(args.directory or DIRECTORY) / f"{name}.json")]


def measure_model(shape: str, args: argparse.Namespace, names: list[str], started: float) -> dict[str, Any]:
    """All rows of one model in one engine. Each row is written to disk at once, so a later failure loses nothing."""
    presets = [GPU_PRESETS[name] for name in names]
    options = MODEL_OPTIONS.get(shape, {}) | {"dtype": args.dtype} | parse_options(args.set)
    peaks = machine_peaks(device_kind(options))          # before the engine takes the memory
    quality = _checked_quality(shape, args, options)
    began = time.perf_counter()
    options = {"max_model_len": _context(presets)} | options | {"enable_prefix_caching": True}
    if shape:
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
    elif args.load_format == "dummy":
        options |= {"load_format": "dummy"}
    engine = Engine(str(write_shape(shape)) if shape else args.model, **options)
    ready = time.perf_counter() - began
    name = args.label or shape or engine.config.model_path.name
    figures: dict[str, Any] = {
        "engine_start_s": ready, "quality": quality, "memory": memory_ledger(engine),
        "peaks": {"read_tb_s": peaks.read_bytes_s / 1e12, "tflop_s": peaks.rate(engine.config.dtype) / 1e12},
        "rows": {}, "not_measured": {},
    }

    def keep() -> dict[str, Any]:
        made = record("offline", _setting(engine, name, args, options), figures, quality_of(engine.config), gpu_facts())
        if args.directory:
            write(made, Path(args.directory) / f"offline-{name}.json")
        return made

    with Watch(gpu_names()) as watch:
        for preset in presets:
            if time.monotonic() - started > args.time_limit:
                figures["not_measured"][preset.name] = "the time limit was reached"
            else:
                figures["rows"][preset.name] = row = measure_preset(engine, preset, shape, peaks, watch, args.repeats)
                extend(engine, preset, row, args, watch)
                if args.format == "md":
                    print(line(name, preset.name, row), flush=True)
            keep()
    if engine.config.device == "cuda":                   # last, so that no figure is taken with a profiler attached
        _profile_rows(engine, name, [preset for preset in presets if preset.name in figures["rows"]], figures, args)
    made = keep()
    lossy = quality_of(engine.config) != EXACT
    engine.close()
    if not lossy and quality.get("top1_agreement", 1.0) < quality.get("least", 0.0):
        agreement, least = quality["top1_agreement"], quality["least"]
        raise RidgelineError(f"{name}: top-1 agreement {agreement:.4f} is below {least:.2%}: these figures are invalid")
    return made


def _checked_quality(shape: str, args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    if args.no_quality:
        return {"not_checked": "left out"}
    if not shape:
        return {"not_checked": "a model of one's own has no reference here"}
    check = check_apart if device_kind(options) == "cuda" else check_quality
    quality: dict[str, Any] = check(shape, **{name: value for name, value in options.items() if name not in _SIZES})
    print(quality_line(shape, quality), flush=True)
    return quality


def _profile_rows(
    engine: Engine, name: str, presets: list[Preset], figures: dict[str, Any], args: argparse.Namespace
) -> None:
    for preset in presets:
        figures["rows"][preset.name] |= (found := profiled(engine, preset))
        if args.format == "md" and preset.name in PROFILED:
            print(idle_line(name, preset.name, found), flush=True)


def quality_line(shape: str, quality: dict[str, Any]) -> str:
    verdict = "" if quality["top1_agreement"] >= quality["least"] else f"  BELOW {quality['least']:.2%}"
    same_dtype = quality["same_dtype_agreement"]
    same = "" if same_dtype is None else f", {same_dtype:.4f} by the definitions in the same dtype"
    parts = ", ".join(f"{name} {part['top1_agreement']:.4f} of {part['positions']}" for name, part in quality["by_part"].items())
    return (
        f"{shape} in {quality['dtype']}: top-1 agreement {quality['top1_agreement']:.4f} over {quality['positions']} positions "
        f"({parts}), "
        f"{quality['top1_agreement_alike_rows']:.4f} with an undecided head{same}{verdict}; "
        f"reached {', '.join(quality['reached'])}"
    )


def memory_ledger(engine: Engine) -> dict[str, Any]:
    """Predicted and measured GPU memory of the engine, part by part."""
    measured = engine.memory
    predicted = engine.config.memory
    return {"predicted": predicted, "measured": measured, "error": ledger.error(predicted, measured)} if measured else {}


_SIZES = ("max_model_len", "max_num_seqs", "num_gpu_blocks_override", "kv_cache_memory_bytes",
          "max_num_batched_tokens", "gpu_memory_utilization")    # the check has its own


def _context(presets: list[Preset]) -> int:
    return -(-max(preset.longest() for preset in presets) // 16) * 16 + 16


def measure_preset(
    engine: Engine, preset: Preset, model: str, peaks: MachinePeaks, watch: Watch, repeats: int
) -> dict[str, Any]:
    """One row: runs, medians, floors, and the device's clocks and power."""
    vocab = engine.config.model.vocab_size
    first_pass = engine.serve(preset.requests(workloads.WARM_UP, vocab), _salt())
    ones = [(prompt, 1) for prompt, _ in preset.requests(workloads.FIRST_TOKENS, vocab)]
    asked = preset.requests(workloads.TIMED, vocab)
    decodes = preset.uniform and preset.longest() > len(asked[0][0]) + 1
    if decodes:
        engine.serve(ones, _salt())                      # its shapes are warm too
    engine.settle()
    if engine.config.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    runs, ends = [], []
    begin = time.time()
    for _ in range(repeats):
        one = engine.serve(ones, _salt()) if decodes else None
        run = engine.serve(asked, _salt())
        runs.append(_figures(preset, run, one))
        ends.append(time.time())
    end = ends[-1]
    names = [name for name in runs[0] if name.endswith("_s") and name != "seconds"]
    spreads = {name: figure([each[name] for each in runs], warm_ups=1) for name in names}
    medians = {name: found["median"] for name, found in spreads.items()}
    row: dict[str, Any] = {
        "requests": preset.count, "tokens_in": sum(len(prompt) for prompt, _ in asked),
        "tokens_out": sum(tokens_out for _, tokens_out in asked), "shared_prefix": preset.shared,
        "level": run.level, "runs": runs, "median": medians, "p10": {name: found["p10"] for name, found in spreads.items()},
        "p90": {name: found["p90"] for name, found in spreads.items()},
        "device_log": _device_log(watch, begin, ends, runs, decodes), "watts": watch.watts(begin, end),
    }
    row["first_pass"] = _first_pass(first_pass, medians)
    return row | _memory(engine) | _against_floors(engine, preset, model, peaks, row, asked)


def _device_log(watch: Watch, begin: float, ends: list[float], runs: list[dict[str, Any]], decodes: bool) -> dict[str, Any]:
    """The GPU over all runs, and again over their decode steps alone: prompts draw another power."""
    found = watch.gpu((begin, ends[-1]))
    if not found or not decodes:
        return found
    lengths = [max(0.0, run["seconds"] - run["first_tokens_s"]) for run in runs]         # a busy machine takes longer at times
    return found | {"decode": watch.gpu(*((end - length, end) for end, length in zip(ends, lengths, strict=True)))}


def _clock_limit(row: dict[str, Any]) -> str:
    log = row["device_log"]
    return limited(log.get("decode", log))


def _first_pass(run: Run, medians: dict[str, float]) -> dict[str, Any]:
    """The run before all others of this workload, right after the engine was ready or had run other workloads: what a user meets
    after a deploy. Its prompts are others of the same kind."""
    speed = run.tokens / run.seconds
    return {
        "seconds": run.seconds, "output_tok_s": speed, "first_token_ms": 1e3 * min(run.first),
        "longest_step_ms": 1e3 * run.longest_step, "of_median": speed / medians["output_tok_s"], "events": run.events,
    }


def _against_floors(
    engine: Engine, preset: Preset, model: str, peaks: MachinePeaks, row: dict[str, Any], asked: Asked
) -> dict[str, Any]:
    config, medians = engine.config, row["median"]
    found: dict[str, Any] = {}
    shape = decoder_shape(
        config.model, config.dtype, engine.bytes_per_weight(preset.count), config.kv_format,
        expert_bytes=expert_bytes(config.model, config.options.model.quantization, config.device, dtype=config.dtype),
    )
    rates = Peaks(peaks.read_bytes_s, peaks.rate(config.dtype))
    own = preset_floor(shape, preset, asked, rates, config.max_num_batched_tokens, config.max_num_seqs, row["level"])
    found["floor"] = {"counted": own}
    found["share_of_floor"] = {"counted": shares(medians, own)}
    seconds = percentiles([each["seconds"] for each in row["runs"]])["median"]
    found["counted"] = {
        "bytes": own["bytes"], "flops": own["flops"],
        "tb_s": own["bytes"] / seconds / 1e12, "tflop_s": own["flops"] / seconds / 1e12,
    }
    plain = config.options.model.quantization in ("", "none")
    if plain and (model, config.kv_dtype, config.dtype) == H200_FLOORS_FOR and preset.name in H200_FLOORS:
        found["floor"]["h200_bf16"] = H200_FLOORS[preset.name]
        found["share_of_floor"]["h200_bf16"] = shares(medians, H200_FLOORS[preset.name])
    return found


def profiled(engine: Engine, preset: Preset) -> dict[str, Any]:
    """Decode steps kernel by kernel: launches, and idle time of the device."""
    context = len(preset.requests(workloads.TIMED)[0][0])
    if preset.name not in PROFILED:
        return {"not_profiled": f"launches and idle times are of {' and '.join(PROFILED)}, whose steps are all alike"}
    found: dict[str, Any] = {}
    for place, rows in enumerate(PROFILED[preset.name]):
        name = f"device_idle_{rows}_rows" if place else "device_idle"
        if rows > engine.config.max_num_seqs:
            found[name] = {"not_measured": f"max_num_seqs is {engine.config.max_num_seqs}"}
            continue
        profile = profile_decode(engine, rows, context, PROFILED_STEPS, salt=_salt())
        found[name] = {key: profile[key] for key in _IDLE}
        found["launches_per_step" if not place else f"launches_per_step_{rows}_rows"] = profile["launches_per_step"]
    return found


def extend(engine: Engine, preset: Preset, row: dict[str, Any], args: argparse.Namespace, watch: Watch) -> None:
    """Figures of --price and --sustain."""
    if args.price is not None:
        seconds = row["tokens_out"] / row["median"]["output_tok_s"]
        joules = None if row["watts"] is None else row["watts"] * seconds
        row["cost"] = price.cost(args.price, seconds, row["tokens_in"], row["tokens_out"], joules)
    if args.sustain is not None:
        asked = preset.requests(workloads.TIMED, engine.config.model.vocab_size)
        row["sustain"] = sustain.repeat(
            lambda: {"output_tok_s": (run := engine.serve(asked, _salt())).tokens / run.seconds}, args.sustain, watch
        )


def _figures(preset: Preset, run: Run, one: Run | None) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "seconds": run.seconds, "steps": run.steps, "output_tokens": run.tokens, "cached_tokens": run.cached,
        "output_tok_s": run.tokens / run.seconds, "longest_step_ms": run.longest_step * 1e3,
    }
    if one is not None:
        figures |= {"first_tokens_s": one.seconds, "longest_step_of_first_tokens_ms": one.longest_step * 1e3}
        figures["decode_tok_s"] = (run.tokens - preset.count) / (run.seconds - one.seconds)
    elif preset.uniform:                                 # one token each: the run itself is the first tokens'
        figures["first_tokens_s"] = run.seconds
    return figures


_runs = 0


def _salt() -> str:
    """A new salt for every run, so that no run finds an earlier one's blocks in the prefix cache."""
    global _runs
    _runs += 1
    return f"run-{_runs}"


def _memory(engine: Engine) -> dict[str, Any]:
    if engine.config.device != "cuda":
        return {}
    return {
        "peak_memory_bytes": torch.cuda.max_memory_allocated(), "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


def _setting(engine: Engine, name: str, args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    config = engine.config
    return {
        "model": name, "weights": "dummy" if config.options.model.load_format == "dummy" else "loaded",
        "device": config.device, "dtype": config.dtype, "repeats": args.repeats, "options": options,
        "max_num_batched_tokens": config.max_num_batched_tokens, "max_num_seqs": config.max_num_seqs,
        "kv_blocks": config.num_blocks, "prefix_caching": "on, a salt per run",
        "clock": "host, from the first request handed in to the last token on the host; after a warm-up run",
        "ids_folded_into_vocabulary": config.model.vocab_size < workloads.HIGHEST_ID,
    }


def table_row(model: str, preset: str, row: dict[str, Any]) -> dict[str, Any]:
    titles = {"decode_tok_s": "decode tok/s", "output_tok_s": "output tok/s", "first_tokens_s": "first tokens s"}
    cells: dict[str, Any] = {"model": model, "preset": preset}
    for name, title in titles.items():
        spread = {key: row[key].get(name) for key in ("median", "p10", "p90")}
        cells[title] = spread if spread["median"] is not None else None
        cells[f"{title} of floor"] = row["share_of_floor"]["counted"].get(name)
    if row["device_log"]:
        cells["clock limited by"] = _clock_limit(row).split(" binds")[0]
    return cells | {"peak bytes": row.get("peak_memory_bytes"), "$/M output": row.get("cost", {}).get("usd_per_m_output_tokens")}


def line(model: str, preset: str, row: dict[str, Any]) -> str:
    """A row as one line: medians, and their share of the floor."""
    parts = [f"{model:14s} {preset:12s}"]
    against = row["share_of_floor"].get("h200_bf16") or row["share_of_floor"]["counted"]
    formats = {
        "decode_tok_s": ("decode {:,.0f} tok/s", 1), "output_tok_s": ("output {:,.0f} tok/s", 1),
        "first_tokens_s": ("first tokens {:,.1f} ms", 1e3),
    }
    for name, (text, scale) in formats.items():
        if name in row["median"]:
            share = f" ({against[name]:.0%} of the floor)" if name in against else ""
            parts.append(text.format(row["median"][name] * scale) + share)
    if _clock_limit(row):
        parts.append(_clock_limit(row))
    parts.append(f"first pass {row['first_pass']['of_median']:.1%}")
    if "cost" in row:
        parts.append(price.line(row["cost"]))
    if "sustain" in row:
        parts.append(row["sustain"]["verdict"])
    return "  ".join(parts)


def idle_line(model: str, preset: str, found: dict[str, Any]) -> str:
    shares = [
        f"{idle['idle_between_steps_share']:.1%}" if "not_measured" not in idle else "not measured"
        for name, idle in found.items() if name.startswith("device_idle")
    ]
    launches = f"{found['launches_per_step']:.0f} launches a step, " if "launches_per_step" in found else ""
    rows = " and ".join(str(rows) for rows in PROFILED[preset])
    return f"{model:14s} {preset:12s}  {launches}idle between steps with {rows} rows: {' and '.join(shares)}"
