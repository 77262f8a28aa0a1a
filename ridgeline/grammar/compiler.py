"""Compiles what a request asks for into a matcher, by llguidance or xgrammar behind one interface (grammar/interface).

Compiling takes milliseconds for an ordinary grammar and may take seconds for a hostile one, so it never happens between two
steps: the front end compiles in a process with a time limit (engine/client/grammar_check), the engine in a thread
(engine/core/grammars).
"""

from __future__ import annotations

from ridgeline.errors import BadRequest
from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary
from ridgeline.grammar.interface import Backend, LibraryMatcher, in_words
from ridgeline.grammar.llguidance_backend import LLGuidance
from ridgeline.grammar.xgrammar_backend import XGrammar
from ridgeline.sampling_params import StructuredOutputs

_FIXED_BYTES = 64 * 1024             # of memory for a compiled grammar …
_BYTES_PER_BYTE = 256                # … and for each byte of its text: measured, for schemas that branch widely


def make_backend(name: str, vocabulary: GrammarVocabulary) -> Backend:
    """The library that compiles grammars for this vocabulary: xgrammar, or llguidance for every other name."""
    return XGrammar(vocabulary) if name == "xgrammar" else LLGuidance(vocabulary)


def compile_grammar(backend: Backend, asked: StructuredOutputs, in_step: bool = False) -> LibraryMatcher:
    """A matcher at the start of the answer, to be copied for each answer. BadRequest: it is no grammar, or beyond the limits."""
    try:
        matcher = backend.compile(asked, in_step)
    except (BadRequest, MemoryError):
        raise
    except Exception as error:                           # the libraries' converters raise all kinds
        raise _refused(asked, str(error) or type(error).__name__) from None
    if matcher.is_error():
        raise _refused(asked, matcher.get_error())
    if matcher.is_stopped():
        raise _refused(asked, "it allows no answer but an empty one")
    return matcher


def compiled_bytes(asked: StructuredOutputs, compiled: LibraryMatcher) -> int:
    """Memory of a compiled grammar. llguidance does not report it, so it is a rough estimate there."""
    return getattr(compiled, "num_bytes", _BYTES_PER_BYTE * len(asked.key)) + _FIXED_BYTES


def _refused(asked: StructuredOutputs, reason: str) -> BadRequest:
    words = in_words(reason)
    if words.startswith("NoExtension"):
        words = "no text can ever match it"
    return BadRequest(f"structured_outputs.{asked.kind} cannot be used: {words}")
