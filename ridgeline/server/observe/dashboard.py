"""`GET /dashboard`: a self-contained page that shows what GET /roofline reports, with a chat to try the model; and a router's,
which shows its fleet.

Its parts are in `page/` and joined at the first request. The page loads nothing else: style and script are inline, allowed by a
nonce per answer, and it may connect to this server only.
"""

from __future__ import annotations

import json
import secrets
from functools import cache
from importlib import resources

from starlette.responses import Response

from ridgeline.report import words
from ridgeline.report.style import COLOURS
from ridgeline.server.http.stream import InPieces

_SCRIPTS = ("figures.js", "markdown.js", "plots.js", "fleet.js", "dashboard.js", "chat.js")
_FLEET_SCRIPTS = ("figures.js", "fleet.js", "fleet_page.js")


@cache
def _joined(name: str, scripts: tuple[str, ...]) -> str:
    page = resources.files(__package__) / "page"
    script = "\n".join((page / each).read_text("utf-8").replace('"use strict";\n', "", 1) for each in scripts)
    html = (page / name).read_text("utf-8").replace("{{fleet}}", (page / "fleet_card.html").read_text("utf-8").rstrip("\n"))
    style = COLOURS + (page / "dashboard.css").read_text("utf-8")
    known = {
        "terms": words.TERMS, "parts": words.PARTS, "groups": words.GROUPS, "groupOf": words.GROUP_OF,
        "explained": words.EXPLAINED,
    }
    script = f'"use strict";\nconst WORDS = {json.dumps(known)};\n{script}'
    return html.replace("{{style}}", style).replace("{{script}}", script)


def headers(nonce: str) -> dict[str, str]:
    policy = {
        "default-src": "'none'",
        "script-src": f"'nonce-{nonce}'",
        "style-src": f"'nonce-{nonce}'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cache-control": "no-store",
    }


def page() -> Response:
    return _response(_joined("dashboard.html", _SCRIPTS))


def fleet_page() -> Response:
    """Of a router."""
    return _response(_joined("fleet.html", _FLEET_SCRIPTS))


def _response(text: str) -> Response:
    nonce = secrets.token_urlsafe(18)
    return InPieces(text.replace("{{nonce}}", nonce), media_type="text/html; charset=utf-8", headers=headers(nonce))
