/* What the host does for each row and each guess of a step with drafts, in one call for all rows. The definitions are in numpy, which
   takes a dozen calls for each of these functions: runner/verify.py, runner/row_tables.py, scheduler/drafts/acceptance.py. */

#include <math.h>
#include <stdint.h>

/* The guesses of a plan, row after row, and the positions that its rows sample at: Guesses.of and Positions.of. Row r has width[r]
   guesses, from drafts[r][lengths[r] + 1 - from[r]] on; -1 behind its `reach` numbers. `samples`: rows that sample. All is written to
   `out`: number, offset, at, tokens and entries of each guess; width and first of each row that samples; its row of the table, most + 1
   numbers; and the paths. Returns how long a path is; -1 - r: row r has not reached its drafts; 0: the paths need more than `room`. */
int64_t ridgeline_lay_out_guesses(const int32_t *width, const int32_t *from, const int32_t *drafts, const int64_t *lengths,
                                  const int8_t *samples, int64_t *out, int64_t rows, int64_t reach, int64_t guesses, int64_t sampling,
                                  int64_t most, int64_t room) {
    int64_t longest = 0, drafted = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (!width[r])
            continue;
        int64_t first = lengths[r] + 1 - from[r];
        if (first < 0)
            return -1 - r;
        longest = first + width[r] > longest ? first + width[r] : longest;
        drafted++;
    }
    if (drafted * longest > room)
        return 0;
    int64_t *number = out, *offset = number + guesses, *at = offset + guesses, *tokens = at + guesses, *entries = tokens + guesses;
    int64_t *own = entries + guesses, *first = own + sampling, *table = first + sampling, *path = table + sampling * (most + 1);
    int64_t g = 0, s = 0, d = 0, positions = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t begin = lengths[r] + 1 - from[r];
        if (width[r]) {
            for (int64_t i = 0; i < longest; i++)
                path[d * longest + i] = i < reach ? drafts[r * reach + i] : -1;
            for (int64_t i = 0; i < width[r]; i++) {
                number[g + i] = r;
                offset[g + i] = i;
                at[g + i] = d * longest + begin + i;
                tokens[g + i] = path[at[g + i]];
                entries[g + i] = s * (most + 1) + i;
            }
            d++;
        }
        if (samples[r]) {
            own[s] = width[r];
            first[s] = positions;
            for (int64_t i = 0; i <= most; i++)
                table[s * (most + 1) + i] = i < width[r] ? tokens[g + i] : -1;
            positions += 1 + width[r];
            s++;
        }
        g += width[r];
    }
    return longest;
}

/* The integers of a batch by token and by row: RowTables.spread. Row r computes counts[r] tokens from position length[r] on. Tokens
   behind all rows are padding. `guesses`: of each its row and how many of the row's come before it, then its token; or null. Written to
   `out`: positions, rows, ids and newest of each token, slots in each group; where each guess is; ends and, as int32, borders and KV
   lengths of each row. Returns how many rows begin with tokens that the host knows; -1: a position is beyond the tables. */
int64_t ridgeline_spread_rows(const int64_t *rows, const int64_t *counts, const int64_t *length, const int64_t *num_given,
                              const int32_t *blocks, const int64_t *number, const int64_t *offset, const int64_t *guessed, int64_t *out,
                              int64_t num_rows, int64_t decodes, int64_t num_tokens, int64_t guesses, int64_t padding, int64_t groups,
                              int64_t table_rows, int64_t table_width, int64_t block_size, int64_t most) {
    int64_t *positions = out, *owner = positions + num_tokens, *ids = owner + num_tokens, *newest = ids + num_tokens;
    int64_t *slots = newest + num_tokens, *where = slots + groups * num_tokens, *ends = where + guesses;
    int32_t *borders = (int32_t *)(ends + num_rows), *kv_len = borders + num_rows + 1;
    int64_t token = 0, given = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        int64_t row = rows[r], start = length[row], first = token;
        given += start < num_given[row];
        borders[r] = (int32_t)token;
        ends[r] = start + counts[r];
        kv_len[r] = row == padding ? 0 : (int32_t)ends[r];
        if (ends[r] > most)                              /* the table may be wider */
            return -1;
        for (int64_t i = 0; i < counts[r]; i++, token++) {
            int64_t position = start + i, block = position / block_size;
            positions[token] = position;
            owner[token] = row;
            ids[token] = 0;
            newest[token] = -1;
            for (int64_t g = 0; g < groups; g++)
                slots[g * num_tokens + token] =
                    blocks[(g * table_rows + row) * table_width + block] * block_size + position % block_size;
        }
        if (r < decodes && counts[r])
            newest[first] = row;
    }
    borders[num_rows] = (int32_t)token;
    for (; token < num_tokens; token++) {
        positions[token] = ids[token] = 0;
        owner[token] = padding;
        newest[token] = -1;
        for (int64_t g = 0; g < groups; g++)
            slots[g * num_tokens + token] = 0;
    }
    for (int64_t i = 0; i < guesses; i++) {
        where[i] = borders[number[i]] + 1 + offset[i];
        ids[where[i]] = guessed[i] < 0 ? 0 : guessed[i];
    }
    return given;
}

