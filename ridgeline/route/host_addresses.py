"""The addresses of a replica's host name, looked up in a thread of its own.

The system's lookup cannot be interrupted, and waits for as long as a name server is silent. asyncio does it in a few threads that
all share: one name that hangs kept the others from being looked up, and the process from ending. Here each name has one thread at
a time, a daemon; while it hangs or fails, the addresses that were found before are used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from contextlib import suppress
from typing import Any

PATIENCE = 1.0                       # seconds for a new answer where an old one is known


class HostAddresses:
    def __init__(self, host: str, port: int) -> None:
        self._place = host, port
        self._known: list[str] = [host] if _is_address(host) else []
        self._is_name = not self._known
        self._lookup: asyncio.Future[list[str]] | None = None

    async def find(self) -> list[str]:
        """At least one; OSError if the name has none. A name that is new waits for as long as its caller does."""
        if not self._is_name:
            return self._known
        if self._lookup is None or self._lookup.done():
            self._lookup = self._begin()
        await asyncio.wait((self._lookup,), timeout=PATIENCE if self._known else None)
        if self._lookup.done() and (self._lookup.exception() is None or not self._known):
            self._known = self._lookup.result()
        return self._known

    def _begin(self) -> asyncio.Future[list[str]]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[str]] = loop.create_future()
        host, port = self._place

        def tell(addresses: list[str], error: OSError | None) -> None:
            if found.cancelled():
                return
            if error is None:
                found.set_result(addresses)
            else:
                found.set_exception(error)
                found.exception()                        # it may be nobody's any more

        def look_up() -> None:
            addresses, error = list[str](), None
            try:
                rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = list(dict.fromkeys(_written(row[4]) for row in rows))
            except (OSError, UnicodeError) as failure:   # a label of more than 63 letters is no OSError
                error = failure if isinstance(failure, OSError) else OSError(str(failure))
            with suppress(RuntimeError):                 # the loop has closed
                loop.call_soon_threadsafe(tell, addresses, error)

        try:
            threading.Thread(target=look_up, name="lookup", daemon=True).start()
        except RuntimeError:
            raise OSError("the system has no thread to look its name up") from None
        return found


def _written(place: tuple[Any, ...]) -> str:
    """With the zone of a link-local address."""
    address = str(place[0])
    return f"{address}%{place[3]}" if len(place) > 3 and place[3] and "%" not in address else address


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
