"""Frames between processes: what is sent comes back, and nothing but DecodeError comes out of garbage."""

from __future__ import annotations

import _thread
import contextlib
import os
import random
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine import ipc
from ridgeline.messages import Logprobs, Request, RowAdded, StepPlan, TokenDelta, TokenDeltas
from ridgeline.metrics import EngineStats
from ridgeline.sampling_params import SamplingParams

CODECS = {"to engine": ipc.TO_ENGINE, "from engine": ipc.FROM_ENGINE, "plan": ipc.PLAN}


def logprobs() -> Logprobs:
    return Logprobs(
        np.array([5], np.int32), np.array([-0.5], np.float32), np.array([1], np.int32),
        np.array([[5, 7]], np.int32), np.array([[-0.5, -2.0]], np.float32),
    )


def plan() -> StepPlan:
    params = SamplingParams(temperature=0.5, logit_bias={3: -1.0}, stop=["x"])
    added = RowAdded(2, np.arange(4, dtype=np.int32), 3, 0, [np.array([1, 2], np.int32)], params, seed=2**64 - 1)
    return StepPlan(
        7, np.array([1], np.int32), [added], np.zeros((0, 4), np.int32), np.array([2], np.int32), np.array([4], np.int32),
        np.array([1], np.int8), [],
    )


def messages() -> list[tuple[str, object]]:
    params = SamplingParams(n=2, seed=-5, stop=["ab"], logit_bias={1: 2.0}, allowed_token_ids=[1, 2])
    request = Request("é", [1, 2, 3], params, priority=-1, cache_salt="s", bad_words_token_ids=[[1], [2, 3]])
    delta = TokenDelta("1", 1, [4], [logprobs()], logprobs(), "stop", "ab", 16)
    deltas = TokenDeltas([("2", 0, 3)], np.array([2], np.int32), np.array([5, 6], np.int32), [delta])
    return [
        ("to engine", ipc.Add(request)),
        ("to engine", ipc.Abort("1", 0)),
        ("to engine", ipc.Vocabulary([b"a", b"\xff"], [1])),
        ("to engine", ipc.ForgetPrefixes()),
        ("to engine", ipc.Switch("overlap", False)),
        ("to engine", ipc.Profile(64)),
        ("from engine", ipc.Profiled("/tmp/trace.json", {"attention": {"floor": 0.5}}, 0.1)),
        ("to engine", ipc.Shutdown()),
        ("from engine", ipc.Ready("m", 8, 2, 3, "float32", "cpu", 4, 16, 0.5)),
        ("from engine", ipc.Loading(1, 2)),
        ("from engine", ipc.Failed("why", config=True)),
        ("from engine", ipc.Refused("1", "why")),
        ("from engine", ipc.PrefixesForgotten(True)),
        ("from engine", ipc.Deltas(deltas, 3, 4, 1.5, 2.5, ["1"])),
        ("from engine", ipc.Stats(EngineStats(1, 2, 3, {"steps": 4}, {"unknown": 1}, step_seconds_sum=0.5))),
        ("from engine", ipc.Switched("overlap", ["paged KV"], "why")),
        ("plan", plan()),
    ]


@pytest.mark.parametrize(("codec", "message"), messages(), ids=lambda value: type(value).__name__)
def test_what_is_sent_comes_back(codec: str, message: object) -> None:
    frame = CODECS[codec].encode(message)
    again = CODECS[codec].decode(frame)
    assert type(again) is type(message)
    assert CODECS[codec].encode(again) == frame          # arrays do not compare; their bytes do


