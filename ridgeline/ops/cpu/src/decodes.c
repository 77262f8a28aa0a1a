/* What the host does for each row of a step in which all rows decode, in one call for all of them. The definitions are the numpy of
   steps of any kind: scheduler/scheduler.py, scheduler/running.py, scheduler/bookkeeping.py, scheduler/answers.py.

   `columns` are numbers by row, `max_rows` of each kind, as in scheduler/row_table.py. */

#include <stdint.h>

enum { KNOWN, COMPUTED, LIMIT, BLOCKS, COMMITTED, STAY, ARRIVED };

/* Rows that decoded in the step before: Scheduler._give_to_running and Running.grow. Written: the keys that all of them read; then by
   place the most drafts of a row, at most allowed[r] and `most`, the tokens of it in flight, and those that have arrived; then the
   places of rows that lack a block. Returns how many those are; -1: not every row has one token to compute, below its limit, with one
   block more at most. */
int64_t ridgeline_decode_again(const int64_t *rows, const int64_t *columns, const int64_t *allowed, int64_t *out, int64_t count,
                               int64_t max_rows, int64_t most, int64_t block_size) {
    const int64_t *known = columns + KNOWN * max_rows, *computed = columns + COMPUTED * max_rows, *limit = columns + LIMIT * max_rows;
    const int64_t *blocks = columns + BLOCKS * max_rows, *arrived = columns + ARRIVED * max_rows;
    int64_t *drafts = out + 1, *pending = drafts + count, *there = pending + count, *lacking = there + count;
    int64_t keys = 0, number = 0;
    for (int64_t r = 0; r < count; r++) {
        int64_t row = rows[r], missing = computed[row] + 1 - blocks[row] * block_size;
        if (known[row] - computed[row] != 1 || known[row] >= limit[row] || missing > block_size)
            return -1;
        keys += computed[row];
        int64_t own = limit[row] - known[row] - 1;
        own = own < allowed[r] ? own : allowed[r];
        own = own < most ? own : most;
        drafts[r] = own > 0 ? own : 0;
        pending[r] = known[row] - arrived[row];
        there[r] = arrived[row];
        if (missing > 0)
            lacking[number++] = r;
    }
    out[0] = keys;
    return number;
}

/* Drafts for rows that decode: _check, _with_blocks and _ordered (scheduler/draft_slots.py). Written: how many rows have some, the
   drafts of all, and whether rows without drafts come first; then the places of rows that lack a block for theirs. Returns how many
   those are; -1: one lacks several; -2: a row has more drafts than `most`, or all have more than `room`. */
int64_t ridgeline_lay_drafts(const int64_t *rows, const int64_t *columns, const int32_t *width, const int64_t *most, int64_t *out,
                             int64_t count, int64_t max_rows, int64_t room, int64_t block_size) {
    const int64_t *computed = columns + COMPUTED * max_rows, *blocks = columns + BLOCKS * max_rows;
    int64_t *lacking = out + 3, number = 0, drafted = 0, total = 0, in_order = 1, several = 0;
    for (int64_t r = 0; r < count; r++) {
        int64_t missing = computed[rows[r]] + 1 + width[r] - blocks[rows[r]] * block_size;
        if (width[r] < 0 || width[r] > most[r])
            return -2;
        total += width[r];
        drafted += width[r] > 0;
        in_order &= r == 0 || !width[r - 1] || width[r];
        several |= missing > block_size;
        if (missing > 0)
            lacking[number++] = r;
    }
    out[0] = drafted;
    out[1] = total;
    out[2] = in_order;
    return total > room ? -2 : several ? -1 : number;
}

/* They are planned: Scheduler._plan. `width`: drafts of each; or null. Written: where each row ends, and its stay. Returns the tokens. */
int64_t ridgeline_book_decodes(const int64_t *rows, int64_t *columns, const int32_t *width, int64_t *out, int64_t count,
                               int64_t max_rows) {
    int64_t *known = columns + KNOWN * max_rows, *computed = columns + COMPUTED * max_rows, *ends = out, *stays = out + count;
    const int64_t *stay = columns + STAY * max_rows;
    int64_t total = 0;
    for (int64_t r = 0; r < count; r++) {
        int64_t row = rows[r], own = width ? 1 + width[r] : 1;
        known[row] += own;
        computed[row] += own;
        ends[r] = computed[row];
        stays[r] = stay[row];
        total += own;
    }
    return total;
}

