/* A group of processes, the ranks of a model, which exchange what they compute through memory that they share.
 *
 * A rank computes some columns of each result and writes them to their places in a shared buffer. When all ranks have
 * done that, each reads the whole. So nothing is added across ranks, and an element's bits are those of one process.
 */
#ifndef GROUP_H
#define GROUP_H

#include <stdint.h>

enum { GROUP_STATE_BYTES = 4096 }; /* of shared memory, zero at first */

/* Wait until all `size` ranks have called this, each with one thread. Their writes before it are visible after it. It
 * spins for tens of microseconds and then sleeps. A rank that dies leaves the others asleep: their owner ends them. */
void group_wait(void *state, int32_t size);

#endif
