/* Products of activations with weights in tiles: out = x w^T + bias, with integer or float32 activations.

   An unpacked tile serves up to MOST rows of activations, so that a weight is read once for them. A row's result depends neither
   on the other rows nor on the number of threads: every sum is added up in the order of the inputs. */

#include "tiles.h"

#include <stdlib.h>
#include <string.h>

#include "../level.h"
#include "../pool.h"

#if defined(__AVX512BW__)
#include "isa_avx512.h"
#elif defined(__AVX2__)
#include "isa_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "isa_neon.h"
#else
#include "isa_plain.h"
#endif

#if !defined(OWN_SUMS)
#define ABREAST(count) 1
#define PANEL_TILES(count) INT64_MAX
#define inner_unsigned(all, part) load_unsigned((all) + (part) * WIDE)      /* scales of a register of outputs, of 16 */
#define inner_signed(all, part) load_signed((all) + (part) * WIDE)
#endif

#if defined(__AVX512VNNI__)
#define UNSIGNED_WEIGHTS 1           /* vpdpbusd multiplies unsigned bytes: 128 is added, and taken off by an offset */
#endif

#define BLOCK 256                    /* rows of activations that are prepared at a time */

/* Memory of this thread: for the codes of one block of rows, or for the numbers of a register of outputs. */
enum Use { PREPARED, EXPANDED };
static void *room(enum Use use, int64_t bytes) {
    static __thread void *kept[2];
    static __thread int64_t size[2];
    if (bytes > size[use]) {
        free(kept[use]);
        size[use] = (bytes + 4095) / 4096 * 4096;
        kept[use] = aligned_alloc(64, size[use]);
        if (!kept[use]) abort();
    }
    return kept[use];
}

/* The codes of half a tile, as 4 registers of quads; `part` is the number of the register of outputs. */
ALWAYS void unpack_half(int bits, const uint8_t *from, int part, int half, Bytes codes[4]) {
    from += part * WIDE * 4;
    #pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        if (bits == 8) {
            codes[c] = load_bytes(from + 64 * (4 * half + c));
            continue;
        }
        Bytes both = load_bytes(from + 64 * c);
        codes[c] = half ? upper(both) : masked(both, 15);
        if (bits == 5) {
            Bytes fifths = load_bytes(from + 256);
            codes[c] = with_bits(codes[c], half ? down(fifths, c) : up(fifths, 4 - c), 16);
        } else if (bits == 6) {
            Bytes pairs = load_bytes(from + 256 + half * 64);
            codes[c] = with_bits(codes[c], c < 3 ? up(pairs, 4 - 2 * c) : down(pairs, 2), 48);
        }
    }
}

ALWAYS void unpack(int bits, const uint8_t *from, int part, Bytes codes[8]) {
    unpack_half(bits, from, part, 0, codes);
    unpack_half(bits, from, part, 1, codes + 4);
}

/* The numbers of a head, for one register of outputs. */
typedef struct { Floats scale, offset; } Head;

ALWAYS Head head_of(int style, const uint8_t *head, int part) {
    Head found;
    int at = part * WIDE, full = style == FULL || style == FULL_OFFSET, offsets = style == HALF_OFFSET || style == K_OFFSET;
    found.scale = full ? load_floats(head + 4 * at) : load_halves(head + 2 * at);
    found.offset = style == FULL_OFFSET ? load_floats(head + 4 * (ROWS + at))
                 : offsets ? load_halves(head + 2 * (ROWS + at)) : zeros();
    if (style == K_OFFSET) found.offset = times(found.offset, all(-1.0f));
    return found;
}

/* What a tile's codes are multiplied by, and what is added: number = code * scale + offset. Of K_SIGNED there are two, for
   the first and the second 16 inputs. */
typedef struct { Floats scale[2], offset[2]; } Scale;

