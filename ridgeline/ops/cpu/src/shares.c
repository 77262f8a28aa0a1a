/* How the keys of decode rows are divided among CTAs, in one call. The definition is the numpy of ops/attention/split_kv.py: the same
   shares, to the last bit of what they are chosen by. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_SHARE = 64, SHARE_UNIT = 32, MOST_SHARES = 64, ROUNDS_APART = 4, LONG_SHARE = 480, SHARE_COST = 60 };
#define ALIKE 1.5
#define CLEARLY 0.89
#define NEARLY_EMPTY 0.3
#define TO_WHOLE 6755399441055744.0  /* 1.5 * 2^52: a double below 2^51 has no place for a fraction once this is added to it */

/* _dealt: into how many shares each row is cut. Returns how many those are together. */
static int64_t deal(const double *lengths, int64_t rows, double even, int64_t limit, int32_t *shares) {
    even = even > LEAST_SHARE ? even : LEAST_SHARE;
    for (;; even *= 1.1) {
        int32_t total = 0;
        for (int64_t r = 0; r < rows; r++) {
            double count = (lengths[r] / even + TO_WHOLE) - TO_WHOLE;
            count = count < MOST_SHARES ? count : MOST_SHARES;
            shares[r] = (int32_t)(count > 1.0 ? count : 1.0);
            total += shares[r];
        }
        if (total <= limit)
            return total;
    }
}

/* _sizes, in units. The quotient of such numbers is never rounded up to the next whole one. */
static inline int32_t units(double length, int32_t shares) {
    double divisor = (double)shares * SHARE_UNIT;
    int32_t found = (int32_t)((length + divisor - 1.0) / divisor);
    return found > 1 ? found : 1;
}

/* _end: estimated end of the last wave of CTAs, in keys. The longest shares come first, `programs` of them at once: of each wave the
   first is the longest. `sizes`: room for a number of each row; `buckets`: zeros, as many as a row has units and one more. */
static int64_t end_of(const double *lengths, const int32_t *shares, int64_t rows, int64_t programs, int32_t *sizes, int32_t *buckets) {
    int32_t most = 0, least = INT32_MAX;
    for (int64_t r = 0; r < rows; r++) {
        sizes[r] = units(lengths[r], shares[r]);
        most = sizes[r] > most ? sizes[r] : most;
        least = sizes[r] < least ? sizes[r] : least;
    }
    for (int64_t r = 0; r < rows; r++)
        buckets[sizes[r]] += shares[r];
    int64_t before = 0, waves = 0, keys = 0;
    for (int32_t size = most; size >= least; size--) {
        before += buckets[size];
        buckets[size] = 0;
        int64_t begun = (before + programs - 1) / programs;          /* waves whose first share is at least this long */
        keys += (begun - waves) * size;
        waves = begun;
    }
    return keys * SHARE_UNIT + SHARE_COST * waves;
}

/* _cut. `shares` and `other` are room for a number of each row, and the result is in one of them. */
static int32_t *cut(const double *lengths, int64_t rows, int64_t programs, int64_t wanted, int64_t most, int64_t total, int64_t longest,
                    int32_t *room, int32_t *sizes, int32_t *buckets) {
    int32_t *plain = room, *full = room + rows, *tried = room + 2 * rows;
    int64_t dealt = deal(lengths, rows, (double)total / (double)wanted, most, plain);
    if (rows > ROUNDS_APART * programs || (double)(longest * rows) > ALIKE * (double)total)
        return plain;
    int64_t best = -1, full_total = 0;
    for (int64_t rounds = (rows + programs - 1) / programs; rounds <= (most + programs - 1) / programs; rounds++) {
        int64_t limit = most < rounds * programs ? most : rounds * programs;
        int64_t count = deal(lengths, rows, (double)total / (double)limit, limit, tried);
        int64_t end = end_of(lengths, tried, rows, programs, sizes, buckets);
        if (best < 0 || end < best) {
            int32_t *before = full;
            best = end;
            full_total = count;
            full = tried;
            tried = before;
        }
    }
    int64_t last = (dealt - 1) % programs + 1;
    if ((double)last > NEARLY_EMPTY * (double)programs && total < LONG_SHARE * full_total)
        return plain;
    return (double)best < CLEARLY * (double)end_of(lengths, plain, rows, programs, sizes, buckets) ? full : plain;
}

/* Places by length, the longest first and equal ones in their order, in `order`; `other`: room for as many. */
static void longest_first(const int32_t *lengths, int32_t *order, int32_t *other, int64_t rows) {
    int32_t *from = order, *to = other;
    for (int64_t r = 0; r < rows; r++)
        from[r] = (int32_t)r;
    for (int64_t width = 1; width < rows; width *= 2) {
        for (int64_t begin = 0; begin < rows; begin += 2 * width) {
            int64_t middle = begin + width < rows ? begin + width : rows, end = begin + 2 * width < rows ? begin + 2 * width : rows;
            for (int64_t left = begin, right = middle, place = begin; place < end; place++) {
                int takes_left = left < middle && (right >= end || lengths[from[left]] >= lengths[from[right]]);
                to[place] = from[takes_left ? left++ : right++];
            }
        }
        int32_t *before = from;
        from = to;
        to = before;
    }
    if (from != order)
        memcpy(order, from, (size_t)rows * sizeof *order);
}

/* share_out of three rows or more, not of deterministic mode. `wanted`: wanted_shares; `items`: most_items. Written: item_row, first_item
   and size, behind each other. Returns 0; -1: there is no memory. */
int64_t ridgeline_share_out(const int32_t *lengths, int32_t *out, int64_t rows, int64_t programs, int64_t wanted, int64_t items) {
    int64_t total = 0, longest = 0;
    for (int64_t r = 0; r < rows; r++) {
        total += lengths[r];
        longest = lengths[r] > longest ? lengths[r] : longest;
    }
    size_t buckets = (size_t)(longest / SHARE_UNIT + 2), numbers = 6 * (size_t)rows;
    double *exact = calloc(1, (size_t)rows * sizeof *exact + (numbers + buckets) * sizeof(int32_t));
    if (!exact)
        return -1;
    int32_t *room = (int32_t *)(exact + rows), *sizes = room + 3 * rows, *order = sizes + rows, *other = order + rows;
    for (int64_t r = 0; r < rows; r++)
        exact[r] = lengths[r];
    const int32_t *shares = cut(exact, rows, programs, wanted, items, total, longest, room, sizes, other + rows);
    longest_first(lengths, order, other, rows);
    int32_t *first_item = out + items, *size = first_item + rows;
    int64_t item = 0;
    for (int64_t place = 0; place < rows; place++) {
        int32_t row = order[place];
        size[row] = units(exact[row], shares[row]) * SHARE_UNIT;
        int64_t count = (lengths[row] + size[row] - 1) / size[row];      /* rounding to whole units may leave the last shares empty */
        first_item[row] = (int32_t)item;
        for (count = count > 1 ? count : 1; count; count--)
            out[item++] = row;
    }
    for (; item < items; item++)
        out[item] = -1;
    free(exact);
    return 0;
}
