/* Writes K/V into slots, and copies blocks. Both copy bytes, so that they serve every dtype. */
#include "kernels.h"

/* Write the K/V of each token into its slot. Tokens with a slot below 0 are padding and are skipped. */
HFP_EXPORT void hfp_write_kv(const char *key, const char *value, char *key_cache, char *value_cache,
                             const int64_t *slots, int64_t num_tokens, int64_t num_kv_heads, int64_t block_size,
                             const WriteStrides *strides, int64_t threads) {
    const WriteStrides s = *strides;
    const int64_t bytes = num_tokens * num_kv_heads * (s.k_size + s.v_size);
    (void)threads, (void)bytes;
#pragma omp parallel for num_threads(threads) if (threads > 1 && bytes > 1 << 16)
    for (int64_t t = 0; t < num_tokens; t++) {
        if (slots[t] < 0) continue;
        const int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
        char *k = key_cache + block * s.kc_block + offset * s.kc_slot;
        char *v = value_cache + block * s.vc_block + offset * s.vc_slot;
        for (int64_t h = 0; h < num_kv_heads; h++) {
            memcpy(k + h * s.kc_head, key + t * s.k_token + h * s.k_head, (size_t)s.k_size);
            memcpy(v + h * s.vc_head, value + t * s.v_token + h * s.v_head, (size_t)s.v_size);
        }
    }
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
