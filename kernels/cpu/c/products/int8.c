#include "products/int8.h"

#include <math.h>

#include "products/gemm_amx.h"
#include "products/gemm_slices.h"
#include "products/int8_amx.h"
#include "products/int8_block.h"
#include "threads/pool.h"

/* Rows whose sums are kept in memory during that, and blocks of x that a second level cache keeps with them. */
enum { MOST_ROWS = 128, MOST_BLOCKS = 8192 };

/* With at most this many rows, codes are unpacked in registers, a few rows at a time. With more, unpacking them to
 * memory is faster. MOST_FEW_ROWS: of types whose scales are just loaded, with AVX-512. Unpacked codes are multiplied
 * with UNIT_ROWS rows together; up to MOST_LEFT rows that are left then take the first way too, unless the type has
 * halves. */
#if defined(NEON_I8MM)
enum { FEW_ROWS = 2, UNIT_ROWS = 4, MOST_LEFT = 1 };
#elif defined(NEON_DOT)
enum { FEW_ROWS = 3, UNIT_ROWS = 4, MOST_LEFT = 2 };
#elif defined(WITH_NEON)
enum { FEW_ROWS = 8, UNIT_ROWS = 1, MOST_LEFT = 0 };
#else
enum { FEW_ROWS = 16, UNIT_ROWS = 1, MOST_LEFT = 0 };
#endif
enum { MOST_FEW_ROWS = VECTOR_BYTES == 64 ? 32 : FEW_ROWS };

/* With more rows AMX is faster. On an Intel Emerald Rapids 8 rows take as long either way, 16 rows 0.6 to 0.8 of the
 * time. Types with halves have twice the tiles: 16 and 32 rows took 0.8 and 0.9 of the time, 128 rows 1.0, and more than
 * twice as long whenever something else seemed to use the core. So they are left out. */
enum { MOST_ROWS_WITHOUT_AMX = 8 };

/* Panels that a thread takes at a time: as in gemm.c. */
enum { PIECE = 4 };

/* A block whose numbers are all smaller is zero: the inverse of its scale would not be finite. */
#define LEAST 1e-30f

static int64_t num_panels(const Gemm *args) { return (args->num_columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS; }

static const Int8Functions *functions(void) {
#if defined(__AVX512F__) && !defined(__AVX512VNNI__) && defined(__GNUC__) && !defined(__clang__)
    if (__builtin_cpu_supports("avx512vnni")) return &int8_vnni;
#elif defined(__AVX2__) && !defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
    if (__builtin_cpu_supports("avxvnni")) return &int8_avx_vnni;
#endif
    return &int8_plain;
}

/* Return the position of number k of a block among its codes. */
INLINE int place_of(const int k) { return k / 8 * 8 + k % 2 * 4 + k % 8 / 2; }

/* Return the bits of the largest magnitude of a block; those of a NaN or infinity if there is one. */
INLINE uint32_t largest_bits(const Floats numbers[GROUP / LANES]) {
    Signed most = {0};
#pragma GCC unroll 8
    for (int i = 0; i < GROUP / LANES; i++) {
        const Signed bits = (Signed)numbers[i] & 0x7fffffff;
#if defined(WITH_NEON)
        most = (Signed)vmaxq_s32((int32x4_t)bits, (int32x4_t)most);
#else
        const Signed is_more = bits > most;
        most = (bits & is_more) | (most & ~is_more);
#endif
    }
#if defined(__AVX512F__)
    return (uint32_t)_mm512_reduce_max_epi32((__m512i)most);
#elif defined(WITH_NEON)
    return (uint32_t)vmaxvq_s32((int32x4_t)most);
#else
    uint32_t lanes[LANES], largest = 0;
    memcpy(lanes, &most, sizeof lanes);
    for (int i = 0; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return largest;
#endif
}

/* Write the codes of a block and return their sums in each half. */
INLINE void store_codes(Int8Block *block, const Floats numbers[GROUP / LANES], const Floats inverse, int32_t sums[2]) {
#if defined(__AVX512F__) /* the conversion rounds to nearest even; sums are those of bytes without a sign */
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const __m128i codes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)(numbers[i] * inverse)));
        const __m128i bytes = _mm_shuffle_epi8(codes, order);
        const __m128i parts = _mm_sad_epu8(_mm_xor_si128(codes, _mm_set1_epi8(-128)), _mm_setzero_si128());
        memcpy(block->codes + i * 16, &bytes, sizeof bytes);
        sums[i] = _mm_cvtsi128_si32(parts) + _mm_extract_epi16(parts, 4) - 16 * 128;
    }