ALWAYS Scale scales_of(int style, float middle, Head head, const uint8_t *inner, int part) {
    Scale found;
    found.scale[0] = head.scale;
    found.offset[0] = style == HALF ? times(head.scale, all(-middle)) : head.offset;
    if (style == K_OFFSET) {
        found.scale[0] = times(head.scale, inner_unsigned(inner, part));
        found.offset[0] = times(head.offset, inner_unsigned(inner + ROWS, part));
    } else if (style == K_SIGNED) {
        #pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            found.scale[i] = times(head.scale, inner_signed(inner + i * ROWS, part));
            found.offset[i] = times(found.scale[i], all(-middle));
        }
    }
    return found;
}

/* Whether a style adds something to code * scale. */
ALWAYS int has_offset(int style, int bits) {
    return style == HALF_OFFSET || style == K_OFFSET || style == FULL_OFFSET || style == K_SIGNED || (style == HALF && bits != 8);
}

#if defined(OWN_SUMS)
#include "sums_neon.h"
#else
/* Integer products of the tile `at` with the codes of one register of outputs. */
ALWAYS void tile_products(int bits, const Bytes *codes, const Activations *x, int64_t at, Floats products[HALVES]) {
    #pragma GCC unroll 2
    for (int h = 0; h < HALVES; h++) {
#if defined(PAIRS)
        if (bits == 8) products[h] = dots_of_pairs(codes + h * SHARE / 2, x->pairs + at * DEEP + h * SHARE);
        else
#endif
        products[h] = dots(bits, codes + h * SHARE / 4, x->codes + at * DEEP + h * SHARE);
    }
}

/* The products of a tile, with the scales of both sides. */
ALWAYS Floats tile_sum(int style, int bits, Floats products[HALVES], const Scale *scale, const Facts *facts, Floats sum) {
    products[0] = times(products[0], all(facts->scale[0]));
    if (style == K_SIGNED) {
        sum = plus_times(sum, products[0], scale->scale[0]);
        sum = plus_times(sum, scale->offset[0], all(facts->sums[0]));
        sum = plus_times(sum, times(products[1], all(facts->scale[1])), scale->scale[1]);
        return plus_times(sum, scale->offset[1], all(facts->sums[1]));
    }
    sum = plus_times(sum, plus_times(products[0], products[1], all(facts->scale[1])), scale->scale[0]);
    if (has_offset(style, bits)) sum = plus_times(sum, scale->offset[0], all(facts->sum));
    return sum;
}

/* `count` rows of integer activations from `row` on, tiles `from` to `to`, against one register of outputs of a group: added to
   `sums`. */
ALWAYS void integer_sums(int kind, const Group *group, const Activations *x, int64_t row, int64_t from, int64_t to, int64_t span,
                         int part, int parts, int count, Floats all_sums[][MOST]) {
    const Format format = FORMATS[kind];
    const int bits = format.bits, style = format.style;
    const uint8_t *head_at = group->heads + from / span * head_bytes(style);
    Head head = head_of(style, head_at, part);
    Floats *sums = all_sums[0];
    (void)parts;
    int64_t left = span - from % span;
    for (int64_t t = from; t < to; t++) {
        Bytes codes[REGISTERS];
        if (format.span == 1) head = head_of(style, head_at, part);
        unpack(bits, group->codes + t * code_bytes(bits), part, codes);
        const Scale scale = scales_of(style, format.middle, head, group->inner + t * inner_bytes(style), part);
#if defined(PAIRS)
        if (bits == 8)
            #pragma GCC unroll 8
            for (int i = 7; i >= 0; i--) widen(codes[i], &codes[2 * i], &codes[2 * i + 1]);
#elif defined(UNSIGNED_WEIGHTS)
        const Floats shift = times(scale.scale[0], all(-128.0f));
        if (bits == 8)
            #pragma GCC unroll 8
            for (int i = 0; i < 8; i++) codes[i] = _mm512_xor_si512(codes[i], _mm512_set1_epi8((char)128));
#endif
        #pragma GCC unroll 8
        for (int m = 0; m < count; m++) {
            Floats products[HALVES];
            const int64_t at = tile_at(x, row, count, m, t);
            tile_products(bits, codes, x, at, products);
            sums[m] = tile_sum(style, bits, products, &scale, x->facts + at, sums[m]);
#if defined(UNSIGNED_WEIGHTS)
            if (bits == 8) sums[m] = plus_times(sums[m], shift, all(x->facts[at].sum));
#endif
        }
        if (--left) continue;
        head_at += head_bytes(style), left = span;
        if (format.span != 1 && t + 1 < to) head = head_of(style, head_at, part);
    }
}
#endif

