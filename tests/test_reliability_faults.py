"""A fault at every site of a request's way, once each: at the first call there, at the tenth, and somewhere later. Only the
request that it hits may fail; an engine that cannot go on is replaced, and what is open goes on exactly. [R-06] And the
storm of clients that leave, at its bar. [R-01]"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faulty_engine
import pytest
from served_model import CONTEXT, write_model

from ridgeline import SamplingParams
from ridgeline.engine.async_llm import AsyncLLM
from ridgeline.engine.text import TextStream
from ridgeline.engine.tokenizer import Tokenizer
from ridgeline.engine.watchdog import Supervision
from ridgeline.metrics import ServingMetrics
from ridgeline.sampling_params import StructuredOutputs

OPTIONS: dict[str, Any] = {"load_format": "dummy", "num_gpu_blocks_override": 400, "max_num_seqs": 4, "dtype": "float32"}
RULES = Supervision(max_restarts=3, backoff=0.01, silence=20.0)
# Sites of the front end, patched in this process.
HERE: dict[str, tuple[type[Any], str]] = {
    "tokenise": (Tokenizer, "encode"),
    "detokenise": (TextStream, "feed"),
    "front-end metrics": (ServingMetrics, "took"),
    "log": (logging.StreamHandler, "flush"),
}
WHEN = {"first": 1, "tenth": 10, "later": 10 + random.Random(7).randrange(5, 40)}
SELDOM = {"first": 1, "tenth": 3, "later": 5}            # where a call is made once or twice for a request
SELDOM_SITES = {"free", "tokenise", "alloc"}
ONCE = {"grammar", "log"}


class FaultyLLM(AsyncLLM):
    engine_module = "faulty_engine"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


PARAMS = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(seed=4, max_tokens=30, ignore_eos=True, n=2),
    SamplingParams(temperature=0, max_tokens=35, ignore_eos=True, logprobs=1),
    SamplingParams(seed=5, max_tokens=20, structured_outputs=StructuredOutputs(regex="[a-z]{18}")),
    SamplingParams(temperature=0, max_tokens=40, stop=["\x00never"]),
]


async def ask(llm: AsyncLLM, number: int) -> Any:
    """The answers' tokens; or the error."""
    try:
        stream = await llm.stream([f"request {number} " * 3], PARAMS[number])
        return [answer.token_ids for answer in (await stream.complete())[0].outputs]
    except Exception as error:
        return error


async def ask_all(llm: AsyncLLM) -> list[Any]:
    return await asyncio.wait_for(asyncio.gather(*(ask(llm, number) for number in range(len(PARAMS)))), 60)


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[list[Any]]:
    async def scene() -> list[Any]:
        async with AsyncLLM(model, supervision=RULES, **OPTIONS) as llm:
            return await ask_all(llm)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield asyncio.run(scene())


@pytest.mark.slow
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("site", [*faulty_engine.SITES, *HERE])
def test_a_fault_costs_one_request_or_one_engine(
    site: str, when: str, model: Path, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if site in ONCE and when != "first":
        pytest.skip("it is called once")
    number = (SELDOM if site in SELDOM_SITES else WHEN)[when]
    assert not any(isinstance(each, Exception) for each in expected)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    happened = tmp_path / "happened"

    def plant_here() -> None:
        kind, name = HERE[site]
        whole, calls = getattr(kind, name), [0]

        def faulty(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == number:
                happened.touch()
                raise RuntimeError(f"planted at {site}")
            return whole(*args, **options)

        monkeypatch.setattr(kind, name, faulty)

    async def scene() -> None:
        async with FaultyLLM(model, supervision=RULES, **OPTIONS) as llm:
            if site in HERE:
                plant_here()
                if site == "log":
                    logging.getLogger("ridgeline").warning("something to write down")
            answers = await ask_all(llm)
            assert happened.exists(), "the fault was not reached"
            failed = [number for number, each in enumerate(answers) if isinstance(each, Exception)]
            assert len(failed) <= 1, [answers[number] for number in failed]
            assert [answers[each] for each in range(len(PARAMS)) if each not in failed] == [
                expected[each] for each in range(len(PARAMS)) if each not in failed
            ]
            assert llm.num_restarts <= 1
            if site == "memory":
                assert llm.num_restarts == 0 and not failed
            assert await ask_all(llm) == expected        # and all is well afterwards
            assert llm.ready is not None
            async with asyncio.timeout(10):
                while llm.num_open or llm.free_blocks != llm.ready.num_blocks:
                    await asyncio.sleep(0.01)

    if site not in HERE:
        monkeypatch.setenv(faulty_engine.VARIABLE, f"{site}|{number}|{happened}")
    asyncio.run(asyncio.wait_for(scene(), 120))


@pytest.mark.slow
def test_clients_that_leave_at_any_point_leave_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """500 streams, 200 that wait for a whole answer, 50 with four answers each."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    source = random.Random(5)

    async def leave(llm: AsyncLLM, n: int, streams: bool) -> None:
        params = SamplingParams(max_tokens=CONTEXT, ignore_eos=True, n=n)
        stream = await llm.stream([f"client {source.random()}"], params)
        tokens, deadline = source.choice((0, 1, 2, 7)), time.monotonic() + 20 * source.random() ** 3
        while streams and tokens and time.monotonic() < deadline:
            try:
                tokens -= len(await asyncio.wait_for(stream.__anext__(), deadline - time.monotonic()))
            except TimeoutError:
                break
            tokens = max(0, tokens)
        if not streams:
            await asyncio.sleep(0.02 * source.random())
        stream.close()

    async def scene() -> None:
        options = OPTIONS | {"max_num_seqs": 16, "num_gpu_blocks_override": 3_000}
        async with AsyncLLM(model, **options) as llm:
            kinds = [(1, True)] * 500 + [(1, False)] * 200 + [(4, True)] * 50
            source.shuffle(kinds)
            waiting = asyncio.Semaphore(64)

            async def client(n: int, streams: bool) -> None:
                async with waiting:
                    await leave(llm, n, streams)

            await asyncio.gather(*(client(*kind) for kind in kinds))
            assert llm.ready is not None and llm.num_open == 0 and not llm._open.wire_ids
            async with asyncio.timeout(5):
                while llm.running or llm.free_blocks != llm.ready.num_blocks:
                    await asyncio.sleep(0.005)
            assert llm.num_aborted == len(kinds)
            stream = await llm.stream(["still well"], SamplingParams(max_tokens=5, ignore_eos=True))
            assert len((await stream.complete())[0].outputs[0].token_ids) == 5

    asyncio.run(asyncio.wait_for(scene(), 200))
