/* Element types and the includes of all files. vectors.h is separate because the intrinsics' declarations are long: a
 * file without it compiles in half the time.
 */
#ifndef ELEMENTS_H
#define ELEMENTS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* Variants for ARM64. The variant portable does not use NEON's instructions by name: a compiler for ARM64 always has
 * them, so the variants' flags define WITH_NEON. */
#if defined(WITH_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define NEON_DOT 1
#endif
#if defined(WITH_NEON) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define NEON_BF16 1
#endif
#if defined(WITH_NEON) && defined(__ARM_FEATURE_MATMUL_INT8)
#define NEON_I8MM 1
#endif

/* Python passes these numbers: ELEMENT_TYPES of kernels/cpu/library.py. */
enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* Whether products of bfloat16 numbers take two adjacent numbers along the depth at once. */
#if defined(__AVX512BF16__) || defined(__AMX_BF16__) || defined(NEON_BF16)
enum { BY_PAIRS = 1 };
#else
enum { BY_PAIRS = 0 };
#endif

INLINE int64_t element_bytes(int dtype) { return dtype == FLOAT32 ? 4 : 2; }

#endif
