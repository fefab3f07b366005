/* Makes the partition of a step, and checks that its indices are within the tables and the cache. */
#include "partition.h"

/* A chunk of one sequence. Members of different sequences that share a chunk form a linked list, a group. */
typedef struct {
    int32_t chunk, seq, next; /* next: the next member of the group; -1: none */
    int32_t last;             /* in the first member of a group: the last one; in the others: -1 */
} Member;

/* Upper bounds of the numbers of elements in a partition, which are the lengths of its arrays. */
typedef struct {
    int64_t members, pairs, queries, rows, table;
} Extent;

static Extent extent_of(const Step *step) {
    Extent extent = {0, 0, 0, 0, 16};
    for (int64_t n = 0; n < step->num_seqs; n++) {
        const int64_t i = step->seqs[n], q = step->starts[i + 1] - step->starts[i], len = step->seq_lens[i];
        if (q <= 0) continue;
        const int64_t low = first_key(len - q, step->bounds) / CHUNK, high = (len - 1) / CHUNK;
        extent.members += high - low + 1;
        extent.pairs += q * (high - low + 1);
        extent.queries += q;
        if (step->starts[i + 1] > extent.rows) extent.rows = step->starts[i + 1];
    }
    while (extent.table < 2 * extent.members) extent.table *= 2;
    return extent;
}

/* The memory of a partition: the arrays that it consists of, then those that are needed only to make it. */
typedef struct {
    Partition *partition;
    Item *items;
    Token *tokens;
    Merge *merges;
    Member *members;
    int32_t *hashed; /* a hash table of members; -1 = free */
    int32_t *slots;  /* by query row: the first slot of its partial results */
} Parts;

/* Reserve the next part of the memory at *at. If *at started at 0, it then is the number of bytes so far. */
static void *part_of(uintptr_t *at, int64_t count, size_t size) {
    const uintptr_t part = *at;
    *at += (uintptr_t)round_up(count * (int64_t)size, 16);
    return (void *)part;
}

static Parts divide(uintptr_t *at, Extent extent) {
    Parts parts;
    parts.partition = part_of(at, 1, sizeof(Partition));
    parts.items = part_of(at, extent.pairs, sizeof(Item));
    parts.tokens = part_of(at, extent.pairs, sizeof(Token));
    parts.merges = part_of(at, extent.queries, sizeof(Merge));
    parts.members = part_of(at, extent.members, sizeof(Member));
    parts.hashed = part_of(at, extent.table, sizeof(int32_t));
    parts.slots = part_of(at, extent.rows, sizeof(int32_t));
    return parts;
}

/* Add member m to the group that reads the same blocks at the same positions, if there is one; else it leads a new
 * group. */
static void share_chunk(const Step *step, const Parts *parts, int64_t m, int64_t table_size) {
    Member *members = parts->members;
    const int64_t c = members[m].chunk, stride = step->table_stride;
    const int64_t low = c * CHUNK / step->block_size, high = ((c + 1) * CHUNK - 1) / step->block_size;
    const int32_t *ids = step->tables + members[m].seq * stride + low;
    const uint64_t mask = (uint64_t)(table_size - 1);
    uint64_t hash = 1469598103934665603ull ^ (uint64_t)c;
    for (int64_t b = 0; b <= high - low; b++) hash = (hash ^ (uint32_t)ids[b]) * 1099511628211ull;
    hash ^= hash >> 29;
    for (uint64_t at = hash & mask;; at = (at + 1) & mask) {
        if (parts->hashed[at] < 0) {
            parts->hashed[at] = (int32_t)m;
            return;
        }
        Member *head = &members[parts->hashed[at]];
        const size_t bytes = sizeof(int32_t) * (size_t)(high - low + 1);
        if (head->chunk == c && memcmp(step->tables + head->seq * stride + low, ids, bytes) == 0) {
            members[head->last].next = (int32_t)m;
            head->last = (int32_t)m;
            members[m].last = -1;
            return;
        }
    }
}

/* Make the members of all sequences. A chunk is shared only if every query of the sequence sees all of it: slots
 * behind a query's position in a shared block belong to other sequences. */
static void make_members(const Step *step, const Parts *parts, Extent extent) {
    memset(parts->hashed, 0xff, sizeof(int32_t) * (size_t)extent.table);
    int64_t m = 0;
    for (int64_t n = 0; n < step->num_seqs; n++) {
        const int64_t i = step->seqs[n], q = step->starts[i + 1] - step->starts[i], len = step->seq_lens[i];
        if (q <= 0) continue;
        for (int64_t c = first_key(len - q, step->bounds) / CHUNK; c <= (len - 1) / CHUNK; c++, m++) {
            parts->members[m] = (Member){(int32_t)c, (int32_t)i, -1, (int32_t)m};
            if (step->share && len - q + 1 >= (c + 1) * CHUNK) share_chunk(step, parts, m, extent.table);
        }
    }
}

