"""Xtc, typical_p and top_n_sigma: against plain references, llama.cpp's own cases, and on a device's logits."""

from typing import Any

import numpy as np
import pytest
import torch

from core.execution.plan import NewRow
from core.execution.runner_table import RunnerTable
from core.runner.cuda_model_runner import DeviceLogits
from core.sampling.columns import SamplingColumns
from core.sampling.logit_edits import apply_edits, edit_groups
from core.sampling.sampler import SamplingInputs, processed_logits, sample
from core.sampling.top_n_sigma import NearLargest
from core.sampling.typical import MostTypical, most_typical
from core.sampling.xtc import XTC, Excluded
from ipc.options.speculation import SpeculativeConfig
from ipc.params.sampling_params import SamplingParams
from kernels import gumbel
from kernels.cpu.library import load_cpu_library
from kernels.cpu.sampling import CpuSampler
from kernels.elements import FLOAT32
from tests.core.runner.invariance import recorded_engine, request, tiny_model
from tests.core.sampling.test_logit_edits import draw, edited, int32s, without_top_choices
from tests.core.sampling.test_logprobs import drain
from tests.core.sampling.test_sampler import left_by_filters
from tests.resolved import resolved_config

VOCAB_SIZE = 700
NUM_ROWS = 24
CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3},
    {"temperature": 0.5},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 40, "top_p": 0.8},
    {"top_p": 0.9, "temperature": 1.7},
    {"min_p": 0.15},
    {"min_p": 0.02, "top_p": 0.95, "temperature": 0.7},
    {"xtc_threshold": 0.0, "top_k": 6},
    {"xtc_threshold": 0.0},
    {"xtc_threshold": 0.5},
    {"top_n_sigma": 2.0, "min_p": 0.02},
    {"typical_p": 0.9},
    {"typical_p": 0.8, "top_k": 12, "top_p": 0.9, "temperature": 0.7},
    {"typical_p": 0.7, "temperature": 0.0},
]


@pytest.fixture(scope="module")
def c_kernel() -> CpuSampler:
    return CpuSampler(load_cpu_library())


@pytest.fixture(params=[False, True], ids=["numpy", "c"])
def kernel(request: pytest.FixtureRequest, c_kernel: CpuSampler) -> CpuSampler | None:
    return c_kernel if request.param else None


def started(params: SamplingParams, num_rows: int = NUM_ROWS, choice: int = 0) -> SamplingInputs:
    """Inputs of rows with these parameters; row i has the seed i and i output tokens."""
    table = RunnerTable(num_rows, 16)
    columns = SamplingColumns(num_rows, edit_groups(num_rows, ()))
    for row in range(num_rows):
        columns.add(NewRow(row, int32s(1), 1, 0, int32s(1), params, seed=row, choice=choice))
    rows = np.arange(num_rows)
    table.num_prompt_tokens[rows] = 1
    table.num_tokens[rows] = 1 + rows
    return columns.inputs(rows, table)


def logits_of(num_rows: int = NUM_ROWS) -> np.ndarray:
    """Rows of logits with a few likely tokens, some of them equally likely."""
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 1, (num_rows, VOCAB_SIZE)).astype(np.float32)
    logits[:, rng.permutation(VOCAB_SIZE)[:9]] += np.round(rng.normal(7, 1, (num_rows, 9)), 1).astype(np.float32)
    return logits


