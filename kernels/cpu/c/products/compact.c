#include "products/compact.h"

#include "threads/pool.h"
#include "math/vectors.h"

static int64_t num_panels(int64_t num_columns) { return (num_columns + PANEL_COLUMNS - 1) / PANEL_COLUMNS; }

/* Plan of one panel. */
typedef struct {
    uint8_t upper[16];
    int64_t num_whole;
    int64_t num_before; /* whole pairs in the panels before */
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

/* Pack the panel's pairs from `first` on into a slice. */
static void pack_slice(const GemmPack *args, int64_t panel, int64_t first, Slice *slice) {
    const int64_t left = num_pairs(args) - first;
    slice->count = left < SLICE_PAIRS ? (int)left : SLICE_PAIRS;
    gemm_pack_steps(args, panel, first * 2, (first + slice->count) * 2, slice->weights);
}

/* Find the 16 most frequent upper bytes; return how many weights have others. All weights are counted: a sample would
 * miss rare bytes, which make pairs whole. */
static int64_t choose_table(const GemmPack *args, int64_t panel, uint8_t upper[16]) {
    uint32_t counts[4][256] = {0}; /* four, because equal values in a row would wait for each other's increment */
    Slice slice;
    for (int64_t first = 0; first < num_pairs(args); first += SLICE_PAIRS) {
        pack_slice(args, panel, first, &slice);
        const uint16_t *weights = slice.weights[0][0];
        for (int i = 0; i < slice.count * 4 * PANEL_COLUMNS; i += 4)
            for (int j = 0; j < 4; j++) counts[j][weights[i + j] >> 8]++;
    }
    int values[256], num_values = 0; /* those that occur: a tenth of all */
    int64_t num_others = 0;
    for (int value = 0; value < 256; value++) {
        counts[0][value] += counts[1][value] + counts[2][value] + counts[3][value];
        num_others += counts[0][value];
        if (counts[0][value]) values[num_values++] = value;
    }
    for (int code = 0; code < 16; code++) {
        int best = 0;
        for (int i = 0; i < num_values; i++)
            if (counts[0][values[i]] > counts[0][best]) best = values[i];
        upper[code] = (uint8_t)best;
        num_others -= counts[0][best];
        counts[0][best] = 0;
    }
    return num_others;
}

/* Split a step's weights into lower bytes and codes of upper bytes, in the order of compact.h. Return whether all have
 * a code. */
#if defined(__AVX512BW__)
INLINE int encode_step(const uint16_t *weights, const uint8_t upper[16], char lower[64], char codes[64]) {
    const __m512i a = _mm512_loadu_si512(weights), b = _mm512_loadu_si512(weights + 32);
    const __m512i low_half = _mm512_set1_epi16(0x00ff);
    const __m512i values = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
    __m512i code_of = _mm512_setzero_si512();
    __mmask64 found = 0;
    for (int code = 0; code < 16; code++) {
        const __mmask64 here = _mm512_cmpeq_epi8_mask(values, _mm512_set1_epi8((char)upper[code]));
        code_of = _mm512_mask_mov_epi8(code_of, here, _mm512_set1_epi8((char)code));
        found |= here;
    }
    _mm512_storeu_si512(lower, _mm512_packus_epi16(_mm512_and_si512(a, low_half), _mm512_and_si512(b, low_half)));
    _mm512_storeu_si512(codes, code_of);
    return found == ~(__mmask64)0;
}
#elif defined(WITH_NEON)
INLINE int encode_step(const uint16_t *weights, const uint8_t upper[16], char lower[64], char codes[64]) {
    uint8x16_t all_found = vdupq_n_u8(255);
    for (int part = 0; part < 4; part++) {
        const uint16x8_t a = vld1q_u16(weights + part * 8), b = vld1q_u16(weights + 32 + part * 8);
        const uint8x16_t values = vcombine_u8(vshrn_n_u16(a, 8), vshrn_n_u16(b, 8));
        uint8x16_t code_of = vdupq_n_u8(0), found = code_of;
        for (int code = 0; code < 16; code++) {
            const uint8x16_t here = vceqq_u8(values, vdupq_n_u8(upper[code]));
            code_of = vorrq_u8(code_of, vandq_u8(here, vdupq_n_u8((uint8_t)code)));
            found = vorrq_u8(found, here);
        }
        all_found = vandq_u8(all_found, found);
        vst1q_u8((uint8_t *)lower + part * 16, vcombine_u8(vmovn_u16(a), vmovn_u16(b)));
        vst1q_u8((uint8_t *)codes + part * 16, code_of);
    }
    return vminvq_u8(all_found) == 255;
}
#else
INLINE int encode_step(const uint16_t *weights, const uint8_t upper[16], char lower[64], char codes[64]) {
    const __m256i low_half = _mm256_set1_epi16(0x00ff);
    __m256i all_found = _mm256_set1_epi8(-1);
    for (int half = 0; half < 2; half++) {
        const __m256i a = _mm256_loadu_si256((const __m256i *)(weights + half * 16));
        const __m256i b = _mm256_loadu_si256((const __m256i *)(weights + 32 + half * 16));
        const __m256i values = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
        const __m256i low = _mm256_packus_epi16(_mm256_and_si256(a, low_half), _mm256_and_si256(b, low_half));
        __m256i code_of = _mm256_setzero_si256(), found = code_of;
        for (int code = 0; code < 16; code++) {
            const __m256i here = _mm256_cmpeq_epi8(values, _mm256_set1_epi8((char)upper[code]));
            code_of = _mm256_or_si256(code_of, _mm256_and_si256(here, _mm256_set1_epi8((char)code)));
            found = _mm256_or_si256(found, here);
        }
        all_found = _mm256_and_si256(all_found, found);
        _mm256_storeu_si256((__m256i *)(lower + half * 32), low);
        _mm256_storeu_si256((__m256i *)(codes + half * 32), code_of);
    }
    return _mm256_movemask_epi8(all_found) == -1;
}
#endif

/* Write the 192 bytes of a pair. Return 0 if it must be stored whole. */
INLINE int encode_pair(uint16_t weights[2][PANEL_COLUMNS * 2], const uint8_t upper[16], char *to) {
    char codes[2][64];
    const int first = encode_step(weights[0], upper, to, codes[0]);
    const int second = encode_step(weights[1], upper, to + 64, codes[1]);
    for (int i = 0; i < 64; i++) to[128 + i] = (char)(codes[0][i] | codes[1][i] << 4);
    return first && second;
}

/* Choose a panel's table, and count the pairs that must be stored whole. */
static void plan_panel(const GemmPack *args, int64_t panel) {
    PanelPlan *plan = plan_of(args, panel);
    Slice slice;
    plan->num_whole = 0;
    if (!choose_table(args, panel, plan->upper)) return;
    for (int64_t first = 0; first < num_pairs(args); first += SLICE_PAIRS) {
        pack_slice(args, panel, first, &slice);
        char encoded[PAIR_BYTES];
        for (int i = 0; i < slice.count; i++) plan->num_whole += !encode_pair(slice.weights[i], plan->upper, encoded);
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
    memcpy(head->upper, plan->upper, sizeof head->upper);
    head->to_whole = (char *)whole - (char *)head;
    for (int64_t first = 0; first < num_pairs(args); first += SLICE_PAIRS) {
        pack_slice(args, panel, first, &slice);
        for (int i = 0; i < slice.count; i++, to += PAIR_BYTES) {
            if (encode_pair(slice.weights[i], head->upper, to)) continue;
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
