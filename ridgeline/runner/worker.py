"""A worker: one rank's device, model, KV memory and runner, made from a resolved config."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch

from ridgeline.choices.draft_checkpoint import DraftCheckpoint
from ridgeline.choices.graph_sizes import launch_bound
from ridgeline.config import EngineConfig
from ridgeline.distributed.comm import Communicator
from ridgeline.draft_options import draft_options
from ridgeline.early_check import cpu_facts, no_gpu
from ridgeline.models.checkpoints.linear_formats import LinearFormats
from ridgeline.models.decoder import Decoder
from ridgeline.models.weights import Progress, load_weights
from ridgeline.ops.compile_ahead import CompileAhead
from ridgeline.ops.cpu import native
from ridgeline.ops.hopper import device_facts as kernel_facts
from ridgeline.ops.packed.expand_room import ExpandRoom
from ridgeline.ops.registry import Site, kernels_are_used, log_compilations, set_kernels, set_nvtx
from ridgeline.process import platform
from ridgeline.process.log import get_logger
from ridgeline.process.start_phases import phase
from ridgeline.quant.choose import schemes
from ridgeline.quant.cpu_packed import plain_scheme
from ridgeline.quant.packed import stayed
from ridgeline.resolve import DeviceFacts, ResolvedConfig
from ridgeline.runner.cuda_graphs import GraphForward
from ridgeline.runner.device_rows import DeviceRows
from ridgeline.runner.forward import EagerForward, Forward
from ridgeline.runner.kv_buffers import KVBuffers
from ridgeline.runner.proposers.draft_cache import DraftCache
from ridgeline.runner.proposers.draft_model import STAGED, DraftModel
from ridgeline.runner.runner import Runner
from ridgeline.runner.sampler import Sampler
from ridgeline.runner.start import memory_pools
from ridgeline.runner.start.graph_warmup import Rehearsal
from ridgeline.runner.start.kernel_steps import collect_kernels
from ridgeline.runner.start.warm_up import warm_up
from ridgeline.runner.step_programs import ProgramForward
from ridgeline.runner.to_host import reserve_masks
from ridgeline.sizes import ledger
from ridgeline.sizes.graph_shapes import MOST_VERIFIED, USUAL_PROMPT
from ridgeline.sizes.hardware import data_sheet
from ridgeline.sizes.kv_spec import groups_here
from ridgeline.sizes.mesh_shape import one_shot_memory

logger = get_logger("worker")

# The driver's context, cuBLAS and its workspaces, loaded kernels and graphs; the memory ledger shows how well it fits.
GPU_RUNTIME_BYTES = 760 * 2**20
# Seconds that a start captures CUDA graphs, 15 to 25 ms each: enough for likely ones. The rest is captured while the engine is
# idle.
CAPTURE_SECONDS = 0.8
_NEWS_SECONDS = 0.1                  # between two reports of how much is loaded


def device_facts(config: EngineConfig) -> DeviceFacts:
    """What resolve() needs to know of the machine."""
    kind = config.model.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return cpu_facts()
    if not torch.cuda.is_available():
        raise no_gpu("torch sees no GPU here")
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    far = config.parallel.distributed_executor_backend == "ray"                  # which gives every rank a GPU of its own
    sharing = 1 if far else -(-config.parallel.num_ranks // torch.cuda.device_count())       # slow, to try things out
    ranks, alone = config.parallel.tensor_parallel_size, config.parallel.disable_custom_all_reduce
    runtime = GPU_RUNTIME_BYTES + (one_shot_memory(ranks) if ranks > 1 and not alone else 0)
    return DeviceFacts(
        "cuda", total // sharing, ("bfloat16", "float16", "float32"), runtime, free // sharing, name,
        kernels=kernel_facts(torch.device("cuda", torch.cuda.current_device())),
    )


def make_runner(
    config: ResolvedConfig, comm: Communicator, progress: Callable[[int, int], None] | None = None
) -> Runner:
    """Load the model and allocate everything a step can need."""
    options, model_config = config.options, config.model
    set_kernels(options.model.kernels)
    set_nvtx(options.execution.nvtx)
    log_compilations()
    with phase("device"):
        device = _device(config, comm)
        if not options.parallel.disable_custom_all_reduce:
            comm.reach_peers(device)
    meter = MemoryMeter(device)
    memory_pools.take_library(device)                    # as long as no free block is there that it could be put into
    drafts = draft_options(options.execution.speculative_config).on
    dtype, room = getattr(torch, config.dtype), ExpandRoom()
    with phase("weights"), meter.part(ledger.WEIGHTS):
        plain = plain_scheme(
            device, dtype, options.execution.deterministic, options.model.cpu_activations, model_config.dtype
        )
        formats = LinearFormats(model_config, options.model.quantization, device.type, comm.tensor.size, config.dtype)
        model = Decoder(model_config, comm, dtype, device, config.max_model_len, schemes(formats, plain, room))
    with phase("rows"), meter.part(ledger.ROWS):
        rows = DeviceRows(
            config.groups, config.max_num_seqs, config.max_model_len, config.max_num_batched_tokens, config.depth, device,
            model.layers[0].attention.num_heads, config.shared_prefixes, options.execution.deterministic,
            drafts,
        )
        verified = MOST_VERIFIED if drafts else 0        # positions that may have a mask each
        sampler = Sampler(
            config.max_num_seqs, model_config.vocab_size, set(model_config.eos_token_ids), device, dtype, verified
        )
        reserve_masks(max(config.max_num_seqs, verified), model_config.vocab_size, device)
    with CompileAhead(device, comm.size) as ahead:
        with meter.part(ledger.WEIGHTS):
            _kernels_and_weights(ahead, config, model, rows, sampler, comm, progress)
        with phase("KV cache"), meter.part(ledger.KV):
            here = groups_here(config.groups, model.numbers_here)
            buffers = KVBuffers(here, config.num_blocks, config.kv_format, device)
        with phase("kernels"):
            ahead.finish()
    with phase("rows"), meter.part(ledger.ROWS):
        forward = _forward(config, model, buffers, rows, comm, verified)
        runner = Runner(model, forward, rows, sampler, buffers, comm)
    if config.draft is not None:
        runner.drafter = _draft_model(config, config.draft, comm, sampler, forward, device, meter)
    if config.device != "cpu":
        with phase("first steps"):
            room.reserve(device)
            _first_steps(config, runner, comm)
        runner.memory = meter.measured()
        if comm.rank == 0:                               # the others were told their sizes, and predicted nothing
            logger.info("%s", ledger.table(config.memory, runner.memory))
            _say_what_stayed(stayed(model), config.dtype)
    return runner


def _say_what_stayed(names: list[str], dtype: str) -> None:
    """Before loading, nothing tells it, so the reasons of resolve could not."""
    if names:
        logger.info("%d linears stay as stored, %s among them: %s would lose their scales, so kernels for packed weights are not "
                    "used, and they may be slower; bfloat16 has the range", len(names), names[0], dtype)


def _forward(
    config: ResolvedConfig, model: Decoder, buffers: KVBuffers, rows: DeviceRows, comm: Communicator, verified: int,
    beside: Forward | None = None,
) -> Forward:
    """How steps of this model are launched. `beside`: those of another model, between which they run."""
    eager, dtype = EagerForward(model, buffers.layers(), rows.last_token, rows.late.surplus), getattr(torch, config.dtype)
    if config.graphs and (beside is None or isinstance(beside, GraphForward)):
        logits = torch.float32 if model.config.final_softcap is not None else dtype
        vocab = model.config.vocab_size if model.head is None else model.head.shard.filled
        return GraphForward(
            eager, config.max_num_seqs, config.max_num_batched_tokens, vocab, logits, rows.device,
            config.graph_bytes, verified, comm.size == 1, beside if isinstance(beside, GraphForward) else None,
            config.graph_tokens, launch_bound(model.config, data_sheet(config.device_name), config.dtype, config.linear_dtype),
        )
    if _runs_programs(config, rows.device, dtype):
        return ProgramForward(eager, rows.tables.groups, rows.last_token, rows.late.surplus)
    return eager


def _draft_model(
    config: ResolvedConfig, draft: DraftCheckpoint, comm: Communicator, sampler: Sampler, beside: Forward, device: torch.device,
    meter: MemoryMeter,
) -> DraftModel:
    """Its weights are divided among ranks as the model's are."""
    options, dtype, room = config.options, getattr(torch, config.dtype), ExpandRoom()
    longest = min(config.max_model_len, draft.config.max_position_embeddings)
    with phase("weights"), meter.part(ledger.WEIGHTS):
        plain = plain_scheme(
            device, dtype, options.execution.deterministic, options.model.cpu_activations, draft.config.dtype
        )
        formats = LinearFormats(draft.config, "none", device.type, comm.tensor.size, config.dtype)
        model = Decoder(draft.config, comm, dtype, device, longest, schemes(formats, plain, room))
        load_weights(model, draft.path, draft.config, options.model.load_format, None, options.model.seed)
    room.reserve(device)
    with phase("KV cache"), meter.part(ledger.KV):
        buffers = KVBuffers([draft.pages], config.num_blocks, draft.format, device)
    with phase("rows"), meter.part(ledger.ROWS):
        rows = DeviceRows(
            draft.groups, config.max_num_seqs, config.max_model_len, config.max_num_batched_tokens,
            0 if device.type == "cpu" else STAGED, device, model.layers[0].attention.num_heads,
            deterministic=options.execution.deterministic,
        )
        forward = _forward(config, model, buffers, rows, comm, 0, beside)
        cache = DraftCache(
            config.num_blocks, rows.block_size, config.max_num_seqs, rows.tables.blocks.shape[2], draft.table
        )
    return DraftModel(
        model, forward, rows, sampler, buffers, cache, draft.table, config.model.vocab_size, config.max_num_batched_tokens,
        comm.tensor.broadcast,
    )


