#define _GNU_SOURCE
#include "threads.h"
#ifdef __linux__
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_THREADS 256
#define PIECES 8                /* of a share; a thread takes one at a time */
#define WORKER_SPINS_NS 200000  /* how long a worker that has had work looks for more before it sleeps */
#define LEAST_ALONE 4           /* see work_alone */
#define MOST_ALONE 64
#define CALLER_SPINS_NS 50000   /* how long the calling thread looks for the end of the last pieces before it sleeps */

#if defined(__x86_64__)
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

/* The region in progress. A worker may read it while the next one is written: it believes what it has read only if it
 * then takes a piece, because the region cannot end before that piece is done. */
static struct {
    _Atomic(Part) part;
    _Atomic(const void *) arguments;
    atomic_int_fast64_t items, threads, shares, pieces; /* pieces: of each share */
    atomic_int core;                                    /* of the calling thread */
} region;

/* A share of the region, and the worker whose own it is. */
static struct {
    _Alignas(64) atomic_uint_fast64_t left; /* the number of the region in the upper half; pieces not yet taken */
    atomic_uint asleep, computes;
    _Atomic(clockid_t) clock; /* of the worker's processor time */
    int64_t run_before;       /* its time when the calling thread began to wait, if it was computing; else -1 */
} shares[MAX_THREADS];

static atomic_uint is_busy;       /* whether there is a region in progress */
static atomic_uint generation;    /* changes with each region */
static atomic_uint unfinished;    /* pieces that are not done */
static atomic_uint caller_sleeps; /* until they are */
static atomic_int held;           /* for tests: 1 if workers take no pieces, -1 if the calling thread takes none */
static atomic_int_fast64_t alone_until; /* the time until which calling threads work alone; 0: they do not */
static uint64_t number;           /* of the last region */
static atomic_int_fast64_t alone_factor; /* the last time alone, as a multiple of the delay that was the reason */
static int64_t num_workers;

