#include "products/compact.h"

#include "threads/pool.h"
#include "math/vectors.h"

static int64_t num_panels(int64_t num_columns) { return (num_columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS; }

/* Plan of one panel. */
typedef struct {
    uint8_t upper[16];
    int64_t num_whole;  /* room for whole pairs */
    int64_t num_before; /* room in the panels before */
} PanelPlan;

EXPORT int64_t compact_plan_bytes(int64_t num_columns) { return num_panels(num_columns) * (int64_t)sizeof(PanelPlan); }

#if HAS_COMPACT

/* If more than one in this many pairs is whole, a compact matrix saves too little. */
enum { LEAST_PAIRS_PER_WHOLE = 8 };

enum { SLICE_PAIRS = 16 }; /* pairs that are packed at a time */

typedef struct {
    uint16_t weights[SLICE_PAIRS][2][PANEL_COLUMNS * 2] __attribute__((aligned(64)));
    int count;
} Slice;

static PanelPlan *plan_of(const GemmPack *args, int64_t panel) { return (PanelPlan *)args->plan + panel; }
static int64_t num_pairs(const GemmPack *args) { return args->depth / 4; }

static int pairs_from(const GemmPack *args, int64_t first) {
    const int64_t left = num_pairs(args) - first;
    return left < SLICE_PAIRS ? (int)left : SLICE_PAIRS;
}

/* Pack the panel's pairs from `first` on into a slice. */
static void pack_slice(const GemmPack *args, int64_t panel, int64_t first, Slice *slice) {
    slice->count = pairs_from(args, first);
    gemm_pack_steps(args, panel, first * 2, (first + slice->count) * 2, slice->weights);
}

/* Copy their weights into a slice, in any order. */
static void copy_slice(const GemmPack *args, int64_t panel, int64_t first, Slice *slice) {
    slice->count = pairs_from(args, first);
    gemm_copy_steps(args, panel, first * 2, (first + slice->count) * 2, slice->weights);
}

/* Move the 16 values with the largest counts into a table; return the sum of the other counts. */
static int64_t take_largest(uint32_t counts[256], uint8_t upper[16]) {
    int values[256], num_values = 0; /* those that occur: a tenth of all */
    int64_t num_others = 0;
    for (int value = 0; value < 256; value++) {
        num_others += counts[value];
        if (counts[value]) values[num_values++] = value;
    }
    for (int code = 0; code < 16; code++) {
        int best = 0;
        for (int i = 0; i < num_values; i++)
            if (counts[values[i]] > counts[best]) best = values[i];
        upper[code] = (uint8_t)best;
        num_others -= counts[best];
        counts[best] = 0;
    }
    return num_others;
}

enum { VALUES_AT_ONCE = 32, SLICE_VALUES = SLICE_PAIRS * 4 * PANEL_COLUMNS };

typedef uint8_t Values __attribute__((vector_size(VALUES_AT_ONCE)));

/* Return the sum of bytes, none of which is above SLICE_VALUES / VALUES_AT_ONCE. */
INLINE uint32_t sum_of(Values bytes) {
    uint64_t words[VALUES_AT_ONCE / 8], sum = 0;
    memcpy(words, &bytes, sizeof words);
    for (int i = 0; i < VALUES_AT_ONCE / 8; i++)
        sum += (words[i] & 0x00ff00ff00ff00ff) + (words[i] >> 8 & 0x00ff00ff00ff00ff);
    return (uint32_t)(sum * 0x0001000100010001 >> 48);
}

/* Count the upper bytes of a whole slice: those of `usual`, which are nearly all, a vector at a time. */
static void count_slice(const Slice *slice, const uint8_t usual[16], uint32_t counts[256]) {
    union {
        uint8_t values[SLICE_VALUES];
        Values vectors[SLICE_VALUES / VALUES_AT_ONCE];
    } upper;
    const uint16_t *weights = slice->weights[0][0];
    uint32_t num_found = 0;
    for (int i = 0; i < SLICE_VALUES; i++) upper.values[i] = (uint8_t)(weights[i] >> 8);
    uint8_t is_other[256];
    memset(is_other, 1, sizeof is_other);
    for (int code = 0; code < 16; code++) {
        const Values wanted = (Values){0} + usual[code];
        Values found = {0};
        if (!is_other[usual[code]]) continue; /* a table of fewer values has one of them twice */
        for (int i = 0; i < SLICE_VALUES / VALUES_AT_ONCE; i++) found -= (Values)(upper.vectors[i] == wanted);
        const uint32_t count = sum_of(found);
        is_other[usual[code]] = 0;
        counts[usual[code]] += count;
        num_found += count;
    }
    for (int i = 0; i < SLICE_VALUES && num_found < SLICE_VALUES; i += VALUES_AT_ONCE) {
        Values others = (Values){0} - 1;
        for (int code = 0; code < 16; code++) others &= (Values)(upper.vectors[i / VALUES_AT_ONCE] != usual[code]);
        if (!sum_of(others & 1)) continue;
        for (int j = i; j < i + VALUES_AT_ONCE; j++)
            if (is_other[upper.values[j]]) counts[upper.values[j]]++, num_found++;
    }
}

/* Find the 16 most frequent upper bytes; return how many weights have others. All weights are counted: a sample would
 * miss rare bytes, which make pairs whole. */
static int64_t choose_table(const GemmPack *args, int64_t panel, uint8_t upper[16]) {
    uint32_t counts[256] = {0}, of_first[256];
    Slice slice;
    for (int64_t first = 0; first < num_pairs(args); first += SLICE_PAIRS) {
        copy_slice(args, panel, first, &slice);
        if (first && slice.count == SLICE_PAIRS) {
            count_slice(&slice, upper, counts);
            continue;
        }
        const uint16_t *weights = slice.weights[0][0];
        for (int i = 0; i < slice.count * 4 * PANEL_COLUMNS; i++) counts[weights[i] >> 8]++;
        if (first) continue;
        memcpy(of_first, counts, sizeof of_first);
        take_largest(of_first, upper); /* nearly those of the panel */
    }
    return take_largest(counts, upper);
}

/* The codes of a table's upper bytes: for each upper half byte that occurs among them, a row with the code of each lower
 * one, or NO_CODE. There are few rows: a table's bytes are signs and neighbouring exponents. */
enum { NO_CODE = 0x80 };

typedef struct {
    uint8_t codes[16][16]; /* [row][lower half byte] */
    uint8_t halves[16];    /* of each row, in the upper half */
    int num_rows;
} Codes;

static void find_codes(const uint8_t upper[16], Codes *to) {
    to->num_rows = 0;
    for (int code = 0; code < 16; code++) {
        int row = 0;
        while (row < to->num_rows && to->halves[row] != (upper[code] & 0xf0)) row++;
        if (row == to->num_rows) {
            memset(to->codes[row], NO_CODE, sizeof to->codes[row]);
            to->halves[to->num_rows++] = upper[code] & 0xf0;
        }
        to->codes[row][upper[code] & 15] = (uint8_t)code;
    }
}

/* Split a step's weights into lower bytes and codes of upper bytes, in the order of compact.h. Return whether all have
 * a code; one that has none gets 0. */
#if defined(__AVX512BW__)
INLINE int encode_step(const uint16_t *weights, const Codes *table, char lower[64], char codes[64]) {
    const __m512i a = _mm512_loadu_si512(weights), b = _mm512_loadu_si512(weights + 32);
    const __m512i low_half = _mm512_set1_epi16(0x00ff), nibble = _mm512_set1_epi8(15);
    const __m512i values = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
    const __m512i place = _mm512_and_si512(values, nibble), half = _mm512_andnot_si512(nibble, values);
    __m512i code_of = _mm512_set1_epi8((char)NO_CODE);
    for (int row = 0; row < table->num_rows; row++) {
        const __m512i of_row = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table->codes[row]));
        const __mmask64 here = _mm512_cmpeq_epi8_mask(half, _mm512_set1_epi8((char)table->halves[row]));
        code_of = _mm512_mask_shuffle_epi8(code_of, here, of_row, place);
    }
    _mm512_storeu_si512(lower, _mm512_packus_epi16(_mm512_and_si512(a, low_half), _mm512_and_si512(b, low_half)));
    _mm512_storeu_si512(codes, _mm512_and_si512(code_of, nibble));
    return !_mm512_movepi8_mask(code_of);
}
#elif defined(WITH_NEON)
INLINE int encode_step(const uint16_t *weights, const Codes *table, char lower[64], char codes[64]) {
    uint8x16_t worst = vdupq_n_u8(0);
    for (int part = 0; part < 4; part++) {
        const uint16x8_t a = vld1q_u16(weights + part * 8), b = vld1q_u16(weights + 32 + part * 8);
        const uint8x16_t values = vcombine_u8(vshrn_n_u16(a, 8), vshrn_n_u16(b, 8));
        const uint8x16_t place = vandq_u8(values, vdupq_n_u8(15)), half = vandq_u8(values, vdupq_n_u8(0xf0));
        uint8x16_t code_of = vdupq_n_u8(NO_CODE);
        for (int row = 0; row < table->num_rows; row++) {
            const uint8x16_t here = vceqq_u8(half, vdupq_n_u8(table->halves[row]));
            code_of = vbslq_u8(here, vqtbl1q_u8(vld1q_u8(table->codes[row]), place), code_of);
        }
        worst = vmaxq_u8(worst, code_of);
        vst1q_u8((uint8_t *)lower + part * 16, vcombine_u8(vmovn_u16(a), vmovn_u16(b)));
        vst1q_u8((uint8_t *)codes + part * 16, vandq_u8(code_of, vdupq_n_u8(15)));
    }
    return vmaxvq_u8(worst) < NO_CODE;
}
#else
INLINE int encode_step(const uint16_t *weights, const Codes *table, char lower[64], char codes[64]) {
    const __m256i low_half = _mm256_set1_epi16(0x00ff), nibble = _mm256_set1_epi8(15);
    __m256i worst = _mm256_setzero_si256();
    for (int part = 0; part < 2; part++) {
        const __m256i a = _mm256_loadu_si256((const __m256i *)(weights + part * 16));
        const __m256i b = _mm256_loadu_si256((const __m256i *)(weights + 32 + part * 16));
        const __m256i values = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
        const __m256i low = _mm256_packus_epi16(_mm256_and_si256(a, low_half), _mm256_and_si256(b, low_half));
        const __m256i place = _mm256_and_si256(values, nibble), half = _mm256_andnot_si256(nibble, values);
        __m256i code_of = _mm256_set1_epi8((char)NO_CODE);
        for (int row = 0; row < table->num_rows; row++) {
            const __m256i of_row = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table->codes[row]));
            const __m256i here = _mm256_cmpeq_epi8(half, _mm256_set1_epi8((char)table->halves[row]));
            code_of = _mm256_blendv_epi8(code_of, _mm256_shuffle_epi8(of_row, place), here);
        }
        worst = _mm256_or_si256(worst, code_of);
        _mm256_storeu_si256((__m256i *)(lower + part * 32), low);
        _mm256_storeu_si256((__m256i *)(codes + part * 32), _mm256_and_si256(code_of, nibble));
    }
    return !_mm256_movemask_epi8(worst);
}
#endif