#elif defined(WITH_NEON) /* the conversion rounds to nearest even */
    const uint8x16_t order = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        int32x4_t four[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) four[j] = vcvtnq_s32_f32((float32x4_t)(numbers[i * 4 + j] * inverse));
        const int16x8_t low = vmovn_high_s32(vmovn_s32(four[0]), four[1]);
        const int16x8_t high = vmovn_high_s32(vmovn_s32(four[2]), four[3]);
        const int8x16_t codes = vmovn_high_s16(vmovn_s16(low), high);
        vst1q_s8(block->codes + i * 16, vqtbl1q_s8(codes, order));
        sums[i] = vaddlvq_s8(codes);
    }
#else
    int32_t values[GROUP];
    for (int i = 0; i < GROUP / LANES; i++) {
        const Signed codes = __builtin_convertvector(nearest(numbers[i] * inverse), Signed);
        memcpy(values + i * LANES, &codes, sizeof codes);
    }
    for (int i = 0; i < GROUP; i++) {
        block->codes[place_of(i)] = (int8_t)values[i];
        sums[i / (GROUP / 2)] += values[i];
    }
#endif
}

INLINE void quantize_block(const void *x, int64_t k, const int dtype, Int8Block *block) {
    Floats numbers[GROUP / LANES];
    int32_t sums[2] = {0};
    float largest;
#pragma GCC unroll 8
    for (int i = 0; i < GROUP / LANES; i++) numbers[i] = load_numbers(x, k + i * LANES, dtype);
    const uint32_t bits = largest_bits(numbers);
    memcpy(&largest, &bits, sizeof largest);
    if (__builtin_expect(bits >= 0x7f800000 || largest < LEAST, 0)) {
        memset(block, 0, sizeof *block);
        if (bits >= 0x7f800000) block->scale = NAN;
        return;
    }
    store_codes(block, numbers, all_floats(127.0f / largest), sums);
    block->scale = largest / 127.0f;
    block->sum = (float)(sums[0] + sums[1]);
    block->zeros = -128 * (sums[0] + sums[1]);
    block->zeros_of_first = -128 * sums[0];
}

/* Quantize rows [begin, end) of x. */
void int8_quantize(const Gemm *args, int64_t begin, int64_t end) {
    const int64_t blocks = args->depth / GROUP, stride = args->quantized_stride;
    for (int64_t row = begin; row < end; row++) {
        const char *x = (const char *)args->x + row * args->x_stride * element_bytes(args->dtype);
        Int8Block *to = (Int8Block *)args->quantized + row * stride;
        for (int64_t i = 0; i < blocks; i++) {
            if (args->dtype == FLOAT32)
                quantize_block(x, i * GROUP, FLOAT32, to + i);
            else
                quantize_block(x, i * GROUP, BFLOAT16, to + i);
        }
    }
}

/* Vectors of columns that are unpacked together: NEON loads and stores two at once. */
#if defined(WITH_NEON)
enum { VECTORS_TOGETHER = 2 };
#else
enum { VECTORS_TOGETHER = 1 };
#endif

/* Write the codes of two steps of VECTORS_TOGETHER vectors of columns from v on. */
INLINE void store_two_steps(uint8_t *codes, const int v, Words steps[2][PANEL_VECTORS]) {
    store_row(codes + v * VECTOR_BYTES, steps[0], VECTORS_TOGETHER);
    store_row(codes + ROW_BYTES + v * VECTOR_BYTES, steps[1], VECTORS_TOGETHER);
}

/* Unpack the codes of some vectors from vector v on, and add `raised` to each. */
INLINE void unpack_codes(Int8Group *to, const char *codes, const int v, const Table levels, const AllBytes raised,
                         const int type) {
    const int never_raised = has_minimum(type) || (HAS_SIGNED_CODES && is_wide(type));
#pragma GCC unroll 4
    for (int s = 0; s < 8; s += 2) {
        Words steps[2][PANEL_VECTORS];
        codes_of_two_steps(steps, codes + v * VECTOR_BYTES, s, levels, type, VECTORS_TOGETHER);
#pragma GCC unroll 2
        for (int i = 0; i < 2 * VECTORS_TOGETHER && !never_raised; i++)
            steps[i % 2][i / 2] = (Words)((AllBytes)steps[i % 2][i / 2] + raised);
        store_two_steps(to->codes[s], v, steps);
    }
}