def left_by_chain(
    logits: np.ndarray, params: SamplingParams, seed: int, position: int
) -> tuple[np.ndarray, np.ndarray]:
    """(edited logits, those that are left) of one row: the edits, each filter, then Xtc; -inf = excluded."""
    changed = edited(logits, params, [], [])
    given = started(params, 1)._replace(temperature=np.float32([params.temperature or 1]))
    filters = SamplingParams(top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    for name in ("top_k", "top_p", "min_p"):
        getattr(given, name)[:] = getattr(filters, name)
    order, _, _ = left_by_filters(changed, given, 0)
    filtered = np.full(len(changed), -np.inf, np.float32)
    filtered[order] = changed[order]
    return changed, without_top_choices(filtered, params, seed, position)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("probability", [0.4, 1.0])
def test_tokens_equal_the_reference(case: dict[str, Any], probability: float, c_kernel: CpuSampler) -> None:
    params = SamplingParams(xtc_probability=probability, max_tokens=None, **case)
    logits, inputs, never = logits_of(), started(params), SamplingParams(temperature=params.temperature)
    chains = [left_by_chain(logits[row], params, row, row) for row in range(NUM_ROWS)]
    unfiltered = [draw(changed, never, row, row) for row, (changed, _) in enumerate(chains)]
    expected = [draw(left, never, row, row) for row, (_, left) in enumerate(chains)]
    for kernel in (None, c_kernel):
        after = logits.copy()
        tokens = sample(after, inputs, kernel)
        shown = processed_logits(after, np.arange(NUM_ROWS), inputs)
        assert list(tokens) == expected, kernel  # of a greedy row, filters leave the largest
        if params.temperature > 0:
            for row, (_, left) in enumerate(chains):
                assert np.array_equal(shown[row] > -np.inf, left > -np.inf), (kernel, row)
    assert expected != unfiltered or case.get("top_k") == 1 or case.get("xtc_threshold") == 0.5


@pytest.mark.parametrize(
    "speculative_config", [None, SpeculativeConfig(method="ngram", num_speculative_tokens=3)], ids=["plain", "drafts"]
)
def test_processed_logits_of_requests_are_those_of_their_draws(speculative_config: SpeculativeConfig | None) -> None:
    """The filters are applied once, before Xtc if it happens at a token's position, also behind drafts."""
    config = resolved_config(
        100,
        512,
        executor="local",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        logprobs_mode="processed_logits",
        speculative_config=speculative_config,
    )
    engine, recorder = recorded_engine(tiny_model(FLOAT32), config)
    prompt = [5, 6, 7, 8] * 8
    options = {
        "top_p": 0.9,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.01,
        "logit_bias": {5: 5.0, 6: 5.0, 7: 5.0, 8: 5.0},
    }
    sent = request(1000, prompt, 30, 0.8, logprobs=20, **options)
    received = drain(engine, [sent])[1000]
    num_excluded = 0
    for position, one in enumerate(received.output):
        logits = recorder.logits[1000, 0, position].copy()
        logits[5:9] += 5
        params = SamplingParams(**{**options, "logit_bias": None}, temperature=0.8)
        _, left = left_by_chain(logits, params, sent[1].seed, position)
        order = [token for token in np.lexsort((np.arange(len(left)), -left))[:20].tolist() if left[token] > -np.inf]
        finite = np.isfinite(one.values[1:])
        assert one.token_ids[1:][finite].tolist() == order
        assert one.token_ids[0] in order
        num_excluded += int(logits.argmax()) not in order
    assert 5 < num_excluded < 25


#: The cases of llama.cpp's tests/test-sampling.cpp: probabilities, and which are left.
XTC_CASES = [(0.09, [0.1]), (0.19, [0.2, 0.1]), (0.29, [0.3, 0.2, 0.1]), (0.39, [0.4, 0.3, 0.2, 0.1])]


@pytest.mark.parametrize(("threshold", "left"), XTC_CASES)
def test_llama_cpps_cases_of_xtc(threshold: float, left: list[float]) -> None:
    logits = np.log(np.float32([[0.4, 0.3, 0.2, 0.1]]))
    filters = np.zeros(1, np.int64), np.ones(1, np.float32), np.zeros(1, np.float32)  # that leave all
    Excluded(np.array([0]), np.float32([threshold]), np.ones(1, np.float32), *filters).apply(logits)
    assert np.exp(logits[logits > -np.inf]).tolist() == pytest.approx(left)


@pytest.mark.parametrize(("sigma", "left"), [(1.0, [0.4, 0.3]), (3.0, [0.4, 0.3, 0.2, 0.1])])
def test_llama_cpps_cases_of_top_n_sigma(sigma: float, left: list[float]) -> None:
    logits = np.log(np.float32([[0.1, 0.2, 0.3, 0.4]]))
    NearLargest(np.array([0]), np.float32([sigma])).apply(logits)
    assert sorted(np.exp(logits[logits > -np.inf]).tolist(), reverse=True) == pytest.approx(left)


@pytest.mark.parametrize(
    ("probabilities", "left"), [([0.97, 0.01, 0.01, 0.01], [0.97]), ([0.4, 0.2, 0.2, 0.2], [0.2, 0.2, 0.2])]
)
def test_llama_cpps_cases_of_typical_p(probabilities: list[float], left: list[float]) -> None:
    logits = np.log(np.float32([probabilities]))
    MostTypical(np.array([0]), np.float32([0.5]), np.zeros(1, np.int64)).apply(logits)
    assert np.exp(logits[logits > -np.inf]).tolist() == pytest.approx(left)


def test_no_more_tokens_are_sorted_than_are_typical() -> None:
    """Whatever the bucket, and with many tokens at one distance, the tokens are those of a sort of all."""
    rng = np.random.default_rng(4)
    for spread, digits in ((0.1, 9), (1.0, 9), (3.0, 9), (0.5, 1)):
        logits = np.round(rng.normal(0, spread, 6000), digits).astype(np.float32)
        weights = np.exp(logits.astype(np.float64) - logits.max())
        below = (logits.max() - logits).astype(np.float64)
        order = np.argsort(np.abs(below - (weights * below).sum() / weights.sum()), kind="stable")
        for typical_p in (0.0, 0.02, 0.3, 0.97):
            found = most_typical(logits, typical_p)
            assert set(found.tolist()) == set(order[: len(found)].tolist())
            together = weights[found].sum() / weights.sum()
            assert together - weights[found[-1]] / weights.sum() <= typical_p < together


@pytest.mark.parametrize(
    "off",
    [
        {},
        {"typical_p": 1.0},
        {"top_n_sigma": -1},
        {"xtc_threshold": 0.2},
        {"xtc_probability": 1, "xtc_threshold": 0.51},
    ],
)
def test_what_has_no_effect_makes_no_edit(off: dict[str, Any]) -> None:
    assert started(SamplingParams(**off)).edits == ()


def test_top_choices_are_excluded_as_often_as_asked_and_apart_from_the_draw() -> None:
    params = SamplingParams(xtc_probability=0.25)
    (edit,) = started(params, 4000).edits
    assert 0.23 < len(edit.row) / 4000 < 0.27
    (other,) = started(params, 4000, choice=1).edits
    assert not np.array_equal(edit.row, other.row)  # choices have numbers of their own
    assert len({XTC, gumbel.HIGH_BITS, gumbel.LOW_BITS}) == 3


@pytest.mark.parametrize("case", [{}, {"top_k": 5, "top_n_sigma": 3.0}, {"typical_p": 0.9}])
def test_a_devices_logits_are_edited_alike(case: dict[str, Any]) -> None:
    inputs = started(SamplingParams(xtc_probability=0.5, xtc_threshold=0.05, **case))
    here, there = logits_of(), torch.from_numpy(logits_of())
    apply_edits(here, inputs.edits)
    apply_edits(DeviceLogits(there), inputs.edits)
    assert np.array_equal(here, there.numpy())
    assert not np.array_equal(here, logits_of())


def test_logits_that_are_not_finite_fail_their_row_alone(kernel: CpuSampler | None) -> None:
    inputs = started(SamplingParams(xtc_probability=1.0, top_n_sigma=3.0, typical_p=0.9, top_k=9))
    logits = logits_of()
    whole = sample(logits.copy(), inputs, kernel)
    logits[2, 5], logits[3, 7], logits[4] = np.nan, np.inf, -np.inf
    tokens = sample(logits, inputs, kernel)
    assert (tokens[2:5] < 0).all()
    assert np.array_equal(np.delete(tokens, [2, 3, 4]), np.delete(whole, [2, 3, 4]))
