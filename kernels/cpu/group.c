#include "group.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spinning.h"
#include "vectors.h"

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
