/* A group of processes, the ranks of a model, which exchange results through shared memory.
 *
 * A rank computes some columns of each result and writes them to their places in a shared buffer. When all ranks have
 * done that, each reads the whole. So nothing is added across ranks, and an element's bits are those of one process.
 */
#ifndef GROUP_H
#define GROUP_H

#include <stdint.h>

enum { GROUP_STATE_BYTES = 4096 }; /* of shared memory, zero at first */

/* The streams between ranks that share no memory: they are on several machines. Each rank has its own buffers. */
typedef struct {
    const int32_t *fds; /* [size] a connected stream socket to each other rank */
    char *room;         /* of group_room(); NULL at first */
    int64_t room_bytes;
    int32_t rank, size;
} GroupStreams;

enum { MAX_RANKS = 256 };

/* The ranks of a group, of which this process is one. */
typedef struct {
    void *state;           /* of group_wait() */
    GroupStreams *streams; /* instead of memory that all ranks share; or NULL */
    int32_t rank, size;
} Ranks;

/* Where a rank's columns are in a result of a group: from `first` on, of `width` columns of all ranks. */
typedef struct {
    int64_t first, width;
    const int64_t *bounds; /* [size + 1] the first columns of all ranks, and width */
} Place;

/* Wait until all `size` ranks have called this, each with one thread. Their writes before it are visible after it.
 * It spins for tens of microseconds and then sleeps. If a rank dies, the others stay asleep until their owner ends
 * them. */
void group_wait(void *state, int32_t size);

/* Wait for all threads of all ranks, which share memory. All threads of the pool call this. */
void group_wait_all(const Ranks *ranks, int thread);

/* Wait for all threads of all ranks, and for the columns of y [num_rows, place->width], whose elements have so many bytes,
 * that others have. to_first: only rank 0 gets them, if ranks share no memory. All threads of the pool call this. */
void group_gather(const Ranks *ranks, void *y, int64_t num_rows, const Place *place, int64_t element, int to_first,
                  int thread);

/* Arguments of group_gather(), for a caller that is no job of the pool. */
typedef struct {
    Ranks ranks;
    Place place;
    void *y;
    int64_t num_rows, element;
} GroupGather;

void group_gather_rows(const GroupGather *args);

/* Return room for the parts of all ranks in an exchange, one after the other; its content may be lost. */
char *group_room(GroupStreams *streams, int64_t bytes);

/* Send the rank's part to the others, and receive theirs. The parts are in the room; that of rank r begins at ends[r] and
 * ends at ends[r + 1]. to_first: only rank 0 receives. All ranks call this in the same order with the same ends. A rank
 * whose peer is gone waits to be ended. */
void group_exchange(GroupStreams *streams, const int64_t *ends, int to_first);

#endif
