"""Copies of results from the device to the host and of masks to the device, and the time of a step. Only wait() waits for the
device.
"""

from __future__ import annotations

import functools
import time

import numpy as np
import torch
from torch import Tensor

from ridgeline.messages import Logprobs, StepPlan, Want
from ridgeline.sizes.graph_shapes import MOST_VERIFIED
from ridgeline.sizes.sampling_costs import mask_bytes

_FEW_BYTES = 2**17                   # of masks: copied in 5 us, and another stream takes the host longer than that
MOST_ROOMS = 512                     # views that a landing keeps: there are more mixtures of drafts than that
_ALIGN = 16                          # bytes: a kernel is compiled once for pointers that are multiples of it, and once for others


def after_tokens(count: int) -> int:
    """Bytes of `count` tokens in `Computed.greedy`."""
    return -(-8 * count // _ALIGN) * _ALIGN


def greedy_bytes(max_rows: int) -> int:
    """Most of `Computed.greedy`."""
    return 9 * max(max_rows, MOST_VERIFIED) + 8 * max_rows + 2 * _ALIGN


class Fetched:
    """Copies of device tensors as numpy arrays, started now; to be read once the step's landing has been waited for."""

    def __init__(self, *tensors: Tensor) -> None:
        on_gpu = tensors[0].is_cuda
        # Into pinned memory: any other makes the host wait for the copy, and so for every step before it. Copied on a
        # CPU, too: the next step may write to the same place.
        self._tensors = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu).copy_(tensor, non_blocking=on_gpu)
            for tensor in tensors
        ]

    def arrays(self) -> list[np.ndarray]:
        return [tensor.numpy() for tensor in self._tensors]


class Landing:
    """A step's buffer on the host: its tokens, and the device's times; and one on the device for tokens that the sampler chooses.
    It is reused, since allocating pinned memory and events takes longer than filling them."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else None
        self._times = [0.0, 0.0]
        self._memory = torch.empty(greedy_bytes(max_rows + 1), dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes = self._memory.numpy()
        self._parts: dict[int, Tensor] = {}              # of the memory, by size
        self._there = torch.zeros(greedy_bytes(max_rows + 1), dtype=torch.uint8, device=device)
        self._rooms: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}   # of that, by numbers of tokens and rows
        self._size = self._count = 0

    def start(self) -> None:
        self._mark(0)

    def room(self, count: int, drafted: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """On the device: all of it, as Computed.greedy is laid out, the tokens, which of them failed, and of `drafted` rows with
        drafts how many are accepted."""
        found = self._rooms.get((count, drafted))
        if found is None:
            if len(self._rooms) == MOST_ROOMS:
                self._rooms.clear()
            second = after_tokens(count)
            third = second + after_tokens(drafted)
            whole = self._there[: third + count]
            found = self._rooms[count, drafted] = (
                whole, whole[: 8 * count].view(torch.int64), whole[third:].view(torch.bool),
                whole[second : second + 8 * drafted].view(torch.int64),
            )
        return found

    def fetch(self, chosen: Tensor, count: int) -> None:
        """Copy the tokens of `count` positions, laid out as in Computed.greedy. Called before stop()."""
        self._size = size = len(chosen)
        self._count = count
        if size not in self._parts:
            self._parts[size] = self._memory[:size]
        self._parts[size].copy_(chosen, non_blocking=True)

    def stop(self) -> None:
        self._mark(1)

    def _mark(self, which: int) -> None:
        if self._events is None:
            self._times[which] = time.perf_counter()
        else:
            self._events[which].record()

    def wait(self) -> float:
        """Until everything before stop() is done and here; the seconds between start and stop, on the device."""
        if self._events is None:
            return self._times[1] - self._times[0]
        self._events[1].synchronize()
        return self._events[0].elapsed_time(self._events[1]) / 1e3

    def chosen(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and which of them failed, until the next fetch()."""
        count, size = self._count, self._size
        return self._bytes[: 8 * count].view(np.int64), self._bytes[size - count : size].view(np.bool_)

    def accepted(self, count: int) -> np.ndarray:
        """Drafts of the first rows, of a step that has some."""
        first = after_tokens(self._count)
        return self._bytes[first : first + 8 * count].view(np.int64)


def pinned_array(shape: tuple[int, int], on_gpu: bool) -> np.ndarray:
    """Room for int32 that is sent to the device again and again (`send_beside`); on a CPU it is the device's own."""
    return torch.empty(shape, dtype=torch.int32, pin_memory=True).numpy() if on_gpu else np.empty(shape, np.int32)


