/* Products in 8 bits by AVX_VNNI, for the variant avx2. CPUs without AVX-512 that have it: Intel's from Alder Lake on. */
#if defined(__AVX2__) && !defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#pragma GCC target("avxvnni")
#ifndef __AVXVNNI__
#define __AVXVNNI__ 1
#endif
#include "products/int8_functions.h"

const Int8Functions int8_avx_vnni = INT8_FUNCTIONS;
#endif