def _runs_programs(config: ResolvedConfig, device: torch.device, dtype: torch.dtype) -> bool:
    options = config.options
    alone = not options.execution.enforce_eager and options.parallel.num_ranks == 1
    return alone and kernels_are_used() and native.supports(Site(device.type, dtype, 0))


def _kernels_and_weights(
    ahead: CompileAhead, config: ResolvedConfig, model: Decoder, rows: DeviceRows, sampler: Sampler, comm: Communicator,
    progress: Progress | None,
) -> None:
    """Collect the kernels to compile and load the weights. On a GPU both at once: launches that are only collected read no
    weight, and reading a checkpoint leaves the interpreter to others most of the time."""
    device, told, failed = rows.device, (0, 0), threading.Event()

    def tell(done: int, total: int) -> None:
        nonlocal told
        told = done, total
        if failed.is_set():
            raise RuntimeError("the start has failed elsewhere: the rest is not loaded")

    def load(news: Progress | None, finish: bool) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        given = config.options.model
        load_weights(model, config.model_path, config.model, given.load_format, news, given.seed, finish)

    if device.type != "cuda":
        with phase("weights"):
            load(progress, finish=True)
        return
    with ThreadPoolExecutor(1, "weights") as thread:
        loading = thread.submit(load, tell, finish=False)
        try:
            with phase("kernels"):
                collect_kernels(ahead, config, model, rows, sampler, comm)
            with phase("weights"):
                while not wait([loading], _NEWS_SECONDS).done:
                    if progress is not None and told[1]:
                        progress(*told)                  # from this thread: the link to the front end is its own
        except BaseException:
            failed.set()                                 # or leaving would wait for the whole checkpoint
            raise
        with phase("weights"):
            loading.result()
            if progress is not None:
                progress(*told)
            torch.cuda.empty_cache()                     # of what loading took: what `finish` makes would be put into it, and
            with torch.inference_mode():                 # hold a segment of which the rest is of no use
                model.finish()                           # not in the thread: it changes what the collection uses
            torch.cuda.synchronize()                     # kernels may prefetch weights before they wait for anything (PDL)
            torch.cuda.empty_cache()                     # of what `finish` took, for the same reason


