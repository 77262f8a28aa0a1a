"""How a byte-level vocabulary of a GGUF file cuts a text before merging, by the name that the file gives (tokenizer.ggml.pre).

The patterns are those of the models' own tokenizers, in the order in which llama.cpp applies them. A name that is not here is
refused: another pattern gives other tokens than the model was trained on.
"""

from __future__ import annotations

from typing import NamedTuple

# Characters assigned after Unicode 15.1, whose tables llama.cpp has. The regular expressions of `tokenizers` follow
# newer tables: without this the ids would change with the version of that library.
_NEWER_CHARACTERS = "".join(
    "-".join(f"\\x{{{code}}}" for code in bounds.split("-"))
    for bounds in """
        0897-0897 1B4E-1B4F 1B7F-1B7F 1C89-1C8A 2427-2429 31E4-31E5 A7CB-A7CD A7DA-A7DC 105C0-105F3 10D40-10D8F
        10EC2-10EFC 11380-113E2 116D0-116E3 11BC0-11BF9 11F5A-11F5A 13460-143FA 16100-16139 16D40-16D79 18CFF-18CFF
        1CC00-1CEB3 1E5D0-1E5FF 1F8B2-1F8C1 1FA89-1FA8F 1FABE-1FABE 1FAC6-1FAC6 1FADC-1FADF 1FAE9-1FAE9 1FBCB-1FBEF
    """.split()
)
_LETTER, _NUMBER, _PUNCTUATION, _SYMBOL, _MARK = (
    rf"[\p{{{category}}}&&[^{_NEWER_CHARACTERS}]]" for category in ("L", "N", "P", "S", "M")
)
_NOT_LOWER, _NOT_UPPER = f"[{_LETTER}&&[^a-z]]", f"[{_LETTER}&&[^A-Z]]"
_CONTRACTION = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?{_LETTER}+| ?{_NUMBER}+| ?[^\s{_LETTER}{_NUMBER}]+|\s+(?!\S)|\s+"
_DEEPSEEK = (
    rf"[!-/:-@\[-`{{-~][A-Za-z]+|[^\r\n{_LETTER}{_PUNCTUATION}{_SYMBOL}]?[{_LETTER}{_MARK}]+"
    rf"| ?[{_PUNCTUATION}{_SYMBOL}]+[\r\n]*|{_BLANKS}"
)


def _word_pattern(number: str, marks: str = "") -> str:
    """A contraction, a word with one sign before it, a number, other signs, or blanks: the pattern since Llama 3."""
    word = rf"[^\r\n{_LETTER}{_NUMBER}]?[{_LETTER}{marks}]+"
    return rf"{_CONTRACTION}|{word}|{number}| ?[^\s{_LETTER}{marks}{_NUMBER}]+[\r\n]*|{_BLANKS}"


def _cased_pattern(suffix: str, number: str, capital: str = _NOT_LOWER, small: str = _NOT_UPPER, ends: str = "\\r\\n/") -> str:
    """The same, but a word also ends where small letters turn to capitals. `ends`: what may follow signs."""
    start = rf"[^\r\n{_LETTER}{_NUMBER}]?"
    words = f"{start}{capital}*{small}+{suffix}|{start}{capital}+{small}*{suffix}"
    return rf"{words}|{number}| ?[^\s{_LETTER}{_NUMBER}]+[{ends}]*|{_BLANKS}"