/* One tile of float32 activations against its numbers. [inputs][stride] */
ALWAYS void add_tile(const float *weights, int64_t stride, const float *from, int64_t x_stride, int64_t inputs, int count,
                     Floats sums[MOST]) {
    for (int64_t k = 0; k < inputs; k++) {
        Floats weight = load_floats(weights + k * stride);
        #pragma GCC unroll 8
        for (int m = 0; m < count; m++) sums[m] = plus_times(sums[m], weight, all(from[m * x_stride + k]));
    }
}

/* A tile's numbers for one register of outputs, [32][WIDE]. */
ALWAYS void expand_tile(int kind, const Group *group, int64_t t, int64_t span, int part, float *to) {
    const Format format = FORMATS[kind];
    const int bits = format.bits, style = format.style;
    const uint8_t *from = group->codes + t * code_bytes(bits);
    Bytes codes[8];
    unpack(bits, from, part, codes);
    const uint8_t *head = group->heads + t / span * head_bytes(style);
    Scale scale = scales_of(style, format.middle, head_of(style, head, part), group->inner + t * inner_bytes(style), part);
    if (is_floating(kind)) scale.scale[0] = times(scale.scale[0], all(HALF_POWER(bits)));
    #pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        #pragma GCC unroll 4
        for (int place = 0; place < 4; place++) {
            const int second = style == K_SIGNED && i >= 4;
            Floats weight = is_floating(kind) ? halves_of(codes[i], place, bits)
                          : kind == NF4 ? found_in(NF4_NUMBERS, codes[i], place) : numbers_of(codes[i], place, bits == 8);
            if (has_offset(style, bits)) weight = plus_times(scale.offset[second], weight, scale.scale[second]);
            else weight = times(weight, scale.scale[second]);
            store(to + (4 * i + place) * WIDE, weight);
        }
}

typedef void (*Expand)(const Group *, int64_t, int64_t, int, float *);
#define EXPANDS(KIND) \
    static __attribute__((noinline)) void expand_##KIND(const Group *group, int64_t t, int64_t span, int part, float *to) { \
        expand_tile(KIND, group, t, span, part, to); \
    }
EXPANDS(Q4_0) EXPANDS(Q4_1) EXPANDS(Q5_0) EXPANDS(Q5_1) EXPANDS(Q8_0) EXPANDS(Q4_K) EXPANDS(Q5_K) EXPANDS(Q6_K)
EXPANDS(INT4) EXPANDS(INT8) EXPANDS(E4M3) EXPANDS(E2M1) EXPANDS(NF4)
static const Expand EXPAND[KINDS] = {
    [Q4_0] = expand_Q4_0, [Q4_1] = expand_Q4_1, [Q5_0] = expand_Q5_0, [Q5_1] = expand_Q5_1, [Q8_0] = expand_Q8_0,
    [Q4_K] = expand_Q4_K, [Q5_K] = expand_Q5_K, [Q6_K] = expand_Q6_K, [INT4] = expand_INT4, [INT8] = expand_INT8,
    [E4M3] = expand_E4M3, [E2M1] = expand_E2M1, [NF4] = expand_NF4,
};

