/* The thread pool: one job at a time, run by all threads, each knowing which it is (SPMD).
 *
 * A kernel is a `xxx_part(args, thread, num_threads)` that does its share by fixed rules, and a `xxx(args)` that has the
 * pool run it; parts of several kernels make one job with pool_barrier() between them. Waiting threads spin for tens of
 * microseconds and then sleep: an idle pool takes no CPU, and a thread that has lost its core to another process is
 * waited for asleep.
 */
#ifndef POOL_H
#define POOL_H

#include <stdint.h>

typedef void (*Job)(void *args, int thread, int num_threads);

/* Have num_threads threads; the caller of pool_run() is thread 0 and counts. The same number again changes nothing,
 * another number replaces the threads. Fewer are had where the system grants no more. One thread starts, runs, stops. */
void pool_start(int num_threads);

/* Run job on all threads; returns when all are done. Without pool_start(), or after fork(), the caller runs it alone. */
void pool_run(Job job, void *args);

/* A job comes within tens of microseconds: threads that sleep begin to spin, for waking up takes as long. */
void pool_wake(void);

/* Inside a job: wait until all threads are here. What they wrote before is seen after. */
void pool_barrier(void);

/* Inside a job of several threads: 0, 1, 2, ... for those who ask, of each `owner` (a thread) a row of numbers that begins
 * anew with every barrier. Threads that share work out this way may all work until the last piece is taken. */
int64_t pool_take(int owner);

/* End the threads; they are gone on return. */
void pool_stop(void);

/* Threads that run a job, the caller included. */
int pool_num_threads(void);

#endif
