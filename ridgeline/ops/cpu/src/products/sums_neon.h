/* Sums of integer products with sdot: integer_sums() for machines whose arithmetic units bind.

   A Neoverse N1 has two such units. An sdot, a product, an addition and the copy of a register take one of them for a cycle, a
   conversion or a product of 32-bit integers for two or more; a load takes none. So
   - a sum of sdots begins at the bits of the float 1.5 * 2^23 (BEGIN), less what the code that means 0 adds. It stays within 2^22 of
     them, so that its bits are those of the float BEGIN + sum, and nothing is converted;
   - BEGIN is taken off by the product with the scale of the activations: -BEGIN * scale + scale * (BEGIN + sum), rounded once. The
     first term is exact, because the last two bits of a scale are 0 (activations.h);
   - first values are loaded, in all lanes;
   - K types add up what their inner scales multiply, and multiply by a head once.
   A tile and row of 4 outputs then take 12 slots, 8 of them for sdot. A compiler would load early and spill the sums: hence assembly. */

/* Registers of outputs that are summed at once. A tile of few rows is then read from one end to the other, and multiplied while the
   next one is on its way; register by register, the first would wait for memory and the others for the arithmetic units. */
#define ABREAST(count) ((count) <= 2 ? 4 : 1)

/* What comes after a group is asked for while the group is multiplied by. */
ALWAYS void fetch(const uint8_t *from, int64_t bytes) {
    #pragma GCC unroll 8
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
}

/* Of activations: codes, first values of sums, facts->less and facts->scale, of the first row and half that are multiplied by. */
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

/* Pieces of assembly. x, t, l: numbers of registers. A row's codes are 32 bytes, its facts 48; `first` is the distance of first values. */
#define START(x, t, row, half, first) \
    "ldr q" #x ", [%[codes], #32*" #row "+16*" #half "]\n\tldr q" #t ", [%[begin], #" #first "*(2*" #row "+" #half ")]\n\t"
#define SDOT(t, c, x, lane) "sdot v" #t ".4s, %[" #c #lane "].16b, v" #x ".4b[" #lane "]\n\t"
/* Four sums side by side, because an sdot waits for the one before it; of two with quads c and two with quads d. */
#define QUAD(t0, t1, t2, t3, c, d, lane) SDOT(t0, c, 24, lane) SDOT(t1, c, 25, lane) SDOT(t2, d, 26, lane) SDOT(t3, d, 27, lane)
#define QUADS(t0, t1, t2, t3, c, d) \
    QUAD(t0, t1, t2, t3, c, d, 0) QUAD(t0, t1, t2, t3, c, d, 1) QUAD(t0, t1, t2, t3, c, d, 2) QUAD(t0, t1, t2, t3, c, d, 3)
/* l = scale * (t - BEGIN), then sum += l * w. Products are slower than sdot, and an sdot after one of them waits: so they come together. */
#define TAKE(l, t, s, row, half) \
    "ldr q" #l ", [%[less], #48*" #row "+16*" #half "]\n\tldr s" #s ", [%[scale], #48*" #row "+4*" #half "]\n\t" \
    "fmla v" #l ".4s, v" #t ".4s, v" #s ".s[0]\n\t"
#define GIVE(sum, l, w) "fmla %[" #sum "].4s, v" #l ".4s, %[" #w "].4s\n\t"
#define FOUR(c, from) [c##0] "w"((from)[0]), [c##1] "w"((from)[1]), [c##2] "w"((from)[2]), [c##3] "w"((from)[3])
#define PLACE(at) [codes] "r"((at).codes), [begin] "r"((at).begin), [less] "r"((at).less), [scale] "r"((at).scale), \
                  "m"(*(const int8_t (*)[])(at).codes), "m"(*(const int32_t (*)[])(at).begin), "m"(*(const float (*)[])(at).less)
#define FEW "v16", "v17", "v18", "v19", "v24", "v25", "v26", "v27", "v28", "v29"
#define MANY FEW, "v20", "v21", "v22", "v23"

