/* Spinning before sleep: how long a thread looks for a change before it lets the system wake it. */
#ifndef SPINNING_H
#define SPINNING_H

#include <stdint.h>
#include <time.h>

/* Longer than the gaps between the kernels of a step, and shorter than a time slice of the scheduler. If another
 * process is busy, sleeping soon gives the core to the thread that the others wait for. */
#define SPIN_NS 40000
#define PAUSES_PER_LOOK 32 /* between two looks at the clock */

static inline void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static inline int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#endif
