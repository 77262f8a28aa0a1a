/* How packed weights lie in memory for the product kernels, on every machine.

   A matrix is cut into groups of 16 outputs (ROWS) and tiles of 32 inputs (DEEP). Of a tile, the codes of four neighbouring
   inputs (a quad) of all 16 outputs lie side by side, output by output, four bytes each: one 512-bit register, two 256-bit ones
   or four 128-bit ones. An integer product of such a register with four codes of the activations adds to 16 sums, one for each
   output, so that nothing is summed across lanes, and the scales of 16 outputs are a register, too.

   A group is
       codes    of all tiles: 8 quads of 64 bytes in 8 bits; in fewer bits
                quads 0..3 in the low halves and quads 4..7 in the high halves of 256 bytes, then of 5 bits the fifth bits
                (bit i of a byte: quad i), of 6 bits the upper pairs (pair i of a byte: quad i of the first 64 bytes, quad
                4 + i of the next 64)
       inner    K types, of all tiles: 16 scales and 16 offsets of a byte (Q4_K, Q5_K), or 2 x 16 scales (Q6_K: one for 16 inputs)
       heads    of every span of tiles: 16 scales, and 16 offsets where the format has them
   and begins at a multiple of 64 bytes. Outputs that fill up the last group have scale 0. */

#ifndef RIDGELINE_TILES_H
#define RIDGELINE_TILES_H

#include <stdint.h>

#define ROWS 16
#define DEEP 32
#define ALWAYS static inline __attribute__((always_inline))

/* Numbered as in ops/cpu/matrix.py. */
enum Kind { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, INT4, INT8, E4M3, E2M1, NF4, F16, BF16, F32, KINDS };

/* How scales are stored: heads in 16 or 32 bits, with offsets or without; K types have two levels. */
enum Style { HALF, HALF_OFFSET, K_OFFSET, K_SIGNED, FULL, FULL_OFFSET, NONE };

typedef struct {
    int bits, style, span;           /* span: tiles that share a head; 0: the matrix says how many */
    float middle;                    /* the code that means 0, where no offset is stored */
} Format;

static const Format FORMATS[KINDS] = {
    [Q4_0] = {4, HALF, 1, 8.0f}, [Q4_1] = {4, HALF_OFFSET, 1, 0.0f}, [Q5_0] = {5, HALF, 1, 16.0f},
    [Q5_1] = {5, HALF_OFFSET, 1, 0.0f}, [Q8_0] = {8, HALF, 1, 0.0f}, [Q4_K] = {4, K_OFFSET, 8, 0.0f},
    [Q5_K] = {5, K_OFFSET, 8, 0.0f}, [Q6_K] = {6, K_SIGNED, 8, 32.0f}, [INT4] = {4, FULL_OFFSET, 0, 0.0f},
    [INT8] = {8, FULL, 0, 0.0f}, [E4M3] = {8, FULL, 0, 0.0f}, [E2M1] = {4, FULL, 0, 0.0f}, [NF4] = {4, FULL, 0, 0.0f},
    [F16] = {16, NONE, 1, 0.0f}, [BF16] = {16, NONE, 1, 0.0f}, [F32] = {32, NONE, 1, 0.0f},
};

/* Codes that stand for floating-point numbers. e4m3 and e2m1 become a float16 by moving their bits: the sign to the top, exponent
   and fraction next to it. It is the number but for a power of two, also of subnormal ones. NaN of e4m3 is not kept in tiles. */
ALWAYS int is_floating(int kind) { return kind == E4M3 || kind == E2M1; }
#define HALF_SHIFT(bits) ((bits) == 8 ? 7 : 9)
#define HALF_POWER(bits) ((bits) == 8 ? 256.0f : 16384.0f)

static const float NF4_NUMBERS[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
    -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f,
};

