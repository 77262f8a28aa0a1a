"""The scheme of a linear, by its weight format and what the device is good at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ridgeline.ops.packed.expand_room import ExpandRoom
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

    @property
    def expands(self) -> tuple[str, ...]: ...


def schemes(formats: Callable[[str], Chosen], plain: Scheme, room: ExpandRoom | None = None) -> Callable[[str], Scheme]:
    """By a linear's path. Linears of one format share a scheme object. `room`: where all of them expand packed weights."""
    made: dict[tuple[WeightFormat, bool], Scheme] = {}
    said: set[tuple[str, ...]] = set()

    def say(once: tuple[str, ...], text: str, *values: object) -> None:
        if once not in said:
            said.add(once)
            logger.info(text, *values)

    def scheme(path: str) -> Scheme:
        chosen = formats(path)
        if chosen.differs:
            kept = "the model's dtype" if chosen.format is None else chosen.format.name
            say(chosen.differs, "%s: its parts are stored as %s and kept together as %s", path, ", ".join(chosen.differs), kept)
        if chosen.expands:
            say(("experts", *chosen.expands), "experts stored as %s are expanded to the model's dtype: the kernels of experts do "
                "not multiply by these codes on this device", " and ".join(chosen.expands))
        if chosen.format is None:
            return plain
        key = (chosen.format, chosen.made)
        if key not in made:
            made[key] = make(chosen.format, chosen.made, plain, room)
        return made[key]

    return scheme


def make(format: WeightFormat, made: bool, plain: Scheme, room: ExpandRoom | None = None) -> Scheme:
    if quantises_rows(format):
        return Fp8(plain, made, format)
    if format.grid in (*GRIDS, "q5", "q6", "int8"):
        return Packed(format, plain, made, room=room)
    return Quantised(format, plain, made)
