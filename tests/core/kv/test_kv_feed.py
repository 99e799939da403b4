"""KV events: a router that follows them has the pool's picture after every step, and no client is held up by them."""

import random

import numpy as np
import pytest
import zmq

from core.border.inbox import Inbox
from core.border.sessions import Sessions
from core.inputs import RenewKVEvents
from core.kv import event_feed as kv_feed
from ipc.wire.kv_events import KVBlocksCleared, KVBlocksRemoved, KVBlocksStored
from ipc.wire.messages import CallDone, Goodbye, Outputs, ResetPrefixCache, decode_server_message
from ipc.wire.scheduling_messages import FollowKVEvents, KVEvents, UnfollowKVEvents
from tests.core.driving import Driver, add_message, small_config

FOLLOWER = 50


class Router:
    """content -> (parent, tokens); and how long a beginning of a prompt an engine has."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.sequences: list[int] = []

    def apply(self, message: KVEvents) -> None:
        self.sequences.append(message.sequence)
        for event in message.events:
            match event:
                case KVBlocksStored(contents, parents, token_ids, block_size):
                    tokens = np.frombuffer(token_ids, "<i4").reshape(-1, block_size).tolist()
                    columns = (np.frombuffer(contents, "<i8").tolist(), np.frombuffer(parents, "<i8").tolist(), tokens)
                    for content, parent, block in zip(*columns, strict=True):
                        assert content not in self.blocks, "stored twice"
                        self.blocks[content] = (parent, tuple(block))
                case KVBlocksRemoved(contents):
                    for content in np.frombuffer(contents, "<i8").tolist():
                        del self.blocks[content]
                case KVBlocksCleared():
                    self.blocks.clear()

    def num_cached(self, prompt: list[int], block_size: int) -> int:
        at, parent, known = 0, -1, {entry: content for content, entry in self.blocks.items()}
        while (content := known.get((parent, tuple(prompt[at : at + block_size])))) is not None:
            at, parent = at + block_size, content
        return at


def pool_picture(driver: Driver) -> dict[int, tuple[int, tuple[int, ...]]]:
    contents, parents, token_ids = driver.scheduler.pool.names.columns()
    columns = (contents.tolist(), parents.tolist(), map(tuple, token_ids.tolist()))
    return {content: (parent, block) for content, parent, block in zip(*columns, strict=True)}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_a_routers_picture_is_the_pools(seed: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with shared beginnings in a pool that evicts, with resets; the follower comes late and begins again."""
    monkeypatch.setattr(kv_feed, "MAX_SNAPSHOT_BLOCKS", 3)
    rng, router, num_removed, longest = random.Random(seed), Router(), 0, 0
    driver = Driver(small_config(24, depth=depth, max_num_seqs=4, budget=24, max_model_len=40))
    for step in range(200):
        messages: list[tuple[int, object]] = []
        if rng.random() < 0.4:
            prompt = [rng.randrange(2)] * 8 + [rng.randrange(3) for _ in range(rng.randrange(1, 16))]
            messages.append((rng.randrange(2), add_message(step, prompt, rng.randrange(1, 12))))
        if rng.random() < 0.03:
            messages.append((0, ResetPrefixCache(0)))
        if step in (40, 120):
            messages.append((FOLLOWER, FollowKVEvents(7)))
        if step == 90:
            messages.append((FOLLOWER, RenewKVEvents()))
        replies = driver.step(messages)  # type: ignore[arg-type]
        assert ((FOLLOWER, CallDone(7)) in replies) == (step in (40, 120))
        reported = [reply for client, reply in replies if isinstance(reply, KVEvents) and client == FOLLOWER]
        for message in reported:
            router.apply(message)
            num_removed += any(isinstance(event, KVBlocksRemoved) for event in message.events)
        if step >= 40:
            assert router.blocks == pool_picture(driver), step
            longest = max(longest, router.num_cached([0] * 8, 4))
        else:
            assert not reported
    assert router.sequences == list(range(len(router.sequences)))
    assert num_removed > 10
    assert longest == 8


def test_nothing_is_collected_for_nobody() -> None:
    driver = Driver(small_config())
    names = driver.scheduler.pool.names
    driver.run(add_message(1, list(range(20))))
    driver.step([(FOLLOWER, RenewKVEvents())])  # of one who does not follow
    assert names.events is None
    driver.step([(1, FollowKVEvents(1)), (2, FollowKVEvents(1))])
    assert names.events is not None
    assert driver.step([(1, UnfollowKVEvents(2))]) == [(1, CallDone(2))]
    assert names.events is not None
    driver.step([(2, Goodbye())])
    assert names.events is None


class Socket:
    """A ROUTER whose peer's queue is full or not."""

    def __init__(self) -> None:
        self.is_full = False
        self.sent: list[object] = []

    def send(self, part: bytes, flags: int) -> None:
        if self.is_full:
            raise zmq.Again
        if not flags & zmq.SNDMORE:  # else the identity
            self.sent.append(decode_server_message(part))


def test_who_does_not_read_loses_kv_events_only() -> None:
    socket, inbox = Socket(), Inbox()
    sessions = Sessions(socket, inbox, {})  # type: ignore[arg-type]
    session = sessions.open(b"i", 1, "name", is_owner=False, has_lease=False, lease_time=0.0)
    stored = KVBlocksStored(bytes(8), bytes(8), bytes(64), 16)
    outputs = [Outputs(0, step, b"\1\0\0\0", bytes([step, 0, 0, 0]), b"\1\0", b"\5\0\0\0") for step in range(3)]
    sessions.send(session, KVEvents(0, 0, 0, [stored]), 0.0)
    socket.is_full = True
    for step in range(3):
        sessions.send(session, KVEvents(0, step, 1 + step, [stored]), 0.0)
        sessions.send(session, outputs[step], 0.0)
    assert session.backlog.num_bytes < 200
    assert sessions.flush(0.0) is False
    assert inbox.drain() == []
    socket.is_full = False
    sessions.flush(0.0)
    assert inbox.drain() == [(session.client, RenewKVEvents())]
    assert socket.sent[:2] == [KVEvents(0, 0, 0, [stored]), KVEvents(0, 0, 1, [KVBlocksCleared()], True)]
    (merged,) = socket.sent[2:]
    assert isinstance(merged, Outputs)
    assert merged.tokens == b"\5\0\0\0" * 3
    sessions.send(session, KVEvents(0, 9, 9, [stored]), 0.0)
    assert socket.sent[-1] == KVEvents(0, 9, 9, [stored])
