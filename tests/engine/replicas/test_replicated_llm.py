"""Several engines behind one front end, with engines that are no processes: where requests go, and what a death changes.

A pretended engine gives each request tokens that depend on its prompt and their place alone, as a greedy engine does. Nothing
here waits for time: an engine computes when the test says so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served_model import write_model
from starlette.testclient import TestClient

from ridgeline import SamplingParams
from ridgeline.config import EngineConfig
from ridgeline.engine.client import supervisor
from ridgeline.engine.client.answer_stream import AnswerStream
from ridgeline.engine.client.watchdog import Supervision
from ridgeline.engine.ipc import TO_ENGINE, Abort, Add, Deltas, ForgetPrefixes, PrefixesForgotten, Ready
from ridgeline.engine.replicas.placement import placements, visible_gpus
from ridgeline.engine.replicas.replicated_llm import ReplicatedLLM
from ridgeline.errors import BadRequest, ConfigError, EngineDead, RequestError
from ridgeline.messages import Request, TokenDelta, TokenDeltas
from ridgeline.process import platform
from ridgeline.server.app import make_app
from ridgeline.server.observe.fleet_endpoint import fleet
from ridgeline.server.options import ServerOptions
from ridgeline.server.service import Service

RULES = Supervision(max_restarts=5, backoff=0.0, silence=0.0)
LENGTH = 12


class Child:
    """An engine that runs in the test. `made`: all so far, the newest last."""

    made: list[Child] = []           # noqa: RUF012 - each test sets its own
    starts = True                    # False: engines that are started now never get ready

    def __init__(self, module: str, config: EngineConfig, on_message: Any, on_lost: Any, sizes: Any, environment: Any) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.lost: asyncio.Future[Any] = loop.create_future()
        self.sizes, self.environment, self.options = dict(sizes), dict(environment), config
        self.open: dict[str, tuple[Request, int]] = {}           # by id: the request, and how many tokens it has
        self.greeted: list[Any] = []                             # what it was sent while it started
        self._say, self._on_lost = on_message, on_lost
        self.made.append(self)
        if self.starts:
            self.ready.set_result(Ready("m", 512, 4, 260, "float32", "cpu", 64, 16, 0.1, sizes={"max_model_len": 512}))

    def send(self, frame: bytes) -> None:
        message = TO_ENGINE.decode(frame)
        if isinstance(message, Add):
            request = message.request
            self.open[request.request_id] = request, len((request.resumed or {}).get(0, []))
        elif isinstance(message, Abort):
            self.open.pop(message.request_id, None)
        elif isinstance(message, ForgetPrefixes):
            self._say(PrefixesForgotten(True))

    def greet(self, frame: bytes) -> None:
        self.greeted.append(TO_ENGINE.decode(frame))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            deltas = []
            for name, (request, number) in list(self.open.items()):
                ends = number + 1 == (request.params.max_tokens or LENGTH)
                token = (sum(request.prompt_token_ids) + 7 * number) % 250
                deltas.append(TokenDelta(name, 0, [token], finish_reason="length" if ends else None))
                self.open[name] = request, number + 1
                if ends:
                    del self.open[name]
            for _ in self._say(Deltas(TokenDeltas(others=deltas), len(self.open), 64 - len(self.open))) or ():
                pass

    def die(self) -> None:
        self.open.clear()
        self.lost.set_result(EngineDead("it was killed"))
        self._on_lost()

    async def stop(self, gently: bool = False, at_once: bool = False) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


async def at_once(work: Callable[[], str]) -> str:
    return work()


@pytest.fixture
def scene(model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a coroutine with a started ReplicatedLLM; afterwards nothing may be open."""
    monkeypatch.setattr(supervisor, "EngineChild", Child)
    monkeypatch.setattr(Child, "made", [])
    # settle() counts turns of the loop, and threads take none.
    monkeypatch.setattr(supervisor, "asyncio", SimpleNamespace(**{**vars(asyncio), "to_thread": at_once}))

    def run(test: Callable[[ReplicatedLLM, list[Child]], Awaitable[None]], engines: int = 3, **options: Any) -> None:
        async def whole() -> None:
            rules = options.pop("supervision", RULES)
            llm = ReplicatedLLM(model, supervision=rules, data_parallel_size=engines, device="cpu", **options)
            await llm.start()
            Child.made[:] = [each._engine.process for each in llm.engines]   # type: ignore[misc]  # they may start in any order
            await test(llm, Child.made)
            assert llm.num_open == 0
            assert all(each.pending == 0 for each in llm.choice.loads)
            assert (llm.load.waiting_tokens, llm.load.open_answers) == (0, 0)
            await llm.shutdown()

        asyncio.run(asyncio.wait_for(whole(), 120))

    return run


