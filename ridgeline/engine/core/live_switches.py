"""Switches techniques off and on while the engine runs, so that a live server can be compared with itself.

Only exact ones, whose answers are the same on and off, and only those the engine was started with: their memory is reserved.
The list of techniques is in ridgeline/techniques.py; the front end decides who may switch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.stats import active_techniques
from ridgeline.errors import BadRequest
from ridgeline.messages import TokenDeltas
from ridgeline.scheduler.policy import ContinuousBatching, StaticBatching


class Switches:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._depth = core.config.depth
        self._started_with = active_techniques(core.config)
        self._off: set[str] = set()
        self._setters: dict[str, Callable[[bool], TokenDeltas]] = {
            "prefix caching": self._set_prefix_caching,
            "continuous batching": self._set_continuous_batching,
            "overlap": self._set_overlap,
            "speculation": self._set_speculation,
        }

    @property
    def active(self) -> list[str]:
        """Names of the techniques that are on now."""
        return [name for name in self._started_with if name not in self._off]

    def set(self, name: str, on: bool) -> TokenDeltas:
        """Switch one. Returns the deltas of steps in flight that had to end first. BadRequest: it cannot be switched."""
        if name not in self._setters:
            raise BadRequest(f"{name!r} cannot be switched on a running engine; {', '.join(self._setters)} can")
        if name not in self._started_with:
            raise BadRequest(f"{name} cannot be switched: the engine was started without it")
        if on == (name not in self._off):
            return TokenDeltas()
        (self._off.discard if on else self._off.add)(name)
        return self._setters[name](on)

    def _set_prefix_caching(self, on: bool) -> TokenDeltas:
        """Off, lookups find nothing. Blocks that are computed meanwhile are found again once it is back on."""
        self._core.scheduler.use_prefix_cache(on)
        return TokenDeltas()

    def _set_continuous_batching(self, on: bool) -> TokenDeltas:
        """Off, the running requests are the batch that has to end before the next one starts."""
        self._core.scheduler.admission = ContinuousBatching() if on else StaticBatching()
        return TokenDeltas()

    def _set_speculation(self, on: bool) -> TokenDeltas:
        """Off, steps have no drafts; those in flight are verified as planned."""
        self._core.scheduler.drafter.active = on
        return TokenDeltas()

    def _set_overlap(self, on: bool) -> TokenDeltas:
        """Off, no step is in flight while another is planned."""
        core = self._core
        deltas = core.drain()
        core.config = replace(core.config, depth=self._depth if on else 0)
        return deltas