/* Write the 192 bytes of a pair. Return 0 if it must be stored whole. */
INLINE int encode_pair(uint16_t weights[2][PANEL_COLUMNS * 2], const Codes *table, char *to) {
    char codes[2][64];
    const int first = encode_step(weights[0], table, to, codes[0]);
    const int second = encode_step(weights[1], table, to + 64, codes[1]);
    for (int i = 0; i < 64; i++) to[128 + i] = (char)(codes[0][i] | codes[1][i] << 4);
    return first && second;
}

/* Choose a panel's table, and find room for the pairs that must be stored whole. No more pairs than weights have no
 * code, and usually each of these few is in a pair of its own; if they are many, the pairs are counted. */
static void plan_panel(const GemmPack *args, int64_t panel) {
    PanelPlan *plan = plan_of(args, panel);
    Slice slice;
    Codes table;
    plan->num_whole = choose_table(args, panel, plan->upper);
    if (plan->num_whole * LEAST_PAIRS_PER_WHOLE <= num_pairs(args)) return;
    plan->num_whole = 0;
    find_codes(plan->upper, &table);
    for (int64_t first = 0; first < num_pairs(args); first += SLICE_PAIRS) {
        pack_slice(args, panel, first, &slice);
        char encoded[PAIR_BYTES];
        for (int i = 0; i < slice.count; i++) plan->num_whole += !encode_pair(slice.weights[i], &table, encoded);
    }
}

