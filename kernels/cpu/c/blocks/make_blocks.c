#include "blocks/make_blocks.h"

#include <math.h>
#include <stdatomic.h>

#include "threads/pool.h"
#include "math/vectors.h"

enum { WEIGHTS = 32, BYTES = 34 };

typedef struct {
    const MakeBlocks *args;
    atomic_int_fast64_t num_failed;
} Making;

static float number_at(const MakeBlocks *args, int64_t index) {
    const char *at = (const char *)args->numbers + index * element_bytes(args->dtype);
    uint16_t bits;
    float number;
    if (args->dtype == FLOAT32) {
        memcpy(&number, at, sizeof number);
        return number;
    }
    memcpy(&bits, at, sizeof bits);
    return args->dtype == BFLOAT16 ? float_of_bfloat16(bits) : float_of_float16(bits);
}

/* Round to IEEE half precision, to nearest even. */
static uint16_t float16_of_float(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    const uint16_t sign = (uint16_t)(word >> 16 & 0x8000);
    word &= 0x7fffffff;
    if (word > 0x7f800000) return sign | 0x7e00;
    if (word >= 0x477ff000) return sign | 0x7c00; /* 65520 and more */
    if (word < 0x38800000) {                      /* below 2**-14: units of 2**-24 */
        memcpy(&value, &word, sizeof value);
        return sign | (uint16_t)nearbyintf(value * 0x1p24f);
    }
    return sign | (uint16_t)((word + 0xfff + (word >> 13 & 1) - 0x38000000) >> 13);
}

/* Write a block. Return whether its scale is a finite float16. */
static int make_block(const MakeBlocks *args, int64_t block) {
    float numbers[WEIGHTS], largest = 0.0f;
    uint8_t *to = (uint8_t *)args->blocks + block * BYTES;
    for (int i = 0; i < WEIGHTS; i++) {
        const float number = numbers[i] = number_at(args, block * WEIGHTS + i), magnitude = fabsf(number);
        if (!(magnitude <= largest)) largest = magnitude; /* a NaN stays */
        if (largest != largest) return 0;
    }
    const float scale = largest / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    const uint16_t bits = float16_of_float(scale);
    if ((bits & 0x7c00) == 0x7c00 || !(inverse <= 0x1p127f)) return 0;
    memcpy(to, &bits, sizeof bits);
    for (int i = 0; i < WEIGHTS; i++) to[2 + i] = (uint8_t)(int8_t)roundf(numbers[i] * inverse);
    return 1;
}

static void make_job(void *job, int thread, int num_threads) {
    Making *making = job;
    const int64_t count = making->args->num_blocks, last = count * (thread + 1) / num_threads;
    for (int64_t block = count * thread / num_threads; block < last; block++)
        if (!make_block(making->args, block)) atomic_fetch_add(&making->num_failed, 1);
}

EXPORT int64_t make_blocks(const MakeBlocks *args) {
    Making making = {.args = args};
    pool_run(make_job, &making);
    return making.num_failed;
}
