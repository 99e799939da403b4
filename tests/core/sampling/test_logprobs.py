"""Log probabilities against a plain reference, and whole: through engine and runner, chunked, preempted, cached."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from core.engine import EngineCore
from core.executors.fake import create
from core.sampling.logprobs import gather_logprobs
from frontend.client.received_logprobs import PositionLogprobs, ReceivedLogprobs, logprob_columns_of
from ipc.wire.messages import AddRequest, Outputs
from kernels.elements import BFLOAT16, FLOAT32, rounded, to_floats
from tests.core.driving import add_message, small_config
from tests.core.runner.invariance import Recorder, neighbours, recorded_engine, request, tiny_model
from tests.resolved import resolved_config


def reference(logits: np.ndarray, token: int, num_top: int) -> tuple[int, list[int], list[float]]:
    """(rank, token ids, values) of one row."""
    values = logits.astype(np.float64)
    values = values - values.max()
    values -= np.log(np.exp(values).sum())
    order = sorted(range(len(logits)), key=lambda index: (-logits[index], index))[:num_top]
    ids = [token, *order]
    return int((logits >= logits[token]).sum()), ids, values[ids].tolist()


@pytest.mark.parametrize("ties", [False, True])
def test_logprobs_equal_the_reference(ties: bool) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (12, 900)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    tokens = rng.integers(0, 900, 12)
    tokens[:4] = logits[:4].argmax(-1)
    num_top = np.array([0, 1, 5, 20, 2**31 - 1, 0, 7, 899, 20, 3, 1, 20])
    got = gather_logprobs(logits, tokens, num_top, np.arange(12) + 3, np.arange(12) * 2)
    assert got.rows.tolist() == list(range(3, 15))
    assert got.positions.tolist() == list(range(0, 24, 2))
    start = 0
    for row, count in enumerate(got.counts.tolist()):
        rank, ids, values = reference(logits[row], int(tokens[row]), min(int(num_top[row]), 900))
        assert got.ranks[row] == rank
        assert got.token_ids[start : start + count].tolist() == ids
        assert np.abs(got.values[start : start + count] - values).max() < 1e-5
        start += count
    assert start == len(got.values)


def test_a_row_alone_has_the_bits_it_has_among_others() -> None:
    drawn = np.random.default_rng(0).standard_normal((9, 50_000), np.float32)
    logits = to_floats(rounded(drawn, BFLOAT16))  # many ties
    tokens, num_top = np.arange(9) * 1000, np.array([0, 20, 5, -1, 3, 20, 1, 2, 20]).clip(0)
    together = gather_logprobs(logits, tokens, num_top, np.arange(9), np.arange(9))
    for row in range(9):
        part = slice(row, row + 1)
        alone = gather_logprobs(logits[part], tokens[part], num_top[part], np.arange(1), np.arange(1))
        entries = np.repeat(np.arange(9) == row, together.counts)
        assert alone.values.tobytes() == together.values[entries].tobytes()
        assert alone.token_ids.tolist() == together.token_ids[entries].tolist()


def drain(engine: EngineCore, inbox: list[tuple[int, AddRequest]]) -> dict[int, ReceivedLogprobs]:
    """Every position's log probabilities as a client keeps them, by request number."""
    received = {
        message.number: ReceivedLogprobs(len(message.prompt_token_ids) // 4)
        for _, message in inbox
        if (message.params.logprobs, message.params.prompt_logprobs) != (None, None)
    }
    while inbox or engine.has_work:
        for _, message in engine.step(inbox, 0):
            assert isinstance(message, Outputs), message
            if message.logprobs is not None:
                for number, _, position, logprobs in logprob_columns_of(message.logprobs).split():
                    received[number].add(position, logprobs)
        inbox = []
    return received


def same(one: Sequence[PositionLogprobs], other: Sequence[PositionLogprobs]) -> bool:
    """Bit for bit."""
    return len(one) == len(other) and all(
        a.rank == b.rank and a.token_ids.tobytes() == b.token_ids.tobytes() and a.values.tobytes() == b.values.tobytes()
        for a, b in zip(one, other, strict=True)
    )


PROMPT = np.random.default_rng(7).integers(1, 500, 150).tolist()
WATCHED: dict[str, Any] = {"logprobs": 4, "prompt_logprobs": 2, "repetition_penalty": 1.2}


def run(
    budget: int = 512, num_blocks: int = 400, others: Sequence[tuple[int, AddRequest]] = (), first: bool = False
) -> tuple[ReceivedLogprobs, Recorder, EngineCore]:
    config = resolved_config(
        max_num_seqs=17,
        max_num_batched_tokens=budget,
        num_blocks_override=num_blocks,
        max_model_len=min(2048, (num_blocks - 1) * 16),
    )
    engine, recorder = recorded_engine(tiny_model(FLOAT32), config)
    if first:
        drain(engine, [request(1, PROMPT, 3, 0.0)])
    received = drain(engine, [*others, request(1000, PROMPT, 24, 0.8, **WATCHED)])
    return received[1000], recorder, engine


def test_whole_requests_however_they_run() -> None:
    alone, recorder, _ = run()
    assert (len(alone.prompt), len(alone.output)) == (149, 24)
    for position, logprobs in enumerate(alone.output):
        logits = recorder.logits[1000, 0, position]
        rank, ids, values = reference(logits, int(logprobs.token_ids[0]), 4)
        assert (logprobs.rank, logprobs.token_ids.tolist()) == (rank, ids)
        assert np.abs(logprobs.values - values).max() < 1e-5
    assert [logprobs.token_ids[0] for logprobs in alone.prompt] == PROMPT[1:]
    assert {len(logprobs.values) for logprobs in alone.prompt} == {3}
    crowd, _, _ = run(others=neighbours(16, 1, 100, 30))
    chunked, _, _ = run(budget=37)
    squeezed, _, engine = run(budget=60, num_blocks=19, others=neighbours(9, 3, 30, 60))
    assert engine.scheduler.stats.num_preemptions > 0
    warm, _, engine = run(first=True)
    assert engine.scheduler.stats.prefix_cache_hits == 0, "the prompt was not computed from its start"
    for got in (crowd, chunked, squeezed, warm):
        assert same(got.prompt, alone.prompt)
        assert same(got.output, alone.output)


def test_prompt_logprobs_are_those_of_a_forced_continuation() -> None:
    """The log probability of prompt token p is that of sampling it after the first p tokens."""
    alone, _, _ = run()
    config = resolved_config(max_num_seqs=4, max_num_batched_tokens=64, num_blocks_override=50, max_model_len=200)
    engine, _ = recorded_engine(tiny_model(FLOAT32), config)
    for length in (1, 16, 37, 149):
        options: dict[str, Any] = {"allowed_token_ids": [PROMPT[length]], "logprobs": 2}
        forced = drain(engine, [request(length, PROMPT[:length], 1, 0.8, **options)])[length]
        assert same(forced.output, alone.prompt[length - 1 : length])


@pytest.mark.parametrize("depth", [1, 2])
def test_preempted_anywhere_nothing_is_lost_or_doubled(depth: int) -> None:
    """The fake executor in a pool that holds a part of what runs; outputs of different clients."""
    results = []
    for num_blocks in (400, 16):
        config = small_config(num_blocks, budget=9, depth=depth, max_model_len=60)
        engine = EngineCore(config, executor := create(config))
        executor.initialize_cache(config)
        inbox = [
            add_message(number, range(number, 2 * number + 8), 20, logprobs=number % 3, prompt_logprobs=number % 2)
            for number in range(12)
        ]
        results.append((drain(engine, [(0, message) for message in inbox]), engine.scheduler.stats.num_preemptions))
    (unhurried, none), (squeezed, some) = results
    assert (none, some > 5) == (0, True)
    for number, received in unhurried.items():
        assert (len(received.prompt), len(received.output)) == (number + 7, 20)
        assert same(received.prompt, squeezed[number].prompt)
        assert same(received.output, squeezed[number].output)
