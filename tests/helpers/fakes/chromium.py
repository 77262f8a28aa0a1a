"""A headless Chromium for tests, driven by its DevTools protocol over a pair of pipes: no driver and no library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_SWITCHES = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-extensions",
    "--disable-background-networking", "--disable-dev-shm-usage", "--remote-debugging-pipe",
)


class Browser:
    def __init__(self) -> None:
        assert BINARY is not None
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # It reads commands from descriptor 3 and writes answers to 4. High ones are not overwritten on the way there.
        source, target = (fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (theirs_in, theirs_out))
        command = f'exec "$@" 3<&{source} 4>&{target}'
        words = ["bash", "-c", command, "bash", BINARY, *_SWITCHES, f"--user-data-dir={self._folder}", "about:blank"]
        self._process = subprocess.Popen(words, pass_fds=(source, target), stderr=subprocess.DEVNULL)
        for each in (theirs_in, theirs_out, source, target):
            os.close(each)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._number = 0
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        os.close(self._to)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        self._answers[number] = answers = queue.Queue()
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = answers.get(timeout=60)
        assert "error" not in answer, (method, answer["error"])
        return dict(answer["result"])

    def _read(self) -> None:
        rest = b""
        while chunk := os.read(self._from, 1 << 16):
            *messages, rest = (rest + chunk).split(b"\0")
            for each in messages:
                message = json.loads(each)
                if "id" in message:
                    self._answers.pop(message["id"]).put(message)
                elif page := self._pages.get(message.get("sessionId", "")):
                    page.heard(message["method"], message["params"])

    def page(self, width: int, height: int, scheme: str = "light") -> Page:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._pages[session] = page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        return page


class Page:
    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []                      # the console's, and what the page's policy refused
        self.requests: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 30.0, then: Callable[[], str] = lambda: "") -> None:
        deadline = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f"never: {script} {then()}"
            time.sleep(0.1)

    def screenshot(self, path: Path | str) -> None:
        """The whole page, however long."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(shot["data"]))
