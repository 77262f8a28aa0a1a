"""The sampler: every row's sampling parameters and state, and the order in which a batch goes through ops/sampling/sample.py.

Parameters are numpy columns on the host, so which stages a batch needs is decided without asking the device; a stage
that no row of the batch uses is not run, and a batch of plain greedy rows is one argmax. State that depends on sampled
tokens (the ids of a row's text) is on the device, and nothing here waits for it. A row's state follows from its
RowAdded alone: a row that is added again with more tokens continues as if it had not been removed.

Logits that a row edits are copied, in parts of bounded size, and sampled from the copy.

It knows rows and token ids. Stop strings, max_tokens and log-probabilities are handled elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ridgeline.messages import RowAdded
from ridgeline.ops.sampling.noise import to_device
from ridgeline.ops.sampling.sample import (
    CHOICE,
    Choices,
    apply_mask,
    apply_penalties,
    has_kernels,
    keep_only,
    reserve,
    sample,
    send_choices,
    takes_masks,
)
from ridgeline.ops.sampling.sample_kernels import draw
from ridgeline.sizes.sampling_costs import KNOWN_IDS, edited_rows

LONG_LIST = 512                      # more allowed ids than these are kept as a mask of the vocabulary
GREEDY_BELOW = 1e-5                  # a lower temperature is greedy: dividing by it would overflow

# What a row does to its logits before a token is chosen.
_EDIT = np.dtype([
    ("edited", np.bool_),            # any of the next five
    ("constrained", np.bool_),       # it has a grammar
    ("allowed", np.bool_), ("bad_words", np.bool_), ("biased", np.bool_), ("penalized", np.bool_),
    ("min_tokens", np.int64),
    ("repetition", np.float64), ("presence", np.float64), ("frequency", np.float64),
    ("remembers", np.bool_), ("num_known", np.int64),        # rows with a `known` list, and its length
])


@dataclass(slots=True)
class Sampled:
    tokens: Tensor                   # int64 [S], on the device
    failed: Tensor                   # bool [S]: the logits held a NaN or an infinity, or no id was left to choose
    none_left: Tensor | None = None  # bool [S]: of these, rows whose logits were sound; None: no row changes its logits


@dataclass(slots=True)
class Prepared:
    """How rows will choose in their next step: all of it that depends neither on logits nor on masks."""

    rows: np.ndarray                 # int64
    how: np.ndarray                  # CHOICE, of these rows …
    edit: np.ndarray                 # … and _EDIT
    too_early: np.ndarray            # bool: they may not end yet
    edited: np.ndarray               # bool: something changes their logits
    only_masked: bool                # … and a grammar's mask is all that does
    choices: Choices | None          # on the device already
    straight: bool                   # kernels do all of it, from the model's logits (`sample_into`)
    lasting: bool                    # … and the same holds for the next steps of these rows


class _RowLists:
    """A list per row of (id, what belongs to it), kept as flat columns so that a step needs no loop over its rows."""

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[np.ndarray, ...]] = {}
        self._flat: tuple[np.ndarray, ...] | None = None     # row, id, …; made anew after a row came or went

    def put(self, row: int, *columns: np.ndarray) -> None:
        self._by_row[row] = columns
        self._flat = None

    def drop(self, row: int) -> None:
        if self._by_row.pop(row, None) is not None:
            self._flat = None

    def select(self, place: np.ndarray) -> tuple[np.ndarray, ...]:
        """The entries of the rows that have a place (>= 0) in the batch: place, id, and the other columns."""
        if self._flat is None:
            rows = np.repeat(list(self._by_row), [len(columns[0]) for columns in self._by_row.values()])
            self._flat = (rows, *map(_concatenate, zip(*self._by_row.values(), strict=True)))
        rows, *columns = self._flat
        places = place[rows]
        chosen = np.flatnonzero(places >= 0)
        return places[chosen], *(column[chosen] for column in columns)


class _Allowed:
    """Lists of allowed ids. A long one is kept as a mask of what it forbids, which the answers of one request share."""

    def __init__(self, vocab_size: int) -> None:
        self.few = _RowLists()
        self._by_row: dict[int, np.ndarray] = {}
        self._newest: tuple[list[int], np.ndarray] | None = None
        self._vocab_size = vocab_size

    def put(self, row: int, ids: list[int]) -> None:
        if len(ids) <= LONG_LIST:
            self.few.put(row, np.array(ids, np.int64))
            return
        if self._newest is None or self._newest[0] != ids:       # by value: on other ranks each row's list was read anew
            forbidden = np.ones(self._vocab_size, np.bool_)
            forbidden[ids] = False
            self._newest = ids, forbidden
        self._by_row[row] = self._newest[1]

    def drop(self, row: int) -> None:
        self.few.drop(row)
        self._by_row.pop(row, None)

    def apply(self, logits: Tensor, rows: np.ndarray) -> np.ndarray:
        """Forbid in the logits of these rows what their lists do not allow. bool [R]: rows without a long list."""
        shared: dict[int, list[int]] = {}
        others = np.ones(len(rows), np.bool_)
        for place, row in enumerate(rows.tolist() if self._by_row else ()):
            if row in self._by_row:
                others[place] = False
                shared.setdefault(id(self._by_row[row]), []).append(place)
        for places in shared.values():
            forbidden = to_device(self._by_row[int(rows[places[0]])], logits.device)
            if len(places) == len(rows):
                logits.masked_fill_(forbidden, -torch.inf)
            else:
                where = to_device(np.array(places), logits.device)
                logits.index_copy_(0, where, logits.index_select(0, where).masked_fill_(forbidden, -torch.inf))
        return others


def _concatenate(parts: tuple[np.ndarray, ...]) -> np.ndarray:
    """Along the entries; lists of tokens are right-aligned and padded with -1."""
    if parts[0].ndim == 1:
        return np.concatenate(parts)
    width = max(part.shape[1] for part in parts)
    return np.concatenate([np.pad(part, ((0, 0), (width - part.shape[1], 0)), constant_values=-1) for part in parts])


class Sampler:
    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        eos_token_ids: set[int],
        device: torch.device | str,
        logits_dtype: torch.dtype,
        most_verified: int = 0,
    ) -> None:
        """`most_verified`: positions that a step with drafts samples at."""
        self._vocab_size = vocab_size
        self._eos_token_ids = [token for token in eos_token_ids if 0 <= token < vocab_size]
        self._device = torch.device(device)
        self._dtype = logits_dtype
        self._choice = np.zeros(max_rows, CHOICE)
        self._edit = np.zeros(max_rows, _EDIT)
        self._plain = np.zeros(max_rows, np.bool_)           # rows that have taken their best id from the first on
        self._place = np.full(max_rows, -1)                  # row -> place in the batch, while one is sampled
        self._allowed = _Allowed(vocab_size)
        self._bad_words, self._stops, self._biases = (_RowLists() for _ in range(3))
        # For rows with penalties or bad words: the prompt's distinct ids and then the answer, and how often each is in the
        # answer. A row's unused columns repeat its first id, which is harmless where each occurrence of an id says the same.
        self._known = torch.zeros((max_rows, KNOWN_IDS), dtype=torch.int64, device=self._device)
        self._counts = torch.zeros((max_rows, KNOWN_IDS), dtype=torch.int32, device=self._device)
        wide = torch.promote_types(logits_dtype, torch.float32)
        num_edited = edited_rows(rows=max_rows, vocab=vocab_size, element_bytes=wide.itemsize)
        self._edited_logits = torch.empty((num_edited, vocab_size), dtype=wide, device=self._device)
        reserve(self._device, logits_dtype, max(max_rows, most_verified), vocab_size)

    # ── rows come and go ─────────────────────────────────────────────────────────────────────────────────────────────

    def add_row(self, row: int, added: RowAdded) -> None:
        self.remove_row(row)
        params = added.params
        index = len(added.token_ids) - added.num_prompt
        self._choice[row] = (
            added.seed % 2**64,
            index,
            params.temperature if params.temperature >= GREEDY_BELOW else 0.0,
            params.min_p,
            params.top_k if params.top_k < self._vocab_size else 0,
            params.top_p,
            params.typical_p,
        )
        if params.allowed_token_ids is not None:
            self._allowed.put(row, params.allowed_token_ids)
        if added.bad_words_token_ids:
            self._put_bad_words(row, added.bad_words_token_ids)
        if params.logit_bias:
            bias = params.logit_bias
            self._biases.put(row, np.array(list(bias), np.int64), np.array(list(bias.values()), np.float64))
        if index < params.min_tokens:
            self._stops.put(row, np.array([*self._eos_token_ids, *params.stop_token_ids], np.int64))
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        flags = (
            params.allowed_token_ids is not None,
            bool(added.bad_words_token_ids),
            bool(params.logit_bias),
            penalties != (1.0, 0.0, 0.0),
        )
        remembers = flags[3] or any(len(word) > 1 for word in added.bad_words_token_ids)
        num_known = self._remember(row, added, penalized=flags[3]) if remembers else 0
        # With a grammar, masks also keep an answer from ending early: they alone know whether it can go on.
        constrained = params.structured_outputs is not None
        min_tokens = 0 if constrained else params.min_tokens
        edited = constrained or any(flags)
        self._edit[row] = (edited, constrained, *flags, min_tokens, *penalties, remembers, num_known)
        self._plain[row] = not edited and params.temperature < GREEDY_BELOW and index >= min_tokens

    def remove_row(self, row: int) -> None:
        for lists in (self._allowed, self._bad_words, self._stops, self._biases):
            lists.drop(row)

    def _put_bad_words(self, row: int, words: list[list[int]]) -> None:
        """A word forbids its last token wherever the tokens before it have just been said."""
        width = max(len(word) for word in words) - 1
        prefix = np.array([[-1] * (width - len(word) + 1) + word[:-1] for word in words], np.int64)
        last = np.array([word[-1] for word in words], np.int64)
        length = np.array([len(word) - 1 for word in words], np.int64)
        self._bad_words.put(row, last, prefix.reshape(len(words), width), length)

    def _remember(self, row: int, added: RowAdded, penalized: bool) -> int:
        tokens = added.token_ids.astype(np.int64)
        prompt, answer = tokens[: added.num_prompt], tokens[added.num_prompt :]
        known = np.concatenate([np.unique(prompt), answer]) if penalized else answer
        while len(known) > self._known.shape[1]:
            self._widen_known()
        if len(known):
            said, inverse = np.unique(np.concatenate([answer, known]), return_inverse=True)
            counts = np.bincount(inverse[: len(answer)], minlength=len(said))[inverse[len(answer) :]].astype(np.int32)
            for table, values in ((self._known, known), (self._counts, counts)):
                table[row] = int(values[0])
                table[row, : len(values)] = to_device(values, self._device)
        return len(known)

    def _widen_known(self) -> None:
        self._known, self._counts = (
            torch.cat([table, table[:, :1].expand_as(table)], dim=1) for table in (self._known, self._counts)
        )

    # ── a step ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare_early(self, rows: np.ndarray, before: Prepared | None = None) -> Prepared | None:
        """With a grammar among them this is worth doing before their masks are there, while the device computes: else None.
        `before`: of the same rows, for the step before."""
        if before is not None and before.lasting:
            return before
        return self.prepare(rows) if self._edit["constrained"][rows].any() else None

    def prepare(self, rows: np.ndarray) -> Prepared:
        """For (distinct) rows that will be sampled next."""
        rows = rows.astype(np.int64)
        how, edit = self._choice[rows], self._edit[rows]
        too_early = how["index"] < edit["min_tokens"]
        changed = too_early | edit["allowed"] | edit["bad_words"] | edit["biased"] | edit["penalized"]
        edited = edit["edited"] | too_early
        model_s = not changed.any()                      # the model's own logits, but for masks
        only_masked = model_s and bool(edited.any())
        choices = send_choices(how, self._device, self._dtype, self._vocab_size) if only_masked else None
        random = how["temperature"] > 0
        some_random = bool(random.any())
        straight = model_s and has_kernels(self._device, self._dtype, self._vocab_size)
        if straight and some_random:                     # typical_p needs a sort; filters look at logits alone
            filtered = (how["top_k"] > 0) | (how["top_p"] < 1) | (how["min_p"] > 0)
            straight = not (random & ((how["typical_p"] < 1) | (filtered & only_masked))).any()
        return Prepared(rows, how, edit, too_early, edited, only_masked, choices, straight, straight and not some_random)

    def sample_into(
        self, logits: Tensor, ready: Prepared, masks: Tensor | None, room: tuple[Tensor, Tensor], places: Tensor,
        last_token: Tensor,
    ) -> None:
        """As `sample`, of rows that are `straight`, with a launch or two and nothing else: tokens and which of them failed into
        `room`, and the tokens into last_token[places]."""
        choices = ready.choices
        if choices is None and not ready.lasting:
            choices = send_choices(ready.how, self._device, self._dtype, self._vocab_size)
        draw(logits, choices, *room, places, last_token, masks)
        self._choice["index"][ready.rows] += 1

    def sample(
        self, logits: Tensor, rows: np.ndarray, masks: Tensor | None = None, prepared: Prepared | None = None,
        late: Tensor | None = None,
    ) -> Sampled:
        """One token for each of the (distinct) rows, from logits [S, V], which are left as they are.

        `masks` are the ids a grammar allows, bool [S, V] or packed int32 [S, ceil(V / 32)] with the lowest id in the
        lowest bit. They count for rows with structured_outputs. `prepared`: what `prepare` has made of these rows.
        `late` [S]: tokens that rows have said less than is counted here; of rows that edit their logits, but for a mask, none.
        """
        ready = prepared or self.prepare(rows)
        rows, how, edit, too_early, edited = ready.rows, ready.how, ready.edit, ready.too_early, ready.edited
        none_left: Tensor | None = None
        if not edited.any():
            tokens, failed = sample(logits, how, late=late)
        elif masks is not None and ready.only_masked and takes_masks(logits, how, masks):
            # Rows without a grammar have masks that allow everything.
            tokens, failed = sample(logits, how, masks, ready.choices, late)
        else:
            places = np.flatnonzero(edited)
            if len(places) < len(rows):
                others = how.copy()
                others["temperature"][places] = 0
                tokens, failed = sample(logits, others, late=late)
            else:
                tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
                failed = torch.empty(len(rows), dtype=torch.bool, device=self._device)
            none_left = torch.zeros_like(failed)
            for part in self._parts(places):
                edits = functools.partial(self._edit_logits, chosen=(rows[part], how[part], edit[part], too_early[part]))
                place, chosen, broken, left = self._sample_edited(logits, masks, how, part, edits, late)
                if place is None:
                    tokens, failed, none_left = chosen, left | broken, left & ~broken
                else:
                    tokens.index_copy_(0, place, chosen)
                    failed.index_copy_(0, place, left | broken)
                    none_left.index_copy_(0, place, left & ~broken)
        self._choice["index"][rows] += 1
        if edit["remembers"].any():
            self._say(rows, edit, tokens)
        return Sampled(tokens, failed, none_left)

    def sample_ahead(
        self, logits: Tensor, rows: np.ndarray, offsets: np.ndarray, late: Tensor | None = None, masks: Tensor | None = None,
    ) -> Sampled:
        """A token for each of the logits [S, V], of rows that only a grammar edits: `offsets` [S] tokens after the row's
        next one. The rows stay as they are until `said_ahead`. `late`: see `sample`; `masks` [S, words]: what is allowed if all
        tokens before are those of the drafts; None: no row has a grammar."""
        how = self.choices(rows, offsets)
        if masks is None:
            return Sampled(*sample(logits, how, late=late))
        if takes_masks(logits, how, masks):
            return Sampled(*sample(logits, how, masks, late=late))
        found = [self._sample_edited(logits, masks, how, part, late=late)[1:] for part in self._parts(np.arange(len(rows)))]
        tokens, broken, left = (torch.cat(parts) for parts in zip(*found, strict=True))
        return Sampled(tokens, left | broken, left & ~broken)

    def draw_ahead(
        self, logits: Tensor, rows: np.ndarray, offsets: np.ndarray, late: Tensor | None, masks: Tensor | None,
        room: tuple[Tensor, Tensor],
    ) -> bool:
        """As `sample_ahead`, with a launch or two, of rows that choose from the model's logits or under a mask: tokens and which
        of them failed into `room`. False: these rows, or this device, need more."""
        how = self.choices(rows, offsets)
        straight = has_kernels(self._device, self._dtype, self._vocab_size) and not (how["typical_p"] < 1).any()
        if not straight or (masks is not None and not takes_masks(logits, how, masks)):
            return False
        choices = send_choices(how, self._device, self._dtype, self._vocab_size)
        if choices is not None and late is not None:
            choices.integers[1, : len(how)].sub_(late)
        draw(logits, choices, *room, mask=masks)
        return True

    def _parts(self, places: np.ndarray) -> list[np.ndarray]:
        """As many at a time as there is room for edited logits."""
        size = len(self._edited_logits)
        return [places[start : start + size] for start in range(0, len(places), size)]

    def _sample_edited(
        self, logits: Tensor, masks: Tensor | None, how: np.ndarray, part: np.ndarray,
        edit: Callable[[Tensor], None] | None = None, late: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        """From copies of the logits at these places: the places on the device (None: all), tokens, whether the model's logits are
        broken, and whether no token is left."""
        copied = self._edited_logits[: len(part)]
        broken = torch.empty(len(part), dtype=torch.bool, device=self._device)
        place = None if len(part) == len(how) else to_device(part, self._device)
        given = logits, masks, late
        own, allowed, behind = (each if each is None or place is None else each.index_select(0, place) for each in given)
        assert own is not None
        apply_mask(own, allowed, copied, broken)                 # nor may a mask hide that a row is broken
        if edit is not None:
            edit(copied)
        tokens, left = sample(copied, how[part], late=behind)
        return place, tokens, broken, left

    def choices(self, rows: np.ndarray, offsets: np.ndarray | int = 0) -> np.ndarray:
        """CHOICE: how these rows choose the token that is `offsets` after their next one."""
        how = self._choice[rows]
        how["index"] += offsets
        return how

    def said_ahead(self, rows: np.ndarray, counts: np.ndarray) -> None:
        """Advance the output index of these rows by `counts`. With drafts in flight that is the most they can have sampled;
        rejected drafts are taken back."""
        self._choice["index"][rows] += counts

    @functools.cached_property
    def said_at(self) -> tuple[int, int]:
        """Where native code finds the output index of rows: the address of the first one, and the bytes to the next."""
        index = self._choice["index"]
        return index.ctypes.data, index.strides[0]

    def edits(self, rows: np.ndarray) -> np.ndarray:
        """bool: rows whose logits are, or may become, others than the model's; each of their tokens may change the next one's."""
        edit = self._edit[rows]
        return edit["edited"] | (self._choice["index"][rows] < edit["min_tokens"])

    def only_masked(self, rows: np.ndarray) -> np.ndarray:
        """bool: rows whose logits nothing but a grammar's mask changes."""
        edit = self._edit[rows]
        return edit["constrained"] & ~(edit["allowed"] | edit["bad_words"] | edit["biased"] | edit["penalized"])

    def all_greedy(self, rows: np.ndarray) -> bool:
        """Does each of the rows take its best id? Then the forward pass may choose it, and calls `said_greedily`."""
        if self._plain[rows].all():
            return True
        how, edit = self._choice[rows], self._edit[rows]
        return not ((how["temperature"] > 0) | edit["edited"] | (how["index"] < edit["min_tokens"])).any()

    def said_greedily(self, rows: np.ndarray) -> None:
        """The forward pass has chosen the best id for each of the rows, for which `all_greedy` holds."""
        self._choice["index"][rows] += 1

    def _edit_logits(self, logits: Tensor, chosen: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]) -> None:
        """`chosen`: rows, how they choose, what edits their logits, whether they may not end yet."""
        rows, how, edit, too_early = chosen
        place = self._place
        place[rows] = np.arange(len(rows))
        if edit["allowed"].any() and (few := edit["allowed"] & self._allowed.apply(logits, rows)).any():
            where, ids = self._to_device(*self._allowed.few.select(place))
            keep_only(logits, to_device(np.flatnonzero(few), self._device), where, ids)
        if edit["bad_words"].any():
            self._forbid_bad_words(logits, rows, how, edit)
        if too_early.any():
            where, ids = self._stops.select(place)
            early = too_early[where]
            logits.index_put_(self._to_device(where[early], ids[early]), logits.new_full((), -torch.inf))
        if edit["biased"].any():
            where, ids, bias = self._to_device(*self._biases.select(place))
            logits[where, ids] += bias.to(logits.dtype)
        if edit["penalized"].any():
            self._penalize(logits, rows, edit)
        place[rows] = -1

    def _forbid_bad_words(self, logits: Tensor, rows: np.ndarray, how: np.ndarray, edit: np.ndarray) -> None:
        where, last, prefix, length = self._bad_words.select(self._place)
        back = np.arange(-prefix.shape[1], 0)
        column = np.maximum(edit["num_known"][where, None] + back, 0)
        long_enough = how["index"][where] >= length          # the words are looked for in the answer alone
        row, column, where, last, prefix, long_enough = self._to_device(
            rows[where], column, where, last, prefix, long_enough
        )
        said = ((self._known[row[:, None], column] == prefix) | (prefix < 0)).all(-1) & long_enough
        # Added, because two words may end alike and only one of them have been begun.
        forbid = torch.zeros_like(last, dtype=logits.dtype).masked_fill_(said, -torch.inf)
        logits.index_put_((where, last), forbid, accumulate=True)

    def _penalize(self, logits: Tensor, rows: np.ndarray, edit: np.ndarray) -> None:
        places = np.flatnonzero(edit["penalized"])
        edit = edit[places]
        place, row = self._to_device(places, rows[places])
        width = int(edit["num_known"].max())
        known, counts = self._known[row, :width], self._counts[row, :width]
        amounts = np.stack([edit["repetition"], edit["presence"], edit["frequency"]])[:, :, None]
        repetition, presence, frequency = to_device(amounts, self._device).to(logits.dtype)
        apply_penalties(logits, place, known, counts, repetition, presence, frequency)

    def _say(self, rows: np.ndarray, edit: np.ndarray, tokens: Tensor) -> None:
        """Remember the sampled ids of rows with penalties or bad words."""
        places = np.flatnonzero(edit["remembers"])
        num_known = edit["num_known"][places]
        if num_known.max() == self._known.shape[1]:
            self._widen_known()
        place, row, column = self._to_device(places, rows[places], num_known)
        said = tokens[place]
        again = self._known[row] == said[:, None]
        counts = self._counts[row]
        once_more = counts.masked_fill(~again, 0).amax(dim=1) + 1
        self._counts[row] = counts + again
        self._known[row, column] = said
        self._counts[row, column] = once_more
        self._edit["num_known"][rows[places]] += 1

    def _to_device(self, *arrays: np.ndarray) -> tuple[Tensor, ...]:
        return tuple(to_device(array, self._device) for array in arrays)
