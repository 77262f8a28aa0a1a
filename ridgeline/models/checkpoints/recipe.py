"""What a quantised checkpoint's config says about each of its modules, as data: the weight format, and how to get there.

A dialect (a file beside this one) turns a `quantization_config` into rules: the first pattern that matches a module's name gives
its recipe. No torch: memory is predicted from recipes before a tensor is read. `canonical.py` carries them out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeGuard

from ridgeline.errors import ModelError, shown
from ridgeline.model_files import num_repeats, repeats_ways
from ridgeline.quant.format import WeightFormat

ANY = ".*"
MAX_GROUP = 1 << 24                  # inputs, more than any linear has
MOST_REPEATS = 5                     # in a pattern
BEFORE, BEHIND = r"(?:.*\.)?", r"(?:\..*)?"              # around a name: what it may be inside of, and what may be in it


@dataclass(frozen=True, slots=True)
class Recipe:
    format: WeightFormat             # what the module's tensors become
    unpack: str                      # by this function of canonical.py
    # role -> endings that a tensor of this role may have, the usual one first; they begin behind the module's name.
    tensors: tuple[tuple[str, tuple[str, ...]], ...]
    optional: tuple[str, ...] = ()   # roles that a module may lack
    unused: tuple[str, ...] = ()     # endings that are known and not needed
    bits: int = 0                    # of a code in the checkpoint
    variant: str = ""                # of the dialect, for the function

    @property
    def endings(self) -> dict[str, str]:
        """ending -> role; unused ones have none"""
        return {ending: role for role, endings in self.tensors for ending in endings} | dict.fromkeys(self.unused, "")


_Glob = tuple[int, list[str]]        # the place of a rule, and the texts that a name has in this order


class RuleIndex:
    """The first rule that matches a name. Configs list thousands of names, and files have tens of thousands of tensors: names are
    looked up, and only real patterns are tried one by one."""

    def __init__(self, rules: Iterable[tuple[str, object]]) -> None:
        self._whole: dict[str, int] = {}                 # a literal name -> its place
        self._inside: dict[str, int] = {}                # one that may have more before and behind, as `component` writes it
        self._beginnings: dict[int, dict[str, int]] = {} # by length
        self._endings: dict[int, dict[str, int]] = {}
        self._patterns: list[tuple[int, str]] = []
        globs: list[_Glob] = []
        for place, (pattern, _) in enumerate(rules):
            inner = pattern.removeprefix(BEFORE).removesuffix(BEHIND)
            if (name := _literal(pattern)) is not None:
                self._whole.setdefault(name, place)
            elif pattern == BEFORE + inner + BEHIND and (name := _literal(inner)) is not None:
                self._inside.setdefault(name, place)
            elif (name := _literal(pattern.removesuffix(ANY))) is not None:
                self._beginnings.setdefault(len(name), {}).setdefault(name, place)
            elif (name := _literal(pattern.removeprefix(ANY))) is not None:
                self._endings.setdefault(len(name), {}).setdefault(name, place)
            elif any(pieces := _pieces(pattern)):
                globs.append((place, pieces))
            else:
                self._patterns.append((place, pattern))
        self._globs = _by_rarest_piece(globs)
        self._first: dict[tuple[str, ...], int | None] = {}      # plans ask for the same modules of a mixture again and again

    def first(self, spellings: Iterable[str]) -> int | None:
        names = tuple(spellings)
        if names not in self._first:
            self._first[names] = self._search(names)
        return self._first[names]

    def _search(self, names: tuple[str, ...]) -> int | None:
        best = min((place for name in names for place in self._looked_up(name)), default=None)
        for place, pattern in self._patterns:
            if best is not None and place > best:
                break
            if any(_compiled(pattern).fullmatch(name) for name in names):
                return place
        return best

    def _looked_up(self, name: str) -> Iterator[int]:
        """The places of all rules that match, but for real patterns."""
        if name in self._whole:
            yield self._whole[name]
        if self._inside:
            yield from (self._inside[part] for part in _runs(name) if part in self._inside)
        yield from (places[name[:size]] for size, places in self._beginnings.items() if name[:size] in places)
        yield from (places[name[-size:]] for size, places in self._endings.items() if name[-size:] in places)
        for known in self._globs.values():
            yield from (place for globs in _found_in(name, known) for place, pieces in globs if _fits(pieces, name))


def _by_rarest_piece(globs: list[_Glob]) -> dict[int, dict[str, list[_Glob]]]:
    """By the length of a piece and by the piece: the one that the fewest globs have. Thousands of them differ in a number."""
    uses = Counter(piece for _, pieces in globs for piece in set(pieces))
    found: dict[int, dict[str, list[_Glob]]] = {}
    for place, pieces in globs:
        rarest = min(filter(None, pieces), key=lambda piece: (uses[piece], -len(piece)))
        found.setdefault(len(rarest), {}).setdefault(rarest, []).append((place, pieces))
    return found


def _found_in(name: str, known: Mapping[str, list[_Glob]]) -> Iterator[list[_Glob]]:
    """What is known of those texts, all of one length, that are in a name: by the texts or by its parts, which are fewer."""
    size = len(next(iter(known)))
    if len(known) <= len(name) - size:
        yield from (globs for text, globs in known.items() if text in name)
    else:
        parts = {name[first : first + size] for first in range(len(name) - size + 1)}
        yield from (known[part] for part in parts if part in known)


def _pieces(pattern: str) -> list[str]:
    """The literal texts of a pattern with anything between them; empty if it is another one."""
    found = [_literal(piece) for piece in pattern.split(ANY)]
    return [piece for piece in found if piece is not None] if None not in found else []


def _fits(pieces: list[str], name: str) -> bool:
    """Whether a name is these texts in order with anything between them: each at its first place, so none is tried twice."""
    first, *between, last = pieces
    at, end = len(first), len(name) - len(last)
    if at > end or not name.startswith(first) or not name.endswith(last):
        return False
    for piece in between:
        at = name.find(piece, at, end)
        if at < 0:
            return False
        at += len(piece)
    return True


def _literal(pattern: str) -> str | None:
    """The name that alone matches a pattern; None: it is no escaped name."""
    name = re.sub(r"\\(.)", r"\1", pattern, flags=re.DOTALL)
    return name if re.escape(name) == pattern else None


def _runs(name: str) -> Iterator[str]:
    """Every part of a name that begins and ends at a dot, or where the name does."""
    words = name.split(".")
    for first in range(len(words)):
        for last in range(first + 1, len(words) + 1):
            yield ".".join(words[first:last])


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A checkpoint's own quantisation."""

    method: str
    rules: tuple[tuple[str, Recipe | None], ...]         # (regular expression that must match a whole module name, its recipe)
    kv_scales: tuple[str, ...] = ()                      # patterns of tensors that hold scales of the KV cache …
    kv_format: str = "fp8"                               # … and the format that they are for
    by_name: Mapping[str, Recipe] = field(default_factory=dict, hash=False)      # of files that say it for every tensor
    held: frozenset[str] = field(default=frozenset(), hash=False, repr=False)    # modules in the files' headers; none: not known
    _by_name: RuleIndex = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", RuleIndex(self.rules))

    def recipe(self, *spellings: str) -> Recipe | None:
        """Of a module; a checkpoint with several modalities may spell its name in several ways."""
        if spellings[0] in self.by_name:
            return self.by_name[spellings[0]]
        place = self._by_name.first(spellings)
        return None if place is None else self.rules[place][1]

    def embedding_format(self, *spellings: str) -> WeightFormat | None:
        """Of the embedding, by its class or by a name or pattern of its own: the rule for all linears does not speak of it."""
        place = self._by_name.first(spellings)
        found = None if place is None or self.rules[place][0] == ANY else self.rules[place][1]
        return None if found is None else found.format


