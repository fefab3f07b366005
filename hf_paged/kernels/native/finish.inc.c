/* Combines partial results into outputs. Included by the code for each dtype, which defines DTYPE (the suffix) and
 * ELEMENT (its C type). */

/* Write heads [first, last) of one query's output and log-sum-exp from its `count` partial results, which are `stride`
 * floats apart. Overwrites the maxima with the weights of the partial results. */
static void TYPED(finish)(const Call *call, int32_t row, float *partials, int64_t stride, int64_t count, int64_t first,
                          int64_t last) {
    const int64_t heads = call->num_heads, dim = call->v_head_dim, pad = padded_dim(dim);
    for (int64_t h = first; h < last; h++) {
        float top = call->sinks ? call->sinks[h] : -INFINITY;
        for (int64_t c = 0; c < count; c++) top = partials[c * stride + h] > top ? partials[c * stride + h] : top;
        float total = call->sinks ? expf(call->sinks[h] - top) : 0.0f;
        for (int64_t c = 0; c < count; c++) {
            float *part = partials + c * stride;
            part[h] = part[h] == -INFINITY ? 0.0f : expf(part[h] - top);
            total += part[h] * part[heads + h];
        }
        const float scale = 1.0f / total;
        const float *acc = partials + round_up(2 * heads, 16) + h * pad;
        ELEMENT *out = (ELEMENT *)call->out + row * call->o_token + h * call->o_head;
        for (int64_t d = 0; d < dim; d += W) {
            vf sum = {0};
            for (int64_t c = 0; c < count; c++) sum += load_f32(acc + c * stride + d) * partials[c * stride + h];
            sum *= scale;
            TYPED(store_part)(out + d, sum, dim - d < W ? dim - d : W);
        }
        if (call->lse) call->lse[row * heads + h] = top + logf(total);
    }
}

static void TYPED(merge_heads)(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Call *call = arguments;
    const int64_t kv_heads = call->num_kv_heads, group = call->num_heads / kv_heads;
    const int64_t bytes = slot_bytes(call->num_heads, call->v_head_dim);
    (void)thread;
    for (int64_t i = first; i < last; i++) {
        const Merge *merge = call->partition->merges + i / kv_heads;
        const int64_t h = i % kv_heads;
        TYPED(finish)(call, merge->row, (float *)(call->workspace + merge->slot * bytes), bytes / 4, merge->count,
                      h * group, (h + 1) * group);
    }
}

/* Finish the queries with several chunks. */
static void TYPED(merge)(const Call *call) {
    in_parallel(TYPED(merge_heads), call, call->partition->num_merges * call->num_kv_heads, call->threads, IN_SHARES);
}
