/* Four rows of 8-bit blocks times eight columns of unpacked groups, by SDOT or SMMLA, for the variants neon_dot and
 * neon_bf16.
 *
 * Four rows' blocks are stored together once for many panels (int8.c), and groups as streams of eight columns: both in
 * the order in which they are read, so an instruction loads up to four vectors and moves on. Sums and results stay in
 * registers. SDOT multiplies four codes of a row with those of four columns, SMMLA eight codes of two rows with those of
 * two columns.
 *
 * Sums of codes begin with the bits of MIDDLE, a float whose last bit counts one. So they are floats at the end, MIDDLE
 * more than the sum, and the scaled sum takes one instruction: sum * scale - MIDDLE * scale, which is rounded once. The
 * second product is in the stream and must be exact. It is, unless a scale is no float16 number times a byte, as those of
 * DIVIDED (their sums are converted), or so large that the product is infinite. Then the result is not finite, and int8.c
 * computes that row in another way.
 */
#include "products/int8.h"

#if defined(NEON_DOT)

#include "products/int8_lanes.h"

#define MIDDLE 0x1.8p23f
enum { MIDDLE_BITS = 0x4b400000 };

/* Vectors that have a number of each of four rows, and of each of eight columns. SMMLA takes a vector of two rows and two
 * columns: [row][column]. */
#if defined(NEON_I8MM)
enum { ROW_VECTORS = 2, COLUMN_VECTORS = 4 };
#else
enum { ROW_VECTORS = 1, COLUMN_VECTORS = 2 };
#endif
enum { COLUMNS_TOGETHER = 8, PASSES = PANEL_COLUMNS / COLUMNS_TOGETHER, RESULT_VECTORS = 8 };

/* Four rows' blocks. */
typedef struct {
    Signed begin[4];                /* what the sums of a vector of columns begin with */
    int8_t codes[2][4 * GROUP / 2]; /* of each half of a group: of one row after the other; or eight of two rows in turn */
    Floats scale[ROW_VECTORS];
    Floats sum[2][ROW_VECTORS]; /* of the codes that belong to a minimum: of all, or of each half */
} FourRows;

/* How a type's blocks are stored. Types for which that is equal share them. The first ones have a zero, 2 ** form, which
 * is taken off by what sums begin with. */
enum { FORM_OF_SIGNED = 8, FORM_OF_DIVIDED, FORM_OF_MINIMUM, FORM_OF_MINIMA };

INLINE int has_exact_middle(const int type) { return BLOCK_TYPES[type].scales != DIVIDED; }

INLINE int form_of(const int type) {
    if (has_minimum(type)) return has_halves(type) ? FORM_OF_MINIMA : FORM_OF_MINIMUM;
    if (!has_exact_middle(type)) return FORM_OF_DIVIDED;
    return is_wide(type) || has_halves(type) ? FORM_OF_SIGNED : BLOCK_TYPES[type].zero_bits;
}

/* What is added to codes as they are unpacked. */
INLINE int added_to_codes(const int type) {
    return has_halves(type) && !has_minimum(type) ? -(1 << BLOCK_TYPES[type].zero_bits) : 0;
}

/* Bytes of a group of eight columns. */
INLINE int64_t stream_bytes(const int type) {
    const int64_t vectors = 4 + COLUMN_VECTORS * (1 + has_minimum(type));
    return GROUP * COLUMNS_TOGETHER + (1 + has_halves(type)) * vectors * VECTOR_BYTES;
}

enum { MOST_STREAM_BYTES = GROUP * COLUMNS_TOGETHER + 2 * (4 + 2 * COLUMN_VECTORS) * VECTOR_BYTES };

/* Write a number of each of four rows as sums or results need it: `each` has one after the other. */
INLINE void store_for_rows(Floats to[ROW_VECTORS], const Floats each) {
#if defined(NEON_I8MM)
    to[0] = (Floats)vzip1q_f32((float32x4_t)each, (float32x4_t)each);
    to[1] = (Floats)vzip2q_f32((float32x4_t)each, (float32x4_t)each);
#else
    to[0] = each;
#endif
}

