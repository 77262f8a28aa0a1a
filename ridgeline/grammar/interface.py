"""What grammar libraries have in common, with llguidance's names. Both backends are written against it; it knows neither."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ridgeline.errors import BadRequest, shown
from ridgeline.sampling_params import StructuredOutputs

_REASON_CHARACTERS = 200


class LibraryMatcher(Protocol):
    """The state of one answer in a compiled grammar."""

    def deep_copy(self) -> LibraryMatcher:
        """An independent copy in the same state."""

    def consume_token(self, token: int) -> bool:
        """False: the grammar does not allow this token here. The matcher then stays in an error state."""

    def is_stopped(self) -> bool:
        """Only an end token can follow."""

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...

    def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
        """Write the mask of allowed tokens, `size` bytes, to this address."""


class Backend(Protocol):
    """A library that compiles grammars for one vocabulary."""

    def compile(self, asked: StructuredOutputs, in_step: bool = False) -> LibraryMatcher:
        """An exception, or an error state of the result, says why it cannot be used (grammar/compiler: BadRequest). `in_step`:
        within the limits of masks that a step waits for, if the library has any."""

    @property
    def spell(self) -> Callable[[bytes], list[int]] | None:
        """Says the tokens of a text that a grammar forces."""


def in_words(reason: str) -> str:
    """A library's error as one short line for the client."""
    words = " ".join(reason.replace("<non-verbose/>", "").split())
    if words.startswith("panic: no entry found"):        # in BPE of a forced text: a byte of it has no token
        return "no token can say the text that it asks for"
    if words.startswith("panic"):
        return "it is more than the compiler can do; use a simpler grammar"
    return words[:_REASON_CHARACTERS]


def structures(tag: dict[str, Any]) -> list[tuple[str, str, Any, str]]:
    """(trigger, begin, schema, end) of a structural tag {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, as
    vLLM takes it: a structure belongs to the longest trigger that it begins with."""
    found = []
    try:
        triggers = sorted((str(each) for each in tag["triggers"]), key=len, reverse=True)
        for structure in tag["structures"]:
            begin = str(structure["begin"])
            trigger = next((each for each in triggers if each and begin.startswith(each)), None)
            if trigger is None:
                raise BadRequest(f"structured_outputs.structural_tag: no trigger begins {shown(begin)}")
            found.append((trigger, begin, structure["schema"], str(structure["end"])))
    except (KeyError, TypeError):
        raise BadRequest(
            "structured_outputs.structural_tag needs triggers and structures, each with begin, schema and end"
        ) from None
    if not found:
        raise BadRequest("structured_outputs.structural_tag has no structures; give at least one")
    return found
