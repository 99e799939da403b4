"""A runner whose steps sample behind drafts, right ones and wrong ones: streams are those of one token a step."""

from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest

from core.batch.table import BatchTable
from core.engine import EngineCore
from core.execution.runner_table import RunnerTable
from core.runner.accepted import accepted
from ipc.options.config import EngineConfig
from ipc.wire.messages import AddRequest, FinishReason, Outputs
from kernels.elements import BFLOAT16, FLOAT32, Dtype
from tests.core.driving import add_message, small_config
from tests.core.hostile_drafts import speculative, use
from tests.core.runner.invariance import Recorder, RecordingExecutor, tiny_model
from tests.core.scheduling.test_token_counts_of_results import int32s
from tests.core.test_several_tokens import Found, take_logprobs, take_rows

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "top_k": 9, "min_tokens": 12, "stop_token_ids": list(range(0, 60, 3))},
    {"temperature": 0.0, "presence_penalty": 1.1, "logprobs": 1, "prompt_logprobs": 1},
    {"temperature": 0.0, "logit_bias": {3: 2.0, 9: 1.0}, "bad_words_token_ids": [[3, 9], [9, 3], [5]]},
]


def messages() -> list[AddRequest]:
    return [
        add_message(seed, [(7 * seed + place) % 60 for place in range(9 + seed)], 30, seed=seed, **OPTIONS[seed % 6])
        for seed in range(12)
    ]


#: Tokens by number: each request has a number, and a seed, of its own.
Streams = dict[int, list[int]]


def run(config: EngineConfig, dtype: Dtype, plain: Streams | None) -> tuple[Found, EngineCore]:
    """plain: the streams that drafts are made from, a third of them wrong; None: no drafts."""
    recorder = Recorder(tiny_model(dtype), config)
    engine = EngineCore(config, RecordingExecutor(recorder))
    recorder.scheduler = engine.scheduler
    if plain is not None:
        use(engine.scheduler, "random", lambda table: partial(next_tokens, plain, table), 60)
    found, pending = Found(), messages()
    while pending or engine.has_work:
        replies = engine.step([(0, message) for message in pending[:2]], 0)
        engine.scheduler.check_integrity()
        pending = pending[2:]
        for _, reply in replies:
            assert isinstance(reply, Outputs), reply
            take_rows(reply, found)
            take_logprobs(reply, found)
    for key, entries in found.items():
        if key[2] == "logprobs":  # those of a prompt are said again where its request was preempted
            found[key] = sorted(set(entries))
    return found, engine


def next_tokens(plain: Streams, table: BatchTable, row: int, count: int) -> list[int]:
    first = int(table.num_tokens[row] - table.num_prompt_tokens[row])
    return plain[int(table.number[row])][first : first + count]


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_streams_are_those_of_one_token_a_step(mode: str, dtype: Dtype) -> None:
    """Tokens, ends and log probabilities, bit for bit, beside rows with other options and among preemptions."""
    config = msgspec.structs.replace(
        small_config(24, 8, max_num_seqs=6, budget=40, max_model_len=80), logprobs_mode=mode
    )
    expected, one = run(config, dtype, None)
    plain = {
        key[0]: [entry for entry in entries if isinstance(entry, int)]
        for key, entries in expected.items()
        if key[2] == "row"
    }
    config = msgspec.structs.replace(config, speculative_config=speculative())
    found, engine = run(config, dtype, plain)
    assert found == expected
    stats = engine.scheduler.stats
    assert 100 < stats.num_accepted_tokens < stats.num_draft_tokens - 50
    assert stats.num_steps < one.scheduler.stats.num_steps
    assert {entries[-1][0] for key, entries in found.items() if key[2] == "row"} == {
        FinishReason.LENGTH,
        FinishReason.STOP,
    }


def test_accepted_are_the_samples_up_to_the_first_wrong_draft() -> None:
    table = RunnerTable(5, 16)
    for row in range(5):
        table.append_tokens(np.array([row]), int32s(40))
    rows = np.array([0, 0, 0, 1, 2, 2, 2, 3, 3, 4, 4])
    table.write_drafts(np.array([0, 2, 3, 4]), int32s(7, 8, 7, 8, 7, 7), np.array([2, 2, 1, 1]))
    offsets = np.array([0, 1, 2, 0, 0, 1, 2, 0, 1, 0, 1])
    sampled = int32s(7, 8, 9, 5, 7, 1, 2, 7, -1, -1, 7)
    kept = accepted(rows, offsets, sampled, table)
    assert kept.tolist() == [True, True, True, True, True, True, False, True, False, True, False]
