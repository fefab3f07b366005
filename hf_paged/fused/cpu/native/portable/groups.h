/* Shared by the two ways in which rows are multiplied with codes in groups (groups.c says what these are): the memory
 * layout of a weight, and the elements of rows and results. */
#ifndef HFP_GROUPS_H
#define HFP_GROUPS_H
#define ELEMENT uint16_t
#define NAME(name) name
#include "elements.h"
#include "eight.h"

#define COLUMNS 16
#define VECTORS (COLUMNS / W)
#define HEAD 64     /* bytes of the scales and least values of a group */
#define NESTED 256  /* elements of the depth in nested groups, and bytes of their factors */
#define SHORTEST 16 /* group */
#define LONGEST 128 /* group */
#define FAR 6144    /* bytes ahead of the products that are prefetched, from the memory */

enum { F32, BF16, F16 };
enum { PLAIN, NESTED_HEADS, ZEROS, TABLE }; /* heads */

typedef struct {
    const Linear *linear;
    int dtype;
    int64_t bits, group, groups, parts; /* parts: of the rows, 2 in fp32 unless they are short */
    int64_t nested, heads;              /* nested: groups that are nested together, or 0 */
    int64_t row, rows;                  /* those that are computed together */
    int64_t chunk;                      /* groups of a chunk; the last one may have fewer */
    int16_t *x;                         /* [chunks, rows, groups of a chunk, parts, group] */
    float *factors;                     /* [chunks, rows, groups of a chunk, 2]: a group's unit, the sum of its elements */
    int is_coarse;                      /* whether rows are rounded to 8 bits */
} Groups;

INLINE vf load_half(const void *p) {
#if HAS_F16
    return load_f16(p);
#else
    vh h;
    memcpy(&h, p, sizeof h);
    const vu wide = __builtin_convertvector(h, vu);
    const vf size = (vf)((wide & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vu)size | (wide & 0x8000) << 16);
#endif
}

/* Of rows in 8 bits: the unit of a group, and what its elements are multiplied by, so that the largest one becomes 127 or
 * -127. A group below 2^-112 counts as zero, one with an element that is not finite is NaN. */
INLINE float byte_unit(float largest) { return largest < 0x1p-112f ? 0 : largest / 127.0f + (largest - largest); }
INLINE float byte_inverse(float largest) { return largest < 0x1p-112f ? 0 : 127.0f / largest; }

INLINE vf as_floats(vi x) { return __builtin_convertvector(x, vf); }

/* The scale and the least value of a group for a vector of columns. head: of the group, or of those nested with it, of
 * which it is group number `at`. */
INLINE vf scale_and_least(const Groups *g, const char *head, int64_t at, int v, vf *least) {
    const vf scale = load_half(head + v * 2 * W);
    *least = load_half(head + HEAD / 2 + v * 2 * W);
    if (g->heads == ZEROS) *least *= -scale;
    if (g->heads != NESTED_HEADS) return scale;
    const char *factors = head + HEAD + at * (g->nested == NESTED / SHORTEST ? COLUMNS : 2 * COLUMNS) + v * W;
    const vf own = scale * load_int8(factors);
    *least = g->nested == NESTED / SHORTEST ? own * -32.0f : *least * load_int8(factors + COLUMNS);
    return own;
}

/* W elements, of which the first n exist. */
INLINE vf load_of(const char *p, int64_t n, const int dtype) {
    char part[4 * W] = {0};
    if (n < W) p = memcpy(part, p, (size_t)((n < 0 ? 0 : n) * (dtype == F32 ? 4 : 2)));
    return dtype == F32 ? load_f32(p) : dtype == BF16 ? load_bf16(p) : load_half(p);
}
INLINE void store_of(char *p, vf x, int64_t n, const int dtype) {
    if (dtype == F32) store_part_f32((float *)(void *)p, x, n);
    if (dtype == BF16) store_part_bf16((uint16_t *)(void *)p, x, n);
#if HAS_F16
    if (dtype == F16) store_part_f16((uint16_t *)(void *)p, x, n);
#endif
}

static void store_panel(const Groups *g, const float *sums, int64_t panel) {
    const Linear *l = g->linear;
    const int64_t size = g->dtype == F32 ? 4 : 2;
    for (int64_t r = 0; r < g->rows; r++)
        for (int64_t c = 0; c < COLUMNS; c += W) {
            const int64_t column = panel * COLUMNS + c, left = l->columns - column, n = left < W ? left : W;
            if (n <= 0) break;
            vf total = load_f32(sums + r * COLUMNS + c);
            if (l->bias) total += load_of((const char *)l->bias + column * size, n, g->dtype);
            store_of((char *)l->out + ((g->row + r) * l->columns + column) * size, total, n, g->dtype);
        }
}

INLINE int64_t panel_bytes(const Groups *g) {
    const int64_t heads = g->nested ? g->groups / g->nested * (HEAD + NESTED) : g->groups * HEAD;
    return heads + g->groups * 2 * g->group * g->bits;
}

/* group_bytes.c: whether the CPU multiplies bytes with codes of so many bits, in groups of this length, and all sums of
 * rows in 8 bits then. */
int hfp_has_bytes(int64_t bits, int64_t group);
void hfp_linear_bytes(Groups g);
#endif
