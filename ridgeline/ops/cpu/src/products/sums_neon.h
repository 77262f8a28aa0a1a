/* Sums of integer products with sdot: integer_sums() for machines whose arithmetic units bind.

   A Neoverse N1 has two such units. An sdot, a product, an addition and the copy of a register take one of them for a cycle, a
   conversion or a product of 32-bit integers for two or more; a load takes none. So
   - a sum of sdots begins at the bits of the float 1.5 * 2^23 (BEGIN), less what the code that means 0 adds. It stays within
     2^22 of them, so that its bits are those of the float BEGIN + sum, and nothing is converted;
   - BEGIN is taken off by the product with the scale of the activations: -BEGIN * scale + scale * (BEGIN + sum), rounded once.
     The first term is exact, because the last two bits of a scale are 0 (activations.h);
   - first values are loaded, in all lanes;
   - K types add up what their inner scales multiply, and multiply by a head once;
   - an sdot soon after a product waits, because both would end in the same cycle. So products come eight at a time.
   A tile and row of 4 outputs then take 12 slots, 8 of them for sdot. A compiler would load early and spill the sums: hence
   assembly. */

/* Registers of outputs that are summed at once. A tile of few rows is then read from one end to the other, and multiplied while
   the next one is on its way; register by register, the first would wait for memory and the others for the arithmetic units. */
#define ABREAST(count) ((count) <= 2 ? 4 : 1)

/* Tiles after which the next register of outputs has its turn: their activations stay in the L1 cache. A multiple of 8. */
#define PANEL_TILES(count) ((count) <= 2 ? INT64_MAX : 32)

/* What comes after a group is asked for while the group is multiplied by: of many rows into the L2 cache, because activations
   fill the L1 cache. */
ALWAYS void fetch(const uint8_t *from, int64_t bytes, int count) {
    #pragma GCC unroll 8
    for (int64_t at = 0; at < bytes; at += 64) {
        if (count <= 2) __builtin_prefetch(from + at, 0, 3);
        else __builtin_prefetch(from + at, 0, 2);
    }
}

/* Of activations: codes, first values of sums, facts->less and facts->scale, of the first row and half that are multiplied. */
typedef struct {
    const int8_t *codes;
    const int32_t *begin;
    const float *less, *scale;
} Place;

ALWAYS Place place_of(const Activations *x, int middle, int64_t at, int half) {
    static const int32_t BEGINS[4] = {BEGIN_BITS, BEGIN_BITS, BEGIN_BITS, BEGIN_BITS};
    const Facts *facts = x->facts + at;
    const Place found = {x->codes + at * DEEP + half * SHARE, middle ? x->begins[BEGINS_OF(middle)][at][half] : BEGINS,
                         facts->less[half], facts->scale + half};
    return found;
}

/* Pieces of assembly; x, t, l and s are numbers of registers. A row's codes take 32 bytes, its facts 48. `first` is the distance
   between first values, 0 where all are the same. */
#define START(x, t, row, half, first) \
    "ldr q" #x ", [%[codes], #32*" #row "+16*" #half "]\n\tldr q" #t ", [%[begin], #" #first "*(2*" #row "+" #half ")]\n\t"
#define SDOT(t, c, x, lane) "sdot v" #t ".4s, %[" #c #lane "].16b, v" #x ".4b[" #lane "]\n\t"
/* Four sums side by side, because an sdot waits for the one before it; two with quads c and two with quads d. */
#define QUAD(t0, t1, t2, t3, c, d, lane) SDOT(t0, c, 24, lane) SDOT(t1, c, 25, lane) SDOT(t2, d, 26, lane) SDOT(t3, d, 27, lane)
#define QUADS(t0, t1, t2, t3, c, d) \
    QUAD(t0, t1, t2, t3, c, d, 0) QUAD(t0, t1, t2, t3, c, d, 1) QUAD(t0, t1, t2, t3, c, d, 2) QUAD(t0, t1, t2, t3, c, d, 3)
/* l = scale * (t - BEGIN), then sum += l * w. */
#define TAKE(l, t, s, row, half) \
    "ldr q" #l ", [%[less], #48*" #row "+16*" #half "]\n\tldr s" #s ", [%[scale], #48*" #row "+4*" #half "]\n\t" \
    "fmla v" #l ".4s, v" #t ".4s, v" #s ".s[0]\n\t"
