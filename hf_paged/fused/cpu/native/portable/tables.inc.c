/* Part of groups.c: weights whose codes of 4 bits are numbers of 16 values, weight = table[code] * scale. A group's head
 * has 16 scales in fp32; panels and lines are those of other codes.
 *
 * All rows are multiplied with the table's values in fp32, element by element, and the sums of groups with the scales:
 * looking a value up takes two instructions with AVX-512, and integers would need two parts of each value. A row's bits do
 * not depend on the other rows or on the threads. */
#define TABLE_TALL (W == 16 ? 12 : W == 8 ? 6 : 3) /* rows whose sums fit into the registers */

typedef struct {
    const Linear *linear; /* its `scales` are the table */
    int dtype;
    int64_t group, groups;
    int64_t row, rows; /* those that are computed together */
    float *x;          /* [groups, rows, group] */
} Tables;

typedef struct {
    vf part[16 / W];
} Table;

/* The value of each column's code that begins at this bit of its line. */
INLINE vf value_at(const Table *table, vi line, const int bit) {
#if W == 16
    return (vf)_mm512_permutexvar_ps((__m512i)(line >> bit), (__m512)table->part[0]); /* looks at four bits only */
#elif W == 8
    const __m256i at = (__m256i)(line >> bit); /* of which three bits are looked at: the fourth chooses the half */
    const __m256 low = _mm256_permutevar8x32_ps((__m256)table->part[0], at);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)table->part[1], at);
    return (vf)_mm256_blendv_ps(low, high, (__m256)(line << (28 - bit)));
#else
    const float *values = (const float *)table;
    vf found;
    for (int i = 0; i < W; i++) found[i] = values[line[i] >> bit & 15];
    return found;
#endif
}

/* The bit of a line at which the code of element e begins. */
#define BIT(e) (16 * ((e) & 1) + 4 * ((e) >> 1))

/* Adds the products of n rows with some neighbouring groups of a panel to sums [n, COLUMNS]. Groups that are computed
 * side by side are as many chains of sums, which few rows need. values: of a single group, [group, COLUMNS], or NULL. */
INLINE void table_tile(const Tables *t, const Table *table, const char *head, const float *x, const float *values,
                       float *sums, const int n, const int abreast, const int is_wide) {
    const int64_t lines = t->group / 8, bytes = HEAD + 64 * lines, x_group = t->rows * t->group;
    for (int v = 0; v < VECTORS; v++) {
        const char *codes = head + HEAD + v * 4 * W;
        vf own[4][TABLE_TALL];
#pragma GCC unroll 4
        for (int s = 0; s < abreast; s++)
#pragma GCC unroll 12
            for (int r = 0; r < n; r++) own[s][r] = (vf){0};
        for (int64_t k = 0; k < lines; k++, codes += 64) {
            vi line[4] = {{0}};
#pragma GCC unroll 4
            for (int s = 0; s < abreast && !is_wide; s++) memcpy(line + s, codes + s * bytes, sizeof *line);
#pragma GCC unroll 8
            for (int e = 0; e < 8; e++)
#pragma GCC unroll 4
                for (int s = 0; s < abreast; s++) {
                    const int64_t at = 8 * k + e;
                    const vf w = is_wide ? load_f32(values + at * COLUMNS + v * W) : value_at(table, line[s], BIT(e));
#pragma GCC unroll 12
                    for (int r = 0; r < n; r++)
                        own[s][r] = multiply_add(splat(x[s * x_group + r * t->group + at]), w, own[s][r]);
                }
        }
#pragma GCC unroll 4
        for (int s = 0; s < abreast; s++) {
            const vf scale = load_f32(head + s * bytes + v * 4 * W);
#pragma GCC unroll 12
            for (int r = 0; r < n; r++) {
                float *to = sums + r * COLUMNS + v * W;
                store_f32(to, multiply_add(own[s][r], scale, load_f32(to)));
            }
        }
    }
}

#define ROWS_OF(n, abreast, is_wide) \
    case n: \
        if (n <= TABLE_TALL) \
            table_tile(t, table, head, x, values, sums, n <= TABLE_TALL ? n : 1, abreast, is_wide); \
        break;

NOINLINE void table_rows(const Tables *t, const Table *table, const char *head, const float *x, float *sums) {
    const float *values = NULL;
    switch (t->rows) {
        ROWS_OF(1, 1, 0) ROWS_OF(2, 1, 0) ROWS_OF(3, 1, 0) ROWS_OF(4, 1, 0) ROWS_OF(5, 1, 0) ROWS_OF(6, 1, 0)
        ROWS_OF(7, 1, 0) ROWS_OF(8, 1, 0) ROWS_OF(9, 1, 0) ROWS_OF(10, 1, 0) ROWS_OF(11, 1, 0) ROWS_OF(12, 1, 0)
    }
}
NOINLINE void table_groups(const Tables *t, const Table *table, const char *head, const float *x, float *sums) {
    const float *values = NULL;
    switch (t->rows) { ROWS_OF(1, 4, 0) ROWS_OF(2, 4, 0) }
}
NOINLINE void table_values(const Tables *t, const Table *table, const char *head, const float *x, const float *values,
                           float *sums, int64_t n) {
    switch (n) {
        ROWS_OF(2, 1, 1) ROWS_OF(3, 1, 1) ROWS_OF(4, 1, 1) ROWS_OF(5, 1, 1) ROWS_OF(6, 1, 1) ROWS_OF(7, 1, 1)
        ROWS_OF(8, 1, 1) ROWS_OF(9, 1, 1) ROWS_OF(10, 1, 1) ROWS_OF(11, 1, 1) ROWS_OF(12, 1, 1)
    }
}

