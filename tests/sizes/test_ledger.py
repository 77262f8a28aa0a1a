"""Memory as a ledger: what is predicted of steps, what is measured of each part, what is taken in reserve. Without a GPU; whether
the figures are right, one has to say (test_gpu_memory.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from folders import FAKES, import_path
from test_end_tokens import directory
from test_model_config import LLAMA

from ridgeline.config import EngineConfig
from ridgeline.resolve import DeviceFacts, ResolvedConfig, resolve
from ridgeline.runner import cuda_graphs, to_host
from ridgeline.runner.forward import Computed
from ridgeline.runner.start import memory_pools
from ridgeline.runner.worker import MemoryMeter
from ridgeline.sizes import ledger
from ridgeline.sizes.graph_shapes import Shape
from ridgeline.sizes.sampling_costs import PROMPT_LOGPROB_ROWS, mask_bytes, sampling_bytes

GPU = torch.device("cuda", 0)
RESERVE = ledger.SMALL_BLOCK * ledger.SMALL_BLOCKS + ledger.LIBRARY_BYTES       # of each pool


class Device:
    """What torch says of a device, by hand."""

    total, others = 1_000, 100               # bytes; of the driver and of other processes

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allocated: int = 0, reserved: int = 0) -> None:
        self.allocated, self.reserved = allocated, reserved
        for name, answer in {
            "memory_allocated": lambda: self.allocated, "memory_reserved": lambda: self.reserved, "synchronize": lambda: None,
            "mem_get_info": lambda: (self.total - self.others - self.reserved, self.total),
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)

    def take(self, allocated: int, reserved: int) -> None:
        self.allocated += allocated
        self.reserved += reserved


@pytest.mark.parametrize("others", [0, 300])
def test_what_another_engine_has_is_not_counted_as_this_ones(others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines in one process share torch's allocator."""
    device = Device(monkeypatch, others, others)
    meter = MemoryMeter(GPU)
    with meter.part(ledger.WEIGHTS):
        device.take(200, 210)
    with meter.part(ledger.KV):
        device.take(50, 50)
    with meter.part(ledger.WEIGHTS):                     # a part may come again
        device.take(7, 0)
    device.take(0, 33)                                   # of steps: nothing of it is in use between them
    assert meter.measured() == {ledger.WEIGHTS: 207, ledger.KV: 50, ledger.STEPS: 36, ledger.RUNTIME: device.others}


def test_a_part_that_fails_or_is_on_the_cpu_is_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = MemoryMeter(torch.device("cpu"))             # asks no GPU for anything
    with meter.part(ledger.KV):
        pass
    device = Device(monkeypatch)
    meter = MemoryMeter(GPU)
    with pytest.raises(MemoryError), meter.part(ledger.WEIGHTS):
        device.take(200, 200)
        raise MemoryError
    device.take(-200, 0)
    with meter.part(ledger.WEIGHTS):
        device.take(10, 0)
    assert meter.measured() == {ledger.WEIGHTS: 10, ledger.STEPS: 190, ledger.RUNTIME: device.others}


def resolved(model: Path, **options: Any) -> ResolvedConfig:
    given = EngineConfig.of(model=str(model), num_gpu_blocks_override=32, **options)
    return resolve(given, DeviceFacts("cuda", 2**34, ("bfloat16", "float32")))


def test_the_reserve_the_masks_and_the_copies_of_logits_are_predicted(tmp_path: Path) -> None:
    model = directory(tmp_path, config=LLAMA | {"vocab_size": 50_000})
    graphs, eager = resolved(model), resolved(model, enforce_eager=True)
    vocab, rows = graphs.model.vocab_size, graphs.max_num_seqs
    # Without graphs: no reserve for them, no logits that they leave, and no memory for their activations.
    assert eager.memory[ledger.STEPS] > RESERVE and graphs.memory[ledger.STEPS] > 2 * RESERVE
    sampling = sampling_bytes(rows=rows, vocab=vocab, element_bytes=2, on_gpu=True)
    assert eager.memory[ledger.ROWS] > sampling + mask_bytes(rows=rows, vocab=vocab)
    # Where a step has as many rows as tokens, choosing them takes more than computing: logits and two copies of them, and
    # those of the graph; otherwise activations take more.
    logits = 512 * vocab * 2
    few = resolved(model, max_num_seqs=512, max_num_batched_tokens=512)
    assert few.step_bytes == 3 * logits and logits < few.graph_bytes < 2 * logits
    assert few.memory[ledger.STEPS] == few.step_bytes + few.graph_bytes + 2 * RESERVE
    one = resolved(model, max_num_seqs=1, max_num_batched_tokens=512, dtype="float32")
    assert one.step_bytes == (1 + PROMPT_LOGPROB_ROWS) * vocab * 4       # those of a prompt, at most so many at once
    narrow, wide = (resolved(model, max_num_seqs=8, max_num_batched_tokens=tokens) for tokens in (2**16, 2**17))
    assert wide.memory[ledger.STEPS] - narrow.memory[ledger.STEPS] > 2**16 * 2 * narrow.model.intermediate_size * 3