#define GIVE(sum, l, w) "fmla %[" #sum "].4s, v" #l ".4s, %[" #w "].4s\n\t"
#define FOUR(c, from) [c##0] "w"((from)[0]), [c##1] "w"((from)[1]), [c##2] "w"((from)[2]), [c##3] "w"((from)[3])
#define READ(name, type, from) [name] "r"(from), "m"(*(const type (*)[])(from))
#define PLACE(at) READ(codes, int8_t, (at).codes), READ(begin, int32_t, (at).begin), READ(less, float, (at).less), \
                  [scale] "r"((at).scale)
#define USED "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29"

/* 16 inputs of 8 rows. */
#define EIGHT(first) __asm__( \
    START(24, 16, 0, 0, first) START(25, 17, 1, 0, first) START(26, 18, 2, 0, first) START(27, 19, 3, 0, first) \
    QUADS(16, 17, 18, 19, c, c) \
    START(24, 20, 4, 0, first) START(25, 21, 5, 0, first) START(26, 22, 6, 0, first) START(27, 23, 7, 0, first) \
    QUADS(20, 21, 22, 23, c, c) \
    TAKE(24, 16, 28, 0, 0) TAKE(25, 17, 29, 1, 0) TAKE(26, 18, 28, 2, 0) TAKE(27, 19, 29, 3, 0) \
    TAKE(16, 20, 28, 4, 0) TAKE(17, 21, 29, 5, 0) TAKE(18, 22, 28, 6, 0) TAKE(19, 23, 29, 7, 0) \
    GIVE(s0, 24, w) GIVE(s1, 25, w) GIVE(s2, 26, w) GIVE(s3, 27, w) \
    GIVE(s4, 16, w) GIVE(s5, 17, w) GIVE(s6, 18, w) GIVE(s7, 19, w) \
    : [s0] "+&w"(sums[0]), [s1] "+&w"(sums[1]), [s2] "+&w"(sums[2]), [s3] "+&w"(sums[3]), [s4] "+&w"(sums[4]), [s5] "+&w"(sums[5]), \
      [s6] "+&w"(sums[6]), [s7] "+&w"(sums[7]) \
    : FOUR(c, codes), [w] "w"(w), PLACE(at) : USED)
ALWAYS void add_eight(const Bytes codes[4], Place at, int middle, Floats w, Floats sums[8]) {
    if (middle) EIGHT(16);
    else EIGHT(0);
}

/* 32 inputs of 4 rows; w: of both halves. */
#define TILE(first) __asm__( \
    START(24, 16, 0, 0, first) START(25, 17, 1, 0, first) START(26, 18, 2, 0, first) START(27, 19, 3, 0, first) \
    QUADS(16, 17, 18, 19, c, c) \
    START(24, 20, 0, 1, first) START(25, 21, 1, 1, first) START(26, 22, 2, 1, first) START(27, 23, 3, 1, first) \
    QUADS(20, 21, 22, 23, d, d) \
    TAKE(24, 16, 28, 0, 0) TAKE(25, 17, 29, 1, 0) TAKE(26, 18, 28, 2, 0) TAKE(27, 19, 29, 3, 0) \
    TAKE(16, 20, 28, 0, 1) TAKE(17, 21, 29, 1, 1) TAKE(18, 22, 28, 2, 1) TAKE(19, 23, 29, 3, 1) \
    GIVE(s0, 24, v) GIVE(s1, 25, v) GIVE(s2, 26, v) GIVE(s3, 27, v) \
    GIVE(s0, 16, w) GIVE(s1, 17, w) GIVE(s2, 18, w) GIVE(s3, 19, w) \
    : [s0] "+&w"(sums[0]), [s1] "+&w"(sums[1]), [s2] "+&w"(sums[2]), [s3] "+&w"(sums[3]) \
    : FOUR(c, codes), FOUR(d, codes + 4), [v] "w"(w[0]), [w] "w"(w[1]), PLACE(at) : USED)
ALWAYS void add_four(const Bytes codes[8], Place at, int middle, const Floats w[HALVES], Floats sums[4]) {
    if (middle) TILE(16);
    else TILE(0);
}

/* Of one or two rows, sums of sdots are made for several registers of outputs before they are multiplied. */
#define ONE(lane) \
    "sdot %[t0].4s, %[c" #lane "].16b, %[x0].4b[" #lane "]\n\tsdot %[t1].4s, %[d" #lane "].16b, %[x1].4b[" #lane "]\n\t"
