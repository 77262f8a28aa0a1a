/* Samples a token from each row of float32 logits (ops/sampling/sample.py is the definition): temperature, the filters min_p, top_k,
   top_p and typical_p, and the exponential race among the ids that they leave (ops/sampling/noise.py defines the noise).

   A row costs a few passes over its ids, whatever its filters are. None sorts all of them: ids are counted into bins by the upper
   half of their key, which is in order, and only the ids of the bin in which a filter ends are looked at one by one. */

#include <stdlib.h>

#include "../lanes.h"
#include "../pool.h"
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define BLOCK 64                     /* ids at a time; a row is padded to whole blocks */
#define COUNTERS (BLOCK / 4)         /* each makes the words of four ids */
#define TASKS 8                      /* for each thread: rows differ in cost, and a thread may come late */
#define SLACK 1e-5                   /* relative; the bound in float32 is off by less than 1e-6 */
#define DIVIDED 16                   /* members looked at to select one of as many: 3 times their number is usual */
#define BINS 32768                   /* of a float that is not negative: eight bits of exponent and seven of mantissa */

/* Words in lanes of 64 bits, as wide as a register: their products need all of them. */
typedef uint64_t Wide __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define WIDE (LANES / 2)

static const Wide COUNT = {
    0, 1,
#if WIDE > 2
    2, 3,
#endif
#if WIDE > 4
    4, 5, 6, 7,
#endif
};