class _Beside:
    """A second stream, and reusable device memory for what is sent there in every step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._there = torch.cuda.Event()
        self._room = torch.empty(0, dtype=torch.int32, device=device)
        self._views: dict[tuple[int, ...], Tensor] = {}  # of the room, by shape

    def reserve(self, size: int) -> None:
        if self._room.numel() < size:
            torch.cuda.synchronize(self._device)         # the old room may be in use
            self._room = torch.empty(size, dtype=torch.int32, device=self._device)
            self._views.clear()

    def send(self, array: np.ndarray) -> Tensor:
        sent = self._views.get(array.shape)
        if sent is None:
            self.reserve(array.size)
            sent = self._views[array.shape] = self._room[: array.size].view(array.shape)
        if array.nbytes <= _FEW_BYTES:
            return sent.copy_(torch.from_numpy(array), non_blocking=True)
        with torch.cuda.stream(self._stream):
            sent.copy_(torch.from_numpy(array), non_blocking=True)
            self._there.record()
        torch.cuda.current_stream(self._device).wait_event(self._there)
        return sent


def send_beside(array: np.ndarray, device: torch.device) -> Tensor:
    """The int32 array on the device, sent while the device computes what was launched before, unless it is small: what is
    launched from now on waits for it. The array must stay as it is until the step that was launched last has been read, and what
    was sent before is gone: the step that read it must have been collected."""
    return torch.from_numpy(array) if device.type != "cuda" else _beside(device).send(array)


def reserve_masks(rows: int, vocab: int, device: torch.device) -> None:
    """Room on the device for what `send_beside` sends: which of `vocab` ids a grammar allows, for `rows` rows."""
    if device.type == "cuda":
        _beside(device).reserve(mask_bytes(rows=rows, vocab=vocab) // 4)


@functools.cache
def _beside(device: torch.device) -> _Beside:
    return _Beside(device)


def pooled(plan: StepPlan, starts: np.ndarray, num_prompt: np.ndarray, hidden: Tensor) -> dict[int, Fetched]:
    """Hidden states after the last norm: the sum over this chunk's prompt tokens, or the last token's. `num_prompt`: by row."""
    found: dict[int, Fetched] = {}
    ends = np.cumsum(plan.num_tokens)
    for place in np.nonzero(plan.want & np.int8(Want.HIDDEN | Want.HIDDEN_SUM))[0].tolist():
        first, end = int(ends[place] - plan.num_tokens[place]), int(ends[place])
        if plan.want[place] & Want.HIDDEN_SUM:
            of_prompt = int(num_prompt[plan.rows[place]] - starts[place])
            found[place] = Fetched(hidden[first : min(end, first + of_prompt)].sum(0, dtype=torch.float32))
        else:
            found[place] = Fetched(hidden[end - 1].float())
    return found


def logprobs_of(
    asked: list[tuple[int, int]], fetched: Fetched | None, listed: list[np.ndarray], listed_logprobs: Fetched | None
) -> dict[int, Logprobs]:
    """By place; of all positions that were sampled there, if any asked. `asked`: of each position its place, and how many
    alternatives; `listed`: tokens that each lists, with their log-probabilities, if any does."""
    if fetched is None:
        return {}
    whole = as_logprobs(fetched)
    each = [_one(whole, index, count) for index, (_, count) in enumerate(asked)]
    if listed_logprobs is not None:
        for one, ids, row in zip(each, listed, listed_logprobs.arrays()[0], strict=True):
            if len(ids):
                one.top_ids = ids[None].astype(np.int32)
                one.top_logprobs = row[None, : len(ids)].astype(np.float32)
    found: dict[int, Logprobs] = {}
    for (place, _), one in zip(asked, each, strict=True):
        found[place] = one if place not in found else _joined(found[place], one)
    return found


def _joined(*parts: Logprobs) -> Logprobs:
    names = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")
    return Logprobs(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def as_logprobs(fetched: Fetched) -> Logprobs:
    tokens, logprobs, ranks, top_ids, top_logprobs = fetched.arrays()
    return Logprobs(
        tokens.astype(np.int32), logprobs.astype(np.float32), ranks.astype(np.int32), top_ids.astype(np.int32),
        top_logprobs.astype(np.float32),
    )


def _one(whole: Logprobs, index: int, count: int) -> Logprobs:
    here = slice(index, index + 1)
    return Logprobs(
        whole.token_ids[here], whole.logprobs[here], whole.ranks[here], whole.top_ids[here, :count],
        whole.top_logprobs[here, :count],
    )
