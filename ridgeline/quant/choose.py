"""The scheme of a linear, by its weight format and what the device is good at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ridgeline.process.log import get_logger
from ridgeline.quant.format import WeightFormat, quantises_rows
from ridgeline.quant.four_bits import GRIDS
from ridgeline.quant.fp8 import Fp8
from ridgeline.quant.packed import Packed
from ridgeline.quant.quantised import Quantised
from ridgeline.quant.scheme import Scheme

logger = get_logger("quant")


class Chosen(Protocol):
    """models/checkpoints/linear_formats.py's choice for a linear."""

    @property
    def format(self) -> WeightFormat | None: ...

    @property
    def made(self) -> bool: ...

    @property
    def differs(self) -> tuple[str, ...]: ...


def schemes(formats: Callable[[str], Chosen], plain: Scheme) -> Callable[[str], Scheme]:
    """By a linear's path. Linears of one format share a scheme object."""
    made: dict[tuple[WeightFormat, bool], Scheme] = {}
    said: set[tuple[str, ...]] = set()

    def scheme(path: str) -> Scheme:
        chosen = formats(path)
        if chosen.differs and chosen.differs not in said:
            said.add(chosen.differs)
            kept = "the model's dtype" if chosen.format is None else chosen.format.name
            logger.info("%s: its parts are stored as %s and kept together as %s", path, ", ".join(chosen.differs), kept)
        if chosen.format is None:
            return plain
        key = (chosen.format, chosen.made)
        if key not in made:
            made[key] = make(chosen.format, chosen.made, plain)
        return made[key]

    return scheme


def make(format: WeightFormat, made: bool, plain: Scheme) -> Scheme:
    if quantises_rows(format):
        return Fp8(plain, made, format)
    if format.grid in GRIDS:
        if not plain.keeps_blocks:                       # a GPU
            logger.info("4-bit weights: steps of more than about 100 tokens take longer than with 16-bit ones, unlike with fp8")
        return Packed(format, plain, made)
    return Quantised(format, plain, made)