static void wait_at(atomic_uint *at, unsigned value) {
    syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_at(atomic_uint *at) { syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

static int64_t time_of(clockid_t clock) {
    struct timespec time = {0};
    clock_gettime(clock, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static int64_t now_ns(void) { return time_of(CLOCK_MONOTONIC); }

/* Wait until *at is not `value` any more, but at most so long. Returns whether it has changed. */
static int spin_at(atomic_uint *at, unsigned value, int64_t ns) {
    for (int64_t end = 0;;) {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(at, memory_order_acquire) != value) return 1;
            PAUSE();
        }
        const int64_t now = now_ns();
        if (!end) end = now + ns;
        if (now >= end) return 0;
    }
}

/* Take a piece of a share and compute it. Returns whether there was one. */
static int compute_piece(int64_t share, int64_t thread) {
    uint_fast64_t left = atomic_load_explicit(&shares[share].left, memory_order_acquire);
    while ((uint32_t)left) {
        const Part part = atomic_load_explicit(&region.part, memory_order_relaxed);
        const void *arguments = atomic_load_explicit(&region.arguments, memory_order_relaxed);
        const int64_t items = atomic_load_explicit(&region.items, memory_order_relaxed);
        const int64_t threads = atomic_load_explicit(&region.threads, memory_order_relaxed);
        const int64_t count = atomic_load_explicit(&region.shares, memory_order_relaxed);
        const int64_t pieces = atomic_load_explicit(&region.pieces, memory_order_relaxed);
        if (thread >= threads) return 0;
        if (!atomic_compare_exchange_weak_explicit(&shares[share].left, &left, left - 1, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        const int64_t begin = items * share / count, size = items * (share + 1) / count - begin;
        const int64_t piece = pieces - (int64_t)(uint32_t)left, first = begin + size * piece / pieces;
        const int64_t last = begin + size * (piece + 1) / pieces;
        if (first < last) part(arguments, first, last, thread);
        return 1;
    }
    return 0;
}

/* Compute pieces until all are taken. */
static void compute_pieces(int64_t thread) {
    const int64_t count = atomic_load_explicit(&region.shares, memory_order_relaxed);
    for (int64_t i = 0; i < count; i++) {
        unsigned done = 0;
        while (compute_piece((thread + i) % count, thread)) done++;
        if (done && atomic_fetch_sub(&unfinished, done) == done && atomic_load(&caller_sleeps)) wake_at(&unfinished);
    }
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

/* Where OpenMP binds threads to cores, the calling thread may be bound to one, which workers would inherit. */
static void leave_binding(void) {
    cpu_set_t every;
    memset(&every, 0xff, sizeof every);
    if (getenv("OMP_PROC_BIND") || getenv("OMP_PLACES") || getenv("GOMP_CPU_AFFINITY") || getenv("KMP_AFFINITY"))
        sched_setaffinity(0, sizeof every, &every); /* of those that the program may use */
}

static void *worker(void *argument) {
    const int64_t thread = (int64_t)(intptr_t)argument;
    prctl(PR_SET_NAME, "hf_paged");
    leave_binding();
    clockid_t clock;
    if (!pthread_getcpuclockid(pthread_self(), &clock)) atomic_store(&shares[thread].clock, clock);
    for (;;) {
        const unsigned now = atomic_load(&generation);
        if (atomic_load_explicit(&held, memory_order_relaxed) <= 0) {
            atomic_store_explicit(&shares[thread].computes, 1, memory_order_relaxed);
            compute_pieces(thread);
            atomic_store_explicit(&shares[thread].computes, 0, memory_order_relaxed);
        }
        /* On the core of the calling thread, a worker only takes time from it. */
        if (sched_getcpu() == atomic_load_explicit(&region.core, memory_order_relaxed))
            work_alone(now_ns(), WORKER_SPINS_NS);
        else if (spin_at(&generation, now, WORKER_SPINS_NS))
            continue;
        atomic_store(&shares[thread].asleep, 1);
        while (atomic_load(&generation) == now && atomic_load(&shares[thread].asleep)) wait_at(&shares[thread].asleep, 1);
        atomic_store(&shares[thread].asleep, 0);
    }
    return NULL;
}

/* A child of a fork has none of the workers; they are started when they are needed. */
static void forget_workers(void) {
    num_workers = 0;
    for (int64_t i = 0; i < MAX_THREADS; i++) {
        atomic_store(&shares[i].left, 0);
        atomic_store(&shares[i].asleep, 0);
        atomic_store(&shares[i].computes, 0);
    }
    atomic_store(&caller_sleeps, 0);
    atomic_store(&unfinished, 0);
    atomic_store(&is_busy, 0);
}

static void start_workers(int64_t count) {
    static int is_prepared; /* for forks; a child inherits it */
    if (!is_prepared) is_prepared = !pthread_atfork(NULL, NULL, forget_workers);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before); /* signals are for the program's threads */
    for (pthread_t started; num_workers < count; num_workers++) {
        if (pthread_create(&started, NULL, worker, (void *)(intptr_t)(num_workers + 1))) break;
        pthread_detach(started);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Whether a worker has kept a calling thread waiting not long ago. */
static int works_alone(void) {
    const int64_t until = atomic_load_explicit(&alone_until, memory_order_relaxed);
    return until && !atomic_load_explicit(&held, memory_order_relaxed) && now_ns() < until;
}

/* The cores are in use by others if a worker was computing while the calling thread waited, but did not run for half
 * of that time. */
static void judge_wait(int64_t begin) {
    const int64_t end = now_ns(), waited = end - begin;
    int is_late = 0;
    for (int64_t i = 1; i <= num_workers; i++)
        is_late |= shares[i].run_before >= 0 && 2 * (time_of(shares[i].clock) - shares[i].run_before) < waited;
    if (is_late) work_alone(end, waited);
}

static void wait_for_workers(void) {
    int64_t begin = 0;
    for (unsigned left; (left = atomic_load(&unfinished));) {
        if (spin_at(&unfinished, left, CALLER_SPINS_NS)) continue;
        if (!begin) {
            begin = now_ns();
            for (int64_t i = 1; i <= num_workers; i++)
                shares[i].run_before = atomic_load(&shares[i].computes) ? time_of(shares[i].clock) : -1;
        }
        atomic_store(&caller_sleeps, 1);
        if (left == atomic_load(&unfinished)) wait_at(&unfinished, left);
        atomic_store(&caller_sleeps, 0);
    }
    if (begin) judge_wait(begin);
}

void in_parallel(Part part, const void *arguments, int64_t items, int64_t threads, Order order) {
    if (threads < 2 || items < 2 || works_alone() || atomic_exchange(&is_busy, 1)) {
        if (items > 0) part(arguments, 0, items, 0);
        return;
    }
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (num_workers < threads - 1) start_workers(threads - 1);
    const int64_t count = order == ONE_BY_ONE ? 1 : threads < items ? threads : items;
    const int64_t most = (items + count - 1) / count, pieces = order == ONE_BY_ONE || most < PIECES ? most : PIECES;
    atomic_store_explicit(&region.part, part, memory_order_relaxed);
    atomic_store_explicit(&region.arguments, arguments, memory_order_relaxed);
    atomic_store_explicit(&region.items, items, memory_order_relaxed);
    atomic_store_explicit(&region.threads, threads, memory_order_relaxed);
    atomic_store_explicit(&region.shares, count, memory_order_relaxed);
    atomic_store_explicit(&region.pieces, pieces, memory_order_relaxed);
    atomic_store_explicit(&region.core, sched_getcpu(), memory_order_relaxed);
    atomic_store_explicit(&unfinished, (unsigned)(count * pieces), memory_order_relaxed);
    number++;
    for (int64_t i = 0; i < count; i++)
        atomic_store_explicit(&shares[i].left, number << 32 | (uint64_t)pieces, memory_order_release);
    atomic_fetch_add(&generation, 1);
    for (int64_t i = 1; i < threads && i <= num_workers && i < items; i++)
        if (atomic_load(&shares[i].asleep)) {
            atomic_store(&shares[i].asleep, 0);
            wake_at(&shares[i].asleep);
        }
    if (atomic_load_explicit(&held, memory_order_relaxed) >= 0) compute_pieces(0);
    wait_for_workers();
    atomic_store(&is_busy, 0);
}

/* For tests: threads that are held are like threads that the operating system does not run. which: 1 for the workers, -1
 * for calling threads, 0 for none. */
HFP_EXPORT void hfp_hold_threads(int which) { atomic_store(&held, which); }

HFP_EXPORT int hfp_has_threads(void) { return 1; }
#else
void in_parallel(Part part, const void *arguments, int64_t items, int64_t threads, Order order) {
    (void)threads, (void)order;
    if (items > 0) part(arguments, 0, items, 0);
}

HFP_EXPORT void hfp_hold_threads(int which) { (void)which; }
HFP_EXPORT int hfp_has_threads(void) { return 0; }
#endif
