"""When the front end collects garbage and gives memory back."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from ridgeline.process import platform
from ridgeline.server import give_back
from ridgeline.server.give_back import (
    GROWTH,
    IDLE_GROWTH,
    IDLE_SECONDS,
    LONGEST_WAIT,
    MANY_OBJECTS,
    MOST_GROWTH,
    MUCH_GROWTH,
    VERY_MUCH_GROWTH,
    YOUNG,
    MemoryKeeper,
    collect_rarely,
    num_objects,
)


class Machine:
    """Sizes and times as a test sets them; counts collections."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size = 100 * 2**20
        self.now = 0.0
        self.done = 0
        self.idle = True
        self.objects = {1: 1000, 2: 1000}
        self.collections = 0
        self.generations: list[int] = []
        monkeypatch.setattr(give_back.gc, "collect", self._collect)
        self.keeper = MemoryKeeper(
            lambda: self.idle, lambda: self.done, lambda: self.size, lambda: self.now, lambda oldest: self.objects[oldest],
        )

    def _collect(self, generation: int = 2) -> None:
        self.collections += 1
        self.generations.append(generation)

    def tries(self, seconds: int) -> int:
        """How many tries there are in the next seconds; none gives anything back."""
        count = 0
        for _ in range(seconds):
            self.now += 1.0
            if self.keeper.is_due():
                count += 1
                self.keeper.collect()
                self.keeper.note()
        return count


def test_memory_is_given_back_within_seconds_of_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert machine.tries(10) == 0
    machine.size += GROWTH + 1
    assert machine.tries(1) == 1 and machine.collections == 1
    assert machine.tries(600) < 600 / LONGEST_WAIT + 10              # what cannot be given back is not tried for ever
    machine.done += 1                                                # a long request was read
    assert machine.tries(1) == 1


def test_a_busy_server_collects_only_after_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.idle = False
    machine.size += GROWTH + 1
    assert machine.tries(5) > 0 and machine.collections == 0
    machine.size += MUCH_GROWTH
    assert machine.tries(1) == 1 and machine.collections == 1
    assert machine.tries(100) > 0 and machine.collections == 1


def test_a_busy_server_looks_at_all_objects_only_after_very_much_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 3,000 connections that takes 0.2 s, in which no health check is answered."""
    machine = Machine(monkeypatch)
    machine.idle = False
    while VERY_MUCH_GROWTH not in range(machine.size - 100 * 2**20):
        machine.size += MUCH_GROWTH + 2**20
        machine.tries(1)
    assert machine.generations == [YOUNG] * (len(machine.generations) - 1) + [2] and len(machine.generations) > 5
    machine.idle = True
    machine.size += GROWTH
    machine.tries(1)
    assert machine.generations[-1] == 2


def test_a_crowd_of_connections_is_not_searched_for_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.idle = False
    machine.objects = {1: 3 * MANY_OBJECTS, 2: 3 * MANY_OBJECTS}
    machine.size += VERY_MUCH_GROWTH + MUCH_GROWTH
    assert machine.tries(10) > 0 and machine.collections == 0
    machine.size += 2 * VERY_MUCH_GROWTH                 # worth half a second for every gigabyte
    machine.tries(1)
    assert machine.generations == [2]
    machine.objects = {1: MANY_OBJECTS, 2: 3 * MANY_OBJECTS}         # few of them are new
    machine.size += MUCH_GROWTH + 2**20
    machine.tries(1)
    assert machine.generations == [2, YOUNG]
    machine.objects, machine.idle = {1: 10, 2: MANY_OBJECTS}, True   # the crowd has left
    machine.size += GROWTH
    machine.tries(1)
    assert machine.generations == [2, YOUNG, 2]


class Littered(Machine):
    """Each second leaves garbage of 200 bytes an object, and nothing else."""

    def litter(self, seconds: int, num_bytes: int) -> int:
        """The largest growth meanwhile."""
        first = largest = self.size
        for _ in range(seconds):
            self.size += num_bytes
            self.objects = {each: count + num_bytes // 200 for each, count in self.objects.items()}
            largest = max(largest, self.size)
            self.tries(1)
        return largest - first

    def _collect(self, generation: int = 2) -> None:
        super()._collect(generation)
        if generation == 2:
            self.size, self.objects = 100 * 2**20, {1: 1000, 2: 1000}


@pytest.mark.parametrize(("idle", "most"), [(True, IDLE_GROWTH), (False, MOST_GROWTH)])
def test_garbage_of_many_small_objects_is_collected(monkeypatch: pytest.MonkeyPatch, idle: bool, most: int) -> None:
    """Garbage counts as objects, too: a limit that grows with their number would never be reached."""
    machine = Littered(monkeypatch)
    machine.idle = idle
    each = 4 * 2**20
    assert machine.litter(1000, each) <= most + each and 2 <= machine.collections <= 1000 * each // most


def test_an_idle_server_does_not_look_at_many_objects_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.objects = {1: 3 * MANY_OBJECTS, 2: 3 * MANY_OBJECTS}
    for _ in range(int(3 * IDLE_SECONDS)):
        machine.size += IDLE_GROWTH // 4                 # connections, no garbage
        machine.tries(1)
    assert machine.collections == 3                      # after 5, 15 and 25 s
    machine.size += IDLE_GROWTH + 1
    machine.tries(100)
    assert machine.collections == 4                      # without growth never again


def test_python_itself_collects_only_new_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    monkeypatch.setattr(gc, "freeze", lambda: None)
    try:
        collect_rarely()
        assert gc.get_threshold()[0] <= 50_000 and min(gc.get_threshold()[1:]) > 10**6
    finally:
        gc.set_threshold(*before)


def test_objects_are_counted_up_to_a_generation() -> None:
    gc.collect()
    gc.disable()                                         # none of them becomes old meanwhile
    try:
        young, old = num_objects(YOUNG), num_objects(2)
        kept = [[] for _ in range(5000)]  # type: ignore[var-annotated]
        assert num_objects(YOUNG) >= young + 4000 and num_objects(2) > old + 4000 and len(kept) == 5000
        gc.collect()
        assert num_objects(YOUNG) < 4000
    finally:
        gc.enable()


def test_resident_bytes_are_those_of_this_process() -> None:
    platform.return_freed_memory()
    assert give_back.resident_bytes() > 2**20 or not Path("/proc/self/statm").exists()
