/* Loads and stores of Triton's interpreter: `count` numbers of `size` bytes at addresses. Where mask is 0, a number is
 * that of `other` or stays; no mask: all are meant. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EACH(SIZE, STEP)                       \
    for (size_t i = 0; i < count; i++) {       \
        void *there = (void *)(uintptr_t)at[i]; \
        char *here = numbers + i * SIZE;       \
        if (!mask || mask[i]) STEP;            \
    }
#define SIZES(STEP_OF)                      \
    if (size == 1) EACH(1, STEP_OF(1))      \
    if (size == 2) EACH(2, STEP_OF(2))      \
    if (size == 4) EACH(4, STEP_OF(4))      \
    if (size == 8) EACH(8, STEP_OF(8))
#define LOAD(SIZE) memcpy(here, there, SIZE)
#define STORE(SIZE) memcpy(there, here, SIZE)

/* numbers: what masked ones are, and the result. */
void load(const uint64_t *at, const uint8_t *mask, char *numbers, size_t count, size_t size) { SIZES(LOAD) }

void store(const uint64_t *at, const uint8_t *mask, char *numbers, size_t count, size_t size) { SIZES(STORE) }
