"""Explanations: why a request does not run, with the numbers, in each of the states that it can be in."""

from core.inputs import HoldClient
from ipc.wire.messages import CallFailed, Pause, PauseMode, Resume
from ipc.wire.scheduling_messages import Explain, Explanation, Reason, RequestExplanation, SchedulingState
from tests.core.driving import Driver, add_message, small_config
from tools.commands.explain import describe_all, describe_reason, describe_request, to_json


def ask(driver: Driver, number: int = -1, session: int = 0, client: int = 1, limit: int = 100) -> Explanation:
    """Ask as the client would, between the last step and the next one."""
    replies = driver.step([(client, Explain(3, number, session, limit))], now_ns=9 * 10**9)
    (answer,) = [reply for _, reply in replies if isinstance(reply, (Explanation, CallFailed))]
    assert isinstance(answer, Explanation), answer
    assert (answer.call, answer.session) == (3, client)
    return answer


def why(driver: Driver, number: int, session: int = 0) -> RequestExplanation:
    answer = ask(driver, number, session)
    (one,) = answer.requests
    text = "\n".join([*describe_request(one, answer), *describe_all(answer), to_json(answer)])
    assert f"{one.session}/{one.number}" in text
    return one


def test_no_row_and_behind() -> None:
    driver = Driver(small_config(60, max_num_seqs=1))
    driver.step([(1, add_message(number, [number] * 5, 30)) for number in range(3)], now_ns=4 * 10**9)
    running = why(driver, 0)
    assert (running.state, running.reason, running.last_tokens) == (SchedulingState.RUNNING, Reason.NONE, 5)
    assert (running.num_prompt_tokens, running.num_tokens, running.max_total_tokens) == (5, 6, 35)
    first, second = why(driver, 1), why(driver, 2)
    assert (first.state, first.reason, first.position) == (SchedulingState.WAITING, Reason.NO_ROW, 0)
    assert first.waited_ns == 5 * 10**9
    assert (second.reason, second.position) == (Reason.BEHIND, 1)
    assert (second.holder_session, second.holder_number) == (1, 1)


def test_no_blocks_with_the_numbers() -> None:
    driver = Driver(small_config(17, max_num_seqs=4, watermark=0.125, admission_lookahead=0))
    driver.step([(1, add_message(0, [7] * 30, 9))])
    driver.step([(1, add_message(1, [8] * 28, 9)), (2, add_message(5, [9] * 4, 9))])
    answer = ask(driver, 1)
    (one,) = answer.requests
    # 16 usable, 8 held by the first; 7 needed, and 2 must stay free.
    assert (one.reason, one.needed, one.available) == (Reason.NO_BLOCKS, 7, 6)
    assert (one.num_missing_blocks, one.num_blocks, one.num_reserve_blocks) == (7, 0, 2)
    assert (answer.num_free_blocks, answer.num_watermark_blocks, answer.num_usable_blocks) == (8, 2, 16)
    other = why(driver, 5, session=2)
    assert (other.session, other.reason, other.holder_session, other.holder_number) == (2, Reason.BEHIND, 1, 1)


def test_what_is_kept_back_beyond_what_is_free_is_not_less_than_nothing() -> None:
    driver = Driver(small_config(17, watermark=0.25, admission_lookahead=0))
    driver.step([(1, add_message(0, [7] * 53, 3)), (1, add_message(1, [8] * 4, 3))])
    driver.step()
    one = why(driver, 1, session=1)
    assert (one.reason, one.needed, one.available) == (Reason.NO_BLOCKS, 1, 0)


def test_skipped_for_the_budget() -> None:
    driver = Driver(small_config(60, budget=2, max_num_seqs=3))
    driver.step([(1, add_message(0, [1], 30)), (1, add_message(1, [2], 30))])
    driver.step([(2, add_message(0, [3], 30))])
    driver.step()
    one = why(driver, 0, session=2)
    assert (one.state, one.reason, one.available) == (SchedulingState.WAITING, Reason.NO_BUDGET, 0)
    skipping = Driver(small_config(60, budget=4, max_num_seqs=2, scheduling_policy="fair", fair_quantum=10_000))
    skipping.step([(1, add_message(0, [1] * 3, 30)), (2, add_message(0, [2] * 40, 3))])
    for _ in range(3):
        skipping.step()
    reasons = {one.reason for one in ask(skipping).requests}
    assert reasons <= {Reason.NONE, Reason.SKIPPED_BUDGET}


def test_prompts_go_first_without_chunks() -> None:
    driver = Driver(small_config(60, enable_chunked_prefill=False))
    driver.step([(1, add_message(0, [1] * 8, 30))])
    driver.step([(1, add_message(1, [2] * 8, 30))])
    one = why(driver, 0, session=1)
    assert (one.reason, one.last_tokens) == (Reason.PROMPTS_FIRST, 0)
    assert "prompts" in describe_reason(one)
    assert why(driver, 0, session=1).reason is Reason.NONE


def test_pauses_and_holds() -> None:
    driver = Driver(small_config(60, max_num_seqs=4))
    driver.step([(1, add_message(0, [1] * 5, 30)), (2, add_message(0, [2] * 5, 30))])
    driver.step([(9, Pause(1, PauseMode.NEW)), (1, add_message(1, [1], 3))])
    assert why(driver, 0).reason == Reason.NONE
    paused = why(driver, 1)
    assert (paused.state, paused.reason, paused.position) == (SchedulingState.WAITING, Reason.PAUSED, -1)
    assert ask(driver).num_unbegun == 1
    driver.step([(2, HoldClient())])
    held = why(driver, 0, session=2)
    assert (held.state, held.reason) == (SchedulingState.ON_HOLD, Reason.ON_HOLD)
    driver.step([(9, Pause(1, PauseMode.ALL))])
    assert why(driver, 0).reason == Reason.PAUSED
    answer = ask(driver)
    assert (answer.pause, answer.num_on_hold, answer.num_waiting, answer.num_running) == (2, 1, 2, 1)
    driver.step([(9, Resume(2))])
    driver.step()
    assert ask(driver).pause == 0


def test_swapped_out() -> None:
    config = small_config(9, max_num_seqs=3, watermark=0.0, preemption_mode="swap", num_swap_blocks=20)
    driver = Driver(config)
    driver.step([(1, add_message(number, [number] * 5, 20)) for number in range(3)])
    for _ in range(40):
        if driver.engine.statistics(0).num_swapped:
            break
        driver.step()
    swapped = [one for one in ask(driver).requests if one.state is SchedulingState.SWAPPED]
    assert len(swapped) > 0
    assert all(one.num_preemptions and one.num_computed_tokens for one in swapped)


def test_who_does_not_live_is_said_so() -> None:
    driver = Driver(small_config())
    ((_, answer),) = driver.step([(1, Explain(3, 17, 4))])
    assert isinstance(answer, CallFailed)
    assert answer.message == "no live request 4/17: it has ended, or never arrived"


def test_the_table_is_bounded() -> None:
    driver = Driver(small_config(60, max_num_seqs=4))
    driver.step([(1, add_message(number, [number], 30)) for number in range(20)])
    for limit, shown in ((100, (4, 16)), (6, (3, 3)), (10, (4, 6)), (1, (0, 1)), (0, (0, 0)), (-5, (0, 0))):
        answer = ask(driver, limit=limit)
        states = [one.state for one in answer.requests]
        assert (states.count(SchedulingState.RUNNING), states.count(SchedulingState.WAITING)) == shown
        assert answer.num_left_out == 20 - sum(shown)
    assert describe_all(ask(driver, limit=6))[-1] == "... and 14 more (--limit)"
