"""What happens to options of other engines: taken by our name, ignored with a note, or refused with a reason.

One table for `LLM(...)` and the command line, so that both give the same answer. The names are in the files beside this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ridgeline.known_options import sglang_options, vllm_llama_cpp_options
from ridgeline.known_options.vllm_llama_cpp_options import SHORT

__all__ = ["KNOWN", "SHORT", "KnownOption", "asks_for_nothing", "known_option"]


@dataclass(frozen=True, slots=True)
class KnownOption:
    """An option that another engine has and this one has not."""

    kind: Literal["same", "ignored", "refused"]
    says: str                        # same: our name; ignored: why it changes nothing; refused: why, and what to do instead
    takes_value: bool
    neutral: tuple[Any, ...] = ()    # refused: values that ask for nothing, besides None


def _named(names: str) -> Iterator[tuple[str, bool]]:
    for name in names.split():
        yield name.removesuffix("="), name.endswith("=")


def _table() -> dict[str, KnownOption]:
    made: dict[str, KnownOption] = {}
    for engine in (sglang_options, vllm_llama_cpp_options):              # where both have a name, vLLM's or llama.cpp's answer
        words = engine.SAME.split()
        made |= {
            theirs.removesuffix("="): KnownOption("same", ours, theirs.endswith("="))
            for theirs, ours in zip(words[::2], words[1::2], strict=True)
        }
        for says, names in engine.IGNORED.items():
            made |= {name: KnownOption("ignored", says, takes) for name, takes in _named(names)}
        for names, neutral, says in engine.REFUSED:
            made |= {name: KnownOption("refused", says, takes, neutral) for name, takes in _named(names)}
    return made


KNOWN = _table()


def known_option(name: str) -> KnownOption | None:
    """By its name in Python. A member of a group (`compilation_config.mode`) is its group."""
    return KNOWN.get(name) or KNOWN.get(name.partition(".")[0])


def asks_for_nothing(known: KnownOption, value: Any) -> bool:
    """Whether a refused option has a value that changes nothing; values of the command line are texts."""
    if value is None or any(value is each or (type(value) is type(each) and value == each) for each in known.neutral):
        return True
    return isinstance(value, (str, float)) and str(value).lower() in {str(each).lower() for each in known.neutral}
