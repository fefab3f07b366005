/* The entry points of attention and greedy sampling, which select the code for a dtype, and a description of this
 * build. */
#include "amx.h"
#include "kernels.h"
#include "prefill.h"

/* Bytes of workspace, aligned to 64, for hfp_attention. */
HFP_EXPORT int64_t hfp_workspace_bytes(const Partition *partition, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                       int64_t v_head_dim, int64_t threads) {
    return partition->num_slots * slot_bytes(num_heads, v_head_dim) +
           threads * thread_bytes(partition->max_count, num_heads, num_kv_heads, head_dim, v_head_dim) + 64;
}

/* Bytes of workspace, aligned to 64, for hfp_prefill. */
HFP_EXPORT int64_t hfp_prefill_bytes(int64_t head_dim, int64_t v_head_dim, int64_t threads) {
    return threads * prefill_bytes(head_dim, v_head_dim) + 64;
}

/* Attention of the sequences in the partition, after the new K/V has been written. dtype: 0 fp32, 1 bf16, 2 fp16. Returns
 * 0, or -1 if this build has no code for the dtype. */
HFP_EXPORT int hfp_attention(const Call *call, int dtype) {
    const float scale = (float)call->scale, softcap = (float)call->softcap;
    if (call->new_key &&
        hfp_write_kv(call->new_key, call->new_value, (char *)call->key, (char *)call->value, call->slots,
                     call->num_tokens, call->num_kv_heads, call->block_size, &call->strides, &call->key_store,
                     &call->value_store, dtype, call->threads))
        return -1;
    if (!call->partition->num_items) return 0; /* only sequences for hfp_prefill */
    if (dtype == 0) return attention_f32(call, scale, softcap), 0;
#if HAS_AMX
    if (dtype == 1 && amx_takes(call) && amx_allowed()) return attention_amx(call, scale, softcap), 0;
#endif
    if (dtype == 1) return attention_bf16(call, scale, softcap), 0;
#if HAS_F16
    if (dtype == 2) return attention_f16(call, scale, softcap), 0;
#endif
    return -1;
}

/* Attention of sequences with many new tokens, after hfp_attention has written the new K/V. Heads have at most MAX_DIM
 * elements, groups at most ROWS query heads. Returns as hfp_attention does. */
HFP_EXPORT int hfp_prefill(const Call *call, int dtype, const Prompts *prompts) {
    const float scale = (float)call->scale, softcap = (float)call->softcap;
#if HAS_AMX
    if (dtype == 1 && amx_allowed()) return prefill_amx(call, prompts, scale, softcap), 0;
#endif
    if (dtype == 0) return prefill_f32(call, prompts, scale, softcap), 0;
    if (dtype == 1) return prefill_bf16(call, prompts, scale, softcap), 0;
#if HAS_F16
    if (dtype == 2) return prefill_f16(call, prompts, scale, softcap), 0;
#endif
    return -1;
}

/* logits [rows, vocab], rows `row` elements apart -> the token with the largest logit of each row (the first of equal
 * ones) and its log-probability, which is NaN if the row has NaN. Returns as hfp_attention does. */
HFP_EXPORT int hfp_greedy(const void *logits, int dtype, int64_t row, int64_t rows, int64_t vocab, int64_t *tokens,
                          float *logprobs, int64_t threads) {
    if (dtype == 0) return greedy_f32(logits, row, rows, vocab, tokens, logprobs, threads), 0;
    if (dtype == 1) return greedy_bf16(logits, row, rows, vocab, tokens, logprobs, threads), 0;
#if HAS_F16
    if (dtype == 2) return greedy_f16(logits, row, rows, vocab, tokens, logprobs, threads), 0;
#endif
    return -1;
}

HFP_EXPORT int hfp_has_f16(void) { return HAS_F16; }

/* Whether linear layers in bf16 have packed weights. If not, they read a weight where it is, as those in fp32 and fp16
 * do (fused/cpu/native). */
HFP_EXPORT int hfp_packs(void) { return HAS_DPBF16; }

/* The instruction set that the kernels use. */
HFP_EXPORT const char *hfp_target(void) {
#if HAS_AMX
    if (amx_allowed()) return "AVX-512 with BF16 and " AMX_NAME;
#endif
#if HAS_DPBF16
    return "AVX-512 with BF16";
#elif W == 16
    return "AVX-512";
#elif W == 8
    return "AVX2";
#elif defined(__aarch64__)
    return "NEON";
#else
    return "128-bit vectors";
#endif
}
