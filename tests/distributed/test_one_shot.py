"""The choice of one-shot all-reduces: when NCCL does everything, and that all ranks know it. No GPU is needed: what torch says of
GPUs is pretended. The kernel: tests/ops/test_one_shot_sum.py; two ranks on a GPU: tests/runner/test_gpu_ranks.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.distributed import one_shot_choice
from ridgeline.distributed.comm import ProcessAxis
from ridgeline.distributed.meet import ProcessMesh
from ridgeline.distributed.one_shot import OneShot
from ridgeline.distributed.one_shot_choice import (
    AGAIN,
    FAR,
    FINE,
    MANY,
    NO_MEMORY,
    NO_PEERS,
    NO_TRITON,
    REASONS,
    SHARED,
    SHARED_GPU,
    SLOW,
    WRONG,
    Facts,
    faster_up_to,
    obstacle,
    open_one_shot,
)
from ridgeline.sizes.mesh_shape import ONE_SHOT_CTAS, ONE_SHOT_MOST, one_shot_bytes, one_shot_memory

OWN, PEER = Facts(1, 10, 0), Facts(1, 11, 0)


@pytest.mark.parametrize(("reason", "everyone", "seen", "reaches"), [
    (FINE, [OWN, PEER], {10: 0, 11: 1}, True),
    (MANY, [OWN] + [Facts(1, 11 + place, 0) for place in range(8)], {}, True),
    (FAR, [OWN, Facts(2, 11, 0)], {10: 0, 11: 1}, True),
    (SHARED, [OWN, OWN], {10: 0}, True),
    (NO_PEERS, [OWN, PEER], {10: 0, 11: 1}, False),
    (NO_PEERS, [OWN, PEER], {10: 0}, True),              # Ray shows an actor its own GPU alone
    (AGAIN, [OWN, Facts(1, 11, 1)], {10: 0, 11: 1}, True),
])
def test_what_is_against_it(
    reason: int, everyone: list[Facts], seen: dict[int, int], reaches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_shot_choice.registry, "HAS_TRITON", True)
    monkeypatch.delenv(SHARED_GPU, raising=False)
    assert obstacle(OWN, everyone, seen, lambda index: reaches and index == 1) == reason
    monkeypatch.setenv(SHARED_GPU, "1")
    assert obstacle(OWN, everyone, seen, lambda index: reaches and index == 1) == (FINE if reason == SHARED else reason)
    monkeypatch.setattr(one_shot_choice.registry, "HAS_TRITON", False)
    assert obstacle(OWN, everyone, seen, lambda index: reaches) == (MANY if reason == MANY else NO_TRITON)


def test_the_size_up_to_which_it_is_faster() -> None:
    assert faster_up_to([(1, 5.0, 4.0), (2, 5.0, 4.5), (4, 5.0, 6.0), (8, 9.0, 8.0)]) == 2
    assert faster_up_to([(1, 4.0, 4.0), (2, 5.0, 1.0)]) == 0


def buffers(ranks: int = 2) -> OneShot:
    return OneShot(torch.zeros(one_shot_bytes(ranks) // 8, dtype=torch.int64), torch.zeros(ranks, dtype=torch.int64), 0)


class PretendedAxis:
    """Two ranks. Rank 1 says what this one does, but for `says`: (place in the conversation) -> number."""

    rank, size, group = 0, 2, None

    def __init__(self, says: dict[int, int] | None = None) -> None:
        self.says, self.said = says or {}, 0

    def all_gather(self, x: Tensor) -> Tensor:
        theirs = x.clone()
        for place in range(len(x)):
            theirs[place] = self.says.get(self.said, theirs[place])
            self.said += 1
        return torch.cat((x, theirs), dim=-1)


def opened(monkeypatch: pytest.MonkeyPatch, axis: PretendedAxis, **replaced: Any) -> OneShot | None:
    """With GPUs 0 and 1 in this machine; rank 1 is on the second, which is the number at place 1 of what it says."""
    monkeypatch.setattr(one_shot_choice.registry, "HAS_TRITON", True)
    pretended = {
        "device_count": lambda: 2, "can_device_access_peer": lambda one, other: True, "empty_cache": lambda: None,
        "get_device_properties": lambda index: SimpleNamespace(uuid=f"GPU-{index}"),
    }
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, value)
    made = buffers()
    steps = {
        "_symmetric": lambda ranks, device: made._buffer, "_mapped": lambda buffer, axis: made,
        "_trial": lambda made, axis, device: True, "time_both": lambda axis, made, device: [(8192, 2.0, 1.0), (16384, 2.0, 3.0)],
    }
    for name, value in (steps | replaced).items():
        monkeypatch.setattr(one_shot_choice, name, value)
    axis.says = {1: one_shot_choice.number_of("GPU-1")} | axis.says
    return open_one_shot(axis, torch.device("cpu", 0))  # type: ignore[arg-type]


def fail(*_: Any) -> Any:
    raise RuntimeError("no such driver")


def test_where_all_is_well_measured_sizes_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    found = opened(monkeypatch, PretendedAxis())
    assert found is not None and found.most == 8192
    assert found.takes(torch.zeros(2048)) and not found.takes(torch.zeros(2049)) and not found.takes(torch.zeros(0))


@pytest.mark.parametrize(("reason", "says", "replaced"), [
    (FAR, {0: 77}, {}),
    (NO_MEMORY, {}, {"_symmetric": fail}),
    (NO_MEMORY, {4: NO_MEMORY}, {}),                     # this rank has its memory, the other one has not
    (NO_MEMORY, {}, {"_mapped": fail}),
    (WRONG, {}, {"_trial": lambda *_: False}),
    (WRONG, {6: WRONG}, {}),
    (SLOW, {}, {"time_both": lambda *_: [(8192, 1.0, 2.0)]}),
])
def test_otherwise_nccl_does_everything_and_one_line_says_why(
    reason: int, says: dict[int, int], replaced: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(one_shot_choice.logger, "info", lambda text, *values: lines.append(text % values))
    assert opened(monkeypatch, PretendedAxis(says), **replaced) is None
    if fail in replaced.values():
        assert lines.pop(0) == "symmetric memory: RuntimeError: no such driver"
    assert lines == [f"all-reduces: NCCL alone, because {REASONS[reason]}"]


def test_ranks_on_one_card_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take turns: that says nothing."""
    monkeypatch.setenv(SHARED_GPU, "1")
    found = opened(monkeypatch, PretendedAxis({1: one_shot_choice.number_of("GPU-0")}), time_both=fail)
    assert found is not None and found.most == ONE_SHOT_MOST