/* Write what sums begin with. */
INLINE void store_beginnings(Signed begin[4], const Signed each) {
#if defined(NEON_I8MM)
    begin[0] = (Signed)vzip1q_s32((int32x4_t)each, (int32x4_t)each), begin[2] = begin[0];
    begin[1] = (Signed)vzip2q_s32((int32x4_t)each, (int32x4_t)each), begin[3] = begin[1];
#else
    begin[0] = (Signed)vdupq_laneq_s32((int32x4_t)each, 0), begin[1] = (Signed)vdupq_laneq_s32((int32x4_t)each, 1);
    begin[2] = (Signed)vdupq_laneq_s32((int32x4_t)each, 2), begin[3] = (Signed)vdupq_laneq_s32((int32x4_t)each, 3);
#endif
}

/* Write the numbers of four rows' blocks. */
INLINE void store_four_numbers(FourRows *to, const LoadedBlock x[4], const int form) {
    const uint32x4_t a = (uint32x4_t)x[0].rest, b = (uint32x4_t)x[1].rest;
    const uint32x4_t c = (uint32x4_t)x[2].rest, d = (uint32x4_t)x[3].rest;
    const uint32x4_t left = vzip1q_u32(a, c), right = vzip1q_u32(b, d); /* scales, sums */
    const uint32x4_t left_zeros = vzip2q_u32(a, c), right_zeros = vzip2q_u32(b, d);
    const Signed zeros = (Signed)vzip1q_u32(left_zeros, right_zeros);
    const Signed first = (Signed)vzip2q_u32(left_zeros, right_zeros); /* those of first halves */
    const int32_t middle = form == FORM_OF_DIVIDED ? 0 : MIDDLE_BITS;
    store_beginnings(to->begin, form < FORM_OF_SIGNED ? (zeros >> (7 - form)) + middle : (Signed){0} + middle);
    store_for_rows(to->scale, (Floats)vzip1q_u32(left, right));
    if (form == FORM_OF_MINIMUM) store_for_rows(to->sum[0], (Floats)vzip2q_u32(left, right));
    if (form != FORM_OF_MINIMA) return;
    store_for_rows(to->sum[0], __builtin_convertvector(-(first >> 7), Floats));
    store_for_rows(to->sum[1], __builtin_convertvector(-((zeros - first) >> 7), Floats));
}

/* Store groups [0, count) of some rows together: to[four rows][group]. The last row takes the places of missing ones. */
static void store_four_rows(FourRows *to, const Int8Block *x, int64_t x_stride, int64_t num_rows, int64_t count, int form) {
    for (int64_t row = 0; row < num_rows; row += 4) {
        const Int8Block *at[4];
        for (int i = 0; i < 4; i++) at[i] = x + (row + i < num_rows ? row + i : num_rows - 1) * x_stride;
        for (int64_t g = 0; g < count; g++, to++) {
            LoadedBlock four[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) four[i] = load_block(&at[i]);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++)
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
#if defined(NEON_I8MM)
                    const uint64x2_t a = (uint64x2_t)four[i / 2 * 2].codes[half];
                    const uint64x2_t b = (uint64x2_t)four[i / 2 * 2 + 1].codes[half];
                    const Words codes = (Words)(i % 2 ? vzip2q_u64(a, b) : vzip1q_u64(a, b));
#else
                    const Words codes = four[i].codes[half];
#endif
                    store_floats(to->codes[half] + i * VECTOR_BYTES, (Floats)codes);
                }
            store_four_numbers(to, four, form);
        }
    }
}

/* Store vectors one after the other, or the lanes of each two in turn, and return where the next ones go. */
INLINE char *store_two(char *to, const Words a, const Words b) {
    __asm__ volatile("stp %q1, %q2, [%0], #32" : "+r"(to) : "w"(a), "w"(b) : "memory");
    return to;
}

INLINE char *store_four(char *to, const Words a, const Words b, const Words c, const Words d) {
    register Words first __asm__("v28") = a, second __asm__("v29") = b;
    register Words third __asm__("v30") = c, last __asm__("v31") = d;
    __asm__ volatile("st1 {v28.4s-v31.4s}, [%0], #64"
                     : "+r"(to)
                     : "w"(first), "w"(second), "w"(third), "w"(last)
                     : "memory");
    return to;
}

