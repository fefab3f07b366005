/* Prefill in bf16 on the matrix unit. */
#include "common.h"
#if HAS_AMX
#define DTYPE bf16
#define ELEMENT uint16_t
#define LOAD load_bf16
#define AMX 1
#define PREFILL_TYPE amx
#include "prefill.inc.c"
#endif
