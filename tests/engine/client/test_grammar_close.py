"""A server that stops while a grammar is compiled: its client is told to try again, and no pipe is closed under a thread."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from served_model import write_model

from ridgeline.engine.client.grammar_check import GrammarChecker
from ridgeline.errors import TryAgain
from ridgeline.sampling_params import StructuredOutputs
from ridgeline.text.tokenizer import Tokenizer


@pytest.fixture
def checker(tmp_path_factory: pytest.TempPathFactory) -> GrammarChecker:
    return GrammarChecker(Tokenizer.load(write_model(tmp_path_factory.mktemp("model") / "tiny")))


def test_a_grammar_that_is_compiled_while_the_server_stops_is_to_be_tried_again(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that waited for it read from a closed pipe: a 500 with a traceback."""
    checker.check(StructuredOutputs(regex="a"))
    compiler = checker._compiler
    assert compiler is not None
    os.kill(compiler.process.pid, signal.SIGSTOP)        # so that it is compiled until the end
    ask, is_asked = compiler.ask, threading.Event()

    def noted(frame: bytes, seconds: float) -> bytes:
        is_asked.set()
        return ask(frame, seconds)

    monkeypatch.setattr(compiler, "ask", noted)
    outcome = checker.check_soon(StructuredOutputs(regex="b"))
    assert is_asked.wait(60)
    checker.close()
    with pytest.raises(TryAgain, match="the server is stopping"):
        outcome.result(60)
    assert compiler.process.wait(60) == -signal.SIGKILL and not compiler.end.alive


def test_a_checker_that_compiles_nothing_closes_its_pipes_at_once(checker: GrammarChecker) -> None:
    checker.check(StructuredOutputs(regex="a"))
    compiler = checker._compiler
    assert compiler is not None
    checker.close()
    assert not compiler.end.alive and not checker._lock.locked()
    checker.check(StructuredOutputs(regex="b"))          # starts another
    checker.close()