/* `count` rows of float32 activations against packed weights: the numbers that they stand for. */
ALWAYS void float_sums(const Segment *segment, const Group *group, const Activations *x, int64_t row, int part, int count,
                       Floats sums[MOST]) {
    #pragma GCC unroll 8
    for (int m = 0; m < count; m++) sums[m] = zeros();
    const float *from = x->numbers + row * x->stride;
    for (int64_t t = 0; t < x->tiles; t++) {
        float weights[DEEP * WIDE] __attribute__((aligned(64)));
        EXPAND[segment->kind](group, t, segment->span, part, weights);
        const int64_t left = segment->inputs - t * DEEP;
        add_tile(weights, WIDE, from + t * DEEP, x->stride, left < DEEP ? left : DEEP, count, sums);
    }
}

/* One register of outputs of input k of a group that stores numbers. */
ALWAYS Floats stored_numbers(int kind, const uint8_t *group, int64_t k, int part) {
    const uint8_t *at = group + (k * ROWS + part * WIDE) * (FORMATS[kind].bits / 8);
    return kind == F32 ? load_floats(at) : kind == F16 ? load_halves(at) : load_brains(at);
}

/* `count` rows of float32 activations against `wide` registers of outputs that are stored as numbers, from register `first` of the
   segment on: inputs `from` to `to` are added to `sums`. Two registers use every activation twice. */
ALWAYS void number_sums(int kind, const Segment *segment, const Activations *x, int64_t row, int64_t first, int wide, int count,
                        int64_t from, int64_t to, Floats sums[2][MOST]) {
    const uint8_t *groups[2];
    int parts[2];
    #pragma GCC unroll 2
    for (int r = 0; r < wide; r++) {
        groups[r] = group_at(segment, (first + r) * WIDE / ROWS).codes;
        parts[r] = (int)((first + r) % (ROWS / WIDE));
    }
    const float *numbers = x->numbers + row * x->stride;
    for (int64_t k = from; k < to; k++) {
        Floats weights[2];
        #pragma GCC unroll 2
        for (int r = 0; r < wide; r++) weights[r] = stored_numbers(kind, groups[r], k, parts[r]);
        #pragma GCC unroll 8
        for (int m = 0; m < count; m++) {
            Floats number = all(numbers[m * x->stride + k]);
            #pragma GCC unroll 2
            for (int r = 0; r < wide; r++) sums[r][m] = plus_times(sums[r][m], weights[r], number);
        }
    }
}

typedef struct {
    const Segment *segments;
    const Activations *x;
    const float *bias;
    float *out;
    int64_t count, rows, outputs, integers, groups, each;      /* each: groups of a task */
} Job;

/* The sums of `count` rows from `row` on into their places, with the bias. `first`: of the outputs; `left` of them are real. */
ALWAYS void put(const Job *job, const Floats sums[MOST], int64_t row, int64_t first, int64_t left, int count) {
    #pragma GCC unroll 8
    for (int m = 0; m < count; m++) {
        float *to = job->out + (row + m) * job->outputs + first, kept[WIDE];
        Floats sum = sums[m];
        if (left >= WIDE) {
            store(to, job->bias ? plus(sum, load_floats(job->bias + first)) : sum);
            continue;
        }
        store(kept, sum);
        for (int64_t o = 0; o < left; o++) to[o] = kept[o] + (job->bias ? job->bias[first + o] : 0.0f);
    }
}

/* `count` rows against one group, panel by panel of inputs: sums that are not whole yet are kept. kind: a constant for integer
   activations; KINDS: float32 ones. */