INLINE void unpack_groups(const Int8Work *work, Int8Group *to, const int type) {
    const QuantizedLayout layout = layout_of(type);
    const AllBytes raised = (AllBytes)all_words((uint8_t)work->raised_by * 0x01010101u);
    const OwnParts own = own_parts(work->type, type);
    for (int64_t g = work->first; g < work->last; g++, to++) {
        const char *head = work->panel + head_offset(layout, g), *group = work->panel + group_offset(layout, g);
        /* only from the second level cache: multiply_slice() brings a slice there, and memory would hold up the rest */
        if (g + 2 < work->last)
#pragma GCC unroll 20
            for (int line = 0; line < layout.group_bytes; line += 64)
                __builtin_prefetch(group + 2 * layout.group_bytes + line);
#pragma GCC unroll 8
        for (int v = 0; v < PANEL_VECTORS; v++) {
            const Scales scales = load_scales(head, group, v, own.unit, type);
            for (int half = 0; half < 1 + has_halves(type); half++) {
                store_floats(to->scale[half] + v * LANES, scales.scale[half]);
                if (has_minimum(type)) store_floats(to->minimum[half] + v * LANES, scales.minimum[half]);
            }
        }
        for (int v = 0; v < PANEL_VECTORS; v += VECTORS_TOGETHER)
            unpack_codes(to, group + layout.scale_bytes, v, own.levels, raised, type);
    }
}

#define UNPACK(name, type, unused) \
    case type: unpack_groups(work, to, type); break;

void int8_unpack(const Int8Work *work, Int8Group *to) {
    switch (function_type_of(work->type)) { EACH_INT8_TYPE(UNPACK, ) }
}


/* Write the sums of at most MOST_FEW_ROWS rows with a panel, whose codes are unpacked in registers, a part of the rows
 * after the other. Each of several parts prefetches its share of the next panel's lines, so memory is never idle. */
static void sum_few(const Gemm *args, int64_t row, int num_rows, int64_t panel, float *sums) {
    const QuantizedPanel *entry = quantized_panel(args->weights, panel);
    const int num_parts = (num_rows + INT8_PACKED_ROWS - 1) / INT8_PACKED_ROWS;
    const int64_t panel_bytes = quantized_panel_bytes(entry->type, args->depth);
    memset(sums, 0, num_rows * PANEL_COLUMNS * sizeof *sums);
    for (int i = 0; i < num_parts; i++) {
        const int begin = num_rows * i / num_parts, rows = num_rows * (i + 1) / num_parts - begin;
        const Int8Work work = {
            .panel = (const char *)args->weights + entry->offset,
            .type = entry->type,
            .last = args->depth / GROUP,
            .ahead = num_parts > 1 ? panel_bytes : INT8_PREFETCH_BYTES,
            .first_line = 64 * i,
            .line_step = 64 * num_parts,
            .x = (const Int8Block *)args->quantized + (row + begin) * args->quantized_stride,
            .x_stride = args->quantized_stride,
            .out = sums + begin * PANEL_COLUMNS,
        };
        functions()->packed[rows - 1][function_type_of(entry->type)](&work);
    }
}

static void multiply_few(const Gemm *args, int64_t row, int num_rows, int64_t panel) {
    _Alignas(64) float sums[MOST_FEW_ROWS * PANEL_COLUMNS];
    sum_few(args, row, num_rows, panel, sums);
    gemm_store_panel(args, sums, row, num_rows, panel);
}

#if defined(NEON_DOT)
static int is_finite(const float row[PANEL_COLUMNS]) {
    Floats zeros = {0};
#pragma GCC unroll 8
    for (int i = 0; i < PANEL_COLUMNS; i += LANES) zeros = multiply_add(load_floats(row + i), (Floats){0}, zeros);
    return vmaxvq_f32((float32x4_t)zeros) == 0;
}

