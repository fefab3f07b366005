/* Work that several threads share. They are our own, not OpenMP's: where other programs use the cores, a region of
 * OpenMP waits for each of its threads to get one, even for a thread for which no work is left. */
#ifndef HFP_THREADS_H
#define HFP_THREADS_H
#include "common.h"

/* Computes the items from `first` to before `last`. thread: below the number of threads; two parts that run at the same
 * time have different ones. */
typedef void (*Part)(const void *arguments, int64_t first, int64_t last, int64_t thread);

/* How items are given out. IN_SHARES: each thread begins with a run of its own, so that it reads consecutive memory,
 * then helps others with what is left of theirs. ONE_BY_ONE: each thread takes the next item. */
typedef enum { IN_SHARES, ONE_BY_ONE } Order;

/* Compute all items; returns when all are done. The calling thread begins at once. Others help if they get a core in
 * time; it waits for them only while they compute an item. Items must not depend on one another or on the thread. In a
 * part, and while another thread of the program is in here, the calling thread computes all items itself. */
void in_parallel(Part part, const void *arguments, int64_t items, int64_t threads, Order order);
#endif