INLINE char *store_in_turns(char *to, const Words a, const Words b, const Words c, const Words d) {
    register Words first __asm__("v28") = a, second __asm__("v29") = b;
    register Words third __asm__("v30") = c, last __asm__("v31") = d;
    __asm__ volatile("st2 {v28.4s, v29.4s}, [%0], #32\n\tst2 {v30.4s, v31.4s}, [%0], #32"
                     : "+r"(to)
                     : "w"(first), "w"(second), "w"(third), "w"(last)
                     : "memory");
    return to;
}

/* Write the codes of two steps of eight columns. */
INLINE char *store_steps(char *to, Words steps[2][PANEL_VECTORS]) {
#if defined(NEON_I8MM)
    return store_in_turns(to, steps[0][0], steps[1][0], steps[0][1], steps[1][1]);
#else
    return store_four(to, steps[0][0], steps[0][1], steps[1][0], steps[1][1]);
#endif
}

/* Write a number of each of eight columns. */
INLINE char *store_for_columns(char *to, const Floats left, const Floats right) {
#if defined(NEON_I8MM)
    const float64x2_t a = (float64x2_t)left, b = (float64x2_t)right;
    return store_four(to, (Words)vdupq_laneq_f64(a, 0), (Words)vdupq_laneq_f64(a, 1), (Words)vdupq_laneq_f64(b, 0),
                      (Words)vdupq_laneq_f64(b, 1));
#else
    return store_two(to, (Words)left, (Words)right);
#endif
}

/* Unpack a group of eight columns: pass `pass` of a panel. */
INLINE void unpack_eight_columns(char *to, const char *head, const char *group, const int pass, const OwnParts *own,
                                 const int type) {
    const char *codes = group + layout_of(type).scale_bytes + pass * 2 * VECTOR_BYTES;
    const AllBytes added = (AllBytes)all_words((uint8_t)added_to_codes(type) * 0x01010101u);
    const Scales left = load_scales(head, group, 2 * pass, own->unit, type);
    const Scales right = load_scales(head, group, 2 * pass + 1, own->unit, type);
#pragma GCC unroll 4
    for (int s = 0; s < 8; s += 2) {
        const int half = has_halves(type) ? s / 4 : 1;
        Words steps[2][PANEL_VECTORS];
        codes_of_two_steps(steps, codes, s, own->levels, type, 2);
        if (added_to_codes(type))
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) steps[i % 2][i / 2] = (Words)((AllBytes)steps[i % 2][i / 2] + added);
        to = store_steps(to, steps);
        if (s % 4 == 0 || (!has_halves(type) && s < 6)) continue;
        to = store_for_columns(to, left.scale[half], right.scale[half]);
        const Floats middle[2] = {left.scale[half] * -MIDDLE, right.scale[half] * -MIDDLE};
        to = store_for_columns(to, middle[0], middle[1]);
        if (COLUMN_VECTORS == 2) to = store_for_columns(to, middle[0], middle[1]);
    }
    for (int half = 0; has_minimum(type) && half < 1 + has_halves(type); half++)
        to = store_for_columns(to, left.minimum[half], right.minimum[half]);
}

/* Registers: v0 to v3 codes of x, v4 to v7 and v24 to v27 those of columns, v8 to v15 sums, v16 to v23 results, v24 to
 * v31 values. X(value, sum, its columns, result, a register for a part of the value, scales of x, sums of x): columns are
 * those of v0 on. */
#if defined(NEON_I8MM)
#define EACH_OF_FIRST(X)                                                                        \
    X(24, 8, 0, 16, 4, "v4.4s", "v6.4s") X(25, 10, 1, 17, 5, "v4.4s", "v6.4s")                  \
    X(26, 12, 2, 18, 6, "v4.4s", "v6.4s") X(27, 14, 3, 19, 7, "v4.4s", "v6.4s")