def test_room_for_masks_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Beside:
        def __init__(self, device: torch.device) -> None: ...

        def reserve(self, size: int) -> None:
            made.append(size)

    monkeypatch.setattr(to_host, "_Beside", Beside)
    to_host._beside.cache_clear()
    to_host.reserve_masks(3, 100, torch.device("cpu"))
    to_host.reserve_masks(3, 100, GPU)
    to_host._beside.cache_clear()
    assert made == [3 * 4]                               # words of 32 ids


class Recording:
    """A graph of nothing."""

    error: Exception | None = None           # when it is made ready to run

    def __init__(self) -> None:
        self.open = False

    def capture_begin(self, **options: Any) -> None:
        self.open = True

    def capture_end(self) -> None:
        assert self.open
        self.open = False
        if self.error is not None:
            raise self.error

    def replay(self) -> None:
        assert not self.open


class Forward:
    """Steps that fail as they are told."""

    error: Exception | None = None
    launched = 0

    def run(self, batch: Any, greedy: bool) -> Computed:
        if self.error is not None and recordings and recordings[-1].open:
            raise self.error
        self.launched += 1
        return Computed(None, None)


recordings: list[Recording] = []


@pytest.fixture
def forward(monkeypatch: pytest.MonkeyPatch) -> tuple[cuda_graphs.GraphForward, Forward, list[int]]:
    taken: list[int] = []

    def recording() -> Recording:
        recordings.append(Recording())
        return recordings[-1]

    recordings.clear()
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, answer in {
        "CUDAGraph": recording, "Stream": lambda device: stream, "graph_pool_handle": lambda: 0, "current_stream": lambda: stream,
        "stream": lambda stream: torch.no_grad(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(memory_pools, "take", lambda device, size: taken.append(size if recordings[-1].open else -1))
    # Where torch is built for CUDA it takes no pool of a test; where it is not, it may lack the function.
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: None, raising=False)
    eager = Forward()
    made = cuda_graphs.GraphForward(eager, 4, 64, 10, torch.float32, torch.device("cpu"), 77)      # type: ignore[arg-type]
    made._shape = Shape(4)
    return made, eager, taken


BATCH: Any = SimpleNamespace(groups=[], logits_index=[0, 1])


def test_the_first_graph_takes_the_reserve_of_its_pool(forward: tuple[cuda_graphs.GraphForward, Forward, list[int]]) -> None:
    made, _, taken = forward
    for decodes in (4, 4, 2, 2, 2):
        made._shape = Shape(decodes)
        made.run(BATCH, greedy=True)
    assert len(recordings) == 2 and made.replays == 5 and taken == [77]


def test_launches_of_a_long_prompt_hide_behind_the_device(forward: tuple[cuda_graphs.GraphForward, Forward, list[int]]) -> None:
    """So its first step is launched, and what comes again is captured. What is launched anyway gains by a capture at once."""
    made, eager, _ = forward
    for tokens, launched in ((512, 1), (cuda_graphs.AT_ONCE, 0)):
        made._shape, before, recorded = Shape(0, 1, tokens), eager.launched, len(recordings)
        made.run(BATCH, greedy=True)
        assert (eager.launched - before, len(recordings) - recorded) == ((1, 0) if launched else (1, 1))
        assert made.prepare() == bool(launched)          # while the engine is idle
    made._stand_ins, made._shape, before = False, Shape(3), len(recordings)      # several ranks
    made.run(BATCH, greedy=True)
    assert len(recordings) == before
    made.run(BATCH, greedy=True)
    assert len(recordings) == before + 1


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory"),      # torch's, and the driver's
])
def test_a_step_for_whose_graph_there_is_no_memory_is_launched(
    error: Exception, forward: tuple[cuda_graphs.GraphForward, Forward, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, eager, _ = forward
    eager.error = error
    for _ in range(4):
        made.run(BATCH, greedy=True)
    assert len(recordings) == 2 and not any(each.open for each in recordings)    # every second time it is tried again
    assert eager.launched == 4 and made.replays == 0
    assert not made.prepare()                                                    # what was tried is not tried when idle
    eager.error = None
    made.run(BATCH, greedy=True)
    assert made.replays == 1
    made._shape = Shape(2)
    monkeypatch.setattr(Recording, "error", error)
    for _ in range(2):
        made.run(BATCH, greedy=True)
    assert made.replays == 1 and len(recordings) == 4
    eager.error = ValueError("something else")
    for shape in (Shape(2), Shape(1)):
        made._shape = shape
        if shape.decodes == 1:                           # it has never run: a library may have had a kernel to load
            made.run(BATCH, greedy=True)
        with pytest.raises(ValueError, match="something else"):
            made.run(BATCH, greedy=True)


def test_a_capture_that_cuda_breaks_off_leaves_the_pool_closed(
    forward: tuple[cuda_graphs.GraphForward, Forward, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch leaves it open then, and would refuse every later capture."""
    made, eager, _ = forward
    closed: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: closed.append(pool), raising=False)
    monkeypatch.setattr(Recording, "error", RuntimeError("operation failed due to a previous error during capture"))
    eager.error = RuntimeError("a kernel was loaded")
    made.run(BATCH, greedy=True)                         # launched instead
    assert eager.launched == 1 and closed == [made._pool]
    eager.error, Recording.error = None, None
    made.run(BATCH, greedy=True)
    assert made.replays == 1 and closed == [made._pool]


def test_the_reserve_is_what_the_ledger_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = resolved(directory(tmp_path, config=LLAMA))
    made: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda size, **options: made.append(size))
    for size in (config.step_bytes, config.graph_bytes):
        memory_pools.take(torch.device("cpu"), size)
    assert sum(made) + 2 * ledger.LIBRARY_BYTES == config.memory[ledger.STEPS]

    def empty(size: int, **options: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", empty)
    memory_pools.take(torch.device("cpu"), 10)                # steps take what there is, as they come


# ---- nothing is allocated after ready, on a pretended GPU ------------------------------------------------------------

NARROW = {"vocab_size": 8192, "intermediate_size": 4096}
FEW = {"max_num_seqs": 200, "max_num_batched_tokens": 1024, "num_gpu_blocks_override": 2000, "max_model_len": 1200}


def served(folder: Path, reserved: str, shape: str, options: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": import_path()}
    words = [str(FAKES / "pretend_allocations.py"), shape, "2", reserved, json.dumps(options), json.dumps(changes)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("shape", "options", "changes"), [
    ("llama-3.1-8b", FEW | {"max_num_seqs": 100}, NARROW),
    pytest.param("llama-3.1-8b", FEW | {"max_num_seqs": 100, "quantization": "int4"}, NARROW, marks=pytest.mark.slow),
    pytest.param("llama-3.1-8b", FEW | {"quantization": "int4"}, {"vocab_size": 8192}, marks=pytest.mark.slow),
    pytest.param("llama-3.1-70b", {"quantization": "int4", "max_num_seqs": 16, "max_num_batched_tokens": 2048,       # in parts
                                   "num_gpu_blocks_override": 785, "max_model_len": 784}, {"vocab_size": 8192},
                 marks=pytest.mark.slow),
    pytest.param("llama-3.1-8b", FEW | {"quantization": "mxfp4"}, {"vocab_size": 8192}, marks=pytest.mark.slow),
    pytest.param("llama-3.1-8b-q8_0", FEW, {"vocab_size": 8192}, marks=pytest.mark.slow),
    pytest.param("llama-3.1-8b-nvfp4", FEW, {"vocab_size": 8192}, marks=pytest.mark.slow),
    pytest.param("llama-3.1-8b", FEW, NARROW, marks=pytest.mark.slow),
    pytest.param("llama-3.1-8b", {"max_num_seqs": 1024, "num_gpu_blocks_override": 9000}, {}, marks=pytest.mark.slow),
    pytest.param("llama-3.2-1b", {"max_num_seqs": 512, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 9000}, {},
                 marks=pytest.mark.slow),
    pytest.param("llama-3.2-1b", {"max_num_seqs": 8, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 2000}, {},
                 marks=pytest.mark.slow),
    pytest.param("llama-3.2-1b", {"max_num_seqs": 64, "max_num_batched_tokens": 4352, "num_gpu_blocks_override": 2000,
                                  "max_model_len": 5000, "max_cudagraph_capture_size": 4096}, {}, marks=pytest.mark.slow),
    pytest.param("qwen3-8b", FEW | {"kv_cache_dtype": "fp8"}, {}, marks=pytest.mark.slow),
    pytest.param("llama-3.1-8b", FEW | {"deterministic": True}, {}, marks=pytest.mark.slow),
    pytest.param("llama-3.1-8b", FEW | {"enforce_eager": True}, {}, marks=pytest.mark.slow),
])
def test_nothing_is_allocated_after_ready(
    tmp_path: Path, shape: str, options: dict[str, Any], changes: dict[str, Any]
) -> None:
    """By the rules of torch's allocator, whatever kind of step comes. Segments that weights fill in part count as steps' here."""
    found = served(tmp_path, "with", shape, options, changes)
    assert not found["grown"]
    assert abs(found["measured"] - found["predicted"]) < 48 * 2**20


@pytest.mark.slow
def test_nothing_is_allocated_after_ready_with_k_types(tmp_path: Path) -> None:
    """Their packed scales have other sizes than the stored ones, so that packing cannot write over these: some more of the last
    segments of 20 MiB lies idle."""
    found = served(tmp_path, "with", "llama-3.1-8b-q4_k_m", FEW, {"vocab_size": 8192})
    assert not found["grown"]
    assert 0 <= found["measured"] - found["predicted"] < 64 * 2**20


@pytest.mark.slow
def test_without_the_reserve_much_is(tmp_path: Path) -> None:
    """So that the test above can fail: small tensors and large ones, in steps and in graphs."""
    grown = served(tmp_path, "without", "llama-3.1-8b", FEW, NARROW)["grown"]
    assert {"128 decodes", "full steps", "graphs of all that was seen"} <= grown.keys()
