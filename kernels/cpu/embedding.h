/* Rows of an embedding table, times a factor, as float32. A model whose head has the same weights keeps them once, packed
 * for the head: what lies side by side in a row of the table is then a step of a panel apart.
 */
#ifndef EMBEDDING_H
#define EMBEDDING_H

#include <stdint.h>

enum { NOT_PACKED = 0, PACKED = 1, COMPACT_TABLE = 2 };

typedef struct {
    const int64_t *ids; /* [num_rows] rows of the table */
    const void *table;  /* [.., width] of dtype; or packed as a product's weights are, see gemm.h and compact.h */
    float *out;         /* [num_rows, width] */
    int64_t num_rows, width;
    int32_t dtype; /* BFLOAT16 or FLOAT32 */
    float scale;
    int32_t packing; /* of the table: one of these */
} Embedding;

void embedding_part(const Embedding *args, int thread, int num_threads);
void embedding(const Embedding *args);

#endif
