/* Work that the threads of torch's OpenMP library share. */
#ifndef HFP_THREADS_H
#define HFP_THREADS_H
#include "common.h"

/* Computes the items from `first` to before `last`. thread: below the number of threads; two parts of a call that run at
 * the same time have different ones. */
typedef void (*Part)(const void *arguments, int64_t first, int64_t last, int64_t thread);

/* How items are given out. IN_SHARES: each thread begins with a run of its own, so that it reads consecutive memory,
 * then helps others with what is left of theirs. ONE_BY_ONE: each thread takes the next item. */
typedef enum { IN_SHARES, ONE_BY_ONE } Order;

/* Compute all items; returns when all are done. Items must not depend on one another or on the thread. If the calling
 * thread has waited for others that the operating system did not run, it computes alone for a while. */
void in_parallel(Part part, const void *arguments, int64_t items, int64_t threads, Order order);
#endif
