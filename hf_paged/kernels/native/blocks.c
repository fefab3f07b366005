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

typedef struct {
    const char *key, *value;
    char *key_cache, *value_cache;
    const int64_t *slots;
    int64_t num_kv_heads, block_size;
    WriteStrides strides;
    const Store *key_store, *value_store;
    Quantise quantise;
} Write;

static void write_tokens(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Write w = *(const Write *)arguments;
    const WriteStrides s = w.strides;
    const Store *key_store = w.key_store, *value_store = w.value_store;
    (void)thread;
    for (int64_t t = first; t < last; t++) {
        if (w.slots[t] < 0) continue;
        const int64_t block = w.slots[t] / w.block_size, offset = w.slots[t] % w.block_size;
        char *k = w.key_cache + block * s.kc_block + offset * s.kc_slot;
        char *v = w.value_cache + block * s.vc_block + offset * s.vc_slot;
        for (int64_t h = 0; h < w.num_kv_heads; h++) {
            const int64_t k_scale = block * key_store->block + offset * key_store->slot + h * key_store->head;
            const int64_t v_scale = block * value_store->block + offset * value_store->slot + h * value_store->head;
            write_head(k + h * s.kc_head, w.key + t * s.k_token + h * s.k_head, s.k_size, key_store, k_scale, w.quantise);
            write_head(v + h * s.vc_head, w.value + t * s.v_token + h * s.v_head, s.v_size, value_store, v_scale,
                       w.quantise);
        }
    }
}

/* Write the K/V of each token into its slot. Tokens with a slot below 0 are padding and are skipped. dtype: of the new
 * K/V, as for hfp_attention; with EXACT stores it has no meaning. Returns as hfp_attention does. */
HFP_EXPORT int hfp_write_kv(const char *key, const char *value, char *key_cache, char *value_cache,
                             const int64_t *slots, int64_t num_tokens, int64_t num_kv_heads, int64_t block_size,
                             const WriteStrides *strides, const Store *key_store, const Store *value_store, int dtype,
                             int64_t threads) {
    Quantise quantise = dtype == 0 ? quantise_f32 : quantise_bf16;
    if (dtype == 2) {
#if HAS_F16
        quantise = quantise_f16;
#else
        if (key_store->kind != EXACT || value_store->kind != EXACT) return -1;
#endif
    }
    const int64_t bytes = num_tokens * num_kv_heads * (strides->k_size + strides->v_size);
    const Write write = {key,        value,    key_cache, value_cache, slots,   num_kv_heads,
                         block_size, *strides, key_store, value_store, quantise};
    in_parallel(write_tokens, &write, num_tokens, bytes > 1 << 16 ? threads : 1, IN_SHARES);
    return 0;
}

typedef struct {
    const Span *spans;
    const int64_t *copies;
    int64_t num_copies;
} Copies;

static void copy_spans(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Copies c = *(const Copies *)arguments;
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        const Span *span = c.spans + i / c.num_copies;
        const int64_t *pair = c.copies + 2 * (i % c.num_copies);
        memcpy(span->target + pair[1] * span->target_block, span->source + pair[0] * span->source_block,
               (size_t)span->size);
    }
}

/* Copy blocks of all these spans. copies: num_copies pairs (src, dst) of block ids. */
HFP_EXPORT void hfp_copy_blocks(const Span *spans, int64_t num_spans, const int64_t *copies, int64_t num_copies,
                                int64_t threads) {
    const int64_t items = num_spans * num_copies;
    in_parallel(copy_spans, &(Copies){spans, copies, num_copies}, items, items > 8 ? threads : 1, IN_SHARES);
}
