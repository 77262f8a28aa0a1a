"""xgrammar behind the interface of llguidance's matchers (grammar/interface). The library is imported only where it was chosen.

It imports torch and transformers, which takes seconds and hundreds of megabytes. It has no limits of its own: only the process
that compiles first (grammar/compile_worker) protects from hostile grammars. Its regular expressions are JavaScript's. Grammars
for llguidance (%llguidance) are compiled by llguidance; schemas that it would violate are refused (grammar/xgrammar_schema).
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline.errors import BadRequest
from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary
from ridgeline.grammar.interface import LibraryMatcher, structures
from ridgeline.grammar.llguidance_backend import LLGuidance
from ridgeline.grammar.xgrammar_schema import require_what_is_kept
from ridgeline.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    import xgrammar

_BLANKS = 40                         # whitespace characters between the parts of JSON, at most
_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")                     # time and source line at the start of its error messages


class XGrammar:
    """Compiles for one vocabulary."""

    spell = None                     # its matchers do not say what is forced

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        import xgrammar  # and torch and transformers with it

        special = frozenset(vocabulary.special_ids)
        # Tokens without bytes are never text to the library: control tokens, and ids that only pad the vocabulary.
        pieces = [b"" if token in special else piece for token, piece in enumerate(vocabulary.pieces)]
        info = xgrammar.TokenizerInfo(
            pieces, xgrammar.VocabType.RAW, vocab_size=len(pieces), stop_token_ids=vocabulary.end_ids
        )
        # One thread, because generation needs the others; engine/core/grammars caches what is compiled.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._vocabulary = vocabulary
        self._ids = _Ids(vocabulary)

    def compile(self, asked: StructuredOutputs, in_step: bool = False) -> LibraryMatcher:
        import xgrammar

        if asked.grammar is not None and asked.grammar.lstrip().startswith("%llguidance"):
            return LLGuidance(self._vocabulary).compile(asked)
        try:
            compiled = self._compiled(asked)
        except BadRequest:
            raise
        except Exception as error:
            raise ValueError(_PLACE.sub("", str(error)).strip()) from None
        made = XGrammarMatcher(xgrammar.GrammarMatcher(compiled), self._ids, compiled.memory_size_bytes)
        if not made.allows_anything():
            raise ValueError("no text can ever match it")
        return made

    def _compiled(self, asked: StructuredOutputs) -> xgrammar.CompiledGrammar:
        compiler = self._compiler
        if asked.json is not None or asked.json_object:
            schema = '{"type":"object"}' if asked.json is None else str(asked.json)
            require_what_is_kept(json.loads(schema))
            # Without any_whitespace it writes ", " and ": ", also inside parts that the schema leaves open.
            blanks: dict[str, Any] = {"any_whitespace": True, "max_whitespace_cnt": _BLANKS}
            if asked.disable_any_whitespace:
                blanks = {"any_whitespace": False}
            return compiler.compile_json_schema(schema, strict_mode=False, **blanks)
        if asked.regex is not None:
            return compiler.compile_regex(asked.regex)
        if asked.choice is not None:
            return compiler.compile_grammar("root ::= " + " | ".join(json.dumps(text) for text in asked.choice))
        if asked.grammar is not None:
            text = asked.grammar
            return compiler.compile_grammar(text) if "::=" in text else compiler.compile_lark(text)
        return compiler.compile_structural_tag(_tag(json.loads(str(asked.structural_tag))))


def _tag(given: dict[str, Any]) -> dict[str, Any]:
    listed = structures(given)
    for _, _, schema, _ in listed:
        require_what_is_kept(schema)
    tags = [
        {"begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}
        for _, begin, schema, end in listed
    ]
    triggers = sorted({trigger for trigger, _, _, _ in listed})
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}


class _Ids:
    """Facts of the vocabulary that its matchers share."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        size = len(vocabulary.pieces)
        self.ends = vocabulary.end_ids
        self.words = -(-size // 32)                      # of a mask
        self.tail = np.int32(-1 if size % 32 == 0 else (1 << size % 32) - 1)     # bits of the last one that are ids


class XGrammarMatcher:
    """The state of one answer, with llguidance's method names."""

    __slots__ = ("_error", "_ids", "_matcher", "num_bytes")

    def __init__(self, matcher: xgrammar.GrammarMatcher, ids: _Ids, num_bytes: int) -> None:
        self._matcher = matcher
        self._ids = ids
        self._error = ""
        self.num_bytes = num_bytes                       # of the compiled grammar, which copies share

    def deep_copy(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._matcher.fork(), self._ids, self.num_bytes)

    def consume_token(self, token: int) -> bool:
        if not self._error and (self._matcher.is_terminated() or not self._matcher.accept_token(token)):
            self._error = f"token {token} may not follow"
        return not self._error

    def is_stopped(self) -> bool:
        """The library reports only that an answer may end here; whether it must, the mask shows."""
        if self._error or self._matcher.is_terminated():
            return not self._error
        return bool(self._matcher.is_completed()) and not self._allowed(but=self._ids.ends).any()

    def allows_anything(self) -> bool:
        return bool(self._allowed().any())

    def is_error(self) -> bool:
        return bool(self._error)

    def get_error(self) -> str:
        return self._error

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        room = (ctypes.c_int32 * (size // 4)).from_address(address)
        self.fill(np.ctypeslib.as_array(room)[None], 0)

    def fill(self, masks: np.ndarray, row: int) -> None:
        if self._error:
            return
        if self._matcher.is_terminated():
            _only(masks[row], self._ids.ends)
        else:
            self._matcher.fill_next_token_bitmask(masks, row)
            self.look(masks[row])

    def look(self, mask: np.ndarray) -> None:
        """Check a filled mask: a grammar may reach a state from which no token follows."""
        mask[-1] &= self._ids.tail
        if not mask.any():
            self._error = "nothing can follow what it has allowed so far"

    def _allowed(self, but: Sequence[int] = ()) -> np.ndarray:
        mask = np.zeros((1, self._ids.words), np.int32)
        self._matcher.fill_next_token_bitmask(mask, 0)
        mask[0, -1] &= self._ids.tail
        words = mask[0].view(np.uint32)
        for token in but:
            words[token >> 5] &= ~np.uint32(1 << (token & 31))
        return words


def _only(mask: np.ndarray, ids: Sequence[int]) -> None:
    words = mask.view(np.uint32)
    words.fill(0)
    for token in ids:
        words[token >> 5] |= np.uint32(1 << (token & 31))


class BatchFiller:
    """Fills the masks of many matchers in xgrammar's own threads."""

    def __init__(self, threads: int) -> None:
        import xgrammar

        self._batch = xgrammar.BatchGrammarMatcher(max_threads=threads)

    def fill(self, listed: Sequence[tuple[XGrammarMatcher, int]], masks: np.ndarray) -> None:
        going = []
        for matcher, row in listed:
            if matcher._error or matcher._matcher.is_terminated():
                matcher.fill(masks, row)
            else:
                going.append((matcher, row))
        if going:
            self._batch.batch_fill_next_token_bitmask([each._matcher for each, _ in going], masks, [row for _, row in going])
        for matcher, row in going:
            matcher.look(masks[row])
