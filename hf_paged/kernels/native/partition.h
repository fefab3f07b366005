/* The partition of a step: work items, each of which attends to one chunk of keys with the queries that see it. Made once
 * per step, and used by all layers with the same mask. */
#ifndef HFP_PLAN_H
#define HFP_PLAN_H
#include "common.h"

typedef struct {
    int32_t first, count; /* its queries: tokens[first : first + count] */
    int32_t chunk, seq;   /* its keys: this chunk, found through the block table of this sequence */
} Item;

typedef struct {
    int32_t row, pos; /* row of the query tensor, position in its sequence */
    int32_t end;      /* it sees positions below this one */
    int32_t slot;     /* of this chunk's partial result; -1: there is no other chunk, so write the output itself */
} Token;

typedef struct {
    int32_t row, slot, count; /* a query, and its partial results: slots [slot, slot + count) */
} Merge;

typedef struct {
    Item *items;
    Token *tokens;
    Merge *merges;
    int64_t num_items, num_tokens, num_merges, num_slots, max_count;
} Partition;

/* How far back a query sees (kernels/bounds.py). 0 = none. */
typedef struct {
    int64_t sliding_window, chunk_size;
} Bounds;

/* A step, which the caller describes as 64-bit words in this order (kernels/native/structs.py). Sequence i has the
 * query rows [starts[i], starts[i + 1]). */
typedef struct {
    const int32_t *tables, *seq_lens, *starts;
    const int32_t *seqs; /* [num_seqs]: the numbers of the sequences to partition */
    int64_t table_stride, num_seqs, block_size;
    Bounds bounds;
    int64_t max_count; /* maximum queries in an item */
    int64_t share;     /* whether sequences that hold the same blocks of a chunk share its items */
    const int32_t *reach; /* by query row: the last position that it sees; NULL: its own */
} Step;

/* The first position that a query at position `pos` sees. */
static inline int64_t first_key(int64_t pos, Bounds bounds) {
    const int64_t window = bounds.sliding_window, chunk = bounds.chunk_size;
    int64_t low = window > 0 && pos - window + 1 > 0 ? pos - window + 1 : 0;
    if (chunk > 0 && pos / chunk * chunk > low) low = pos / chunk * chunk;
    return low;
}

/* The position behind the last one that the query in `row` at position `pos` sees. */
static inline int64_t end_key(const int32_t *reach, int64_t row, int64_t pos) { return (reach ? reach[row] : pos) + 1; }
#endif
