"""Recordings of native calls: they can be repeated with other inputs, reuse memory, and name what they cannot hold."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from ridgeline.ops.activation import gated_activation
from ridgeline.ops.cpu import native
from ridgeline.ops.cpu.recording import Arena, Recording
from ridgeline.ops.rms_norm import rms_norm

WEIGHT = torch.ones(64)


@pytest.fixture(autouse=True)
def built() -> None:
    assert native.library() is not None, "make install builds the kernels"


def layers(x: Tensor, residual: Tensor, count: int) -> Tensor:
    """Every op's result is let go of as soon as the next one has read it."""
    for _ in range(count):
        x, residual = rms_norm(x, WEIGHT, 1e-5, residual=residual)
        x = rms_norm(x.view(-1, 2, 32).flatten(1), WEIGHT, 1e-5)
    return x


def test_a_program_repeats_the_calls_with_what_the_inputs_hold_then() -> None:
    x, residual = torch.randn(3, 64), torch.randn(3, 64)
    recording = Recording(Arena())
    with torch.inference_mode(), recording.of_calls():
        out = layers(x, residual, 4)
    assert not recording.missing
    program = recording.program()
    assert len(program) == 8
    assert torch.equal(out, layers(x, residual, 4))      # the pass that was recorded has computed, too
    x.copy_(torch.randn(3, 64))
    program.run()
    assert torch.equal(out, layers(x, residual, 4))


def test_recordings_share_the_memory_of_what_is_let_go_of() -> None:
    arena = Arena()
    for rows, count in ((4, 2), (4, 20), (3, 20)):
        x, residual = torch.randn(rows, 64), torch.randn(rows, 64)
        recording = Recording(arena)
        with torch.inference_mode(), recording.of_calls():
            out = arena.kept(layers(x, residual, count))
        assert torch.equal(out, layers(x, residual, count))
    # A residual, its successor, and the two results of which one is read while the other is written.
    assert arena.num_bytes <= 4 * 4 * 64 * 4


def test_what_is_still_used_is_not_overwritten() -> None:
    arena, kept = Arena(), []
    x = torch.randn(2, 64)
    with torch.inference_mode(), Recording(arena).of_calls():
        for number in range(4):
            kept.append(rms_norm(x * (number + 1), WEIGHT * (number + 1), 1e-5)[:1])         # a view keeps it, too
    for number, each in enumerate(kept):
        torch.testing.assert_close(each, rms_norm(x * (number + 1), WEIGHT * (number + 1), 1e-5)[:1])


def test_an_op_of_torch_is_named_and_views_are_not() -> None:
    x = torch.randn(3, 64)
    recording = Recording(Arena())
    with torch.inference_mode(), recording.of_calls():
        rms_norm(x.view(3, 64)[1:].unsqueeze(0).squeeze(0), WEIGHT, 1e-5)
    assert not recording.missing
    with torch.inference_mode(), recording.of_calls():
        out = gated_activation(torch.cat([x, x], dim=1)[:, :64], "silu")
        rms_norm(x.t().reshape(-1, 64), WEIGHT, 1e-5)    # this view would copy
    assert "cat" in recording.missing and torch.isfinite(out).all()


def test_the_library_is_as_before_afterwards() -> None:
    before = dict(vars(native.library()))
    with pytest.raises(ZeroDivisionError), Recording(Arena()).of_calls():
        assert vars(native.library())["rms_norm"] is not before["rms_norm"]
        raise ZeroDivisionError
    assert vars(native.library()) == before


def test_calls_of_another_thread_are_not_recorded() -> None:
    """A second engine of the process: its calls work, and are none of this program's."""
    x, other, results = torch.randn(3, 64), torch.randn(2, 64), list[Tensor]()
    expected = rms_norm(other, WEIGHT, 1e-5)
    recording = Recording(Arena())
    with torch.inference_mode(), recording.of_calls():
        rms_norm(x, WEIGHT, 1e-5)
        thread = threading.Thread(target=lambda: results.append(rms_norm(other, WEIGHT, 1e-5)))
        thread.start()
        thread.join()
    assert len(recording.program()) == 1 and torch.equal(results[0], expected)


def test_a_recording_needs_no_compiler() -> None:
    """torch wraps the handlers of dispatch modes, and the wrapper imports its compiler in the first call."""
    assert not hasattr(Recording.__torch_dispatch__, "__wrapped__")
