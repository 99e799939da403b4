"""forward(): each client gets what is its own, under its own numbers, and nothing twice."""

import numpy as np
import pytest

from frontend.fleet.forwarding import forward, only_new
from frontend.fleet.requests import RoutedRequests
from ipc.errors import MalformedMessageError
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, FinishReason, Logprobs, Outputs
from ipc.wire.pooling_messages import Pooled
from ipc.wire.scheduling_messages import RequestEvents


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def u16(*values: int) -> bytes:
    return np.array(values, "<u2").tobytes()


def i32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def f32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


@pytest.fixture
def requests() -> RoutedRequests:
    """Tickets 1 and 3 of client 7 (its numbers 10 and 11), 2 of client 8 (its number 10, with two choices)."""
    table = RoutedRequests()
    for client, number, n in ((7, 10, 1), (8, 10, 2), (7, 11, 1)):
        params = SamplingParams(n=n, temperature=0.5, max_tokens=9)
        table.enter(client, AddRequest(number, i32(1, 2), params, seed=0), now=1.0)
    return table


def test_every_field_is_divided(requests: RoutedRequests) -> None:
    whole = Outputs(
        epoch=4,
        step=9,
        numbers=u32(1, 2, 2, 3, 99),
        positions=u32(0, 0, 0, 0, 0),
        counts=u16(2, 1, 3, 0, 1),
        tokens=i32(100, 101, 200, 210, 211, 212, 990),
        choices=u16(0, 0, 1, 0, 0),
        finish=bytes([0, 0, FinishReason.STOP, FinishReason.ABORT, 0]),
        stop_tokens=[(2, 212)],
        started=u32(1, 16, 2, 32, 99, 48),
        logprobs=Logprobs(u32(2, 1), u32(2, 2), u32(2, 1), u32(1, 3), i32(5, 6, 7), f32(-1, -2, -3), u16(1, 0)),
        events=RequestEvents(
            u32(2, 3), u16(1, 0), bytes([1, 2]), bytes([0, 3]), u32(8, 9), np.array([70, 80], "<i8").tobytes()
        ),
        drafts=u32(2, 1, 6, 5, 3, 0, 4, 4),
        pooled=Pooled(u32(3, 99), u32(2, 1), u32(2, 1), f32(1, 2, 3, 4, 9)),
    )
    parts = dict(forward(requests, only_new(requests, whole), epoch=1))
    assert set(parts) == {7, 8}
    seven, eight = parts[7], parts[8]
    assert (seven.epoch, seven.step, seven.numbers, seven.counts, seven.tokens) == (
        1,
        9,
        u32(10, 11),
        u16(2, 0),
        i32(100, 101),
    )
    assert (seven.choices, seven.finish, seven.stop_tokens) == (u16(0, 0), bytes([0, FinishReason.ABORT]), [])
    assert (seven.started, seven.drafts) == (u32(10, 16), u32(11, 0, 4, 4))
    assert seven.logprobs == Logprobs(u32(10), u32(2), u32(1), u32(3), i32(7), f32(-3), u16(0))
    assert seven.pooled == Pooled(u32(11), u32(2), u32(2), f32(1, 2, 3, 4))
    assert seven.events is not None
    assert (seven.events.numbers, seven.events.amounts, seven.events.times) == (u32(11), u32(9), np.int64(80).tobytes())
    assert (eight.numbers, eight.counts, eight.tokens) == (u32(10, 10), u16(1, 3), i32(200, 210, 211, 212))
    assert (eight.choices, eight.finish, eight.stop_tokens) == (u16(0, 1), bytes([0, FinishReason.STOP]), [(1, 212)])
    assert (eight.started, eight.drafts) == (u32(10, 32), u32(10, 1, 6, 5))
    assert eight.logprobs == Logprobs(u32(10), u32(2), u32(2), u32(1), i32(5, 6), f32(-1, -2), u16(1))
    assert eight.pooled is None


def test_a_message_of_one_client_keeps_its_columns(requests: RoutedRequests) -> None:
    whole = Outputs(4, 9, u32(3, 1), u32(0, 0), u16(1, 1), i32(5, 6))
    ((client, part),) = forward(requests, only_new(requests, whole), epoch=1)
    assert client == 7
    assert part == Outputs(1, 9, u32(11, 10), u32(0, 0), u16(1, 1), i32(5, 6))
    assert part.tokens is whole.tokens


def test_what_came_before_is_left_out(requests: RoutedRequests) -> None:
    first = Outputs(4, 9, u32(1, 3), u32(0, 0), u16(2, 1), i32(5, 6, 7))
    routed = only_new(requests, first)
    requests.apply_columns(routed.outputs, routed.columns, routed.rows, 2.0)
    again = Outputs(4, 10, u32(1, 3), u32(0, 0), u16(2, 3), i32(5, 6, 7, 8, 9))
    ((_, part),) = forward(requests, only_new(requests, again), epoch=1)
    assert (part.numbers, part.positions, part.counts, part.tokens) == (u32(11), u32(1), u16(2), i32(8, 9))
    with pytest.raises(MalformedMessageError, match="begins at position 4 of an output of which 2 tokens have arrived"):
        only_new(requests, Outputs(4, 11, u32(1), u32(4), u16(1), i32(1)))


def test_a_ticket_ends_with_its_placement(requests: RoutedRequests) -> None:
    row = requests.find(7, 10)
    ticket = requests.renew_ticket(row)
    late = Outputs(4, 9, u32(1), u32(0), u16(1), i32(5), started=u32(1, 16))
    assert [
        part for _, part in forward(requests, only_new(requests, late), epoch=1) if part.numbers or part.started
    ] == []
    now = Outputs(4, 9, u32(ticket), u32(0), u16(1), i32(5))
    assert [(client, part.numbers) for client, part in forward(requests, only_new(requests, now), epoch=1)] == [
        (7, u32(10))
    ]
