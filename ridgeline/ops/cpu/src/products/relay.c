/* Weights from the layout of their file into tiles (tiles.h): every bit is kept, only its place changes. */

#include "tiles.h"

#include <string.h>

#include "../pool.h"

static const int64_t BLOCK_BYTES[KINDS] = {[Q4_0] = 18, [Q4_1] = 20, [Q5_0] = 22, [Q5_1] = 24, [Q8_0] = 34, [Q4_K] = 144,
                                           [Q5_K] = 176, [Q6_K] = 210, [F16] = 64, [BF16] = 64, [F32] = 128};
#define LOW 0x0f0f0f0fu

static inline uint32_t four(const uint8_t *from) {
    uint32_t word;
    memcpy(&word, from, 4);
    return word;
}

/* The codes of a tile of one output, as quads, into their places. */
static void put_nibbles(uint8_t *codes, int64_t row, const uint32_t quads[8]) {
    for (int c = 0; c < 4; c++) {
        uint32_t both = (quads[c] & LOW) | (quads[c + 4] & LOW) << 4;
        memcpy(codes + c * 64 + row * 4, &both, 4);
    }
}

static void put_fifths(uint8_t *codes, int64_t row, const uint32_t quads[8]) {
    uint32_t word = 0;
    for (int i = 0; i < 8; i++) word |= (quads[i] >> 4 & 0x01010101u) << i;
    memcpy(codes + 256 + row * 4, &word, 4);
}

static void put_pairs(uint8_t *codes, int64_t row, const uint32_t quads[8]) {
    for (int half = 0; half < 2; half++) {
        uint32_t word = 0;
        for (int i = 0; i < 4; i++) word |= (quads[half * 4 + i] >> 4 & 0x03030303u) << 2 * i;
        memcpy(codes + 256 + half * 64 + row * 4, &word, 4);
    }
}

static void put_bytes(uint8_t *codes, int64_t row, const uint32_t quads[8]) {
    for (int i = 0; i < 8; i++) memcpy(codes + i * 64 + row * 4, &quads[i], 4);
}

static void put_codes(int bits, uint8_t *codes, int64_t row, const uint32_t quads[8]) {
    if (bits == 8) {
        put_bytes(codes, row, quads);
        return;
    }
    put_nibbles(codes, row, quads);
    if (bits == 5) put_fifths(codes, row, quads);
    if (bits == 6) put_pairs(codes, row, quads);
}

/* Four bytes with these bits of `bits` in bit 4 of each. */
static inline uint32_t fifths(uint32_t bits) {
    return (bits & 1) << 4 | (bits & 2) << 11 | (bits & 4) << 18 | (bits & 8) << 25;
}

/* One block of 32 of the types without super-blocks. */
static void relay_block(int kind, const uint8_t *block, uint8_t *codes, uint8_t *head, int64_t row) {
    int offset = kind == Q4_1 || kind == Q5_1;
    memcpy(head + row * 2, block, 2);
    if (offset) memcpy(head + ROWS * 2 + row * 2, block + 2, 2);
    const uint8_t *at = block + (offset ? 4 : 2);
    uint32_t quads[8];
    if (kind == Q8_0) {
        for (int i = 0; i < 8; i++) quads[i] = four(at + 4 * i);
        put_bytes(codes, row, quads);
        return;
    }
    uint32_t high = 0;
    if (kind == Q5_0 || kind == Q5_1) high = four(at), at += 4;
    for (int c = 0; c < 4; c++) {
        uint32_t word = four(at + 4 * c);
        quads[c] = (word & LOW) | fifths(high >> 4 * c);
        quads[c + 4] = (word >> 4 & LOW) | fifths(high >> (16 + 4 * c));
    }
    put_codes(FORMATS[kind].bits, codes, row, quads);
}

/* A super-block of 256 of Q4_K or Q5_K: eight tiles. Six-bit scales and offsets become bytes. */
static void relay_k(int kind, const uint8_t *block, uint8_t *codes, uint8_t *inner, uint8_t *head, int64_t row) {
    memcpy(head + row * 2, block, 2);
    memcpy(head + ROWS * 2 + row * 2, block + 2, 2);
    const uint8_t *small = block + 4, *fifth = block + 16, *quants = block + (kind == Q5_K ? 48 : 16);
    int bits = FORMATS[kind].bits;
    for (int t = 0; t < 8; t++) {
        inner[t * 32 + row] = t < 4 ? small[t] & 63 : (small[t + 4] & 15) | (small[t - 4] >> 6) << 4;
        inner[t * 32 + 16 + row] = t < 4 ? small[t + 4] & 63 : small[t + 4] >> 4 | (small[t] >> 6) << 4;
        uint32_t quads[8];
        for (int i = 0; i < 8; i++) {
            quads[i] = four(quants + t / 2 * 32 + 4 * i) >> t % 2 * 4 & LOW;
            if (kind == Q5_K) quads[i] |= (four(fifth + 4 * i) >> t & 0x01010101u) << 4;
        }
        put_codes(bits, codes + t * code_bytes(bits), row, quads);
    }
}