#define EACH_OF_LAST(X)                                                                         \
    X(28, 9, 0, 20, 4, "v5.4s", "v7.4s") X(29, 11, 1, 21, 5, "v5.4s", "v7.4s")                  \
    X(30, 13, 2, 22, 6, "v5.4s", "v7.4s") X(31, 15, 3, 23, 7, "v5.4s", "v7.4s")
#define PRODUCT(sum, x, w) "smmla v" #sum ".4s, v" #x ".16b, v" #w ".16b\n\t"
#define STEPS(a, b, c, d, first, second)                                                        \
    PRODUCT(8, first, a) PRODUCT(9, second, a) PRODUCT(10, first, b) PRODUCT(11, second, b)     \
    PRODUCT(12, first, c) PRODUCT(13, second, c) PRODUCT(14, first, d) PRODUCT(15, second, d)
#define FIRST_STEPS(a, b, c, d) STEPS(a, b, c, d, 0, 2)
#define LAST_STEPS(a, b, c, d) STEPS(a, b, c, d, 1, 3)
#define LOAD_COLUMNS NEXT_FOUR(0, 3, "w")
#define LOAD_SCALES(bytes, bytes_of_pairs) "ldp q4, q5, [%[x]], #" bytes_of_pairs "\n\t"
#define LOAD_SUMS(bytes, bytes_of_pairs) "ldp q6, q7, [%[x]], #" bytes_of_pairs "\n\t"
#else
#define EACH_OF_FIRST(X)                                                                        \
    X(24, 8, 0, 16, 4, "v2.s[0]", "v3.s[0]") X(25, 12, 1, 17, 5, "v2.s[0]", "v3.s[0]")          \
    X(26, 9, 0, 18, 6, "v2.s[1]", "v3.s[1]") X(27, 13, 1, 19, 7, "v2.s[1]", "v3.s[1]")
#define EACH_OF_LAST(X)                                                                         \
    X(28, 10, 0, 20, 4, "v2.s[2]", "v3.s[2]") X(29, 14, 1, 21, 5, "v2.s[2]", "v3.s[2]")         \
    X(30, 11, 0, 22, 6, "v2.s[3]", "v3.s[3]") X(31, 15, 1, 23, 7, "v2.s[3]", "v3.s[3]")
#define PRODUCT(sum, x, w, lane) "sdot v" #sum ".4s, v" #w ".16b, v" #x ".4b[" #lane "]\n\t"
#define STEP(a, b, lane)                                                                        \
    PRODUCT(8, 0, a, lane) PRODUCT(9, 1, a, lane) PRODUCT(10, 2, a, lane) PRODUCT(11, 3, a, lane) \
    PRODUCT(12, 0, b, lane) PRODUCT(13, 1, b, lane) PRODUCT(14, 2, b, lane) PRODUCT(15, 3, b, lane)
#define FIRST_STEPS(a, b, c, d) STEP(a, b, 0) STEP(c, d, 1)
#define LAST_STEPS(a, b, c, d) STEP(a, b, 2) STEP(c, d, 3)
#define LOAD_COLUMNS "ldp q0, q1, [%[w]], #32\n\t"
#define LOAD_SCALES(bytes, bytes_of_pairs) "ldr q2, [%[x]], #" bytes "\n\t"
#define LOAD_SUMS(bytes, bytes_of_pairs) "ldr q3, [%[x]], #" bytes "\n\t"
#endif
#define EACH_VALUE(X) EACH_OF_FIRST(X) EACH_OF_LAST(X)

#define LOAD_FOUR(first, last, from) "ld1 {v" #first ".4s-v" #last ".4s}, [%[" from "]]\n\t"
#define NEXT_FOUR(first, last, from) "ld1 {v" #first ".4s-v" #last ".4s}, [%[" from "]], #64\n\t"
#define BEGIN_SUMS LOAD_FOUR(8, 11, "x") NEXT_FOUR(12, 15, "x")
#define BEGIN_SUMS_AGAIN LOAD_FOUR(8, 11, "begin") LOAD_FOUR(12, 15, "begin")

