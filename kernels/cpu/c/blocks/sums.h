/* Sums of bytes, by which damage of a file is found. They prove nothing about a file that another program wrote.
 *
 * Each piece of SUM_BYTES has a sum of 64 bits. Words of 8 bytes go to eight running sums in turn:
 * sum = sum * SUM_FACTOR + word (mod 2^64). The factor is odd, so a piece that differs in one word has another sum. The
 * eight are joined by the same rule. The last piece is padded with zeros to a multiple of 64 bytes.
 */
#ifndef SUMS_H
#define SUMS_H

#include <stdint.h>

enum { SUM_BYTES = 1 << 20 };
#define SUM_FACTOR UINT64_C(0x9e3779b97f4a7c15)

/* Write the sums of the pieces of `data`, whose number is num_bytes / SUM_BYTES, rounded up. */
void sum_pieces(const void *data, int64_t num_bytes, uint64_t *sums);

#endif
