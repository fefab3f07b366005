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
#include "linear.inc.c"
#include "layers.inc.c"
