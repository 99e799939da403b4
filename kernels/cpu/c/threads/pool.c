#include "threads/pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "threads/spinning.h"
#include "math/vectors.h"

#define MAX_THREADS 1024

static struct {
    /* On separate cache lines: arriving threads must not disturb those that poll the phase. */
    _Alignas(64) _Atomic uint32_t phase; /* number of barriers passed; also the futex */
    _Alignas(64) _Atomic int num_arrived;
    _Atomic int num_asleep;
    _Alignas(64) Job job; /* NULL = end the thread. Written before a barrier, read after it */
    void *args;
    _Atomic int num_threads; /* 0 = none were started */
    int num_asked; /* of the last pool_start() */
    _Atomic int num_lent;
    int fork_is_handled;
    pthread_t workers[MAX_THREADS];
    struct {
        _Alignas(64) _Atomic uint64_t last; /* phase << 32 | numbers taken in that phase */
    } taken[MAX_THREADS];
} pool;

/* Whether this thread runs its jobs alone, next to those of the pool. */
static _Thread_local int is_alone;

EXPORT void pool_leave(int leaves) { is_alone = leaves; }

/* Return when the phase has changed, or when woken because it changes soon. */
static void wait_for_phase_after(uint32_t phase) {
    int64_t end = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < PAUSES_PER_LOOK; i++) {
            if (atomic_load_explicit(&pool.phase, memory_order_acquire) != phase) return;
            pause_briefly();
        }
    } while (now_ns() < end);
    /* No wake-up is lost: the thread that ends the phase reads num_asleep after that, and this thread increments it
     * before the kernel compares the phase. */
    atomic_fetch_add(&pool.num_asleep, 1);
    if (atomic_load(&pool.phase) == phase)
        syscall(SYS_futex, &pool.phase, FUTEX_WAIT_PRIVATE, phase, NULL, NULL, 0);
    atomic_fetch_sub(&pool.num_asleep, 1);
}

static void wake_sleeping(void) {
    if (atomic_load(&pool.num_asleep) > 0)
        syscall(SYS_futex, &pool.phase, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

EXPORT void pool_barrier(void) {
    if (pool.num_threads <= 1 || is_alone) return;
    uint32_t phase = atomic_load_explicit(&pool.phase, memory_order_acquire);
    if (atomic_fetch_add(&pool.num_arrived, 1) + 1 < pool.num_threads) {
        while (atomic_load_explicit(&pool.phase, memory_order_acquire) == phase) wait_for_phase_after(phase);
        return;
    }
    atomic_store_explicit(&pool.num_arrived, 0, memory_order_relaxed);
    atomic_fetch_add(&pool.phase, 1);
    wake_sleeping();
}

EXPORT int64_t pool_take(int owner) {
    const uint64_t phase = atomic_load_explicit(&pool.phase, memory_order_relaxed); /* constant: no barrier ends here */
    uint64_t last = atomic_load_explicit(&pool.taken[owner].last, memory_order_relaxed), next;
    do {
        next = (last >> 32 == phase ? last : phase << 32) + 1;
    } while (!atomic_compare_exchange_weak_explicit(&pool.taken[owner].last, &last, next, memory_order_relaxed,
                                                    memory_order_relaxed));
    return (int64_t)(uint32_t)next - 1;
}

static void *work(void *thread) {
    for (;;) {
        pool_barrier();
        if (pool.job == NULL) return NULL;
        pool.job(pool.args, (int)(intptr_t)thread, pool.num_threads);
        pool_barrier();
    }
}

EXPORT void pool_run(Job job, void *args) {
    if (pool.num_threads <= 1 || is_alone) {
        job(args, 0, 1);
        return;
    }
    pool.job = job;
    pool.args = args;
    pool_barrier();
    job(args, 0, pool.num_threads);
    pool_barrier();
}

/* Reset the pool in a forked child, which has this memory but none of the threads. */
static void forget_threads(void) {
    pool.num_threads = 0;
    pool.num_asked = 0;
    atomic_store(&pool.num_arrived, 0);
    atomic_store(&pool.num_asleep, 0);
}

static void end_threads(void) {
    int num_threads = pool.num_threads;
    if (num_threads > 1) {
        pool.job = NULL;
        pool_barrier();
    }
    for (int thread = 1; thread < num_threads; thread++) pthread_join(pool.workers[thread], NULL);
    pool.num_threads = 0;
}

static void have_threads(int num_threads) {
    if (num_threads == pool.num_threads) return;
    end_threads();
    if (!pool.fork_is_handled) pool.fork_is_handled = pthread_atfork(NULL, NULL, forget_threads) == 0;
    pool.num_threads = num_threads;
    sigset_t all, before; /* only the program's own threads handle signals */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int thread = 1; thread < num_threads; thread++) {
        if (pthread_create(&pool.workers[thread], NULL, work, (void *)(intptr_t)thread) != 0) {
            pool.num_threads = thread; /* safe: no worker passes its first barrier before the caller */
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Return how many threads are left for the pool's jobs. */
static int num_kept(void) {
    int num_threads = pool.num_asked - atomic_load_explicit(&pool.num_lent, memory_order_relaxed);
    return num_threads < 1 ? 1 : num_threads;
}

EXPORT void pool_start(int num_threads) {
    if (is_alone) return; /* a thread next to the pool leaves it as it is */
    pool.num_asked = num_threads < 1 ? 1 : num_threads > MAX_THREADS ? MAX_THREADS : num_threads;
    have_threads(num_kept());
}

EXPORT void pool_stop(void) {
    end_threads();
    pool.num_asked = 0;
}

EXPORT void pool_lend(int num_threads) { atomic_store(&pool.num_lent, num_threads); }

EXPORT void pool_wake(void) {
    if (pool.num_asked > 0 && !is_alone) have_threads(num_kept());
    wake_sleeping();
}

EXPORT int pool_num_threads(void) { return pool.num_threads > 1 && !is_alone ? pool.num_threads : 1; }
