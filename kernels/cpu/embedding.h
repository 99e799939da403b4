/* Rows of an embedding table, times a factor, as float32. */
#ifndef EMBEDDING_H
#define EMBEDDING_H

#include <stdint.h>

typedef struct {
    const int64_t *ids; /* [num_rows] rows of the table */
    const void *table;  /* [.., width] of dtype */
    float *out;         /* [num_rows, width] */
    int64_t num_rows, width;
    int32_t dtype; /* BFLOAT16 or FLOAT32 */
    float scale;
} Embedding;

void embedding_part(const Embedding *args, int thread, int num_threads);
void embedding(const Embedding *args);

#endif
