"""The shapes for which CUDA graphs are captured: numbers of rows and tokens to which smaller steps are padded. No torch."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

PROMPT_ROWS = [1, 2, 4, 8]
# Up to USUAL_PROMPT for every model. Longer ones only for one prompt alone; choices/graph_sizes.py says up to which: beyond it a
# GPU computes for longer than a host takes to launch, and a graph gains nothing.
USUAL_PROMPT = 1280
PROMPT_TOKENS = [*range(64, 513, 64), *range(640, USUAL_PROMPT + 1, 128), *range(1536, 4097, 256), *range(4608, 8193, 512)]
# Prompts with decodes beside them have some hundred shapes. Of these tokens, with few numbers of rows, some are captured ahead:
# they stand in for all others (runner/cuda_graphs.py), with half as many tokens again at most. Up to 256 weights bind a step.
_MIXED_TOKENS = [256, 384, 640, 1152]
_MIXED_DECODES = 16                  # where the engine is nearly empty; from 64 on every power of two, and those of a full engine


# Most tokens of decodes with drafts in a step. Each has logits, 256 KB for a vocabulary of 128k.
MOST_VERIFIED = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step is padded to, so that a CUDA graph fits it."""

    decodes: int                     # rows that decode, with one token each …
    prompts: int = 0                 # rows after them …
    prompt_tokens: int = 0           # … and their tokens, all together
    draft_tokens: int = 0            # … or, with drafts, so many tokens together, in any mixture; 0: no row has drafts …
    queries: int = 1                 # … and at most this many each

    @property
    def tokens(self) -> int:
        return self.draft_tokens or self.decodes + self.prompt_tokens

    def holds(self, other: Shape) -> bool:
        """Can a step of the other shape be padded to this one? One with drafts only to another with drafts."""
        same = bool(self.draft_tokens) == bool(other.draft_tokens) and bool(self.prompts) == bool(other.prompts)
        return same and self.decodes >= other.decodes and self.prompts >= other.prompts and self.queries >= other.queries \
            and self.prompt_tokens >= other.prompt_tokens and self.draft_tokens >= other.draft_tokens


# Tokens of captured steps with drafts: fewer sizes than of plain decodes, for there are some for each number of rows. A step that
# a size leaves room in costs little more than its own would, and the controller fills the room with drafts.
_DRAFTED = [4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 208, 256, 320, 384, 432, 512]
_DRAFTED_ROWS = [1, 4, 8, 16, 32, 64, 128, 256, 512]
_DRAFT_QUERIES = [4, 16]             # of a row: up to 4 share a tile of attention with the heads of one, for most models

# A tile of attention holds the queries of a row and their heads. More rows leave less to gain from each draft, and their partial
# results take room: so many rows may have fewer drafts each.
_QUERIES = {32: 16, 64: 8}
_FEWEST_QUERIES = 4


def most_queries(rows: int) -> int:
    """Of a row in a step with this many rows that decode: its newest token and its drafts."""
    return next((queries for most, queries in _QUERIES.items() if rows <= most), _FEWEST_QUERIES)


