"""The process that reads long bodies for a router: `python -m ridgeline.route.facts_process`. Started by server/long_bodies."""

from __future__ import annotations

import msgspec

from ridgeline.engine.client.request_context import LOCAL
from ridgeline.route.body_facts import read_facts
from ridgeline.server.long_bodies import Answers, Made, Task, answer_bodies


async def answered(task: Task, body: bytes) -> Made:
    return Made(msgspec.msgpack.encode(await read_facts(None, LOCAL, body)), False, 0.0)


def begin(first: bytes) -> Answers:
    """There is nothing to know before."""
    return answered


if __name__ == "__main__":
    answer_bodies(begin)
