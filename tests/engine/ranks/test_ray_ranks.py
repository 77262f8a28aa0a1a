"""Ranks on a Ray cluster, with a Ray that is pretended: what is asked of it, and what becomes of its answers. docs/cluster.md
says what was tried with a real one."""

from __future__ import annotations

import signal
import subprocess
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from ridgeline.engine.ranks import ray_ranks
from ridgeline.engine.ranks.ray_ranks import RayLauncher, RayRank, by_machine
from ridgeline.errors import ConfigError, EngineDead
from ridgeline.sizes.mesh_shape import MeshShape


class Call:
    """An actor's method: remote() notes its arguments and answers."""

    def __init__(self, answer: Any = None) -> None:
        self.answer, self.asked = answer, list[tuple[Any, ...]]()

    def remote(self, *arguments: Any) -> Any:
        self.asked.append(arguments)
        return self.answer


class PretendedRay:
    """Two machines; rank 1 is on the second."""

    def __init__(self, has_room: bool = True) -> None:
        self.killed: list[Any] = []
        self.addresses = [f"10.0.0.{rank + 1}" for rank in range(4)]     # of the places that it gives
        self.bundles: list[dict[str, float]] = []
        self.removed = 0
        self.has_room = has_room
        self.ended: list[Future[int]] = []
        self.keepers: list[Any] = []
        self.util = SimpleNamespace(
            get_node_ip_address=lambda: "127.0.0.1", placement_group=self._place, remove_placement_group=self._remove,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group, rank: rank),
        )

    def _place(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.bundles = bundles
        return SimpleNamespace(wait=lambda seconds: self.has_room)

    def _remove(self, group: Any) -> None:
        self.removed += 1

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    def remote(self, kind: Any) -> Any:
        return SimpleNamespace(options=lambda scheduling_strategy, **_: SimpleNamespace(
            remote=lambda: self._keeper(scheduling_strategy)))

    def _keeper(self, rank: int) -> Any:
        ended: Future[int] = Future()
        made = SimpleNamespace(
            place=Call((self.addresses[rank], [])), start=Call(), wait=Call(SimpleNamespace(future=lambda: ended)), ended=ended
        )
        self.keepers.append(made)
        return made

    def get(self, found: Any, timeout: float) -> Any:
        return found

    def kill(self, keeper: Any) -> None:
        self.killed.append(keeper)


TWO_STAGES = MeshShape(1, 2)


def launcher(
    monkeypatch: pytest.MonkeyPatch, ray: PretendedRay, shape: MeshShape = TWO_STAGES
) -> tuple[RayLauncher, zmq.Context]:
    monkeypatch.setattr(ray_ranks, "load_ray", lambda: ray)
    context = zmq.Context()
    return RayLauncher(context, shape, False), context


def test_a_place_for_every_rank_and_an_actor_that_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = PretendedRay()
    made, context = launcher(monkeypatch, ray)
    assert ray.bundles == [{"CPU": 1.0, "node:127.0.0.1": 0.001}, {"CPU": 1.0}]       # rank 0 is here
    made.start(1, {"rank": 1})
    ((settings, keys),) = ray.keepers[1].start.asked
    assert settings == {"rank": 1, "device_index": 0} and keys == made.wire.keys and len(keys["secret"]) == 40
    assert not ray.keepers[0].start.asked
    made.close()
    context.destroy(linger=0)
    assert ray.killed == ray.keepers and ray.removed == 1


def test_ranks_of_a_stage_are_on_one_machine() -> None:
    """Two on each of three machines, which Ray gives in any order."""
    addresses = ["10.0.0.9", "10.0.0.2", "10.0.0.1", "10.0.0.9", "10.0.0.1", "10.0.0.2"]
    order = by_machine(addresses, "10.0.0.9")
    assert order[0] == 0 and sorted(order) == list(range(6))
    assert [addresses[place] for place in order] == ["10.0.0.9"] * 2 + ["10.0.0.1"] * 2 + ["10.0.0.2"] * 2


def test_ranks_and_their_actors_are_ordered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = PretendedRay()
    ray.addresses = ["127.0.0.1", "10.0.0.2", "127.0.0.1", "10.0.0.2"]
    made, context = launcher(monkeypatch, ray, MeshShape(2, 2))
    made.start(1, {"rank": 1})
    made.start(2, {"rank": 2})
    assert ray.keepers[2].start.asked and ray.keepers[1].start.asked and not ray.keepers[3].start.asked
    made.close()
    context.destroy(linger=0)


def test_too_few_machines_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineDead, match="no room for 2 ranks with one CPU each: it has 3 CPUs and 0 GPUs"):
        launcher(monkeypatch, PretendedRay(has_room=False))


def test_the_end_of_a_rank_and_of_its_actor() -> None:
    ray = PretendedRay()
    by_itself, with_its_actor = (RayRank(ray, ray._keeper(rank)) for rank in (1, 2))
    assert by_itself.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        by_itself.wait(0.0)
    ray.keepers[0].ended.set_result(3)
    ray.keepers[1].ended.set_exception(RuntimeError("the actor is gone"))
    assert by_itself.poll() == by_itself.wait(0.0) == 3
    assert with_its_actor.poll() == -9
    with_its_actor.kill()
    assert ray.killed == [ray.keepers[1]]


def test_an_end_counts_when_ray_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> None:
        raise ConnectionError("no cluster")

    ray = PretendedRay()
    made, context = launcher(monkeypatch, ray)
    rank = made.start(1, {"rank": 1})
    monkeypatch.setattr(ray, "kill", fail)
    monkeypatch.setattr(ray.util, "remove_placement_group", fail)
    rank.kill()
    assert rank.poll() == rank.wait(0.0) == -9
    made.close()
    context.destroy(linger=0)


def test_only_connections_to_machines_of_ended_ranks_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[str] = []
    monkeypatch.setattr(ray_ranks, "break_connections", broken.append)
    made, context = launcher(monkeypatch, ray := PretendedRay())
    rank = made.start(1, {"rank": 1})
    made.break_off()
    assert not broken
    rank.kill()
    made.break_off()
    assert broken == ["10.0.0.2"] and len(ray.keepers) == 2
    made.close()
    context.destroy(linger=0)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(ray_ranks.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'ridgeline\[ray\]'"):
        ray_ranks.load_ray()


def test_without_a_cluster_the_command_is_named() -> None:
    def refuse(**_: Any) -> None:
        raise ConnectionError("no cluster")

    with pytest.raises(ConfigError, match="ray start --head"):
        ray_ranks.join_cluster(SimpleNamespace(init=refuse))


def test_an_end_by_signal_stays_as_it_was() -> None:
    """Ray has a handler of its own, which prints its stack."""
    before = signal.getsignal(signal.SIGTERM)
    ray_ranks.join_cluster(SimpleNamespace(init=lambda **_: signal.signal(signal.SIGTERM, signal.SIG_IGN)))
    assert signal.getsignal(signal.SIGTERM) == before
