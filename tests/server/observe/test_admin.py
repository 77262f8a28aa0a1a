"""The admin socket beside a server's work, without a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ridgeline.server.observe.admin import beside


def test_a_client_that_stays_does_not_hold_up_the_servers_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nor does it leave a traceback in the log of a server that ends in order."""
    path, kept = tmp_path / "admin", list[Any]()

    async def work() -> None:
        reader, writer = await asyncio.open_unix_connection(path)
        kept.append(writer)
        writer.write(b'{"command": "stop"}\n')
        assert b"command must be one of" in await reader.readline()      # it is served, and stays

    llm: Any = None
    asyncio.run(asyncio.wait_for(beside(llm, str(path), work()), 60))
    assert not path.exists() and not caplog.records
