"""n > 1: the choices of one message, with one prompt in the cache, numbers of their own and one end."""

from typing import Any

import msgspec
import numpy as np
import pytest

from core.engine import EngineCore
from core.executors.fake import choice_seed
from core.inputs import EngineReply
from ipc.wire.messages import Abort, AddRequest, ErrorCode, FinishReason, Outputs, RequestFailed
from kernels.elements import FLOAT32
from tests.columns import pack_numbers
from tests.core.driving import VOCAB_SIZE, PagedExecutor, add_message, small_config
from tests.core.runner.invariance import neighbours, recorded_engine, tiny_model
from tests.fake_tokens import fake_tokens
from tests.resolved import resolved_config

Choices = dict[tuple[int, int], list[int]]


class Client:
    """Tokens and ends by (number, choice)."""

    def __init__(self) -> None:
        self.tokens: Choices = {}
        self.finish: dict[tuple[int, int], FinishReason] = {}
        self.failed: list[RequestFailed] = []
        self.started: list[list[int]] = []

    def take(self, replies: list[tuple[int, EngineReply]]) -> None:
        for _, reply in replies:
            if isinstance(reply, RequestFailed):
                self.failed.append(reply)
            elif isinstance(reply, Outputs):
                self._take(reply)

    def _take(self, reply: Outputs) -> None:
        numbers = np.frombuffer(reply.numbers, "<u4").tolist()
        choices = np.frombuffer(reply.choices, "<u2").tolist() if reply.choices else [0] * len(numbers)
        positions, counts = np.frombuffer(reply.positions, "<u4").tolist(), np.frombuffer(reply.counts, "<u2").tolist()
        tokens, finish = list(np.frombuffer(reply.tokens, "<i4").tolist()), reply.finish or bytes(len(numbers))
        for number, choice, position, count, code in zip(numbers, choices, positions, counts, finish, strict=True):
            have = self.tokens.setdefault((number, choice), [])
            assert position == len(have)
            assert (number, choice) not in self.finish
            have += [tokens.pop(0) for _ in range(count)]
            if code:
                self.finish[number, choice] = FinishReason(code)
        self.started += np.frombuffer(reply.started, "<u4").reshape(-1, 2).tolist()


def engine(**options: Any) -> EngineCore:
    config = small_config(**options)
    return EngineCore(config, PagedExecutor(config))


def run(core: EngineCore, *messages: AddRequest) -> Client:
    client, inbox = Client(), [(0, message) for message in messages]
    while inbox or core.has_work:
        client.take(core.step(inbox, 0))
        core.scheduler.check_integrity()
        inbox = []
    pool = core.scheduler.pool
    assert (pool.num_free, pool.num_fenced) == (pool.num_blocks - 1, 0)
    return client


def expected(message: AddRequest, choice: int) -> list[int]:
    prompt = np.frombuffer(message.prompt_token_ids, "<i4").tolist()
    assert message.params.max_tokens is not None
    return fake_tokens(prompt, message.params.max_tokens, VOCAB_SIZE, choice_seed(message.seed, choice))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [200, 14])
def test_every_choice_is_the_oracles(depth: int, num_blocks: int) -> None:
    core = engine(num_blocks=num_blocks, depth=depth, budget=16)
    messages = [add_message(n, range(n, n + 11), 9, temperature=1.0, seed=n + 50, n=n % 5 + 1) for n in range(9)]
    client = run(core, *messages)
    for message in messages:
        for choice in range(message.params.n):
            assert client.tokens[message.number, choice] == expected(message, choice)
            assert client.finish[message.number, choice] == FinishReason.LENGTH
    assert len(client.tokens) == sum(message.params.n for message in messages)
    assert len({tuple(tokens) for tokens in client.tokens.values()}) == len(client.tokens)
    assert sorted(number for number, _ in client.started) == list(range(9))
    assert (core.scheduler.stats.num_preemptions > 0) == (num_blocks == 14)


