"""RestartPolicy: delays, budget and what is not tried again."""

import signal

import pytest

from frontend.engine.death import Cause, Death, classify, count_oom_kills
from frontend.engine.restart_policy import RestartPolicy, RestartRules
from ipc.wire.start_messages import EXIT_RESTART

KILLED = Death(Cause.KILLED, "(1) was killed by SIGKILL")


@pytest.mark.parametrize(
    ("code", "options", "cause"),
    [
        (0, {}, Cause.ENDED),
        (143, {}, Cause.ENDED),
        (EXIT_RESTART, {}, Cause.RESTART),
        (1, {}, Cause.FAILED),
        (2, {}, Cause.START_FAILED),
        (1, {"was_ready": False}, Cause.START_FAILED),
        (None, {"was_ready": False}, Cause.START_FAILED),
        (-signal.SIGKILL, {}, Cause.KILLED),
        (-signal.SIGKILL, {"was_ready": False}, Cause.KILLED),
        (-signal.SIGKILL, {"num_oom_kills": 1}, Cause.OUT_OF_MEMORY),
        (-signal.SIGKILL, {"was_hung": True}, Cause.HUNG),
        (-signal.SIGSEGV, {}, Cause.CRASHED),
        (-signal.SIGABRT, {}, Cause.CRASHED),
        (-signal.SIGBUS, {}, Cause.CRASHED),
        (-signal.SIGTERM, {}, Cause.KILLED),
        (-signal.SIGSEGV, {"num_oom_kills": 1}, Cause.CRASHED),
    ],
)
def test_a_death_has_a_cause(code: int | None, options: dict[str, int], cause: Cause) -> None:
    assert classify(code, "text", **{"was_ready": True} | options) == Death(cause, "text")  # type: ignore[arg-type]


def test_the_kernels_kills_for_memory_can_be_counted() -> None:
    assert count_oom_kills() >= 0


def test_the_delays_grow_and_the_budget_ends() -> None:
    policy = RestartPolicy(RestartRules())
    assert [policy.on_death(KILLED, 0.1 * number).delay_s for number in range(5)] == [0.0, 0.1, 0.5, 2.0, 5.0]
    verdict = policy.on_death(KILLED, 1.0)
    assert verdict.delay_s is None
    assert verdict.text == "(1) was killed by SIGKILL; it was restarted 5 times within 60 s, which is the limit"


def test_the_budget_is_for_a_while() -> None:
    policy = RestartPolicy(RestartRules(most=2, within_s=10.0))
    assert policy.on_death(KILLED, 0.0).delay_s == 0.0
    assert policy.on_death(KILLED, 9.0).delay_s == 0.1
    assert policy.on_death(KILLED, 10.0).delay_s == 0.1, "the first is forgotten"
    assert policy.on_death(KILLED, 10.5).delay_s is None


def test_an_end_on_purpose_is_the_end() -> None:
    assert RestartPolicy(RestartRules()).on_death(Death(Cause.ENDED, "exited with code 0"), 0.0).delay_s is None


def test_an_upgrade_and_a_search_cost_nothing() -> None:
    policy = RestartPolicy(RestartRules(most=1))
    for number in range(20):
        assert policy.on_death(Death(Cause.RESTART, ""), float(number)).delay_s == 0.0
        assert policy.on_death(KILLED, float(number), is_free=True).delay_s == 0.0
    assert policy.on_death(KILLED, 20.0).delay_s == 0.0


def test_a_start_that_fails_twice_alike_is_not_tried_again() -> None:
    policy = RestartPolicy(RestartRules())
    corrupt, other = Death(Cause.START_FAILED, "the file is truncated"), Death(Cause.START_FAILED, "no memory")
    assert policy.on_death(corrupt, 0.0).delay_s == 0.0
    assert policy.on_death(other, 1.0).delay_s == 0.1
    assert policy.on_death(corrupt, 2.0).delay_s == 0.5
    verdict = policy.on_death(corrupt, 3.0)
    assert verdict.delay_s is None
    assert verdict.text.startswith("the file is truncated; this happened twice")


def test_without_restarts_the_first_death_is_the_last() -> None:
    verdict = RestartPolicy(RestartRules(most=0)).on_death(KILLED, 0.0)
    assert verdict.delay_s is None
    assert "not restarted" in verdict.text