/* Their result: InFlight.check, Answers.settle, _quick, _say_more and _commit. Row r brings num_new[r] of its `across` tokens. `ending`:
   by token + 1, tokens that end answers. `later`: the rows, stays and ends of a step that was planned meanwhile, or none. Written: how
   many rows go on with nothing to tell but their tokens, their tokens together, those of them with full blocks, and tokens of rejected
   drafts of rows that are still there; then the places of the others, and those with full blocks; then, as int32, the number of tokens of
   each row that goes on, and these tokens. `scratch`: two numbers for each row of the table. Returns 0; -1: that is not what was planned,
   and nothing has changed. */
int64_t ridgeline_take_in_decodes(const int64_t *rows, const int64_t *stays, const int64_t *ends, const int32_t *width,
                                  const int32_t *tokens, const int32_t *num_new, const int32_t *lengths, int64_t *columns,
                                  const uint8_t *simple, const int32_t *ending, const int64_t *later_rows, const int64_t *later_stays,
                                  int64_t *later_ends, int64_t *out, int64_t *scratch, int64_t count, int64_t across, int64_t max_rows,
                                  int64_t num_ending, int64_t later, int64_t block_size) {
    int64_t *known = columns + KNOWN * max_rows, *computed = columns + COMPUTED * max_rows, *arrived = columns + ARRIVED * max_rows;
    const int64_t *limit = columns + LIMIT * max_rows, *committed = columns + COMMITTED * max_rows, *stay = columns + STAY * max_rows;
    int64_t *surplus_of = scratch, *stay_of = scratch + max_rows, *others = out + 4, *full = others + count;
    int32_t *counts = (int32_t *)(full + count), *said = counts + count;
    int64_t rejected = 0;
    for (int64_t r = 0; r < count; r++) {
        int64_t own = width ? width[r] : 0, surplus = 1 + own - num_new[r];
        if (surplus < 0 || surplus > own || num_new[r] > across || lengths[r] != ends[r] - surplus)
            return -1;
        rejected += surplus;
    }
    if (rejected && later) {
        for (int64_t r = 0; r < max_rows; r++)
            surplus_of[r] = stay_of[r] = 0;
        for (int64_t r = 0; r < count; r++) {
            surplus_of[rows[r]] = 1 + width[r] - num_new[r];
            stay_of[rows[r]] = stays[r];
        }
        for (int64_t r = 0; r < later; r++)
            if (stay_of[later_rows[r]] == later_stays[r])
                later_ends[r] -= surplus_of[later_rows[r]];
    }
    int64_t quick = 0, num_others = 0, num_full = 0, num_said = 0, unused = 0;
    for (int64_t r = 0; r < count; r++) {
        int64_t row = rows[r], there = stay[row] == stays[r];
        const int32_t *own = tokens + r * across;
        if (there) {
            int64_t surplus = (width ? 1 + width[r] : 1) - num_new[r];
            known[row] -= surplus;
            computed[row] -= surplus;
            unused += surplus;
        }
        int64_t goes_on = there && simple[row] && arrived[row] + num_new[r] < limit[row];
        for (int64_t i = 0; goes_on && i < across; i++) {        /* there is no token -1, and none ends an answer beyond the table */
            int64_t place = (int64_t)own[i] + 1;
            goes_on = place < 0 || place >= num_ending || !ending[place];
        }
        if (!goes_on) {
            others[num_others++] = r;
            continue;
        }
        if (lengths[r] / block_size > committed[row])
            full[num_full++] = r;
        arrived[row] += num_new[r];
        counts[quick++] = num_new[r];
        for (int32_t i = 0; i < num_new[r]; i++)
            said[num_said++] = own[i];
    }
    out[0] = quick;
    out[1] = num_said;
    out[2] = num_full;
    out[3] = unused;
    return 0;
}
