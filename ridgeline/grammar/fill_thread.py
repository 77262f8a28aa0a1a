"""A thread for one call of a library that leaves Python's lock: the caller goes on meanwhile.

start() returns once the thread has the lock and is about to make the call. Otherwise the thread would have to wait for it until
the caller's time slice ends, after 5 ms, and nothing would overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue


class FillThread:
    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._begun, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self.busy = False                                # a call has been started and not been waited for
        threading.Thread(target=self._run, name="masks", daemon=True).start()

    def start(self, call: Callable[[], object]) -> None:
        """Make this call. The one before it must have been waited for."""
        assert not self.busy
        self.busy, self._error = True, None
        self._calls.put(call)
        self._begun.acquire()

    def wait(self) -> Exception | None:
        """Until the call has returned; the error that it raised. A panic of the library, which is no Exception, is raised."""
        self._done.acquire()
        self.busy = False
        if self._error is not None and not isinstance(self._error, Exception):
            raise self._error
        return self._error

    def close(self) -> None:
        """End the thread, once the call has returned."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self._begun.release()
            try:
                call()
            except BaseException as error:               # a caller that waits must go on, whatever happened
                self._error = error
            del call                                     # with what it holds on to
            self._done.release()
