"""StandbyPlan: when a standby is made and taken, under a virtual clock; and random lives of engine and standby."""

import random
from collections.abc import Callable

import pytest

from frontend.engine.death import Cause, Death
from frontend.engine.restart_policy import RestartRules
from frontend.engine.standby_plan import _DELAYS_S, StandbyPlan, StandbyState
from frontend.engine.supervisor import State, Supervisor


def test_one_is_made_a_while_after_the_engine_is_ready() -> None:
    plan = StandbyPlan(is_wanted=True)
    assert not plan.is_due(100.0), "there is no engine yet"
    plan.on_engine_ready(100.0)
    assert not plan.is_due(100.9)
    assert plan.is_due(101.0)
    plan.on_begin()
    assert not plan.is_due(200.0), "there is one"
    assert not plan.take(Cause.KILLED), "it is not prepared"
    plan.on_engine_ready(201.0)
    assert plan.is_due(202.0), "another is made for the next engine"
    plan.on_begin()
    plan.on_prepared()
    assert plan.take(Cause.CRASHED)
    assert not plan.take(Cause.CRASHED), "once"
    assert plan.num_taken == 1
    assert not plan.is_due(300.0), "the new engine does not answer yet"


def test_after_an_upgrade_the_old_one_is_not_taken() -> None:
    plan = StandbyPlan(is_wanted=True)
    plan.on_engine_ready(0.0)
    plan.on_begin()
    plan.on_prepared()
    assert not plan.take(Cause.RESTART)
    assert plan.state is StandbyState.NONE


def test_standbys_that_die_are_made_less_and_less_often() -> None:
    plan, now, waits = StandbyPlan(is_wanted=True), 0.0, []
    plan.on_engine_ready(now)
    for _ in range(6):
        while not plan.is_due(now):
            now += 0.5
        plan.on_begin()
        plan.on_end(now)
        begin = now
        while not plan.is_due(now):
            now += 0.5
        waits.append(now - begin)
    assert waits == [*_DELAYS_S, _DELAYS_S[-1], _DELAYS_S[-1]]
    now += 1000.0  # all of them are long ago
    plan.on_begin()
    plan.on_end(now)
    assert plan.is_due(now + _DELAYS_S[0])


@pytest.mark.parametrize("rules", [RestartRules(most=0), RestartRules()], ids=["no restarts", "none wanted"])
def test_none_is_made_where_none_is_wanted(rules: RestartRules) -> None:
    supervisor = Supervisor(rules, has_standby=rules.most == 0)
    supervisor.on_start()
    supervisor.on_ready(0.0)
    assert not supervisor.standby.is_due(1000.0)


def test_a_draining_engine_gets_none() -> None:
    supervisor = Supervisor(RestartRules(), has_standby=True)
    supervisor.on_start()
    supervisor.on_ready(0.0)
    supervisor.on_drain()
    assert not supervisor.standby.is_due(1000.0)


class Life:
    """What the operating system does in a random life: one engine, at most one standby, deaths of both at any time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.supervisor = Supervisor(RestartRules(most=10_000), has_standby=True)
        self.now = 0.0
        self.standby: str | None = None  # "preparing" or "prepared"
        self.made_before_upgrade = False
        self.num_quick = self.num_made = self.num_standby_deaths = 0
        self.supervisor.on_start()
        self.supervisor.on_ready(self.now)

    def turn(self) -> None:
        self.now += self.random.choice((0.01, 0.5, 3.0, 40.0))
        plan = self.supervisor.standby
        match self.random.randrange(6):
            case 0:
                self.engine_dies(self.random.choice([cause for cause in Cause if cause is not Cause.ENDED]))
            case 1 if self.standby is not None:
                self.standby = None
                self.num_standby_deaths += 1
                plan.on_end(self.now)
            case 2 if self.standby == "preparing":
                self.standby = "prepared"
                plan.on_prepared()
            case _ if self.standby is None and plan.is_due(self.now):
                self.standby, self.made_before_upgrade = "preparing", False
                self.num_made += 1
                plan.on_begin()
        assert (plan.state is StandbyState.NONE) == (self.standby is None)
        assert (plan.state is StandbyState.PREPARED) == (self.standby == "prepared")

    def engine_dies(self, cause: Cause) -> None:
        text = f"death at {self.now}"  # no two alike, or a failed start would not be tried again
        self.supervisor.on_death(Death(cause, text), self.now)
        assert self.supervisor.state is State.WAITING
        self.made_before_upgrade = cause is Cause.RESTART
        had, self.standby = self.standby, None
        is_taken = self.supervisor.take_standby()
        assert is_taken == (had == "prepared" and not self.made_before_upgrade)
        self.supervisor.on_start()
        if is_taken and self.random.random() < 0.3:  # it does not take over: a new process does, uncounted
            self.supervisor.standby.on_end(self.now)
            self.supervisor.on_start()
        self.num_quick += is_taken
        self.now += 0.01 if is_taken else 2.0
        self.supervisor.on_ready(self.now)


def live(seed: int) -> Life:
    """One life of a hundred events, after which there is a standby, or will be."""
    life = Life(seed)
    for _ in range(100):
        life.turn()
    assert life.standby is not None or life.supervisor.standby.is_due(life.now + _DELAYS_S[-1] + 1.0), seed
    return life


@pytest.mark.parametrize("num_seeds", [100, pytest.param(3000, marks=pytest.mark.soak)], ids=str)
def test_random_lives(num_seeds: int) -> None:
    """No standby is forgotten, doubled, or taken that must not be; and after all deaths there is one again."""
    num_quick = num_deaths = 0
    for seed in range(num_seeds):
        life = live(seed)
        num_quick, num_deaths = num_quick + life.num_quick, num_deaths + life.num_standby_deaths
    assert num_quick > num_seeds
    assert num_deaths > 3 * num_seeds


def one_is_taken_after_an_upgrade(patch: pytest.MonkeyPatch) -> None:
    take = StandbyPlan.take
    patch.setattr(StandbyPlan, "take", lambda plan, cause: take(plan, Cause.KILLED))


def one_is_taken_before_it_is_prepared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StandbyPlan, "on_begin", StandbyPlan.on_prepared)


def its_end_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StandbyPlan, "on_end", lambda plan, now: None)


def none_is_made_for_the_next_engine(patch: pytest.MonkeyPatch) -> None:
    ready = StandbyPlan.on_engine_ready
    patch.setattr(StandbyPlan, "on_engine_ready", lambda plan, now: None if plan.num_taken else ready(plan, now))


def a_second_one_is_made(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StandbyPlan, "on_begin", lambda plan: None)


PLANTED = (
    one_is_taken_after_an_upgrade,
    one_is_taken_before_it_is_prepared,
    its_end_is_not_noticed,
    none_is_made_for_the_next_engine,
    a_second_one_is_made,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        list(map(live, range(100)))
