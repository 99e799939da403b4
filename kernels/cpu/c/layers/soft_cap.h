/* Soft caps (Gemma 2, arXiv 2408.00118): each number becomes cap * tanh(number / cap). */
#ifndef SOFT_CAP_H
#define SOFT_CAP_H

#include <stdint.h>

typedef struct {
    float *numbers; /* [num_rows, width] */
    int64_t num_rows, width;
    float cap;
} SoftCap;

void soft_cap_part(const SoftCap *args, int thread, int num_threads);
void soft_cap(const SoftCap *args);

#endif