# What auto-round writes into every dialect's config: how the codes were found. The tensors mean the same.
TUNING = (
    "provider", "autoround_version", "amp", "enable_quanted_input", "enable_minmax_tuning", "enable_norm_bias_tuning", "iters",
    "lr", "minmax_lr", "nsamples", "seqlen", "train_bs", "batch_size", "gradient_accumulate_steps", "not_use_best_mse",
    "low_gpu_mem_usage", "scale_dtype", "super_bits", "super_group_size", "supported_types", "to_quant_block_names",
    "block_name_to_quantize", "quantizer", "act_group_size", "act_dynamic", "act_sym", "act_data_type", "quant_block_list",
    # Scales of the KV cache and of queries: the tensors themselves say whether they are there, and how many.
    "static_kv_dtype", "static_kv_granularity", "static_attention_dtype", "static_attention_granularity",
)
# Modules of torch's class Embedding, by the names that they have in checkpoints.
EMBEDDING = r"(?:.*\.)?(?:embed_tokens|embed_in|wte|word_embeddings|tok_embeddings)"
HEAD = r"(.*\.)?lm_head"


MOST_NAMES = 1 << 17                 # of modules in one list; every expert of a trillion parameters has 70,000


class Section:
    """A part of config.json, read key by key. What was not read is refused by name."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self.raw.get(name, default)

    def of(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(name, value, "is of the wrong type")
        return value

    def one_of(self, name: str, known: Iterable[Any], default: Any = None) -> Any:
        value, known = self.get(name, default), list(known)
        if value not in known:
            raise self.error(name, value, f"is not supported; supported: {', '.join(map(str, known))}")
        return value

    def text(self, name: str, default: str = "") -> str:
        found: str = self.of(name, str, default)
        return found

    def group(self, name: str, default: int) -> int:
        """How many inputs share a scale; -1, and 0 if that is the default: all of them."""
        size = self.get(name, default)
        if isinstance(size, bool) or not isinstance(size, int) or not (size in (-1, default) or 0 < size <= MAX_GROUP):
            raise self.error(name, size, f"is not supported; supported: -1 and sizes from 1 to {MAX_GROUP}")
        return size

    def names(self, name: str) -> list[str]:
        value = self.of(name, (list, tuple), ()) or ()
        if not all(isinstance(each, str) for each in value):
            raise self.error(name, value, "must be a list of names")
        if len(value) > MOST_NAMES:
            raise self.error(name, value, f"must list at most {MOST_NAMES:,} names, and lists {len(value):,}")
        return list(value)

    def section(self, name: str) -> Section | None:
        value = self.of(name, dict)
        return None if value is None else Section(value, f"{self.where}.{name}")

    def skip(self, *names: str) -> None:
        """Keys that change nothing in what the tensors mean."""
        self._read.update(names)

    def error(self, name: str, value: Any, why: str) -> ModelError:
        words = value if isinstance(value, str) else shown(value)
        return ModelError(f"{self.where}.{name} {shown(words)} {why}")

    def finish(self) -> None:
        """Refuses the keys that were not read, unless they are empty or false."""
        unknown = sorted(str(name) for name, value in self.raw.items() if name not in self._read and value not in
                         (None, False, {}, [], ""))
        if unknown:
            raise ModelError(f"{self.where}.{unknown[0]} is not known, and ignoring it could change the model's answers")


def is_block(value: Any) -> TypeGuard[list[int]]:
    """Two sizes: of outputs and of inputs that share a scale."""
    sizes = value if isinstance(value, (list, tuple)) else ()
    return len(sizes) == 2 and all(type(each) is int and 0 < each <= MAX_GROUP for each in sizes)


def regex(pattern: str, section: Section, key: str) -> str:
    """A regular expression of a config that must match the beginning of a name, as one that must match all of it."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise section.error(key, pattern, f"is no regular expression: {error}") from None
    if takes_long(pattern):
        raise section.error(key, pattern, f"may take very long to match: it has more than {MOST_REPEATS} repeats, or repeats a "
                            "group with repeats or alternatives")
    return f"(?:{pattern}).*"


def takes_long(pattern: str) -> bool:
    """Whether an expression may try very many ways to match a name: each repeat multiplies them by the name's length, and a
    repeated group that may match in several ways doubles them each time."""
    return repeats_ways(pattern) or num_repeats(pattern) > MOST_REPEATS


def component(name: str) -> str:
    """A name that stands for a module, for all modules with that last name, and for what is inside them; * is any part of it."""
    name = re.sub(r"\*+", "*", name)
    if any(part.count("*") > MOST_REPEATS for part in name.split(".")):
        raise ModelError(f"config.json: quantization_config: {name[:80]!r} has more than {MOST_REPEATS} stars between two dots")
    any_part = re.escape(name).replace(r"\*", "[^.]*")
    return BEFORE + any_part + BEHIND


def anywhere(name: str) -> str:
    return ANY + re.escape(name) + ANY


def glob(name: str) -> str:
    """A name in which every star stands for any text."""
    return ANY.join(map(re.escape, name.split("*")))


def beginning(name: str) -> str:
    return re.escape(name) + ANY


KV_SCALES = (r".*\.(?:self_attn|attn)\.(?:[kvq]_scale|[kv]_proj\.(?:output|[kv])_scale|attn\.[kvq]_scale|kv_scale)",)