/* Sum the products of a half of a group: before there are values, and after. */
#define SUM_HALF                                                    \
    NEXT_FOUR(0, 3, "x") NEXT_FOUR(4, 7, "w") NEXT_FOUR(24, 27, "w") \
    FIRST_STEPS(4, 5, 6, 7) LAST_STEPS(24, 25, 26, 27)
#define SUM_LAST_HALF                                                            \
    NEXT_FOUR(0, 3, "x") NEXT_FOUR(4, 7, "w") FIRST_STEPS(4, 5, 6, 7) NEXT_FOUR(4, 7, "w") LAST_STEPS(4, 5, 6, 7)

#define SCALED(to, sum, column) "fmla v" #to ".4s, v" #sum ".4s, v" #column ".4s\n\t"
#define CONVERTED(to, sum, column) \
    "scvtf v" #sum ".4s, v" #sum ".4s\n\tfmul v" #to ".4s, v" #sum ".4s, v" #column ".4s\n\t"
#define ADDED(to, value) "fadd v" #to ".4s, v" #to ".4s, v" #value ".4s\n\t"
#define SCALE_VALUE(v, sum, column, result, part, scales, sums) SCALED(v, sum, column)
#define CONVERT_VALUE(v, sum, column, result, part, scales, sums) CONVERTED(v, sum, column)
#define ADD_SCALED(v, sum, column, result, part, scales, sums) SCALED(part, sum, column) ADDED(v, part)
#define ADD_CONVERTED(v, sum, column, result, part, scales, sums) CONVERTED(part, sum, column) ADDED(v, part)
#define ADD_MINIMUM(v, sum, column, result, part, scales, sums) \
    "fmul v" #sum ".4s, v" #column ".4s, " sums "\n\t" ADDED(v, sum)
#define ADD_TO_RESULT(v, sum, column, result, part, scales, sums) \
    "fmul v" #v ".4s, v" #v ".4s, " scales "\n\t" ADDED(result, v)

#define VALUES(X) LOAD_COLUMNS LOAD_FOUR(24, 27, "w") NEXT_FOUR(28, 31, "w") EACH_VALUE(X)
#define ADD_VALUES(X) LOAD_COLUMNS LOAD_FOUR(4, 7, "w") EACH_OF_FIRST(X) NEXT_FOUR(4, 7, "w") EACH_OF_LAST(X)
#define ADD_MINIMA LOAD_COLUMNS EACH_VALUE(ADD_MINIMUM)
#define ADD_TO_RESULTS EACH_VALUE(ADD_TO_RESULT)

#define GROUP_OF_SIGNED BEGIN_SUMS SUM_HALF SUM_HALF VALUES(SCALE_VALUE) LOAD_SCALES("48", "96") ADD_TO_RESULTS
#define GROUP_OF_MINIMUM                                                                                   \
    BEGIN_SUMS SUM_HALF SUM_HALF VALUES(SCALE_VALUE) LOAD_SCALES("16", "32") LOAD_SUMS("32", "64") ADD_MINIMA \
    ADD_TO_RESULTS
#define HALVES(SCALE, ADD) BEGIN_SUMS SUM_HALF VALUES(SCALE) BEGIN_SUMS_AGAIN SUM_LAST_HALF ADD_VALUES(ADD)
#define GROUP_OF_HALVES HALVES(SCALE_VALUE, ADD_SCALED) LOAD_SCALES("48", "96") ADD_TO_RESULTS
#define GROUP_OF_DIVIDED HALVES(CONVERT_VALUE, ADD_CONVERTED) LOAD_SCALES("48", "96") ADD_TO_RESULTS
#define GROUP_OF_MINIMA                                                                               \
    HALVES(SCALE_VALUE, ADD_SCALED) LOAD_SCALES("16", "32") LOAD_SUMS("16", "32") ADD_MINIMA LOAD_SUMS("16", "32") \
    ADD_MINIMA ADD_TO_RESULTS

