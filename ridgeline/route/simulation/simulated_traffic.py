"""Traffic for the simulated fleet: conversations, and questions about shared documents. The same seed gives the same requests."""

from __future__ import annotations

import random
from collections.abc import Callable

from ridgeline.route.simulation.simulated_fleet import TOKEN_BYTES, SimulatedRequest


def words(rng: random.Random, tokens: int) -> str:
    return rng.randbytes(tokens * TOKEN_BYTES // 2).hex()


def conversations(
    seed: int, count: int, turns: int, *, system: int = 400, question: int = 100, answer: int = 60, rate: float = 2.0,
    pause: float = 5.0,
) -> list[SimulatedRequest]:
    """`count` conversations that begin at `rate` per second; a user takes `pause` seconds between turns. Sizes are tokens."""
    rng = random.Random(seed)
    shared, starts, now = words(rng, system), [], 0.0
    for number in range(count):
        now += rng.expovariate(rate)
        own = random.Random(seed * 1_000_003 + number)
        starts.append(_turn([{"role": "system", "content": shared}], own, turns, now, (question, answer, pause)))
    return starts


def _turn(
    before: list[dict[str, str]], rng: random.Random, left: int, now: float, sizes: tuple[int, int, float]
) -> SimulatedRequest:
    question, answer, pause = sizes
    messages = [*before, {"role": "user", "content": words(rng, rng.randint(question // 2, question * 3 // 2))}]
    said = words(rng, rng.randint(answer // 2, answer * 3 // 2))
    following: Callable[[float], SimulatedRequest | None] = lambda ended: None  # noqa: E731
    if left > 1:
        after = [*messages, {"role": "assistant", "content": said}]
        following = lambda ended: _turn(after, rng, left - 1, ended + rng.expovariate(1 / pause), sizes)  # noqa: E731
    return SimulatedRequest(messages, said, now, following)


def shared_prefixes(
    seed: int, documents: int, questions: int, *, document: int = 2000, question: int = 40, answer: int = 40, rate: float = 8.0
) -> list[SimulatedRequest]:
    """`questions` in all, each about one of the documents, which is the beginning of its prompt."""
    rng = random.Random(seed)
    texts = [words(rng, document) for _ in range(documents)]
    requests, now = [], 0.0
    for _ in range(questions):
        now += rng.expovariate(rate)
        text = rng.choice(texts)
        messages = [{"role": "system", "content": text}, {"role": "user", "content": words(rng, question)}]
        requests.append(SimulatedRequest(messages, words(rng, answer), now))
    return requests
