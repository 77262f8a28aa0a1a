/* Searches n-grams for many rows in one call: what scheduler/drafts/ngram.py and suffix.py do for one row after the other, with the
   same answers. It is the host's work, not the model's: one thread, and about a microsecond for each row. */

#include <stdint.h>

#define FACTOR 0x9E3779B1u
#define CANDIDATES 24                /* as in gram_index.py */
#define SEPARATOR (-1)

/* One row, as ngram_table.py keeps it: int64 numbers, addresses among them. */
typedef struct {
    const int32_t *tokens;           /* of the row, `count` of them */
    int64_t count;
    int32_t *heads;                  /* by hash: the newest position after such an n-gram; 0: none */
    int64_t mask;
    int32_t *previous;               /* by position: the next older one with the same hash */
    int64_t indexed;                 /* positions that are in the index */
    int64_t position;                /* where the text goes on as the answer does; 0: unknown */
    int64_t matched;                 /* tokens before it that are equal */
    int64_t known;                   /* tokens of the row when that was found */
} Row;

static inline uint32_t place(const int32_t *end, int64_t n, int64_t mask) {
    uint32_t value = 0;
    for (int64_t i = -n; i < 0; i++)
        value = value * FACTOR + (uint32_t)(end[i] + 2);
    return (value ^ value >> 15) & (uint32_t)mask;
}

static void catch_up(Row *row, int64_t n) {
    int64_t position = row->indexed;
    for (; position <= row->count && position < n; position++)
        row->previous[position] = 0;
    for (; position <= row->count; position++) {
        uint32_t at = place(row->tokens + position, n, row->mask);
        row->previous[position] = row->heads[at];
        row->heads[at] = (int32_t)position;
    }
    row->indexed = position;
}

static int goes_on(Row *row, int64_t longest) {
    int64_t new = row->count - row->known;
    if (!row->position || row->matched + new < longest)
        return 0;
    for (int64_t i = 0; i < new; i++)
        if (row->tokens[row->position + i] != row->tokens[row->known + i])
            return 0;
    row->position += new;
    row->matched += new;
    return 1;
}

static void search(Row *row, int64_t n, int64_t longest) {
    const int32_t *tokens = row->tokens, *end = tokens + row->count;
    int64_t tail = row->count < longest ? row->count : longest;
    row->position = row->matched = 0;
    if (tail < n)
        return;
    int64_t position = row->heads[place(end, n, row->mask)];
    for (int64_t i = 0; i < CANDIDATES && position; i++, position = row->previous[position]) {
        if (position >= row->count)
            continue;                /* the end of the text itself: nothing follows it */
        int64_t most = position < tail ? position : tail, matched = 0;
        while (matched < most && tokens[position - 1 - matched] == end[-1 - matched])
            matched++;
        if (matched >= n && matched > row->matched) {
            row->position = position;
            row->matched = matched;
            if (matched == longest)
                break;
        }
    }
}

/* Of each of the rows at most most[r] drafts, in drafts[r][0 … width); how many goes to ends[r], and the tokens that matched to
   matched[r]. Rows with most[r] = 0 are not touched. */
void ridgeline_ngram_drafts(Row *rows, const int64_t *chosen, const int64_t *most, int32_t *drafts, int64_t *ends, int64_t *matched,
                            int64_t count, int64_t width, int64_t n, int64_t longest) {
    for (int64_t r = 0; r < count; r++) {
        Row *row = rows + chosen[r];
        ends[r] = matched[r] = 0;
        if (most[r] <= 0)
            continue;
        if (!goes_on(row, longest)) {
            catch_up(row, n);
            search(row, n, longest);
        }
        row->known = row->count;
        if (!row->position)
            continue;
        const int32_t *next = row->tokens + row->position;
        int64_t period = row->count - row->position, end = 0;
        for (; end < most[r] && next[end % period] != SEPARATOR; end++)
            drafts[r * width + end] = next[end % period];
        ends[r] = end;
        matched[r] = row->matched;
    }
}

/* One half of a log of answers (suffix.py): its index is gram_index.py's own. */
typedef struct {
    const int32_t *tokens;
    int64_t size;
    const int32_t *heads;
    int64_t mask;
    const int32_t *previous;
} Half;

typedef struct {
    const int32_t *tokens;
    int64_t count;
} Text;

typedef struct {
    const int32_t *next;             /* what followed a match, as far as the half goes */
    int64_t length;
    int64_t matched;
} Path;

/* Where the half has the end of the text, newest first. Returns how many places were found. */
static int64_t paths_of(const Half *half, Text text, int64_t n, int64_t longest, Path *found) {
    const int32_t *end = text.tokens + text.count;
    int64_t tail = text.count < longest ? text.count : longest, count = 0;
    if (tail < n)
        return 0;
    int64_t position = half->heads[place(end, n, half->mask)];
    for (int64_t i = 0; i < CANDIDATES && position; i++, position = half->previous[position]) {
        if (position >= half->size)
            continue;
        int64_t most = position < tail ? position : tail, matched = 0;
        while (matched < most && half->tokens[position - 1 - matched] == end[-1 - matched])
            matched++;
        if (matched < n)
            continue;
        found[count++] = (Path){half->tokens + position, half->size - position, matched};
        if (matched == longest)
            break;
    }
    return count;
}

/* Token by token what most paths say, the first of equals; returns how many tokens. */
static int64_t majority(Path *paths, int64_t count, int64_t most, int32_t *drafts) {
    int64_t depth = 0;
    for (; depth < most; depth++) {
        int64_t best = 0;
        int32_t chosen = SEPARATOR;
        for (int64_t i = 0; i < count; i++) {
            int64_t votes = 0;
            for (int64_t j = 0; j < count; j++)
                votes += depth < paths[i].length && depth < paths[j].length && paths[j].next[depth] == paths[i].next[depth];
            if (votes > best) {
                best = votes;
                chosen = paths[i].next[depth];
            }
        }
        if (chosen == SEPARATOR)
            break;
        drafts[depth] = chosen;
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++)
            if (depth < paths[i].length && paths[i].next[depth] == chosen)
                paths[kept++] = paths[i];
        count = kept;
    }
    return depth;
}

/* As above, from the two halves of a log, the newer one first. At most `voters` of the longest matches decide. */
void ridgeline_suffix_drafts(const Half *halves, const Text *texts, const int64_t *most, int32_t *drafts, int64_t *ends,
                             int64_t *matched, int64_t count, int64_t width, int64_t n, int64_t longest, int64_t voters) {
    for (int64_t r = 0; r < count; r++) {
        Path paths[2 * CANDIDATES];
        ends[r] = matched[r] = 0;
        if (most[r] <= 0)
            continue;
        int64_t found = paths_of(halves, texts[r], n, longest, paths);
        found += paths_of(halves + 1, texts[r], n, longest, paths + found);
        for (int64_t i = 0; i < found; i++)
            matched[r] = paths[i].matched > matched[r] ? paths[i].matched : matched[r];
        int64_t kept = 0;
        for (int64_t i = 0; i < found && kept < voters; i++)
            if (paths[i].matched == matched[r])
                paths[kept++] = paths[i];
        ends[r] = majority(paths, kept, most[r], drafts + r * width);
    }
}
