"""Who may ask: keys, origins, request ids, deadlines and the access log, at the gate that every request passes."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.cli.cmd_serve import require_authentication
from ridgeline.engine.client.request_context import Caller
from ridgeline.errors import ConfigError, EngineDead, Overloaded, TimedOut
from ridgeline.process.children import child_environment
from ridgeline.server.app import make_app
from ridgeline.server.http.failures import describe
from ridgeline.server.http.gate import LOG, OPEN_PATHS, AccessLog, Gate, caller_of
from ridgeline.server.http.keys import VARIABLE, Keys, load_keys
from ridgeline.server.lifecycle import bind, check_certificate
from ridgeline.server.options import ServerOptions
from ridgeline.server.service import Service

KEYS = Keys(["sk-one", "sk-two"])


class Reply:
    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.caller: Caller | None = None                # what the application saw; None: it was not asked
        self.raised: BaseException | None = None

    def header(self, name: str) -> str | None:
        found = [value.decode() for each, value in self.headers if each == name.encode()]
        assert len(found) <= 1
        return found[0] if found else None


def ask(
    path: str = "/v1/models", headers: dict[str, str] | None = None, *, method: str = "GET", keys: Keys = KEYS,
    options: ServerOptions | None = None, app: Any = None, note: dict[str, Any] | None = None, own_id: str = "",
) -> Reply:
    reply = Reply()

    async def plain(scope: Any, receive: Any, send: Any) -> None:
        reply.caller = caller_of(scope)
        scope[LOG].update(note or {})
        own = [(b"x-request-id", own_id.encode())] if own_id else []
        await send({"type": "http.response.start", "status": 200, "headers": own})
        await send({"type": "http.response.body", "body": b"fine"})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            reply.status, reply.headers = message["status"], message["headers"]
        else:
            reply.body += message.get("body", b"")

    scope = {
        "type": "http", "method": method, "path": path, "client": ("127.0.0.9", 5),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()],
    }
    gate = Gate(app or plain, options or ServerOptions(), keys)

    async def scene() -> None:
        try:
            await gate(scope, None, send)                # type: ignore[arg-type]
        except RuntimeError as error:
            reply.raised = error

    asyncio.run(scene())
    return reply


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "number"),
    [
        ({"authorization": "Bearer sk-one"}, 1),
        ({"authorization": "bearer  sk-two "}, 2),
        ({"x-api-key": "sk-two"}, 2),
        ({"x-api-key": "wrong", "authorization": "Bearer sk-one"}, 1),
        ({}, None),
        ({"authorization": "sk-one"}, None),
        ({"authorization": "Basic sk-one"}, None),
        ({"authorization": "Bearer sk-on"}, None),
        ({"authorization": "Bearer sk-onee"}, None),
        ({"authorization": "Bearer SK-ONE"}, None),
        ({"authorization": "Bearer "}, None),
        ({"authorization": "Bearer sk-one,sk-two"}, None),
        ({"x-api-key": ""}, None),
        ({"x-api-key": "\xff"}, None),
        ({"cookie": "sk-one"}, None),
    ],
)
def test_a_request_needs_one_of_the_keys(headers: dict[str, str], number: int | None) -> None:
    reply = ask(headers=headers)
    assert reply.status == (200 if number else 401)
    if number is None:
        assert reply.caller is None and reply.header("www-authenticate") == "Bearer"
        error = json.loads(reply.body)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "Incorrect API key provided" in error["message"]          # LiteLLM's AuthenticationError depends on these words
    assert KEYS.number_of([(name.encode(), value.encode("latin-1")) for name, value in headers.items()]) == number


@pytest.mark.reliability("S-04", "B-20")
def test_every_route_but_health_needs_a_key() -> None:
    service = Service(SimpleNamespace(), ServerOptions(), "tiny")        # type: ignore[arg-type]
    paths = {getattr(route, "path", "") for route in make_app(service).routes}
    assert paths >= OPEN_PATHS | {"/v1/chat/completions", "/v1/completions", "/v1/models", "/version"}
    assert {path for path in paths if ask(path).status == 200} == OPEN_PATHS
    for path in ("/health/", "/health/x", "/healthz", "//health", "/v1/../health", "/health?", "/HEALTH", "", "/metrics"):
        assert ask(path).status == 401, path
    assert all(ask(path, keys=Keys()).status == 200 for path in paths)   # without keys everybody may ask


@pytest.mark.reliability("S-05", "B-20")
def test_the_comparison_does_not_stop_at_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline.server.http import keys as module

    compared: list[bytes] = []
    compare = module.hmac.compare_digest

    def watched(mine: bytes, theirs: bytes) -> bool:
        compared.append(theirs)
        return compare(mine, theirs)

    monkeypatch.setattr(module.hmac, "compare_digest", watched)
    many = Keys(f"key-{number}" for number in range(50))
    assert many.number_of([(b"x-api-key", b"key-0")]) == 1 and len(compared) == 50
    assert all(len(digest) == 32 for digest in compared)


@pytest.mark.reliability("B-20")
def test_where_keys_come_from(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ridgeline"), "propagate", True)
    file = tmp_path / "keys"
    file.write_text("# mine\nsk-file\n\n  sk-other  \n")
    file.chmod(0o600)
    environment = {VARIABLE: "sk-env, sk-second,", "HOME": "/"}
    keys = load_keys(ServerOptions(api_key_file=str(file)), environment)
    assert len(keys) == 4 and environment == {"HOME": "/"}               # and children are not told
    assert [keys.number_of([(b"x-api-key", key)]) for key in (b"sk-env", b"sk-second", b"sk-file", b"sk-other", b"# mine")] == [
        1, 2, 3, 4, None
    ]
    assert not caplog.records
    file.chmod(0o644)
    assert len(load_keys(ServerOptions(api_key="sk-flag", api_key_file=str(file)), {})) == 3
    text = caplog.text
    assert "--api-key can be read in the list of processes" in text and "chmod 600" in text
    assert "sk-" not in text
    assert not len(load_keys(ServerOptions(), {}))
    monkeypatch.setenv(VARIABLE, "sk-env")
    assert VARIABLE not in child_environment()


@pytest.mark.parametrize(
    ("options", "environment", "says"),
    [
        ({"api_key_file": "/nowhere/keys"}, {}, "api_key_file /nowhere/keys cannot be read"),
        ({"api_key_file": "EMPTY"}, {}, "holds no key"),
        ({"api_key_file": "LONG"}, {}, "it has more than 4 MiB"),                # as a device has
        ({"api_key": "a b"}, {}, "API key 1 must be at most 1024 printable ASCII"),
        ({}, {VARIABLE: "fine,é"}, "API key 2 must be"),
        ({}, {VARIABLE: "x" * 1025}, "API key 1 must be"),
        ({}, {VARIABLE: ",".join(map(str, range(1001)))}, "at most 1000"),
    ],
)
def test_keys_that_cannot_be_used(options: dict[str, str], environment: dict[str, str], says: str, tmp_path: Path) -> None:
    (tmp_path / "EMPTY").write_text("\n# nothing\n")
    (tmp_path / "LONG").write_text("# nothing\n" * 2**19)
    options = {name: str(tmp_path / value) if value in ("EMPTY", "LONG") else value for name, value in options.items()}
    with pytest.raises(ConfigError, match=says) as caught:
        load_keys(ServerOptions(**options), dict(environment))           # type: ignore[arg-type]
    assert "fine" not in str(caught.value)


@pytest.mark.reliability("S-06")
def test_keys_have_prefix_caches_of_their_own() -> None:
    salts = [ask(headers={"x-api-key": key}).caller for key in ("sk-one", "sk-two", "sk-one")]
    assert salts[0] is not None and salts[1] is not None and salts[0].cache_salt
    assert salts[0].cache_salt != salts[1].cache_salt
    assert salts[2] is not None and salts[2].cache_salt == salts[0].cache_salt and "sk-" not in salts[0].cache_salt
    alone = ask(headers={"x-api-key": "sk-one"}, keys=Keys(["sk-one"])).caller
    assert alone is not None and alone.cache_salt == ""


# -- ids, deadlines, origins -------------------------------------------------------------------------------------------


@pytest.mark.reliability("B-23")
@pytest.mark.parametrize(
    ("given", "echoed"),
    [("abc-1.2:3_", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("a\r\nset-cookie: b", False), ("é", False),
     ('a"b', False), ("", False)],
)
def test_request_ids_are_echoed_if_they_are_harmless(given: str, echoed: bool) -> None:
    headers = {"x-request-id": given, "x-api-key": "sk-one"}
    for own in ("", "chatcmpl-7"):
        back = ask(headers=headers, own_id=own).header("x-request-id")
        assert back == given if echoed else back and back != given
        assert echoed or back == own or (not own and len(back or "") == 24)
    assert ask(headers={"x-request-id": given}).header("x-request-id")       # a refused request has one, too


def test_blanks_around_a_request_id_are_no_part_of_it() -> None:
    assert ask(headers={"x-request-id": "abc-1 \t", "x-api-key": "sk-one"}).header("x-request-id") == "abc-1"


@pytest.mark.reliability("B-08")
@pytest.mark.parametrize(
    ("given", "seconds"),
    [("1500", 1.5), ("0.5", 0.0005), ("0", None), ("-1", None), ("nan", None), ("inf", None), ("1e9", None), ("soon", None)],
)
def test_the_ttft_deadline_of_a_request(given: str, seconds: float | None) -> None:
    reply = ask(headers={"x-ttft-deadline-ms": given, "x-api-key": "sk-one"})
    if seconds is None:
        assert reply.status == 400 and json.loads(reply.body)["error"]["param"] == "x-ttft-deadline-ms"
    else:
        assert reply.status == 200 and reply.caller is not None and reply.caller.ttft_deadline == seconds


@pytest.mark.reliability("B-11")
def test_request_timeouts_are_handed_on() -> None:
    within = ask(keys=Keys(), options=ServerOptions(request_timeout=60)).caller
    assert within is not None and within.ends is not None
    without = ask(keys=Keys(), options=ServerOptions(request_timeout=0)).caller
    assert without is not None and without.ends is None


@pytest.mark.reliability("B-22")
def test_pages_of_other_origins_are_let_in_only_when_named() -> None:
    page = {"origin": "https://app.example", "x-api-key": "sk-one"}
    before = page | {"access-control-request-method": "POST"}
    assert ask(headers=page).header("access-control-allow-origin") is None
    assert ask(headers=before, method="OPTIONS").header("access-control-allow-origin") is None
    named = ServerOptions(allowed_origins="https://app.example, http://localhost:3000/")
    reply = ask(headers=page, options=named)
    assert reply.header("access-control-allow-origin") == "https://app.example" and reply.header("vary") == "origin"
    assert reply.header("access-control-allow-credentials") is None
    asked = ask(headers=before | {"x-api-key": "none"}, method="OPTIONS", options=named)
    assert asked.status == 204 and asked.caller is None and "authorization" in str(asked.header("access-control-allow-headers"))
    assert ask(headers=page | {"origin": "https://evil.example"}, options=named).header("access-control-allow-origin") is None
    everybody = ServerOptions(allowed_origins="*")
    assert ask(headers=page | {"origin": "https://evil.example"}, options=everybody).header("access-control-allow-origin") == "*"
    for origin in ("app://obsidian.md", "chrome-extension://abcdefgh", "vscode-webview://0a1b"):
        options = ServerOptions(allowed_origins=f"https://app.example,{origin}")
        assert ask(headers=page | {"origin": origin}, options=options).header("access-control-allow-origin") == origin
    for wrong in ("example.com", "https://a/b", "null", "ftp://a"):
        with pytest.raises(ConfigError, match="allowed_origins must list origins"):
            ask(options=ServerOptions(allowed_origins=wrong))


def test_pages_may_send_the_headers_of_their_clients() -> None:
    """The JS clients of OpenAI and Anthropic each send a dozen; a preflight that leaves one out blocks all of them."""
    named = ServerOptions(allowed_origins="https://app.example")
    before = {"origin": "https://app.example", "access-control-request-method": "POST"}

    def allowed(asked: str, **more: str) -> str | None:
        headers = before | {"access-control-request-headers": asked} | more
        return ask(headers=headers, method="OPTIONS", options=named).header("access-control-allow-headers")

    asked = "anthropic-version,authorization,content-type,x-stainless-arch,x-stainless-retry-count"
    assert allowed(asked) == asked
    for harmful in ("a\r\nset-cookie: b", "a b", "a,,b", "x" * 65, ",".join(["x"] * 65), "a: b", "é"):
        told = str(allowed(harmful))
        assert harmful not in told and "authorization" in told
    assert allowed(asked, origin="https://evil.example") is None
    shown = str(ask(headers={"origin": "https://app.example"}, options=named).header("access-control-expose-headers"))
    assert {"x-request-id", "request-id", "retry-after"} <= set(shown.split(", "))


# -- the log -----------------------------------------------------------------------------------------------------------


@pytest.mark.reliability("B-23")
def test_the_access_log_has_a_line_for_each_request_and_no_secrets(tmp_path: Path) -> None:
    file = tmp_path / "access.jsonl"
    options = ServerOptions(access_log=str(file))
    ask(headers={"x-api-key": "sk-one", "x-request-id": "mine"}, options=options, note={"tokens": 5})
    ask(headers={"x-api-key": "sk-wrong"}, options=options)
    ask("/" + "x" * 500 + "\n", headers={"x-api-key": "sk-two"}, options=options)

    async def leaves(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("in the application")

    assert ask(headers={"x-api-key": "sk-two"}, options=options, app=leaves).raised is not None
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["status"] for line in lines] == [200, 401, 200, 0] and "sk-" not in text
    first = lines[0]
    assert (first["request_id"], first["path"], first["key"], first["tokens"], first["client"]) == (
        "mine", "/v1/models", 1, 5, "127.0.0.9"
    )
    assert first["bytes_out"] == 4 and 0 <= first["first_byte_seconds"] <= first["seconds"]
    assert len(lines[2]["path"]) == 200 and file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="access_log /nowhere/log cannot be written"):
        ask(options=ServerOptions(access_log="/nowhere/log"))


# -- errors and certificates -------------------------------------------------------------------------------------------


@pytest.mark.reliability("R-14")
def test_an_access_log_on_a_full_disk_says_so_once_and_when_it_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    log, rooms = AccessLog(str(path)), [None, 3, 0, None, None]         # bytes that there is room for; None: enough

    class Disk(FileIO):
        def write(self, data: Any) -> int:
            room = rooms.pop(0)
            if room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data[:room])

    monkeypatch.setattr(log, "_file", Disk(path, "a"))
    with caplog.at_level(logging.WARNING, logger="ridgeline"):
        for number in range(5):
            log._put(b'{"line": %d}\n' % number)
    assert path.read_text().split("\n") == ['{"line": 0}', '{"l', '{"line": 3}', '{"line": 4}', ""]
    assert [record.getMessage() for record in caplog.records] == [
        "the access log cannot be written (No space left on device); requests are answered without it",
        "the access log is written again; 2 lines are missing",
    ]


@pytest.mark.reliability("B-05")
@pytest.mark.parametrize(("wait", "low", "high"), [(None, 1, 5), (0.0, 1, 1), (2.0, 2, 3), (30.0, 30, 38), (1e9, 60, 60)])
def test_retry_after_is_the_predicted_wait(wait: float | None, low: int, high: int) -> None:
    for _ in range(20):
        status, body, headers = describe(Overloaded("full", wait))
        assert status == 429 and json.loads(body)["error"]["type"] == "overloaded_error"
        assert low <= int(dict(headers)[b"retry-after"]) <= high


@pytest.mark.reliability("B-11")
def test_statuses_of_faults() -> None:
    assert describe(TimedOut("too late"))[0] == 504
    status, body, headers = describe(EngineDead("the path /secret"))
    assert status == 503 and b"secret" not in body and 1 <= int(dict(headers)[b"retry-after"]) <= 5


@pytest.mark.reliability("B-21")
def test_certificates_are_checked_before_anything_loads(tmp_path: Path) -> None:
    check_certificate(ServerOptions())
    for options, says in (
        ({"ssl_certfile": "a"}, "need each other"),
        ({"ssl_keyfile": "a"}, "need each other"),
        ({"ssl_certfile": "/nowhere/a", "ssl_keyfile": "/nowhere/b"}, "cannot be used"),
        ({"ssl_certfile": __file__, "ssl_keyfile": __file__}, "cannot be used"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_certificate(ServerOptions(**options))  # type: ignore[arg-type]


@pytest.mark.reliability("R-09")
@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 64])
def test_a_host_that_is_no_name_is_one_line(host: str) -> None:
    """The library that looks names up raises no OSError for it."""
    with pytest.raises(ConfigError, match=f"^host {host} is no name of a host: label "):
        bind(ServerOptions(host=host, port=0))


@pytest.mark.reliability("B-22")
@pytest.mark.parametrize(
    ("host", "keys", "insecure", "starts"),
    [("127.0.0.1", 0, False, True), ("localhost", 0, False, True), ("::1", 0, False, True), ("[::1]", 0, False, True),
     ("0.0.0.0", 0, False, False), ("::", 0, False, False), ("[::]", 0, False, False), ("10.1.2.3", 0, False, False),
     ("0.0.0.0", 1, False, True), ("0.0.0.0", 0, True, True)],
)
def test_who_can_be_reached_from_elsewhere_needs_keys(
    host: str, keys: int, insecure: bool, starts: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = ServerOptions(host=host, insecure_no_auth=insecure)
    with nullcontext() if starts else pytest.raises(ConfigError, match="--insecure-no-auth"):
        require_authentication(options, Keys(["k"] * keys))
    assert ("without authentication" in caplog.text) is insecure


def test_a_wrong_key_file_is_one_line_and_early(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ridgeline", "serve", str(tmp_path), "--port", "0", "--api-key-file", "/nowhere/keys"]
    (tmp_path / "config.json").write_text("{}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "api_key_file" in done.stderr
