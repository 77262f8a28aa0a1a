"""A process that checks whether grammars compile: `python -m ridgeline.grammar.compile_worker BACKEND`.

It reads frames from standard input, first the vocabulary, then Questions, and answers each on standard output. It ends with its
input. Each grammar is compiled in a fork of this process, with limits on CPU time, wall-clock time and memory. A grammar that
exceeds them ends its fork only: libraries stay imported and the vocabulary stays prepared for the next one. Once it has started,
the process runs at a lower CPU priority than token generation.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import warnings
from pathlib import Path

import msgspec

from ridgeline.errors import BadRequest
from ridgeline.grammar.background import process_steps_back
from ridgeline.grammar.compiler import compile_grammar, make_backend
from ridgeline.grammar.frames import Answer, Question
from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary
from ridgeline.grammar.interface import Backend
from ridgeline.process.framed_child import read_frame, write_frame

MEMORY_BYTES = 2**30                 # for one grammar, on top of the vocabulary


def serve(name: str, vocabulary: GrammarVocabulary) -> None:
    """Serve until the input ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    backend = make_backend(name, vocabulary)
    _limit_memory()
    gc.freeze()                                          # else a collection in a fork would copy every page it visits
    # Threads of numerical libraries are idle here, and the forks do not need them.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    process_steps_back()                                 # only now: on a busy machine the start would take ten times as long
    write_frame(target, b"ready")
    while (frame := read_frame(source)) is not None:
        question = msgspec.msgpack.decode(frame, type=Question)
        write_frame(target, msgspec.msgpack.encode(_in_a_copy(backend, question)))


def _in_a_copy(backend: Backend, question: Question) -> Answer:
    source, target = os.pipe()
    child = os.fork()
    if not child:
        try:
            # Without a handler these signals end the fork, also inside a library.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(question.seconds, 1e-6))
            signal.setitimer(signal.ITIMER_PROF, max(question.cpu_seconds, 1e-6))
            with os.fdopen(target, "wb") as pipe:
                pipe.write(msgspec.msgpack.encode(_compile(backend, question)))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(target)
    with os.fdopen(source, "rb") as pipe:
        written = pipe.read()
    _, status, used = os.wait4(child, 0)
    spent = used.ru_utime + used.ru_stime
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return Answer("busy", spent=spent)               # however much it used: its CPU time was not up
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return Answer("late", spent=spent)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGTERM):
        return Answer("killed", spent=spent)             # not by itself: by the kernel when memory is short, or by an operator
    if status:
        return Answer("memory", spent=spent)             # the libraries abort when an allocation fails
    answer = msgspec.msgpack.decode(written, type=Answer)
    answer.spent = spent
    return answer


def _compile(backend: Backend, question: Question) -> Answer:
    try:
        compile_grammar(backend, question.asked)
    except BadRequest as error:
        return Answer("refused", str(error))
    except MemoryError:
        return Answer("memory")
    return Answer("good")


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        taken = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # it is for the owner, which closes the pipe when it leaves
    frame = read_frame(sys.stdin.buffer)
    if frame is not None:
        serve(sys.argv[1], msgspec.msgpack.decode(frame, type=GrammarVocabulary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
