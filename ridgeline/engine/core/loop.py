"""The main loop of the engine process: load the model, send Ready, then run steps while there are requests.

Between steps it reads what the front end has sent. Text and clients are handled by the front end (engine/client/async_llm).
Frames that cannot be decoded are counted and dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from ridgeline.config import EngineConfig
from ridgeline.engine.core.core import EngineCore
from ridgeline.engine.core.frontend_socket import IDLE_MS, FrontEndGone, FrontEndLink
from ridgeline.engine.core.gc_policy import collect_old, freeze_loaded
from ridgeline.engine.core.live_switches import Switches
from ridgeline.engine.core.profile import LiveProfile
from ridgeline.engine.core.stats import StatsKeeper, active_techniques
from ridgeline.engine.ipc import (
    Abort,
    Add,
    Alive,
    Deltas,
    Failed,
    ForgetPrefixes,
    Loading,
    PrefixesForgotten,
    Profile,
    Profiled,
    Ready,
    Refused,
    Shutdown,
    Stats,
    Switch,
    Switched,
    Vocabulary,
)
from ridgeline.errors import ConfigError, ModelError, RequestError, RidgelineError, one_line
from ridgeline.messages import TokenDeltas
from ridgeline.process.log import get_logger
from ridgeline.process.memory_kills import NO_THREAD, is_out_of_threads
from ridgeline.process.orphans import may_clean_up
from ridgeline.process.platform import is_address_space_limited
from ridgeline.process.start_phases import phase
from ridgeline.runner.memory_errors import is_out_of_memory

logger = get_logger("engine")

_ALIVE_SECONDS = 0.4                 # longest silence: then the front end is sent Alive
_LOADING_SECONDS = 0.1               # between two reports of progress
# Without a request, until the engine captures graphs. A capture takes some 25 ms, for which the next request would wait: clients
# that ask again as soon as they have an answer would meet one after the other.
_QUIET_MS = 100


class EngineLoop:
    def __init__(self, core: EngineCore, link: FrontEndLink) -> None:
        self._core = core
        self._link = link
        self._last_occupancy = self._occupancy()         # running rows and free blocks, as last sent to the front end
        self._last_sent = time.monotonic()
        self._stats = StatsKeeper(core)
        self._switches: Switches | None = None           # made by the first Switch
        self._profile: LiveProfile | None = None         # under way

    def run(self) -> None:
        """Until the front end says Shutdown."""
        try:
            self._serve()
        finally:
            self._stats.close()                          # a thread that samples GPUs must not outlive the engine

    def _serve(self) -> None:
        core, link, stats = self._core, self._link, self._stats
        quiet = False                                    # has nothing come since the last request ended?
        while True:
            link.check()
            has_work = core.has_work
            busy = has_work or (quiet and self._prepares())
            if not has_work:
                stats.idle()
            messages = link.receive(not busy, IDLE_MS if quiet else _QUIET_MS)
            for message in messages:
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
            if quiet and not busy and not messages:
                collect_old()
            quiet = not has_work and not messages
            began = time.monotonic()
            deltas = TokenDeltas()
            started: list[str] = []
            if core.has_work:
                step = core.step if self._profile is None else self._profile.step
                deltas, started = step(), core.scheduler.started
                stats.stepped(began, time.monotonic())
            self._send_deltas(deltas, began, started)
            if self._profile is not None and self._profile.is_over:
                self._link.send(self._profile.finish())
                self._profile = None
            now = time.monotonic()
            if stats.due(now):
                link.send(Stats(stats.report(now)))

    def _prepares(self) -> bool:
        """Used a quiet moment, for graphs or for what the machine can do. False: nothing is left."""
        return self._core.prepare() or self._stats.prepare(time.monotonic())

    def _handle(self, message: Add | Abort | Vocabulary | ForgetPrefixes | Switch | Profile) -> None:
        if isinstance(message, Abort):
            self._core.abort(message.request_id, message.index)
            return
        if isinstance(message, Vocabulary):              # for an engine that is loading
            return
        if isinstance(message, ForgetPrefixes):
            self._link.send(PrefixesForgotten(self._core.scheduler.manager.forget_prefixes()))
            return
        if isinstance(message, Switch):
            self._switch(message)
            return
        if isinstance(message, Profile):
            if self._profile is not None:
                self._link.send(Profiled("", {}, refused="a profile is under way; try again when it has ended"))
            else:
                self._profile = LiveProfile(self._core, message.steps)
            return
        try:
            self._core.add(message.request)
        except RequestError as error:
            self._link.send(Refused(message.request.request_id, str(error), error.field))
        except Exception:                                # one request's fault must not end the others
            logger.exception("request %s could not be added", message.request.request_id)
            self._link.send(Refused(message.request.request_id, "the engine could not take this request"))

    def _switch(self, message: Switch) -> None:
        if self._switches is None:
            self._switches = Switches(self._core)
        refused, began = "", time.monotonic()
        try:
            deltas = self._switches.set(message.technique, message.on)
            if deltas:
                self._send_deltas(deltas, began, [])
        except RequestError as error:
            refused = str(error)
        self._link.send(Switched(message.technique, self._switches.active, refused))

    def _send_deltas(self, deltas: TokenDeltas, began: float, started: list[str]) -> None:
        """One message per step, and one when only the occupancy changed (after an abort, say)."""
        occupancy = self._occupancy()
        now = time.monotonic()
        if deltas or started or occupancy != self._last_occupancy:
            self._last_occupancy = occupancy
            self._last_sent = now
            self._link.send(Deltas(deltas, *occupancy, began, now, started))
        elif now - self._last_sent > _ALIVE_SECONDS:
            self._last_sent = now
            self._link.send(Alive(self._core.scheduler.counters.steps, self._core.has_work))

    def _occupancy(self) -> tuple[int, int]:
        scheduler = self._core.scheduler
        return scheduler.num_running, scheduler.manager.num_free


# The sizes are of one engine already: what is free now need not be divided again.
_SIZED: dict[str, object] = {"kv_cache_memory_bytes": None, "data_parallel_size": 1}


def load(options: dict[str, object], link: FrontEndLink, sizes: dict[str, int] | None = None) -> EngineCore:
    """The core, ready to step, with news of its loading to the front end. `sizes`: those of the engine before it."""
    started = reported = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal reported
        link.check()
        vocabulary.look()
        if time.monotonic() - reported > _LOADING_SECONDS or done >= total:
            reported = time.monotonic()
            link.send(Loading(done, total))

    vocabulary = _FrontEndVocabulary(link)
    pieces = vocabulary.wait if EngineConfig.of(**options).model.prepares_grammars else None
    try:
        vocabulary.look()
        core = _started(options, sizes or {}, progress, pieces)
        if pieces is not None:
            with phase("grammars"):
                vocabulary.wait_here()
                core.grammars.wait_until_loaded()
    except BaseException:
        vocabulary.give_up()
        raise
    config = core.config
    ready = Ready(
        model=str(config.model_path),
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        vocab_size=config.model.vocab_size,
        dtype=config.dtype,
        device=config.device,
        num_blocks=core.scheduler.manager.num_free,
        block_size=config.options.cache.block_size,
        seconds=time.monotonic() - started,
        kv_dtype=config.kv_dtype,
        techniques=active_techniques(config),
        memory={part: size * config.options.parallel.num_ranks for part, size in config.memory.items()},
        sizes={"num_gpu_blocks_override": config.num_blocks, "max_model_len": config.max_model_len},
    )
    freeze_loaded()
    may_clean_up()
    link.send(ready)
    return core


class _FrontEndVocabulary:
    """The vocabulary that the front end sends while the engine loads. This thread reads the socket, and another one waits."""

    def __init__(self, link: FrontEndLink) -> None:
        self._link = link
        self._vocabulary: Future[Vocabulary] = Future()
        self.wait = self._vocabulary.result              # for the other thread

    def look(self, wait: bool = False) -> bool:
        """Whether it has come."""
        if not self._vocabulary.done():
            for message in self._link.receive(wait):     # nothing else comes before Ready is sent
                if isinstance(message, Vocabulary) and not self._vocabulary.done():      # the first counts
                    self._vocabulary.set_result(message)
        return self._vocabulary.done()

    def wait_here(self) -> None:
        while not self.look(wait=True):
            self._link.check()

    def give_up(self) -> None:
        self._vocabulary.cancel()


def _started(
    options: dict[str, object], sizes: dict[str, int], progress: Callable[[int, int], None],
    pieces: Callable[[], Vocabulary] | None = None,
) -> EngineCore:
    """With the sizes of the engine before, if they fit: open requests may need all of its context, and free memory as it is
    measured at the moment may be less."""
    if sizes:
        try:
            return EngineCore.start(EngineConfig.of(**options | _SIZED | sizes), progress, pieces)
        except ConfigError as error:
            logger.warning("the KV cache cannot be as large as before: %s", error)
    return EngineCore.start(EngineConfig.of(**options), progress, pieces)


def run(options: dict[str, object], link: FrontEndLink, sizes: dict[str, int] | None = None) -> int:
    """Load and serve; the exit code. 1: a fault. 2: it cannot start with these options."""
    core = None
    try:
        core = load(options, link, sizes)
        EngineLoop(core, link).run()
        return 0
    except FrontEndGone:
        raise
    except Exception as error:
        # C code may return without an error where malloc fails: a SystemError.
        lost = isinstance(error, SystemError) and is_address_space_limited()
        if core is None and (lost or is_out_of_memory(error)):
            error = ConfigError(f"memory ran out while the engine loaded ({one_line(error)}); use a smaller model, "
                                "max_model_len, max_num_seqs or kv_cache_memory_bytes")
        if core is None and is_out_of_threads(error):
            error = ConfigError(f"the engine {NO_THREAD}")
        if not isinstance(error, RidgelineError):
            logger.exception("the engine failed")
        refused = core is None and isinstance(error, (ConfigError, ModelError))
        link.send(Failed(one_line(error), config=refused))
        return 2 if refused else 1
    finally:
        if core is not None:
            core.close()
