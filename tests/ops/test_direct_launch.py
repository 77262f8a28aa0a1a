"""Direct launches: the variant that Triton chose is used again exactly where Triton would choose it again."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.ops import direct_launch
from ridgeline.ops.direct_launch import collected_once, direct, kept_descriptor, set_direct


def _kernel(x_ptr, y_ptr, count, size, eps, BLOCK: constexpr, FLAG: constexpr = False):  # type: ignore[no-untyped-def] # noqa: F821
    pass


def _tiles(tiles, out_ptr, BLOCK: constexpr):  # type: ignore[no-untyped-def] # noqa: F821
    pass


class JITFunction:
    """What is used of Triton's: its parameters, and how it launches."""

    def __init__(self, function: Any, do_not_specialize: list[str]) -> None:
        self.params = [
            SimpleNamespace(
                name=name, is_constexpr="constexpr" in str(each.annotation), do_not_specialize=name in do_not_specialize,
                has_default=each.default is not each.empty, default=each.default,
            )
            for name, each in inspect.signature(function).parameters.items()
        ]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("each test has its own, which notes the launch")

    def create_binder(self) -> None: ...

    def __getitem__(self, grid: Any) -> Any:
        raise AssertionError("a direct kernel has another")


class Launches:
    """Stands for Triton: `slow` are launches that it specialised itself, `fast` those that went to the C launcher."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: Any = _kernel, **launcher: Any) -> None:
        self.slow: list[Any] = []
        self.fast: list[tuple[Any, ...]] = []
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(direct_launch, "_knows_launchers", lambda: True)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
        parts = {"launch": lambda *args: self.fast.append(args), "launch_pdl": True, "launch_cooperative_grid": False,
                 "global_scratch_size": 0, "profile_scratch_size": 0}
        compiled = SimpleNamespace(run=SimpleNamespace(**parts | launcher), function="function", packed_metadata=(4, 1, 0))
        self.kernel = direct(JITFunction(function, do_not_specialize=["count"] if function is _kernel else []))

        def run(*args: Any, grid: Any, warmup: bool, **constants: Any) -> Any:
            self.slow.append((grid, args, constants))
            return compiled

        self.kernel.run = run

    def __call__(self, *args: Any, grid: tuple[int, ...] = (5,), **constants: Any) -> str:
        before = len(self.slow)
        self.kernel[grid](*args, **({"BLOCK": 64, "num_warps": 4} | constants))
        return "slow" if len(self.slow) > before else "fast"


X, Y = torch.zeros(64), torch.zeros(64)


def test_the_second_launch_goes_to_the_c_launcher_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    assert launches(X, Y, 3, 32, 0.5, FLAG=True) == "slow"
    assert launches(X, Y, 3, 32, 0.25, grid=(2, 7), FLAG=True) == "fast"
    fixed = ("function", False, True, None, None, (4, 1, 0), None, None, None)
    assert launches.fast == [(2, 7, 1, 77, *fixed, X.data_ptr(), Y.data_ptr(), 3, 32, 0.25, 64, True)]


def test_a_constant_that_is_left_out_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    launches(X, Y, 3, 32, 0.5)
    launches(X, Y, 3, 32, 0.5)
    assert launches.fast[0][-2:] == (64, False)


@pytest.mark.parametrize(("change", "found"), [
    ({}, "fast"),
    ({"count": 1}, "fast"),                              # not specialised: a count changes from step to step
    ({"count": 2**31}, "slow"),                          # 64 bits wide
    ({"size": 1}, "slow"), ({"size": 33}, "slow"), ({"size": 48}, "fast"),
    ({"eps": 1.0}, "fast"),
    ({"x": torch.zeros(64, dtype=torch.bfloat16)}, "slow"),
    ({"x": torch.nn.Parameter(torch.zeros(64))}, "fast"),
    ({"BLOCK": 32}, "slow"), ({"num_warps": 8}, "slow"), ({"launch_pdl": True}, "slow"),
])
def test_what_a_variant_depends_on(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], found: str) -> None:
    launches = Launches(monkeypatch)
    arguments = {"x": X, "y": Y, "count": 3, "size": 32, "eps": 0.5}
    launches(*arguments.values())
    values = [change.pop(name, value) for name, value in arguments.items()]
    assert launches(*values, **change) == found


def test_unaligned_pointers_are_left_to_triton_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    launches(X, Y, 3, 32, 0.5)
    assert [launches(X[1:], Y, 3, 32, 0.5) for _ in range(2)] == ["slow", "slow"]
    first = Launches(monkeypatch)
    first(X[1:], Y, 3, 32, 0.5)                          # its variant is not the aligned ones'
    assert [first(X, Y, 3, 32, 0.5) for _ in range(2)] == ["slow", "fast"]


@pytest.mark.parametrize("launcher", [{"global_scratch_size": 16}, {"profile_scratch_size": 16}])
def test_kernels_with_scratch_memory_are_left_to_triton(monkeypatch: pytest.MonkeyPatch, launcher: dict[str, Any]) -> None:
    launches = Launches(monkeypatch, **launcher)
    assert [launches(X, Y, 3, 32, 0.5) for _ in range(3)] == ["slow"] * 3


def test_other_arguments_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    assert [launches(X, Y, 3, True, 0.5) for _ in range(2)] == ["slow"] * 2
    launches(X, Y, 3, 32, 0.5)
    set_direct(False)
    try:
        assert launches(X, Y, 3, 32, 0.5) == "slow"
    finally:
        set_direct(True)
    assert launches(X, Y, 3, 32, 0.5) == "fast"


def test_collected_launches_reach_triton_once_for_each_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    launches(X, Y, 3, 32, 0.5)
    launches.slow.clear()
    with collected_once():
        for size, block in ((32, 64), (48, 64), (33, 64), (32, 64), (32, 128), (33, 64)):
            launches(X, Y, 3, size, 0.5, BLOCK=block)
        launches(X[1:], Y, 3, 32, 0.5)
        launches(X[1:], Y, 3, 32, 0.5)                   # unaligned: Triton tells them apart
    assert [(args[3], constants["BLOCK"]) for _, args, constants in launches.slow] == [
        (32, 64), (33, 64), (32, 128), (32, 64), (32, 64),
    ]
    assert not launches.fast
    assert launches(X, Y, 3, 32, 0.5) == "fast"


class Descriptor:
    """As Triton's: what it needs of a tensor are an address and a dtype."""

    block_shape: list[int]

    def __init__(self, base: Any, shape: list[int], strides: list[int], block_shape: list[int]) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape


