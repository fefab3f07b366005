#define _GNU_SOURCE
#include "threads.h"
#ifdef __linux__
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
#define PIECES 8           /* of a share; a thread takes one at a time */
#define PATIENCE_NS 500000 /* a calling thread that waits longer asks why */
#define LEAST_ALONE 4      /* see work_alone */
#define MOST_ALONE 64

/* GOMP_parallel and omp_get_thread_num of the OpenMP library that torch uses, so that the same threads work for torch and
 * for the kernels: OpenMP's threads look for more work for a while, on cores that others would miss. */
typedef void (*Team)(void (*)(void *), void *, unsigned, unsigned);
static Team team;
static int (*thread_number)(void);

static atomic_int held;                  /* for tests, see hfp_hold_threads */
static atomic_int_fast64_t alone_until;  /* the time until which calling threads work alone; 0: they do not */
static atomic_int_fast64_t alone_factor; /* the last time alone, as a multiple of the delay that was the reason */

typedef struct {
    Part part;
    const void *arguments;
    int64_t items, shares, pieces; /* pieces: of each share */
    int64_t finished;              /* when the calling thread found no more pieces */
    struct {
        _Alignas(64) atomic_int_fast64_t taken; /* pieces of this share */
        int64_t begun, ended, lost;             /* by this thread; lost: time in which it did not run */
    } at[MAX_THREADS];
} Region;

static int64_t time_of(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static int64_t now_ns(void) { return time_of(CLOCK_MONOTONIC); }

/* Compute pieces until all are taken: first those of the thread's own share, then of the others. */
static void compute_pieces(Region *region, int64_t thread) {
    const int64_t count = region->shares, pieces = region->pieces;
    for (int64_t i = 0; i < count; i++) {
        const int64_t share = (thread + i) % count, begin = region->items * share / count;
        const int64_t size = region->items * (share + 1) / count - begin;
        for (int64_t piece; (piece = atomic_fetch_add(&region->at[share].taken, 1)) < pieces;) {
            const int64_t first = begin + size * piece / pieces, last = begin + size * (piece + 1) / pieces;
            if (first < last) region->part(region->arguments, first, last, thread);
        }
    }
}

/* What each thread of a team does. */
static void work(void *argument) {
    Region *region = argument;
    const int64_t thread = thread_number();
    const int hold = atomic_load_explicit(&held, memory_order_relaxed);
    if (!thread) {
        if (hold >= 0) compute_pieces(region, thread);
        region->finished = now_ns();
        return;
    }
    if (hold == 2) usleep(500000);
    const int64_t begun = now_ns(), run = time_of(CLOCK_THREAD_CPUTIME_ID);
    if (hold <= 0) compute_pieces(region, thread);
    const int64_t ended = now_ns();
    region->at[thread].begun = begun, region->at[thread].ended = ended;
    region->at[thread].lost = ended - begun < PATIENCE_NS ? 0 : ended - begun - (time_of(CLOCK_THREAD_CPUTIME_ID) - run);
}

/* The cores are in use by others, which has cost so much time: work alone for some multiple of it, which doubles if the
 * same happens again soon after that. */
static void work_alone(int64_t now, int64_t delay) {
    const int64_t last = atomic_load(&alone_factor), since = now - atomic_load(&alone_until);
    int64_t factor = since < delay * last ? 2 * last : LEAST_ALONE;
    if (factor > MOST_ALONE) factor = MOST_ALONE;
    atomic_store(&alone_factor, factor);
    atomic_store(&alone_until, now + delay * factor);
}

/* Whether the calling thread has waited for a thread that did not run, not long ago. */
static int works_alone(void) {
    const int64_t until = atomic_load_explicit(&alone_until, memory_order_relaxed);
    return until && !atomic_load_explicit(&held, memory_order_relaxed) && now_ns() < until;
}

/* OpenMP ends a region when each thread has returned, even one that ran too late for any piece. Of the time that the
 * calling thread has waited, the part in which the others computed is no delay. */
static void judge_wait(const Region *region, int64_t threads) {
    const int64_t now = now_ns(), waited = now - region->finished;
    if (waited < PATIENCE_NS) return;
    int64_t expected = region->finished;
    for (int64_t i = 1; i < threads; i++) {
        const int64_t end = region->at[i].ended - region->at[i].lost;
        if (region->at[i].begun && region->at[i].begun <= region->finished && end > expected) expected = end;
    }
    if (2 * (now - expected) > waited) work_alone(now, now - expected);
}

void in_parallel(Part part, const void *arguments, int64_t items, int64_t threads, Order order) {
    if (threads < 2 || items < 2 || !team || works_alone()) {
        if (items > 0) part(arguments, 0, items, 0);
        return;
    }
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    const int64_t count = order == ONE_BY_ONE ? 1 : threads < items ? threads : items, most = (items + count - 1) / count;
    Region region;
    region.part = part, region.arguments = arguments, region.items = items, region.shares = count;
    region.pieces = order == ONE_BY_ONE || most < PIECES ? most : PIECES;
    for (int64_t i = 0; i < threads; i++) {
        atomic_init(&region.at[i].taken, 0);
        region.at[i].begun = 0;
    }
    /* Always with all threads: GNU's library ends those that a smaller team leaves out. */
    team(work, &region, (unsigned)threads, 0);
    judge_wait(&region, threads);
}

/* A child of a fork has none of OpenMP's threads, and GNU's library would wait for them. */
static void forget_team(void) { team = NULL; }

/* The functions of torch's OpenMP library. Without them, calling threads work alone. */
HFP_EXPORT void hfp_use_openmp(void *parallel, void *number) {
    static int is_prepared; /* for forks */
    if (!is_prepared) is_prepared = !pthread_atfork(NULL, NULL, forget_team);
    thread_number = (int (*)(void))number;
    team = (Team)parallel;
}

/* For tests: threads that are held are like threads that the operating system does not run. which: 1 for all but calling
 * threads, -1 for calling threads, 2 for half a second for all but calling threads, 0 for none. Returns whether calling
 * threads work alone because others were late. */
HFP_EXPORT int hfp_hold_threads(int which) {
    atomic_store(&held, 0);
    const int alone = works_alone();
    atomic_store(&alone_until, 0);
    atomic_store(&held, which);
    return alone;
}
#else
void in_parallel(Part part, const void *arguments, int64_t items, int64_t threads, Order order) {
    (void)threads, (void)order;
    if (items > 0) part(arguments, 0, items, 0);
}

HFP_EXPORT void hfp_use_openmp(void *parallel, void *number) { (void)parallel, (void)number; }
HFP_EXPORT int hfp_hold_threads(int which) { return (void)which, 0; }
#endif
