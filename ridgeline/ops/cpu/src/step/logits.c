/* The float32 kernels over a row's logits: the exponential race that samples a token (ops/sampling/noise.py defines the noise),
   and log-probabilities with the rank of a token and the k best (ops/sampling/logprobs.py). */

#include "../lanes.h"
#include "../pool.h"

#define BLOCK 64                     /* ids at a time; rows that race are padded to whole blocks */
#define COUNTERS (BLOCK / 4)         /* each makes the words of four ids */
#define SLACK 1e-5                   /* relative; the bound in float32 is off by less than 1e-6 */
#define MOST_TOP 64

/* Words in lanes of 64 bits, as wide as a register: their products need all of them. */
typedef uint64_t Wide __attribute__((vector_size(4 * LANES)));
#define WIDE (LANES / 2)

/* The words of the ids 4 * first .. 4 * first + 63: ten rounds of Philox4x32, in every lane those of one counter. */
static inline __attribute__((always_inline)) void philox(uint64_t first, uint32_t index, uint64_t seed, uint32_t words[BLOCK]) {
    const uint64_t low = 0xFFFFFFFFu;
    for (int part = 0; part < COUNTERS; part += WIDE) {
        Wide c0, c1 = (Wide){0} + index, c2 = {0}, c3 = {0};
        for (int lane = 0; lane < WIDE; lane++) c0[lane] = first + (uint64_t)(part + lane);
        uint64_t key0 = seed & low, key1 = seed >> 32;
        #pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            Wide product0 = c0 * 0xD2511F53u, product2 = c2 * 0xCD9E8D57u;
            c0 = (product2 >> 32) ^ c1 ^ key0;
            c2 = (product0 >> 32) ^ c3 ^ key1;
            c1 = product2 & low;
            c3 = product0 & low;
            key0 = (key0 + 0x9E3779B9u) & low;
            key1 = (key1 + 0xBB67AE85u) & low;
        }
        for (int lane = 0; lane < WIDE; lane++) {
            uint32_t *to = words + 4 * (part + lane);
            to[0] = (uint32_t)c0[lane];
            to[1] = (uint32_t)c1[lane];
            to[2] = (uint32_t)c2[lane];
            to[3] = (uint32_t)c3[lane];
        }
    }
}

typedef struct {
    const float *scaled;
    const uint64_t *seed;
    const int64_t *index;
    int64_t *tokens;
    int64_t width;
} Race;

/* The score of an id is weight / E, and E >= v: an id whose weight / v is below the best score so far cannot win. So hardly any
   id needs a logarithm, and none needs the words of another block. */
static void race_task(void *with, int64_t row) {
    const Race *job = with;
    const float *x = job->scaled + row * job->width;
    double best = 0.0;
    float enough = 0.0f;                                                 /* the bound below which an id cannot win, over 2^32 */
    int64_t token = 0;
    for (int64_t start = 0; start < job->width; start += BLOCK) {
        uint32_t words[BLOCK];
        float bound[BLOCK];
        philox((uint64_t)(start / 4), (uint32_t)job->index[row], job->seed[row], words);
        for (int i = 0; i < BLOCK; i++) bound[i] = (float)words[i] + 0.5f;
        Lanes largest = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            Lanes each = exponentials(*(const Lanes *)(x + start + i)) / *(const Lanes *)(bound + i);
            *(Lanes *)(bound + i) = each;
            largest = larger(each, largest);
        }
        if (largest_of(largest) < enough) continue;
        for (int i = 0; i < BLOCK; i++) {
            if (bound[i] < enough) continue;
            double score = exp((double)x[start + i]) / -log1p(-((double)words[i] + 0.5) * 0x1p-32);
            if (score > best) {
                best = score;
                token = start + i;
                enough = (float)(best * 0x1p-32 * (1.0 - SLACK));
            }
        }
    }
    job->tokens[row] = token;
}

/* The winner of each row of `scaled` [rows, width]: log-weights of which the largest is 0, width a multiple of 64. */
void KERNEL(race)(const float *scaled, const uint64_t *seed, const int64_t *index, int64_t *tokens, int64_t rows, int64_t width) {
    Race job = {scaled, seed, index, tokens, width};
    run_tasks(rows, rows * width > ENOUGH, race_task, &job);
}