/* 16 inputs of 8 rows. */
#define EIGHT(first) __asm__( \
    START(24, 16, 0, 0, first) START(25, 17, 1, 0, first) START(26, 18, 2, 0, first) START(27, 19, 3, 0, first) \
    QUADS(16, 17, 18, 19, c, c) \
    START(24, 20, 4, 0, first) START(25, 21, 5, 0, first) START(26, 22, 6, 0, first) START(27, 23, 7, 0, first) \
    QUADS(20, 21, 22, 23, c, c) \
    TAKE(24, 16, 28, 0, 0) TAKE(25, 17, 29, 1, 0) TAKE(26, 18, 28, 2, 0) TAKE(27, 19, 29, 3, 0) \
    TAKE(16, 20, 28, 4, 0) TAKE(17, 21, 29, 5, 0) TAKE(18, 22, 28, 6, 0) TAKE(19, 23, 29, 7, 0) \
    GIVE(s0, 24, w) GIVE(s1, 25, w) GIVE(s2, 26, w) GIVE(s3, 27, w) GIVE(s4, 16, w) GIVE(s5, 17, w) GIVE(s6, 18, w) GIVE(s7, 19, w) \
    : [s0] "+w"(sums[0]), [s1] "+w"(sums[1]), [s2] "+w"(sums[2]), [s3] "+w"(sums[3]), [s4] "+w"(sums[4]), [s5] "+w"(sums[5]), \
      [s6] "+w"(sums[6]), [s7] "+w"(sums[7]) \
    : FOUR(c, codes), [w] "w"(w), PLACE(at) : MANY)
ALWAYS void add_eight(const Bytes codes[4], Place at, int middle, Floats w, Floats sums[8]) {
    if (middle) EIGHT(16);
    else EIGHT(0);
}

/* Both halves of 4 rows. */
#define TILE(first) __asm__( \
    START(24, 16, 0, 0, first) START(25, 17, 1, 0, first) START(26, 18, 2, 0, first) START(27, 19, 3, 0, first) \
    QUADS(16, 17, 18, 19, c, c) \
    START(24, 20, 0, 1, first) START(25, 21, 1, 1, first) START(26, 22, 2, 1, first) START(27, 23, 3, 1, first) \
    QUADS(20, 21, 22, 23, d, d) \
    TAKE(24, 16, 28, 0, 0) TAKE(25, 17, 29, 1, 0) TAKE(26, 18, 28, 2, 0) TAKE(27, 19, 29, 3, 0) \
    TAKE(16, 20, 28, 0, 1) TAKE(17, 21, 29, 1, 1) TAKE(18, 22, 28, 2, 1) TAKE(19, 23, 29, 3, 1) \
    GIVE(s0, 24, w0) GIVE(s1, 25, w0) GIVE(s2, 26, w0) GIVE(s3, 27, w0) GIVE(s0, 16, w1) GIVE(s1, 17, w1) GIVE(s2, 18, w1) GIVE(s3, 19, w1) \
    : [s0] "+w"(sums[0]), [s1] "+w"(sums[1]), [s2] "+w"(sums[2]), [s3] "+w"(sums[3]) \
    : FOUR(c, codes), FOUR(d, codes + 4), [w0] "w"(w0), [w1] "w"(w1), PLACE(at) : MANY)
ALWAYS void add_four(const Bytes codes[8], Place at, int middle, Floats w0, Floats w1, Floats sums[4]) {
    if (middle) TILE(16);
    else TILE(0);
}
#undef TILE

#define TILE(first) __asm__( \
    START(24, 16, 0, 0, first) START(25, 17, 1, 0, first) START(26, 18, 0, 1, first) START(27, 19, 1, 1, first) \
    QUADS(16, 17, 18, 19, c, d) \
    TAKE(24, 16, 28, 0, 0) TAKE(25, 17, 29, 1, 0) TAKE(26, 18, 28, 0, 1) TAKE(27, 19, 29, 1, 1) \
    GIVE(s0, 24, w0) GIVE(s1, 25, w0) GIVE(s0, 26, w1) GIVE(s1, 27, w1) \
    : [s0] "+w"(sums[0]), [s1] "+w"(sums[1]) \
    : FOUR(c, codes), FOUR(d, codes + 4), [w0] "w"(w0), [w1] "w"(w1), PLACE(at) : FEW)
ALWAYS void add_two(const Bytes codes[8], Place at, int middle, Floats w0, Floats w1, Floats sums[2]) {
    if (middle) TILE(16);
    else TILE(0);
}
#undef TILE

/* The sums of sdots of one row and one register of outputs. */
#define ONE(c, d, lane) "sdot %[t0].4s, %[" #c "].16b, %[x0].4b[" #lane "]\n\tsdot %[t1].4s, %[" #d "].16b, %[x1].4b[" #lane "]\n\t"
ALWAYS void dots_one(const Bytes codes[8], const Floats x[HALVES], const int32_t (*begin)[4], Floats dots[HALVES]) {
    __asm__("ldr %q[t0], %[begin0]\n\tldr %q[t1], %[begin1]\n\t" ONE(c0, d0, 0) ONE(c1, d1, 1) ONE(c2, d2, 2) ONE(c3, d3, 3)
            : [t0] "=&w"(dots[0]), [t1] "=&w"(dots[1])
            : FOUR(c, codes), FOUR(d, codes + 4), [x0] "w"(x[0]), [x1] "w"(x[1]), [begin0] "Q"(begin[0]), [begin1] "Q"(begin[1]));
}

