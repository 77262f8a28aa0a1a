"""From what a request asks for to a grammar that can be matched, by llguidance and within its limits.

Compiling takes milliseconds for an honest grammar and may take seconds for a hostile one, so nobody calls it between two
steps: the front end does in a process with a time limit (engine/grammar_check), the engine in a thread (engine/grammars).
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag
from llguidance.gbnf_to_lark import any_to_lark

from ridgeline.errors import BadRequest
from ridgeline.grammar.vocabulary import GrammarVocabulary, Pieces
from ridgeline.sampling_params import StructuredOutputs

# Fuel, not time: the same grammar is refused or taken on every machine. A lexer state takes about 1.5 KB.
_LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "max_grammar_size": 250_000, "verbose_errors": False}
# Between the parts of JSON: enough to indent, too little for a model to lose itself in, as small ones do.
_BLANKS = r"[ \t]{1,8}|\r?\n[ \t]{0,40}"
_FIXED_BYTES = 64 * 1024             # of memory for a compiled grammar …
_BYTES_PER_BYTE = 256                # … and for each byte of its text: measured, for schemas that branch widely
_ERROR_CHARACTERS = 200


def make_tokenizer(vocabulary: GrammarVocabulary) -> LLTokenizer:
    wrapped: Any = Pieces(vocabulary)                    # by shape: the class it names is made of another tokenizer
    return LLTokenizer(wrapped, eos_token=vocabulary.end_ids)


def compile_grammar(tokenizer: LLTokenizer, asked: StructuredOutputs) -> LLMatcher:
    """A matcher at the start of the answer, to be copied for each. BadRequest: it is no grammar, or beyond the limits.

    The first mask is computed here too: it can be the dearest by far, and copies find what it has learnt.
    """
    try:
        text = grammar_text(asked)
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**_LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()
    except BadRequest:
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
    try:
        triggers = sorted((str(each) for each in tag["triggers"]), key=len, reverse=True)
        tags = []
        for structure in tag["structures"]:
            begin = str(structure["begin"])
            trigger = next((each for each in triggers if each and begin.startswith(each)), None)
            if trigger is None:
                raise BadRequest(f"structured_outputs.structural_tag: no trigger begins {begin[:40]!r}")
            tags.append(StructTag(trigger=trigger, begin=begin, grammar=structure["schema"], end=str(structure["end"])))
    except (KeyError, TypeError):
        raise BadRequest(
            "structured_outputs.structural_tag needs triggers and structures, each with begin, schema and end"
        ) from None
    if not tags:
        raise BadRequest("structured_outputs.structural_tag has no structures; give at least one")
    return str(StructTag.to_grammar(tags, assume_special=False))


def compiled_bytes(asked: StructuredOutputs) -> int:
    """What a compiled grammar takes, roughly: the library does not say."""
    return _FIXED_BYTES + _BYTES_PER_BYTE * len(asked.key)


def _refused(asked: StructuredOutputs, reason: str) -> BadRequest:
    words = " ".join(reason.replace("<non-verbose/>", "").split())
    if words.startswith("panic"):
        words = "it is more than the compiler can do; use a simpler grammar"
    elif words.startswith("NoExtension"):
        words = "no text can ever match it"
    return BadRequest(f"structured_outputs.{asked.kind} cannot be used: {words[:_ERROR_CHARACTERS]}")
