/* Decoder layers in fp32. */
#define ELEMENT float
#define NAME(name) name##_f32
#define DTYPE_NUMBER 0
#include "elements.h"
#define LOAD load_f32
#define STORE store_part_f32
#define LOAD_8 load_8_f32
#define STORE_8 store_8_f32
#define ROUND_8(x) (x)
#include "rows.inc.c"
#if HAS_AMX
#define LINEAR_PARTS
#define FEWEST_ROWS 49 /* fewer rows, or columns, are not faster in parts */
#define FEWEST_COLUMNS 64
static int64_t parts_workspace(int64_t rows, int64_t depth, int64_t threads);
static void linear_parts(const Linear *l, int kind);
#endif
static __thread int in_one_order;
#define IN_ONE_ORDER in_one_order
#include "linear.inc.c"
#if HAS_AMX
#include "linear_parts.inc.c"
#endif
#include "layers.inc.c"

/* Sets whether the linear layers that this thread computes sum in an order that depends on the depth alone. Returns what
 * it was before. */
HFP_EXPORT int hfp_in_one_order(int is) {
    const int before = in_one_order;
    in_one_order = is;
    return before;
}
