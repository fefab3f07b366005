/* Attention, prefill, K/V in eight bits and greedy sampling in fp16. */
#include "common.h"
#if HAS_F16
#define DTYPE f16
#define ELEMENT uint16_t
#define LOAD load_f16
#define STORE_EXACT store_exact_f16
#define DOT_BF16 0
#define COMMON_DIMS 0 /* fp16 is rare on CPUs, and this saves compile time */
#define AMX 0
#define PREFILL_TYPE DTYPE
#include "attention.inc.c"
#include "quantise.inc.c"
#include "prefill.inc.c"
#include "greedy.inc.c"
#endif
