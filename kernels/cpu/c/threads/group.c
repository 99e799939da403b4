#include "threads/group.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "threads/pool.h"
#include "threads/spinning.h"
#include "math/vectors.h"

typedef struct {
    _Alignas(64) _Atomic uint32_t phase; /* number of waits that have ended; also the futex */
    _Alignas(64) _Atomic uint32_t num_arrived;
    _Atomic uint32_t num_asleep;
} State;
_Static_assert(sizeof(State) <= GROUP_STATE_BYTES, "the state fits its page");

/* Return when the phase has changed, or when woken because it changes soon. No wake-up is lost: see pool.c. */
static void wait_for_phase_after(State *state, uint32_t phase) {
    const int64_t end = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < PAUSES_PER_LOOK; i++) {
            if (atomic_load_explicit(&state->phase, memory_order_acquire) != phase) return;
            pause_briefly();
        }
    } while (now_ns() < end);
    atomic_fetch_add(&state->num_asleep, 1);
    if (atomic_load(&state->phase) == phase) syscall(SYS_futex, &state->phase, FUTEX_WAIT, phase, NULL, NULL, 0);
    atomic_fetch_sub(&state->num_asleep, 1);
}

EXPORT void group_wait(void *memory, int32_t size) {
    State *state = memory;
    const uint32_t phase = atomic_load_explicit(&state->phase, memory_order_acquire);
    if (atomic_fetch_add(&state->num_arrived, 1) + 1 < (uint32_t)size) {
        while (atomic_load_explicit(&state->phase, memory_order_acquire) == phase) wait_for_phase_after(state, phase);
        return;
    }
    atomic_store_explicit(&state->num_arrived, 0, memory_order_relaxed);
    atomic_fetch_add(&state->phase, 1);
    if (atomic_load(&state->num_asleep) > 0) syscall(SYS_futex, &state->phase, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* What is left of an exchange with one rank. */
typedef struct {
    const char *out;
    char *in;
    int64_t to_send, to_receive;
} Left;

static void wait_to_be_ended(void) {
    for (;;) pause();
}

char *group_room(GroupStreams *streams, int64_t bytes) {
    if (bytes > streams->room_bytes) {
        free(streams->room);
        streams->room = malloc(bytes);
        if (!streams->room) abort();
        streams->room_bytes = bytes;
    }
    return streams->room;
}

/* Send and receive what a stream takes and has now; return whether it was anything. */
static int go_on(int fd, Left *left) {
    int64_t moved = 0;
    if (left->to_send) {
        const ssize_t count = send(fd, left->out, left->to_send, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count < 0 && errno != EAGAIN && errno != EINTR) wait_to_be_ended();
        if (count > 0) left->out += count, left->to_send -= count, moved += count;
    }
    if (left->to_receive) {
        const ssize_t count = recv(fd, left->in, left->to_receive, MSG_DONTWAIT);
        if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) wait_to_be_ended();
        if (count > 0) left->in += count, left->to_receive -= count, moved += count;
    }
    return moved > 0;
}

/* Sleep until a stream with something left may be ready. */
static void sleep_on(const GroupStreams *streams, const Left *left) {
    struct pollfd fds[MAX_RANKS];
    int count = 0;
    for (int rank = 0; rank < streams->size; rank++) {
        const short events = (left[rank].to_send ? POLLOUT : 0) | (left[rank].to_receive ? POLLIN : 0);
        if (events) fds[count++] = (struct pollfd){streams->fds[rank], events, 0};
    }
    poll(fds, count, -1);
}

void group_exchange(GroupStreams *streams, const int64_t *ends, int to_first) {
    const int own = streams->rank;
    Left left[MAX_RANKS];
    for (int rank = 0; rank < streams->size; rank++) {
        const int sends = rank != own && (!to_first || rank == 0);
        const int receives = rank != own && (!to_first || own == 0);
        left[rank] = (Left){streams->room + ends[own], streams->room + ends[rank],
                            sends ? ends[own + 1] - ends[own] : 0, receives ? ends[rank + 1] - ends[rank] : 0};
    }
    for (int64_t end = 0;;) {
        int has_moved = 0, is_done = 1;
        for (int rank = 0; rank < streams->size; rank++) {
            if (!left[rank].to_send && !left[rank].to_receive) continue;
            has_moved |= go_on(streams->fds[rank], &left[rank]);
            is_done &= !left[rank].to_send && !left[rank].to_receive;
        }
        if (is_done) return;
        if (has_moved || !end) end = now_ns() + SPIN_NS;
        if (now_ns() < end) continue;
        sleep_on(streams, left);
        end = 0;
    }
}

void group_wait_all(const Ranks *ranks, int thread) {
    pool_barrier();
    if (thread == 0) group_wait(ranks->state, ranks->size);
    pool_barrier();
}

/* Copy the columns of a rank in y to its part, or back. */
static void copy_part(char *part, char *y, const Place *place, int rank, int64_t rows, int64_t element, int is_back) {
    const int64_t bytes = (place->bounds[rank + 1] - place->bounds[rank]) * element;
    for (int64_t row = 0; row < rows; row++) {
        char *columns = y + (row * place->width + place->bounds[rank]) * element;
        memcpy(is_back ? columns : part + row * bytes, is_back ? part + row * bytes : columns, bytes);
    }
}

/* Exchange the columns of y with ranks that share no memory. */
static void exchange_columns(GroupStreams *streams, char *y, int64_t rows, const Place *place, int64_t element,
                             int to_first) {
    int64_t ends[MAX_RANKS + 1];
    for (int rank = 0; rank <= streams->size; rank++) ends[rank] = place->bounds[rank] * rows * element;
    char *room = group_room(streams, ends[streams->size]);
    copy_part(room + ends[streams->rank], y, place, streams->rank, rows, element, 0);
    group_exchange(streams, ends, to_first);
    if (to_first && streams->rank) return;
    for (int rank = 0; rank < streams->size; rank++) {
        if (rank != streams->rank) copy_part(room + ends[rank], y, place, rank, rows, element, 1);
    }
}

void group_gather(const Ranks *ranks, void *y, int64_t num_rows, const Place *place, int64_t element, int to_first,
                  int thread) {
    if (!ranks->streams) {
        group_wait_all(ranks, thread);
        return;
    }
    pool_barrier();
    if (thread == 0) exchange_columns(ranks->streams, y, num_rows, place, element, to_first);
    pool_barrier();
}

static void gather_job(void *args, int thread, int num_threads) {
    (void)num_threads;
    const GroupGather *gather = args;
    group_gather(&gather->ranks, gather->y, gather->num_rows, &gather->place, gather->element, 0, thread);
}

EXPORT void group_gather_rows(const GroupGather *args) { pool_run(gather_job, (void *)args); }
