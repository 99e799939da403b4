"""Features at the border: put, named by requests, bounded, and gone with their session."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from core.border import feature_shelf
from core.features.store import Features
from ipc.errors import InvalidRequestError
from ipc.params.pooling_params import PoolingParams
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, ErrorCode, RequestFailed
from ipc.wire.placed_feature import PlacedFeature, placed_embeds
from ipc.wire.pooling_messages import AddPooling
from tests.core.running_engine import Running, expected, start_engine
from tests.raw_client import RawClient, request

__all__ = ["start_engine"]

Start = Callable[..., Running]
PATIENT = {"heartbeat_ms": 20_000, "lease_ms": 60_000}  # a RawClient sends no heartbeats
WIDTH = 4


def rows(value: float, count: int = 3, at: int = 1) -> PlacedFeature:
    (placed,) = placed_embeds(np.full((count, WIDTH), value, np.float32), at)
    return placed


def asks(number: int, *placed: PlacedFeature, length: int = 8, **params: int) -> AddRequest:
    message = request(number, list(range(5, 5 + length)), 6)
    changed = msgspec.structs.replace(message.params, **params)
    return msgspec.structs.replace(message, params=changed, features=[one.use for one in placed])


def test_the_engine_runs_ids_of_content(start: Start) -> None:
    """The fake executor's tokens are a function of the ids, also of those below 0."""
    running = start(features=Features(WIDTH), **PATIENT)
    with RawClient(running.address) as client:
        client.send(rows(1.0).feature, rows(2.0).feature, asks(0, rows(1.0)), asks(1, rows(2.0)), asks(2, rows(1.0)))
        first, second, third = client.finish(0, 1, 2)
        assert first == third == expected([5, -1, -1, -1, 9, 10, 11, 12], 6)
        assert second == expected([5, -2, -2, -2, 9, 10, 11, 12], 6)
        with RawClient(running.address) as other:
            other.send(rows(1.0).feature, asks(0, rows(1.0)))
            assert other.finish(0) == [first]


def test_refusals_are_of_the_request_alone(start: Start) -> None:
    running = start(features=Features(WIDTH), **PATIENT)
    with RawClient(running.address) as client:
        client.send(
            rows(1.0).feature, asks(0, rows(3.0)), asks(1, rows(1.0), prompt_logprobs=1), asks(2, rows(1.0, at=6))
        )
        for number, text in enumerate(("is missing", "prompt_logprobs need tokens", "inside the prompt")):
            failed = client.receive(RequestFailed)
            assert (failed.number, failed.code) == (number, ErrorCode.INVALID_ARGUMENT)
            assert text in failed.message
        bad = rows(float("inf"))
        client.send(bad.feature, asks(3, bad), asks(4, rows(1.0)))
        failed = client.receive(RequestFailed)
        assert (failed.number, failed.code) == (3, ErrorCode.INVALID_ARGUMENT)
        assert "not finite" in failed.message
        client.finish(4)


def test_rows_count_as_the_clients_bytes(start: Start) -> None:
    running = start(features=Features(1 << 20), max_client_bytes=40 << 20, **PATIENT)
    with RawClient(running.address) as client:
        (placed,) = placed_embeds(np.zeros((1, 1 << 20), np.float32))
        many = [msgspec.structs.replace(placed.use, position=at) for at in range(8)]
        first = msgspec.structs.replace(request(0, [5] * 8, 10_000), features=many)
        second = msgspec.structs.replace(request(1, [5] * 8, 4), features=many)
        client.send(placed.feature, first, second)
        failed = client.receive(RequestFailed)
        assert (failed.number, failed.code) == (1, ErrorCode.RESOURCE_EXHAUSTED)
        assert "max_client_bytes" in failed.message


def test_what_a_session_has_put_goes_with_it(start: Start) -> None:
    features = Features(WIDTH)
    running = start(features=features, **PATIENT)
    with RawClient(running.address) as client:
        client.send(rows(1.0).feature, asks(0))
        client.finish(0)
        assert len(features._put) == 1
    with RawClient(running.address) as client:
        client.send(asks(0))
        client.finish(0)
        while features._put:  # the engine has seen the end of the connection
            client.statistics()


def test_an_engine_without_features_refuses_them(start: Start) -> None:
    running = start(**PATIENT)
    with RawClient(running.address) as client:
        client.send(rows(1.0).feature, asks(0, rows(1.0)), asks(1))
        failed = client.receive(RequestFailed)
        assert (failed.number, failed.message) == (0, feature_shelf.NO_FEATURES)
        client.finish(1)
    pools = AddPooling(0, bytes(16), PoolingParams("embed"), features=[rows(1.0).use])
    for message in (asks(0, rows(1.0)), pools):
        with pytest.raises(InvalidRequestError, match="does not support features"):
            feature_shelf.admitted(feature_shelf.NoFeatures(), 0, message)
    plain = AddRequest(0, bytes(4), SamplingParams(), 0)
    assert feature_shelf.admitted(feature_shelf.NoFeatures(), 0, plain) is plain
