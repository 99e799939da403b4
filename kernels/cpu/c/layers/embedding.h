/* Rows of an embedding table, times a factor, as float32.
 *
 * An id below 0 stands for a given row: id -1 - i is row i of `given`, which is copied to the output unchanged.
 *
 * Encoders add a row for the kind of the token, and then one for its position. The ids of tokens of kind k are offset
 * by k * num_words.
 *
 * If a model's head has the same weights, they are kept once, packed for the head. Then adjacent numbers of a table row
 * are one step of a panel apart.
 */
#ifndef EMBEDDING_H
#define EMBEDDING_H

#include <stdint.h>

enum { NOT_PACKED = 0, PACKED = 1, BLOCK_TABLE = 16 };

typedef struct {
    const int64_t *ids; /* [num_rows] rows of the table; or of `given`, as -1 - row */
    const void *table;  /* [.., width] of dtype; or packed like a product's weights (gemm.h); or rows of blocks */
    float *out;         /* [num_rows, width] */
    int64_t num_rows, width;
    int32_t dtype; /* BFLOAT16 or FLOAT32 */
    float scale;
    int32_t packing; /* of the table: NOT_PACKED; PACKED + packing of gemm.h; or BLOCK_TABLE + type of blocks */
    const float *kinds;       /* [.., width]: rows for kinds of tokens, of a table that is NOT_PACKED; or NULL */
    const float *places;      /* [.., width]: rows for positions; or NULL */
    const int64_t *positions; /* [num_rows]; only read with places */
    int64_t num_words;        /* rows of the table; only read with kinds */
    const float *given;       /* [.., width]: only read for ids below 0 */
} Embedding;

void embedding_part(const Embedding *args, int thread, int num_threads);
void embedding(const Embedding *args);

#endif
