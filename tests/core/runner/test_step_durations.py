"""The durations of steps: the shortest of each size, measured turn about, for a bounded time."""

from core.runner.step_durations import measure_steps


class Machine:
    """Steps that take 1 ms and 10 us for each token; now and then other work doubles a step's time."""

    def __init__(self, disturbed: set[int], factor: int = 1) -> None:
        self.now, self.sizes = 0, list[int]()
        self._disturbed, self._factor = disturbed, factor

    def step(self, size: int) -> None:
        self.now += (1_000_000 + 10_000 * size) * self._factor * (1 + (len(self.sizes) in self._disturbed))
        self.sizes.append(size)

    def clock(self) -> int:
        return self.now


def test_other_work_does_not_show() -> None:
    """It begins with the first round and ends with the third, and disturbs every third step later."""
    machine = Machine({*range(30), *range(31, 200, 3)})
    got = measure_steps(machine.step, 1000, machine.clock, machine.clock)
    assert got == tuple(1_000_000 + 10_000 * size for size in (1, 2, 4, 8, 16, 32, 64, 128))


def test_no_more_tokens_than_there_is_room_for() -> None:
    machine = Machine(set())
    assert len(measure_steps(machine.step, 9, machine.clock, machine.clock)) == 4
    assert max(machine.sizes) == 8


def test_a_slow_model_is_not_measured_for_long() -> None:
    machine = Machine(set(), factor=400)
    got = measure_steps(machine.step, 1000, machine.clock, machine.clock)
    assert got == (404_000_000, 408_000_000)
    assert machine.now < 4_000_000_000


def test_a_busy_machine_makes_no_step_look_long() -> None:
    """Time goes on three times as fast as the process computes, as on a core that three share."""
    machine = Machine(set())
    got = measure_steps(machine.step, 1000, machine.clock, lambda: 3 * machine.now)
    assert got == tuple(1_000_000 + 10_000 * size for size in (1, 2, 4, 8, 16, 32, 64, 128))
