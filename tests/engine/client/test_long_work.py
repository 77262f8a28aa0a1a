"""Threads for long work: bounded, with deadlines, apart from short requests; and which work counts as long."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
from scripted_server import ScriptedLLM
from served_model import write_model

from ridgeline.engine.client import long_work
from ridgeline.engine.client.grammar_check import _Pending
from ridgeline.engine.client.long_work import THREADS, GivenUp, LongWork, away, checkpoint
from ridgeline.engine.client.prompt_limits import LONG_WORK, MOST_VALUES, is_brief, num_chars
from ridgeline.errors import BadRequest, Overloaded, TimedOut
from ridgeline.text import chat_template


class Gate:
    """Work that waits until it is opened."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self) -> str:
        self.begun.release()
        assert self.opened.wait(60)
        return "done"


async def until_begun(gate: Gate, count: int = 1) -> None:
    for _ in range(count):
        assert await asyncio.to_thread(gate.begun.acquire, True, 60)


def test_results_and_errors_come_back() -> None:
    async def check() -> None:
        pool = LongWork()
        assert await pool.run(lambda: threading.current_thread().daemon) is True     # a process that ends waits for none
        with pytest.raises(BadRequest, match="no"):
            await pool.run(lambda: (_ for _ in ()).throw(BadRequest("no")))
        assert pool.waiting == 0 and pool.num_done == 2

    asyncio.run(check())


