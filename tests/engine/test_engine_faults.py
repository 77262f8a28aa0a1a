"""Faults of the engine's process, seen from the front end: it is killed, it hangs, it cannot come back.

On a tiny model in float32, where a recomputed prefix gives the same tokens again.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from served_model import CONTEXT, write_model

from ridgeline import SamplingParams
from ridgeline.engine import ipc
from ridgeline.engine.client import answer_stream, engine_child, open_requests, watchdog
from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.engine.client.request_context import Caller
from ridgeline.engine.client.wait_estimate import LoadMeter
from ridgeline.engine.client.watchdog import Pulse, Restarts, Supervision
from ridgeline.errors import BadRequest, EngineDead, NotNow, Overloaded, RequestError
from ridgeline.messages import Request
from ridgeline.text import chat_template

OPTIONS: dict[str, Any] = {"load_format": "dummy", "num_gpu_blocks_override": 600, "max_num_seqs": 8, "dtype": "float32"}
OFTEN = Supervision(max_restarts=100, backoff=0.01, silence=60.0)
LENGTH = 160

Run = Callable[[Awaitable[Any]], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def llm(model: Path, runner: asyncio.Runner) -> Iterator[AsyncLLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        made = AsyncLLM(model, supervision=OFTEN, **OPTIONS)
        runner.run(made.start())
        yield made
        runner.run(made.shutdown())


@pytest.fixture
def run(llm: AsyncLLM, runner: asyncio.Runner) -> Iterator[Run]:
    """Runs a coroutine; afterwards nothing may be left, here or in the engine."""
    yield lambda work: runner.run(asyncio.wait_for(work, 200))
    runner.run(nothing_left(llm))


async def nothing_left(llm: AsyncLLM) -> None:
    assert llm.ready is not None
    async with asyncio.timeout(60):
        while llm.num_open or llm.running or llm.free_blocks != llm.ready.num_blocks or llm.state != "ok":
            await asyncio.sleep(0.01)
    assert not llm._open.wire_ids
    assert (llm.load.waiting_tokens, llm.load.waiting_answers, llm.load.open_answers) == (0, 0, 0)


def pid_of(llm: AsyncLLM) -> int:
    assert llm._engine.process is not None
    return llm._engine.process.pid


async def read(stream: Any, seen: list[Any]) -> list[Any]:
    """Everything that is handed on, also to `seen` as it comes."""
    async for batch in stream:
        seen.extend(batch)
    return stream.outputs


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 7},
    "several": {"seed": 11, "n": 3},
    "penalties": {"seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "least": {"seed": 6, "min_tokens": LENGTH - 10, "ignore_eos": False},
    "logprobs": {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
    "queued": {"seed": 9},               # more rows than there are: these wait when the engine dies
    "queued too": {"seed": 10},
    "ends by a stop string": {"temperature": 0, "stop": ["\x00never"]},
}


def params_of(kind: str) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True} | KINDS[kind])


@pytest.mark.reliability("B-17", "R-02")
@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_streams_go_on_exactly_after_the_engine_was_killed(llm: AsyncLLM, run: Run, kills: int) -> None:
    async def answers(kill: int) -> tuple[list[Any], list[Any]]:
        streams = [await llm.stream([f"prompt of {kind}"], params_of(kind)) for kind in KINDS]
        seen: list[list[Any]] = [[] for _ in streams]
        reading = asyncio.gather(*map(read, streams, seen))
        for number in range(kill):
            want = (number + 1) * LENGTH // (kill + 2)
            await until(lambda want=want: len(streams[0].outputs[0].outputs[0].token_ids) >= want)  # type: ignore[misc]
            if streams[0].outputs[0].finished:           # this process had no CPU meanwhile, the engine had
                await reading
                return await answers(kill)
            before = llm.num_restarts
            os.kill(pid_of(llm), signal.SIGKILL)
            await until(lambda before=before: llm.num_restarts > before)                            # type: ignore[misc]
        return [outputs[0] for outputs in await reading], seen

    whole, _ = run(answers(0))
    again, seen = run(answers(kills))
    for kind, expected, got, deltas in zip(KINDS, whole, again, seen, strict=True):
        for mine, theirs in zip(got.outputs, expected.outputs, strict=True):
            assert mine.token_ids == theirs.token_ids, kind
            assert (mine.text, mine.finish_reason, mine.text_offsets) == (theirs.text, theirs.finish_reason, theirs.text_offsets)
            parts = [delta for _, delta in deltas if delta.index == mine.index]
            assert [token for part in parts for token in part.token_ids] == mine.token_ids, kind    # nothing came twice
            assert "".join(part.text for part in parts) == mine.text
        if kind == "logprobs":
            assert [list(at) for at in got.outputs[0].logprobs] == [list(at) for at in expected.outputs[0].logprobs]
            assert len(got.prompt_logprobs) == len(expected.prompt_logprobs) == len(got.prompt_token_ids)


@pytest.mark.reliability("B-17")
def test_an_answer_that_had_ended_is_not_made_again(llm: AsyncLLM, run: Run) -> None:
    """One of two answers is over when the engine dies: only the other goes to the next."""

    async def scene() -> Any:
        params = SamplingParams(n=2, seed=3, max_tokens=LENGTH // 2, ignore_eos=True)
        whole = (await (await llm.stream(["abc"], params)).complete())[0]
        stop = whole.outputs[0].text[20:23]
        assert stop not in whole.outputs[1].text[:30]
        params = SamplingParams(n=2, seed=3, max_tokens=LENGTH // 2, ignore_eos=True, stop=[stop])
        stopped = (await (await llm.stream(["abc"], params)).complete())[0]
        stream = await llm.stream(["abc"], params)
        answers = stream.outputs[0].outputs
        await until(lambda: answers[0].finished() and len(answers[1].token_ids) > 30)
        if not answers[1].finished():
            os.kill(pid_of(llm), signal.SIGKILL)
        again = (await stream.complete())[0]
        assert [answer.token_ids for answer in again.outputs] == [answer.token_ids for answer in stopped.outputs]

    run(scene())


@pytest.mark.reliability("B-16")
def test_requests_that_come_or_go_while_there_is_no_engine(llm: AsyncLLM, run: Run) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    endless = SamplingParams(temperature=0, max_tokens=CONTEXT, ignore_eos=True)

    async def scene() -> tuple[Any, Any]:
        whole = (await (await llm.stream(["abc"], params)).complete())[0].outputs
        leaves = await llm.stream(["abc"], endless)
        await leaves.__anext__()
        os.kill(pid_of(llm), signal.SIGKILL)
        await until(lambda: llm.state == "restarting")
        forgotten = asyncio.ensure_future(llm.reset_prefix_cache())
        comes = await llm.stream(["abc"], params)
        leaves.close()
        assert llm.num_open == 1
        assert await forgotten
        return whole, (await comes.complete())[0].outputs

    whole, later = run(scene())
    assert whole == later


@pytest.mark.reliability("B-14", "R-03")
def test_a_hung_engine_is_seen_written_about_and_replaced(llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log takes its stacks slowly, as on a busy machine: the engine is replaced after the last line, not before."""
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    log, written = os.pipe()
    fcntl.fcntl(written, fcntl.F_SETPIPE_SZ, 4096)
    monkeypatch.setattr(engine_child, "start_child", functools.partial(engine_child.start_child, stderr=written))
    read: list[bytes] = []

    async def scene() -> tuple[Any, Any]:
        os.kill(pid_of(llm), signal.SIGKILL)             # so that the next one writes where this test reads
        await until(lambda: llm.state == "restarting")
        whole = (await (await llm.stream(["abc"], params)).complete())[0].outputs
        monkeypatch.undo()
        pid, before = pid_of(llm), llm.num_restarts
        stream = await llm.stream(["abc"], params)
        await stream.__anext__()
        fill(written)
        monkeypatch.setattr(llm._engine.pulse, "_limit", 1.0)
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: llm.state != "ok")
        await asyncio.sleep(1)
        os.close(written)
        reader = asyncio.create_task(asyncio.to_thread(lambda: read.extend(iter(lambda: os.read(log, 512), b""))))
        await until(lambda: llm.num_restarts > before)
        assert pid_of(llm) != pid and not psutil.pid_exists(pid)
        await reader
        return whole, (await stream.complete())[0].outputs

    whole, again = run(scene())
    os.close(log)
    assert whole == again
    logged = b"".join(read).decode()
    assert "most recent call first" in logged and "engine_process.py" in logged         # where it hung


