/* The float32 kernels that read a row's logits without sampling from it: log-probabilities with the rank of a token and the k best
   (ops/sampling/logprobs.py), and the mask of a grammar (ops/sampling/sample.py). */

#include "../lanes.h"
#include "../pool.h"

#define BLOCK 64                     /* ids at a time */
#define MOST_TOP 64

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

typedef struct {
    const float *logits;
    const uint32_t *mask;
    float *out;
    uint8_t *broken;
    int64_t width, stride, words;
} Masks;

static void mask_task(void *with, int64_t row) {
    const Masks *job = with;
    const float *x = job->logits + row * job->stride;
    const uint32_t *mask = job->mask + row * job->words;
    float *out = job->out + row * job->width;
    int sound = 1;
    for (int64_t start = 0; start < job->width; start += 32) {
        const uint32_t word = mask[start / 32];
        const int64_t count = job->width - start < 32 ? job->width - start : 32;
        for (int64_t i = 0; i < count; i++) {
            sound &= x[start + i] < INFINITY;                            /* of a NaN this does not hold */
            out[start + i] = word >> i & 1 ? x[start + i] : -INFINITY;
        }
    }
    job->broken[row] = (uint8_t)!sound;
}

/* Logits [rows, width] into `out`, without the ids whose bit in `mask` [rows, words] is not set; `broken` [rows]: which rows have a
   NaN or an infinity. */
void KERNEL(apply_mask)(const float *logits, const uint32_t *mask, float *out, uint8_t *broken, int64_t rows, int64_t width,
                        int64_t stride, int64_t words) {
    Masks job = {logits, mask, out, broken, width, stride, words};
    run_tasks(rows, rows * width > ENOUGH, mask_task, &job);
}
