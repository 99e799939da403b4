"""logprobs_mode: what a request is told as log probabilities, against a plain reference, alone and whole."""

from typing import Any, get_args

import numpy as np
import pytest

from core.sampling.sampler import processed_logits, sample
from frontend.client.received_logprobs import ReceivedLogprobs
from ipc.options.config import LogprobsMode
from kernels.elements import FLOAT32
from tests.core.runner.invariance import Recorder, neighbours, recorded_engine, request, tiny_model
from tests.core.sampling.test_logprobs import PROMPT, drain, same
from tests.core.sampling.test_sampler import CASES, edited, inputs, left_by_filters
from tests.resolved import resolved_config

RAW, PROCESSED = {"raw_logprobs", "raw_logits"}, {"processed_logprobs", "processed_logits"}


def reference(logits: np.ndarray, columns: Any, row: int) -> np.ndarray:
    """The processed logits of one row: scaled where a token is left, -inf elsewhere."""
    row_logits = edited(logits, columns, row)
    if columns.temperature[row] == 0:
        return row_logits
    order, _, scaled = left_by_filters(row_logits, columns, row)
    processed = np.full(len(scaled), -np.inf, np.float32)
    processed[order] = scaled[order]
    return processed


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_processed_logits_are_those_a_token_is_drawn_from(case: dict[str, Any], ties: bool) -> None:
    logits = np.random.default_rng(5).normal(0, 3, (6, 900)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    columns = inputs(6, **case, forbidden=[(0, 3), (1, int(logits[1].argmax())), (4, 899), (4, 5000)])
    left = logits.copy()
    tokens = sample(left, columns)
    rows = np.array([4, 0, 1, 5])
    got = processed_logits(left, rows, columns)
    for one, row in zip(got, rows.tolist(), strict=True):
        assert one.tobytes() == reference(logits, columns, row).tobytes()
        assert np.isfinite(one[tokens[row]])


def run(mode: LogprobsMode, crowded: bool = False) -> tuple[ReceivedLogprobs, ReceivedLogprobs, Recorder]:
    """A request with filters and one that is greedy, both with a bias."""
    config = resolved_config(
        max_num_seqs=18, max_num_batched_tokens=60, num_blocks_override=400, max_model_len=2048, logprobs_mode=mode
    )
    engine, recorder = recorded_engine(tiny_model(FLOAT32), config)
    options: dict[str, Any] = {"logprobs": 12, "prompt_logprobs": 2, "logit_bias": {3: 4.0, 9: -2.0}}
    watched = [request(1000, PROMPT, 8, 0.6, top_k=9, min_p=0.01, **options), request(1001, PROMPT, 8, 0.0, **options)]
    received = drain(engine, [*(neighbours(16, 1, 40, 12) if crowded else ()), *watched])
    return received[1000], received[1001], recorder


@pytest.mark.parametrize("mode", get_args(LogprobsMode))
def test_whole_requests(mode: LogprobsMode) -> None:
    drawn, greedy, recorder = run(mode)
    columns = inputs(1, temperature=0.6, top_k=9, top_p=0.95, min_p=0.01), inputs(1, temperature=0.0)
    for number, received, row_columns in ((1000, drawn, columns[0]), (1001, greedy, columns[1])):
        for position, one in enumerate(received.output):
            logits = recorder.logits[number, 0, position].copy()
            if mode in PROCESSED:
                logits[[3, 9]] += np.array([4, -2], np.float32)
                logits = reference(logits[None], row_columns, 0)
            values = logits.astype(np.float64)
            if mode.endswith("logprobs"):
                values -= np.log(np.exp(values - values.max()).sum()) + values.max()
            order = np.lexsort((np.arange(len(values)), -logits))[:12]
            assert one.token_ids[1:].tolist() == order.tolist()
            assert one.rank == (logits >= logits[one.token_ids[0]]).sum()
            np.testing.assert_allclose(one.values, values[one.token_ids], atol=1e-5)
            assert (number == 1000 and mode in PROCESSED) == (not np.isfinite(one.values).all())
    crowd_drawn, crowd_greedy, _ = run(mode, crowded=True)
    assert same(crowd_drawn.output, drawn.output)
    assert same(crowd_greedy.output, greedy.output)


def test_prompts_are_told_raw_log_probabilities_in_every_mode() -> None:
    first, *others = (run(mode)[0] for mode in get_args(LogprobsMode))
    assert len(first.prompt) == len(PROMPT) - 1
    assert all(same(first.prompt, other.prompt) for other in others)
    assert not any(same(first.output, other.output) for other in others)