/* Return the array of whole pairs after all panels. */
static WholePair *whole_pairs(const GemmPack *args) {
    return (WholePair *)((char *)args->packed + num_panels(args->num_columns) * compact_panel_bytes(args->depth));
}

static void pack_panel(const GemmPack *args, int64_t panel) {
    const PanelPlan *plan = plan_of(args, panel);
    CompactPanel *head = (CompactPanel *)((char *)args->packed + panel * compact_panel_bytes(args->depth));
    WholePair *whole = whole_pairs(args) + plan->num_before;
    int32_t *next = &head->first_whole; /* where to write the number of the next whole pair */
    char *to = (char *)(head + 1);
    Slice slice;
    Codes table;
    find_codes(plan->upper, &table);
    memcpy(head->upper, plan->upper, sizeof head->upper);
    head->to_whole = (char *)whole - (char *)head;
    for (int64_t first = 0; first < num_pairs(args); first += SLICE_PAIRS) {
        pack_slice(args, panel, first, &slice);
        for (int i = 0; i < slice.count; i++, to += PAIR_BYTES) {
            if (encode_pair(slice.weights[i], &table, to)) continue;
            memcpy(whole->weights, slice.weights[i], sizeof whole->weights);
            *next = (int32_t)(first + i);
            next = &whole++->next;
        }
    }
    *next = NO_PAIR;
}

