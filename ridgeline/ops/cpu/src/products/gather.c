/* Single outputs of a matrix in tiles as float32 numbers: rows of an embedding, and what the weights are. */

#include "tiles.h"

#include <string.h>

#include "../pool.h"
#include "halves.h"

static float number_at(const uint8_t *from, int kind) {
    uint16_t bits;
    uint32_t wide;
    if (kind == F32) {
        memcpy(&wide, from, 4);
    } else {
        memcpy(&bits, from, 2);
        if (kind == F16) return half(bits);
        wide = (uint32_t)bits << 16;
    }
    union { uint32_t bits; float value; } same = {wide};
    return same.value;
}

/* The code of input k (0..31) of an output in a tile. */
static inline int code_at(const uint8_t *codes, int bits, int64_t row, int k) {
    int quad = k / 4, at = (int)row * 4 + k % 4;
    if (bits == 8) return (int8_t)codes[quad * 64 + at];
    int code = codes[quad % 4 * 64 + at] >> quad / 4 * 4 & 15;
    if (bits == 5) code |= (codes[256 + at] >> quad & 1) << 4;
    if (bits == 6) code |= (codes[256 + quad / 4 * 64 + at] >> quad % 4 * 2 & 3) << 4;
    return code;
}

/* What a code of e4m3 or e2m1 stands for. */
static float floating(int code, int bits) {
    int low = code & ((1 << (bits - 1)) - 1), sign = code >> (bits - 1) & 1;
    return half((uint16_t)(sign << 15 | low << HALF_SHIFT(bits))) * HALF_POWER(bits);
}

static float half_at(const uint8_t *head, int64_t place) {
    uint16_t bits;
    memcpy(&bits, head + 2 * place, 2);
    return half(bits);
}

/* Rounded as the definition rounds: the product, then the sum. */
static void row_numbers(const Segment *segment, int64_t place, float *to) {
    const int kind = (int)segment->kind, bits = FORMATS[kind].bits, style = FORMATS[kind].style;
    const Group group = group_at(segment, place / ROWS);
    int64_t row = place % ROWS;
    for (int64_t t = 0; t < tiles_of(segment); t++) {
        const uint8_t *codes = group.codes + t * code_bytes(bits), *inner = group.inner + t * inner_bytes(style);
        const uint8_t *head = group.heads + t / segment->span * head_bytes(style);
        int64_t most = segment->inputs - t * DEEP < DEEP ? segment->inputs - t * DEEP : DEEP;
        for (int k = 0; k < most; k++) {
            float *out = to + t * DEEP + k;
            if (style == NONE) {
                *out = number_at(codes + (k * ROWS + row) * (bits / 8), kind);
                continue;
            }
            int number = code_at(codes, bits, row, k);
            float code = kind == NF4 ? NF4_NUMBERS[number] : is_floating(kind) ? floating(number, bits) : (float)number;
            if (style == K_SIGNED) {
                float scale = (float)(int8_t)inner[k / 16 * ROWS + row] * half_at(head, row);
                *out = (code - FORMATS[kind].middle) * scale;
            } else if (style == HALF) {
                *out = (code - FORMATS[kind].middle) * half_at(head, row);
            } else {
                volatile float product;                  /* not one operation with the sum */
                if (style == HALF_OFFSET) {
                    product = code * half_at(head, row);
                    *out = product + half_at(head, ROWS + row);
                } else if (style == K_OFFSET) {
                    volatile float scale = (float)inner[row] * half_at(head, row);
                    volatile float offset = (float)inner[ROWS + row] * half_at(head, ROWS + row);
                    product = code * scale;
                    *out = product - offset;
                } else {
                    const float *full = (const float *)head;
                    product = code * full[row];
                    *out = style == FULL_OFFSET ? product + full[ROWS + row] : product;
                }
            }
        }
    }
}

typedef struct {
    const Segment *segments;
    const int64_t *numbers;
    float *out;
    int64_t count, each;
    float scale;
} Gather;

static void gather_rows(void *with, int64_t task) {
    const Gather *job = with;
    int64_t end = (task + 1) * job->each < job->count ? (task + 1) * job->each : job->count;
    for (int64_t i = task * job->each; i < end; i++) {
        const Segment *segment = job->segments;
        int64_t place = job->numbers[i];
        while (place >= segment->rows) place -= segment->rows, segment++;
        float *to = job->out + i * segment->inputs;
        row_numbers(segment, place, to);
        if (job->scale != 1.0f) for (int64_t k = 0; k < segment->inputs; k++) to[k] *= job->scale;
    }
}

/* out [count, inputs]: these outputs of the segments, which lie one below the other, times `scale`. */
void ridgeline_matrix_rows(const Segment *segments, const int64_t *numbers, float *out, int64_t count, float scale) {
    Gather job = {segments, numbers, out, count, 4, scale};
    ridgeline_pool_run((count + 3) / 4, gather_rows, &job);
}