ALWAYS void some_rows(const Job *job, int kind, const Segment *segment, const Group *group, int64_t row, int64_t first,
                      int64_t left, int count) {
    const int parts = kind == KINDS ? 1 : ABREAST(count);
    const int64_t tiles = job->x->tiles, panel = kind == KINDS ? INT64_MAX : PANEL_TILES(count);
    Floats kept[ROWS / WIDE][MOST];
    for (int64_t from = 0; from < tiles; from += panel) {
        const int64_t to = tiles - from > panel ? from + panel : tiles;
        #pragma GCC unroll 1
        for (int part = 0; part < ROWS / WIDE && part * WIDE < left; part += parts) {
            Floats sums[ROWS / WIDE][MOST];
            #pragma GCC unroll 4
            for (int p = 0; p < parts; p++)
                #pragma GCC unroll 8
                for (int m = 0; m < count; m++) sums[p][m] = from ? kept[part + p][m] : zeros();
            if (kind == KINDS) float_sums(segment, group, job->x, row, part, count, sums[0]);
            else integer_sums(kind, group, job->x, row, from, to, segment->span, part, parts, count, sums);
            #pragma GCC unroll 4
            for (int p = 0; p < parts; p++) {
                const int before = (part + p) * WIDE;
                if (to == tiles && before < left) put(job, sums[p], row, first + before, left - before, count);
                #pragma GCC unroll 8
                for (int m = 0; m < count && to < tiles; m++) kept[part + p][m] = sums[p][m];
            }
        }
        if (panel == INT64_MAX) break;
    }
}

/* The rows that `row` is multiplied together with, of a block of `rows`: as many as possible, 8, 4, 2 or 1 (MOST at most). */
typedef struct { int64_t first; int count; } Together;

ALWAYS Together together(int64_t rows, int64_t row) {
    Together found = {row / MOST * MOST, MOST};
    while (rows - found.first < found.count) {
        found.count /= 2;
        if (row - found.first >= found.count && rows - found.first > found.count) found.first += found.count;
    }
    return found;
}

ALWAYS void group_rows(const Job *job, int kind, const Segment *segment, int64_t number, int64_t first, int64_t row, int64_t end) {
    const Group group = group_at(segment, number);
    const int64_t left = segment->rows - number * ROWS;
    for (Together rows; row < end; row += rows.count) {
        rows = together(end, row);
#if MOST >= 8
        if (rows.count == 8) some_rows(job, kind, segment, &group, row, first, left, 8);
#endif
        if (rows.count == 4) some_rows(job, kind, segment, &group, row, first, left, 4);
        if (rows.count == 2) some_rows(job, kind, segment, &group, row, first, left, 2);
        if (rows.count == 1) some_rows(job, kind, segment, &group, row, first, left, 1);
    }
}

#define OF_KIND(KIND) \
    static __attribute__((noinline)) void rows_##KIND(const Job *job, const Segment *segment, int64_t number, int64_t first, \
                                                      int64_t row, int64_t end) { \
        group_rows(job, KIND, segment, number, first, row, end); \
    }
OF_KIND(Q4_0) OF_KIND(Q4_1) OF_KIND(Q5_0) OF_KIND(Q5_1) OF_KIND(Q8_0) OF_KIND(Q4_K) OF_KIND(Q5_K) OF_KIND(Q6_K)
OF_KIND(INT4) OF_KIND(INT8)
OF_KIND(KINDS)                       /* float32 activations */

typedef void (*RowsOf)(const Job *, const Segment *, int64_t, int64_t, int64_t, int64_t);
static const RowsOf ROWS_OF[KINDS] = {
    [Q4_0] = rows_Q4_0, [Q4_1] = rows_Q4_1, [Q5_0] = rows_Q5_0, [Q5_1] = rows_Q5_1, [Q8_0] = rows_Q8_0, [Q4_K] = rows_Q4_K,
    [Q5_K] = rows_Q5_K, [Q6_K] = rows_Q6_K, [INT4] = rows_INT4, [INT8] = rows_INT8,
};