class PreTokenizer(NamedTuple):
    """How a text is cut before merging: by each pattern in turn, every match and every gap a piece of its own."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False      # a piece that is a token is taken whole, however its merges would go
    add_bos: bool = False            # where the file does not say


# Letters with and without case: a word of capitals, and one that ends with small letters.
_CAPITAL, _SMALL = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_NEWER_CHARACTERS}]]", (
    rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_NEWER_CHARACTERS}]]"
)
_NOT_HAN = r"&&[^\p{Han}]]"
# DeepSeek's first models list letters with case, without some scripts and mathematical letters.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}\x{A790}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D8F}\x{16E40}-\x{1DFFF}]]"
)
_EAST_ASIAN = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_NO_SIGNS = r" ?[^(\s|.,!?…。，、।۔،)]+"        # BLOOM's

_DIGITS_THEN_GPT2 = PreTokenizer((_NUMBER, _GPT2))
_LLAMA3 = PreTokenizer((_word_pattern(f"{_NUMBER}{{1,3}}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_word_pattern(_NUMBER),))
_DEEPSEEK_V3 = PreTokenizer((f"{_NUMBER}{{1,3}}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK))
_GPT4O = PreTokenizer((_cased_pattern(f"(?:{_CONTRACTION})?", f"{_NUMBER}{{1,3}}"),))
# Digits in threes from the right, as in the model's own tokenizer.json: llama.cpp differs in blanks before a number. That file
# looks ahead to the end of the digits for each group, which is quadratic in their number. The same cuts in linear time: first
# all digits up to the end of a word, then the one or two before the threes, and the last pattern takes threes from the left.
_AYA = PreTokenizer((
    r"(?<!\d)(?>\d+)\b", r"\A\d{1,2}(?=(?>(?:\d{3})+)\z)",
    _cased_pattern(f"(?:{_CONTRACTION})?", f"{_NUMBER}{{1,3}}", _CAPITAL, _SMALL)))

# By the value of tokenizer.ggml.pre.
PRE_TOKENIZERS = {
    "default": PreTokenizer((rf"[{_PUNCTUATION}$+<=>^~|]+", _GPT2, f"{_NUMBER}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "phi-2": PreTokenizer((_GPT2,)),
    "olmo": PreTokenizer((_GPT2,)),
    "mpt": PreTokenizer((_GPT2,)),
    "jais": PreTokenizer((_GPT2,)),
    "gigachat": PreTokenizer((_GPT2,)),
    "a.x-4.0": PreTokenizer((_GPT2,)),
    "mellum": PreTokenizer((_GPT2,)),
    "exaone4": PreTokenizer((_GPT2,)),
    "trillion": PreTokenizer((_GPT2,)),
    "granite-docling": PreTokenizer((_GPT2,)),
    "smollm": _DIGITS_THEN_GPT2,
    "starcoder": _DIGITS_THEN_GPT2,
    "refact": _DIGITS_THEN_GPT2,
    "command-r": _DIGITS_THEN_GPT2,
    "codeshell": _DIGITS_THEN_GPT2,
    "exaone": _DIGITS_THEN_GPT2,
    "minerva-7b": _DIGITS_THEN_GPT2,
    "mellum2": _DIGITS_THEN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "kormo": _QWEN2,
    "megrez": _QWEN2,
    "hunyuan": _QWEN2,
    "solar-open": _QWEN2,
    "qwen35": PreTokenizer((_word_pattern(_NUMBER, marks=_MARK),)),
    "smaug-bpe": PreTokenizer(_LLAMA3.patterns),
    "dbrx": PreTokenizer(_LLAMA3.patterns),
    "deepseek-v3": _DEEPSEEK_V3,
    "hunyuan-dense": _DEEPSEEK_V3,
    "joyai-llm": _DEEPSEEK_V3,
    "tekken": PreTokenizer((_cased_pattern("", _NUMBER),), ignore_merges=True, add_bos=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "kanana2": _GPT4O,
    "minimax-m2": _GPT4O,
    "kimi-k2": PreTokenizer((r"\p{Han}+|" + _cased_pattern(
        f"(?:{_CONTRACTION})?", f"{_NUMBER}{{1,3}}", _CAPITAL[:-1] + _NOT_HAN, _SMALL[:-1] + _NOT_HAN, ends=r"\r\n"),)),
    "tiny_aya": _AYA,
    "cohere2moe": _AYA,
    "youtu": PreTokenizer((
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        _cased_pattern(f"(?:{_CONTRACTION})?", _NUMBER, _CAPITAL, _SMALL)), ignore_merges=True),
    "deepseek-llm": PreTokenizer((
        r"[\r\n]", rf"\s?{_CASED}+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"(?<!\s)\s+$", _EAST_ASIAN, f"{_NUMBER}+")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", rf"\s?{_LETTER}+", rf"\s?{_PUNCTUATION}+", _EAST_ASIAN, _NUMBER)),
    "seed-coder": PreTokenizer((
        rf"{_CONTRACTION}|[^\r\n{_LETTER}{_NUMBER}]?{_LETTER}+|{_NUMBER}| ?[^\s{_LETTER}{_NUMBER}\r\n]+|{_BLANKS}",)),
    "minicpm5": PreTokenizer((f"{_NUMBER}{{1,3}}", _word_pattern(f"{_NUMBER}+")), ignore_merges=True),
    "falcon": PreTokenizer((rf"[{_PUNCTUATION}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "viking": PreTokenizer((_NO_SIGNS, _NUMBER)),
    "poro-chat": PreTokenizer((_NO_SIGNS,)),
}