def test_small_messages_of_an_axis_take_it_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    axis = ProcessAxis.__new__(ProcessAxis)
    axis.one_shot = buffers()
    took: list[str] = []
    monkeypatch.setattr(axis.one_shot, "sum", lambda x: took.append("one-shot"))
    monkeypatch.setattr(axis, "sum_over_group", lambda x: took.append("NCCL"))
    large, half = torch.zeros(ONE_SHOT_MOST // 4 + 1), torch.zeros(ONE_SHOT_MOST // 4)
    for x in (half, large, half.to(torch.bfloat16), half[:8].double(), half[:8].int(), half[:8].view(2, 4).t()):
        axis.all_reduce(x)
    assert took == ["one-shot", "NCCL", "one-shot", "NCCL", "NCCL", "NCCL"]


def test_giving_up_lets_go_of_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = ProcessMesh()
    mesh.tensor = SimpleNamespace(one_shot=buffers())  # type: ignore[assignment]
    mesh.give_up()
    buffer = mesh.tensor.one_shot._buffer                # type: ignore[attr-defined]
    begin = 2 * ONE_SHOT_MOST // 8
    assert (buffer[begin : begin + 2 * ONE_SHOT_CTAS] == 2**62).all()
    assert not buffer[:begin].any() and not buffer[begin + 2 * ONE_SHOT_CTAS :].any()


def test_the_buffer_is_in_the_ledger() -> None:
    assert all(one_shot_memory(ranks) == 2**21 > one_shot_bytes(ranks) for ranks in (2, 4, 8))
