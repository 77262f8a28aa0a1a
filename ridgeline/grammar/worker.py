"""A process that compiles grammars to see whether they can be: `python -m ridgeline.grammar.worker BACKEND`.

It reads frames from standard input and answers each on standard output: first the vocabulary, then StructuredOutputs; an
answer is why a grammar is refused, or nothing. Its memory is limited here, its time by whoever waits (engine/grammar_check).
It ends with its input.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import msgspec

from ridgeline.errors import BadRequest
from ridgeline.grammar.compiler import compile_grammar, make_backend
from ridgeline.grammar.frames import read_frame, write_frame
from ridgeline.grammar.vocabulary import GrammarVocabulary
from ridgeline.sampling_params import StructuredOutputs

MEMORY_BYTES = 2**30                 # beyond what the vocabulary takes


def serve(name: str, vocabulary: GrammarVocabulary) -> None:
    """Serve until the input ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    backend = make_backend(name, vocabulary)
    _limit_memory()
    write_frame(target, b"ready")
    while (frame := read_frame(source)) is not None:
        try:
            compile_grammar(backend, msgspec.msgpack.decode(frame, type=StructuredOutputs))
            answer = ""
        except BadRequest as error:
            answer = str(error)
        except MemoryError:
            answer = "structured_outputs takes too much memory to compile; use a simpler grammar"
        write_frame(target, answer.encode())


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        taken = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES, taken + MEMORY_BYTES))


def main() -> int:
    os.nice(10)                                          # whoever generates comes first
    frame = read_frame(sys.stdin.buffer)
    if frame is not None:
        serve(sys.argv[1], msgspec.msgpack.decode(frame, type=GrammarVocabulary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