def test_descriptors_are_encoded_once_for_each_address(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def encode(described: Any, meta: Any) -> list[Any]:
        encoded.append(described.base.data_ptr())
        return [f"map {len(encoded)} {meta}", *described.shape, *described.strides]

    for name in ("triton", "triton.backends", "triton.backends.nvidia"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", SimpleNamespace(make_tensordesc_arg=encode))
    launches = Launches(monkeypatch, _tiles)
    launcher, tensordesc_meta = launches.kernel.run(grid=(), warmup=True).run.launch, ["meta"]
    launches.slow.clear()
    wrapped = lambda *args: launcher(*args, tensordesc_meta)  # noqa: E731 — only its closure is looked at
    launches = Launches(monkeypatch, _tiles, launch=wrapped)

    def tiles(tensor: torch.Tensor, block: int = 8) -> Any:
        return kept_descriptor(Descriptor, tensor.data_ptr(), tensor.dtype, (8, 8), (8, 1), (block, 8))

    assert tiles(X) is tiles(X) is not tiles(Y)
    assert [launches(tiles(X), Y) for _ in range(3)] == ["slow", "fast", "fast"]
    assert launches(tiles(Y), Y) == "fast" and launches(tiles(X, 4), Y) == "slow"
    assert encoded == [X.data_ptr(), Y.data_ptr()]
    assert launches(Descriptor(X, [8, 8], [8, 1], [8, 8]), Y) == "slow"      # not kept: its block may be any
    kept_descriptor.cache_clear()


def test_another_triton_launches_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(monkeypatch)
    monkeypatch.setattr(direct_launch, "_knows_launchers", lambda: False)
    assert [launches(X, Y, 3, 32, 0.5) for _ in range(3)] == ["slow"] * 3


def test_without_the_expected_parts_a_kernel_stays_as_it_is() -> None:
    plain = SimpleNamespace(run=None)
    assert direct(plain) is plain and type(plain) is SimpleNamespace
    assert direct_launch._inside(lambda: None) is None
