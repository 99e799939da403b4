/* Element types, and what all files have in common. Files that include no vectors.h compile in half the time: the
 * intrinsics' declarations are long.
 */
#ifndef ELEMENTS_H
#define ELEMENTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* As Python passes them. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

INLINE int64_t element_bytes(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

#endif
