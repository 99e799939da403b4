"""EngineClient in a busy program: many requests and threads at once, and a fork in the middle of it."""

import os
import threading
import time

import numpy as np
import pytest

from frontend.client.client import EngineClient
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import Abort
from tests.placed import PREFIX


@pytest.fixture
def client(played_engine):
    with_engine = EngineClient(played_engine, name="test")
    yield with_engine
    with_engine.close()


def submit(client, *, streaming=False):
    return client.submit([1, 2, 3], SamplingParams(), seed=0, streaming=streaming)


def test_waiting_ends_in_time_whatever_others_get(client, played_engine):
    waited, other = submit(client), submit(client, streaming=True)
    ended = threading.Event()

    def feed():
        for position in range(2000):
            if ended.wait(0.005):
                return
            played_engine.feed(other, position, [1])

    feeding = threading.Thread(target=feed)
    feeding.start()
    begin = time.monotonic()
    assert not len(client.wait(np.array([waited]), timeout=0.05))
    took = time.monotonic() - begin
    ended.set()
    feeding.join()
    assert 0.05 <= took < 5.0  # the other's tokens come for ten seconds


def test_long_aborts_are_sent_in_parts(client, played_engine, monkeypatch):
    monkeypatch.setattr(f"{PREFIX}frontend.client.client.MAX_ABORTED", 2)
    numbers = [submit(client) for _ in range(3)]
    client.abort(numbers, [0, 0, 0])
    assert [(np.frombuffer(one.numbers, "<u4").tolist(), one.choices) for one in played_engine.sent(Abort)] == [
        ([0, 1], bytes(4)),
        ([2], bytes(2)),
    ]


def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not(client, monkeypatch):
    number = submit(client)
    with client._changed, monkeypatch.context() as forked:  # the thread held it when the process was forked
        forked.setattr(os, "getpid", lambda: 1)
        child = threading.Thread(target=client.discard, args=([number],), daemon=True)
        child.start()
        child.join(5.0)
        assert not child.is_alive()
