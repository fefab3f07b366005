/* Decoder layers in bf16, on CPUs with dot products of bf16. */
#include "common.h"
#if HAS_DPBF16
#include "layers.h"
#define DTYPE_NUMBER 1
#include "layers.inc.c"
#endif
