"""LifeSigns: who computes or waits for a core is loaded; who does neither, or computes without end, hangs."""

import os
import threading

from frontend.http.life_signs import MAX_BUSY_S, Effort, LifeSigns, effort_of


def looks(signs: LifeSigns, count: int, cpu_s: float, *, is_runnable: bool) -> list[str]:
    """The verdicts of `count` looks of half a second, in each of which it takes cpu_s of CPU time."""
    return [signs.look(0.5, Effort((index + 1) * cpu_s, is_runnable)) for index in range(count)]


def test_one_that_does_nothing_hangs() -> None:
    found = looks(LifeSigns(10.0), 22, 0.0, is_runnable=False)
    assert found[:20] == [""] * 20
    assert found[20] == "no sign of it for 10.5 s"


def test_a_thread_that_receives_is_no_sign_of_the_loop() -> None:
    assert looks(LifeSigns(10.0), 22, 0.01, is_runnable=False)[-1].startswith("no sign of it")


def test_one_that_waits_for_a_core_is_loaded() -> None:
    assert not any(looks(LifeSigns(10.0), 1000, 0.0, is_runnable=True))


def test_one_that_computes_is_loaded_until_it_has_an_endless_loop() -> None:
    found = looks(LifeSigns(10.0), 200, 0.5, is_runnable=True)
    first = next(index for index, why in enumerate(found) if why)
    assert first * 0.5 >= MAX_BUSY_S
    assert found[first].startswith("its loop has not turned for 60 s of CPU time")


def test_a_word_ends_the_silence() -> None:
    signs = LifeSigns(10.0)
    for index in range(1000):
        assert signs.look(0.5, Effort(index * 0.5, False)) == ""
        if index % 10 == 0:
            signs.heard()
    assert not any(looks(LifeSigns(0.0), 1000, 0.0, is_runnable=False))


def test_the_effort_of_a_process() -> None:
    before = effort_of(os.getpid())
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    while (now := effort_of(os.getpid())).cpu_s < before.cpu_s + 0.1:
        assert now.is_runnable  # this thread is
    stop.set()
    thread.join()
    assert effort_of(2**30) == Effort(0.0, False)