/* Multiply a stream of eight columns, which ends at `end`, with four rows, and add to RESULT_VECTORS vectors. */
#define MULTIPLY_STREAM(body)                                                                                \
    __asm__ volatile(NEXT_FOUR(16, 19, "out") LOAD_FOUR(20, 23, "out") "1:\n\t" body                         \
                     "cmp %[w], %[end]\n\tb.ne 1b\n\tst1 {v20.4s-v23.4s}, [%[out]]\n\t"                       \
                     "sub %[out], %[out], #64\n\tst1 {v16.4s-v19.4s}, [%[out]]\n\t"                           \
                     : [w] "+r"(w), [x] "+r"(x), [out] "+r"(out)                                             \
                     : [end] "r"(end), [begin] "r"(begin)                                                    \
                     : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", \
                       "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", \
                       "v27", "v28", "v29", "v30", "v31", "cc", "memory")

INLINE void multiply_stream(const char *w, const int64_t bytes, const FourRows *x, Floats *out, const int type) {
    const char *end = w + bytes;
    static const int32_t middles[4 * LANES] = {[0 ... 4 * LANES - 1] = MIDDLE_BITS}, zeros[4 * LANES];
    const int32_t *begin = has_exact_middle(type) ? middles : zeros; /* of second halves */
    if (!has_exact_middle(type))
        MULTIPLY_STREAM(GROUP_OF_DIVIDED);
    else if (has_halves(type) && has_minimum(type))
        MULTIPLY_STREAM(GROUP_OF_MINIMA);
    else if (has_halves(type))
        MULTIPLY_STREAM(GROUP_OF_HALVES);
    else if (has_minimum(type))
        MULTIPLY_STREAM(GROUP_OF_MINIMUM);
    else
        MULTIPLY_STREAM(GROUP_OF_SIGNED);
}

/* A slice of a panel, unpacked: a stream of `count` groups for each eight columns. */
typedef struct {
    _Alignas(64) char streams[PASSES][SLICE_GROUPS * MOST_STREAM_BYTES];
    int64_t count;
} Streams;

/* Multiply a slice with four rows. */
INLINE void multiply_slice(const Streams *slice, const FourRows *x, Floats *results, const int type) {
#pragma GCC unroll 1
    for (int pass = 0; pass < PASSES; pass++, results += RESULT_VECTORS)
        multiply_stream(slice->streams[pass], slice->count * stream_bytes(type), x, results, type);
}

/* One function for each kind of stream, by a type that has it. */
#define EACH_STREAM(X) X(signed, Q8_0) X(minimum, Q4_K) X(halves, Q6_K) X(divided, NVFP4_F32) X(minima, Q2_K)
#define MULTIPLY(name, type)                                                                      \
    static void multiply_##name(const Streams *slice, const FourRows *x, Floats *results) {        \
        multiply_slice(slice, x, results, type);                                                  \
    }
EACH_STREAM(MULTIPLY)

typedef void (*FourRowsFunction)(const Streams *slice, const FourRows *x, Floats *results);
static FourRowsFunction function_of(int type) {
    if (!has_exact_middle(type)) return multiply_divided;
    if (has_minimum(type)) return has_halves(type) ? multiply_minima : multiply_minimum;
    return has_halves(type) ? multiply_halves : multiply_signed;
}

/* Unpack groups [first, first + slice->count) of a panel. */
INLINE void unpack_groups(Streams *slice, const char *panel, const int64_t first, const int32_t panel_type,
                          const int type) {
    const QuantizedLayout layout = layout_of(type);
    const OwnParts own = own_parts(panel_type, type);
    for (int64_t i = 0; i < slice->count; i++) {
        const char *head = panel + head_offset(layout, first + i), *group = panel + group_offset(layout, first + i);
#pragma GCC unroll 4
        for (int pass = 0; pass < PASSES; pass++)
            unpack_eight_columns(slice->streams[pass] + i * stream_bytes(type), head, group, pass, &own, type);
    }
}

#define UNPACK(name, type, unused) \
    case type: unpack_groups(slice, panel, first, panel_type, type); break;

static void unpack(Streams *slice, const char *panel, int64_t first, int32_t panel_type) {
    switch (function_type_of(panel_type)) { EACH_INT8_TYPE(UNPACK, ) }
}

