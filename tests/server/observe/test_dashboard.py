"""/dashboard: nothing from elsewhere, the headers of a careful page, and (slow) the page in a real browser."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import msgspec
import pytest
from chromium import BINARY, Browser, Page
from served_model import ServerProcess, write_model
from starlette.responses import JSONResponse

from ridgeline.engine.client.async_llm import AsyncLLM
from ridgeline.report.words import EXPLAINED
from ridgeline.server.observe.dashboard import headers, page
from ridgeline.server.observe.roofline_endpoint import HISTORY, document

PARTS = (
    "roofline", "split-bar", "split-history", "blocks", "latency", "ttft", "tpot", "prefix-bar", "waiting", "term", "changes",
    "chat-form", "key-form", "chat-open", "chat-system", "others", "words",
)


class Parsed(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags.append((tag, found))
        if found.get("id"):
            self.ids.append(str(found["id"]))


def test_the_page_needs_nothing_else() -> None:
    text = bytes(page().body).decode()
    parsed = Parsed(text)
    for tag, attributes in parsed.tags:
        assert not attributes.keys() & {"src", "href", "action", "style", "background", "poster", "data"}, (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")], tag
    without_namespace = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.findall(r"https?:|//[a-z]|@import|url\(|eval\(|new Function|innerHTML|document\.write|localStorage|cookie",
                          re.sub(r"^\s*//.*$", "", without_namespace, flags=re.MULTILINE))
    assert "{{" not in text and set(PARTS) <= set(parsed.ids) and len(parsed.ids) == len(set(parsed.ids))
    # Whatever the script asks for by name is there.
    assert set(re.findall(r'(?:at|write|legend)\("([a-z-]+)"', text)) <= set(parsed.ids)
    hints = {str(attributes["data-hint"]) for _, attributes in parsed.tags if "data-hint" in attributes}
    assert {"MFU", "MBU", "ridge", "roof"} <= hints <= set(EXPLAINED)
    assert len(text) < 100_000


def test_every_answer_has_a_policy_of_its_own() -> None:
    first, second = page(), page()
    nonces = [re.findall(r'nonce="([^"]+)"', bytes(each.body).decode()) for each in (first, second)]
    assert len(nonces[0]) == 2 and len(set(nonces[0])) == 1 and nonces[0] != nonces[1]
    policy = first.headers["content-security-policy"]
    assert f"script-src 'nonce-{nonces[0][0]}'" in policy and "default-src 'none'" in policy
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy and "connect-src 'self'" in policy
    assert headers("x")["x-content-type-options"] == "nosniff" and headers("x")["x-frame-options"] == "DENY"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


OPTIONS = ("--load-format", "dummy", "--num-gpu-blocks-override", "600")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[str]:
    with ServerProcess(str(model), *OPTIONS) as made:
        yield made.url


@pytest.mark.slow                    # that all data want the key: test_reliability.py
def test_the_page_is_served_and_only_its_data_wants_a_key(model: Path) -> None:
    with ServerProcess(str(model), *OPTIONS, "--api-key", "secret") as made:
        reply = httpx.get(f"{made.url}/dashboard")
        assert reply.status_code == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
        assert reply.headers["cache-control"] == "no-store" and "tiny" not in reply.text
        assert httpx.get(f"{made.url}/roofline").status_code == 401
        assert httpx.get(f"{made.url}/roofline", headers={"authorization": "Bearer secret"}).status_code == 200


# -- in a browser ------------------------------------------------------------------------------------------------------

browser_test = [pytest.mark.slow, pytest.mark.skipif(BINARY is None, reason="no Chromium here")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


def complete(url: str, tokens: int = 200) -> None:
    body = {"prompt": list(range(40)), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()


def is_whole(shown: Page) -> None:
    """Loaded without a complaint, talking to its own server alone, and nowhere wider than the window."""
    assert shown.errors == []
    assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    wide = """[...document.querySelectorAll('body *')]
      .filter((each) => each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.id || each.className)"""
    assert shown.evaluate(wide) == []


class TestBrowser:
    pytestmark = browser_test

    def test_points_appear_with_the_first_request(self, server: str, browser: Browser, tmp_path: Path) -> None:
        shown = browser.page(1280, 900)
        shown.open(f"{server}/dashboard")
        shown.wait("document.getElementById('state').textContent === 'ready'")
        shown.wait("document.querySelectorAll('#roofline .roof').length >= 1", 60)       # the machine is measured
        complete(server)
        shown.wait("document.querySelectorAll('#roofline .point').length > 50")
        for kind in ("decode", "prefill"):               # the page asks every now and then: one may come before the other
            shown.wait(f"document.querySelectorAll('#roofline .point.{kind}').length >= 1")
        inside = """[...document.querySelectorAll('#roofline .point')].every((point) => {
          const box = document.getElementById('roofline').getBoundingClientRect(), own = point.getBoundingClientRect();
          return own.left >= box.left && own.right <= box.right && own.top >= box.top && own.bottom <= box.bottom; })"""
        assert shown.evaluate(inside)
        assert shown.evaluate("document.querySelectorAll('#blocks .free').length") == 480
        assert shown.evaluate("document.querySelectorAll('#split-bar i').length") >= 2
        assert shown.evaluate("document.getElementById('ttft').cells[1].textContent").endswith("s")
        assert shown.evaluate("document.getElementById('advice').hidden || document.querySelectorAll('#changes li').length > 0")
        assert {url.removeprefix(server) for url in shown.requests} <= {"/dashboard", "/roofline"}
        is_whole(shown)
        shown.screenshot(tmp_path / "points.png")
        assert (tmp_path / "points.png").stat().st_size > 20_000

    def test_the_chat_box_answers(self, server: str, browser: Browser) -> None:
        shown = browser.page(1280, 900)
        shown.open(f"{server}/dashboard")
        shown.wait("document.getElementById('state').textContent === 'ready'")
        shown.evaluate("document.getElementById('chat-open').click()")
        shown.evaluate("document.getElementById('chat-max').value = 20")
        shown.evaluate("document.getElementById('chat-system').value = 'Be short.'")
        shown.evaluate("document.getElementById('chat-input').value = '<b>Hello</b>'")
        shown.evaluate("document.getElementById('chat-send').click()")
        shown.wait("document.querySelector('.said.assistant small')?.textContent.includes('tokens, first after')")
        assert shown.evaluate("document.querySelector('.said.assistant .words').textContent.length") > 0
        assert shown.evaluate("document.querySelector('.said.user .words').textContent") == "<b>Hello</b>"
        assert shown.evaluate("document.querySelectorAll('.said.assistant .copy').length") == 1
        assert shown.evaluate("document.querySelectorAll('.said b').length") == 0        # text stays text
        assert shown.evaluate("document.getElementById('chat-send').textContent") == "Send"
        is_whole(shown)

    def test_an_answer_can_be_stopped_and_its_request_ends(self, server: str, browser: Browser) -> None:
        shown = browser.page(1280, 900)
        shown.open(f"{server}/dashboard")
        shown.evaluate("document.getElementById('chat-max').value = 8000")
        shown.evaluate("document.getElementById('chat-input').value = 'on and on'")
        shown.evaluate("document.getElementById('chat-send').click()")
        shown.wait("(document.querySelector('.said.assistant .words')?.textContent.length || 0) > 20")
        shown.evaluate("document.getElementById('chat-send').click()")
        shown.wait("document.getElementById('chat-send').textContent === 'Send'")
        shown.wait(f"fetch('{server}/load').then((reply) => reply.json()).then((load) => load.running === 0)")
        assert shown.evaluate("document.querySelector('.said.assistant').textContent").strip()
        assert [each for each in shown.errors if "ERR_ABORTED" not in each] == []

    def test_a_key_is_asked_for_and_used(self, model: Path, browser: Browser) -> None:
        with ServerProcess(str(model), *OPTIONS, "--api-key", "secret") as made:
            shown = browser.page(1280, 900)
            shown.open(f"{made.url}/dashboard")
            shown.wait("!document.getElementById('key-form').hidden")
            shown.evaluate("document.getElementById('key').value = 'wrong'")
            shown.evaluate("document.querySelector('#key-form button').click()")
            shown.wait("document.getElementById('notice').textContent.includes('refused this API key')")
            assert shown.evaluate("document.getElementById('state').textContent") == "wrong key"
            shown.evaluate("document.getElementById('key').value = 'secret'")
            shown.evaluate("document.querySelector('#key-form button').click()")
            shown.wait("document.getElementById('state').textContent === 'ready'")
            assert shown.evaluate("document.getElementById('key-form').hidden && !document.getElementById('key').value")
            assert shown.evaluate("localStorage.length + sessionStorage.length") == 0
            shown.evaluate("document.getElementById('chat-max').value = 5")
            shown.evaluate("document.getElementById('chat-input').value = 'Hello'")
            shown.evaluate("document.getElementById('chat-send').click()")
            shown.wait("document.querySelector('.said.assistant small')?.textContent.includes('tokens')")

    def test_a_dead_server_is_not_green_and_half_an_answer_stays(self, model: Path, browser: Browser) -> None:
        made, shown = ServerProcess(str(model), *OPTIONS), browser.page(1280, 900)
        try:
            shown.open(f"{made.wait_ready()}/dashboard#chat")
            shown.wait("document.getElementById('state').textContent === 'ready'")
            shown.evaluate("document.getElementById('chat-max').value = 8000")
            shown.evaluate("document.getElementById('chat-input').value = 'on and on'")
            shown.evaluate("document.getElementById('chat-send').click()")
            shown.wait("(document.querySelector('.said.assistant .words')?.textContent.length || 0) > 20")
        finally:
            made.stop(signal.SIGKILL)
        shown.wait("document.getElementById('state').textContent === 'no answer'")
        shown.evaluate("window.dispatchEvent(new Event('resize'))")     # drawing again is not hearing again
        assert shown.evaluate("document.getElementById('state').className") == "state bad"
        assert shown.evaluate("document.body.className").split() == ["chatting", "stale"]
        assert "does not answer" in shown.evaluate("document.getElementById('notice-text').textContent")
        assert shown.evaluate("document.getElementById('notice-age').textContent").endswith(" old.")
        shown.wait("document.querySelector('.said.assistant small').textContent.startsWith('the answer ends here: ')")
        assert len(shown.evaluate("document.querySelector('.said.assistant .words').textContent")) > 20

    @pytest.mark.parametrize("width", [390, 1400])
    def test_the_chat_is_one_press_away(self, server: str, browser: Browser, width: int) -> None:
        shown = browser.page(width, 844)
        shown.open(f"{server}/dashboard")
        shown.wait("document.getElementById('state').textContent === 'ready'")
        assert shown.evaluate("document.getElementById('chat-open').getBoundingClientRect().bottom") < 150
        shown.evaluate("document.getElementById('chat-open').click()")
        assert shown.evaluate("document.getElementById('chat-input').getBoundingClientRect().bottom <= innerHeight")
        assert shown.evaluate("document.activeElement.id") == "chat-input"
        board = shown.evaluate("document.getElementById('board').getBoundingClientRect().width")
        assert board > 700 if width == 1400 else board == 0              # beside it, or instead of it
        is_whole(shown)

    @pytest.mark.parametrize("scheme", ["dark", "light"])
    @pytest.mark.parametrize("width", [390, 820, 1280])
    def test_it_fits_every_width_in_dark_and_light(
        self, server: str, browser: Browser, tmp_path: Path, scheme: str, width: int
    ) -> None:
        running = threading.Thread(target=complete, args=(server, 500))
        running.start()
        shown = browser.page(width, 844, scheme)
        shown.open(f"{server}/dashboard")
        shown.wait("document.querySelectorAll('#roofline .point').length > 20")
        is_whole(shown)
        colour = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(int(part) for part in re.findall(r"\d+", colour)[:3])
        assert (brightness < 200) == (scheme == "dark")
        assert shown.evaluate("document.getElementById('roofline').getBoundingClientRect().width") >= min(width, 640) * 0.8
        shown.screenshot(tmp_path / f"{scheme}-{width}.png")
        running.join()


# -- with a server that answers what it is told --------------------------------------------------------------------------


class Told:
    """Serves the page, and as its data one answer that tests change; a chat breaks off after a few events."""

    def __init__(self) -> None:
        outer, self.answer = self, msgspec.to_builtins(document(AsyncLLM(), "tiny", "ok"))

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                made = page() if self.path == "/dashboard" else JSONResponse(outer.answer)
                self.send_response(200)
                for name, value in made.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(bytes(made.body))

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.send_response(200)
                self.end_headers()
                for piece in ("# Title\n\n**bold** <img src=x>", "\n```py\nprint(1)\n```\n", "and half a"):
                    event = {"choices": [{"delta": {"content": piece}}]}
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def history(self, *rows: dict[str, float]) -> None:
        self.answer["history"]["values"] = [[row.get(name, 0.0) for name in HISTORY] for row in rows]


class TestTold:
    pytestmark = browser_test

    @pytest.fixture
    def told(self) -> Iterator[Told]:
        made = Told()
        yield made
        made.server.shutdown()
        made.server.server_close()

    def test_idle_has_no_distance_to_the_roof_and_no_slope(self, told: Told, browser: Browser) -> None:
        told.answer["quality"] = "int4-gptq: KL 0.02"
        told.answer["verdict"] |= {"headroom": 41.0, "parts": {"implementation": 0.95, "host": 0.05}}
        told.answer["utilisation"] |= {"steps": 9, "tokens_per_second": 6.12, "computed_tokens_per_second": 6.12}
        told.history({"at": 25, "busy": 1, "sampled_s": 8}, {"at": 24, "busy": 1, "sampled_s": 8})
        shown = browser.page(1280, 900)
        shown.open(f"{told.url}/dashboard")
        shown.wait("document.getElementById('term').textContent === 'nothing: idle'")
        assert shown.evaluate("document.getElementById('quality').textContent") == "int4-gptq: KL 0.02"
        assert shown.evaluate("document.getElementById('parts').hidden && document.getElementById('advice').hidden")
        assert shown.evaluate("document.getElementById('tokens').textContent") == "0"
        assert "6.12 while there was work" in shown.evaluate("document.getElementById('tokens-note').textContent")
        assert shown.evaluate("document.querySelector('.window').textContent") == "last 10 s"
        line = shown.evaluate("document.querySelector('#spark-tokens path:last-child').getAttribute('d')")
        assert line.endswith("V40.0H100.00")             # down to zero at once, and there until now
        assert shown.evaluate("document.getElementById('sheet-column').hidden")
        is_whole(shown)

    def test_a_shared_machine_and_few_answers_are_said(self, told: Told, browser: Browser) -> None:
        told.answer["verdict"] |= {"term": "implementation", "why": "steps are slow",
                                   "parts": {"implementation": 0.5, "shared_machine": 0.5},
                                   "changes": [{"what": "raise max_num_seqs", "gain": 1.5, "trade_off": "none"}]}
        told.answer["utilisation"]["steps"] = 9
        told.answer["batch"]["max_rows"] = 8
        told.answer["latency"]["first_token"] = {"count": 1, "p50": 3.5, "p90": 3.5, "p99": 3.5}
        shown = browser.page(390, 844)
        shown.open(f"{told.url}/dashboard")
        shown.wait("document.getElementById('term').textContent === 'kernels below their roof'")
        assert "had the engine's core for 50 %" in shown.evaluate("document.getElementById('others').textContent")
        assert shown.evaluate("document.getElementById('split-legend').textContent").count("kernels below their roof 50 %") == 1
        assert shown.evaluate("[...document.getElementById('ttft').cells].map((cell) => cell.textContent)")[1:] == [
            "3.5 s", "too few", "too few"]
        assert shown.evaluate("document.getElementById('latency-note').textContent").startswith("1 answer:")
        assert shown.evaluate("document.querySelector('.command code').textContent") == "--max-num-seqs 16"
        assert "check" not in shown.evaluate("document.getElementById('changes').textContent")
        is_whole(shown)

    def test_an_answer_that_breaks_off_is_kept_and_drawn(self, told: Told, browser: Browser) -> None:
        shown = browser.page(390, 844)
        shown.open(f"{told.url}/dashboard#chat")
        shown.evaluate("document.getElementById('chat-input').value = 'Hello'")
        shown.evaluate("document.getElementById('chat-send').click()")
        shown.wait("document.querySelector('.said.assistant small')?.textContent.startsWith('the answer ends here')")
        assert shown.evaluate("[...document.querySelector('.said.assistant .words').children].map((each) => each.tagName)") == [
            "H3", "P", "DIV", "P"]
        assert shown.evaluate("document.querySelector('.said pre').textContent") == "print(1)"
        assert shown.evaluate("document.querySelectorAll('.said img').length") == 0      # a model's text is no HTML
        assert shown.evaluate("document.querySelector('.said p strong').textContent") == "bold"
        assert shown.evaluate("document.querySelectorAll('.said .copy').length") == 2    # of the code, and of the answer
        is_whole(shown)
