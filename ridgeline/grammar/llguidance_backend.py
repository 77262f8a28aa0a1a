"""llguidance: compiles grammars within its own limits, spells forced text, and fills masks in its threads.

The library is imported only when a grammar arrives: that takes a tenth of a second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary, Pieces
from ridgeline.grammar.interface import LibraryMatcher, structures
from ridgeline.grammar.llguidance_schema import known_to_llguidance, rewritten
from ridgeline.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLTokenizer

# Fuel, not time: the same grammar is refused or accepted on every machine. A lexer state takes about 1.5 KB.
_LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "max_grammar_size": 250_000, "verbose_errors": False}
# Of a mask that a step waits for. Ordinary grammars take less than half of it. A mask takes 30 ms at most with it, and up to ten
# times as long without it.
_IN_STEP: dict[str, Any] = {"step_lexer_fuel": 25_000, "step_max_items": 10_000}
_SPELLED = 1024                      # forced texts whose tokens are remembered, of half a kilobyte at most
# Whitespace between the parts of JSON: enough to indent, too little for a small model to emit blanks for ever.
_BLANKS = r"[ \t]{1,8}|\r?\n[ \t]{0,40}"
# Classes of tokens ("slices"): where the grammar has room for a text this long, all tokens of the class are allowed at once,
# without a look at each. Hardly a token is longer than 16, so texts of bounded length are expensive only close to their end.
_PLAIN = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_PLAIN}{{1,{most}}}" for most in (10, 16, 30)), f"{_PLAIN}+"]
# How text is cut before BPE merges, as tokenizers do it: GPT-2's, and those since GPT-4 (Llama 3, Qwen), where a token may begin
# with a punctuation mark. Merging is quadratic in the length of a piece, so no piece is longer than 64 characters.
_CUT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}{1,64}| ?\p{N}{1,64}| ?[^\s\p{L}\p{N}]{1,64}|\s{1,64}(?!\S)|\s{1,64}"
_CUT_BEFORE_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}{1,64}|\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,64}[\r\n]{0,64}"
    r"|\s{0,64}[\r\n]{1,64}|\s{1,64}(?!\S)|\s{1,64}"
)
_OF_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)


class LLGuidance:
    """Compiles for one vocabulary."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokenizer = _make_tokenizer(vocabulary)     # keeps Python's lock, for seconds with a large vocabulary
        # A schema forces the same few texts in every answer.
        self.spell: Callable[[bytes], list[int]] = lru_cache(_SPELLED)(self.tokenizer.tokenize_bytes)

    def compile(self, asked: StructuredOutputs, in_step: bool = False) -> LibraryMatcher:
        """The first mask is computed here too: it can be the most expensive by far, and copies share what it has learnt."""
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**_LIMITS, **(_IN_STEP if in_step else {}))
        made = LLMatcher(self.tokenizer, grammar_text(asked), log_level=0, limits=limits)
        if not made.is_error():
            made.compute_bitmask()
        return made


def is_llguidance(matcher: LibraryMatcher) -> bool:
    """It can be given to the threads of `make_pool`."""
    from llguidance import LLMatcher

    return isinstance(matcher, LLMatcher)


def make_pool(threads: int) -> LLExecutor:
    """Threads that fill masks without Python's lock."""
    from llguidance import LLExecutor

    return LLExecutor(threads)


def _make_tokenizer(vocabulary: GrammarVocabulary) -> LLTokenizer:
    """Where a grammar leaves only one text, the library asks which tokens spell it: for about every fourth mask, and from all
    threads that fill masks. So it spells by itself where it can: it merges the pair with the lowest id first, as the tokenizers
    of most models do. Else it has to ask Python, and those threads wait for Python's lock.

    Both take linear time: {"const": 20,000 letters} takes 2 to 3 ms a mask."""
    from llguidance import LLTokenizer

    ranks = vocabulary.ranks()
    if ranks is None:
        wrapped: Any = Pieces(vocabulary)                # by shape: the class that the declaration names is not needed
        return LLTokenizer(wrapped, eos_token=vocabulary.end_ids, slices=_SLICES)
    tokenizer: Any = LLTokenizer                         # the declaration lacks from_tiktoken
    made: LLTokenizer = tokenizer.from_tiktoken(
        encoder=ranks, special_tokens={vocabulary.pieces[token].decode(): token for token in vocabulary.special_ids},
        pattern=_CUT_BEFORE_MARKS if _begin_with_marks(ranks) else _CUT, eos_token=vocabulary.end_ids,
        n_vocab=len(vocabulary.pieces), slices=_SLICES,
    )
    return made


def _begin_with_marks(pieces: Iterable[bytes]) -> bool:
    """Some tokens have a mark before letters: ".get", "_size", "(self"."""
    return any(len(piece) > 3 and piece[0] in b"._(" and piece[1:].isalpha() for piece in pieces)


def grammar_text(asked: StructuredOutputs) -> str:
    """The grammar as llguidance reads it."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if asked.json is not None or asked.json_object:
        schema = '{"type":"object"}' if asked.json is None else known_to_llguidance(str(asked.json))
        blanks: Any = {"whitespace_flexible": False} if asked.disable_any_whitespace else {"whitespace_pattern": _BLANKS}
        return LLMatcher.grammar_from_json_schema(schema, overrides=blanks)
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in asked.choice))
    if asked.grammar is not None:
        return LLMatcher.grammar_from_lark(asked.grammar if _is_lark(asked.grammar) else gbnf_to_lark(asked.grammar))
    return LLMatcher.grammar_from_lark(_tagged_text(json.loads(str(asked.structural_tag))))


def _is_lark(text: str) -> bool:
    """Whether a grammar is Lark, by its first rule; else it is GBNF. The library's own search takes quadratic time on blank
    lines, and keeps Python's lock meanwhile."""
    return _OF_LARK.search(text) is not None


def _tagged_text(tag: dict[str, Any]) -> str:
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]}, as vLLM takes it: a structure belongs to the longest
    trigger that it begins with."""
    from llguidance import StructTag

    tags = [
        StructTag(trigger=trigger, begin=begin, grammar=rewritten(schema), end=end)
        for trigger, begin, schema, end in structures(tag)
    ]
    return str(StructTag.to_grammar(tags, assume_special=False))
