/* Products in 8 bits by the instruction set of the variant. */
#include "products/int8_functions.h"

const Int8Functions int8_plain = INT8_FUNCTIONS;
