"""Penalties, logit_bias, allowed tokens, bad words and min_tokens: from plans to tokens, against a plain reference."""

import math
import random
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

from core.execution.plan import NewRow, SchedulerOutput
from core.execution.runner_table import RunnerTable
from core.sampling.columns import SamplingColumns
from core.sampling.logit_edits import apply_edits, edit_groups
from core.sampling.penalties import TokenCounts
from core.sampling.sampler import NOT_A_TOKEN, sample
from core.sampling.xtc import XTC
from ipc.params.sampling_params import SamplingParams
from kernels.gumbel import noise, philox4x32

VOCAB_SIZE = 60
EOS = 7


def int32s(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Rows:
    """A runner without a model: rows that are given random logits and sample."""

    def __init__(self) -> None:
        self.table = RunnerTable(NUM_ROWS, 16)
        self.columns = SamplingColumns(NUM_ROWS, edit_groups(NUM_ROWS, (EOS,)))
        self.num_steps = 0

    def start(self, row: int, params: SamplingParams, prompt: list[int], output: list[int] | None = None) -> None:
        ids = int32s(*prompt, *(output or []))
        new = NewRow(row, ids, len(prompt), 0, int32s(1), params, seed=row)
        self.table.apply(SchedulerOutput(0, int32s(), [new], int32s(), int32s(), int32s(), int32s()))
        self.columns.add(new)

    def stop(self, row: int) -> None:
        self.table.apply(SchedulerOutput(0, int32s(row), [], int32s(), int32s(), int32s(), int32s()))
        self.columns.remove(row)

    def step(self, rows: list[int], logits: np.ndarray) -> list[int]:
        """logits [len(rows), VOCAB_SIZE]"""
        index = np.array(rows)
        tokens = sample(logits.copy(), self.columns.inputs(index, self.table))
        finite = tokens >= 0
        self.table.append_tokens(index[finite], tokens[finite])
        self.columns.append_tokens(index[finite], tokens[finite])
        return tokens.tolist()


def edited(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """One row, option after option, as its definition says."""
    logits = logits.astype(np.float32).copy()
    for token in range(len(logits)):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            logits[token] = -np.inf
    for word in params.bad_words_token_ids or []:
        if len(output) >= len(word) - 1 and output[len(output) - len(word) + 1 :] == word[:-1]:
            logits[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        logits[[*([] if params.ignore_eos else [EOS]), *(params.stop_token_ids or [])]] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    last = params.repeat_last_n
    window = [] if last == 0 else [*prompt, *output][-last:]
    counts = Counter(output if last < 0 else window)
    for token in {*prompt, *output} if last < 0 else {*window}:
        repetition = np.float32(params.repetition_penalty)
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token, count in counts.items():
        logits[token] -= np.float32(params.frequency_penalty) * np.float32(count)
        logits[token] -= np.float32(params.presence_penalty)
    if params.top_n_sigma > 0:
        known = logits[np.isfinite(logits)].astype(np.float64)
        deviation = np.sqrt(((known - known.sum() / len(known)) ** 2).sum() / len(known))
        logits[logits < known.max() - params.top_n_sigma * deviation] = -np.inf
    return without_untypical(logits, params) if params.typical_p < 1 else logits


def without_untypical(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Typical, as its definition says: behind top_k, over probabilities."""
    known = [token for token in range(len(logits)) if np.isfinite(logits[token])]
    if 0 < params.top_k < len(known):
        least = sorted(logits[known])[-params.top_k]
        known = [token for token in known if logits[token] >= least]
    largest = float(max(logits))
    weights = {token: math.exp(float(logits[token]) - largest) for token in known}
    total = sum(weights.values())
    surprise = {token: -math.log(weight / total) for token, weight in weights.items()}
    probability = {token: math.exp(-one) for token, one in surprise.items()}
    entropy = sum(probability[token] * surprise[token] for token in known)
    left = np.full_like(logits, -np.inf)
    together = 0.0
    for token in sorted(known, key=lambda token: abs(surprise[token] - entropy)):
        left[token] = logits[token]
        together += probability[token]
        if together > params.typical_p:
            break
    return left


def without_top_choices(logits: np.ndarray, params: SamplingParams, seed: int, position: int) -> np.ndarray:
    """Xtc, as its definition says; the logits are those that filters have left."""
    counter = np.array([[position, 0, XTC, 0]], np.uint32)
    if philox4x32(np.array([seed], np.uint64), counter)[0, 0] / 2**32 >= params.xtc_probability:
        return logits
    weights = np.exp(logits.astype(np.float64) - logits.max())
    bound = np.float32(params.xtc_threshold) * weights.sum()
    likely = [token for token, weight in enumerate(weights.tolist()) if weight > 0 and weight >= bound]
    logits = logits.copy()
    logits[sorted(likely, key=lambda token: (-logits[token], token))[:-1]] = -np.inf
    return logits


def draw(logits: np.ndarray, params: SamplingParams, seed: int, position: int) -> int:
    """Top choices excluded, temperature, then the largest sum with the same noise."""
    logits = without_top_choices(logits, params, seed, position)
    if params.temperature == 0:
        return int(np.argmax(logits))
    tokens = np.arange(len(logits))[None]
    numbers = noise(np.array([seed], np.uint64), np.array([position]), np.array([0]), tokens)[0]
    return int(np.argmax(logits / np.float32(params.temperature) + numbers))


EVERYTHING: dict[str, Any] = {
    "allowed_token_ids": [1, 4, 5, 6, EOS],
    "bad_words_token_ids": [[4], [5, 6], [6, 6]],
    "logit_bias": {5: 2.0, 4: 100.0, 30: 100.0},
    "min_tokens": 4,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.3,
}
OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.25},
    {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.75},
    {"repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 0.75, "repeat_last_n": 3},
    {"repetition_penalty": 1.7, "repeat_last_n": 8192},
    {"frequency_penalty": 1.25, "repeat_last_n": 0},
    {"logit_bias": {3: 5.0, 9: -100.0, 11: 1.5}},
    {"allowed_token_ids": [2, 3, 5, EOS, 11, 13]},
    {"bad_words_token_ids": [[4], [5, 6], [6, 5, 6], [1, 1, 1], [8, 9, 10, 11]]},
    {"min_tokens": 9, "stop_token_ids": [12, 13]},
    {"top_n_sigma": 0.8},
    {"typical_p": 0.6},
    {"typical_p": 0.3, "top_n_sigma": 2.5, "repetition_penalty": 1.2},
    {"xtc_probability": 0.5, "xtc_threshold": 0.04},
    {"xtc_probability": 1.0, "top_n_sigma": 2.0, "repetition_penalty": 1.1, "allowed_token_ids": [1, 4, 5, 6, EOS]},
    {"min_tokens": 9, "ignore_eos": True},
    EVERYTHING,
    {},
]
NUM_ROWS = 4 * len(OPTIONS) + 8  # of a table in which each option meets four filters


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_equal_the_reference(options: dict[str, Any], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=None, **options)
    rng = np.random.default_rng(5)
    rows = Rows()
    prompts = {row: rng.integers(0, 20, row).tolist() for row in (1, 4, 9)}
    outputs: dict[int, list[int]] = {row: [] for row in prompts}
    for row, prompt in prompts.items():
        rows.start(row, params, prompt)
    for position in range(25):
        logits = rng.normal(0, 2, (3, VOCAB_SIZE)).astype(np.float32)
        logits[:, :14] += 3  # few tokens, so that they repeat
        got = rows.step(list(prompts), logits)
        for row, values, token in zip(prompts, logits, got, strict=True):
            expected = draw(edited(values, params, prompts[row], outputs[row]), params, row, position)
            assert token == expected, (row, position)
            outputs[row].append(token)


def test_any_mix_of_rows_that_come_and_go_equals_the_reference() -> None:
    """Rows start (with outputs: preempted before), stop, and sit a step out; each is as it would be alone."""
    random.seed(3)
    rng = np.random.default_rng(3)
    rows = Rows()
    live: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
    num_checked = 0
    for _ in range(150):
        if live and random.random() < 0.25:
            row = random.choice(sorted(live))
            rows.stop(row)
            params, prompt, output = live.pop(row)
            if random.random() < 0.5:  # preempted: starts again, at another row
                row = random.choice([row for row in range(NUM_ROWS) if row not in live])
                rows.start(row, params, prompt, output)
                live[row] = params, prompt, output
        if len(live) < 12:
            row = random.choice([row for row in range(NUM_ROWS) if row not in live])
            options = random.choice(OPTIONS)
            params = SamplingParams(temperature=random.choice([0.0, 0.8]), max_tokens=None, **options)
            live[row] = params, rng.integers(0, 20, random.randrange(1, 9)).tolist(), []
            rows.start(row, params, live[row][1])
        batch = random.sample(sorted(live), random.randrange(1, len(live) + 1))
        logits = rng.normal(0, 2, (len(batch), VOCAB_SIZE)).astype(np.float32)
        logits[:, :14] += 3
        for row, values, token in zip(batch, logits, rows.step(batch, logits), strict=True):
            params, prompt, output = live[row]
            assert token == draw(edited(values, params, prompt, output), params, row, len(output))
            output.append(token)
            num_checked += 1
    assert num_checked > 500


def test_distribution_with_edits_chi_square() -> None:
    num_draws = 1500
    options = {"allowed_token_ids": [0, 1, 2, 3, 4], "logit_bias": {1: 1.0}, "repetition_penalty": 1.5}
    params = SamplingParams(temperature=0.8, max_tokens=None, bad_words_token_ids=[[3]], **options)
    logits = np.linspace(-1, 2, VOCAB_SIZE, dtype=np.float32)[::-1].copy()
    expected = np.exp(edited(logits, params, [0, 2], []).astype(np.float64) / 0.8)
    expected *= num_draws / expected.sum()
    rows = Rows()
    rows.start(0, params, [0, 2])
    one = rows.columns.inputs(np.array([0]), rows.table)
    counts = np.zeros(VOCAB_SIZE)
    for position in range(num_draws):
        inputs = one._replace(position=np.array([position]))
        counts[sample(logits[None].copy(), inputs)[0]] += 1
    allowed = expected > 0
    assert allowed.sum() == 4
    assert counts[~allowed].sum() == 0
    statistic = ((counts - expected)[allowed] ** 2 / expected[allowed]).sum()
    assert statistic < 16.3  # the 0.999 quantile at three degrees of freedom


def test_a_row_that_may_draw_nothing_is_reported_alone() -> None:
    rows = Rows()
    rows.start(0, SamplingParams(allowed_token_ids=[3], bad_words_token_ids=[[3]]), [1])
    rows.start(1, SamplingParams(temperature=0.0), [1])
    logits = np.zeros((2, VOCAB_SIZE), np.float32)
    logits[1, 5] = 1
    assert rows.step([0, 1], logits) == [NOT_A_TOKEN, 5]


def count_calls(rows: Rows, batch: list[int]) -> int:
    logits = np.zeros((len(batch), VOCAB_SIZE), np.float32)
    index = np.array(batch)
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        tokens = sample(logits, rows.columns.inputs(index, rows.table))
        rows.columns.append_tokens(index, tokens)
    finally:
        sys.setprofile(None)
    return calls


def test_only_rows_with_options_pay() -> None:
    """Calls: none per row, a constant number more once there is one row with options. Work: the entries of its row."""
    everything = EVERYTHING
    costs = {}
    for num_edited in (0, 1, 8):
        for num_rows in (16, 64):
            rows = Rows()
            for row in range(num_rows):
                options = everything if row < num_edited else {}
                rows.start(row, SamplingParams(temperature=0.0, max_tokens=None, **options), [1, 2, 3])
            costs[num_edited, num_rows] = count_calls(rows, list(range(num_rows)))
            edits = rows.columns.inputs(np.arange(num_rows), rows.table).edits
            assert len(edits) == (5 if num_edited else 0)
            assert max([len(column) for edit in edits for column in edit], default=0) <= 5 * num_edited
            for edit in edits:
                assert set(edit.row.tolist()) == set(range(num_edited))
    assert costs[0, 16] == costs[0, 64]
    assert costs[1, 16] == costs[1, 64] == costs[8, 64]
    assert 0 < costs[1, 64] - costs[0, 64] < 200


def test_neighbours_keep_their_bits() -> None:
    """A row with every option beside them changes no bit of the other rows' logits."""
    rows = Rows()
    rows.start(3, SamplingParams(max_tokens=None, **EVERYTHING), [1, 2, 3])
    for row in (0, 1, 2, 4):
        rows.start(row, SamplingParams(), [1])
    logits = np.random.default_rng(1).standard_normal((5, VOCAB_SIZE), np.float32)
    changed = logits.copy()
    apply_edits(changed, rows.columns.inputs(np.arange(5), rows.table).edits)
    others = [0, 1, 2, 4]
    assert np.array_equal(changed[others], logits[others])
    assert not np.array_equal(changed[3], logits[3])


def test_counts_equal_a_counter() -> None:
    rng = np.random.default_rng(0)
    counts = TokenCounts()
    outputs = {row: rng.integers(0, 9, row).tolist() for row in (0, 3, 8)}
    for row, output in outputs.items():
        counts.add(row, int32s(1, 30, 1), int32s(*output))
    for step in range(40):
        batch = np.array([3, 0, 8] if step % 2 else [8, 3])
        tokens = rng.integers(0, 40, len(batch)).astype(np.int32)
        counts.append(batch, tokens)
        for row, token in zip(batch.tolist(), tokens.tolist(), strict=True):
            outputs[row].append(token)
    expected = {(row, token): count for row in outputs for token, count in Counter(outputs[row]).items()}
    expected |= {(row, token): 0 for row in outputs for token in (1, 30) if token not in outputs[row]}
    keys = zip(counts.rows.tolist(), counts.tokens.tolist(), strict=True)
    assert dict(zip(keys, counts.counts.tolist(), strict=True)) == expected
    assert (np.diff(counts.keys) > 0).all()
    counts.remove(3)
    assert set(counts.rows.tolist()) == {0, 8}