/* ... and what becomes of those of 4 registers. */
#define TAKE_ONE(l, t, half) \
    "ldr q" #l ", %[less" #half "]\n\tfmla v" #l ".4s, %[" #t "].4s, %[facts].s[" #half "]\n\t"
ALWAYS void give_one(Floats dots[4][HALVES], const Facts *facts, const Floats w0[4], const Floats w1[4], Floats *sums[4]) {
    __asm__(TAKE_ONE(16, t0, 0) TAKE_ONE(17, t1, 0) TAKE_ONE(18, t2, 0) TAKE_ONE(19, t3, 0)
            TAKE_ONE(20, u0, 1) TAKE_ONE(21, u1, 1) TAKE_ONE(22, u2, 1) TAKE_ONE(23, u3, 1)
            GIVE(s0, 16, v0) GIVE(s1, 17, v1) GIVE(s2, 18, v2) GIVE(s3, 19, v3) GIVE(s0, 20, w0) GIVE(s1, 21, w1) GIVE(s2, 22, w2) GIVE(s3, 23, w3)
            : [s0] "+w"(*sums[0]), [s1] "+w"(*sums[1]), [s2] "+w"(*sums[2]), [s3] "+w"(*sums[3])
            : [t0] "w"(dots[0][0]), [t1] "w"(dots[1][0]), [t2] "w"(dots[2][0]), [t3] "w"(dots[3][0]), [u0] "w"(dots[0][1]), [u1] "w"(dots[1][1]),
              [u2] "w"(dots[2][1]), [u3] "w"(dots[3][1]), FOUR(v, w0), FOUR(w, w1), [facts] "w"(vld1q_f32(facts->scale)),
              [less0] "Q"(facts->less[0]), [less1] "Q"(facts->less[1])
            : "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23");
}

/* One tile of `count` rows against one register of outputs; w: the scales of its halves. Of 8 rows one half after the other: fewer registers. */
ALWAYS void add_rows(int bits, const uint8_t *tile, int part, const Activations *x, int middle, int64_t at, Floats w0, Floats w1, int count,
                     Floats *sums) {
    Bytes codes[8];
    const Place first = place_of(x, middle, at, 0);
    if (count < 8) unpack_half(bits, tile, part, 0, codes), unpack_half(bits, tile, part, 1, codes + 4);
    if (count == 8) {
        unpack_half(bits, tile, part, 0, codes);
        add_eight(codes, first, middle, w0, sums);
        unpack_half(bits, tile, part, 1, codes);
        add_eight(codes, place_of(x, middle, at, 1), middle, w1, sums);
    } else if (count == 4) add_four(codes, first, middle, w0, w1, sums);
    else add_two(codes, first, middle, w0, w1, sums);
}

/* One tile of one row against 4 registers of outputs. */
ALWAYS void add_row(int bits, const uint8_t *tile, const Activations *x, int middle, int64_t at, const Floats w0[4], const Floats w1[4],
                    Floats *sums[4]) {
    static const int32_t BEGINS[HALVES][4] = {{BEGIN_BITS, BEGIN_BITS, BEGIN_BITS, BEGIN_BITS}, {BEGIN_BITS, BEGIN_BITS, BEGIN_BITS, BEGIN_BITS}};
    const Floats from[HALVES] = {vld1q_f32((const float *)(x->codes + at * DEEP)), vld1q_f32((const float *)(x->codes + at * DEEP + SHARE))};
    Floats dots[4][HALVES];
    #pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
        Bytes codes[8];
        unpack(bits, tile, p, codes);
        dots_one(codes, from, middle ? x->begins[BEGINS_OF(middle)][at] : BEGINS, dots[p]);
    }
    give_one(dots, x->facts + at, w0, w1, sums);
}

ALWAYS void add_parts(int bits, const uint8_t *tile, int part, int parts, const Activations *x, int middle, int64_t at, const Floats *w0,
                      const Floats *w1, int count, Floats sums[][MOST]) {
    if (count == 1) {
        Floats *first[4] = {&sums[0][0], &sums[1][0], &sums[2][0], &sums[3][0]};
        add_row(bits, tile, x, middle, at, w0, w1, first);
        return;
    }
    #pragma GCC unroll 4
    for (int p = 0; p < parts; p++) add_rows(bits, tile, part + p, x, middle, at, w0[p], w1[p], count, sums[p]);
}