/* Multiply at most MOST_ROWS rows with a panel, whose codes are unpacked slice by slice. */
static void multiply_many(const Gemm *args, Int8Chunk *chunk, int64_t row, int num_rows, int64_t panel) {
    _Alignas(64) float sums[MOST_ROWS * PANEL_COLUMNS];
    int8_four_rows(args, chunk, row, num_rows, panel, sums);
    for (int i = 0; i < num_rows; i++)
        if (!is_finite(sums + i * PANEL_COLUMNS)) sum_few(args, row + i, 1, panel, sums + i * PANEL_COLUMNS);
    gemm_store_panel(args, sums, row, num_rows, panel);
}
#else
/* Return what is added to a type's codes as they are unpacked. If bytes of any size are multiplied at the same speed,
 * all zeros become that of Q8_0, whose functions need nothing for it. Codes with a sign lose their zero. */
static int raised_by(int type) {
    const BlockType traits = BLOCK_TYPES[type];
    if (HAS_SIGNED_CODES) return traits.has_minimum || is_wide(type) ? 0 : -(1 << traits.zero_bits);
    const int has_dot_product = functions() != &int8_plain || HAS_DOT_PRODUCT;
    const int zero = HAS_SIGNED_BYTES && is_wide(type) ? 0 : 1 << traits.zero_bits;
    return has_dot_product && !traits.has_minimum ? 128 - zero : 0;
}

/* Return how many rows are multiplied with unpacked groups at once. While the second half of a group is multiplied, values
 * of the first are kept: with AVX-512 the registers have these for five rows. */
static int most_rows(int type) { return VECTOR_BYTES == 64 && has_halves(type) ? INT8_ROWS - 1 : INT8_ROWS; }

/* Multiply rows with unpacked groups, some rows after the other. At the same time the packed groups from `ahead` on come
 * to the second level cache. */
static void multiply_slice(const Int8Work *slice, int num_rows, int type, const char *ahead, int64_t ahead_bytes) {
    const int most = most_rows(type), num_parts = (num_rows + most - 1) / most;
    for (int i = 0; i < num_parts; i++) {
        for (int64_t line = ahead_bytes * i / num_parts; line < ahead_bytes * (i + 1) / num_parts; line += 64)
            __builtin_prefetch(ahead + line, 0, 2);
        const int begin = num_rows * i / num_parts, rows = num_rows * (i + 1) / num_parts - begin;
        Int8Work work = *slice;
        work.x += begin * work.x_stride;
        work.out += begin * PANEL_COLUMNS;
        functions()->unpacked[rows - 1][function_type_of(type)](&work);
    }
}

/* Multiply at most MOST_ROWS rows with a panel, whose codes are unpacked slice by slice. */
static void multiply_many(const Gemm *args, Int8Chunk *chunk, int64_t row, int num_rows, int64_t panel) {
    (void)chunk;
    const QuantizedPanel *entry = quantized_panel(args->weights, panel);
    const int64_t blocks = args->depth / GROUP;
    const int raised = raised_by(entry->type);
    const QuantizedLayout layout = layout_of(entry->type);
    _Alignas(64) Int8Group slice[SLICE_GROUPS];
    _Alignas(64) float sums[MOST_ROWS * PANEL_COLUMNS];
    memset(sums, 0, num_rows * PANEL_COLUMNS * sizeof *sums);
    for (int64_t first = 0; first < blocks; first += SLICE_GROUPS) {
        const int64_t last = first + SLICE_GROUPS < blocks ? first + SLICE_GROUPS : blocks;
        Int8Work work = {
            .panel = (const char *)args->weights + entry->offset,
            .type = entry->type,
            .first = first,
            .last = last,
            .x = (const Int8Block *)args->quantized + row * args->quantized_stride + first,
            .x_stride = args->quantized_stride,
            .zero_bits = raised ? 7 : BLOCK_TYPES[entry->type].zero_bits,
            .raised_by = raised,
            .out = sums,
        };
        int8_unpack(&work, slice);
        work.panel = (const char *)slice;
        const char *ahead = (const char *)args->weights + entry->offset + group_offset(layout, last);
        multiply_slice(&work, num_rows, raised && !has_halves(entry->type) ? Q8_0 : entry->type, ahead, (int64_t)layout.group_bytes * SLICE_GROUPS);
    }
    gemm_store_panel(args, sums, row, num_rows, panel);
}

#endif

/* Multiply rows with a panel in bfloat16. */
static void multiply_whole(const Gemm *args, int64_t begin, int64_t end, int64_t panel) {
    Gemm stored = *args;
    stored.packing = QUANTIZED_WEIGHTS;
    if (gemm_has_amx(args->dtype))
        gemm_multiply_amx(&stored, begin, end, panel, panel + 1);
    else if (gemm_has_slices(&stored, end - begin))
        gemm_multiply_slices(&stored, begin, end, panel, panel + 1);
    else
        quantized_multiply(&stored, begin, end, panel, panel + 1);
}

