/* Activations in 8 bits: of every 16, the largest becomes 127. The last two bits of a scale are 0, so that its product with a small
   number is exact (sums_neon.h). */

#include "../lanes.h"

typedef int8_t Small __attribute__((vector_size(LANES)));
typedef int16_t Middle __attribute__((vector_size(2 * LANES)));

#define SHIFT BEGIN                  /* added to a number, it leaves the number rounded in the lowest bits */

ALWAYS float scale_of(float largest) {
    union { float value; uint32_t bits; } scale = {largest / 127.0f};
    scale.bits &= ~3u;
    return scale.value;
}

/* Returns the scale of these numbers; *sum: of their codes. */
#if defined(__aarch64__)
ALWAYS float quantise(const float *from, int8_t *codes, int16_t *pairs, int32_t *sum) {
    float32x4_t x[4], most = vdupq_n_f32(0.0f);
    int32x4_t rounded[4];
    (void)pairs;
    #pragma GCC unroll 4
    for (int i = 0; i < 4; i++) x[i] = vld1q_f32(from + 4 * i), most = vmaxq_f32(most, vabsq_f32(x[i]));
    const float largest = vmaxvq_f32(most), scale = scale_of(largest), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    #pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        rounded[i] = vreinterpretq_s32_f32(vfmaq_n_f32(vdupq_n_f32(SHIFT), x[i], inverse));
    /* SHIFT's own bits are above the lowest 16, which hold the code. */
    int16x8_t low = vuzp1q_s16(vreinterpretq_s16_s32(rounded[0]), vreinterpretq_s16_s32(rounded[1]));
    int16x8_t high = vuzp1q_s16(vreinterpretq_s16_s32(rounded[2]), vreinterpretq_s16_s32(rounded[3]));
    vst1q_s8(codes, vuzp1q_s8(vreinterpretq_s8_s16(low), vreinterpretq_s8_s16(high)));
    *sum = vaddvq_s16(vaddq_s16(low, high));
    return scale + largest * 0.0f;                       /* NaN where a number is not finite: a broken row must show */
}
#else
ALWAYS float quantise(const float *from, int8_t *codes, int16_t *pairs, int32_t *sum) {
    Lanes x[SHARE / LANES], largest = {0}, bad = {0};
    for (int i = 0; i < SHARE / LANES; i++) {
        x[i] = ((const Lanes *)from)[i];
        largest = larger((Lanes)((Places)x[i] & 0x7fffffff), largest);
        bad += x[i] * 0.0f;                              /* NaN where x is not finite: a broken row must show */
    }
    float scale = scale_of(largest_of(largest)), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    *sum = 0;
    for (int i = 0; i < SHARE / LANES; i++) {
#if defined(__FMA__)
        Places rounded = (Places)(x[i] * inverse + SHIFT) - 0x4b400000;      /* one operation: the exact product is rounded */
#else
        Places rounded;
        for (int j = 0; j < LANES; j++) rounded[j] = (int32_t)nearbyint((double)x[i][j] * inverse);
#endif
        Small small = __builtin_convertvector(rounded, Small);
        memcpy(codes + i * LANES, &small, sizeof small);
        for (int j = 0; j < LANES; j++) *sum += rounded[j];
        if (pairs) {
            Middle middle = __builtin_convertvector(rounded, Middle);
            Middle order;
            for (int j = 0; j < LANES; j++) order[j] = (int16_t)(j / 4 * 4 + (j % 4 == 1 ? 2 : j % 4 == 2 ? 1 : j % 4));
            middle = __builtin_shuffle(middle, order);
            memcpy(pairs + i * LANES, &middle, sizeof middle);
        }
    }
    return scale + sum_of(bad);
}
#endif

static void quantise_tile(const float *from, const Activations *x, int64_t at) {
    Facts *facts = (Facts *)x->facts + at;
    int8_t *codes = (int8_t *)x->codes + at * DEEP;
    int16_t *pairs = x->pairs ? (int16_t *)x->pairs + at * DEEP : 0;
    facts->sum = 0.0f;
    for (int h = 0; h < HALVES; h++) {
        int32_t sum;
        facts->scale[h] = quantise(from + h * SHARE, codes + h * SHARE, pairs ? pairs + h * SHARE : 0, &sum);
#if defined(OWN_SUMS)
        facts->sum += facts->scale[h] * (float)sum;
        vst1q_f32(facts->less[h], vdupq_n_f32(facts->scale[h] * -BEGIN));
        for (int i = 0; i < 3; i++)
            if (x->begins[i]) vst1q_s32((int32_t *)x->begins[i][at][h], vdupq_n_s32(BEGIN_BITS - (8 << i) * sum));
#else
        facts->sums[h] = facts->scale[h] * (float)sum;
        facts->sum += facts->sums[h];
#endif
    }
}

typedef struct {
    const Activations *x;
    int64_t inputs, rows, each;
} Preparation;

static void prepare_rows(void *with, int64_t task) {
    const Preparation *job = with;
    const Activations *x = job->x;
    int64_t end = (task + 1) * job->each < job->rows ? (task + 1) * job->each : job->rows;
    for (int64_t row = task * job->each; row < end; row++) {
        const Together rows = together(job->rows, row);
        for (int64_t t = 0; t < x->tiles; t++) {
            const float *from = x->numbers + row * x->stride + t * DEEP;
            float filled[DEEP] = {0};
            if (job->inputs - t * DEEP < DEEP) {
                memcpy(filled, from, (job->inputs - t * DEEP) * sizeof(float));
                from = filled;
            }
            quantise_tile(from, x, tile_at(x, rows.first, rows.count, (int)(row - rows.first), t));
        }
    }
}

/* middles: bit i is set where weights have the code 8 << i for 0. */
static void prepare(Activations *x, int64_t rows, int64_t inputs, int pairs, int middles) {
    int64_t tiles = rows * x->tiles, codes = tiles * DEEP, facts = tiles * (int64_t)sizeof(Facts), begins = 0;
#if defined(OWN_SUMS)
    begins = tiles * (int64_t)sizeof *x->begins[0];
#endif
    uint8_t *at = room(PREPARED, codes + facts + (pairs ? 2 * codes : 0) + 3 * begins);
    x->codes = (int8_t *)at;
    x->facts = (const Facts *)(at + codes);
    x->pairs = pairs ? (const int16_t *)(at + codes + facts) : 0;
    for (int i = 0; i < 3; i++)
        x->begins[i] = begins && middles >> i & 1 ? (const int32_t (*)[HALVES][4])(at + codes + facts + i * begins) : 0;
    Preparation job = {x, inputs, rows, tiles > 256 ? (rows + 7) / 8 : rows};
    ridgeline_pool_run((rows + job.each - 1) / job.each, prepare_rows, &job);
}
