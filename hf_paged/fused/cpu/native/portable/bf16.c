/* Decoder layers in bf16, on CPUs without dot products of bf16. Products and sums are fp32. */
#include "common.h"
#if !HAS_DPBF16
#define ELEMENT uint16_t
#define NAME(name) name
#define DTYPE_NUMBER 1
#define IN_ONE_ORDER 1 /* all rows have it */
#include "elements.h"

INLINE v8 load_8_bf16(const uint16_t *p) {
    h8 h;
    memcpy(&h, p, sizeof h);
    return (v8)(__builtin_convertvector(h, u8) << 16);
}
INLINE v8 round_8_bf16(v8 x) {
    const u8 u = (u8)x;
    return choose_8(x == x, (v8)((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000), (v8)((u8){0} + 0x7fc00000));
}
INLINE void store_8_bf16(uint16_t *p, v8 x) {
    const h8 h = __builtin_convertvector((u8)round_8_bf16(x) >> 16, h8);
    memcpy(p, &h, sizeof h);
}

#define LOAD load_bf16
#define STORE store_part_bf16
#define LOAD_8 load_8_bf16
#define STORE_8 store_8_bf16
#define ROUND_8 round_8_bf16
#include "rows.inc.c"
#include "linear.inc.c"
#include "layers.inc.c"
#endif
