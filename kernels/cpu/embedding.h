/* Rows of an embedding table, times a factor, as float32.
 *
 * If a model's head has the same weights, they are kept once, packed for the head. Then neighbours in a row of the
 * table are one step of a panel apart.
 */
#ifndef EMBEDDING_H
#define EMBEDDING_H

#include <stdint.h>

enum { NOT_PACKED = 0, PACKED = 1, BLOCK_TABLE = 16 };

typedef struct {
    const int64_t *ids; /* [num_rows] rows of the table */
    const void *table;  /* [.., width] of dtype; or packed like a product's weights (gemm.h); or rows of blocks */
    float *out;         /* [num_rows, width] */
    int64_t num_rows, width;
    int32_t dtype; /* BFLOAT16 or FLOAT32 */
    float scale;
    int32_t packing; /* of the table: NOT_PACKED; PACKED + packing of gemm.h; or BLOCK_TABLE + type of dequantize.h */
} Embedding;

void embedding_part(const Embedding *args, int thread, int num_threads);
void embedding(const Embedding *args);

#endif
