/* Samples a token from each row of float32 logits (ops/sampling/sample.py is the definition): temperature, the filters min_p, top_k,
   top_p and typical_p, and the exponential race among the ids that they leave (ops/sampling/noise.py defines the noise).

   A row costs a few passes over its ids, whatever its filters are. None sorts all of them: ids are counted into bins by the upper
   half of their key, which is in order, and only the ids of the bin in which a filter ends are sorted. */

#include <stdlib.h>

#include "../lanes.h"
#include "../pool.h"

#define BLOCK 64                     /* ids at a time; a row is padded to whole blocks */
#define COUNTERS (BLOCK / 4)         /* each makes the words of four ids */
#define SLACK 1e-5                   /* relative; the bound in float32 is off by less than 1e-6 */
#define BINS 32768                   /* of a float that is not negative: eight bits of exponent and seven of mantissa */

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

/* The score of an id is weight / E, and E >= v: an id whose weight / v is below the best score so far cannot win. So hardly any
   id needs a logarithm, and none needs the words of another block. */
static int64_t race(const float *x, int64_t width, uint64_t seed, uint32_t index) {
    double best = 0.0;
    float enough = 0.0f;                                                 /* the bound below which an id cannot win, over 2^32 */
    int64_t token = 0;
    for (int64_t start = 0; start < width; start += BLOCK) {
        Lanes top = (Lanes){0} - INFINITY;
        for (int i = 0; i < BLOCK; i += LANES) top = larger(*(const Lanes *)(x + start + i), top);
        if (largest_of(top) == -INFINITY) continue;                      /* a mask or a filter has left none of the block */
        uint32_t words[BLOCK];
        float bound[BLOCK];
        philox((uint64_t)(start / 4), index, seed, words);
        for (int i = 0; i < BLOCK; i++) bound[i] = (float)words[i] + 0.5f;
        Lanes largest = {0};
        for (int i = 0; i < BLOCK; i += LANES) {
            const Lanes logs = *(const Lanes *)(x + start + i);
            /* Below -60 an id cannot win (the best weighs 1, and E is between 1e-10 and 23), and its bound would be subnormal: slow. */
            Lanes each = CHOOSE(logs < -60.0f, (Lanes){0}, exponentials(logs)) / *(const Lanes *)(bound + i);
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
    return token;
}

/* e^x for x <= 0 in double: a fraction of polynomials after Cody and Waite's reduction, off by 2 in the last place. A loop over it
   becomes vector instructions, unlike one over exp(). */
static inline __attribute__((always_inline)) double exact_exponential(float value) {
    const double round = 6755399441055744.0;                             /* 1.5 * 2^52: a sum with it is a whole number */
    double x = value < -708.0f ? -708.0 : (double)value;                 /* e^-708 is nothing beside the 1 that is always there */
    union { double value; int64_t bits; } n = {x * 1.4426950408889634 + round}, power;
    double whole = n.value - round;
    double r = x - whole * 6.93145751953125e-1 - whole * 1.42860682030941723212e-6, square = r * r;
    double p = r * ((square * 1.26177193074810590878e-4 + 3.02994407707441961300e-2) * square + 1.0);
    double q = ((square * 3.00198505138664455042e-6 + 2.52448340349684104192e-3) * square + 2.27265548208155028766e-1) * square + 2.0;
    power.bits = (n.bits + 1023) << 52;
    return (1.0 + 2.0 * p / (q - p)) * power.value;
}

typedef struct { double key, weight; int32_t id; } Member;

/* The ids of a row that have survived so far, in ascending order. A filter takes ids in order of their key, and of equal keys in
   order of the ids, until their weights reach its bound. */
typedef struct {
    int64_t count;
    double *weights, *sums;          /* by survivors, and by bins of keys */
    Member *members;                 /* room for the survivors of one bin */
    float *values;
    int32_t *ids;
} Survivors;

static int in_order(const void *a, const void *b) {
    const Member *one = a, *other = b;
    if (one->key != other->key) return one->key < other->key ? -1 : 1;
    return one->id < other->id ? -1 : 1;
}

/* The most likely ids first, or with `by_distance` those whose log-weight is nearest to `centre`. */
static inline __attribute__((always_inline)) double key_of(float value, int by_distance, double centre) {
    return by_distance ? fabs(value - centre) : fabs((double)value);
}

static inline __attribute__((always_inline)) int bin_of(float value, int by_distance, double centre) {
    union { float value; uint32_t bits; } narrow = {by_distance ? (float)fabs(value - centre) : fabsf(value)};
    return (int)(narrow.bits >> 16);
}

/* Keep the first ids until their weights reach `enough`, at least one. */
static inline __attribute__((always_inline)) void take(Survivors *left, double enough, int by_distance, double centre) {
    memset(left->sums, 0, BINS * sizeof(double));
    for (int64_t i = 0; i < left->count; i++) left->sums[bin_of(left->values[i], by_distance, centre)] += left->weights[i];
    int bin = 0;
    double sum = 0.0, before = 0.0;                                      /* with the weights of `bin`, and without them */
    for (int each = 0; each < BINS && sum < enough; each++) {
        if (left->sums[each] == 0.0) continue;
        bin = each;
        before = sum;
        sum += left->sums[each];
    }
    int64_t count = 0, end = 0, kept = 0;
    for (int64_t i = 0; i < left->count; i++)
        if (bin_of(left->values[i], by_distance, centre) == bin)
            left->members[count++] = (Member){key_of(left->values[i], by_distance, centre), left->weights[i], left->ids[i]};
    qsort(left->members, (size_t)count, sizeof(Member), in_order);
    sum = before;
    do sum += left->members[end++].weight; while (end < count && sum < enough);
    const Member last = left->members[end - 1];
    for (int64_t i = 0; i < left->count; i++) {
        const double key = key_of(left->values[i], by_distance, centre);
        left->ids[kept] = left->ids[i];
        left->values[kept] = left->values[i];
        left->weights[kept] = left->weights[i];
        kept += key < last.key || (key == last.key && left->ids[i] <= last.id);
    }
    left->count = kept;
}

typedef struct {
    const float *logits, *temperature, *floor;
    const int64_t *place, *best, *index, *top_k;
    const uint64_t *seed;
    const double *top_p, *typical_p;
    int64_t *tokens;
    int64_t width, stride;
} Draw;

/* A value that at least k ids reach: the k-th largest of the blocks' maxima. */
static float reached_by(const float *x, int64_t padded, int64_t top_k, Member *room) {
    const int64_t blocks = padded / BLOCK;
    if (top_k > blocks) return -__FLT_MAX__;
    for (int64_t block = 0; block < blocks; block++) {
        Lanes top = (Lanes){0} - INFINITY;
        for (int i = 0; i < BLOCK; i += LANES) top = larger(*(const Lanes *)(x + block * BLOCK + i), top);
        room[block] = (Member){-(double)largest_of(top), 0.0, (int32_t)block};
    }
    qsort(room, (size_t)blocks, sizeof(Member), in_order);
    return (float)-room[top_k - 1].key;
}

/* Keep the ids whose surprise is nearest to the entropy. A log-weight is -surprise + log(total). */
static void take_typical(Survivors *left, double typical_p) {
    double total = 0.0, sum = 0.0;
    for (int64_t i = 0; i < left->count; i++) {
        total += left->weights[i];
        sum += left->weights[i] * (double)left->values[i];
    }
    take(left, typical_p * total, 1, sum / total);
}

/* What the filters leave of x, in place: all other ids get -inf. */
static void filter(const Draw *job, int64_t row, float *x, int64_t padded, Survivors *left) {
    const int64_t top_k = job->top_k[row];
    const double top_p = job->top_p[row], typical_p = job->typical_p[row];
    const float reached = top_k > 0 ? reached_by(x, padded, top_k, left->members) : -__FLT_MAX__;
    const float floor = reached > job->floor[row] ? reached : job->floor[row];
    left->count = 0;
    for (int64_t id = 0; id < padded; id++) {                            /* written first, and kept if it is one */
        left->ids[left->count] = (int32_t)id;
        left->values[left->count] = x[id];
        left->count += x[id] >= floor;
    }
    for (int64_t i = 0; i < left->count; i++) left->weights[i] = 1.0;
    if (top_k > 0 && top_k < left->count) take(left, (double)top_k, 0, 0.0);
    if (top_p < 1.0 || typical_p < 1.0) {
        for (int64_t i = 0; i < left->count; i++) left->weights[i] = exact_exponential(left->values[i]);
        double total = 0.0;
        for (int64_t i = 0; i < left->count; i++) total += left->weights[i];
        if (top_p < 1.0) take(left, top_p * total, 0, 0.0);
        if (typical_p < 1.0) take_typical(left, typical_p);
    }
    for (int64_t id = 0; id < padded; id++) x[id] = -INFINITY;
    for (int64_t i = 0; i < left->count; i++) x[left->ids[i]] = left->values[i];
}

static void draw_task(void *with, int64_t row) {
    const Draw *job = with;
    const int64_t width = job->width, padded = (width + BLOCK - 1) / BLOCK * BLOCK;
    const float *logits = job->logits + job->place[row] * job->stride;
    const float best = logits[job->best[row]], temperature = job->temperature[row];
    const int filtered = job->top_k[row] > 0 || job->floor[row] > -__FLT_MAX__ || job->top_p[row] < 1.0 || job->typical_p[row] < 1.0;
    const size_t room = (size_t)padded + BLOCK;                          /* what is not kept is written first, and overwritten */
    const size_t others = sizeof(Member) + sizeof(double) + sizeof(float) + sizeof(int32_t);
    char *scratch = malloc(room * sizeof(float) + (filtered ? room * others + BINS * sizeof(double) : 0));
    job->tokens[row] = -1;
    if (scratch == NULL) return;
    Survivors left = {.sums = (double *)scratch, .weights = (double *)scratch + BINS};
    left.members = (Member *)(left.weights + room);
    left.ids = (int32_t *)(left.members + room);
    left.values = (float *)(left.ids + room);
    float *x = filtered ? left.values + room : (float *)scratch;
    for (int64_t id = 0; id < width; id++) x[id] = (logits[id] - best) / temperature;
    for (int64_t id = width; id < padded; id++) x[id] = -INFINITY;
    if (filtered) filter(job, row, x, padded, &left);
    job->tokens[row] = race(x, padded, job->seed[row], (uint32_t)job->index[row]);
    free(scratch);
}

/* A token for each of `rows` rows of logits: row r is line place[r], its best id is best[r], and `floor` is log(min_p). A token of -1:
   there was no memory to sample it. */
void KERNEL(draw)(const float *logits, const int64_t *place, const int64_t *best, const float *temperature, const float *floor,
                  const int64_t *top_k, const double *top_p, const double *typical_p, const uint64_t *seed, const int64_t *index,
                  int64_t *tokens, int64_t rows, int64_t width, int64_t stride) {
    Draw job = {logits, temperature, floor, place, best, index, top_k, seed, top_p, typical_p, tokens, width, stride};
    run_tasks(rows, rows * width > ENOUGH, draw_task, &job);
}