class GraphShapes:
    def __init__(self, max_rows: int, max_step_tokens: int, most_verified: int = 0, most_prompt: int = USUAL_PROMPT) -> None:
        """`most_verified`: tokens of decodes with drafts; 0: such steps are not captured. `most_prompt`: tokens of prompts."""
        self._max_rows = max_rows
        self.decodes = decode_sizes(max_rows)
        # Beside prompts fewer: there are prompts of all sizes for each of them.
        self._mixed = [size for size in self.decodes if size & (size - 1) == 0 or size == self.decodes[-1]]
        most = min(most_verified, max_step_tokens)
        self.draft_tokens = [size for size in _DRAFTED if size < most] + [most] * bool(most)
        self._drafted_rows = [size for size in _DRAFTED_ROWS if size < max_rows] + [max_rows]
        self.prompt_tokens = [size for size in PROMPT_TOKENS if size <= min(most_prompt, max_step_tokens)]
        self.most_tokens = max([max_rows, *self.prompt_tokens])

    def fit(self, decodes: int, prompts: int, prompt_tokens: int) -> Shape | None:
        """The smallest shape that holds a step; None: it is not captured. A shape has no more rows than the engine: where others
        wait for rows, prompts take the last ones as soon as they are free, and all other rows decode beside them. Such a shape
        has as many of both as there are."""
        rows = _enough(PROMPT_ROWS, prompts)
        if decodes > self._max_rows - rows:
            rows = min(rows, prompts)
        shape = Shape(
            min(_enough(self._mixed if prompts else self.decodes, decodes), self._max_rows - rows), rows,
            _enough(self.prompt_tokens, prompt_tokens),
        )
        if shape.prompt_tokens > USUAL_PROMPT and shape != Shape(0, 1, shape.prompt_tokens):
            return None                                  # with all numbers of rows beside it there would be a thousand
        fits = shape.decodes >= decodes and shape.prompts >= prompts and shape.prompt_tokens >= prompt_tokens
        return shape if fits and shape.decodes + shape.prompt_tokens <= self.most_tokens else None

    def mixed(self, most_tokens: int) -> list[Shape]:
        """Few shapes that hold all others with prompts, up to 1,152 tokens of them and `most_tokens` in all; few
        tokens first, and those of a full engine, in which as many prompts begin as rows have ended."""
        many = PROMPT_ROWS[-1]
        decodes = [rows for rows in self._mixed if rows == _MIXED_DECODES or rows >= 4 * _MIXED_DECODES]
        pairs = [(self._max_rows - rows, rows) for rows in range(1, min(many, self._max_rows) + 1)]
        pairs += [(rows, many) for rows in decodes if rows + many < self._max_rows]
        most, found = min(most_tokens, self.most_tokens), []
        for tokens, pair in itertools.product(self.prompt_tokens, pairs):
            more = next((size for size in self.prompt_tokens if size > tokens and pair[0] + size <= most), None)
            is_largest = tokens < _MIXED_TOKENS[-1] and more is None
            if (tokens in _MIXED_TOKENS or is_largest) and pair[0] + tokens <= most:
                found.append(Shape(*pair, tokens))
        return found

    def fit_drafts(self, decodes: int, draft_tokens: int, queries: int) -> Shape | None:
        """The same for rows with drafts: `draft_tokens` together, at most `queries` each."""
        rows, tokens = _enough(self._drafted_rows, decodes), _enough(self.draft_tokens, draft_tokens)
        if not rows or not tokens or queries > most_queries(rows):
            return None
        return Shape(rows, draft_tokens=tokens, queries=self.draft_queries(decodes, queries))

    def draft_queries(self, decodes: int, queries: int) -> int:
        """The most queries of a row that such a graph is made for."""
        return min(_enough(_DRAFT_QUERIES, queries), most_queries(_enough(self._drafted_rows, decodes)))

    def drafted(self) -> list[Shape]:
        """All shapes with drafts, those of few rows first."""
        found: dict[Shape, None] = {}
        for rows, (fewer, queries) in itertools.product(self._drafted_rows, itertools.pairwise([1, *_DRAFT_QUERIES])):
            queries = min(queries, most_queries(rows))
            for tokens in self.draft_tokens:
                if queries > fewer and rows + fewer <= tokens <= max(self.draft_tokens[0], rows * queries):
                    found[Shape(rows, draft_tokens=tokens, queries=queries)] = None
        return list(found)

    def wide(self) -> list[Shape]:
        """Few shapes with drafts that hold most others with twice as many tokens at most: of each bound of queries the most
        rows, and powers of two of tokens."""
        powers = [tokens for tokens in self.draft_tokens if tokens >= 64 and tokens & (tokens - 1) == 0]
        most = {queries: rows for rows in self._drafted_rows for queries in (most_queries(rows),)}       # the last: most rows
        drafted = set(self.drafted())
        found = (Shape(rows, draft_tokens=tokens, queries=queries) for queries, rows in most.items() for tokens in powers)
        return [shape for shape in found if shape in drafted]


# Beyond 128 rows the time of cuBLAS GEMMs jumps up and down with their number: 448 rows of an 8B model take 48 %
# longer than 432, and 512 are faster than 464. These are the sizes that no larger one undercuts, as measured on an H200.
LARGE_SIZES = [144, 160, 176, 208, 256, 304, 320, 368, 384, 432, 512, 544, 608, 640, 672, 736, 800, 864, 896, 992]


def decode_sizes(max_rows: int) -> list[int]:
    """Batch sizes of captured decodes. Beyond 32 rows padding adds a fifth at most."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, *range(40, 129, 8), *LARGE_SIZES, *range(1056, max_rows + 64, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


def _enough(sizes: list[int], size: int) -> int:
    """The smallest of the sizes that is enough; 0 for nothing, or when none is."""
    place = bisect.bisect_left(sizes, size)
    return sizes[place] if size and place < len(sizes) else 0
