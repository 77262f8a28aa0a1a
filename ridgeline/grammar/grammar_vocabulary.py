"""A model's vocabulary as grammars see it: the bytes of every token id, which ids are no text, and which end an answer.

It is made from a tokenizer (engine/client/grammar_check) and read by the backends (llguidance_backend, xgrammar_backend). This
file knows neither tokenizer files nor requests, and imports neither library.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.errors import BadRequest

_REMEMBERED = 4096                   # short texts whose tokens are kept; at most …
_REMEMBERED_BYTES = 128              # … this long
_REMEMBERED_LONG = 16                # longer texts that are kept, with the place where each token begins


@dataclass(slots=True)
class GrammarVocabulary:
    pieces: list[bytes]              # by id; empty for an id that only pads the model's vocabulary
    special_ids: list[int]           # control tokens: a grammar can name them, text never matches them
    end_ids: list[int]               # any of them ends an answer; at least one

    @classmethod
    def of(
        cls, pieces: Sequence[bytes], special_ids: frozenset[int], end_ids: frozenset[int], vocab_size: int
    ) -> GrammarVocabulary:
        """For logits of `vocab_size` ids, which may be more or fewer than the tokenizer knows. BadRequest if none ends an
        answer."""
        known = list(pieces[:vocab_size])
        known += [b""] * (vocab_size - len(known))
        ends = sorted(token for token in end_ids if token < vocab_size)
        if not ends:
            message = "structured_outputs needs a model with an end token; this one has none"
            raise BadRequest(message, field="structured_outputs")
        # An end token is never text, whatever the tokenizer's files say of it.
        special = sorted(token for token in special_ids | end_ids if token < vocab_size and known[token])
        return cls(known, special, ends)

    def ranks(self) -> dict[bytes, int] | None:
        """The ids of all pieces of text, with which llguidance can do BPE by itself: from single bytes on, merging two pieces at
        a time. None where that does not work: some byte is no token by itself, two ids have the same bytes, or a special token
        has no name."""
        special = frozenset(self.special_ids)
        ranks = {piece: token for token, piece in enumerate(self.pieces) if piece and token not in special}
        num_text = sum(1 for piece in self.pieces if piece) - len(special)
        names = {self.pieces[token] for token in special}
        if len(ranks) < num_text or len(names) < len(special) or not all(map(_is_text, names)):
            return None
        return ranks if all(bytes([byte]) in ranks for byte in set(b"".join(ranks))) else None


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class Pieces:
    """The tokenizer that llguidance calls where it cannot do BPE by itself."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self.tokens = vocabulary.pieces
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id: int | None = None
        special = frozenset(vocabulary.special_ids)
        self._ids = {piece: token for token, piece in enumerate(self.tokens) if piece and token not in special}
        self._longest: dict[bytes, int] = {}             # by how they begin
        for piece in self._ids:
            self._longest[piece[:2]] = max(self._longest.get(piece[:2], 0), len(piece))
        self._spelled: dict[bytes, list[int]] = {}
        self._long: dict[bytes, tuple[bytes, array[int], array[int]]] = {}       # by how they end: text, tokens, where they begin

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens that spell the text, each as long as possible. llguidance asks where a grammar leaves one text only, such as the
        rest of a property's name: from every thread that fills masks, under Python's lock, and for the same few texts again and
        again. So answers are kept. In a long forced text it asks for the rest at every token, so rests of long texts are found
        as well."""
        data = text.encode() if isinstance(text, str) else text
        if len(data) > _REMEMBERED_BYTES:
            return self._spell_long(data)
        found = self._spelled.get(data)
        if found is None:
            if len(self._spelled) >= _REMEMBERED:
                self._spelled = {}
            found = self._spelled[data] = self._spell(data)[0].tolist()
        return found

    def _spell_long(self, data: bytes) -> list[int]:
        end = data[-_REMEMBERED_BYTES:]
        whole, tokens, starts = self._long.get(end, (b"", array("q"), array("q")))
        skipped = len(whole) - len(data)
        place = bisect_left(starts, skipped)
        if place == len(starts) or starts[place] != skipped or not whole.endswith(data):
            tokens, starts = self._spell(data)
            place = 0
            if len(self._long) >= _REMEMBERED_LONG:
                self._long = {}
            self._long[end] = data, tokens, starts
        return tokens[place:].tolist()

    def _spell(self, data: bytes) -> tuple[array[int], array[int]]:
        """Tokens, and where each begins."""
        found, starts = array("q"), array("q")
        start = 0
        while start < len(data):
            longest = self._longest.get(data[start : start + 2], 1)
            ends = range(min(len(data), start + longest), start, -1)
            end = next((end for end in ends if data[start:end] in self._ids), None)
            if end is not None:
                found.append(self._ids[data[start:end]])
                starts.append(start)
            start = end if end is not None else start + 1
        return found, starts
