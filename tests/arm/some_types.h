/* Included before each file of test_rows_together.py's program: only some types, since all take long to compile. They are
 * those whose unpacked groups or rows have another form each.
 */
#include "blocks/block_types.h"

#undef EACH_INT8_TYPE
#define EACH_INT8_TYPE(X, ...)                                                                                  \
    X(q4_0, Q4_0, __VA_ARGS__) X(q8_0, Q8_0, __VA_ARGS__) X(q4_k, Q4_K, __VA_ARGS__) X(q6_k, Q6_K, __VA_ARGS__) \
    X(q2_k, Q2_K, __VA_ARGS__) X(nvfp4_f32, NVFP4_F32, __VA_ARGS__)
