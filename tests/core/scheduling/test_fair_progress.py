"""Clients whose requests take longer to bring back than the fair quantum do not preempt each other for ever."""

import pytest

from core.inputs import HoldClient, ReleaseClient
from core.scheduling.policies import Fair
from core.scheduling.virtual_time import TOKEN
from ipc.wire.messages import FinishReason, Goodbye
from tests.core.driving import Driver, add_message, small_config


@pytest.mark.parametrize("quantum", [0, 1, 8, 40])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_two_clients_on_room_for_one_both_finish(quantum: int, prefix_caching: bool) -> None:
    """Each prompt alone is more than the quantum, and the pool holds one of the requests."""
    config = small_config(
        num_blocks=17, budget=16, prefix_caching=prefix_caching, scheduling_policy="fair", fair_quantum=quantum
    )
    driver = Driver(config)
    for client in (1, 2):
        driver.step([(client, add_message(0, range(100 * client, 100 * client + 40), max_tokens=20))])
    driver.drain(limit=600)
    for client in (1, 2):
        received = driver.inbox.received[client, 0]
        assert (received.finish, len(received.tokens)) == (FinishReason.LENGTH, 20)
    assert driver.scheduler.stats.num_preemptions > 0


def test_what_is_computed_again_is_not_charged_again() -> None:
    """Client 1 goes first and is 40 tokens ahead, so client 2 takes its room; in the end each has paid its length."""
    config = small_config(num_blocks=17, budget=64, prefix_caching=False, scheduling_policy="fair", fair_quantum=10)
    driver = Driver(config)
    driver.step([(client, add_message(0, range(client, client + 40), max_tokens=20)) for client in (1, 2)])
    fair = driver.scheduler.policy
    assert isinstance(fair, Fair)
    driver.drain()
    assert driver.scheduler.stats.num_recomputed_tokens >= 40
    assert [fair._times.of(client) for client in (1, 2)] == [(40 + 19) * TOKEN] * 2  # the last is never computed


def test_a_client_on_hold_saves_up_no_claim() -> None:
    """Client 1 does not read for a while; when it does, it shares with client 0 from then on."""
    config = small_config(budget=8, max_num_seqs=2, scheduling_policy="fair", fair_quantum=4, max_model_len=300)
    driver = Driver(config)
    driver.step([(0, add_message(0, [1], 250)), (1, add_message(0, [2], 250))])
    driver.step([(1, HoldClient())])
    for _ in range(60):
        driver.step()
    driver.step([(1, ReleaseClient()), (2, add_message(0, [3], 250))])
    before = [len(driver.inbox.received[client, 0].tokens) for client in range(3)]
    for _ in range(60):
        driver.step()
    served = [len(driver.inbox.received[client, 0].tokens) - start for client, start in enumerate(before)]
    assert min(served) >= 20, served
    driver.drain()
    fair = driver.scheduler.policy
    driver.step([(1, HoldClient()), (1, Goodbye())])  # with nothing left
    assert isinstance(fair, Fair)
