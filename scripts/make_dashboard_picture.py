"""Takes the README's picture of the dashboard: a running server under eight streams, seen by a headless Chromium.

    ridgeline serve --port 8000
    python scripts/make_dashboard_picture.py http://127.0.0.1:8000

It needs `chromium`. The streams run for `--seconds` before the page is opened: the server keeps the last minutes for its plots.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

IMAGE = Path(__file__).resolve().parent.parent / "docs" / "images" / "dashboard.png"
MOST_BYTES = 300_000
QUESTIONS = ("Tell me a story about the sea.", "How does a bicycle stay upright?", "Write a letter to a friend.", "What is 7?")


def keep_asking(url: str, number: int, ended: threading.Event) -> None:
    """One stream after the other."""
    for turn in itertools.count(number):
        if ended.is_set():
            return
        asked = {"messages": [{"role": "user", "content": QUESTIONS[turn % len(QUESTIONS)]}], "stream": True, "max_tokens": 120}
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(asked).encode(), head)
        with urllib.request.urlopen(request) as answer:
            for _ in answer:
                if ended.is_set():
                    return


def photograph(url: str, to: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("no chromium here: install it (apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([
            browser, "--headless=new", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,980", f"--user-data-dir={folder}",
            f"--screenshot={to}", f"{url}/dashboard",
        ], check=True, capture_output=True, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of a running server, without /v1")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=100.0, help="of load before the picture")
    parser.add_argument("--out", type=Path, default=IMAGE)
    args = parser.parse_args()
    ended = threading.Event()
    for number in range(args.streams):
        threading.Thread(target=keep_asking, args=(args.url, number, ended), daemon=True).start()
    time.sleep(args.seconds)
    photograph(args.url, args.out)
    ended.set()
    size = args.out.stat().st_size
    print(f"{args.out}: {size:,} bytes")
    if size > MOST_BYTES:
        sys.exit(f"more than {MOST_BYTES:,} bytes: too large for a README")


if __name__ == "__main__":
    main()
