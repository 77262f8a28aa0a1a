"""Tokens of which there is nothing else to tell take a short way through the front end: the same answers as by the long one."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from ridgeline.engine.client.answer_stream import AnswerStream, so_far
from ridgeline.engine.client.open_requests import OpenRequests
from ridgeline.engine.client.outputs import AnswerDelta, CompletionOutput, add_text
from ridgeline.engine.client.processor import RequestState
from ridgeline.engine.client.wait_estimate import LoadMeter
from ridgeline.engine.ipc import TO_ENGINE, Abort, Deltas
from ridgeline.messages import Request, TokenDelta, TokenDeltas
from ridgeline.metrics import ServingMetrics
from ridgeline.sampling_params import SamplingParams
from ridgeline.server.api.openai.responses_answer import grow
from ridgeline.text.detokenizer import TextStream

# Parts of characters, bytes that are never valid, letters of stop strings, a special token.
PIECES = [b"a", b"b", b" ab", b"", "é".encode(), *(bytes([byte]) for byte in "é你🙂".encode()), b"\xff", b"\xf0\x9f", b"<s>"]


class Pieces:
    """As much of a Tokenizer as an answer needs."""

    decodes_alone, has_first_pieces, has_prefix_space = True, False, False

    def token_pieces(self, skip_special_tokens: bool) -> list[bytes]:
        return [b"" if skip_special_tokens and piece == b"<s>" else piece for piece in PIECES]

    def token_text(self, token_id: int) -> str:
        return PIECES[token_id].decode(errors="replace")


class Client:
    """One front end's open requests, what its readers got, and the aborts it sent."""

    def __init__(self, params: list[SamplingParams]) -> None:
        self.sent: list[bytes] = []
        self.metrics = ServingMetrics()
        self.opened = OpenRequests(LoadMeter(), self.metrics, self.sent.append)
        self.streams = [AnswerStream(self.opened.abandon) for _ in params]
        for number, (each, stream) in enumerate(zip(params, self.streams, strict=True)):
            request = Request(str(number), [1, 2], each)
            self.opened.submit(None, request, b"", RequestState(request, None, Pieces()), stream, 1.0)  # type: ignore[arg-type]
        self.sent.clear()

    def take(self, deltas: TokenDeltas, at: float) -> None:
        for _ in self.opened.take(Deltas(deltas, 1, 1), at):
            pass

    def seen(self) -> list[Any]:
        """All that a reader or an operator can see."""
        aborts = [TO_ENGINE.decode(frame) for frame in self.sent]
        counted = self.metrics
        return [[(stream._new, stream.outputs[0].outputs, stream.outputs[0].num_cached_tokens) for stream in self.streams],
                [(each.request_id, each.index) for each in aborts if isinstance(each, Abort)], sorted(self.opened.by_wire_id),
                counted.generation_tokens, counted.inter_token.counts, counted.finished]


PARAMS = [SamplingParams(max_tokens=50), SamplingParams(max_tokens=50, n=2), SamplingParams(max_tokens=50, stop=["ba", "é"]),
          SamplingParams(max_tokens=50, skip_special_tokens=False), SamplingParams(max_tokens=50, detokenize=False)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("replayed", [False, True])
def test_both_ways_lead_to_the_same(seed: int, replayed: bool) -> None:
    rng, short, long = random.Random(seed), Client(PARAMS), Client(PARAMS)
    places = [(str(number), index) for number, params in enumerate(PARAMS) for index in range(params.n)]
    for step in range(40):
        if replayed and step == 20:                              # another engine: the first one's count of cached tokens stays
            for client in (short, long):
                client.opened.replay(False)
                client.sent.clear()
        chosen = [place for place in places if rng.random() < 0.8]
        rng.shuffle(chosen)
        tokens = [[rng.randrange(-1, len(PIECES) + 1) for _ in range(rng.choice((0, 1, 1, 1, 3)))] for _ in chosen]
        cached = 16 * (step >= 20)
        flat = np.array([token for each in tokens for token in each], np.int32)
        counts = np.array([len(each) for each in tokens], np.int32)
        short.take(TokenDeltas([(name, index, cached) for name, index in chosen], counts, flat, []), 2.0 + step)
        others = [TokenDelta(name, index, list(each), num_cached_tokens=cached)
                  for (name, index), each in zip(chosen, tokens, strict=True)]
        long.take(TokenDeltas(others=others), 2.0 + step)
        assert short.seen() == long.seen()
    for client in (short, long):
        last = [TokenDelta(name, index, [0], finish_reason="length") for name, index in places]
        client.take(TokenDeltas(others=last), 99.0)
    assert short.seen() == long.seen() and not short.opened.by_wire_id
    assert any(stream.outputs[0].outputs[0].stop_reason for stream in short.streams)     # a stop string was met on the way


def grown(kind: str) -> tuple[Callable[[str], None], Callable[[], str]]:
    """(adds to a text, returns it)."""
    if kind == "item of a response":
        item = {"arguments": ""}
        return partial(grow, item, "arguments"), lambda: item["arguments"]
    if kind == "tokens at once":
        stream = TextStream(Pieces())  # type: ignore[arg-type]
        return stream._take, lambda: stream._held
    to = CompletionOutput(0) if kind == "answer" else AnswerDelta(0, "", [])
    return partial(add_text, to), lambda: to.text


@pytest.mark.parametrize("kind", ["answer", "what a slow reader has not read", "item of a response", "tokens at once"])
def test_a_long_text_is_not_copied_for_every_token(kind: str) -> None:
    """Memory shows it: a copy would need room for the text twice. 128,000 tokens took seven seconds."""
    add, text = grown(kind)
    for _ in range(64):                                          # Python adds in place once it knows the operands' types
        add("ab")
    add("x" * 2**22)
    tracemalloc.start()
    try:
        add("y" * 2**22)                                         # now its memory is traced
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(100):
            add("z")
        assert tracemalloc.get_traced_memory()[1] < 1.2 * size
    finally:
        tracemalloc.stop()
    assert text() == "ab" * 64 + "x" * 2**22 + "y" * 2**22 + "z" * 100


def test_what_was_given_so_far_does_not_grow() -> None:
    client = Client([SamplingParams(max_tokens=50)])
    client.take(TokenDeltas([("0", 0, 0)], np.array([2], np.int32), np.array([0, 1], np.int32), []), 2.0)
    copy = so_far(client.streams[0].outputs[0])
    client.take(TokenDeltas([("0", 0, 0)], np.array([1], np.int32), np.array([2], np.int32), []), 3.0)
    assert (copy.outputs[0].text, copy.outputs[0].token_ids, copy.outputs[0].text_offsets) == ("ab", [0, 1], [0, 1])
    assert client.streams[0].outputs[0].outputs[0].text_offsets == [0, 1, 2]
