/* The entry points of attention and of greedy choice, which pick the code for a dtype, and what this build is. */
#include "amx.h"
#include "kernels.h"
#include "prefill.h"

/* Bytes of workspace, aligned to 64, that hfp_attention needs. */
HFP_EXPORT int64_t hfp_workspace_bytes(const Plan *plan, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                       int64_t v_head_dim, int64_t threads) {
    return plan->num_slots * slot_bytes(num_heads, v_head_dim) +
           threads * thread_bytes(plan->max_count, num_heads, num_kv_heads, head_dim, v_head_dim) + 64;
}

/* Bytes of workspace, aligned to 64, that hfp_prefill needs. */
HFP_EXPORT int64_t hfp_prefill_bytes(int64_t head_dim, int64_t v_head_dim, int64_t threads) {
    return threads * prefill_bytes(head_dim, v_head_dim) + 64;
}

/* dtype: 0 fp32, 1 bf16, 2 fp16. Returns 0, or -1 where this machine has no code for the dtype. */
HFP_EXPORT int hfp_attention(const Call *call, int dtype, double scale, double softcap) {
    if (call->new_key)
        hfp_write_kv(call->new_key, call->new_value, (char *)call->key, (char *)call->value, call->slots,
                     call->num_tokens, call->num_kv_heads, call->block_size, call->strides, call->threads);
    if (!call->plan->num_items) return 0; /* nothing but prompts */
    if (dtype == 0) return attention_f32(call, (float)scale, (float)softcap), 0;
#if HAS_AMX
    if (dtype == 1 && amx_has_shape(call) && amx_allowed())
        return attention_amx(call, (float)scale, (float)softcap), 0;
#endif
    if (dtype == 1) return attention_bf16(call, (float)scale, (float)softcap), 0;
#if HAS_F16
    if (dtype == 2) return attention_f16(call, (float)scale, (float)softcap), 0;
#endif
    return -1;
}

/* The sequences `seqs`, whose new tokens are many. seq_lens, starts: of all sequences. New K/V must have been written.
 * Heads of MAX_DIM elements and groups of ROWS query heads, at most. Returns as hfp_attention does. */
HFP_EXPORT int hfp_prefill(const Call *call, int dtype, double scale, double softcap, const int32_t *seq_lens,
                           const int32_t *starts, const int32_t *seqs, int64_t num_seqs) {
    const Prompts prompts = {seq_lens, starts, seqs, num_seqs};
#if HAS_AMX
    if (dtype == 1 && amx_allowed()) return prefill_amx(call, &prompts, (float)scale, (float)softcap), 0;
#endif
    if (dtype == 0) return prefill_f32(call, &prompts, (float)scale, (float)softcap), 0;
    if (dtype == 1) return prefill_bf16(call, &prompts, (float)scale, (float)softcap), 0;
#if HAS_F16
    if (dtype == 2) return prefill_f16(call, &prompts, (float)scale, (float)softcap), 0;
#endif
    return -1;
}

/* Of logits [rows, vocab], `row` elements from row to row: the (first) largest, and its log-probability, NaN where there
 * is NaN. Returns as hfp_attention does. */
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

/* Whether the entry points for layers of models (fused/cpu/native) exist and can be used. */
HFP_EXPORT int hfp_has_layers(void) { return amx_allowed(); }

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
#else
    return "128-bit vectors";
#endif
}

HFP_EXPORT int hfp_openmp(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