/* Assign slots for partial results to the queries whose keys span several chunks. */
static void make_merges(const Step *step, const Parts *parts) {
    Partition *partition = parts->partition;
    for (int64_t n = 0; n < step->num_seqs; n++) {
        const int64_t i = step->seqs[n], q = step->starts[i + 1] - step->starts[i], context = step->seq_lens[i] - q;
        for (int64_t t = 0; t < q; t++) {
            const int64_t low = first_key(context + t, step->bounds) / CHUNK;
            const int32_t row = step->starts[i] + (int32_t)t;
            const int64_t count = (end_key(step->reach, row, context + t) - 1) / CHUNK - low + 1;
            if (count <= 1) continue;
            partition->merges[partition->num_merges++] = (Merge){row, (int32_t)partition->num_slots, (int32_t)count};
            parts->slots[row] = (int32_t)partition->num_slots;
            partition->num_slots += count;
        }
    }
}

/* Make the items of a group: all its queries, at most max_count in an item. */
static void make_items(const Step *step, const Parts *parts, int64_t head) {
    Partition *partition = parts->partition;
    const Member *members = parts->members;
    Item item = {(int32_t)partition->num_tokens, 0, members[head].chunk, members[head].seq};
    const int64_t c = item.chunk;
    for (int32_t k = (int32_t)head; k >= 0; k = members[k].next) {
        const int64_t i = members[k].seq, q = step->starts[i + 1] - step->starts[i], context = step->seq_lens[i] - q;
        for (int64_t t = 0; t < q; t++) {
            const int32_t row = step->starts[i] + (int32_t)t;
            const int64_t pos = context + t, end = end_key(step->reach, row, pos), high = (end - 1) / CHUNK;
            const int64_t low = first_key(pos, step->bounds) / CHUNK;
            if (c < low || c > high) continue;
            if (item.count == step->max_count) {
                partition->items[partition->num_items++] = item;
                item.first = (int32_t)partition->num_tokens;
                item.count = 0;
            }
            partition->tokens[partition->num_tokens++] =
                (Token){row, (int32_t)pos, (int32_t)end, low == high ? -1 : parts->slots[row] + (int32_t)(c - low)};
            item.count++;
        }
    }
    if (item.count) partition->items[partition->num_items++] = item;
}

/* Bytes of memory, aligned to 16, for hfp_partition. */
HFP_EXPORT int64_t hfp_partition_bytes(const Step *step) {
    uintptr_t end = 0;
    divide(&end, extent_of(step));
    return (int64_t)end;
}

/* Make the partition in `memory`, which the caller owns. The step must have passed hfp_check. */
HFP_EXPORT void hfp_partition(void *memory, const Step *step) {
    const Extent extent = extent_of(step);
    uintptr_t at = (uintptr_t)memory;
    const Parts parts = divide(&at, extent);
    Partition *partition = parts.partition;
    *partition = (Partition){parts.items, parts.tokens, parts.merges, 0, 0, 0, 0, 0};
    make_members(step, &parts, extent);
    make_merges(step, &parts);
    for (int64_t head = 0; head < extent.members; head++)
        if (parts.members[head].last >= 0) make_items(step, &parts, head);
    for (int64_t k = 0; k < partition->num_items; k++)
        if (partition->items[k].count > partition->max_count) partition->max_count = partition->items[k].count;
}

/* counts[4]: items, queries in them, queries with several chunks, partial results. */
HFP_EXPORT void hfp_partition_counts(const Partition *partition, int64_t *counts) {
    counts[0] = partition->num_items;
    counts[1] = partition->num_tokens;
    counts[2] = partition->num_merges;
    counts[3] = partition->num_slots;
}

/* The first fault of one sequence, as hfp_check numbers them; 0 if it has none. */
static int check_sequence(const Step *step, int64_t i, int64_t table_width, int64_t num_blocks, int64_t num_rows) {
    const int64_t first = step->starts[i], last = step->starts[i + 1], len = step->seq_lens[i], q = last - first;
    if (first < 0 || q < 0 || last > num_rows) return 1;
    if (q == 0) return 0;
    if (len < q || len > table_width * step->block_size) return 2;
    const int32_t *ids = step->tables + i * step->table_stride;
    const int64_t low = first_key(len - q, step->bounds) / step->block_size;
    for (int64_t b = low; b <= (len - 1) / step->block_size; b++)
        if (ids[b] < 0 || ids[b] >= num_blocks) return 3;
    return 0;
}

/* Check the first `count` sequences, divided or not. Returns 0, or 4 * i + the fault of the first faulty sequence i: 1
 * for its query rows, 2 for its length, 3 for a block id. */
HFP_EXPORT int64_t hfp_check(const Step *step, int64_t count, int64_t table_width, int64_t num_blocks,
                             int64_t num_rows) {
    for (int64_t i = 0; i < count; i++) {
        const int fault = check_sequence(step, i, table_width, num_blocks, num_rows);
        if (fault) return 4 * i + fault;
    }
    return 0;
}
