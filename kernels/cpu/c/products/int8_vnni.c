/* Products in 8 bits by AVX512_VNNI, for the variants whose CPUs have AVX-512 and may lack it. */
#if defined(__AVX512F__) && !defined(__AVX512VNNI__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512vnni")
#ifndef __AVX512VNNI__
#define __AVX512VNNI__ 1
#endif
#include "products/int8_functions.h"

const Int8Functions int8_vnni = INT8_FUNCTIONS;
#endif
