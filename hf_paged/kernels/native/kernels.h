/* Shared by the units of attention: the arguments of a call, the sizes of workspaces, and the functions for each
 * dtype. */
#ifndef HFP_KERNELS_H
#define HFP_KERNELS_H
#include "partition.h"
#include "threads.h"

/* The strides of a write, in bytes: from token to token and from head to head of the new K and V, and from block to
 * block, slot to slot and head to head of the caches. k_size, v_size: bytes of one head. */
typedef struct {
    int64_t k_token, k_head, k_size, v_token, v_head, v_size;
    int64_t kc_block, kc_slot, kc_head, vc_block, vc_slot, vc_head;
} WriteStrides;

/* How K or V is stored. kind: EXACT, in the dtype of the query; else in eight bits, and a number is the product of an
 * element and the scale of its token and head. Strides of the scales are in elements. */
enum { EXACT, INT8, E4M3 };
typedef struct {
    int64_t kind;
    float *scales;
    int64_t block, slot, head;
} Store;

/* A run of bytes in every block of a tensor that is copied: its addresses in block 0 of the source and of the target,
 * the bytes from block to block in each, and the size of the run. */
typedef struct {
    const char *source;
    int64_t source_block;
    char *target;
    int64_t target_block, size;
} Span;

/* The arguments of attention, which the caller fills as 64-bit words in this order (kernels/native/structs.py). Strides
 * are in elements. */
typedef struct {
    const char *query, *key, *value;
    char *out;
    float *lse;                  /* [num_tokens, num_heads] or NULL */
    const float *sinks, *slopes; /* [num_heads] or NULL */
    const int32_t *tables;
    const Partition *partition;
    char *workspace;
    int64_t q_token, q_head, k_block, k_token, k_head, v_block, v_token, v_head, o_token, o_head;
    int64_t table_stride, num_heads, num_kv_heads, head_dim, v_head_dim, block_size;
    Bounds bounds;
    int64_t threads;
    const char *new_key, *new_value; /* K/V of the step's tokens, which is written first; NULL: it is in the cache */
    const int64_t *slots;            /* [num_tokens] */
    int64_t num_tokens;
    WriteStrides strides;
    Store key_store, value_store;
    double scale, softcap;
} Call;

/* Whether K and V are both stored so. */
static inline int stores(const Call *call, int64_t kind) {
    return call->key_store.kind == kind && call->value_store.kind == kind;
}

/* The sequences with many new tokens: their numbers in `seqs`. seq_lens and starts: of all sequences of the step. */
typedef struct {
    const int32_t *seq_lens, *starts, *seqs;
    int64_t num_seqs;
    const int32_t *reach; /* as in Step */
} Prompts;

static inline int64_t padded_dim(int64_t dim) { return round_up(dim, 2 * W); }

/* Floats in a slot, which holds one partial result: maxima and sums by head, then outputs that are not normalised. */
static inline int64_t slot_floats(int64_t num_heads, int64_t v_head_dim) {
    return round_up(2 * num_heads, 16) + num_heads * padded_dim(v_head_dim);
}

/* Bytes of a slot. */
static inline int64_t slot_bytes(int64_t num_heads, int64_t v_head_dim) {
    return round_up(slot_floats(num_heads, v_head_dim) * 4, 64);
}

/* Bytes of workspace that each thread needs for items of up to `count` queries. */
static inline int64_t thread_bytes(int64_t count, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                   int64_t v_head_dim) {
    const int64_t rows = count * (num_heads / num_kv_heads);
    const int64_t floats = count * num_heads * padded_dim(head_dim) /* queries */
                           + count * slot_floats(num_heads, v_head_dim)
                           + count * num_heads * W /* sums, for each lane */
                           + rows * (TILE + 4)     /* scores, factors, pointers to accumulators */
                           + count * 8
                           + TILE * (padded_dim(head_dim > v_head_dim ? head_dim : v_head_dim) + 4) /* eight bits */
#if HAS_AMX
                           + round_up(rows, 16) * (num_kv_heads * (head_dim * 3 / 4 + 1) + 4) /* queries, their masks */
                           + round_up(rows, 16) * CHUNK                             /* scores */
                           + CHUNK * (head_dim / 2 + v_head_dim / 4 + 16) + 1024    /* keys, values, outputs as tiles */
                           + 2 * (CHUNK + 16) + 12 * 256                            /* scales, sums of int8 */
#endif
        ;
    return round_up(floats * 4, 64) + 4096;
}

void attention_f32(const Call *call, float scale, float softcap);
void attention_bf16(const Call *call, float scale, float softcap);
void prefill_f32(const Call *call, const Prompts *prompts, float scale, float softcap);
void prefill_bf16(const Call *call, const Prompts *prompts, float scale, float softcap);
void greedy_f32(const float *logits, int64_t row, int64_t rows, int64_t vocab, int64_t *tokens, float *logprobs,
                int64_t threads);
void greedy_bf16(const uint16_t *logits, int64_t row, int64_t rows, int64_t vocab, int64_t *tokens, float *logprobs,
                 int64_t threads);
#if HAS_F16
void attention_f16(const Call *call, float scale, float softcap);
void prefill_f16(const Call *call, const Prompts *prompts, float scale, float softcap);
void greedy_f16(const uint16_t *logits, int64_t row, int64_t rows, int64_t vocab, int64_t *tokens, float *logprobs,
                int64_t threads);
#endif
void quantise_f32(const void *from, int64_t bytes, void *to, float *scale, int64_t kind);
void quantise_bf16(const void *from, int64_t bytes, void *to, float *scale, int64_t kind);
#if HAS_F16
void quantise_f16(const void *from, int64_t bytes, void *to, float *scale, int64_t kind);
#endif
#if HAS_AMX
int amx_takes(const Call *call);
void attention_amx(const Call *call, float scale, float softcap);
void prefill_amx(const Call *call, const Prompts *prompts, float scale, float softcap);
#endif

int hfp_attention(const Call *call, int dtype);
int hfp_write_kv(const char *key, const char *value, char *key_cache, char *value_cache, const int64_t *slots,
                 int64_t num_tokens, int64_t num_kv_heads, int64_t block_size, const WriteStrides *strides,
                 const Store *key_store, const Store *value_store, int dtype, int64_t threads);
#endif
