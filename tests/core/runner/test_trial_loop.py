"""The trial loop: steps of a machine whose host and device take known times, by its own clock."""

from dataclasses import dataclass, field

import pytest

from core.execution.executor import StepCosts
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.runner.trial_loop import ENGINE_NS, MOST_TOKENS, LoopDurations, TrialLoop, loop_costs
from ipc.tables.arrays import NO_INT32S

TICK = 1000  # ns that reading the clock takes


@dataclass
class Machine:
    """Launching a step takes host_ns, the device device_ns and draft_ns for each draft."""

    host_ns: int
    device_ns: int
    draft_ns: int = 0
    now: int = 0
    free_at: int = 0  # when the device has finished all
    plans: list[SchedulerOutput] = field(default_factory=list)

    def clock(self) -> int:
        self.now += TICK
        return self.now

    def begin(self, plan: SchedulerOutput) -> "Step":
        self.now += self.host_ns
        self.plans.append(plan)
        num_drafts = int(plan.num_draft_tokens.sum())
        self.free_at = max(self.free_at, self.now) + self.device_ns + num_drafts * self.draft_ns
        return Step(self, self.free_at)


@dataclass
class Step:
    machine: Machine
    ends_at: int

    def result(self) -> ModelRunnerOutput:
        self.machine.now = max(self.machine.now, self.ends_at)
        return ModelRunnerOutput(0, NO_INT32S)


def measured(machine: Machine, most_tokens: int = MOST_TOKENS, most_verified: int = 100) -> LoopDurations:
    return TrialLoop(machine, NO_INT32S, most_tokens, most_verified, used=machine.clock).measure()


@pytest.mark.parametrize(("host_ns", "device_ns"), [(1_000_000, 800_000), (1_000_000, 6_000_000), (300_000, 0)])
def test_plain_steps_take_the_longer_of_both_and_verifying_ones_both(host_ns: int, device_ns: int) -> None:
    machine = Machine(host_ns, device_ns, draft_ns=1000)
    got, slack = measured(machine), 5 * TICK
    assert got.plain_ns == pytest.approx(max(host_ns + ENGINE_NS, device_ns), abs=slack)
    assert got.verifying_ns == pytest.approx(host_ns + ENGINE_NS + device_ns + 7000, abs=slack)
    assert got.num_tokens == 8


@pytest.mark.parametrize(("most_tokens", "most_verified"), [(4, 100), (5, 100), (9, 100), (33, 5), (33, 1)])
def test_no_more_tokens_than_there_is_room_for(most_tokens: int, most_verified: int) -> None:
    """Even if all drafts are right."""
    machine = Machine(1_000_000, 500_000)
    got, length = measured(machine, most_tokens, most_verified), 0
    for plan in machine.plans:
        length = (0 if plan.added else length) + int(plan.num_scheduled_tokens.sum())
        assert length <= most_tokens
        assert plan.num_draft_tokens.sum() < max(2, most_verified)
    assert got.plain_ns == pytest.approx(1_000_000 + ENGINE_NS, abs=5 * TICK)
    assert got.num_tokens == min(8, most_tokens - 1, max(2, most_verified))


def test_each_trial_begins_with_a_fresh_row_and_the_last_plan_removes_it() -> None:
    machine = Machine(10, 10)
    loop = TrialLoop(machine, NO_INT32S, MOST_TOKENS, 8, used=machine.clock)
    assert loop.end().removed_rows.tolist() == []
    loop.measure()
    starts = [plan for plan in machine.plans if plan.added]
    assert [plan.removed_rows.tolist() for plan in starts] == [[]] + [[0]] * 15, "twice untimed, and seven rounds"
    assert loop.end().removed_rows.tolist() == [0]
    assert loop.end().is_empty


def test_a_slow_model_is_not_measured_for_long() -> None:
    machine = Machine(1_000_000, 100_000_000)
    measured(machine)
    assert machine.now < 5_000_000_000


def test_a_host_that_bounds_steps_makes_all_sizes_as_long() -> None:
    costs = loop_costs(LoopDurations(1330, 2940, 8), (1000, 1010, 1020, 1100, 1300), (700, 710, 720, 800, 1400))
    assert costs == StepCosts((1330, 1330, 1330, 1330, 1400), 0, (2840, 2850, 2860, 2940, 3140))