/* A super-block of Q6_K: 128 bytes of low halves, 64 of upper pairs, 16 scales, one scale for all. */
static void relay_q6(const uint8_t *block, uint8_t *codes, uint8_t *inner, uint8_t *head, int64_t row) {
    const uint8_t *low = block, *high = block + 128, *small = block + 192;
    memcpy(head + row * 2, block + 208, 2);
    for (int t = 0; t < 8; t++) {
        inner[t * 32 + row] = small[2 * t];
        inner[t * 32 + 16 + row] = small[2 * t + 1];
        uint32_t quads[8];
        int part = t / 4, turn = t % 4;                  /* of 128 weights; 32 of them */
        for (int i = 0; i < 8; i++) {
            uint32_t nibbles = four(low + part * 64 + turn % 2 * 32 + 4 * i) >> turn / 2 * 4 & LOW;
            quads[i] = nibbles | (four(high + part * 32 + 4 * i) >> 2 * turn & 0x03030303u) << 4;
        }
        put_codes(6, codes + t * code_bytes(6), row, quads);
    }
}

static void relay_numbers(int kind, const uint8_t *block, uint8_t *codes, int64_t row) {
    int width = kind == F32 ? 4 : 2;
    for (int i = 0; i < DEEP; i++) memcpy(codes + (i * ROWS + row) * width, block + i * width, width);
}

typedef struct {
    const Segment *to;
    const uint8_t *from;
    int64_t first, count, row_bytes;
} Relay;

static void relay_rows(void *with, int64_t task) {
    const Relay *job = with;
    const Segment *to = job->to;
    int kind = (int)to->kind;
    int64_t tiles = tiles_of(to), step = FORMATS[kind].span;
    for (int64_t number = task * ROWS; number < (task + 1) * ROWS && number < job->count; number++) {
        int64_t place = job->first + number, row = place % ROWS;
        Group group = group_at(to, place / ROWS);
        uint8_t *codes = (uint8_t *)group.codes, *inner = (uint8_t *)group.inner, *heads = (uint8_t *)group.heads;
        const uint8_t *from = job->from + number * job->row_bytes;
        for (int64_t t = 0; t < tiles; t += step, from += BLOCK_BYTES[kind]) {
            uint8_t *here = codes + t * code_bytes(FORMATS[kind].bits), *head = heads + t / step * head_bytes(FORMATS[kind].style);
            if (kind == Q4_K || kind == Q5_K) relay_k(kind, from, here, inner + t * 32, head, row);
            else if (kind == Q6_K) relay_q6(from, here, inner + t * 32, head, row);
            else if (kind >= F16) relay_numbers(kind, from, here, row);
            else relay_block(kind, from, here, head, row);
        }
    }
}

/* `count` rows as a GGUF file stores them into the outputs of `to` from `first` on. The rows behind the last one are zeros. */
void ridgeline_relay_blocks(const Segment *to, const uint8_t *from, int64_t first, int64_t count, int64_t row_bytes) {
    Relay job = {to, from, first, count, row_bytes};
    ridgeline_pool_run((count + ROWS - 1) / ROWS, relay_rows, &job);
}

typedef struct {
    const Segment *to;
    const uint8_t *codes;
    const float *scale, *offset;
} Codes;

static void relay_code_rows(void *with, int64_t task) {
    const Codes *job = with;
    const Segment *to = job->to;
    const Format format = FORMATS[to->kind];
    int64_t tiles = tiles_of(to), spans = (tiles + to->span - 1) / to->span;
    Group group = group_at(to, task);
    for (int64_t place = task * ROWS; place < (task + 1) * ROWS && place < to->rows; place++) {
        int64_t row = place % ROWS;
        for (int64_t t = 0; t < tiles; t++) {
            uint32_t quads[8] = {0};
            int64_t left = to->inputs - t * DEEP;
            memcpy(quads, job->codes + place * to->inputs + t * DEEP, left < DEEP ? left : DEEP);
            put_codes(format.bits, (uint8_t *)group.codes + t * code_bytes(format.bits), row, quads);
        }
        for (int64_t s = 0; s < spans; s++) {
            float *head = (float *)(group.heads + s * head_bytes(format.style));
            head[row] = job->scale[place * spans + s];
            if (format.style == FULL_OFFSET) head[ROWS + row] = job->offset[place * spans + s];
        }
    }
}

/* Whole matrices of INT4 or INT8: a byte for each code [rows, inputs], float32 scales and (INT4) offsets [rows, spans]. */
void ridgeline_relay_codes(const Segment *to, const uint8_t *codes, const float *scale, const float *offset) {
    Codes job = {to, codes, scale, offset};
    ridgeline_pool_run(groups_of(to), relay_code_rows, &job);
}

/* Bytes of a matrix in tiles. */
int64_t ridgeline_matrix_bytes(const Segment *segment) { return groups_of(segment) * group_bytes(segment); }

/* 1 where no scale or offset is infinite or NaN. */
int64_t ridgeline_scales_finite(const Segment *segment) {
    const int style = FORMATS[segment->kind].style;
    int64_t spans = (tiles_of(segment) + segment->span - 1) / segment->span, bytes = spans * head_bytes(style);
    int wide = style == FULL || style == FULL_OFFSET;
    for (int64_t g = 0; g < groups_of(segment); g++) {
        const uint8_t *heads = group_at(segment, g).heads;
        for (int64_t at = 0; at < bytes; at += wide ? 4 : 2) {
            uint32_t bits = 0;
            memcpy(&bits, heads + at, wide ? 4 : 2);
            if (wide ? (bits & 0x7f800000u) == 0x7f800000u : (bits & 0x7c00u) == 0x7c00u) return 0;
        }
    }
    return 1;
}
