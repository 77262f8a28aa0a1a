"""The soak: the line through a server's memory and the verdict over it, and a short one of a tiny model."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served_model import write_model

from ridgeline.__main__ import main
from ridgeline.bench import soak
from ridgeline.bench.load import leaks
from ridgeline.bench.load.leaks import FAIL, OPEN, PASS, Quiet, Slope, judge, quantile, slope
from ridgeline.bench.load.target import UNKNOWN_QUALITY
from ridgeline.bench.load.traffic import Timed, Traffic, Wrong
from ridgeline.bench.soak import FRONT_END, Soak, early_and_late, processes
from ridgeline.process.children import start_child

MB = 1e6
QUIET = Quiet({"engine": 12}, {"engine": 4}, {"engine": 10**9}, 0, 0)
FLAT = {"engine": Slope(0.0, -1.0, 1.0, 100)}
EQUAL = {"whole answer": ([1.0] * 10, [1.1] * 10)}


# -- the slope ---------------------------------------------------------------------------------------------------------


def test_the_slope_of_a_line_is_the_line() -> None:
    times = [float(second) for second in range(600)]
    found = slope(times, [5e8 + 2 * MB / 60 * second for second in times])               # 2 MB a minute
    assert found.value == pytest.approx(120.0) and found.low == pytest.approx(120.0) and found.high == pytest.approx(120.0)
    assert found.samples == 600


@pytest.mark.parametrize("growth", [0.0, 45.0, 200.0])
def test_the_interval_holds_the_truth_as_often_as_it_says(growth: float) -> None:
    rng, times, inside = random.Random(int(growth)), [float(second) for second in range(300)], 0
    for _ in range(400):
        sizes = [1e9 + growth * MB / 3600 * second + rng.gauss(0, 3 * MB) for second in times]
        found = slope(times, sizes)
        inside += found.low <= growth <= found.high
    assert 0.92 <= inside / 400 <= 0.98


def test_sawteeth_do_not_pass_for_certainty() -> None:
    """Neighbouring samples are alike; an interval that took them for independent would exclude the truth."""
    times = [float(second) for second in range(600)]
    found = slope(times, [1e9 + 20 * MB * ((second / 97) % 1) for second in times])
    assert found.low < 0 < found.high


@pytest.mark.parametrize("samples", [0, 1, 5, 11])
def test_too_few_samples_say_nothing(samples: int) -> None:
    found = slope([float(at) for at in range(samples)], [MB * at for at in range(samples)])
    assert (found.low, found.high) == (-math.inf, math.inf)


@pytest.mark.parametrize(("freedom", "expected"), [(4, 2.776), (8, 2.306), (18, 2.101), (60, 2.000)])
def test_students_t(freedom: int, expected: float) -> None:
    assert leaks._student(freedom) == pytest.approx(expected, rel=0.01)


def test_quantiles() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0 and quantile([float(each) for each in range(1, 101)], 0.99) == 99.0
    assert quantile([7.0], 0.99) == 7.0 and math.isnan(quantile([], 0.5))


# -- the verdict -------------------------------------------------------------------------------------------------------


def test_all_is_well() -> None:
    assert judge(FLAT, QUIET, QUIET, EQUAL, {}, 0).overall == PASS


@pytest.mark.parametrize(
    ("interval", "expected"), [((10, 20, 30), PASS), ((50, 58, 66), OPEN), ((61, 70, 80), FAIL), ((-math.inf, 0, math.inf), OPEN)]
)
def test_memory_is_judged_by_the_interval(interval: tuple[float, float, float], expected: str) -> None:
    low, value, high = interval
    found = judge({"engine": Slope(value, low, high, 9)}, QUIET, QUIET, EQUAL, {}, 0)
    assert found.overall == expected and found.bars[0].verdict == expected


def test_a_pool_that_is_still_filling_is_no_leak() -> None:
    found = judge({"engine": Slope(900, 800, 1000, 9)}, QUIET, QUIET, EQUAL, {}, 0, filled=False)
    assert found.overall == OPEN and "KV pool was still filling" in found.bars[0].found


@pytest.mark.parametrize(
    ("after", "latencies", "errors", "restarts", "name"),
    [
        (Quiet({"engine": 13}, {}, {}, 0, 0), EQUAL, {}, 0, "open files of the engine"),
        (Quiet({"engine": 12}, {}, {}, 3, 0), EQUAL, {}, 0, "left at the end"),
        (Quiet({"engine": 12}, {}, {}, 0, 1), EQUAL, {}, 0, "left at the end"),
        (QUIET, {"whole answer": ([1.0] * 10, [1.3] * 10)}, {}, 0, "whole answer"),
        (QUIET, EQUAL, {"stream": {"HTTP 500": 1}}, 0, "requests that failed"),
        (QUIET, EQUAL, {}, 1, "processes that were replaced"),
    ],
)
def test_one_thing_that_is_wrong_is_enough(
    after: Quiet,
    latencies: dict[str, tuple[list[float], list[float]]],
    errors: dict[str, dict[str, int]],
    restarts: int,
    name: str,
) -> None:
    found = judge(FLAT, QUIET, after, latencies, errors, restarts)
    assert found.overall == FAIL and [bar.name for bar in found.bars if bar.verdict == FAIL] == [name]


def test_early_and_late_are_the_outer_thirds() -> None:
    timed = [Timed(float(at), "whole", at / 10) for at in range(40)]
    assert early_and_late(timed, began=10.0, ended=40.0) == {
        "whole": ([at / 10 for at in range(10, 20)], [at / 10 for at in range(30, 40)])
    }


# -- processes, and clients --------------------------------------------------------------------------------------------


def test_processes_are_found_and_measured() -> None:
    code = "import sys; data = bytearray(64 << 20); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        found = processes(os.getpid())
        assert found[FRONT_END].pid == os.getpid() and found[FRONT_END].threads >= 1
        mine = next(each for each in found.values() if each.pid == child.pid)
        assert mine.resident > 64 << 20 and mine.files >= 3
    finally:
        child.communicate()
    assert all(each.pid != child.pid for each in processes(os.getpid()).values())


def answer(head: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def chunked(*events: str) -> bytes:
    text = b"".join(f"{len(event.encode()):x}\r\n{event}\r\n".encode() for event in events)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + text + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("kind", "reply", "wrong"),
    [
        ("stream", chunked('data: {"choices": []}\n\n', "data: [DONE]\n\n"), ""),
        ("stream", chunked('data: {"choi', 'ces": []}\n\ndata: [DONE]\n\n'), ""),
        ("stream", chunked('data: {"choices": []}\n\n'), "without [DONE]"),
        ("stream", chunked('data: {"error": {"type": "server_error"}}\n\n', "data: [DONE]\n\n"), "server_error"),
        ("stream", chunked('data: {"choices": []}\n\n')[:-9], "IncompleteReadError"),
        ("whole", answer("200 OK", b'{"usage": {"completion_tokens": 16}}'), ""),
        ("whole", answer("200 OK", b'{"usage": {"completion_tokens": 3}}'), "3 tokens of 16"),
        ("whole", answer("500 Oh", b'{"error": {"message": "no"}}'), "HTTP 500: no"),
        ("whole", b"", "IncompleteReadError"),
        ("bad request", answer("200 OK", b"{}"), "was answered 200"),
        ("metrics", answer("200 OK", b'vllm:num_requests_running{engine="0"} 2\n'), ""),
        ("metrics", answer("200 OK", b"nothing\n"), "has no vllm:num_requests_running"),
    ],
)
def test_a_client_knows_what_it_must_be_answered(kind: str, reply: bytes, wrong: str) -> None:
    async def scene() -> Traffic:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        async with server:
            traffic = Traffic("127.0.0.1", server.sockets[0].getsockname()[1], seed=1)
            await traffic.one(kind)
        return traffic

    traffic = asyncio.run(scene())
    told = [reason for reasons in traffic.errors.values() for reason in reasons]
    assert traffic.sent[kind] == 1
    assert len(told) == bool(wrong) and all(wrong in reason for reason in told), told
    if not wrong:
        assert [each.seconds > 0 for each in traffic.timed] == [True] * (kind in ("stream", "whole"))


def test_metrics_are_summed_over_labels() -> None:
    text = b'a_total{engine="0",cause="x"} 2\na_total{engine="0",cause="y"} 3.5\nab_total{engine="0"} 9\n'

    async def scene() -> float:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answer("200 OK", text))
            writer.close()

        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            traffic = Traffic("127.0.0.1", server.sockets[0].getsockname()[1], seed=1)
            with pytest.raises(Wrong, match="has no b_total"):
                await traffic.metric("b_total")
            return await traffic.metric("a_total")

    assert asyncio.run(scene()) == 5.5


def test_an_address_without_a_process_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "soak", "--url", "http://127.0.0.1:1"]) == 2
    assert "--url and --pid need each other" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "quality"), [
    ({"timings": {"techniques": ["overlap", "quantised KV"]}}, "quantised KV"),
    ({"timings": {"techniques": ["overlap"]}}, "exact"),
    ({}, UNKNOWN_QUALITY), (None, UNKNOWN_QUALITY),
])
def test_the_record_has_the_servers_own_quality(answer: dict[str, Any] | None, quality: str) -> None:
    """None: a server that does not know the field."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = json.dumps({"error": {"message": "no"}} if answer is None else answer).encode()
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (400 if answer is None else 200, len(body)) + body)
        writer.close()

    async def ask() -> str:
        async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
            soak = Soak("", 0, 1, 1.0, 0, traffic=[Traffic("127.0.0.1", server.sockets[0].getsockname()[1], 0)])
            return await soak._learn_quality()

    assert asyncio.run(ask()) == quality


