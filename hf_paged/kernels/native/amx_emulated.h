/* The AMX tile instructions that the kernels use, emulated with AVX-512, for tests on machines without a matrix unit.
 * Replaces the intrinsics of the compiler. The results are bit for bit those that the instruction manual specifies:
 * TDPBF16PS sums the products of even and of odd elements separately, with fused multiply-adds, adds the two sums, and
 * adds the result to the destination. It rounds to nearest even, and treats subnormal inputs and results as zero.
 * TDPBSSD and TDPBUSD sum products of bytes in 32 bits, without saturation.
 *
 * Every use that would be invalid on a machine (no configuration, tiles whose shapes do not match) aborts the process.
 */
#ifndef HFP_AMX_EMULATED_H
#define HFP_AMX_EMULATED_H
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbusd
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_loadd emulated_loadd
#define _tile_stream_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_zero emulated_zero
#define _tile_dpbf16ps emulated_dpbf16ps
#define _tile_dpbssd emulated_dpbssd
#define _tile_dpbusd emulated_dpbusd

typedef struct {
    int rows, bytes; /* bytes of a row */
    uint8_t data[16][64] __attribute__((aligned(64)));
} EmulatedTile;

static __thread struct {
    int configured;
    EmulatedTile tiles[8];
} emulated_unit; /* one per thread, as on a machine */

static inline void emulated_require(int condition, const char *what) {
    if (condition) return;
    fprintf(stderr, "hf_paged: invalid use of the emulated matrix unit: %s\n", what);
    abort();
}

static inline EmulatedTile *emulated_tile(int index) {
    emulated_require(emulated_unit.configured, "no configuration");
    emulated_require(index >= 0 && index < 8, "tile number");
    EmulatedTile *tile = &emulated_unit.tiles[index];
    emulated_require(tile->rows > 0 && tile->bytes > 0, "the tile is not configured");
    return tile;
}

static inline void emulated_loadconfig(const void *at) {
    const uint8_t *config = (const uint8_t *)at;
    emulated_require(config[0] == 1 && config[1] == 0, "palette or start row");
    memset(&emulated_unit, 0, sizeof emulated_unit);
    for (int i = 0; i < 8; i++) {
        uint16_t bytes;
        memcpy(&bytes, config + 16 + 2 * i, sizeof bytes);
        emulated_require(bytes <= 64 && config[48 + i] <= 16, "a tile is too large");
        emulated_unit.tiles[i].bytes = bytes;
        emulated_unit.tiles[i].rows = config[48 + i];
    }
    emulated_unit.configured = 1;
}

static inline void emulated_release(void) { memset(&emulated_unit, 0, sizeof emulated_unit); }

static inline void emulated_zero(int index) {
    EmulatedTile *tile = emulated_tile(index);
    memset(tile->data, 0, sizeof tile->data);
}

static inline void emulated_loadd(int index, const void *from, int64_t stride) {
    EmulatedTile *tile = emulated_tile(index);
    memset(tile->data, 0, sizeof tile->data);
    for (int r = 0; r < tile->rows; r++) memcpy(tile->data[r], (const char *)from + r * stride, (size_t)tile->bytes);
}

static inline void emulated_stored(int index, void *to, int64_t stride) {
    EmulatedTile *tile = emulated_tile(index);
    for (int r = 0; r < tile->rows; r++) memcpy((char *)to + r * stride, tile->data[r], (size_t)tile->bytes);
}

/* Not inlined, because its arithmetic must stay between the two changes of the floating-point mode. */
__attribute__((noinline)) static void emulated_products(EmulatedTile *sum, const EmulatedTile *a,
                                                        const EmulatedTile *b) {
    for (int m = 0; m < sum->rows; m++) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        for (int k = 0; k < a->bytes / 4; k++) {
            uint32_t pair;
            memcpy(&pair, a->data[m] + 4 * k, sizeof pair);
            const __m512i row = _mm512_load_si512(b->data[k]);
            const __m512i high = _mm512_set1_epi32((int)0xffff0000);
            even = _mm512_fmadd_ps((__m512)_mm512_set1_epi32((int)(pair << 16)),
                                   (__m512)_mm512_slli_epi32(row, 16), even);
            odd = _mm512_fmadd_ps((__m512)_mm512_set1_epi32((int)(pair & 0xffff0000)),
                                  (__m512)_mm512_and_si512(row, high), odd);
        }
        const __m512 result = _mm512_add_ps(_mm512_load_ps((float *)(void *)sum->data[m]), _mm512_add_ps(even, odd));
        const __mmask16 lanes = (__mmask16)((1u << (sum->bytes / 4)) - 1);
        _mm512_store_ps((float *)(void *)sum->data[m], _mm512_maskz_mov_ps(lanes, result));
    }
    __asm__ volatile("" ::: "memory");
}

static inline void emulated_check(const EmulatedTile *sum, const EmulatedTile *a, const EmulatedTile *b) {
    emulated_require(sum != a && sum != b && a != b, "the tiles of a product must differ");
    emulated_require(sum->rows == a->rows && sum->bytes == b->bytes && a->bytes / 4 == b->rows, "shapes do not fit");
}

static inline void emulated_dpbf16ps(int to, int left, int right) {
    EmulatedTile *sum = emulated_tile(to);
    const EmulatedTile *a = emulated_tile(left), *b = emulated_tile(right);
    emulated_check(sum, a, b);
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(0x1f80 | 0x8040); /* exceptions masked, nearest even, subnormal results and inputs are zero */
    __asm__ volatile("" ::: "memory");
    emulated_products(sum, a, b);
    _mm_setcsr(mode);
}

static inline void emulated_bytes(int to, int left, int right, int is_signed) {
    EmulatedTile *sum = emulated_tile(to);
    const EmulatedTile *a = emulated_tile(left), *b = emulated_tile(right);
    emulated_check(sum, a, b);
    for (int m = 0; m < sum->rows; m++)
        for (int n = 0; n < sum->bytes / 4; n++) {
            int32_t total;
            memcpy(&total, sum->data[m] + 4 * n, sizeof total);
            for (int k = 0; k < a->bytes; k++) {
                const int x = is_signed ? (int8_t)a->data[m][k] : a->data[m][k];
                total += x * (int8_t)b->data[k / 4][4 * n + k % 4];
            }
            memcpy(sum->data[m] + 4 * n, &total, sizeof total);
        }
}

static inline void emulated_dpbssd(int to, int left, int right) { emulated_bytes(to, left, right, 1); }
static inline void emulated_dpbusd(int to, int left, int right) { emulated_bytes(to, left, right, 0); }
#endif
