"""Supervisor: the states of an engine's life under a virtual clock."""

from frontend.engine.death import Cause, Death
from frontend.engine.restart_policy import RestartRules
from frontend.engine.supervisor import State, Supervisor

KILLED = Death(Cause.KILLED, "(1) was killed by SIGKILL")
ENDED = Death(Cause.ENDED, "(1) exited with code 0")


def ready() -> Supervisor:
    supervisor = Supervisor(RestartRules())
    supervisor.on_start()
    supervisor.on_ready(0.0)
    return supervisor


def test_a_death_is_followed_by_a_start() -> None:
    supervisor = ready()
    for time, delay in ((1.0, 0.0), (2.0, 0.1), (3.0, 0.5)):
        supervisor.on_death(KILLED, time)
        assert supervisor.state is State.WAITING
        assert abs(supervisor.start_in_s(time) - delay) < 1e-9
        assert supervisor.start_in_s(time + 9) == 0.0
        supervisor.on_start()
        assert supervisor.state is State.STARTING
        supervisor.on_ready(time)
        assert supervisor.state is State.READY
    assert supervisor.num_deaths == 3


def test_deaths_while_it_starts_count_too() -> None:
    supervisor = ready()
    for number in range(5):
        supervisor.on_death(KILLED, float(number))
        assert supervisor.state is State.WAITING
        supervisor.on_start()
    supervisor.on_death(KILLED, 5.0)
    assert supervisor.state is State.ENDED
    assert "which is the limit" in supervisor.text


def test_an_end_on_purpose() -> None:
    supervisor = ready()
    supervisor.on_drain()
    supervisor.on_death(ENDED, 1.0)
    assert supervisor.state is State.ENDED
    assert supervisor.num_deaths == 0
    assert not supervisor.take_drain(100.0)


def test_an_engine_that_was_told_twice_is_not_started_again() -> None:
    """Not after a death by another cause, and not while a start is due."""
    supervisor = ready()
    supervisor.on_drain()
    assert not supervisor.is_stopped
    supervisor.on_drain()
    supervisor.on_death(KILLED, 1.0)
    assert (supervisor.state, supervisor.restarts) == (State.ENDED, {})
    assert supervisor.text == "(1) was killed by SIGKILL; it was told to stop, so it is not restarted"
    supervisor = ready()
    supervisor.on_death(KILLED, 1.0)
    supervisor.on_drain()
    supervisor.on_drain()
    assert supervisor.is_stopped
    supervisor.give_up()
    assert supervisor.state is State.ENDED


def test_an_engine_that_dies_while_it_drains_comes_back_and_drains() -> None:
    """Its requests were accepted: they finish first."""
    supervisor = ready()
    supervisor.on_drain()
    assert not supervisor.take_drain(0.5), "the process was told already"
    supervisor.on_death(KILLED, 1.0)
    assert supervisor.state is State.WAITING
    supervisor.on_start()
    supervisor.on_ready(2.0)
    assert not supervisor.take_drain(3.9), "its clients are still coming back"
    assert supervisor.take_drain(4.0)
    assert not supervisor.take_drain(5.0), "once"
    supervisor.on_death(ENDED, 6.0)
    assert supervisor.state is State.ENDED