#define TWO(lane) \
    "sdot %[t0].4s, %[c" #lane "].16b, v24.4b[" #lane "]\n\tsdot %[t1].4s, %[c" #lane "].16b, v25.4b[" #lane "]\n\t" \
    "sdot %[t2].4s, %[d" #lane "].16b, v26.4b[" #lane "]\n\tsdot %[t3].4s, %[d" #lane "].16b, v27.4b[" #lane "]\n\t"
#define LOAD(t, x, row, half, first) \
    "ldr q" #x ", [%[codes], #32*" #row "+16*" #half "]\n\tldr %q[" #t "], [%[begin], #" #first "*(2*" #row "+" #half ")]\n\t"
#define DOTS_ONE(first) __asm__( \
    "ldr %q[t0], [%[begin]]\n\tldr %q[t1], [%[begin], #" #first "]\n\t" ONE(0) ONE(1) ONE(2) ONE(3) \
    : [t0] "=&w"(low[0]), [t1] "=&w"(high[0]) \
    : FOUR(c, codes), FOUR(d, codes + 4), [x0] "w"(load_bytes(at.codes)), [x1] "w"(load_bytes(at.codes + SHARE)), \
      READ(begin, int32_t, at.begin))
#define DOTS_TWO(first) __asm__( \
    LOAD(t0, 24, 0, 0, first) LOAD(t1, 25, 1, 0, first) LOAD(t2, 26, 0, 1, first) LOAD(t3, 27, 1, 1, first) \
    TWO(0) TWO(1) TWO(2) TWO(3) \
    : [t0] "=&w"(low[0]), [t1] "=&w"(low[1]), [t2] "=&w"(high[0]), [t3] "=&w"(high[1]) \
    : FOUR(c, codes), FOUR(d, codes + 4), PLACE(at) : "v24", "v25", "v26", "v27")
ALWAYS void dots_of(const Bytes codes[8], Place at, int middle, int count, Floats *low, Floats *high) {
    if (count == 2 && middle) DOTS_TWO(16);
    else if (count == 2) DOTS_TWO(0);
    else if (middle) DOTS_ONE(16);
    else DOTS_ONE(0);
}

#define TAKES(l, t, s, row, half) \
    "ldr q" #l ", [%[less], #48*" #row "+16*" #half "]\n\tfmla v" #l ".4s, %[" #t "].4s, v" #s ".s[" #half "]\n\t"
#define GIVE_ALL(row, s) __asm__( \
    "ldr q28, [%[scale]]\n\tldr q" #s ", [%[scale], #48*" #row "]\n\t" \
    TAKES(16, t0, 28, 0, 0) TAKES(17, t1, s, row, 0) TAKES(18, t2, 28, 0, 0) TAKES(19, t3, s, row, 0) \
    TAKES(20, u0, 28, 0, 1) TAKES(21, u1, s, row, 1) TAKES(22, u2, 28, 0, 1) TAKES(23, u3, s, row, 1) \
    GIVE(s0, 16, v0) GIVE(s1, 17, v1) GIVE(s2, 18, v2) GIVE(s3, 19, v3) \
    GIVE(s0, 20, w0) GIVE(s1, 21, w1) GIVE(s2, 22, w2) GIVE(s3, 23, w3) \
    : [s0] "+&w"(*sums[0]), [s1] "+&w"(*sums[1]), [s2] "+&w"(*sums[2]), [s3] "+&w"(*sums[3]) \
    : FOUR(t, low), FOUR(u, high), FOUR(v, w), FOUR(w, others), READ(less, float, at.less), [scale] "r"(at.scale) \
    : "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v28", "v" #s)
ALWAYS void give_four(const Floats low[4], const Floats high[4], Place at, const Floats w[4], const Floats others[4], int count,
                      Floats *const sums[4]) {
    if (count == 2) GIVE_ALL(1, 29);
    else GIVE_ALL(0, 28);
}

/* What a half of a tile's sums is multiplied by, for one register of outputs: an inner scale of a K type, or a head. */
ALWAYS Floats scale_at(int style, const uint8_t *scales, int part, int half) {
    if (style == K_OFFSET) return inner_unsigned(scales, part);
    return style == K_SIGNED ? inner_signed(scales + half * ROWS, part) : head_of(style, scales, part).scale;
}

