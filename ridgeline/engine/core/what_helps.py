"""What narrower formats would bring this engine: the time of the layers' products, and of attention, over what they take now.

The cost model is `plan`'s, which predicts the records; the formats are those that resolve would take (choices/format_choices.py).
"""

from __future__ import annotations

from ridgeline.plan.precision import WEIGHT_FORMATS
from ridgeline.plan.prediction import Setup
from ridgeline.plan.public_models import PlannedModel
from ridgeline.plan.search import kv_factor, weight_factors
from ridgeline.plan.search import untimed as is_untimed
from ridgeline.resolve import ResolvedConfig
from ridgeline.roofline.decoder_shape import DecoderShape
from ridgeline.roofline.peaks import MachinePeaks
from ridgeline.roofline.step_cost import step_cost
from ridgeline.sizes.abilities import BY_FLAG, SHEET_NAMES, Factors
from ridgeline.sizes.hardware import NO_LINK, Device, data_sheet


def factors(config: ResolvedConfig, peaks: MachinePeaks) -> Factors:
    """By option, as it is typed: (rows, time over what it is now), of products by weights or of attention."""
    setup = _setup(config, peaks)
    found: dict[str, list[tuple[float, float]]] = {}
    for flag in config.narrower:
        narrow = BY_FLAG[flag]
        if narrow.option == "quantization":
            found[flag] = weight_factors(setup, narrow.name)
        else:
            found[flag] = [(1, kv_factor(setup, narrow.name))]
    return found


def untimed(config: ResolvedConfig, peaks: MachinePeaks) -> list[str]:
    """Of those options, the ones whose gain is that of a data sheet: not timed on this kind of GPU."""
    setup, narrower = _setup(config, peaks), [BY_FLAG[flag] for flag in config.narrower]
    return [each.flag for each in narrower if each.option == "quantization" and is_untimed(setup, each.name)]


def linear_share(shape: DecoderShape) -> float:
    """Of the bytes of weights that a step of one row reads, those that a format narrows: all but the head."""
    read = {name: op.weights for name, op in step_cost(shape, [(1, 1)]).ops.items()}
    return 1 - read.get("head", 0) / max(1, sum(read.values()))


def _setup(config: ResolvedConfig, peaks: MachinePeaks) -> Setup:
    """Constants of the cost model are shares of a GPU's data sheet; of another device, of what was measured."""
    flops = {SHEET_NAMES.get(name, name): rate for name, rate in peaks.flops_s.items()}
    sheet = data_sheet(config.device_name) if config.device == "cuda" else None
    device = sheet or Device(config.device_name or config.device, 0, peaks.read_bytes_s, flops, NO_LINK, kind=config.device)
    asked = config.options.model.quantization
    return Setup(
        model=PlannedModel(str(config.model_path), config.model), device=device,
        ranks=config.options.parallel.tensor_parallel_size, dtype=config.dtype,
        weights=asked if asked in WEIGHT_FORMATS else config.dtype,
    )