/* Drafts were rejected: Runner._settle. By row that sampled: its place in the plan, its row, and its drafts and those accepted. Rows
   that have the stay they had are that much shorter: `length` of them, and by `stride` bytes what the sampler counts of them, where it
   counted ahead; so are `lengths` of the plan, and those of a step that was packed meanwhile. `scratch`: a number for each row.
   Returns how many drafts were rejected. */
int64_t ridgeline_settle_drafts(const int64_t *places, const int64_t *rows, const int64_t *width, const int64_t *accepted,
                                const int64_t *stays, const uint8_t *ahead, const int64_t *stay, int64_t *length, char *said,
                                int32_t *lengths, const int32_t *later_rows, int32_t *later_lengths, int64_t *scratch, int64_t sampling,
                                int64_t max_rows, int64_t stride, int64_t later) {
    int64_t total = 0;
    for (int64_t r = 0; later && r < max_rows; r++)
        scratch[r] = 0;
    for (int64_t r = 0; r < sampling; r++) {
        int64_t row = rows[r], rejected = width[r] - accepted[r];
        total += rejected;
        lengths[places[r]] -= (int32_t)rejected;
        if (stays[places[r]] != stay[row])
            continue;
        length[row] -= rejected;
        if (ahead[r])
            *(int64_t *)(said + row * stride) -= rejected;
        if (later)
            scratch[row] = rejected;
    }
    for (int64_t r = 0; r < later; r++)
        later_lengths[r] -= (int32_t)scratch[later_rows[r]];
    return total;
}

/* The tokens of a step with drafts: Runner._verified. Of each row of the plan `across` tokens, -1 behind those that count; first the
   number of these, `counts` of rows that do not sample. Returns how many rows end with a token that failed. */
int64_t ridgeline_drafted_tokens(const int64_t *places, const int64_t *first, const int64_t *accepted, const int64_t *tokens,
                                 const uint8_t *failed, const int32_t *counts, int32_t *out, int64_t rows, int64_t sampling,
                                 int64_t across) {
    int32_t *own = out, *said = out + rows;
    int64_t broken = 0;
    for (int64_t r = 0; r < rows; r++)
        own[r] = counts[r];
    for (int64_t i = 0; i < rows * across; i++)
        said[i] = -1;
    for (int64_t s = 0; s < sampling; s++) {
        for (int64_t i = 0; i <= accepted[s]; i++)
            said[places[s] * across + i] = (int32_t)tokens[first[s] + i];
        own[places[s]] = (int32_t)accepted[s] + 1;
        broken += failed[first[s] + accepted[s]];
    }
    return broken;
}

/* What became of the drafts of a step: RowRecords.outcome (scheduler/drafts/acceptance.py). Row r has its record in slots[r], -1: none.
   Of a record: by kind, drafts tried and accepted, and the step in which they were counted; and the drafts in flight, the oldest first,
   `flights` of them at most: their source, half of which is the kind, how many were expected, and of how many steps. What was counted
   fades with each step, and keeps `keeps` with each outcome. Written: the source of each row, -1: it had no drafts in flight; by source
   and position, drafts tried and accepted; to `right_by`, by position, those accepted of all rows; and to `sums` what was expected,
   and came of what was, and the drafts and accepted drafts of all rows. */
void ridgeline_draft_outcome(const int64_t *slots, const int64_t *width, const int64_t *accepted, double *tried, double *kept,
                             int64_t *counted, int64_t *sources, double *expected, int64_t *waiting, const double *fades, int64_t *source,
                             int64_t *tried_by, int64_t *accepted_by, int64_t *right_by, double *sums, int64_t rows, int64_t kinds, int64_t flights,
                             int64_t positions, int64_t step, int64_t num_fades, double keeps) {
    sums[0] = sums[1] = sums[2] = sums[3] = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t slot = slots[r], own = width[r], right = accepted[r];
        sums[2] += (double)own;
        sums[3] += (double)right;
        for (int64_t i = 0; i < right && i < positions; i++)
            right_by[i]++;
        source[r] = -1;
        if (slot < 0 || waiting[slot] <= 0)
            continue;
        int64_t *from = sources + slot * flights, number = from[0];
        double *promised = expected + slot * flights, hoped = promised[0];
        for (int64_t i = 0; i + 1 < flights; i++) {
            from[i] = from[i + 1];
            promised[i] = promised[i + 1];
        }
        waiting[slot]--;
        source[r] = number;
        int64_t looked = own < right + 1 ? own : right + 1;
        for (int64_t i = 0; i < looked && i < positions; i++)
            tried_by[number * positions + i]++;
        for (int64_t i = 0; i < right && i < positions; i++)
            accepted_by[number * positions + i]++;
        int64_t cell = slot * kinds + number / 2, age = step - counted[cell];
        double fade = fades[age < 0 ? 0 : age < num_fades ? age : num_fades - 1];
        tried[cell] = tried[cell] * fade * keeps + (double)looked;
        kept[cell] = kept[cell] * fade * keeps + (double)right;
        counted[cell] = step;
        sums[0] += hoped;
        sums[1] += hoped > 0 ? (double)right : 0;
    }
}

