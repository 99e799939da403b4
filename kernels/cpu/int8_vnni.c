/* Products in 8 bits by AVX512_VNNI, for the variants of AVX-512. Not all of their CPUs have it. */
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512vnni")
#ifndef __AVX512VNNI__
#define __AVX512VNNI__ 1
#endif
#include "int8_functions.h"

const Int8Functions int8_vnni = INT8_FUNCTIONS;
#endif
