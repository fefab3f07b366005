/* Attention, prefill, K/V in eight bits and greedy sampling in fp32. */
#include "common.h"
#define DTYPE f32
#define ELEMENT float
#define LOAD load_f32
#define STORE_EXACT store_exact_f32
#define DOT_BF16 0
#define COMMON_DIMS 1
#define AMX 0
#define PREFILL_TYPE DTYPE
#include "attention.inc.c"
#include "quantise.inc.c"
#include "prefill.inc.c"
#include "greedy.inc.c"
