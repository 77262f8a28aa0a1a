"""How the vocabularies of GGUF files cut a text, by the name of the pattern: texts in which each differs from its neighbours.

The pieces are held as they are now: a changed pattern must be meant. scripts/make_tokenizer_golden.py compares whole
vocabularies with llama.cpp; tiny_aya follows its tokenizer.json instead, where llama.cpp differs in blanks before numbers.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
from tokenizers import Regex, pre_tokenizers

from ridgeline.text.gguf_patterns import PRE_TOKENIZERS

TEXT = "It's 12345 na\u00efve WordsLikeThis_x\r\n\n  (a) 漢字かな한국어 ½x"
WORD = ["It", "'s", " "], [" naïve", " WordsLikeThis", "_x", "\r\n\n", " ", " (", "a", ")"]
CASED = ["It's", " "], [" naïve", " Words", "Like", "This", "_x", "\r\n\n", " ", " (", "a", ")"]
DIGITS = list("12345")
EAST = [" 漢字かな한국어", " ", "½", "x"]
EAST_APART = [" ", "漢字かな", "한국어", " ", "½", "x"]
EXPECTED = {
    "hunyuan": [*WORD[0], *DIGITS, *WORD[1], *EAST],
    "seed-coder": [*WORD[0], *DIGITS, *WORD[1], *EAST],
    "minicpm5": [*WORD[0], "123", "45", *WORD[1], *EAST],
    "hunyuan-dense": [*WORD[0], "123", "45", *WORD[1], *EAST_APART],
    "minimax-m2": [*CASED[0], "123", "45", *CASED[1], *EAST],
    "kimi-k2": [*CASED[0], "123", "45", *CASED[1], " ", "漢字", "かな한국어", " ", "½", "x"],
    "youtu": [*CASED[0], *DIGITS, *CASED[1], *EAST_APART],
    "tiny_aya": [*CASED[0], "12", "345", *CASED[1], *EAST],
    "deepseek-llm": ["It", "'", "s", " ", "12345", " na", "ï", "ve", " WordsLikeThis", "_", "x", "\r", "\n", "\n", " ", " (",
                     "a", ")", " ", "漢字かな한국어", " ", "½", "x"],
    "deepseek-coder": ["It", "'", "s", " ", *DIGITS, " naïve", " WordsLikeThis", "_", "x", "\r", "\n", "\n", " ", " (", "a", ")",
                       " ", "漢字かな한국어", " ", "½", "x"],
    "falcon": ["It", "'", "s", " ", "123", "45", " naïve", " WordsLikeThis", "_", "x", "\r\n\n  ", "(", "a", ")",
               " 漢字かな한국어", " ½", "x"],
    "viking": ["It's", " ", *DIGITS, " naïve", " WordsLikeThis_x", "\r\n\n  (", "a", ")", *EAST],
    "poro-chat": ["It's", " 12345", " naïve", " WordsLikeThis_x", "\r\n\n  (", "a", ")", " 漢字かな한국어", " ½x"],
}


@cache
def cutter(*patterns: str) -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns])


def pieces(name: str, text: str) -> list[str]:
    return [piece for piece, _ in cutter(*PRE_TOKENIZERS[name].patterns).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_text_is_cut_as_its_model_was_trained(name: str) -> None:
    assert pieces(name, TEXT) == EXPECTED[name]


def test_signs_and_the_breaks_behind_them() -> None:
    """Where patterns that cut the text above alike are not the same."""
    assert pieces("hunyuan", "x);\n\ny") == ["x", ");\n\n", "y"] and pieces("seed-coder", "x);\n\ny") == ["x", ");", "\n\n", "y"]
    assert pieces("minimax-m2", "x);\n/y") == ["x", ");\n/", "y"] and pieces("kimi-k2", "x);\n/y") == ["x", ");\n", "/y"]
    assert pieces("tiny_aya", "1234567a 89") == ["123", "456", "7", "a", " ", "89"]      # no group ends inside a word


def test_digits_in_threes_from_the_right_take_linear_time() -> None:
    """The same pieces as with the look-ahead of the model's own file, which takes hours for the long texts here."""
    look_ahead = cutter(r"\d{1,3}(?=(?:\d{3})*\b)", PRE_TOKENIZERS["tiny_aya"].patterns[-1])
    rng, signs = random.Random(5), [*"0123456789" * 3, *"aB _-.,½Ⅷ²\n'漢", "\u0663", "\u096b", "\u0301"]
    for _ in range(5_000):
        text = "".join(rng.choices(signs, k=rng.randint(0, 14)))
        assert pieces("tiny_aya", text) == [piece for piece, _ in look_ahead.pre_tokenize_str(text)], text
    assert pieces("tiny_aya", "1" * 500_000) == ["11", *["111"] * 166_666]
    assert pieces("tiny_aya", "1" * 500_000 + "a") == [*["111"] * 166_666, "11", "a"]


def test_names_that_mean_the_same() -> None:
    for name, other in (("gigachat", "gpt-2"), ("exaone", "smollm"), ("kanana2", "gpt-4o"), ("joyai-llm", "deepseek-v3"),
                        ("pixtral", "llama-bpe"), ("megrez", "qwen2"), ("cohere2moe", "tiny_aya")):
        assert PRE_TOKENIZERS[name] == PRE_TOKENIZERS[other]
