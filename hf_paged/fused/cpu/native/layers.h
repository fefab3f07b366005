/* Shared by the units for decoder layers: the arguments of their entry points, which the caller fills as 64-bit words
 * in this order (fused/cpu/structs.py), and, for AVX-512 with BF16, rounding to bf16. A unit for another dtype defines
 * ELEMENT, and NAME, which makes an entry point's name. */
#ifndef HFP_LAYERS_H
#define HFP_LAYERS_H
#include "amx.h"
#include "threads.h"
#include "vectors.h"

#ifndef ELEMENT
#define ELEMENT uint16_t
#define NAME(name) name
#endif

#define FORK_ELEMENTS (1 << 15) /* with fewer elements, one thread is faster than starting a second one */
#define AHEAD (256 << 10)       /* bytes that may be prefetched to L2 before they are needed */
#define PACKED_ROUGH 2          /* a value of `packed` with int8 weights: results may be rough where that is faster */
#define PACKED_GROUPS 16        /* `packed` of codes in groups (portable/groups.c), 16 * their length + bits + the kind of their heads */
#define PACKED_SHORT 4096       /* more of it if rows in fp32 are rounded to 15 bits */
#define PACKED_COARSE 8192      /* or if rows are rounded to 8 bits */

typedef struct {
    const ELEMENT *x; /* [rows, depth] */
    int64_t rows, columns, depth;
    const ELEMENT *weight, *bias; /* bias: or NULL */
    int64_t packed;                /* whether the weight is packed (of fp32 rows: in bf16); else it is [columns, depth] */
    ELEMENT *out;                 /* [rows, columns] */
    char *workspace;               /* hfp_linear_workspace() bytes, aligned to 64 */
    int64_t threads;
    const float *scales; /* [columns], by which the sums are multiplied: the weight is int8; the table of codes; or NULL */
    int64_t rounds;      /* whether the sums are rounded to the dtype before that */
} Linear;

typedef struct {
    const ELEMENT *x; /* [tokens, heads, dim] */
    int64_t token, head, heads; /* strides from token to token and head to head; number of heads */
    ELEMENT *out;              /* contiguous */
} Rotated;

typedef struct {
    Rotated query, key;
    const ELEMENT *cos, *sin; /* [tokens, dim] */
    int64_t tokens, dim, threads;
} Rotate;

/* The weight of a linear layer. */
typedef struct {
    const ELEMENT *weight, *bias; /* bias: or NULL */
    int64_t columns, packed;       /* packed: as in Linear */
    const float *scales;           /* as in Linear */
    int64_t rounds;
} Weight;

typedef struct {
    const ELEMENT *x; /* [rows, depth] */
    int64_t rows, depth, head_dim;
    const ELEMENT *norm, *query_norm, *key_norm; /* weights; those of the heads, [head_dim]: or NULL */
    Weight query, key, value;
    const ELEMENT *cos, *sin;                /* [rows, head_dim] */
    ELEMENT *new_query, *new_key, *new_value; /* [rows, columns of each] */
    char *workspace;                          /* hfp_layer_in_workspace() bytes, aligned to 64 */
    int64_t threads;
    double norm_eps, query_eps, key_eps;
} LayerIn;

typedef struct {
    const ELEMENT *x, *residual; /* the output of attention [rows, x_depth]; the input of the layer [rows, depth] */
    int64_t rows, x_depth, depth;
    const ELEMENT *norm;
    Weight output, gate, up, down;
    ELEMENT *out;   /* [rows, depth] */
    char *workspace; /* hfp_layer_out_workspace() bytes, aligned to 64 */
    int64_t threads;
    double norm_eps;
} LayerOut;

typedef struct {
    const ELEMENT *x;    /* [tokens, depth] */
    const int64_t *index; /* the experts of each token, [tokens, top_k] */
    const float *weights; /* [tokens, top_k] */
    int64_t tokens, top_k, depth, inner, experts;
    int64_t rounds;                 /* whether a result is rounded to bf16 after it is multiplied by its weight */
    const ELEMENT *gate_up, *down; /* [experts, 2 * inner, depth], [experts, depth, inner], or packed one by one */
    int64_t packed;
    ELEMENT *out;                  /* [tokens, depth] */
    int64_t *places;                /* [tokens * top_k + experts + 1] */
    ELEMENT *rows, *both, *results; /* [tokens * top_k, depth], [same, 2 * inner], [same, depth] */
    char *workspace;                /* hfp_linear_workspace() bytes for the larger depth, aligned to 64 */
    int64_t threads;
} Experts;

int64_t hfp_groups_workspace(int64_t rows, int64_t depth);
void hfp_linear_groups(const void *linear, int dtype, int in_one_order);

int64_t NAME(hfp_linear_workspace)(int64_t rows, int64_t depth, int64_t threads);
void NAME(hfp_linear)(const Linear *call);
void NAME(hfp_rms_norm)(const ELEMENT *x, const ELEMENT *weight, ELEMENT *out, int64_t rows, int64_t n, double eps,
                        int64_t threads);
void NAME(hfp_rotate)(const Rotate *r);

#if HAS_DPBF16 && !defined(HFP_ELEMENTS_H)
int64_t hfp_packed_bytes(int64_t columns, int64_t depth, int64_t size);

/* Round to nearest even, as torch does, including subnormal numbers, which the hardware instructions flush to zero. */
INLINE vf round_bf16(vf x) {
    const __m512i u = (__m512i)x, odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff));
    const __mmask16 nan = _mm512_cmp_ps_mask((__m512)x, (__m512)x, _CMP_UNORD_Q);
    return (vf)_mm512_mask_mov_epi32(_mm512_and_si512(sum, _mm512_set1_epi32((int)0xffff0000)), nan,
                                     _mm512_set1_epi32(0x7fc00000));
}
INLINE __m256i to_bf16(vf x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)round_bf16(x), 16)); }
INLINE void store_bf16(uint16_t *p, vf x) { _mm256_storeu_si256((__m256i *)p, to_bf16(x)); }

/* to[i] = gate[i] / (1 + exp(-gate[i])) * up[i], for 16 elements */
INLINE void gate_vector(uint16_t *to, const uint16_t *gate, const uint16_t *up) {
    const vf x = load_bf16(gate);
    /* Beyond these bounds the result is 0 or x. NaN is preserved, because min and max return their second operand. */
    const __m512 bounded = _mm512_min_ps(_mm512_set1_ps(104), _mm512_max_ps(_mm512_set1_ps(-104), (__m512)-x));
    vf power;
    const vf y = exp_parts((vf)bounded, &power);
    const vf silu = round_bf16(x / (1.0f + (vf)_mm512_scalef_ps((__m512)y, (__m512)power)));
    store_bf16(to, silu * load_bf16(up));
}

/* to[i] += x[i], for 16 elements */
INLINE void add_vector(uint16_t *to, const uint16_t *x) { store_bf16(to, load_bf16(to) + load_bf16(x)); }
#endif
#endif