def fill(pipe: int) -> None:
    """Until another byte would have to wait."""
    end = os.open(f"/proc/self/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(end, b"\n")
    os.close(end)


@pytest.mark.reliability("B-14", "R-04")
def test_a_busy_engine_is_not_taken_for_a_hung_one(llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle, with a long prompt, with many answers: it always says that it goes on."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    pulse, said = llm._engine.pulse, list[str]()

    def hears(name: str) -> None:
        heard = getattr(pulse, name)
        monkeypatch.setattr(pulse, name, lambda *given: said.append(name) or heard(*given))

    async def scene() -> None:
        pid = pid_of(llm)
        for name in ("turned", "stepped", "beat"):
            hears(name)
        await until(lambda: said.count("turned") >= 2)   # idle
        said.clear()
        await (await llm.stream([[5] * (CONTEXT - 100)], params)).complete()
        assert "stepped" in said or "beat" in said, said
        assert llm.state == "ok" and pid_of(llm) == pid

    run(scene())


@pytest.mark.reliability("B-14", "R-04")
@pytest.mark.slow                                        # beside other work the engine may get no CPU for this long
def test_a_busy_engine_is_not_taken_for_a_hung_one_by_the_clock(
    llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    async def scene() -> None:
        pid = pid_of(llm)
        monkeypatch.setattr(llm._engine.pulse, "_limit", 5.0)
        await asyncio.sleep(5.5)
        await (await llm.stream([[5] * (CONTEXT - 100)], params)).complete()
        assert llm.state == "ok" and pid_of(llm) == pid

    run(scene())


@pytest.mark.reliability("R-11c")
@pytest.mark.slow
def test_a_front_end_that_was_held_up_does_not_blame_its_engine(llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        pid = pid_of(llm)
        monkeypatch.setattr(llm._engine.pulse, "_limit", 1.0)
        time.sleep(3.2)                                  # the whole event loop stands still
        await asyncio.sleep(1.5)
        assert llm.state == "ok" and pid_of(llm) == pid

    run(scene())


@pytest.mark.reliability("B-18", "R-02c")
def test_an_engine_that_cannot_come_back_is_told_to_everybody(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    async def scene() -> None:
        llm = AsyncLLM(model, supervision=Supervision(max_restarts=3, backoff=0.01), **OPTIONS)
        await llm.start()
        streams = [await llm.stream(["abc"], SamplingParams(max_tokens=CONTEXT, ignore_eos=True)) for _ in range(3)]
        await streams[0].__anext__()
        monkeypatch.setattr(llm._engine, "module", "ridgeline.engine.no_such_module")
        os.kill(pid_of(llm), signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDead, match="ended with code 1, after 3 restarts"):
                await stream.complete()
        assert llm.state == "dead" and llm.num_open == 0 and not llm.is_alive
        with pytest.raises(EngineDead, match="after 3 restarts"):
            await llm.stream(["abc"])
        await llm.shutdown()

    asyncio.run(asyncio.wait_for(scene(), 200))


@pytest.mark.reliability("B-15")
def test_a_request_that_ends_every_engine_is_given_up(
    llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes of it between two deaths: it is not handed on for ever."""

    async def scene() -> None:
        stream = await llm.stream([[5] * 4000], SamplingParams(max_tokens=CONTEXT, ignore_eos=True))
        opened = next(iter(llm._open.by_wire_id.values()))
        opened.replays = open_requests.MAX_REPLAYS          # as if two engines had died of it …
        monkeypatch.setattr(llm._engine, "rules", Supervision(max_restarts=1))     # … and this were the last one
        os.kill(pid_of(llm), signal.SIGKILL)
        if not opened.begun:
            with pytest.raises(RequestError, match="failed 3 times with this request in it"):
                await stream.complete()
        stream.close()

    run(scene())


def test_shutdown_in_the_middle_of_a_restart_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    async def scene() -> None:
        llm = AsyncLLM(model, supervision=OFTEN, **OPTIONS)
        await llm.start()
        stream = await llm.stream(["abc"], SamplingParams(max_tokens=CONTEXT, ignore_eos=True))
        old = pid_of(llm)
        os.kill(old, signal.SIGKILL)
        await until(lambda: pid_of(llm) != old)
        new, folder = pid_of(llm), llm._engine.process and llm._engine.process._sockets.path
        await llm.shutdown()
        assert folder is not None and not folder.exists() and not psutil.pid_exists(new)
        with pytest.raises(EngineDead):
            await stream.complete()

    asyncio.run(asyncio.wait_for(scene(), 200))


# -- parts, without an engine ------------------------------------------------------------------------------------------


@pytest.mark.reliability("B-15")
def test_restarts_are_counted_within_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    restarts = Restarts(Supervision(max_restarts=3, window=100, backoff=1.0))
    assert [restarts.next_delay() for _ in range(4)] == [0.0, 1.0, 2.0, None]
    now[0] = 101.0
    assert restarts.next_delay() == 0.0
    assert Restarts(Supervision()).next_delay() is None


@pytest.mark.reliability("B-14")
def test_a_pulse_counts_steps_and_idleness(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    pulse = Pulse(10.0)
    now[0] = 40.0
    assert not pulse.stopped                             # the first steps may take longer
    pulse.stepped()
    for steps, busy, late in ((1, True, False), (2, True, False), (2, True, True), (2, False, False)):
        now[0] += 6.0
        pulse.turned(steps, busy)
        now[0] += 6.0
        assert pulse.stopped is late, (steps, busy)      # the loop turns, but with work to do no step is finished
    unlimited = Pulse(0)
    now[0] += 1e6
    assert not unlimited.stopped


@pytest.mark.reliability("B-05")
def test_the_predicted_wait_follows_the_queue_and_the_rows() -> None:
    now = [0.0]
    meter = LoadMeter(lambda: now[0])
    assert meter.wait(rows=2) == 0.0
    meter.queued(100, 1)
    assert meter.wait(rows=2) is None                    # somebody waits, and nothing is known of how long
    now[0] += 1.0
    meter.begun(100, 1)                                  # 100 tokens a second
    meter.queued(300, 1)
    assert meter.wait(rows=2) == pytest.approx(3.0, rel=0.1)
    meter.left(300, 1, began=False, finished=False)
    now[0] += 1.0
    assert meter.wait(rows=2) == 0.0
    meter.left(100, 1, began=True, finished=True)        # one in two seconds
    for _ in range(4):
        meter.queued(0, 1)
    assert meter.wait(rows=2) == pytest.approx(6.0, rel=0.1)
    now[0] += 1000.0
    for _ in range(4):
        meter.left(0, 1, began=False, finished=False)
    assert (meter.waiting_tokens, meter.open_answers) == (0, 0) and meter.wait(rows=2) == 0.0


@pytest.mark.reliability("B-06")
def test_queued_tokens_and_deadlines_are_limits(llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True)

    async def scene() -> None:
        monkeypatch.setattr(llm, "max_queued_tokens", 100)
        first = await llm.stream([[5] * 200], params)    # whoever finds nobody waiting may always come
        with pytest.raises(Overloaded, match="200 prompt tokens are waiting, of at most 100"):
            await llm.stream([[5] * 10], params)
        monkeypatch.setattr(llm, "max_queued_tokens", 205)
        for tokens, alone in ((6, False), (150, True)):  # a small one has no room: nothing has; for a long one, others may
            with pytest.raises(Overloaded) as refused:
                await llm.stream([[5] * tokens], params)
            assert isinstance(refused.value, NotNow) is alone
        monkeypatch.setattr(llm, "max_queued_tokens", 100)
        await first.complete()
        await (await llm.stream([[5] * 10], params)).complete()
        monkeypatch.setattr(llm, "predicted_wait", lambda: 3.0)
        with pytest.raises(Overloaded, match=r"after about 3\.0 s; the deadline is 2\.5 s") as caught:
            await llm.stream([[5] * 10], params, caller=Caller(ttft_deadline=2.5))
        assert caught.value.retry_after == 3.0
        await (await llm.stream([[5] * 10], params, caller=Caller(ttft_deadline=3.5))).complete()

    run(scene())


@pytest.mark.reliability("S-06")
def test_callers_with_different_salts_share_no_prefix(llm: AsyncLLM, run: Run) -> None:
    async def cached(salt: str) -> int:
        stream = await llm.stream([list(range(50, 90))], SamplingParams(max_tokens=1), caller=Caller(cache_salt=salt))
        return int((await stream.complete())[0].num_cached_tokens)

    async def scene() -> list[int]:
        return [await cached(salt) for salt in ("one", "one", "two", "two")]

    assert run(scene()) == [0, 32, 0, 32]


@pytest.mark.reliability("B-10")
def test_what_a_slow_reader_left_unread_is_joined(llm: AsyncLLM, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_stream, "UNREAD", 8)
    params = SamplingParams(n=2, seed=3, max_tokens=100, ignore_eos=True, logprobs=0)

    async def scene() -> None:
        stream = await llm.stream(["abc"], params)
        await stream.complete()
        seen: list[Any] = []
        await read(stream, seen)
        assert len(seen) <= 8 + 2
        for answer in stream.outputs[0].outputs:
            parts = [delta for _, delta in seen if delta.index == answer.index]
            assert "".join(part.text for part in parts) == answer.text
            for name in ("token_ids", "text_offsets", "logprobs"):
                assert [value for part in parts for value in getattr(part, name)] == getattr(answer, name)
            assert [part.finish_reason for part in parts][-1] == "length"

    run(scene())


@pytest.mark.reliability("B-25", "R-01")
def test_a_storm_of_clients_that_leave(llm: AsyncLLM, run: Run) -> None:
    """Some before a token, some after a few; the fixture checks that nothing is left of them."""

    async def leave(number: int) -> None:
        params = SamplingParams(max_tokens=CONTEXT, ignore_eos=True, n=1 + number % 3)
        stream = await llm.stream([f"client {number}"] * (1 + number % 2), params)
        if number % 2:
            async with asyncio.timeout(60):
                await stream.__anext__()
        await asyncio.sleep(0.001 * (number % 7))
        stream.close()

    async def storm() -> None:
        before = llm.num_aborted
        await asyncio.gather(*map(leave, range(60)))
        assert llm.num_aborted == before + 90

    run(storm())


@pytest.mark.parametrize("resumed", [{}, {1: [5]}, {0: [5] * 20}, {0: [9999]}], ids=["none", "index", "long", "token"])
def test_what_cannot_be_resumed_is_refused(llm: AsyncLLM, run: Run, resumed: dict[int, list[int]]) -> None:
    async def scene() -> None:
        stream = await llm.stream(["abc"], SamplingParams(max_tokens=20))
        wire_id, opened = next(iter(llm._open.by_wire_id.items()))
        assert llm._engine.process is not None
        request = Request("again", [1, 2], SamplingParams(max_tokens=20), resumed=resumed)
        llm._open.by_wire_id["again"] = opened
        llm._engine.process.send(ipc.TO_ENGINE.encode(ipc.Add(request)))
        with pytest.raises(BadRequest, match="resumed"):
            await stream.complete()
        llm._open.by_wire_id.pop("again", None)
        llm._open.by_wire_id.pop(wire_id, None)

    run(scene())


def segments() -> set[str]:
    return set(os.listdir("/dev/shm"))


def orphaned(names: set[str]) -> set[str]:
    """Those that no process has mapped: other programs on this machine may have made some meanwhile."""
    held = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):                          # it has just ended
            held += maps.read_text()
    return {name for name in names if f"/dev/shm/{name}" not in held and Path("/dev/shm", name).exists()}


@pytest.mark.reliability("R-02b")
@pytest.mark.slow
def test_killed_twenty_times_under_64_streams(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time tokens come again within 5 s and what loading takes; every answer is the same; and no process, socket or
    shared memory is left of the twenty."""
    with tempfile.TemporaryDirectory(prefix="r-02-") as folder:              # a short path: sockets are made in it
        monkeypatch.setattr(tempfile, "tempdir", folder)
        kill_twenty_times(model, monkeypatch, Path(folder))


def kill_twenty_times(model: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    params = [SamplingParams(seed=number, max_tokens=600, ignore_eos=True, temperature=number % 2) for number in range(64)]
    recoveries: list[float] = []
    engines: list[psutil.Process] = []
    chat_template._process.render("warm", {})            # it is of this process, not of an engine: it stays
    shared, children = segments(), {each.pid for each in psutil.Process().children(recursive=True)}

    async def scene() -> float:
        options = OPTIONS | {"max_num_seqs": 32, "num_gpu_blocks_override": 3000, "dtype": "float64"}    # no token by rounding
        at_once = Supervision(max_restarts=100, backoff=1e-6, silence=60.0)      # the wait doubles every time
        began = time.monotonic()
        async with AsyncLLM(model, supervision=at_once, **options) as llm:
            loading = time.monotonic() - began
            assert len(list(folder.iterdir())) == 1      # this is where they are
            streams: list[Any] = []

            async def ask() -> list[Any]:
                streams[:] = [await llm.stream([f"prompt {number}"], each) for number, each in enumerate(params)]
                return [(await stream.complete())[0].outputs[0].token_ids for stream in streams]

            def tokens() -> int:
                return sum(len(stream.outputs[0].outputs[0].token_ids) for stream in streams)

            expected = await ask()
            asking, kills = asyncio.ensure_future(ask()), 0
            while kills < 20:
                if asking.done():
                    assert await asking == expected
                    asking = asyncio.ensure_future(ask())
                await asyncio.sleep(1.0)
                before = llm.num_restarts
                engines.append(psutil.Process(pid_of(llm)))
                os.kill(engines[-1].pid, signal.SIGKILL)
                killed = time.monotonic()
                kills += 1
                await until(lambda before=before: llm.num_restarts > before)     # type: ignore[misc]
                had = tokens()
                await until(lambda had=had, asking=asking: asking.done() or tokens() > had)          # type: ignore[misc]
                recoveries.append(time.monotonic() - killed)
            assert await asking == expected
            await nothing_left(llm)
        return loading

    loading = asyncio.run(asyncio.wait_for(scene(), 280))
    assert max(recoveries) <= 5.0 + loading, (recoveries, loading)
    assert not any(each.is_running() for each in engines)
    assert [each.cmdline() for each in psutil.Process().children(recursive=True) if each.pid not in children] == []
    assert not list(folder.iterdir()) and not orphaned(segments() - shared)