/* One tile of 4 or 8 rows against one register of outputs. Of 8 one half after the other: the other's codes need no registers. */
ALWAYS void add_rows(int kind, const uint8_t *tile, const uint8_t *scales, int part, const Activations *x, int64_t at, int count,
                     Floats *sums) {
    const int bits = FORMATS[kind].bits, style = FORMATS[kind].style, middle = (int)FORMATS[kind].middle;
    const Place first = place_of(x, middle, at, 0);
    Floats w[HALVES];
    w[0] = scale_at(style, scales, part, 0);
    w[1] = style == K_SIGNED ? scale_at(style, scales, part, 1) : w[0];
    Bytes codes[8];
    unpack_half(bits, tile, part, 0, codes);
    if (count == 8) add_eight(codes, first, middle, w[0], sums);
    unpack_half(bits, tile, part, 1, codes + 4);
    if (count == 8) add_eight(codes + 4, place_of(x, middle, at, 1), middle, w[1], sums);
    else add_four(codes, first, middle, w, sums);
}

/* One tile of one or two rows against all 4 registers of outputs, as many as make four sums at a time. */
ALWAYS void add_few(int kind, const uint8_t *tile, const uint8_t *scales, const Activations *x, int64_t at, int count,
                    Floats sums[][MOST]) {
    const int style = FORMATS[kind].style, middle = (int)FORMATS[kind].middle, parts = 4 / count;
    const Place first = place_of(x, middle, at, 0);
    #pragma GCC unroll 2
    for (int part = 0; part < 4; part += parts) {
        Floats low[4], high[4], w[4], others[4], *to[4];
        #pragma GCC unroll 4
        for (int p = 0; p < parts; p++) {
            Bytes codes[8];
            unpack(FORMATS[kind].bits, tile, part + p, codes);
            dots_of(codes, first, middle, count, low + p * count, high + p * count);
        }
        #pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const int p = part + i / count;
            w[i] = scale_at(style, scales, p, 0);
            others[i] = style == K_SIGNED ? scale_at(style, scales, p, 1) : w[i];
            to[i] = &sums[p][i % count];
        }
        give_four(low, high, first, w, others, count, to);
    }
}

/* One tile of one row of 8-bit weights against all 4 registers. Memory binds: products between the loads cost nothing, and all
   loads in a row wait. The results are those of add_few(), to the bit. */
ALWAYS void add_bytes(int kind, const uint8_t *tile, const uint8_t *scales, const Activations *x, int64_t at,
                      Floats sums[][MOST]) {
    const Floats facts = vld1q_f32(x->facts[at].scale), begin = vdupq_n_f32(BEGIN);
    const int8x16_t x0 = vld1q_s8(x->codes + at * DEEP), x1 = vld1q_s8(x->codes + at * DEEP + SHARE);
    #pragma GCC unroll 4
    for (int p = 0; p < ROWS / WIDE; p++) {
        Bytes c[8];
        unpack(8, tile, p, c);
        const Floats w = scale_at(FORMATS[kind].style, scales, p, 0);
        int32x4_t t0 = vdupq_n_s32(BEGIN_BITS), t1 = t0;
        #define BOTH(lane) t0 = vdotq_laneq_s32(t0, vreinterpretq_s8_u8(c[lane]), x0, lane); \
                           t1 = vdotq_laneq_s32(t1, vreinterpretq_s8_u8(c[4 + lane]), x1, lane);
        BOTH(0) BOTH(1) BOTH(2) BOTH(3)
        #undef BOTH
        sums[p][0] = plus_times(sums[p][0], vmulq_laneq_f32(vsubq_f32(vreinterpretq_f32_s32(t0), begin), facts, 0), w);
        sums[p][0] = plus_times(sums[p][0], vmulq_laneq_f32(vsubq_f32(vreinterpretq_f32_s32(t1), begin), facts, 1), w);
    }
}

ALWAYS void add_tile_of(int kind, const uint8_t *tile, const uint8_t *scales, int part, const Activations *x, int64_t at,
                        int count, Floats sums[][MOST]) {
    if (count == 1 && FORMATS[kind].bits == 8) add_bytes(kind, tile, scales, x, at, sums);
    else if (count <= 2) add_few(kind, tile, scales, x, at, count, sums);
    else add_rows(kind, tile, scales, part, x, at, count, sums[0]);
}

