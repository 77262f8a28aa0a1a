"""Several engines behind one front end (`--data-parallel-size`): each request goes where it is predicted to end first.

    ReplicatedLLM ─ tokenizer, limits, streams
      ├─ policies.Choice ─ by predicted seconds, as `ridgeline route` does between servers
      ├─ ReplicaLLM 0 ─ supervisor ─ engine's process
      └─ ReplicaLLM 1 ─ …

When an engine is lost, its open requests go on in others after the tokens that their readers have: greedy and seeded ones
exactly as they would have. Its own restart happens meanwhile, and new requests go elsewhere until then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.config import EngineConfig
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.open_requests import OpenRequests
from ridgeline.engine.client.watchdog import Supervision
from ridgeline.engine.ipc import Profiled
from ridgeline.engine.replicas.placement import Placement, placements, visible_gpus
from ridgeline.engine.replicas.policies import Choice
from ridgeline.engine.replicas.prefix_tree import PrefixTree
from ridgeline.engine.replicas.replica_llm import ReplicaLLM
from ridgeline.engine.replicas.replica_load import Habits, ReplicaLoad
from ridgeline.engine.replicas.routed_prompt import RoutedPrompt, tokens_prompt
from ridgeline.errors import BadRequest, RidgelineError
from ridgeline.messages import Request
from ridgeline.models.model_config import load_model_config
from ridgeline.process.log import get_logger
from ridgeline.resolve import model_path

logger = get_logger("async_llm")

POLICY = "predicted"


class ReplicatedLLM(AsyncLLM):
    """As AsyncLLM, with `data_parallel_size` engines. `running`, `free_blocks`, `load` and `ready` are of all of them."""

    def __init__(
        self, model: str | Path | None = None, *, supervision: Supervision | None = None, **options: Any
    ) -> None:
        super().__init__(model, supervision=supervision, **options)
        places, rules, habits = placements(self.config, visible_gpus()), supervision or Supervision(), Habits()
        loads = [ReplicaLoad(habits) for _ in places]
        self.choice = Choice(POLICY, loads)
        self._stopping = False                           # engines that end now are not lost
        self._replicas = [
            ReplicaLLM(number, _of_one(self.config, place), rules, self.engine_module, place, load, self, self.load)
            for number, (place, load) in enumerate(zip(places, loads, strict=True))
        ]
        for each in self._replicas:
            each.requests.send_ticket = self._ticket_sender(each.number)

    def _ticket_sender(self, number: int) -> Callable[[RoutedPrompt], Any]:
        return lambda prompt: self.choice.send(number, prompt, time.monotonic())

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self, on_loading: Callable[[int, int], None] | None = None) -> None:
        """Start all engines. The first is ready before the others begin: they get its sizes."""
        async with self._starting:
            if not self.hidden_size:
                self.hidden_size = (await asyncio.to_thread(load_model_config, model_path(self.config))).hidden_size
                try:
                    await self._start_all(on_loading or (lambda done, total: None))
                except BaseException:
                    await self.shutdown()
                    raise
        self.require_alive()

    async def _start_all(self, on_loading: Callable[[int, int], None]) -> None:
        first, *others = self._replicas
        done = [0] * len(self._replicas)

        def progress(number: int) -> Callable[[int, int], None]:
            def loaded(part: int, total: int) -> None:
                done[number] = part
                on_loading(sum(done), total * len(done))

            return loaded

        await asyncio.gather(self.load_tokenizer(), first.start(progress(0)))
        for each in others:
            each.be_as(first)
        await asyncio.gather(*(each.start(progress(each.number)) for each in others))

    def require_alive(self) -> None:
        if not any(each.is_alive for each in self._replicas):
            self._replicas[0].require_alive()

    @property
    def engines(self) -> Sequence[ReplicaLLM]:
        return self._replicas

    @property
    def is_alive(self) -> bool:
        return any(each.is_alive for each in self._replicas)

    @property
    def state(self) -> str:
        """ok while any engine is. Otherwise the state of the one that is nearest to it."""
        states = {each.state for each in self._replicas}
        return next(state for state in ("ok", "loading", "restarting", "stalled", "dead") if state in states)

    @property
    def num_open(self) -> int:
        return sum(each.num_open for each in self._replicas)

    @property
    def num_restarts(self) -> int:
        return sum(each.num_restarts for each in self._replicas)

    @property
    def num_aborted(self) -> int:
        return sum(each.num_aborted for each in self._replicas)

    async def died(self) -> RidgelineError:
        """Wait until the last engine has ended for good."""
        return (await asyncio.gather(*(each.died() for each in self._replicas)))[-1]

    async def shutdown(self) -> None:
        self._stopping = True
        await asyncio.gather(*(each.shutdown() for each in self._replicas))
        await super().shutdown()

    # -- requests ------------------------------------------------------------------------------------------------------

    def _usable(self, but: int = -1) -> list[int]:
        """Engines that take requests now; if there are none, those that are on their way back."""
        others = [each for each in self._replicas if each.number != but]
        return [each.number for each in others if each.state == "ok"] or [each.number for each in others if each.is_alive]

    def _choose(self, request: Request) -> OpenRequests:
        prompt = self._prompt(request)
        number = self.choice.choose(prompt, time.monotonic(), self._usable() or [0])
        return self._replicas[number].requests.expect(prompt)

    def _prompt(self, request: Request, streams: bool = True) -> RoutedPrompt:
        most = None if request.params.max_tokens is None else request.params.max_tokens * request.params.n
        ids, is_cached = request.prompt_token_ids, request.prefix_caching and self.config.cache.enable_prefix_caching
        return tokens_prompt(ids, request.cache_salt, most, is_cached, streams)

    def _abandon(self, wire_id: str) -> None:
        for each in self._replicas:
            each.requests.abandon(wire_id)

    async def abort(self, request_id: str) -> None:
        for each in self._replicas:
            await each.abort(request_id)

    async def reset_prefix_cache(self) -> bool:
        await self.start()
        done = await asyncio.gather(*(each.reset_prefix_cache() for each in self._replicas if each.is_alive))
        for load in self.choice.loads:
            load.tree = PrefixTree()
        return all(done)

    async def switch(self, technique: str, on: bool) -> None:
        """All engines or none."""
        await self.start()
        living = [each for each in self._replicas if each.is_alive]
        if any(each.state != "ok" for each in living):
            raise BadRequest("an engine is restarting; try again later")
        for each in living:
            await each.switch(technique, on)
        self._combine()

    async def profile(self, steps: int) -> Profiled:
        """Of the first engine that runs: a profile is about steps, and all engines have the same."""
        await self.start()
        running = next((each for each in self._replicas if each.state == "ok"), None)
        if running is None:
            raise BadRequest("no engine runs at the moment; try again later")
        return await running.profile(steps)

    # -- news of an engine ---------------------------------------------------------------------------------------------

    def engine_changed(self) -> None:
        self.running = sum(each.running for each in self._replicas)
        self.free_blocks = sum(each.free_blocks for each in self._replicas)

    def engine_opened(self, replica: ReplicaLLM) -> None:
        self.choice.loads[replica.number].tree = PrefixTree()        # its cache is empty
        self._combine()

    def engine_lost(self, replica: ReplicaLLM) -> None:
        """Its requests go on elsewhere, if any other engine runs."""
        self.engine_changed()
        targets, moved = self._usable(but=replica.number), 0
        if not self._stopping and any(self._replicas[number].state == "ok" for number in targets):
            for wire_id, opened in list(replica.requests.by_wire_id.items()):
                if opened.may_move:
                    replica.requests.release(wire_id)
                    prompt = self._prompt(opened.request, streams=not opened.begun)
                    number = self.choice.choose(prompt, time.monotonic(), targets)
                    self._replicas[number].requests.expect(prompt).take_over(wire_id, opened)
                    moved += 1
        if moved:
            replica.num_moved += moved
            self.num_moved += moved
            logger.warning("engine %d stopped: %d of its requests continue in other engines", replica.number, moved)

    def _combine(self) -> None:
        """What all engines have together, once all of them have been ready."""
        known = [each.ready for each in self._replicas if each.ready is not None]
        if len(known) == len(self._replicas):
            self.ready = msgspec.structs.replace(
                known[0], max_model_len=min(each.max_model_len for each in known), techniques=known[0].techniques,
                max_num_seqs=sum(each.max_num_seqs for each in known), num_blocks=sum(each.num_blocks for each in known),
            )
            self.engine_changed()


def _of_one(config: EngineConfig, place: Placement) -> EngineConfig:
    """The options of one engine. Engines on one GPU divide what all may use; on a CPU each divides the memory itself."""
    if place.device == "CPU" or place.sharing == 1:
        return config
    share = config.cache.gpu_memory_utilization / place.sharing
    return replace(config, cache=replace(config.cache, gpu_memory_utilization=share))