static void few_with_table(const Tables *t, const Table *table, const char *panel, float *sums) {
    const int64_t bytes = HEAD + 8 * t->group, x_group = t->rows * t->group;
    const float *x = t->x;
    for (int64_t i = 0, count; i < t->groups; i += count, panel += count * bytes, x += count * x_group) {
        count = t->rows <= 2 && i + 4 <= t->groups ? 4 : 1;
        for (int64_t k = 0; k < count * bytes; k += 64) __builtin_prefetch(panel + FAR + k, 0, 3);
        (count > 1 ? table_groups : table_rows)(t, table, panel, x, sums);
    }
}

/* Looks the values of each group up once. */
static void many_with_table(const Tables *t, const Table *table, const char *panel, float *sums) {
    const int64_t tiles = (t->rows + TABLE_TALL - 1) / TABLE_TALL, lines = t->group / 8;
    float values[LONGEST * COLUMNS] __attribute__((aligned(64)));
    for (int64_t i = 0; i < t->groups; i++, panel += HEAD + 64 * lines) {
        for (int64_t k = 0; k < lines; k++)
            for (int v = 0; v < VECTORS; v++) {
                vi line;
                memcpy(&line, panel + HEAD + 64 * k + v * 4 * W, sizeof line);
#pragma GCC unroll 8
                for (int e = 0; e < 8; e++) store_f32(values + (8 * k + e) * COLUMNS + v * W, value_at(table, line, BIT(e)));
            }
        for (int64_t k = 0; k <= lines; k++) __builtin_prefetch(panel + FAR + 64 * k, 0, 2);
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t row = t->rows * tile / tiles, n = t->rows * (tile + 1) / tiles - row;
            table_values(t, table, panel, t->x + (i * t->rows + row) * t->group, values, sums + row * COLUMNS, n);
        }
    }
}

static void table_panels(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Tables *t = arguments;
    const Groups g = {.linear = t->linear, .dtype = t->dtype, .row = t->row, .rows = t->rows}; /* as store_panel needs it */
    const int64_t bytes = t->groups * (HEAD + 8 * t->group);
    float sums[TOGETHER * COLUMNS] __attribute__((aligned(64)));
    Table table;
    (void)thread;
    memcpy(&table, t->linear->scales, sizeof table);
    for (int64_t p = first; p < last; p++) {
        const char *panel = (const char *)t->linear->weight + p * bytes;
        memset(sums, 0, (size_t)t->rows * COLUMNS * sizeof *sums);
        (t->rows > TABLE_TALL ? many_with_table : few_with_table)(t, &table, panel, sums);
        store_panel(&g, sums, p);
    }
}

/* Rows in fp32, group by group, so that those of a group lie together; with zeros beyond the depth. */
static void copy_rows(const void *arguments, int64_t first, int64_t last, int64_t thread) {
    const Tables *t = arguments;
    const int64_t depth = t->linear->depth, size = t->dtype == F32 ? 4 : 2;
    (void)thread;
    for (int64_t r = first; r < last; r++) {
        const char *x = (const char *)t->linear->x + (t->row + r) * depth * size;
        for (int64_t i = 0; i < t->groups; i++)
            for (int64_t k = 0; k < t->group; k += W) {
                const int64_t at = i * t->group + k;
                float *to = t->x + (i * t->rows + r) * t->group + k;
                if (t->dtype == F32) store_f32(to, load_of(x + at * size, depth - at, F32));
                if (t->dtype == BF16) store_f32(to, load_of(x + at * size, depth - at, BF16));
                if (t->dtype == F16) store_f32(to, load_of(x + at * size, depth - at, F16));
            }
    }
}

static void linear_table(const Linear *l, int dtype) {
    const int64_t group = l->packed % PACKED_SHORT / 16, groups = (l->depth + group - 1) / group;
    Tables t = {l, dtype, group, groups, 0, 0, (float *)(void *)l->workspace};
    for (; t.row < l->rows; t.row += TOGETHER) {
        t.rows = l->rows - t.row < TOGETHER ? l->rows - t.row : TOGETHER;
        in_parallel(copy_rows, &t, t.rows, t.rows * l->depth >= FORK_ELEMENTS ? l->threads : 1, IN_SHARES);
        in_parallel(table_panels, &t, (l->columns + COLUMNS - 1) / COLUMNS, l->threads, IN_SHARES);
    }
}