def test_deltas_come_in_order_and_their_arrays_fit() -> None:
    """Tokens of a later step come after what is told of an answer before them, as arrays or not."""
    def said(request_id: str, *tokens: int) -> TokenDeltas:
        return TokenDeltas([(request_id, 0, 7)], np.array([len(tokens)], np.int32), np.array(tokens, np.int32))

    deltas = TokenDeltas()
    assert not deltas
    deltas += said("a", 1, 2)
    deltas += [TokenDelta("a", 0, [3])]
    deltas += said("a", 4)
    again = ipc.FROM_ENGINE.decode(ipc.FROM_ENGINE.encode(ipc.Deltas(deltas, 1, 1)))
    assert isinstance(again, ipc.Deltas) and len(again.deltas) == 3
    assert [(delta.token_ids, delta.num_cached_tokens) for delta in again.deltas] == [([1, 2], 7), ([3], 0), ([4], 7)]
    deltas = said("a", 1, 2)
    deltas.answers = [("a", 0, 7), ("b", 0, 7)]
    for counts in ([[1]], [1], [], [3, -1], [1, 2], [1, 0]):
        deltas.counts = np.array(counts, np.int32)
        with pytest.raises(ipc.DecodeError):
            ipc.FROM_ENGINE.decode(ipc.FROM_ENGINE.encode(ipc.Deltas(deltas, 1, 1)))


def test_arrays_keep_their_type_and_shape() -> None:
    again = ipc.PLAN.decode(ipc.PLAN.encode(plan()))
    assert again.appended.shape == (0, 4) and again.want.dtype == np.int8
    assert again.added[0].seed == 2**64 - 1 and again.added[0].params == plan().added[0].params


def decode_or_refuse(codec: ipc.Codec[object], frame: bytes) -> None:
    with contextlib.suppress(ipc.DecodeError):
        codec.decode(frame)


FRAMES = [CODECS[codec].encode(message) for codec, message in messages()]


@pytest.mark.reliability("S-02")
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@settings(max_examples=150, deadline=None)
@given(
    base=st.sampled_from(FRAMES),
    edits=st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=6), st.integers(0, 8)), max_size=6),
)
def test_mutated_frames_are_refused(codec: ipc.Codec[object], base: bytes, edits: list[tuple[int, bytes, int]]) -> None:
    frame = bytearray(base)
    for place, new, removed in edits:
        frame[place : place + removed] = new
    decode_or_refuse(codec, bytes(frame))


@pytest.mark.reliability("S-02")
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
def test_random_bytes_are_refused(codec: ipc.Codec[object]) -> None:
    source = random.Random(5)
    for _ in range(10_000):
        decode_or_refuse(codec, source.randbytes(source.randrange(80)))


def encoded(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def request_with(**fields: object) -> bytes:
    request = {"request_id": "1", "prompt_token_ids": [1], "params": {}} | fields
    return encoded({"type": "Add", "request": request})


@pytest.mark.reliability("S-02")
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xdd\xff\xff\xff\xff",                                                     # a list of 2^32 things
        b"\x82\xa4type\xa8Shutdown\xa1x" + b"\x91" * 200_000,                        # nesting without end
        b"\x82\xa4type\xa3Add\xa7request\x81\xaarequest_id\xa2\xff\xfe",             # text that is none
        request_with(params={"n": 0}),                                               # a value its own type refuses
        request_with(params={"temperature": float("nan")}),
        request_with(prompt_token_ids=["a"]),
        encoded({"type": "Elsewhere"}),
    ],
    ids=["empty", "long list", "nesting", "not utf-8", "n", "nan", "token type", "unknown kind"],
)
def test_hostile_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(ipc.DecodeError):
        ipc.TO_ENGINE.decode(frame)


@pytest.mark.parametrize(
    "array",
    [["object", [1], b"x"], ["int32", [3], b"\0\0\0\0"], ["int32", [2**62, 2**62], b""], [[], {}, 5], "text", None],
    ids=["type", "too short", "overflow", "nonsense", "text", "none"],
)
def test_arrays_that_lie_are_refused(array: object) -> None:
    fields = msgspec.msgpack.decode(ipc.PLAN.encode(plan()))
    with pytest.raises(ipc.DecodeError):
        ipc.PLAN.decode(encoded(fields | {"rows": array}))


