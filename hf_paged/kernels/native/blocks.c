/* Writes K/V into slots, and copies blocks. Both copy bytes, so that they serve every dtype; K/V in eight bits is rounded
 * by the code for the dtype of the new K/V. */
#include "kernels.h"

typedef void (*Quantise)(const void *from, int64_t bytes, void *to, float *scale, int64_t kind);

INLINE void write_head(char *to, const char *from, int64_t bytes, const Store *store, int64_t scale, Quantise quantise) {
    if (store->kind == EXACT)
        memcpy(to, from, (size_t)bytes);
    else
        quantise(from, bytes, to, store->scales + scale, store->kind);
}

/* Write the K/V of each token into its slot. Tokens with a slot below 0 are padding and are skipped. dtype: of the new
 * K/V, as for hfp_attention; with EXACT stores it has no meaning. Returns as hfp_attention does. */
HFP_EXPORT int hfp_write_kv(const char *key, const char *value, char *key_cache, char *value_cache,
                             const int64_t *slots, int64_t num_tokens, int64_t num_kv_heads, int64_t block_size,
                             const WriteStrides *strides, const Store *key_store, const Store *value_store, int dtype,
                             int64_t threads) {
    const WriteStrides s = *strides;
    Quantise quantise = dtype == 0 ? quantise_f32 : quantise_bf16;
    if (dtype == 2) {
#if HAS_F16
        quantise = quantise_f16;
#else
        if (key_store->kind != EXACT || value_store->kind != EXACT) return -1;
#endif
    }
    const int64_t bytes = num_tokens * num_kv_heads * (s.k_size + s.v_size);
    (void)threads, (void)bytes;
#pragma omp parallel for num_threads(threads) if (threads > 1 && bytes > 1 << 16)
    for (int64_t t = 0; t < num_tokens; t++) {
        if (slots[t] < 0) continue;
        const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
        char *k = key_cache + block * s.kc_block + offset * s.kc_slot;
        char *v = value_cache + block * s.vc_block + offset * s.vc_slot;
        for (int64_t h = 0; h < num_kv_heads; h++) {
            const int64_t k_scale = block * key_store->block + offset * key_store->slot + h * key_store->head;
            const int64_t v_scale = block * value_store->block + offset * value_store->slot + h * value_store->head;
            write_head(k + h * s.kc_head, key + t * s.k_token + h * s.k_head, s.k_size, key_store, k_scale, quantise);
            write_head(v + h * s.vc_head, value + t * s.v_token + h * s.v_head, s.v_size, value_store, v_scale, quantise);
        }
    }
    return 0;
}

/* Copy blocks of all these spans. copies: num_copies pairs (src, dst) of block ids. */
HFP_EXPORT void hfp_copy_blocks(const Span *spans, int64_t num_spans, const int64_t *copies, int64_t num_copies,
                                int64_t threads) {
    (void)threads;
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1 && num_spans * num_copies > 8)
    for (int64_t n = 0; n < num_spans; n++)
        for (int64_t i = 0; i < num_copies; i++) {
            const Span *span = spans + n;
            const char *source = span->source + copies[2 * i] * span->source_block;
            memcpy(span->target + copies[2 * i + 1] * span->target_block, source, (size_t)span->size);
        }
}