typedef struct {
    const float *logits;
    const int64_t *tokens;
    float *logprobs, *top_logprobs;
    int64_t *ranks, *top_ids;
    int64_t width, stride, top_k;
} Scores;

/* Of x[0..count): how many are larger than `chosen`, or with `equal` as large. */
static int64_t count_before(const float *x, int64_t count, float chosen, int equal) {
    Places found = {0};
    int64_t i = 0, sum = 0;
    for (; i + LANES <= count; i += LANES) {
        Lanes each = *(const Lanes *)(x + i);
        found -= each > chosen;
        if (equal) found -= each == chosen;
    }
    for (int lane = 0; lane < LANES; lane++) sum += found[lane];
    for (; i < count; i++) sum += x[i] > chosen || (equal && x[i] == chosen);
    return sum;
}

/* log of the sum of e^x. Each part of a block is added in float32, blocks in float64. */
static double log_sum_exp(const float *x, int64_t width) {
    Lanes top = (Lanes){0} - INFINITY;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) top = larger(*(const Lanes *)(x + i), top);
    float best = largest_of(top);
    for (; i < width; i++) best = x[i] > best ? x[i] : best;
    double sum = 0.0;
    for (i = 0; i + BLOCK <= width; i += BLOCK) {
        Lanes part = {0};
        for (int j = 0; j < BLOCK; j += LANES) part += exponentials(*(const Lanes *)(x + i + j) - best);
        sum += sum_of(part);
    }
    for (; i < width; i++) sum += exponential(x[i] - best);
    return (double)best + log(sum);
}

/* The k best of a row, the largest first and among equals the lowest id; a NaN is the smallest. */
static void find_top(const float *x, int64_t width, int64_t top_k, int64_t *ids) {
    float values[MOST_TOP];
    int64_t count = 0;
    for (int64_t start = 0; start < width; start += BLOCK) {
        int64_t end = start + BLOCK < width ? start + BLOCK : width;
        if (count == top_k && end == start + BLOCK) {
            Lanes top = (Lanes){0} - INFINITY;
            for (int j = 0; j < BLOCK; j += LANES) top = larger(*(const Lanes *)(x + start + j), top);
            if (!(largest_of(top) > values[top_k - 1])) continue;
        }
        for (int64_t id = start; id < end; id++) {
            float value = x[id] == x[id] ? x[id] : -INFINITY;
            if (count == top_k && !(value > values[top_k - 1])) continue;
            int64_t place = count < top_k ? count++ : top_k - 1;
            for (; place > 0 && value > values[place - 1]; place--) {
                values[place] = values[place - 1];
                ids[place] = ids[place - 1];
            }
            values[place] = value;
            ids[place] = id;
        }
    }
}

static void scores_task(void *with, int64_t row) {
    const Scores *job = with;
    const float *x = job->logits + row * job->stride;
    const int64_t token = job->tokens[row], top_k = job->top_k;
    const float chosen = x[token];
    double total = log_sum_exp(x, job->width);
    job->logprobs[row] = (float)(chosen - total);
    job->ranks[row] = 1 + count_before(x, token, chosen, 1) + count_before(x + token, job->width - token, chosen, 0);
    if (top_k == 0) return;
    int64_t *ids = job->top_ids + row * top_k;
    find_top(x, job->width, top_k, ids);
    for (int64_t i = 0; i < top_k; i++) job->top_logprobs[row * top_k + i] = (float)(x[ids[i]] - total);
}

/* Of logits [rows, width]: each token's log-probability and rank (1: the first), and the k best with theirs; k <= 64. */
void KERNEL(logprobs)(const float *logits, const int64_t *tokens, float *logprobs, int64_t *ranks, int64_t *top_ids,
                      float *top_logprobs, int64_t rows, int64_t width, int64_t stride, int64_t top_k) {
    Scores job = {logits, tokens, logprobs, top_logprobs, ranks, top_ids, width, stride, top_k};
    run_tasks(rows, rows * width > ENOUGH, scores_task, &job);
}
