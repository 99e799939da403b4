/* One column of a matrix that is packed for products in 8 bits: a row of an embedding table that is also the head. */
#ifndef INT8_COLUMN_H
#define INT8_COLUMN_H

#include "products/quantized.h"

/* Write the weights [depth] of one column: the bfloat16 numbers that dequantize.h gives, but for the signs of zeros and
 * for scales of MXFP4 below 2 ** -126, which are zeros. */
void int8_column(const void *weights, int64_t depth, int64_t column, float *out);

#endif
