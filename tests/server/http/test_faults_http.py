"""Faults as clients of the server meet them: a killed and a hung engine, storms, deadlines, keys over TLS, signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from served_model import CONTEXT, ServerProcess, wait_until, write_model

OPTIONS = ("--load-format", "dummy", "--num-gpu-blocks-override", "2600", "--max-num-seqs", "8", "--dtype", "float32",
           "--max-queued-requests", "64", "--max-engine-restarts", "50")
LENGTH = 600


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "access.jsonl"


def follow(server: ServerProcess) -> list[str]:
    """What it logs, read as it comes: a full pipe would hold it up."""
    logged: list[str] = []
    assert server.process.stderr is not None
    threading.Thread(target=logged.extend, args=(server.process.stderr,), daemon=True).start()
    return logged


@pytest.fixture(scope="module")
def server(model: Path, log: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(model), *OPTIONS, "--access-log", str(log)) as made:
        follow(made)
        yield made


@pytest.fixture
def url(server: ServerProcess) -> Iterator[str]:
    """The address; afterwards no request and no block may be left in the engine, and the server is well."""
    yield server.url
    wait_until(lambda: is_idle(server.url))


def health(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/health").json())


def is_idle(url: str) -> bool:
    told = health(url)
    return bool(told["status"] == "ok" and told["requests"] == told["running"] == 0
                and told["free_blocks"] == told["num_blocks"])


def engine_of(server: ServerProcess) -> psutil.Process:
    return next(each for each in psutil.Process(server.process.pid).children()
                if "ridgeline.engine.core.engine_process" in each.cmdline()
                and each.status() != psutil.STATUS_ZOMBIE)


def body(number: int, **more: Any) -> dict[str, Any]:
    how: dict[str, Any] = {"temperature": 0} if number % 2 else {"seed": number}
    return {"prompt": f"stream {number}", "max_tokens": LENGTH, "ignore_eos": True, "stream": True, **how, **more}


def events_of(url: str, asked: dict[str, Any], begun: list[bool] | None = None) -> list[Any]:
    """The data of every event, read to the end."""
    events: list[Any] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: "):
                events.append(line[6:])
                if begun is not None and len(events) == 5:
                    begun.append(True)
    assert events[-1] == "[DONE]" or "error" in events[-1]
    return [json.loads(each) for each in events if each != "[DONE]"]


def texts(events: list[Any]) -> list[str]:
    return [event["choices"][0]["text"] for event in events]


@pytest.mark.reliability("B-13", "B-17", "R-02")
@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, ["was killed by SIGKILL): restarting"]),
        (signal.SIGSTOP, ["its stacks follow", "most recent call first", "the engine hung for"]),
    ],
    ids=["killed", "hung"],
)
@pytest.mark.slow                                        # without HTTP: test_engine_faults.py
def test_streams_survive_a_lost_engine(model: Path, number: int, says: list[str]) -> None:
    numbers = range(6)
    # Cold: an engine that came back within a moment would not be seen to be away.
    with ServerProcess(str(model), *OPTIONS, "--engine-timeout", "3", cold=True) as server, ThreadPoolExecutor(6) as threads:
        url, logged = server.url, follow(server)
        whole = list(threads.map(lambda number: events_of(url, body(number)), numbers))
        engine, begun = engine_of(server), list[bool]()
        asked = [threads.submit(events_of, url, body(each), begun) for each in numbers]
        wait_until(lambda: begun and health(url)["requests"] == 6)
        engine.send_signal(number)
        wait_until(lambda: health(url)["status"] in ("restarting", "stalled"))
        assert httpx.get(f"{url}/health").status_code == 503
        refused = httpx.post(f"{url}/v1/completions", json=body(0))
        assert refused.status_code == 503 and 1 <= int(refused.headers["retry-after"]) <= 5
        assert httpx.get(f"{url}/health/live").status_code == 200
        again = [each.result() for each in asked]
        assert [texts(each) for each in again] == [texts(each) for each in whole]
        wait_until(lambda: is_idle(url))
    assert all(each in "".join(logged) for each in says)
    assert "stream 1" not in "".join(logged)             # no prompts


@pytest.mark.reliability("R-01")
@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["streaming", "whole"])
def test_a_storm_of_disconnects(server: ServerProcess, url: str, stream: bool) -> None:
    """Clients that hang up before, while and after they were answered; the fixture checks that nothing is left."""
    host, port = url.removeprefix("http://").split(":")
    asked = json.dumps({"prompt": "abc", "max_tokens": CONTEXT - 100, "ignore_eos": True, "stream": stream, "n": 2}).encode()
    request = (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
               b"content-length: %d\r\n\r\n" % len(asked) + asked)

    def leave(number: int) -> None:
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(request[: len(request) - (number % 3 == 0)])
            if number % 4 == 1 and number % 3 and stream:
                connection.recv(1)
            time.sleep(0.01 * (number % 5))

    before = psutil.Process(server.process.pid).num_fds()
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(leave, range(80)))
    wait_until(lambda: is_idle(url))
    wait_until(lambda: psutil.Process(server.process.pid).num_fds() <= before + 2)


@contextmanager
def held_open(url: str, count: int, **more: Any) -> Iterator[None]:
    """Endless streams whose clients read no byte."""
    host, port = url.removeprefix("http://").split(":")
    asked = json.dumps(body(1, max_tokens=CONTEXT - 100, **more)).encode()
    head = (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(asked))
    with ExitStack() as connections:
        for _ in range(count):
            connection = connections.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(head + asked)
        wait_until(lambda: health(url)["requests"] == count)
        yield


@pytest.mark.reliability("H-06")
def test_slow_readers_do_not_hold_up_others(url: str) -> None:
    alone = "".join(texts(events_of(url, body(2, max_tokens=50))))
    with held_open(url, 4):                              # to the end of the other's answer nothing of theirs is read
        assert "".join(texts(events_of(url, body(2, max_tokens=50)))) == alone


@pytest.mark.reliability("H-07", "B-05")
def test_a_full_queue_names_the_wait(url: str) -> None:
    with held_open(url, 8, n=8):
        refused = httpx.post(f"{url}/v1/completions", json=body(0))
        assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["type"] == "overloaded_error"


@pytest.mark.reliability("B-08")
def test_a_deadline_that_cannot_be_met_is_refused_at_once(url: str) -> None:
    quick = body(0, stream=False, max_tokens=20)
    assert httpx.post(f"{url}/v1/completions", json=quick).status_code == 200    # from which it learns how fast it is
    with held_open(url, 4, n=8):
        refused = httpx.post(f"{url}/v1/completions", json=quick, headers={"x-ttft-deadline-ms": "1"})
        assert refused.status_code == 429 and "deadline is 0.001 s" in refused.json()["error"]["message"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        turns = {"messages": [{"role": "user", "content": "a"}], "ttft_deadline_ms": 1}
        in_bodies: dict[str, dict[str, Any]] = {
            "completions": quick | {"ttft_deadline_ms": 1},
            "chat/completions": turns,
            "messages": turns | {"model": "tiny", "max_tokens": 5},
            "responses": {"input": "a", "ttft_deadline_ms": 1},
        }
        for path, asked in in_bodies.items():
            refused = httpx.post(f"{url}/v1/{path}", json=asked)
            assert refused.status_code == 429 and "deadline is 0.001 s" in refused.json()["error"]["message"], path
    wait_until(lambda: is_idle(url))
    assert httpx.post(f"{url}/v1/completions", json=quick, headers={"x-ttft-deadline-ms": "60000"}).status_code == 200


@pytest.mark.reliability("H-01")
@pytest.mark.parametrize(
    ("content", "status"),
    [(b"", 400), (b"{", 400), (b"[" * 100_000, 400), (b"\xff" * 100, 400), (b'{"max_tokens":16.0,"prompt":', 400),
     (b'{"max_tokens":16.0,"prompt":"\xff"}', 400), (b'{"max_tokens":16.0,"user":' + b"[" * 100_000, 400),
     (b'{"prompt": "' + b"x" * 17_000_000 + b'"}', 413),
     (json.dumps({"prompt": "a", "n": 129}).encode(), 400), (json.dumps({"prompt": "a", "logprobs": 21}).encode(), 400),
     (json.dumps({"prompt": "a", "stop": ["x"] * 33}).encode(), 400),
     (json.dumps({"prompt": "a", "bad_words": ["x"] * 129}).encode(), 400),
     (json.dumps({"prompt": "a", "logit_bias": {str(each): 1 for each in range(1025)}}).encode(), 400),
     (json.dumps({"prompt": ["a"] * 65}).encode(), 400)],
    ids=["empty", "half", "deep", "no text", "half after a float", "no text after a float", "deep after a float", "huge",
         "n", "logprobs", "stop", "bad_words", "logit_bias", "prompts"],
)
def test_malformed_and_huge_bodies(url: str, content: bytes, status: int) -> None:
    reply = httpx.post(f"{url}/v1/completions", content=content, headers={"content-type": "application/json"}, timeout=60)
    assert reply.status_code == status and reply.json()["error"]["message"]
    assert "\n" not in reply.json()["error"]["message"]


def test_the_access_log_tells_of_every_request(url: str, log: Path) -> None:
    asked = httpx.post(f"{url}/v1/completions", json=body(0, stream=False, max_tokens=3), headers={"x-request-id": "mine-7"})
    assert asked.headers["x-request-id"] == "mine-7"
    wait_until(lambda: '"mine-7"' in log.read_text())    # the line is written once the answer has left
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    line = next(each for each in lines if each["request_id"] == "mine-7")
    assert line["status"] == 200 and line["path"] == "/v1/completions" and line["bytes_out"] == len(asked.content)
    assert "stream 0" not in log.read_text()             # the prompt


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True,
    )
    return cert, key


@pytest.mark.reliability("B-11b", "B-21b", "R-05b")
@pytest.mark.slow
def test_keys_timeouts_and_drain_over_tls(
    model: Path, certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the options in one server: HTTPS, keys, a request timeout, and an orderly end under load."""
    monkeypatch.setenv("RIDGELINE_API_KEY", "sk-one,sk-two")
    cert, key = certificate
    options = ("--ssl-certfile", cert, "--ssl-keyfile", key, "--request-timeout", "3", "--drain-timeout", "20")
    server = ServerProcess(str(model), *OPTIONS, *options)
    url = server.wait_ready()
    assert url.startswith("https://")
    with httpx.Client(base_url=url, verify=cert, timeout=60) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").status_code == 401
        client.headers["authorization"] = "Bearer sk-two"
        assert client.get("/v1/models").status_code == 200

        assert not any("sk-one" in value for value in engine_of(server).environ().values())

        # Of three requests that never end, the whole one times out with a status, the stream with an event.
        endless = body(1, max_tokens=CONTEXT - 100, n=8)
        late = client.post("/v1/completions", json=endless | {"stream": False})
        assert late.status_code == 504 and late.json()["error"]["code"] == "request_timeout"
        with client.stream("POST", "/v1/completions", json=endless) as reply:
            assert reply.status_code == 200
            last = [line for line in reply.iter_lines() if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"

        # SIGTERM: health says no at once, what runs goes on to its end, and nothing new is taken.
        with client.stream("POST", "/v1/completions", json=body(2, max_tokens=100)) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
    assert server.process.wait(60) == 0


@pytest.mark.reliability("B-18b")
@pytest.mark.slow
def test_a_server_whose_engine_cannot_come_back_says_so_and_leaves(model: Path, tmp_path: Path) -> None:
    own = write_model(tmp_path / "own")
    server = ServerProcess(str(own), *OPTIONS, "--max-engine-restarts", "2")
    url = server.wait_ready()
    got: list[Any] = []
    begun: list[bool] = []
    reader = threading.Thread(target=lambda: got.extend(events_of(url, body(1, max_tokens=CONTEXT - 100), begun)))
    reader.start()
    wait_until(lambda: begun)
    (own / "config.json").write_text("{}")               # what was there at the first start is there no more
    engine_of(server).kill()
    reader.join(60)
    assert got[-1]["error"]["type"] == "service_unavailable_error"
    assert server.process.wait(60) != 0
    assert server.process.stderr is not None and "after 2 restarts" in server.process.stderr.read().splitlines()[-1]