/* sums += offset * the sums of the activations */
ALWAYS void add_offsets(Floats offset, const Activations *x, int64_t at, int count, Floats *sums) {
    #pragma GCC unroll 8
    for (int m = 0; m < count; m++) sums[m] = vfmaq_laneq_f32(sums[m], offset, vld1q_f32(x->facts[at + m].scale), HALVES);
}

/* `deep` tiles of a K type from tile t on, whose head is shared: added to `sums`. */
ALWAYS void add_span(int kind, const Group *group, const uint8_t *head, const Activations *x, int64_t row, int64_t t, int64_t deep, int part,
                     int parts, int count, Floats sums[][MOST]) {
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
                add_offsets(inner_unsigned(group->inner + d * inner_bytes(K_OFFSET) + ROWS, part + p), x, tile_at(x, row, count, 0, d), count,
                            inner[p]);
        #pragma GCC unroll 4
        for (int p = 0; p < parts; p++) {
            const Floats offset = head_of(format.style, head, part + p).offset;
            #pragma GCC unroll 8
            for (int m = 0; m < count; m++) sums[p][m] = plus_times(sums[p][m], inner[p][m], offset), inner[p][m] = zeros();
        }
    }
    for (int64_t d = t; d < t + deep; d++) {
        fetch(next + d * each, each);
        const uint8_t *tile = group->codes + d * code_bytes(format.bits), *scales = group->inner + d * inner_bytes(format.style);
        const int two = format.style == K_SIGNED;
        Floats w0[ROWS / WIDE], w1[ROWS / WIDE];
        #pragma GCC unroll 4
        for (int p = 0; p < parts; p++) {
            w0[p] = two ? inner_signed(scales, part + p) : inner_unsigned(scales, part + p);
            w1[p] = two ? inner_signed(scales + ROWS, part + p) : w0[p];
        }
        add_parts(format.bits, tile, part, parts, x, (int)format.middle, tile_at(x, row, count, 0, d), w0, w1, count, inner);
    }
    #pragma GCC unroll 4
    for (int p = 0; p < parts; p++) {
        const Floats scale = head_of(format.style, head, part + p).scale;
        #pragma GCC unroll 8
        for (int m = 0; m < count; m++) sums[p][m] = plus_times(sums[p][m], inner[p][m], scale);
    }
}

/* `count` rows of integer activations from `row` on against `parts` registers of outputs of a group, from `part` on. */
ALWAYS void integer_sums(int kind, const Group *group, const Activations *all_x, int64_t row, int64_t span, int part, int parts,
                         int count, Floats sums[][MOST]) {
    const Activations copy = *all_x, *x = &copy;
    const Format format = FORMATS[kind];
    const int style = format.style, offsets = style == HALF_OFFSET || style == FULL_OFFSET;
    const uint8_t *head = group->heads;
    #pragma GCC unroll 4
    for (int p = 0; p < parts; p++)
        #pragma GCC unroll 8
        for (int m = 0; m < count; m++) sums[p][m] = zeros();
    if (style == K_OFFSET || style == K_SIGNED) {
        for (int64_t t = 0; t < x->tiles; t += span, head += head_bytes(style))
            add_span(kind, group, head, x, row, t, t + span < x->tiles ? span : x->tiles - t, part, parts, count, sums);
        return;
    }
    const uint8_t *next = group->codes + group->bytes * (ROWS + part * WIDE) / ROWS;
    const int64_t each = tile_bytes(kind) * parts * WIDE / ROWS / 64 * 64;    /* of the next group, for a tile of this one */
    int64_t left = span;
    for (int64_t t = 0; t < x->tiles; t++) {
        fetch(next + t * each, each);
        const int64_t at = tile_at(x, row, count, 0, t);
        Floats scale[ROWS / WIDE];
        #pragma GCC unroll 4
        for (int p = 0; p < parts; p++) {
            const Head own = head_of(style, head, part + p);
            scale[p] = own.scale;
            if (offsets) add_offsets(own.offset, x, at, count, sums[p]);
        }
        add_parts(format.bits, group->codes + t * code_bytes(format.bits), part, parts, x, (int)format.middle, at, scale, scale, count, sums);
        if (--left == 0) head += head_bytes(style), left = span;
    }
}