@pytest.mark.reliability("R-10")
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_three_minutes_of_soak(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every bar of the verdict: memory, files, latency, what is left, what failed; three minutes of it, after a warm-up of three
    tenths of the time. What is bounded is small here, so that it is full when the line through the memory begins: the KV pool,
    and the cache of compiled grammars, whose 64 MiB would take half an hour. What is not bounded grows all the same."""
    model, out = write_model(tmp_path / "tiny"), tmp_path / "soak.json"
    options = {"load_format": "dummy", "num_gpu_blocks_override": 200, "max_model_len": 1024, "dtype": "float32"}
    how = ["--minutes", "4.3", "--clients", "4", "--period", "0.5", "--out", str(out)]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setitem(soak._ROLES, "small_caches", "engine")
    server = start_child("small_caches", "front", json.dumps({"model": str(model), "options": options}), stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        main(["bench", "soak", "--url", f"http://127.0.0.1:{int(server.stdout.readline())}", "--pid", str(server.pid), *how])
    finally:
        server.terminate()
        server.wait(60)
    made = json.loads(out.read_text())
    figures = made["figures"]
    assert made["quality"] == "exact"
    assert not figures["errors"], figures["errors"]
    assert set(figures["sent"]) == set(Traffic("", 0, 0).kinds)
    assert {"front end", "engine", "grammar compiler"} <= set(figures["memory_mb_per_h"])
    assert figures["quiet_at_the_end"]["kv_blocks"] == figures["quiet_at_the_end"]["requests"] == 0
    assert figures["kv_pool_filled"] and figures["kv_blocks_most"] > 0
    assert figures["seconds"] - figures["warm_up_s"] > 175 and "verdict: " in capfd.readouterr().out
    bars = figures["verdict"]["bars"]
    for kind in ("resident memory of", "open files of", "left at the end", "requests that failed", "processes that were"):
        assert any(bar["name"].startswith(kind) for bar in bars)
    assert {"first token of a stream", "whole answer"} <= {bar["name"] for bar in bars}
    missed = [bar for bar in bars if bar["verdict"] != PASS]
    assert not missed, (missed, figures["machine_load"])