/* Write results as rows [4][PANEL_COLUMNS]. */
INLINE void rows_of_results(float *to, const Floats results[PASSES * RESULT_VECTORS]) {
    for (int i = 0; i < PASSES * RESULT_VECTORS; i += 2) {
        const int pass = i / RESULT_VECTORS, v = i % RESULT_VECTORS;
#if defined(NEON_I8MM)
        float *at = to + v / 4 * 2 * PANEL_COLUMNS + pass * COLUMNS_TOGETHER + v % 4 * 2;
        const float64x2_t left = (float64x2_t)results[i], right = (float64x2_t)results[i + 1];
        store_floats(at, (Floats)vzip1q_f64(left, right));
        store_floats(at + PANEL_COLUMNS, (Floats)vzip2q_f64(left, right));
#else
        float *at = to + v / 2 * PANEL_COLUMNS + pass * COLUMNS_TOGETHER;
        store_floats(at, results[i]), store_floats(at + LANES, results[i + 1]);
#endif
    }
}

/* A thread's room is allocated with all else that the library keeps for it. It has all groups of a chunk if they fit. */
enum { ROOM = 2048 };
static _Thread_local FourRows room[ROOM];

/* Return the blocks of rows from `row` on, of groups [first, last): each four rows' are *step after those before. */
static const FourRows *stored_rows(const Gemm *args, Int8Chunk *chunk, int64_t row, int64_t num_rows, int64_t first,
                                   int64_t last, int form, int64_t *step) {
    const int64_t groups = args->depth / GROUP, stride = args->quantized_stride, all = chunk->end - chunk->begin;
    const Int8Block *x = args->quantized;
    if ((all + 3) / 4 * groups > ROOM) {
        store_four_rows(room, x + row * stride + first, stride, num_rows, last - first, form);
        chunk->form = NO_FORM, *step = last - first;
        return room;
    }
    if (chunk->form != form) store_four_rows(room, x + chunk->begin * stride, stride, all, groups, form);
    chunk->form = form, *step = groups;
    return room + (row - chunk->begin) / 4 * groups + first;
}

/* Lines that are prefetched together: a loop over each would take more instructions than the prefetches. */
enum { LINES_TOGETHER = 8 };

void int8_four_rows(const Gemm *args, Int8Chunk *chunk, int64_t row, int64_t num_rows, int64_t panel, float *sums) {
    const QuantizedPanel *entry = quantized_panel(args->weights, panel);
    const char *packed = (const char *)args->weights + entry->offset;
    const QuantizedLayout layout = layout_of(entry->type);
    const int64_t groups = args->depth / GROUP, fours = (num_rows + 3) / 4;
    const FourRowsFunction multiply = function_of(entry->type);
    Streams slice;
    memset(sums, 0, fours * 4 * PANEL_COLUMNS * sizeof *sums);
    for (int64_t first = 0, last; first < groups; first = last) {
        last = first + SLICE_GROUPS < groups ? first + SLICE_GROUPS : groups;
        slice.count = last - first;
        unpack(&slice, packed, first, entry->type);
        int64_t step;
        const FourRows *x = stored_rows(args, chunk, row, num_rows, first, last, form_of(entry->type), &step);
        const char *ahead = packed + group_offset(layout, last);
        const int64_t bytes = (int64_t)layout.group_bytes * SLICE_GROUPS;
        for (int64_t i = 0; i < fours; i++) {
            for (int64_t at = bytes * i / fours; at < bytes * (i + 1) / fours; at += LINES_TOGETHER * 64)
#pragma GCC unroll 8
                for (int line = 0; line < LINES_TOGETHER; line++) __builtin_prefetch(ahead + at + line * 64, 0, 2);
            multiply(&slice, x + i * step, (Floats *)(sums + i * 4 * PANEL_COLUMNS));
        }
    }
    for (int64_t i = 0; i < fours; i++) {
        Floats results[PASSES * RESULT_VECTORS];
        memcpy(results, sums + i * 4 * PANEL_COLUMNS, sizeof results);
        rows_of_results(sums + i * 4 * PANEL_COLUMNS, results);
    }
}

#endif