/* sums += offset * the sums of the activations */
ALWAYS void add_offsets(Floats offset, const Activations *x, int64_t at, int count, Floats *sums) {
    #pragma GCC unroll 8
    for (int m = 0; m < count; m++) sums[m] = vfmaq_laneq_f32(sums[m], offset, vld1q_f32(x->facts[at + m].scale), HALVES);
}

/* `deep` tiles of a K type from tile t on, whose head is shared: added to `sums`. */
ALWAYS void add_span(int kind, const Group *group, const uint8_t *head, const Activations *x, int64_t row, int64_t t,
                     int64_t deep, int part, int parts, int count, Floats sums[][MOST]) {
    const Format format = FORMATS[kind];
    const uint8_t *next = group->codes + group->bytes * (ROWS + part * WIDE) / ROWS;
    const int64_t each = tile_bytes(kind) * parts * WIDE / ROWS / 64 * 64;    /* of the next group, for a tile of this one */
    Floats inner[ROWS / WIDE][MOST];
    #pragma GCC unroll 4
    for (int p = 0; p < parts; p++)
        #pragma GCC unroll 8
        for (int m = 0; m < count; m++) inner[p][m] = zeros();
    if (format.style == K_OFFSET) {
        #pragma GCC unroll 2
        for (int64_t d = t; d < t + deep; d++)
            #pragma GCC unroll 4
            for (int p = 0; p < parts; p++)
                add_offsets(inner_unsigned(group->inner + d * inner_bytes(K_OFFSET) + ROWS, part + p), x,
                            tile_at(x, row, count, 0, d), count, inner[p]);
        #pragma GCC unroll 4
        for (int p = 0; p < parts; p++) {
            const Floats offset = head_of(format.style, head, part + p).offset;
            #pragma GCC unroll 8
            for (int m = 0; m < count; m++) sums[p][m] = plus_times(sums[p][m], inner[p][m], offset), inner[p][m] = zeros();
        }
    }
    for (int64_t d = t; d < t + deep; d++) {
        fetch(next + d * each, each, count);
        add_tile_of(kind, group->codes + d * code_bytes(format.bits), group->inner + d * inner_bytes(format.style), part, x,
                    tile_at(x, row, count, 0, d), count, inner);
    }
    #pragma GCC unroll 4
    for (int p = 0; p < parts; p++) {
        const Floats scale = head_of(format.style, head, part + p).scale;
        #pragma GCC unroll 8
        for (int m = 0; m < count; m++) sums[p][m] = plus_times(sums[p][m], inner[p][m], scale);
    }
}

/* `count` rows of integer activations from `row` on, tiles `from` to `to`, against `parts` registers of outputs of a group, from
   `part` on: added to `sums`. */
ALWAYS void integer_sums(int kind, const Group *group, const Activations *all_x, int64_t row, int64_t from, int64_t to,
                         int64_t span, int part, int parts, int count, Floats sums[][MOST]) {
    const Activations copy = *all_x, *x = &copy;         /* whose fields no store can change */
    const Format format = FORMATS[kind];
    const int style = format.style, offsets = style == HALF_OFFSET || style == FULL_OFFSET;
    const uint8_t *head = group->heads + from / span * head_bytes(style);
    if (style == K_OFFSET || style == K_SIGNED) {
        for (int64_t t = from; t < to; t += span, head += head_bytes(style))
            add_span(kind, group, head, x, row, t, t + span < to ? span : to - t, part, parts, count, sums);
        return;
    }
    const uint8_t *next = group->codes + group->bytes * (ROWS + part * WIDE) / ROWS;
    const int64_t each = tile_bytes(kind) * parts * WIDE / ROWS / 64 * 64;    /* of the next group, for a tile of this one */
    int64_t left = span - from % span;
    for (int64_t t = from; t < to; t++) {
        fetch(next + t * each, each, count);
        const int64_t at = tile_at(x, row, count, 0, t);
        #pragma GCC unroll 4
        for (int p = 0; p < parts && offsets; p++) add_offsets(head_of(style, head, part + p).offset, x, at, count, sums[p]);
        add_tile_of(kind, group->codes + t * code_bytes(format.bits), head, part, x, at, count, sums);
        if (--left == 0) head += head_bytes(style), left = span;
    }
}
