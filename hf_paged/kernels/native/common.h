/* For every unit of the kernels: the instruction set that it is compiled for, and small helpers.
 *
 * The keys of every sequence are cut into chunks at multiples of CHUNK positions. A work item is one chunk of one
 * sequence, or of several sequences that hold the same blocks there, with all heads. The chunks of a query are
 * combined in order, so its result depends only on its own keys: not on the batch, the threads, or which sequences
 * share its blocks. */
#ifndef HFP_COMMON_H
#define HFP_COMMON_H
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 128
#define TILE 32 /* keys whose scores are computed before the softmax state is updated; divides CHUNK */

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define W 16 /* fp32 lanes of a vector */
#elif defined(__AVX2__) && defined(__FMA__)
#define W 8
#else
#define W 4
#endif
#if W == 16 && defined(__AVX512BF16__)
#define HAS_DPBF16 1
#else
#define HAS_DPBF16 0
#endif
/* HF_PAGED_EMULATE_AMX is for tests: the AMX code runs on an emulated matrix unit. */
#if HAS_DPBF16 && defined(HF_PAGED_EMULATE_AMX)
#define HAS_AMX 1
#elif HAS_DPBF16 && defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define HAS_AMX 1
#else
#define HAS_AMX 0
#endif
#if HAS_AMX && (defined(HF_PAGED_EMULATE_AMX) || defined(__AMX_INT8__))
#define HAS_AMX_INT8 1
#else
#define HAS_AMX_INT8 0
#endif
#if defined(__F16C__) || defined(__aarch64__)
#define HAS_F16 1
#else
#define HAS_F16 0
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
/* An entry point of the library; other symbols are hidden. */
#define HFP_EXPORT __attribute__((visibility("default")))

#define NAME_2(a, b) a##_##b
#define NAME_1(a, b) NAME_2(a, b)
#define TYPED(name) NAME_1(name, DTYPE)

static inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

/* Take the next `bytes` of a buffer, rounded up so that the following part is aligned to 64 bytes too. */
static inline void *take(char **at, int64_t bytes) {
    void *part = *at;
    *at += round_up(bytes, 64);
    return part;
}
#endif