static void share_out(const GemmPack *args, int thread, int num_threads, void (*work)(const GemmPack *, int64_t)) {
    const int64_t count = num_panels(args->num_columns), last = count * (thread + 1) / num_threads;
    for (int64_t panel = count * thread / num_threads; panel < last; panel++) work(args, panel);
}

static void plan_job(void *args, int thread, int num_threads) { share_out(args, thread, num_threads, plan_panel); }
static void pack_job(void *args, int thread, int num_threads) { share_out(args, thread, num_threads, pack_panel); }

EXPORT int64_t compact_bytes(const GemmPack *args) {
    if (args->dtype != BFLOAT16 || args->depth % 4 || !args->depth) return 0;
    pool_run(plan_job, (void *)args);
    const int64_t panels = num_panels(args->num_columns);
    int64_t num_whole = 0;
    for (int64_t panel = 0; panel < panels; panel++) {
        plan_of(args, panel)->num_before = num_whole;
        num_whole += plan_of(args, panel)->num_whole;
    }
    if (num_whole * LEAST_PAIRS_PER_WHOLE > panels * num_pairs(args)) return 0;
    return panels * compact_panel_bytes(args->depth) + num_whole * (int64_t)sizeof(WholePair);
}

EXPORT void compact_pack(const GemmPack *args) { pool_run(pack_job, (void *)args); }

#else

EXPORT int64_t compact_bytes(const GemmPack *args) {
    (void)args;
    return 0;
}

EXPORT void compact_pack(const GemmPack *args) { (void)args; }

#endif
