"""From what a request asks for to a grammar that can be matched, by llguidance and within its limits, or by xgrammar.

xgrammar (grammar/xgrammar_backend) stands behind the same interface: its matchers have the methods of llguidance's, so that
nobody above needs to know which of the two follows an answer.

Compiling takes milliseconds for an honest grammar and may take seconds for a hostile one, so nobody calls it between two
steps: the front end does in a process with a time limit (engine/client/grammar_check), the engine in a thread
(engine/core/grammars).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from ridgeline.errors import BadRequest
from ridgeline.grammar.grammar_vocabulary import GrammarVocabulary, Pieces
from ridgeline.grammar.interface import LibraryMatcher, in_words, structures
from ridgeline.sampling_params import StructuredOutputs

if TYPE_CHECKING:
    from ridgeline.grammar.xgrammar_backend import XGrammar

# Fuel, not time: the same grammar is refused or taken on every machine. A lexer state takes about 1.5 KB.
_LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "max_grammar_size": 250_000, "verbose_errors": False}
# Between the parts of JSON: enough to indent, too little for a model to lose itself in, as small ones do.
_BLANKS = r"[ \t]{1,8}|\r?\n[ \t]{0,40}"
# Tokens are looked up by what they are made of: where a text has room for so many characters, all tokens of the kind are allowed
# without a look at each. 16: hardly a token is longer, so that texts of bounded length are dear only close to their end.
_PLAIN = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_PLAIN}{{1,{most}}}" for most in (10, 16, 30)), f"{_PLAIN}+"]
# How text is cut before it is spelled, as tokenizers do it: GPT-2's, and those since GPT-4 (Llama 3, Qwen), whose tokens begin
# with a mark, too. Joining is quadratic in what is spelled at once, so nothing there is longer than 64 characters.
_CUT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}{1,64}| ?\p{N}{1,64}| ?[^\s\p{L}\p{N}]{1,64}|\s{1,64}(?!\S)|\s{1,64}"
_CUT_BEFORE_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}{1,64}|\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,64}[\r\n]{0,64}"
    r"|\s{0,64}[\r\n]{1,64}|\s{1,64}(?!\S)|\s{1,64}"
)
_FIXED_BYTES = 64 * 1024             # of memory for a compiled grammar …
_BYTES_PER_BYTE = 256                # … and for each byte of its text: measured, for schemas that branch widely


def make_backend(name: str, vocabulary: GrammarVocabulary) -> LLTokenizer | XGrammar:
    """What compiles grammars for this vocabulary: xgrammar, or anything else for llguidance."""
    if name == "xgrammar":
        from ridgeline.grammar.xgrammar_backend import XGrammar

        return XGrammar(vocabulary)
    return make_tokenizer(vocabulary)


def make_tokenizer(vocabulary: GrammarVocabulary) -> LLTokenizer:
    """Where a grammar leaves one text only, the library asks which tokens spell it: for every fourth mask or so, and from all
    threads that fill some. So it spells by itself where it can, joining what has the lowest id first, as the tokenizers of most
    models do; else it has to ask Python, whose lock those threads would wait for.

    Either way in linear time: {"const": 20,000 letters} takes 2 to 3 ms a mask."""
    ranks = vocabulary.ranks()
    if ranks is None:
        wrapped: Any = Pieces(vocabulary)                # by shape: the class it names is made of another tokenizer
        return LLTokenizer(wrapped, eos_token=vocabulary.end_ids, slices=_SLICES)
    tokenizer: Any = LLTokenizer                         # whose declaration leaves this out
    made: LLTokenizer = tokenizer.from_tiktoken(
        encoder=ranks, special_tokens={vocabulary.pieces[token].decode(): token for token in vocabulary.special_ids},
        pattern=_CUT_BEFORE_MARKS if _begin_with_marks(ranks) else _CUT, eos_token=vocabulary.end_ids,
        n_vocab=len(vocabulary.pieces), slices=_SLICES,
    )  # fmt: skip
    return made


def _begin_with_marks(pieces: Iterable[bytes]) -> bool:
    """Some have a mark before letters: ".get", "_size", "(self"."""
    return any(len(piece) > 3 and piece[0] in b"._(" and piece[1:].isalpha() for piece in pieces)


def compile_grammar(backend: LLTokenizer | XGrammar, asked: StructuredOutputs) -> LibraryMatcher:
    """A matcher at the start of the answer, to be copied for each. BadRequest: it is no grammar, or beyond the limits.

    The first mask is computed here too: it can be the dearest by far, and copies find what it has learnt.
    """
    matcher: LibraryMatcher
    try:
        if isinstance(backend, LLTokenizer):
            made = LLMatcher(backend, grammar_text(asked), log_level=0, limits=LLParserLimits(**_LIMITS))
            if not made.is_error():
                made.compute_bitmask()
            matcher = made
        else:
            matcher = backend.compile(asked)
    except (BadRequest, MemoryError):
        raise
    except Exception as error:                           # the converters raise whatever is at hand
        raise _refused(asked, str(error) or type(error).__name__) from None
    if matcher.is_error():
        raise _refused(asked, matcher.get_error())
    if matcher.is_stopped():
        raise _refused(asked, "it allows no answer but an empty one")
    return matcher


def grammar_text(asked: StructuredOutputs) -> str:
    """What llguidance reads."""
    if asked.json is not None or asked.json_object:
        schema = '{"type":"object"}' if asked.json is None else str(asked.json)
        blanks: Any = {"whitespace_flexible": False} if asked.disable_any_whitespace else {"whitespace_pattern": _BLANKS}
        return LLMatcher.grammar_from_json_schema(schema, overrides=blanks)
    if asked.regex is not None:
        return LLMatcher.grammar_from_regex(asked.regex)
    if asked.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in asked.choice))
    if asked.grammar is not None:
        return LLMatcher.grammar_from_lark(any_to_lark(asked.grammar))
    return LLMatcher.grammar_from_lark(_tagged_text(json.loads(str(asked.structural_tag))))


def _tagged_text(tag: dict[str, Any]) -> str:
    """{"structures": [{"begin", "schema", "end"}], "triggers": [...]}, as vLLM takes it: a structure belongs to the longest
    trigger that it begins with."""
    tags = [
        StructTag(trigger=trigger, begin=begin, grammar=schema, end=end) for trigger, begin, schema, end in structures(tag)
    ]
    return str(StructTag.to_grammar(tags, assume_special=False))


def compiled_bytes(asked: StructuredOutputs, compiled: LibraryMatcher) -> int:
    """What a compiled grammar takes; llguidance does not say, and roughly has to do."""
    return getattr(compiled, "num_bytes", _BYTES_PER_BYTE * len(asked.key)) + _FIXED_BYTES


def _refused(asked: StructuredOutputs, reason: str) -> BadRequest:
    words = in_words(reason)
    if words.startswith("NoExtension"):
        words = "no text can ever match it"
    return BadRequest(f"structured_outputs.{asked.kind} cannot be used: {words}")