/* Many rows of float32 activations against one group: its numbers are expanded once for all of them. */
static void expanded_rows(const Job *job, const Segment *segment, int64_t number, int64_t first, int64_t row, int64_t end) {
    const Group group = group_at(segment, number);
    const int64_t left = segment->rows - number * ROWS;
    const Activations *x = job->x;
    float *numbers = room(EXPANDED, x->tiles * DEEP * WIDE * (int64_t)sizeof(float));
    for (int part = 0; part < ROWS / WIDE && left > part * WIDE; part++) {
        for (int64_t t = 0; t < x->tiles; t++)
            EXPAND[segment->kind](&group, t, segment->span, part, numbers + t * DEEP * WIDE);
        int64_t at = row;
        #define SOME(COUNT) \
            for (; at + COUNT <= end; at += COUNT) { \
                Floats sums[MOST]; \
                for (int m = 0; m < COUNT; m++) sums[m] = zeros(); \
                add_tile(numbers, WIDE, x->numbers + at * x->stride, x->stride, segment->inputs, COUNT, sums); \
                put(job, sums, at, first + part * WIDE, left - part * WIDE, COUNT); \
            }
#if MOST >= 8
        SOME(8)
#endif
        SOME(4) SOME(2) SOME(1)
        #undef SOME
    }
}

/* Inputs whose weights, of two registers of outputs, stay in the L1 cache while all rows are multiplied by them. */
#define PANEL(kind) ((16 << 10) / (FORMATS[kind].bits / 8) / (2 * WIDE))

/* `count` rows against `wide` registers of outputs: inputs `from` to `to`. Sums that are not whole yet are kept, as they are. */
ALWAYS void panel_rows(const Job *job, int kind, const Segment *segment, int64_t row, int64_t reg, int64_t first, int64_t left,
                       int64_t from, int64_t to, float *kept, int wide, int count) {
    Floats sums[2][MOST];
    #pragma GCC unroll 2
    for (int r = 0; r < wide; r++)
        #pragma GCC unroll 8
        for (int m = 0; m < count; m++) sums[r][m] = from ? load_floats(kept + (2 * m + r) * WIDE) : zeros();
    number_sums(kind, segment, job->x, row, reg, wide, count, from, to, sums);
    #pragma GCC unroll 2
    for (int r = 0; r < wide; r++) {
        if (to == segment->inputs) put(job, sums[r], row, first + r * WIDE, left - r * WIDE, count);
        else
            #pragma GCC unroll 8
            for (int m = 0; m < count; m++) store(kept + (2 * m + r) * WIDE, sums[r][m]);
    }
}

ALWAYS void panels(const Job *job, int kind, const Segment *segment, int64_t begin, int64_t end, int64_t reg, int64_t first,
                   int64_t left, int wide) {
    float kept[BLOCK * 2 * WIDE] __attribute__((aligned(64)));
    for (int64_t from = 0; from < segment->inputs; from += PANEL(kind)) {
        const int64_t to = from + PANEL(kind) < segment->inputs ? from + PANEL(kind) : segment->inputs;
        int64_t row = begin;
        #define SOME(COUNT) \
            for (; row + COUNT <= end; row += COUNT) \
                panel_rows(job, kind, segment, row, reg, first, left, from, to, kept + (row - begin) * 2 * WIDE, wide, COUNT);
#if MOST >= 8
        SOME(8)
#endif
        SOME(4) SOME(2) SOME(1)
        #undef SOME
    }
}

/* All rows against `groups` groups that store numbers. `first`: of the outputs. */
ALWAYS void number_rows(const Job *job, int kind, const Segment *segment, int64_t number, int64_t groups, int64_t first,
                        int64_t row, int64_t end) {
    const int64_t reg = number * (ROWS / WIDE), rest = segment->rows - number * ROWS;
    const int64_t left = groups * ROWS < rest ? groups * ROWS : rest;
    for (int64_t r = 0; r * WIDE < left; r += 2) {
        if ((r + 1) * WIDE < left) panels(job, kind, segment, row, end, reg + r, first + r * WIDE, left - r * WIDE, 2);
        else panels(job, kind, segment, row, end, reg + r, first + r * WIDE, left - r * WIDE, 1);
    }
}

#define OF_NUMBERS(KIND) \
    static __attribute__((noinline)) void numbers_##KIND(const Job *job, const Segment *segment, int64_t number, int64_t groups, \
                                                         int64_t first, int64_t row, int64_t end) { \
        number_rows(job, KIND, segment, number, groups, first, row, end); \
    }