/* The chance of each draft to survive: survival() (scheduler/drafts/acceptance.py). `rates`: one row for all offers, or one each. */
void ridgeline_draft_chances(const double *rates, const double *tried, const double *accepted, const int64_t *lengths, double *chances,
                             int64_t offers, int64_t positions, int64_t rate_rows, double row_weight, double by_chance,
                             double least_spread) {
    int64_t stride = rate_rows > 1 ? positions : 0;
    double squares = 0, expected = 0, differ = 0, spread = 0;
    for (int64_t r = 0; r < offers; r++) {
        double first = rates[r * stride], variance = first * (1 - first), missing = first * tried[r] - accepted[r];
        squares += tried[r] * tried[r];
        expected += tried[r] * variance;
        differ += missing * missing;
        spread += variance;
    }
    differ = differ > expected ? differ - expected : 0;
    double unsure = differ + expected * sqrt(2.0 / (double)offers), alike = row_weight;
    if (squares > 0) {
        double worth = spread / (double)offers * squares / (unsure > 1e-9 ? unsure : 1e-9);
        alike = worth > row_weight ? worth : row_weight;
    }
    for (int64_t r = 0; r < offers; r++) {
        const double *own = rates + r * stride;
        double variance = own[0] * (1 - own[0]), missing = own[0] * tried[r] - accepted[r], chance = 1;
        double by_luck = tried[r] * variance > least_spread ? tried[r] * variance : least_spread;
        double surprise = missing > 0 ? missing * missing / by_luck / by_chance : 0;
        double weight = surprise > 1 ? alike / surprise : alike;
        for (int64_t i = 0; i < positions; i++) {
            chance *= (accepted[r] + weight * own[i]) / (tried[r] + weight);
            chances[r * positions + i] = i < lengths[r] ? chance : 0;
        }
    }
}

/* Offers, made ready to be weighed: arranged() (scheduler/drafts/weighing.py). Offer r is of the row at places[r], whose record is in
   slots[place]; see ridgeline_draft_outcome. It has ends[r] drafts, of which the first pending[place] are for tokens in flight. An
   offer of a row of which nothing is known has `first` drafts at most, unless much speaks for it, or the device makes them. Written:
   the drafts of each offer, at most allowed[place]; its slot; drafts of its row that were tried, and accepted; and of its source's
   `most` rates as many as the longest offer has drafts; these three as doubles. Returns the number of these drafts. */
int64_t ridgeline_arrange_offers(const int64_t *places, const int64_t *ends, const int64_t *source, const int64_t *pending,
                                 const int64_t *allowed, const int64_t *slots, const double *tried, const double *accepted,
                                 const int64_t *counted, int64_t *waiting, const double *fades, const double *rates, int64_t *out,
                                 int64_t offers, int64_t kinds, int64_t most, int64_t step, int64_t num_fades, int64_t grades,
                                 int64_t on_device, int64_t first) {
    int64_t *lengths = out, *slot_of = out + offers, longest = 0;
    double *own_tried = (double *)(out + 2 * offers), *own_accepted = own_tried + offers, *own_rates = own_accepted + offers;
    for (int64_t r = 0; r < offers; r++) {
        int64_t place = places[r], slot = slots[place], kind = source[r] / 2, cell = slot * kinds + kind;
        if (!pending[place])
            waiting[slot] = 0;               /* nothing is in flight: blocks were short, or memory ran out */
        int64_t age = step - counted[cell], length = ends[r] - pending[place];
        double fade = fades[age < 0 ? 0 : age < num_fades ? age : num_fades - 1];
        own_tried[r] = tried[cell] * fade;
        own_accepted[r] = accepted[cell] * fade;
        length = length < allowed[place] ? length : allowed[place];
        if (first && own_tried[r] == 0 && kind % grades < grades - 1 && source[r] < on_device && length > first)
            length = first;
        lengths[r] = length;
        slot_of[r] = slot;
        longest = length > longest ? length : longest;
    }
    for (int64_t r = 0; r < offers; r++)
        for (int64_t i = 0; i < longest; i++)
            own_rates[r * longest + i] = rates[source[r] * most + i];
    return longest;
}

