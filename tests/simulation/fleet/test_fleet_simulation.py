"""Fleets under many seeds: no stream is lost, doubled or different, whatever dies; and the simulator is not tame."""

from collections import Counter
from collections.abc import Callable
from unittest.mock import patch

import msgspec
import pytest

from frontend.fleet.dispatch import Dispatch
from frontend.fleet.replicas import Replica
from frontend.fleet.requests import RoutedRequests
from tests.simulation.fleet.simulation import simulate_fleet
from tests.simulation.world import Failure

_SEEDS_PER_ITEM = 15


def play(seeds: range) -> Counter[str]:
    census: Counter[str] = Counter()
    for seed in seeds:
        census += simulate_fleet(seed).census
    return census


@pytest.mark.parametrize("item", range(2))
def test_every_stream_is_exact(item: int) -> None:
    census = play(range(_SEEDS_PER_ITEM * item, _SEEDS_PER_ITEM * (item + 1)))
    for kind in ("replica killed", "router killed", "KillClient", "moved", "Cut", "abort"):
        assert census[kind] > 0, f"{kind} never happened: {census}"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("item", range(10))
def test_10_000_requests(item: int) -> None:
    """Ten items of some 1,030 requests each."""
    census = play(range(1000 + 225 * item, 1000 + 225 * (item + 1)))
    assert census["requests"] > 900, census


def forget_what_was_delivered(self: RoutedRequests, row: int, now: float) -> list[msgspec.Struct]:
    return [self.request(self.ticket(row))]


def keep_the_ticket(self: RoutedRequests, row: int) -> int:
    return self.ticket(row)


def lose_nobody(self: Dispatch, replica: Replica) -> list[int]:
    right_lose(self, replica)
    return []


right_lose = Dispatch.lose


@pytest.mark.parametrize(
    ("place", "name", "bug", "seed"),
    [
        (RoutedRequests, "messages", forget_what_was_delivered, 44),
        (RoutedRequests, "renew_ticket", keep_the_ticket, 12),
        (Dispatch, "lose", lose_nobody, 1),
    ],
)
def test_a_planted_bug_is_caught(place: type, name: str, bug: Callable[..., object], seed: int) -> None:
    """seed: the first that catches it, or another near it."""
    with patch.object(place, name, bug), pytest.raises((Failure, AssertionError, KeyError)):
        play(range(max(0, seed - 2), seed + 6))
