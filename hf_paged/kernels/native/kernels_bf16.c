/* Attention, prefill, K/V in eight bits and greedy sampling in bf16, without a matrix unit. */
#include "common.h"
#define DTYPE bf16
#define ELEMENT uint16_t
#define LOAD load_bf16
#define STORE_EXACT store_exact_bf16
#define DOT_BF16 HAS_DPBF16
#define COMMON_DIMS 1
#define AMX 0
#define PREFILL_TYPE DTYPE
#include "attention.inc.c"
#include "quantise.inc.c"
#include "prefill.inc.c"
#include "greedy.inc.c"