def test_when_too_much_waits_more_is_refused_and_short_work_goes_on() -> None:
    async def check() -> None:
        pool, gate = LongWork(threads=2, most_waiting=3), Gate()
        running = [asyncio.ensure_future(pool.run(gate)) for _ in range(2)]
        await until_begun(gate, 2)
        waiting = [asyncio.ensure_future(pool.run(gate)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await pool.run(gate)
        assert pool.waiting == 3
        assert await asyncio.to_thread(lambda: "short") == "short"
        gate.opened.set()
        assert await asyncio.gather(*running, *waiting) == ["done"] * 5

    asyncio.run(check())


def test_short_texts_are_tokenised_by_few_threads() -> None:
    """Tokenisers compute without Python's lock: the event loop would have a small part of the cores."""
    async def check() -> None:
        gate = Gate()
        running = [asyncio.ensure_future(away(1000, gate)) for _ in range(3 * THREADS)]
        await until_begun(gate, THREADS)
        assert not await asyncio.to_thread(gate.begun.acquire, True, 0.1)
        gate.opened.set()
        assert await asyncio.gather(*running) == ["done"] * len(running)

    asyncio.run(check())


def test_texts_do_not_wait_behind_chats_that_wait_for_their_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chats that waited for the process that renders held both threads of texts, and short ones all of asyncio's."""
    monkeypatch.setattr(chat_template, "_WAIT_SECONDS", 600.0)

    async def check() -> None:
        llm = ScriptedLLM(write_model(tmp_path / "tiny"), str)
        await llm.start()
        with chat_template._process._lock:               # it renders, and takes long
            some = [asyncio.ensure_future(llm.chat_tokens([{"role": "user", "content": length * "a"}]))
                    for length in (10, LONG_WORK) for _ in range(40)]
            text = asyncio.ensure_future(llm.text_tokens(LONG_WORK * "a"))
            other = asyncio.ensure_future(asyncio.to_thread(lambda: "done"))
            await asyncio.wait((text, other), timeout=60)
            ended = text.done() and other.done() and not any(each.done() for each in some)
        assert all(await asyncio.gather(*some)) and ended

    asyncio.run(check())


def test_an_answer_that_was_computed_waits_for_a_thread_whatever_else_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Vectors that an engine had worked on for minutes were refused, or the end of a stream was written on the event loop."""
    async def check() -> None:
        work, gate = LongWork(threads=1, most_waiting=1, wait_seconds=0.0), Gate()
        monkeypatch.setattr(long_work, "LONG_WORK", work)
        running = asyncio.ensure_future(work.run(gate, 1, is_answer=True))
        await until_begun(gate)
        work.waiting = 1                                 # bytes of a body
        answer = asyncio.ensure_future(long_work.away_to_answer(long_work.LONG_BYTES + 1, threading.current_thread))
        await asyncio.sleep(0)
        assert work.waiting == 1                         # it keeps out no body
        with pytest.raises(Overloaded):
            await long_work.away_if_long(long_work.LONG_BYTES + 1, threading.current_thread)
        gate.opened.set()
        assert await running == "done" and await answer is not threading.current_thread()

    asyncio.run(check())


def test_an_answer_is_written_here_where_the_system_has_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoThread(threading.Thread):
        def start(self) -> None:
            raise RuntimeError

    monkeypatch.setattr(long_work, "LONG_WORK", LongWork())
    monkeypatch.setattr(long_work.threading, "Thread", NoThread)
    assert asyncio.run(long_work.away_to_answer(long_work.LONG_BYTES + 1, threading.get_ident)) == threading.get_ident()


def test_work_is_bounded_by_its_bytes() -> None:
    """A thousand long prompts may wait, or a few of the longest bodies; the first in line may be of any size."""

    async def check() -> None:
        pool, gate = LongWork(threads=1, most_waiting=100), Gate()
        running = asyncio.ensure_future(pool.run(gate, 500))
        await until_begun(gate)
        waiting = [asyncio.ensure_future(pool.run(gate, 1)) for _ in range(90)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await pool.run(gate, 11)
        last = asyncio.ensure_future(pool.run(gate, 10))
        gate.opened.set()
        assert await asyncio.gather(running, *waiting, last) == ["done"] * 92
        assert pool.waiting == 0

    asyncio.run(check())


def test_work_whose_client_left_is_not_begun() -> None:
    async def check() -> None:
        pool, gate = LongWork(threads=1, most_waiting=2), Gate()
        begun: list[int] = []
        first = asyncio.ensure_future(pool.run(gate))
        await until_begun(gate)
        left = asyncio.ensure_future(pool.run(lambda: begun.append(1)))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert pool.waiting == 0                         # its place is free at once
        gate.opened.set()
        await first
        await pool.run(lambda: begun.append(2))
        assert begun == [2]

    asyncio.run(check())


def test_work_that_has_begun_ends_at_its_next_checkpoint_when_its_client_leaves() -> None:
    async def check() -> None:
        pool, gate, outcome = LongWork(threads=1), Gate(), []

        def work() -> None:
            gate()
            try:
                checkpoint()
            except GivenUp:
                outcome.append("given up")
                raise
            outcome.append("went on")

        left = asyncio.ensure_future(pool.run(work))
        await until_begun(gate)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        gate.opened.set()
        assert await pool.run(lambda: "next") == "next"
        checkpoint()                                # of no work: nothing
        assert outcome == ["given up"]

    asyncio.run(check())


@pytest.mark.parametrize(("threads", "error"), [(1, TimedOut), (0, Overloaded)], ids=["begun", "not begun"])
def test_work_has_a_deadline(threads: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a clock: every wait is over once the thread, if there is one, has begun."""

    async def check() -> None:
        pool, gate = LongWork(threads, wait_seconds=1.0, work_seconds=2.0), Gate()
        waits: list[float] = []

        async def wait(futures: Any, timeout: float) -> None:
            waits.append(timeout)
            if len(waits) == 1:
                await until_begun(gate, threads)

        monkeypatch.setattr(asyncio, "wait", wait)
        try:
            with pytest.raises(error):
                await pool.run(gate)
        finally:
            gate.opened.set()
        assert pool.waiting == 0 and waits == [1.0, 2.0][: 1 + threads]

    asyncio.run(check())


def test_an_error_and_its_work_are_freed_without_the_garbage_collector() -> None:
    class Body: ...

    async def ask(pool: LongWork) -> weakref.ref[Body]:
        body = Body()

        def work() -> None:
            kept = body
            raise BadRequest(f"no {kept}")

        with pytest.raises(BadRequest):
            await pool.run(work)
        return weakref.ref(body)

    async def check() -> None:
        pool = LongWork(threads=1)
        gone = await ask(pool)
        await pool.run(lambda: None)                     # the thread has forgotten the one before
        assert gone() is None

    gc.collect()
    gc.disable()
    try:
        asyncio.run(check())
    finally:
        gc.enable()


# -- what is brief -----------------------------------------------------------------------------------------------------

TURN = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    "variables",
    [
        {"x": "a" * LONG_WORK}, {"x": [[]] * 5_000_000}, {"a" * LONG_WORK: 1}, {str(number): "" for number in range(MOST_VALUES)},
        {"x": [[[["a" * LONG_WORK]]]]}, {"x": [0] * MOST_VALUES},
    ],
    ids=["text", "lists", "key", "keys", "nested", "numbers"],
)
def test_large_variables_of_a_template_make_a_short_chat_long(variables: dict[str, Any]) -> None:
    assert is_brief(TURN, {"chat_template_kwargs": {"enable_thinking": False}, "tools": None})
    assert not is_brief(TURN, {"chat_template_kwargs": variables})
    assert not is_brief(TURN, {"tools": [variables]})
    assert not is_brief([{"role": "user", "content": "a", **variables}])


def test_only_as_much_is_looked_at_as_is_brief() -> None:
    class Endless(list[Any]):
        """Says that it is long, and must not be walked."""

        def __len__(self) -> int:
            return 10**9

        def __iter__(self) -> Any:
            raise AssertionError

    assert not is_brief(TURN, {"x": Endless()})


def test_characters_of_a_conversation_are_counted() -> None:
    assert num_chars([{"role": "user", "content": "x" * 1000}, {"role": "user", "content": ["y" * 500]}]) > 1500


def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")     # Python's words, at the limit of ulimit -u or of a container

    monkeypatch.setattr(threading.Thread, "start", start)


def test_where_the_system_has_no_thread_the_next_job_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a pool of one thread would never have any: each later job would wait for its whole time."""
    async def check() -> None:
        alone, two = LongWork(threads=1), LongWork(threads=2)
        assert await two.run(lambda: 1) == 1
        with monkeypatch.context() as scarce:
            without_threads(scarce)
            with pytest.raises(Overloaded, match="no thread"):
                await alone.run(lambda: 2)
            assert await two.run(lambda: 3) == 3         # by the thread that runs
        assert alone.waiting == 0 and await alone.run(lambda: 4) == 4

    asyncio.run(check())


def test_the_thread_that_watches_waiting_grammars_is_started_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pending, started = _Pending(), list[str]()
    with monkeypatch.context() as scarce:
        without_threads(scarce)
        with pytest.raises(RuntimeError):
            pending.give_up_in_time(cast(Any, None))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: started.append(thread.name))
    pending.give_up_in_time(cast(Any, None))
    pending.give_up_in_time(cast(Any, None))
    assert started == ["grammar-patience"]