def _first_steps(config: ResolvedConfig, runner: Runner, comm: Communicator) -> None:
    """Reserve the memory that steps need, and run and capture what the first requests will launch."""
    memory_pools.take(runner.rows.device, config.step_bytes)
    sizes = (len(config.groups), config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len)
    warm_up(runner, *sizes, max(config.graph_tokens, USUAL_PROMPT))
    runner.drafter.warm_up()
    if isinstance(runner.forward, GraphForward):
        drafts = draft_options(config.options.execution.speculative_config).on
        rehearsal = Rehearsal(runner, runner.forward, *sizes, comm, MOST_VERIFIED if drafts else 0, config.graph_tokens)
        runner.rehearse = rehearsal.go_on
        with phase("graphs"):
            captured = rehearsal.before_ready(CAPTURE_SECONDS)
        logger.debug("captured %d CUDA graphs before the first request", captured)


class MemoryMeter:
    """Measures how much of a GPU's memory each part of the ledger takes."""

    def __init__(self, device: torch.device) -> None:
        self._on = device.type == "cuda"
        self._before = torch.cuda.memory_allocated() if self._on else 0  # another engine's, in the same process
        self._parts: dict[str, int] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        before = torch.cuda.memory_allocated() if self._on else 0
        yield
        took = torch.cuda.memory_allocated() - before if self._on else 0
        self._parts[name] = self._parts.get(name, 0) + took

    def measured(self) -> dict[str, int]:
        """The rest of what torch has reserved belongs to steps; the rest of what is used belongs to the runtime."""
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        steps = reserved - self._before - sum(self._parts.values())
        return self._parts | {ledger.STEPS: steps, ledger.RUNTIME: total - free - reserved}


def _device(config: ResolvedConfig, comm: Communicator) -> torch.device:
    if config.device == "cpu":
        platform.keep_freed_memory()
        if comm.size > 1:
            torch.set_num_threads(platform.rank_cores(comm.size))
        return torch.device("cpu")
    index = comm.rank % torch.cuda.device_count() if comm.device_index is None else comm.device_index
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)                        # the driver's part of start-up
    return device
