/* The thread pool. It runs one job at a time on all threads; each thread gets its index (SPMD).
 *
 * A kernel is a function xxx_part(args, thread, num_threads) that does a thread's share by fixed rules, and a function
 * xxx(args) that runs it on the pool. A job may consist of the parts of several kernels with pool_barrier() between
 * them. Waiting threads spin for tens of microseconds and then sleep. So an idle pool uses no CPU, and waiting for a
 * thread that has lost its core to another process does not occupy a core.
 */
#ifndef POOL_H
#define POOL_H

#include <stdint.h>

typedef void (*Job)(void *args, int thread, int num_threads);

/* Start num_threads threads, including the caller of pool_run(), which is thread 0. The same number again changes
 * nothing; another number replaces the threads. There are fewer if the system refuses more. Call pool_start(),
 * pool_run(), pool_wake() and pool_stop() from one thread at a time. */
void pool_start(int num_threads);

/* Run a job on all threads and return when all are done. Without pool_start(), or after fork(), only the caller runs
 * it. */
void pool_run(Job job, void *args);

/* Wake sleeping threads, which then spin, because a job follows within tens of microseconds: waking up takes as
 * long. What was lent since the last call leaves the pool here, or returns to it. */
void pool_wake(void);

/* Let jobs run on num_threads threads less, at least on one, from the next pool_wake() on; 0 = on all again. So their
 * cores are free for other work of this process. Any thread may call it, while a job runs too. */
void pool_lend(int num_threads);

/* Inside a job: wait until all threads have called this. Their writes before it are visible after it. */
void pool_barrier(void);

/* Inside a job of several threads: return the next number 0, 1, 2, ... of `owner`, a thread's index. Each owner has a
 * counter, which restarts at every barrier. Threads can take pieces of each other's work by these numbers, so that all
 * are busy until the last piece is taken. */
int64_t pool_take(int owner);

/* End all threads but the caller; returns after they have ended. */
void pool_stop(void);

/* Make the calling thread run its jobs alone from now on (1), next to those of the pool, or on the pool again (0).
 * So one thread can pack weights while another one computes steps. */
void pool_leave(int leaves);

/* Return the number of threads that run a job, the caller included. */
int pool_num_threads(void);

#endif
