/* The addresses of the keys and values of a work item. */
#ifndef HFP_KEYS_H
#define HFP_KEYS_H
#include "kernels.h"
#include "vectors.h"

/* To L2: it has far more misses under way at a time than L1. (Zen 4 reads 1.7 times as fast.) */
#define PREFETCH(address) __builtin_prefetch(address, 0, 2)

/* The offsets of what is at positions [tile, tile + size), in a tensor with these strides from block to block and from
 * slot to slot. Positions outside [low, high) get the offsets of a position inside: they are read, but their scores are
 * masked. */
INLINE void locate_in(const Call *call, const int32_t *table, int64_t tile, int64_t size, int64_t low, int64_t high,
                      int64_t block_stride, int64_t slot_stride, int64_t *at) {
    const int64_t from = tile > low ? tile : low, to = tile + size < high ? tile + size : high;
    int64_t block = from / call->block_size, inside = from % call->block_size;
    for (int64_t j = from; j < to;) {
        int64_t run = call->block_size - inside < to - j ? call->block_size - inside : to - j;
        int64_t start = table[block] * block_stride + inside * slot_stride;
        int64_t i = 0;
        for (; i + 8 <= run; i += 8)
            for (int u = 0; u < 8; u++) at[j - tile + i + u] = start + (i + u) * slot_stride;
        for (; i < run; i++) at[j - tile + i] = start + i * slot_stride;
        j += run;
        inside = 0;
        block++;
    }
    for (int64_t j = 0; j < from - tile; j++) at[j] = at[from - tile];
    for (int64_t j = to - tile; j < size; j++) at[j] = at[from - tile];
}

/* The offsets of the keys and values at these positions. */
INLINE void locate(const Call *call, const int32_t *table, int64_t tile, int64_t size, int64_t low, int64_t high,
                   int64_t *k_at, int64_t *v_at) {
    locate_in(call, table, tile, size, low, high, call->k_block, call->k_token, k_at);
    locate_in(call, table, tile, size, low, high, call->v_block, call->v_token, v_at);
}

/* The scales of KV head h at these offsets. */
INLINE void take_scales(float *to, const Store *store, int64_t h, const int64_t *at, int64_t count) {
    const float *scales = store->scales + h * store->head;
    int64_t j = 0;
#if W == 16
    for (; j + 8 <= count; j += 8)
        _mm256_storeu_ps(to + j, _mm512_i64gather_ps(_mm512_loadu_si512(at + j), scales, 4));
#endif
    for (; j < count; j++) to[j] = scales[at[j]];
}

/* The offsets of a tile's keys and values, and of the scales of those in eight bits. */
typedef struct {
    int64_t k[TILE], v[TILE], scales[2][TILE];
} Places;

/* The places of a tile, of which the scales are prefetched. */
INLINE void find_places(const Call *call, const int32_t *table, int64_t tile, int64_t low, int64_t high, Places *to) {
    const Store *stores[2] = {&call->key_store, &call->value_store};
    locate(call, table, tile, TILE, low, high, to->k, to->v);
    for (int i = 0; i < 2; i++)
        if (stores[i]->kind) {
            locate_in(call, table, tile, TILE, low, high, stores[i]->block, stores[i]->slot, to->scales[i]);
            for (int64_t j = 0; j < TILE; j++) PREFETCH(stores[i]->scales + to->scales[i][j]);
        }
}

/* Prefetches the rows of a tile from row `first` on, of `dim` elements of `size` bytes. */
INLINE void prefetch_rows(const char *rows, const int64_t *at, int64_t first, int64_t dim, int64_t size) {
    for (int64_t j = first; j < TILE; j++)
        for (int64_t l = 0; l < dim * size; l += 64) PREFETCH(rows + at[j] * size + l);
}

/* The range of positions of an item that at least one of its queries sees. */
INLINE void keys_of_item(const Call *call, const Item *item, int64_t *low, int64_t *high) {
    const Token *tokens = call->partition->tokens + item->first;
    const int64_t start = (int64_t)item->chunk * CHUNK, end = start + CHUNK;
    *low = end;
    *high = start;
    for (int64_t t = 0; t < item->count; t++) {
        int64_t lo = first_key(tokens[t].pos, call->bounds), hi = tokens[t].end;
        lo = lo > start ? lo : start;
        hi = hi < end ? hi : end;
        *low = lo < *low ? lo : *low;
        *high = hi > *high ? hi : *high;
    }
}
#endif