static void multiply_panel(const Gemm *args, Int8Chunk *chunk, int64_t panel) {
    const int64_t begin = chunk->begin, num_rows = chunk->end - begin;
    const int32_t type = quantized_panel(args->weights, panel)->type;
    if (type == WHOLE_PANEL) {
        multiply_whole(args, begin, chunk->end, panel);
        return;
    }
    const int few = BLOCK_TYPES[type].scales == FLOATS ? MOST_FEW_ROWS : FEW_ROWS, rest = (int)(num_rows % UNIT_ROWS);
    const int left = num_rows <= few ? (int)num_rows : rest <= MOST_LEFT && !has_halves(type) ? rest : 0;
    const int64_t many = num_rows - left, units = (many + UNIT_ROWS - 1) / UNIT_ROWS, num_parts = (many + MOST_ROWS - 1) / MOST_ROWS;
    if (left) multiply_few(args, chunk->end - left, left, panel);
    for (int64_t i = 0; i < num_parts; i++) {
        const int64_t row = units * i / num_parts * UNIT_ROWS, end = units * (i + 1) / num_parts * UNIT_ROWS;
        multiply_many(args, chunk, begin + row, (int)((end < many ? end : many) - row), panel);
    }
}

/* Whether AMX multiplies a chunk's rows with a panel. */
static int has_tiles(const Gemm *args, const Int8Chunk *chunk, int64_t panel) {
    const int32_t type = quantized_panel(args->weights, panel)->type;
    return HAS_AMX && chunk->end - chunk->begin > MOST_ROWS_WITHOUT_AMX && args->depth / GROUP <= MOST_AMX_GROUPS &&
           type != WHOLE_PANEL && !BLOCK_TYPES[type].has_halves;
}

/* Multiply a chunk's rows with panels [first, last). */
static void multiply_panels(const Gemm *args, Int8Chunk *chunk, int64_t first, int64_t last) {
    for (int64_t next; first < last; first = next) {
        for (next = first; next < last && has_tiles(args, chunk, next);) next++;
        if (next > first)
            int8_multiply_amx(args, chunk, first, next);
        else
            multiply_panel(args, chunk, next++);
    }
}

/* Multiply rows [begin, end) with all panels, in chunks of rows whose blocks a second level cache keeps. */
static void multiply_rows(const Gemm *args, int64_t begin, int64_t end) {
    int64_t chunk_rows = MOST_BLOCKS / (args->depth / GROUP);
    if (chunk_rows < MOST_ROWS) chunk_rows = MOST_ROWS;
    const int64_t num_rows = end - begin, num_chunks = (num_rows + chunk_rows - 1) / chunk_rows;
    for (int64_t i = 0; i < num_chunks; i++) {
        Int8Chunk chunk = {begin + num_rows * i / num_chunks, begin + num_rows * (i + 1) / num_chunks, NO_FORM};
        multiply_panels(args, &chunk, 0, num_panels(args));
    }
}

void int8_panels(const Gemm *args, int64_t first, int64_t last) {
    Int8Chunk chunk = {0, args->num_rows, NO_FORM};
    multiply_panels(args, &chunk, first, last);
}

/* Multiply all rows with the panels of thread `owner`, except those that other threads have taken. */
static void multiply_pieces(const Gemm *args, Int8Chunk *chunk, int owner, int num_threads) {
    const int64_t first = num_panels(args) * owner / num_threads, end = num_panels(args) * (owner + 1) / num_threads;
    for (int64_t panel; (panel = first + pool_take(owner) * PIECE) < end;)
        multiply_panels(args, chunk, panel, panel + PIECE < end ? panel + PIECE : end);
}

void int8_part(const Gemm *args, int thread, int num_threads) {
    const int64_t begin = args->num_rows * thread / num_threads, end = args->num_rows * (thread + 1) / num_threads;
    int8_quantize(args, begin, end);
    if (gemm_splits_rows(args->num_rows, num_threads, args->dtype)) {
        multiply_rows(args, begin, end);
        return;
    }
    pool_barrier(); /* each thread reads all rows */
    Int8Chunk chunk = {0, args->num_rows, NO_FORM};
    for (int i = 0; i < num_threads; i++) multiply_pieces(args, &chunk, (thread + i) % num_threads, num_threads);
}
