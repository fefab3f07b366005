/* Decoder layers in fp16. Products and sums are fp32. */
#include "common.h"
#if HAS_F16
#define ELEMENT uint16_t
#define NAME(name) name##_f16
#define DTYPE_NUMBER 2
#define IN_ONE_ORDER 1 /* all rows have it */
#include "elements.h"

INLINE v8 load_8_f16(const uint16_t *p) {
#if defined(__F16C__)
    return (v8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p));
#else
    const vf low = load_f16(p), high = load_f16(p + 4);
    return (v8){low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3]};
#endif
}
INLINE void store_8_f16(uint16_t *p, v8 x) {
#if defined(__F16C__)
    _mm_storeu_si128((__m128i *)(void *)p, _mm256_cvtps_ph((__m256)x, 0));
#else
    store_part_f16(p, (vf){x[0], x[1], x[2], x[3]}, 4);
    store_part_f16(p + 4, (vf){x[4], x[5], x[6], x[7]}, 4);
#endif
}
INLINE v8 round_8_f16(v8 x) {
    uint16_t h[8];
    store_8_f16(h, x);
    return load_8_f16(h);
}

#define LOAD load_f16
#define STORE store_part_f16
#define LOAD_8 load_8_f16
#define STORE_8 store_8_f16
#define ROUND_8 round_8_f16
#include "rows.inc.c"
#include "linear.inc.c"
#include "layers.inc.c"
#endif
