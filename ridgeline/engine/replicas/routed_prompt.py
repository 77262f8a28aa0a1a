"""A prompt as the choice of a replica sees it: bytes, and the hashes of its beginnings.

Two prompts that begin with the same bytes share what a prefix cache holds. The router makes bytes of JSON (route/prompt_text); a
front end with several engines makes them of token ids, four bytes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.engine.replicas.prefix_tree import bytes_of, prompt_chain

TOKEN_BYTES = 4                      # of a token id; about what a token of text has, too


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    text: bytes
    root: int                        # of what shares a cache: the model and the cache salt
    chain: list[int]
    most_output: int | None = None   # tokens, if the request limits them
    is_chat: bool = False
    streams: bool = True             # when its answer begins can be seen
    num_unkept: int = 0              # bytes behind `text`: too far on for a prefix tree
    model: bytes = b""               # a digest of its name

    @property
    def num_bytes(self) -> int:
        return len(self.text) + self.num_unkept

    def followed_by(self, more: bytes) -> list[int]:
        """The nodes of the text with more behind it. Only what is new is hashed."""
        known = self.chain
        rest = self.text[bytes_of(len(known)) :] + more
        return known + prompt_chain(rest, known[-1] if known else self.root, len(known))


def token_bytes(ids: Sequence[int]) -> bytes:
    try:
        return np.asarray(ids, np.int64).astype(np.uint32).tobytes()
    except OverflowError:                                # no token has such an id: the engine will refuse it
        return repr(ids).encode()


def tokens_prompt(ids: Sequence[int], salt: str, most_output: int | None, is_cached: bool, streams: bool = True) -> RoutedPrompt:
    """Of token ids. A request that reuses no cached blocks (`is_cached` False) is drawn to no replica."""
    text, root = token_bytes(ids), hash(salt)
    return RoutedPrompt(text, root, prompt_chain(text, root) if is_cached else [], most_output, streams=streams)