def test_frames_have_a_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "MAX_FRAME", 100)
    with pytest.raises(ipc.DecodeError, match="101 bytes"):
        ipc.TO_ENGINE.decode(b"\xc0" * 101)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"priority": 2**64}, "ints"),
        ({"priority": -(2**63) - 1}, "ints"),
        ({"prompt_token_ids": [1, 10**23]}, "ints"),
        ({"cache_salt": "\ud800"}, "surrogates"),
        ({"cache_salt": object()}, "object cannot be sent"),
        ({"cache_salt": "x" * 1000}, "limit of 900"),
    ],
    ids=["priority", "low priority", "token id", "not unicode", "no type of ours", "size"],
)
def test_what_would_not_arrive_is_not_encoded(
    fields: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "MAX_FRAME", 900)
    request = Request("1", [1], SamplingParams())
    for name, value in fields.items():
        setattr(request, name, value)
    with pytest.raises(ipc.EncodeError, match=says):
        ipc.TO_ENGINE.encode(ipc.Add(request))


@pytest.mark.reliability("S-03")
def test_the_socket_directory_is_private_and_goes_away() -> None:
    first, second = ipc.SocketDir(), ipc.SocketDir()
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    assert first.path != second.path
    for each in (first, second):
        each.close()
        assert not each.path.exists()
        each.close()


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder, with a short path: a socket's has 107 characters."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.mark.reliability("S-03")
def test_folders_of_killed_servers_are_removed_by_the_next_one(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("dead", "alive", "empty", "young", "file")
    places = {kind: short_folder / f"ridgeline-{ipc._this_machine()}{number:08x}-abcdefgh" for number, kind in enumerate(kinds)}
    places["another machine's"] = short_folder / f"ridgeline-{'0' * 16}-abcdefgh"
    places["other"] = short_folder / "ridgeline-shape-abcdefgh"
    for kind, place in places.items():
        place.touch() if kind == "file" else place.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(places["alive"] / "to-engine"))
        listener.listen()
        for kind in ("dead", "young", "another machine's"):
            with socket.socket(socket.AF_UNIX) as killed:
                killed.bind(str(places[kind] / "to-engine"))
                killed.listen()
        for kind in (*kinds, "another machine's"):
            if kind != "young":
                os.utime(places[kind], (0, 0))
        user = os.geteuid()
        with monkeypatch.context() as another:
            another.setattr(ipc.os, "geteuid", lambda: user + 1)
            ipc.SocketDir().close()
        assert all(place.exists() for place in places.values()), "another user's"
        sockets = ipc.SocketDir()
        kept = {"alive", "young", "file", "other", "another machine's"}
        assert {kind for kind, place in places.items() if place.exists()} == kept
        assert sockets.path.exists()
        sockets.close()


def test_sockets_fit_whatever_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long TMPDIR is common on clusters, and a socket's path has 107 characters."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 80)))
    sockets = ipc.SocketDir()
    assert len(sockets.address("rank-1024").removeprefix("ipc://")) <= 107
    sockets.close()


@pytest.mark.reliability("R-09")
@pytest.mark.parametrize("threads", range(4))
def test_no_context_is_made_without_threads_for_it(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """ZeroMQ ends the process by SIGABRT where it can start none: a server that restarts its engine, too."""
    ended, begun = threading.Semaphore(0), list[int]()
    start = _thread.start_new_thread

    def limited(work: Callable[[], Any], arguments: tuple[()]) -> int:
        if len(begun) == threads:
            raise RuntimeError("can't start new thread")
        begun.append(start(lambda: (work(), ended.release()), arguments))
        return begun[-1]

    monkeypatch.setattr(ipc._thread, "start_new_thread", limited)
    if threads < 2:
        with pytest.raises(RuntimeError, match="start new thread"):
            ipc.new_context()
    else:
        ipc.new_context().destroy()
    assert len(begun) == min(2, threads)
    for _ in begun:
        assert ended.acquire(timeout=60)
