"""A Hugging Face hub in this process: as much of its HTTP API as huggingface_hub needs to download a model."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Serves `files` (path -> content) as the repository `repo`. `asked` lists the requests; `cut` files stop half-way once."""

    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        self.repo, self.files = repo, files
        self.asked: list[str] = []
        self.cut: set[str] = set()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_HEAD(self) -> None:
                hub.answer(self, False)

            def do_GET(self) -> None:
                hub.answer(self, True)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        path = request.path.partition("?")[0]
        self.asked.append(f"{request.command} {path} {request.headers.get('Range', '')}".strip())
        found = re.fullmatch(r"/(.+?)/resolve/[^/]+/(.+)", path)
        if found and found[1] == self.repo and found[2] in self.files:
            self._file(request, found[2], with_body)
        elif path.startswith(f"/api/models/{self.repo}") and "gated" in self.repo:
            self._send(request, 403, b"{}", {"X-Error-Code": "GatedRepo"}, with_body)
        elif path in [f"/api/models/{self.repo}{each}" for each in ("", "/revision/main", f"/revision/{COMMIT}")]:
            listed = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            body = json.dumps({"id": self.repo, "sha": COMMIT, "siblings": listed, "tags": [], "private": False}).encode()
            self._send(request, 200, body, {}, with_body)
        elif path.startswith(f"/api/models/{self.repo}/revision/"):
            self._send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"}, with_body)
        else:
            self._send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"}, with_body)

    def _file(self, request: BaseHTTPRequestHandler, name: str, with_body: bool) -> None:
        data = self.files[name]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = re.match(r"bytes=(\d+)-", request.headers.get("Range", ""))
        if start and with_body:
            first = int(start[1])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            self._send(request, 206, data[first:], headers, with_body)
        elif with_body and name in self.cut:
            self.cut.remove(name)
            self._send(request, 200, data, headers, with_body, len(data) // 2)
        else:
            self._send(request, 200, data, headers, with_body)

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], with_body: bool,
        most: int | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in ({"Content-Type": "application/json", "Content-Length": str(len(body))} | headers).items():
            request.send_header(name, value)
        request.end_headers()
        if with_body:
            request.wfile.write(body[:most])
        if most is not None:
            request.close_connection = True