/* Products of the lanes' lower halves; the upper ones are 0, which the compiler cannot know: it would multiply all 64 bits. */
static inline __attribute__((always_inline)) Wide times(Wide lanes, uint32_t factor) {
#if defined(__AVX512F__)
    return (Wide)_mm512_mul_epu32((__m512i)lanes, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
    return (Wide)_mm256_mul_epu32((__m256i)lanes, _mm256_set1_epi64x(factor));
#elif defined(__SSE2__) && !defined(__AVX__)                             /* AVX alone has no such product as wide as its lanes */
    return (Wide)_mm_mul_epu32((__m128i)lanes, _mm_set1_epi64x(factor));
#elif defined(__ARM_NEON)
    return (Wide)vmull_u32(vmovn_u64((uint64x2_t)lanes), vdup_n_u32(factor));
#else
    return lanes * factor;
#endif
}

/* The words of the ids 4 * first .. 4 * first + 63: ten rounds of Philox4x32, in every lane those of one counter. */
static inline __attribute__((always_inline)) void philox(uint64_t first, uint32_t index, uint64_t seed, uint32_t words[BLOCK]) {
    const uint64_t low = 0xFFFFFFFFu;
    for (int part = 0; part < COUNTERS; part += WIDE) {
        Wide c0 = COUNT + (first + (uint64_t)part), c1 = (Wide){0} + index, c2 = {0}, c3 = {0};
        uint64_t key0 = seed & low, key1 = seed >> 32;
        #pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            Wide product0 = times(c0, 0xD2511F53u), product2 = times(c2, 0xCD9E8D57u);
            c0 = (product2 >> 32) ^ c1 ^ key0;
            c2 = (product0 >> 32) ^ c3 ^ key1;
            c1 = product2 & low;
            c3 = product0 & low;
            key0 = (key0 + 0x9E3779B9u) & low;
            key1 = (key1 + 0xBB67AE85u) & low;
        }
        const Wide one = c0 | c1 << 32, two = c2 | c3 << 32;             /* the first two words of a counter, and the last two */
        const Wide from = COUNT / 2 + COUNT % 2 * WIDE;
        *(Wide *)(words + 4 * part) = __builtin_shuffle(one, two, from);
        *(Wide *)(words + 4 * part + LANES) = __builtin_shuffle(one, two, from + WIDE / 2);
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

/* The ids of a row that min_p has left, in ascending order. A filter takes ids in order of their key, and of equal keys in order of
   the ids, until their weights reach its bound. What it does not take stays in the list with a weight of 0 and a value of -inf:
   a loop over all of the list has no branch to predict, and becomes vector instructions. */
typedef struct {
    int64_t count;
    double *weights, *sums;          /* by survivors, and by bins of keys */
    Member *members;                 /* room for the survivors of one bin */
    float *values;
    int32_t *ids;
} Survivors;

static inline __attribute__((always_inline)) int precedes(const Member *one, const Member *other) {
    return one->key < other->key || (one->key == other->key && one->id < other->id);
}

static int in_order(const void *one, const void *other) {
    return precedes(one, other) ? -1 : 1;
}

/* The same as reaches(), by a sort of all of them. */
static Member reaches_sorted(Member *members, int64_t count, double before, double enough) {
    qsort(members, (size_t)count, sizeof(Member), in_order);
    int64_t last = 0;
    for (before += members[0].weight; last < count - 1 && before < enough; before += members[last].weight) last++;
    return members[last];
}

/* The member with which the weights, taken in order, reach `enough`; `before` is the weight of what was taken earlier. The ones
   around it are divided again and again: a sort would order all the others, too. It is better only for an order in which the
   pivots divide next to nothing. */
static Member reaches(Member *members, int64_t count, double before, double enough) {
    int64_t left = DIVIDED * count;
    while (count > 1) {
        left -= count;
        if (left < 0) return reaches_sorted(members, count, before, enough);
        const Member pivot = members[count / 2];
        int64_t ahead = 0;
        double sum = 0.0;
        members[count / 2] = members[count - 1];
        for (int64_t i = 0; i < count - 1; i++) {
            const Member each = members[i];
            const int first = precedes(&each, &pivot);
            members[i] = members[ahead];
            members[ahead] = each;
            ahead += first;
            sum += first ? each.weight : 0.0;
        }
        members[count - 1] = members[ahead];
        members[ahead] = pivot;
        if (ahead > 0 && before + sum >= enough) count = ahead;
        else if (ahead + 1 == count || before + sum + pivot.weight >= enough) return pivot;
        else members += ahead + 1, count -= ahead + 1, before += sum + pivot.weight;
    }
    return members[0];
}

#define SUMS 8                       /* a sum of doubles is made of as many, which do not wait for each other */

static double sum_of_sums(const double sums[SUMS]) {
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
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
    float *values = left->values;
    double *weights = left->weights;
    const int32_t *ids = left->ids;
    memset(left->sums, 0, BINS * sizeof(double));
    for (int64_t i = 0; i < left->count; i++) left->sums[bin_of(values[i], by_distance, centre)] += weights[i];
    int bin = 0;
    double sum = 0.0, before = 0.0;                                      /* with the weights of `bin`, and without them */
    for (int each = 0; each < BINS && sum < enough; each++) {
        if (left->sums[each] == 0.0) continue;
        bin = each;
        before = sum;
        sum += left->sums[each];
    }
    int64_t count = 0;
    for (int64_t i = 0; i < left->count; i++)
        if (bin_of(values[i], by_distance, centre) == bin && weights[i] > 0.0)
            left->members[count++] = (Member){key_of(values[i], by_distance, centre), weights[i], ids[i]};
    const Member last = reaches(left->members, count, before, enough);
    for (int64_t i = 0; i < left->count; i++) {
        const double key = key_of(values[i], by_distance, centre);
        const int kept = (key < last.key) | ((key == last.key) & (ids[i] <= last.id));
        values[i] = kept ? values[i] : -INFINITY;
        weights[i] = kept ? weights[i] : 0.0;
    }
}

typedef struct {
    const float *logits, *temperature, *floor;
    const int64_t *place, *best, *index, *top_k;
    const uint64_t *seed;
    const double *top_p, *typical_p;
    int64_t *tokens;
    int64_t width, stride, rows, tasks;
} Draw;

/* A value that at least k ids reach: the k-th largest of the blocks' maxima. */
static float reached_by(const float *x, int64_t padded, int64_t top_k, Member *room) {
    const int64_t blocks = padded / BLOCK;
    if (top_k > blocks) return -__FLT_MAX__;
    for (int64_t block = 0; block < blocks; block++) {
        Lanes top = (Lanes){0} - INFINITY;
        for (int i = 0; i < BLOCK; i += LANES) top = larger(*(const Lanes *)(x + block * BLOCK + i), top);
        room[block] = (Member){-(double)largest_of(top), 1.0, (int32_t)block};
    }
    return (float)-reaches(room, blocks, 0.0, (double)top_k).key;
}

/* Keep the ids whose surprise is nearest to the entropy. A log-weight is -surprise + log(total). */
static void take_typical(Survivors *left, double typical_p) {
    double totals[SUMS] = {0}, sums[SUMS] = {0};
    for (int64_t i = 0; i < left->count; i += SUMS)
        for (int j = 0; j < SUMS; j++) {
            const double weight = left->weights[i + j];
            totals[j] += weight;
            sums[j] += weight > 0.0 ? weight * (double)left->values[i + j] : 0.0;
        }
    const double total = sum_of_sums(totals);
    take(left, typical_p * total, 1, sum_of_sums(sums) / total);
}

/* The ids whose value is at least `floor`. A block without one is passed over. */
static void find(const float *x, int64_t padded, float floor, Survivors *left) {
    int64_t count = 0;
    for (int64_t start = 0; start < padded; start += BLOCK) {
        Lanes top = (Lanes){0} - INFINITY;
        for (int i = 0; i < BLOCK; i += LANES) top = larger(*(const Lanes *)(x + start + i), top);
        if (largest_of(top) < floor) continue;
        for (int64_t id = start; id < start + BLOCK; id++) {             /* written first, and kept if it is one */
            left->ids[count] = (int32_t)id;
            left->values[count] = x[id];
            count += x[id] >= floor;
        }
    }
    left->count = count;
    for (; count % SUMS != 0; count++) left->values[count] = -INFINITY, left->ids[count] = 0;
    for (int64_t i = 0; i < count; i++) left->weights[i] = 1.0;
    for (int64_t i = left->count; i < count; i++) left->weights[i] = 0.0;
}

/* What the filters leave of x, in place: all other ids get -inf. */
static void filter(const Draw *job, int64_t row, float *x, int64_t padded, Survivors *left) {
    const int64_t top_k = job->top_k[row];
    const double top_p = job->top_p[row], typical_p = job->typical_p[row];
    const float reached = top_k > 0 ? reached_by(x, padded, top_k, left->members) : -__FLT_MAX__;
    const float floor = reached > job->floor[row] ? reached : job->floor[row];
    find(x, padded, floor, left);
    if (top_k > 0 && top_k < left->count) take(left, (double)top_k, 0, 0.0);
    if (top_p < 1.0 || typical_p < 1.0) {
        double totals[SUMS] = {0};
        for (int64_t i = 0; i < left->count; i++)
            left->weights[i] = left->values[i] == -INFINITY ? 0.0 : exact_exponential(left->values[i]);
        for (int64_t i = 0; i < left->count; i += SUMS)
            for (int j = 0; j < SUMS; j++) totals[j] += left->weights[i + j];
        if (top_p < 1.0) take(left, top_p * sum_of_sums(totals), 0, 0.0);
        if (typical_p < 1.0) take_typical(left, typical_p);
    }
    for (int64_t id = 0; id < padded; id++) x[id] = -INFINITY;
    for (int64_t i = 0; i < left->count; i++) x[left->ids[i]] = left->values[i];
}

static int is_filtered(const Draw *job, int64_t row) {
    return job->top_k[row] > 0 || job->floor[row] > -__FLT_MAX__ || job->top_p[row] < 1.0 || job->typical_p[row] < 1.0;
}

static void draw_row(const Draw *job, int64_t row, int64_t padded, float *x, Survivors *left) {
    const float *logits = job->logits + job->place[row] * job->stride;
    const float best = logits[job->best[row]], temperature = job->temperature[row];
    for (int64_t id = 0; id < job->width; id++) x[id] = (logits[id] - best) / temperature;
    for (int64_t id = job->width; id < padded; id++) x[id] = -INFINITY;
    if (is_filtered(job, row)) filter(job, row, x, padded, left);
    job->tokens[row] = race(x, padded, job->seed[row], (uint32_t)job->index[row]);
}

/* Every so many rows from the first one on, with one scratch memory: a new one for each row would be as many page faults. */
static void draw_task(void *with, int64_t first) {
    const Draw *job = with;
    const int64_t padded = (job->width + BLOCK - 1) / BLOCK * BLOCK;
    const size_t room = (size_t)padded + BLOCK;                          /* what is not kept is written first, and overwritten */
    const size_t others = sizeof(Member) + sizeof(double) + sizeof(float) + sizeof(int32_t);
    int filtered = 0;
    for (int64_t row = first; row < job->rows; row += job->tasks) filtered |= is_filtered(job, row);
    char *scratch = malloc(room * sizeof(float) + (filtered ? room * others + BINS * sizeof(double) : 0));
    Survivors left = {.sums = (double *)scratch, .weights = (double *)scratch + BINS};
    left.members = (Member *)(left.weights + room);
    left.ids = (int32_t *)(left.members + room);
    left.values = (float *)(left.ids + room);
    float *x = filtered ? left.values + room : (float *)scratch;
    for (int64_t row = first; row < job->rows; row += job->tasks) {
        if (scratch == NULL) job->tokens[row] = -1;
        else draw_row(job, row, padded, x, &left);
    }
    free(scratch);
}

/* A token for each of `rows` rows of logits: row r is line place[r], its best id is best[r], and `floor` is log(min_p). A token of -1:
   there was no memory to sample it. */
void KERNEL(draw)(const float *logits, const int64_t *place, const int64_t *best, const float *temperature, const float *floor,
                  const int64_t *top_k, const double *top_p, const double *typical_p, const uint64_t *seed, const int64_t *index,
                  int64_t *tokens, int64_t rows, int64_t width, int64_t stride) {
    const int64_t most = TASKS * (int64_t)ridgeline_pool_threads(), tasks = rows < most ? rows : most;
    Draw job = {logits, temperature, floor, place, best, index, top_k, seed, top_p, typical_p, tokens, width, stride, rows, tasks};
    run_tasks(tasks, rows * width > ENOUGH, draw_task, &job);
}
