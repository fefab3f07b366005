/* Writes K/V into slots, and copies blocks: rows of bytes, whatever their dtype. */
#include "kernels.h"

/* strides, in bytes: k_token, k_head, k_row (the size of one head) of `key`, the same of `value`; from block to block, slot
 * to slot and head to head of key_cache, the same of value_cache. Slots below 0 are skipped. */
HFP_EXPORT void hfp_write_kv(const char *key, const char *value, char *key_cache, char *value_cache,
                             const int64_t *slots, int64_t num_tokens, int64_t num_kv_heads, int64_t block_size,
                             const int64_t *strides, int64_t threads) {
    const int64_t k_token = strides[0], k_head = strides[1], k_row = strides[2];
    const int64_t v_token = strides[3], v_head = strides[4], v_row = strides[5];
    const int64_t *kc = strides + 6, *vc = strides + 9;
    const int64_t bytes = num_tokens * num_kv_heads * (k_row + v_row);
    (void)threads, (void)bytes;
#pragma omp parallel for num_threads(threads) if (threads > 1 && bytes > 1 << 16)
    for (int64_t t = 0; t < num_tokens; t++) {
        if (slots[t] < 0) continue;
        const int64_t block = slots[t] / block_size, inside = slots[t] % block_size;
        char *k = key_cache + block * kc[0] + inside * kc[1], *v = value_cache + block * vc[0] + inside * vc[1];
        for (int64_t h = 0; h < num_kv_heads; h++) {
            memcpy(k + h * kc[2], key + t * k_token + h * k_head, (size_t)k_row);
            memcpy(v + h * vc[2], value + t * v_token + h * v_head, (size_t)v_row);
        }
    }
}

/* caches: num_caches times (address and bytes from one block to the next of the source, the same of the target, bytes of
 * a block). copies: num_copies pairs of (src, dst). */
HFP_EXPORT void hfp_copy_blocks(const int64_t *caches, int64_t num_caches, const int64_t *copies, int64_t num_copies,
                                int64_t threads) {
    (void)threads;
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1 && num_caches * num_copies > 8)
    for (int64_t c = 0; c < num_caches; c++)
        for (int64_t i = 0; i < num_copies; i++) {
            const int64_t *cache = caches + 5 * c;
            const char *source = (const char *)(intptr_t)cache[0] + copies[2 * i] * cache[1];
            char *target = (char *)(intptr_t)cache[2] + copies[2 * i + 1] * cache[3];
            memcpy(target, source, (size_t)cache[4]);
        }
}