/* Bytes of a tile's codes, of its inner scales, and of a head. */
ALWAYS int64_t code_bytes(int bits) { return bits * (ROWS * DEEP / 8); }
ALWAYS int64_t inner_bytes(int style) { return style == K_OFFSET || style == K_SIGNED ? 2 * ROWS : 0; }
ALWAYS int64_t head_bytes(int style) {
    return style == NONE ? 0 : ROWS * ((style == FULL || style == FULL_OFFSET ? 4 : 2)
           * (style == HALF_OFFSET || style == K_OFFSET || style == FULL_OFFSET ? 2 : 1));
}

/* Bytes of a tile with the head of its own, if it has one. */
ALWAYS int64_t tile_bytes(int kind) {
    const Format format = FORMATS[kind];
    return code_bytes(format.bits) + inner_bytes(format.style) + (format.span == 1 ? head_bytes(format.style) : 0);
}

/* One part of a linear: `rows` outputs of one kind. Filled by Python (ops/cpu/matrix.py). */
typedef struct {
    uint8_t *data;
    int64_t kind, rows, inputs, span;
} Segment;

ALWAYS int64_t tiles_of(const Segment *segment) { return (segment->inputs + DEEP - 1) / DEEP; }
ALWAYS int64_t groups_of(const Segment *segment) { return (segment->rows + ROWS - 1) / ROWS; }

typedef struct {
    const uint8_t *codes, *inner, *heads;
    int64_t bytes;
} Group;

ALWAYS int64_t group_bytes(const Segment *segment) {
    const Format format = FORMATS[segment->kind];
    int64_t tiles = tiles_of(segment), spans = (tiles + segment->span - 1) / segment->span;
    int64_t bytes = tiles * (code_bytes(format.bits) + inner_bytes(format.style)) + spans * head_bytes(format.style);
    return (bytes + 63) / 64 * 64;
}

ALWAYS Group group_at(const Segment *segment, int64_t number) {
    const Format format = FORMATS[segment->kind];
    int64_t tiles = tiles_of(segment);
    Group group;
    group.bytes = group_bytes(segment);
    group.codes = segment->data + number * group.bytes;
    group.inner = group.codes + tiles * code_bytes(format.bits);
    group.heads = group.inner + tiles * inner_bytes(format.style);
    return group;
}

/* A row of activations in 8 bits. Each 16 (SHARE) have a scale, number = scale * code: one large number spoils few others, and a
   tile's two sums of integers cost two operations more than one. `sums` are scale * the sum of codes, `sum` is that of
   the whole tile, which offsets are multiplied by. `pairs` are the codes again in 16 bits, where the machine multiplies 8-bit
   weights in 16 bits: of each four 0, 2, 1, 3. */
#define SHARE 16                     /* as GROUP in ops/linear/gguf_blocks.py, and the inputs that share a scale of Q6_K */
#define HALVES (DEEP / SHARE)

typedef struct {
#if defined(__ARM_FEATURE_DOTPROD)
    float less[HALVES][4];           /* sums_neon.h: -BEGIN * scale, in all lanes */
    float scale[HALVES], sum, spare;
#else
    float scale[HALVES], sum, sums[HALVES];
#endif
} Facts;

typedef struct {
    const int8_t *codes;             /* of each tile 32, at tile_at() */
    const int16_t *pairs;            /* at the same places, or NULL */
    const Facts *facts;              /* as codes, for each tile */
    const int32_t (*begins[3])[HALVES][4];   /* sums_neon.h: first values of sums, for weights whose code for 0 is 8, 16 or 32 */
    const float *numbers;            /* [rows][stride] */
    int64_t tiles, stride;
} Activations;

/* Where tile t of row `row` + m lies, of `count` rows from `row` on that are multiplied together: tile by tile, side by side. */
ALWAYS int64_t tile_at(const Activations *x, int64_t row, int count, int m, int64_t t) { return row * x->tiles + t * count + m; }

#define BEGIN 12582912.0f            /* 1.5 * 2^23 */
#define BEGIN_BITS 0x4b400000
#define BEGINS_OF(middle) ((middle) == 32 ? 2 : (middle) / 16)

#endif