def greedy(**more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": LENGTH, "detokenize": False} | more)


async def ask(llm: ReplicatedLLM, *ids: int, params: SamplingParams | None = None, name: str | None = None) -> AnswerStream:
    return await llm.stream([{"prompt_token_ids": list(ids)}], params or greedy(), name)


def expected(*ids: int, length: int = LENGTH) -> list[int]:
    return [(sum(ids) + 7 * place) % 250 for place in range(length)]


def said(stream: AnswerStream) -> list[int]:
    return list(stream.outputs[0].outputs[0].token_ids)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("at_start", [True, False])
def test_each_engine_gets_the_vocabulary_for_grammars(scene: Callable[..., None], at_start: bool) -> None:
    async def look(llm: ReplicatedLLM, children: list[Child]) -> None:
        pieces = llm.get_tokenizer().token_pieces()
        assert [[message.pieces for message in child.greeted] for child in children] == [[pieces] * at_start] * 3

    scene(look, grammars_at_start=at_start)


def home(children: list[Child]) -> Child:
    """The only engine with an open request."""
    [found] = [each for each in children if each.open]
    return found


def test_requests_are_spread_and_their_answers_are_whole(scene: Callable[..., None]) -> None:
    async def test(llm: ReplicatedLLM, children: list[Child]) -> None:
        streams = [await ask(llm, number, 2, 3) for number in range(6)]
        assert [len(each.open) for each in children] == [2, 2, 2]
        assert llm.ready is not None and llm.ready.max_num_seqs == 12 and llm.ready.num_blocks == 192
        for each in children:
            each.step(LENGTH)
        for number, stream in enumerate(streams):
            await stream.complete()
            assert said(stream) == expected(number, 2, 3)

    scene(test)


def test_a_conversation_stays_where_its_prefix_is(scene: Callable[..., None]) -> None:
    async def test(llm: ReplicatedLLM, children: list[Child]) -> None:
        turn = list(range(100, 164))
        stream = await ask(llm, *turn)
        first = home(children)
        first.step(LENGTH)
        await stream.complete()
        for _ in range(3):
            turn = [*turn, *said(stream), *range(40)]
            stream = await ask(llm, *turn)
            assert home(children) is first
            first.step(LENGTH)
            await stream.complete()
        await llm.reset_prefix_cache()
        assert all(len(load.tree) == 0 for load in llm.choice.loads)

    scene(test)


def test_streams_go_on_in_another_engine_when_theirs_dies(scene: Callable[..., None]) -> None:
    async def test(llm: ReplicatedLLM, children: list[Child]) -> None:
        stream, seeded = await ask(llm, 5, 6, 7), await ask(llm, 8, 9, params=greedy(temperature=1.0, seed=3))
        dying = next(each for each in children if any(request.prompt_token_ids == [5, 6, 7] for request, _ in each.open.values()))
        dying.step(4)
        assert said(stream) == expected(5, 6, 7, length=4)
        dying.die()
        [again] = [request for each in children for request, _ in each.open.values() if request.prompt_token_ids == [5, 6, 7]]
        assert again.resumed == {0: expected(5, 6, 7, length=4)} and llm.num_moved == 1
        for each in children:
            each.step(LENGTH)
        for one, ids in ((stream, (5, 6, 7)), (seeded, (8, 9))):
            await one.complete()
            assert said(one) == expected(*ids)
        await settle()
        assert llm.num_restarts == 1 and len(children) == 4 and [each.state for each in llm.engines] == ["ok"] * 3
        assert children[3].sizes == {"max_model_len": 512}

    scene(test)


def test_nothing_is_learned_from_a_request_that_was_moved(scene: Callable[..., None]) -> None:
    async def test(llm: ReplicatedLLM, children: list[Child]) -> None:
        stream = await ask(llm, *range(100, 164))
        home(children).die()
        survivor = next(each for each in llm.engines if each.num_open)
        load = survivor.requests.routed
        before = len(load.tree), load.times.prefill.weight, load.corrections, load.habits.bytes_per_token
        home(children).step(LENGTH)
        await stream.complete()
        assert said(stream) == expected(*range(100, 164))
        assert before == (len(load.tree), load.times.prefill.weight, load.corrections, load.habits.bytes_per_token)
        await settle()

    scene(test)


def test_while_one_restarts_the_others_take_everything(
    scene: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(llm: ReplicatedLLM, children: list[Child]) -> None:
        monkeypatch.setattr(Child, "starts", False)
        monkeypatch.setattr(supervisor.logger.parent, "propagate", True)
        llm.engines[0].free_blocks = 10
        children[0].die()
        await settle()
        assert "engine 0 stopped (it was killed)" in caplog.text
        assert [each.kv_used is None for each in fleet(llm).rows] == [True, False, False]     # its cache is gone
        assert [each.state for each in llm.engines] == ["restarting", "ok", "ok"] and llm.state == "ok" and llm.is_alive
        streams = [await ask(llm, number) for number in range(4)]
        assert [len(each.open) for each in children[:3]] == [0, 2, 2]
        for each in children[1:3]:
            each.step(LENGTH)
        assert [await stream.complete() and said(stream) for stream in streams] == [expected(number) for number in range(4)]

    scene(test)


def test_all_engines_are_switched_or_none(scene: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(llm: ReplicatedLLM, children: list[Child]) -> None:
        switched: list[str] = []

        async def switch(technique: str, on: bool) -> None:
            switched.append(technique)

        monkeypatch.setattr(Child, "starts", False)
        for each in llm.engines:
            monkeypatch.setattr(each, "switch", switch)
        await llm.switch("drafts", False)
        children[2].die()
        await settle()
        with pytest.raises(BadRequest, match="restarting"):
            await llm.switch("drafts", True)
        assert len(switched) == 3

    scene(test)


def test_a_request_that_kills_engines_kills_two_and_then_only_its_own(scene: Callable[..., None]) -> None:
    async def test(llm: ReplicatedLLM, children: list[Child]) -> None:
        poison = await ask(llm, 1, 2)
        numbers = []
        while not poison.error:
            [killed] = [each for each in llm.engines if each.num_open]
            numbers.append(killed.number)
            assert killed._engine.process is not None
            killed._engine.process.die()                     # type: ignore[attr-defined]
            await settle()
        assert isinstance(poison.error, (RequestError, EngineDead)) and llm.num_moved == 1
        assert len(set(numbers)) == 2 and numbers[2:] == [numbers[1]] * (len(numbers) - 2)
        assert llm.state == "ok"
        poison.close()

    scene(test, supervision=Supervision(max_restarts=2, backoff=0.0, silence=0.0))


def test_the_front_end_is_dead_only_when_all_engines_are(scene: Callable[..., None]) -> None:
    async def test(llm: ReplicatedLLM, children: list[Child]) -> None:
        stream = await ask(llm, 1)
        for _ in range(3):
            assert llm.is_alive
            last = home(children)
            last.step()
            last.die()
            await settle()
        with pytest.raises(EngineDead, match="killed"):
            await stream.complete()
        assert said(stream) == expected(1, length=3) and len(children) == 3
        assert llm.state == "dead" and "killed" in str(await llm.died())
        with pytest.raises(EngineDead):
            await ask(llm, 2)

    scene(test, supervision=Supervision(max_restarts=0))


def test_ids_are_unique_over_all_engines_and_aborts_find_theirs(scene: Callable[..., None]) -> None:
    async def test(llm: ReplicatedLLM, children: list[Child]) -> None:
        stream = await ask(llm, 1, name="mine")
        for _ in range(3):
            with pytest.raises(BadRequest, match="already running"):
                await ask(llm, 2, name="mine")
        await llm.abort("mine")
        await stream.complete()
        assert stream.outputs[0].outputs[0].finish_reason == "abort" and not any(each.open for each in children)
        left = await ask(llm, 3)
        left.close()
        assert llm.num_open == 0 and llm.num_aborted == 2 and not any(each.open for each in children)

    scene(test)


def test_pages_of_the_server_show_every_engine(scene: Callable[..., None]) -> None:
    async def test(llm: ReplicatedLLM, children: list[Child]) -> None:
        service = Service(llm, ServerOptions(), "m")
        service.open()
        assert service.slots.limit == 48
        client = TestClient(make_app(service))
        stream = await ask(llm, 1)
        home(children).step()
        health = (await asyncio.to_thread(client.get, "/health")).json()
        assert health == {"status": "ok", "requests": 1, "running": 1, "free_blocks": 63 + 128, "num_blocks": 192,
                          "engines": ["ok"] * 3}
        text = (await asyncio.to_thread(client.get, "/metrics")).text
        running = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        assert [line.partition("{")[2] for line in running] == [
            f'model_name="m",engine="{number}"}} {float(bool(child.open)):g}' for number, child in enumerate(children)
        ]
        assert text.count("# TYPE vllm:num_requests_running gauge") == 1
        home(children).step(LENGTH)
        await stream.complete()

    scene(test)


def test_each_engine_gets_its_part_of_the_machine(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def places(gpus: list[str], engines: int, **options: Any) -> list[tuple[dict[str, str], int]]:
        config = EngineConfig.of(model=model, data_parallel_size=engines, **options)
        return [(dict(each.environment), each.sharing) for each in placements(config, gpus, {})]

    visible = "CUDA_VISIBLE_DEVICES"
    assert places(["0", "1"], 2) == [({visible: "0"}, 1), ({visible: "1"}, 1)]
    assert places(["4", "5", "6", "7"], 2, tensor_parallel_size=2) == [({visible: "4,5"}, 1), ({visible: "6,7"}, 1)]
    assert places(["0", "1"], 3) == [({visible: "0"}, 2), ({visible: "1"}, 1), ({visible: "0"}, 2)]
    assert places(["0", "1", "2", "3"], 2, pipeline_parallel_size=2) == [({visible: "0,1"}, 1), ({visible: "2,3"}, 1)]
    with pytest.raises(ConfigError, match="ridgeline route"):
        places(["0", "1"], 2, distributed_executor_backend="ray")
    with pytest.raises(ConfigError, match=r"100000 is too many for this machine \(2 GPUs\): at most 16; .*ridgeline route"):
        places(["0", "1"], 100_000)                      # minutes of start-up would go by without a word
    with pytest.raises(ConfigError, match=r"100000 is too many for this machine \(\d+ CPU cores\)"):
        places([], 100_000)
    assert len(places([], 8)) == 8
    assert places([], 2)[0][1] == 2 and "OMP_NUM_THREADS" in places(["0"], 2, device="cpu")[0][0]
    monkeypatch.setattr(platform, "cpu_count", lambda: 16)
    assert platform.rank_cores(2) == 8
    for name, value in places([], 4, tensor_parallel_size=2)[0][0].items():
        monkeypatch.setenv(name, value)
    assert platform.rank_cores(2) == 2 and platform.rank_cores(100) == 1
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({visible: "3,GPU-abc"}, tmp_path) == ["3", "GPU-abc"] and visible_gpus({visible: ""}, tmp_path) == []


def test_engines_on_one_gpu_divide_its_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    llm = ReplicatedLLM(model, data_parallel_size=2, gpu_memory_utilization=0.8)
    assert [each.config.cache.gpu_memory_utilization for each in llm.engines] == [0.4, 0.4]
    assert json.dumps([each.placement.device for each in llm.engines]) == '["GPU 0", "GPU 0"]'
