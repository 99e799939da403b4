"""The thread pool: every thread runs every job, barriers hold all, nothing is left behind, and idling is free."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kernels.cpu.library import CpuLibrary
from tests.placed import placed

JOB = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)


class Pool:
    """Jobs are Python functions; the pool's threads take Python's lock in turn."""

    def __init__(self, library: CpuLibrary) -> None:
        self.start = library.start_threads
        self.barrier = library.function("pool_barrier")
        self.stop = library.function("pool_stop")
        self.take = library.function("pool_take", ctypes.c_int, result=ctypes.c_int64)
        self._run = library.function("pool_run", JOB, ctypes.c_void_p)

    def run(self, job) -> None:
        self._run(JOB(lambda _, thread, num_threads: job(thread, num_threads)), None)


@pytest.fixture
def pool(c_library):
    pool = Pool(c_library)
    yield pool
    pool.stop()


def threads_of_process() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def have_ended(threads: set[str]) -> bool:
    """A thread that has been joined may still be listed for a moment, longer on a busy machine."""
    end = time.monotonic() + 10
    while threads & threads_of_process() and time.monotonic() < end:
        time.sleep(0.001)
    return not threads & threads_of_process()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_each_thread_runs_each_job_once(pool, num_threads):
    before = threads_of_process()
    pool.start(num_threads)
    pool.start(num_threads)
    started = threads_of_process() - before
    assert len(started) == num_threads - 1
    for _ in range(50):
        ran = []
        pool.run(lambda thread, of, ran=ran: ran.append((thread, of)))
        assert sorted(ran) == [(thread, num_threads) for thread in range(num_threads)]
    pool.stop()
    assert have_ended(started)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_nobody_passes_a_barrier_before_all_are_there(pool, num_threads):
    pool.start(num_threads)
    seen = []
    counts = [0] * num_threads

    def job(thread, _):
        for phase in range(1, 30):
            if (phase + thread) % 7 == 0:
                time.sleep(0.001)  # longer than the others spin: they sleep, and are woken
            counts[thread] += 1
            pool.barrier()
            seen.append(set(counts) == {phase})
            pool.barrier()

    pool.run(job)
    assert seen == [True] * 29 * num_threads


def test_another_number_of_threads_replaces_them(pool):
    replaced: set[str] = set()
    for num_threads in (2, 3, 1, 2):
        before = threads_of_process()
        pool.start(num_threads)
        ran = []
        pool.run(lambda thread, of, ran=ran: ran.append(of))
        assert ran == [num_threads] * num_threads
        assert have_ended(replaced)
        replaced = threads_of_process() - before
        assert len(replaced) == num_threads - 1


def test_without_a_start_the_caller_runs_alone(pool):
    ran = []
    pool.run(lambda thread, of: ran.append((thread, of)))
    pool.barrier()  # of one: nobody to wait for
    assert ran == [(0, 1)]


def test_idle_threads_take_no_time(pool):
    pool.start(3)
    pool.run(lambda *_: None)
    time.sleep(0.01)  # they fall asleep
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_woken_threads_take_the_next_job_and_fall_asleep_without_one(pool, c_library):
    c_library.wake_threads()  # none are there
    pool.start(3)
    for pause in (0.0, 0.01):
        pool.run(lambda *_: None)
        time.sleep(0.01)  # they fall asleep
        c_library.wake_threads()
        time.sleep(pause)  # and again
        ran = []
        pool.run(lambda thread, _, ran=ran: ran.append(thread))
        assert sorted(ran) == [0, 1, 2]
    time.sleep(0.01)
    c_library.wake_threads()
    time.sleep(0.01)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


def test_more_threads_than_cores_beside_busy_processes(pool):
    """Those who wait give their core to whom they wait for: else each run takes slices of the scheduler."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        pool.start(2 * len(os.sched_getaffinity(0)))
        ran = []
        for _ in range(40):
            pool.run(lambda thread, _: (pool.barrier(), ran.append(thread)))
        assert len(ran) == 40 * 2 * len(os.sched_getaffinity(0))
    finally:
        for process in busy:
            process.kill()
            process.wait()


def test_a_forked_child_runs_jobs_alone_and_may_start_its_own():
    """The test runs in a process of its own: pytest's has threads that do not survive a fork."""
    code = """
import os, sys
from kernels.cpu.library import load_cpu_library
from tests.kernels.cpu.test_pool import Pool
pool = Pool(load_cpu_library())
pool.start(3)
pool.run(lambda *_: None)
def counts():
    ran = []
    pool.run(lambda thread, of: ran.append(of))
    return ran
child = os.fork()
if child == 0:
    ran = [counts()]
    pool.start(2)
    ran.append(counts())
    pool.stop()
    os._exit(0 if ran == [[1], [2, 2]] else 9)
assert os.waitpid(child, 0)[1] == 0
assert counts() == [3, 3, 3]
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", placed(code)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_every_number_is_taken_once_between_two_barriers(pool):
    """A thread's numbers are taken by any thread; they start again after a barrier and in the next job."""
    pool.start(3)
    taken = [[[] for _ in range(3)] for _ in range(3)]  # [part][owner]

    def job(thread, num_threads):
        for part in taken[:2]:
            for _ in range(20):
                for owner in range(num_threads):
                    part[owner].append(pool.take(owner))
            pool.barrier()

    pool.run(job)
    pool.run(lambda thread, of: taken[2][thread].extend(pool.take(thread) for _ in range(60)))
    assert all(sorted(numbers) == list(range(60)) for part in taken for numbers in part)


def test_a_thread_next_to_the_pool_runs_its_jobs_alone(pool, c_library):
    """It neither waits for the pool's job nor replaces the pool's threads; so weights are packed next to a step."""
    pool.start(2)
    alone, is_over = [], threading.Event()

    def work() -> None:
        with c_library.alone():
            pool.start(3)
            for _ in range(20):
                pool.run(lambda thread, of: (pool.barrier(), alone.append((thread, of))))
        is_over.set()

    def wait(thread: int, of: int) -> None:
        if thread == 0:
            other = threading.Thread(target=work)
            other.start()
            assert is_over.wait(10), "it waits for this job"
            other.join()

    pool.run(wait)
    assert alone == [(0, 1)] * 20
    ran = []
    pool.run(lambda thread, of: ran.append((thread, of)))
    assert sorted(ran) == [(0, 2), (1, 2)]


@pytest.mark.parametrize(("num_threads", "left"), [(1, 1), (2, 1), (3, 2)])
def test_a_lent_core_leaves_the_pool_between_two_steps(pool, c_library, num_threads, left):
    """Weights are read on it. Jobs of a step that has begun keep their threads, whose memory was sized for them."""

    def threads_of_a_job() -> list[tuple[int, int]]:
        ran: list[tuple[int, int]] = []
        pool.run(lambda thread, of: ran.append((thread, of)))
        return sorted(ran)

    pool.start(num_threads)
    all_threads = [(thread, num_threads) for thread in range(num_threads)]
    with c_library.lent_core():
        assert threads_of_a_job() == all_threads
        c_library.wake_threads()
        assert threads_of_a_job() == [(thread, left) for thread in range(left)]
    assert len(threads_of_a_job()) == left
    c_library.wake_threads()
    assert threads_of_a_job() == all_threads


def test_a_pool_that_was_never_started_stays_so(pool, c_library):
    before = threads_of_process()
    c_library.wake_threads()
    assert threads_of_process() == before
