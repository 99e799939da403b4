#!/usr/bin/env bash
# GCC 12 for ARM64 makes a float16 of a constant vector of bfloat16 numbers.
#
# A constant vector of bfloat16 1.0 (0x3f80) is loaded by `fmov v.8h, 1.0`, which makes float16 numbers: 0x3c00, as a
# bfloat16 0.0078. Without +fp16 the assembler refuses the instruction. With it the program is wrong, silently.
#
# What follows: such a constant must come from a register that the compiler cannot see through.
#
# Needs Debian 12's gcc-aarch64-linux-gnu (12.2.0); nothing is run.
set -euo pipefail
compiler=aarch64-linux-gnu-gcc-12
"$compiler" --version | grep -q ' 12\.2\.0$' || { echo "not GCC 12.2.0"; exit 1; }
made=$("$compiler" -O2 -march=armv8.2-a+bf16+fp16 -x c -S - -o - <<'PROGRAM'
#include <arm_neon.h>
float32x4_t add_even(float32x4_t sum, bfloat16x8_t pairs) {
    const uint32x4_t ones = vdupq_n_u32(0x3f803f80);
    return vbfmlalbq_f32(sum, pairs, vreinterpretq_bf16_u32(ones));
}
PROGRAM
)
grep -qP '\tfmov\tv\d+\.8h, 1\.0e\+0' <<< "$made" || { echo "changed: the constant is no float16 any more"; exit 1; }
echo "GCC 12.2.0: a constant bfloat16 1.0 is made as a float16 1.0"