OF_NUMBERS(F16) OF_NUMBERS(BF16) OF_NUMBERS(F32)
typedef void (*NumbersOf)(const Job *, const Segment *, int64_t, int64_t, int64_t, int64_t, int64_t);
static const NumbersOf NUMBERS_OF[KINDS] = {[F16] = numbers_F16, [BF16] = numbers_BF16, [F32] = numbers_F32};

#define NEAR_BYTES (192 << 10)      /* of activations that are multiplied by group after group while they are in the L2 cache */

static void do_groups(void *with, int64_t task) {
    const Job *job = with;
    int64_t begin = task * job->each, end = begin + job->each < job->groups ? begin + job->each : job->groups;
    int64_t row_bytes = job->x->tiles * (DEEP * (job->integers ? 1 : 4) + (int64_t)sizeof(Facts));
    int64_t near = NEAR_BYTES / row_bytes / MOST * MOST;
    if (near < MOST) near = MOST;
    if (NUMBERS_OF[job->segments->kind]) near = BLOCK;   /* a panel of their inputs is near */
    for (int64_t row = 0; row < job->rows; row += near) {
        const Segment *segment = job->segments;
        int64_t before = 0, outputs = 0, last = row + near < job->rows ? row + near : job->rows;
        for (int64_t g = begin; g < end; g++) {
            while (g - before >= groups_of(segment)) before += groups_of(segment), outputs += segment->rows, segment++;
            const int64_t number = g - before, first = outputs + number * ROWS;
            if (NUMBERS_OF[segment->kind]) {
                int64_t groups = g + 1 < end && number + 1 < groups_of(segment) ? 2 : 1;
                NUMBERS_OF[segment->kind](job, segment, number, groups, first, row, last);
                g += groups - 1;
                continue;
            }
            RowsOf rows_of = last - row > 2 * MOST ? expanded_rows : rows_KINDS;
            if (job->integers && ROWS_OF[segment->kind]) rows_of = ROWS_OF[segment->kind];
            rows_of(job, segment, number, first, row, last);
        }
    }
}

/* One block of activations, prepared, against all segments. */
static void multiply(Job *job) {
    int64_t threads = ridgeline_pool_threads(), most = job->rows > 64 ? 6 * threads : 4 * threads;
    job->groups = 0;
    for (int64_t s = 0; s < job->count; s++) job->groups += groups_of(&job->segments[s]);
    job->each = threads == 1 ? job->groups : (job->groups + most - 1) / most;
    ridgeline_pool_run((job->groups + job->each - 1) / job->each, do_groups, job);
}

#include "activations.h"

/* out [rows, outputs] = x [rows, inputs] w^T + bias; x has a row stride. The parts of w, one below the other, are `segments`.
   integers: x is rounded to 8 bits, each 16 with a scale. */
void KERNEL(packed_linear)(const Segment *segments, int64_t count, const float *x, const float *bias, float *out, int64_t rows,
                           int64_t inputs, int64_t outputs, int64_t x_stride, int64_t integers) {
    int pairs = 0, codes = 0, middles = 0;
    for (int64_t s = 0; s < count; s++) {
        codes |= ROWS_OF[segments[s].kind] != 0;
        middles |= (int)FORMATS[segments[s].kind].middle / 8;
    }
    integers = integers && codes;                        /* other kinds are multiplied by numbers */
#if defined(PAIRS)
    for (int64_t s = 0; s < count; s++) pairs |= ROWS_OF[segments[s].kind] && FORMATS[segments[s].kind].bits == 8;
#endif
    for (int64_t row = 0; row < rows; row += BLOCK) {
        int64_t block = rows - row < BLOCK ? rows - row : BLOCK;
        Activations prepared = {0, 0, 0, {0, 0, 0}, x + row * x_stride, (inputs + DEEP - 1) / DEEP, x_stride};
        if (integers) prepare(&prepared, block, inputs, pairs, middles);
        Job job = {segments, &prepared, bias, out + row * outputs, count, block, outputs, integers, 0, 0};
        multiply(&job);
    }
}