def test_abort_ends_all_choices_or_the_one_that_is_named() -> None:
    core, client = engine(max_num_seqs=3), Client()
    client.take(core.step([(0, add_message(1, range(9), 50, temperature=1.0, n=4)), (0, add_message(2, [5], 50))], 0))
    client.take(core.step([(0, Abort(pack_numbers([1, 1]), b"\1\0\3\0"))], 0))  # one that runs, one that waits
    assert client.finish == {(1, 1): FinishReason.ABORT, (1, 3): FinishReason.ABORT}
    client.take(core.step([(0, Abort(pack_numbers([1, 1]), b"\1\0\7\0"))], 0))
    assert len(client.finish) == 2
    client.take(core.step([(0, Abort(pack_numbers([1])))], 0))
    assert set(client.finish) == {(1, choice) for choice in range(4)}
    assert core.scheduler.get_request_counts() == (1, 0)
    core.scheduler.check_integrity()


def test_a_number_in_use_is_refused_once() -> None:
    core, client = engine(), Client()
    message = add_message(1, range(9), 50, temperature=1.0, n=3)
    client.take(core.step([(0, message), (0, message)], 0))
    assert [failed.code for failed in client.failed] == [ErrorCode.ALREADY_EXISTS]
    assert core.scheduler.get_request_counts() == (1, 2)


def test_a_deadline_fails_all_choices_once() -> None:
    core, client = engine(max_num_seqs=2), Client()
    client.take(core.step([(0, add_message(1, range(9), 50, temperature=1.0, n=3, deadline_ms=1))], 0))
    client.take(core.step([], 2_000_000))
    assert [(failed.number, failed.code) for failed in client.failed] == [(1, ErrorCode.DEADLINE_EXCEEDED)]
    assert not core.has_work
    core.scheduler.check_integrity()


def test_one_failing_choice_fails_its_request_alone() -> None:
    config = small_config()
    message = add_message(1, [5, 6, 7], 30, temperature=1.0, n=4, seed=3)
    firsts = [expected(message, choice) for choice in range(4)]
    poison = next(token for token in firsts[2][1:] if sum(token in tokens for tokens in firsts) == 1)
    core = EngineCore(config, PagedExecutor(config, poison))
    client = run(core, message, add_message(2, [8], 30))
    assert [failed.number for failed in client.failed] == [1]
    assert list(client.finish) == [(2, 0)]


def test_delivered_tokens_of_each_choice() -> None:
    message = add_message(1, range(9), 8, temperature=1.0, n=3, seed=4)
    given = [expected(message, 0)[:5], [], expected(message, 2)]  # the last has all of its tokens
    column = [np.array(tokens, "<i4").tobytes() for tokens in given]
    client = Client()
    client.tokens = {(1, choice): list(tokens) for choice, tokens in enumerate(given)}
    core, inbox = engine(), [(0, msgspec.structs.replace(message, delivered=column))]
    while inbox or core.has_work:
        client.take(core.step(inbox, 0))
        inbox = []
    assert client.tokens == {(1, choice): expected(message, choice) for choice in range(3)}
    assert set(client.finish.values()) == {FinishReason.LENGTH}


def test_choices_of_a_model_are_their_own() -> None:
    """Bitwise the same alone, among others, preempted; and another text for each choice."""
    model, prompt = tiny_model(FLOAT32), list(range(1, 60))
    options: dict[str, Any] = {"n": 3, "temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.5}
    message = add_message(1000, prompt, 20, seed=1000, **options)

    def tokens(num_blocks: int, others: list[tuple[int, AddRequest]]) -> tuple[Choices, int]:
        config = resolved_config(
            max_num_seqs=16, max_num_batched_tokens=64, num_blocks_override=num_blocks, max_model_len=140
        )
        (core, _), client = recorded_engine(model, config), Client()
        inbox = [*others, (0, message)]
        while inbox or core.has_work:
            client.take(core.step(inbox, 0))
            inbox = []
        return {key: ids for key, ids in client.tokens.items() if key[0] == 1000}, core.scheduler.stats.num_preemptions

    alone, _ = tokens(100, [])
    assert len({tuple(ids) for ids in alone.values()}) == 3
    assert tokens(100, neighbours(9, 3, 30, 40)) == (alone, 0)
    squeezed, num_preemptions = tokens(12, neighbours(6, 3, 30, 40))
    assert num_preemptions > 0
    assert squeezed == alone