/* Places sorted by chance, the best first; of equals the earlier one. `spare`: room for as many. */
static void sort_by_chance(const double *chances, int32_t *order, int32_t *spare, int64_t count) {
    for (int64_t size = 1; size < count; size *= 2) {
        for (int64_t begin = 0; begin < count; begin += 2 * size) {
            int64_t middle = begin + size < count ? begin + size : count, end = begin + 2 * size < count ? begin + 2 * size : count;
            int64_t one = begin, other = middle, to = begin;
            while (one < middle && other < end)
                spare[to++] = chances[order[other]] > chances[order[one]] ? order[other++] : order[one++];
            while (one < middle)
                spare[to++] = order[one++];
            while (other < end)
                spare[to++] = order[other++];
        }
        for (int64_t i = 0; i < count; i++)
            order[i] = spare[i];
    }
}

/* The drafts that promise the most tokens a second: Controller._best, where no draft model makes any. `bounds`: of a row's queries, one
   after the other; `seconds` and `sure`: of each bound, by size. `promised`: by a step without drafts. `curiosity`: how much faster a
   size that is not sure is believed to be. Written: for each of `rows` places how many drafts it has. `scratch`: three int32 and a
   double for each chance. Returns how many drafts there are. */
int64_t ridgeline_choose_drafts(const double *chances, const int64_t *places, const int64_t *bounds, const int64_t *sizes,
                                const double *seconds, const uint8_t *sure, int64_t *out, void *scratch, int64_t offers,
                                int64_t positions, int64_t rows, int64_t room, int64_t num_bounds, int64_t num_sizes, double honesty,
                                double least, double promised, double curiosity) {
    int64_t all = offers * positions, likely = 0, number = 0, first = 0;
    double *gained = scratch;
    int32_t *order = (int32_t *)(gained + all), *kept = order + all, *best = kept + all;
    for (int64_t i = 0; i < all; i++)
        if (chances[i] > least)
            order[likely++] = (int32_t)i;
    sort_by_chance(chances, order, kept, likely);
    while (first < num_sizes && sizes[first] < rows + 1)
        first++;
    for (int64_t b = 0; b < num_bounds; b++) {
        int64_t count = 0, found = 0;
        double sum = 0, rate = 0;
        for (int64_t i = 0; i < likely && count < room; i++)
            if (order[i] % positions < bounds[b] - 1) {
                sum += honesty * chances[order[i]];
                gained[count] = sum;
                kept[count++] = order[i];
            }
        for (int64_t s = first; s < num_sizes && count; s++) {
            int64_t some = sizes[s] - rows < count ? sizes[s] - rows : count;
            double own = ((double)rows + gained[some - 1]) / seconds[b * num_sizes + s];
            own = sure[b * num_sizes + s] ? own : curiosity * own;
            if (own > rate) {
                rate = own;
                found = some;
            }
            if (sizes[s] >= rows + count)
                break;
        }
        if (rate > promised) {
            promised = rate;
            number = found;
            for (int64_t i = 0; i < number; i++)
                best[i] = kept[i];
        }
        if (bounds[b] > positions)
            break;
    }
    for (int64_t r = 0; r < rows; r++)
        out[r] = 0;
    for (int64_t i = 0; i < number; i++)
        out[places[best[i] / positions]]++;
    return number;
}

/* These drafts are planned: RowRecords.send, for offers of which width[place] drafts are verified, if any. `promise`: what they are
   expected to bring counts. Returns 0; -1: a row has drafts of `flights` steps in flight already. */
int64_t ridgeline_send_drafts(const int64_t *places, const int64_t *slots, const int64_t *source, const int64_t *width,
                              const double *chances, const double *known, int64_t *sources, double *expected, int64_t *waiting,
                              int64_t offers, int64_t positions, int64_t flights, int64_t promise) {
    for (int64_t r = 0; r < offers; r++)
        if (width[places[r]] && waiting[slots[r]] >= flights)
            return -1;
    for (int64_t r = 0; r < offers; r++) {
        int64_t own = width[places[r]], place = slots[r] * flights + waiting[slots[r]];
        double sum = 0;
        if (!own)
            continue;
        for (int64_t i = 0; i < own && i < positions; i++)
            sum += chances[r * positions + i];
        sources[place] = source[r];
        expected[place] = promise && known[r] > 0 ? sum : 0;
        waiting[slots[r]]++;
    }
    return 0;
}
