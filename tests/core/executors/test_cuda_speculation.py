"""Drafts with --device cuda: with every option of a request, and with all that can happen to one on its way, tokens and
ends are those of the CPU path without drafts, at depth 1 and 2, and log probabilities nearly so. In CI the kernels run
under Triton's interpreter, where float32 products of few rows do not differ enough to change a token."""

from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from core.batch.table import BatchTable
from core.engine import EngineCore
from core.executors.cuda import most_alone
from core.inputs import EngineInput
from core.models.llama import Llama
from core.models.operations.triton_operations import TritonOperations
from core.runner import step_durations, trial_loop
from core.runner.cuda_model_runner import CudaModelRunner
from core.runner.model_runner import ModelRunner
from ipc.options.config import EngineConfig
from ipc.options.resolved import ResolvedConfig
from ipc.options.speculation import SpeculativeConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import Abort, AddRequest, FinishReason
from kernels.elements import FLOAT32
from tests.columns import pack_numbers
from tests.core.executors.test_cuda_executor import RunnerExecutor
from tests.core.hostile_drafts import KINDS, use
from tests.core.models.test_llama import random_weights, tiny_config
from tests.core.runner.heard import Heard
from tests.grammar_vocabulary import EOS, VOCAB_SIZE, make_grammars, schema, structured
from tests.resolved import resolved_config
from tests.triton_device import ANYWHERE, DEVICE

pytestmark = ANYWHERE

MAX_MODEL_LEN = 64
TARGET = 2  # the request whose log probabilities are compared
CONSTRAINED = 4  # a request whose grammar forces tokens
ABORTED = {5: 1, 7: 4, 9: 0}  # step -> request
NAMES = schema(name={"type": "string", "maxLength": 4}, age={"type": "integer", "minimum": 0, "maximum": 9})
OPTIONS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "bad_words_token_ids": [[4], [7, 8]], "min_tokens": 9},
    {"logprobs": 2, "prompt_logprobs": 1, "presence_penalty": 0.2},
    {"n": 2, "temperature": 0.8, "top_k": 30, "logit_bias": {5: 4.0, 9: -100.0}},
    {"structured_outputs": structured(json=NAMES, disable_any_whitespace=True), "ignore_eos": False, "max_tokens": 24},
    {"use_beam_search": True, "best_of": 2, "structured_outputs": structured(regex="[a-c]{4}"), "ignore_eos": False},
    {"stop_token_ids": list(range(0, VOCAB_SIZE, 9)), "min_tokens": 5},
]
GRAMMARS = make_grammars(VOCAB_SIZE)
SHORT = {"num_blocks_override": 12}
CROWDED: dict[str, dict[str, Any]] = {
    "roomy": {},
    "preempted": {**SHORT, "preemption_mode": "recompute"},
    "swapped": {**SHORT, "preemption_mode": "swap", "num_swap_blocks": 60},
    "in small chunks": {"max_num_batched_tokens": 20, "enable_prefix_caching": False},
    "aborted": {},
    "a row's tokens together": {},  # as where too many would be alone
}


def config(method: str | None, depth: int, **options: Any) -> ResolvedConfig:
    drafts = SpeculativeConfig(method=method or "ngram", num_speculative_tokens=3, prompt_lookup_min=1)
    made = resolved_config(
        executor="local",
        device="cuda",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=12,
        max_num_batched_tokens=64,
        block_size=8,
        num_blocks_override=300,
        async_scheduling=depth == 2,
        preemption_mode="recompute",
        num_swap_blocks=0,
        speculative_config=None if method is None else drafts,
    )
    return msgspec.structs.replace(made, **options)


def requests() -> list[AddRequest]:
    rng = np.random.default_rng(3)
    return [
        AddRequest(
            number,
            np.tile(rng.integers(1, 200, 4 + number, np.int32), 2).tobytes(),  # n-grams come again
            SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **options}),
            seed=number,
        )
        for number, options in enumerate(OPTIONS)
    ]


@cache
def models() -> tuple[Llama, Llama]:
    """One tiny model by torch's kernels and by Triton's."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    shape = tiny_config(vocab_size=VOCAB_SIZE, num_hidden_layers=1, eos_token_ids=(EOS,), **heads)
    operations = TritonOperations(shape, FLOAT32, DEVICE)
    weights = list(random_weights(shape, FLOAT32))
    return Llama(shape, weights, FLOAT32), Llama(shape, weights, FLOAT32, operations=operations)


def runner(settings: EngineConfig, *, on_cpu: bool) -> ModelRunner:
    options: dict[str, Any] = {
        "num_rows": settings.max_num_seqs,
        "num_blocks": settings.num_blocks_override,
        "block_size": settings.block_size,
        "eos_token_ids": (EOS,),
        "num_swap_blocks": settings.num_swap_blocks,
        "grammars": GRAMMARS,
    }
    if on_cpu:
        return ModelRunner(models()[0], **options)
    operations = models()[1].operations
    assert isinstance(operations, TritonOperations)
    options |= {"max_model_len": MAX_MODEL_LEN, "most_alone": most_alone(settings)}
    made = CudaModelRunner(models()[1], operations, **options)
    for layer in made.cache.layers:
        layer[1:] = torch.nan
    return made


def oracle(streams: dict[tuple[int, int], list[int]], table: BatchTable, row: int, count: int) -> list[int]:
    key = int(table.number[row]), int(table.choice[row])
    first = int(table.num_tokens[row] - table.num_prompt_tokens[row])
    return streams.get(key, [])[first : first + count]


def run(
    settings: EngineConfig,
    crowd: str = "roomy",
    hostile: str | None = None,
    *,
    on_cpu: bool = False,
    numbers: Sequence[int] = range(len(OPTIONS)),
    made: ModelRunner | None = None,
) -> tuple[Heard, EngineCore]:
    """hostile: kind of the only proposer, see hostile_drafts.py. numbers: of the requests; three arrive in a step."""
    made = made or runner(settings, on_cpu=on_cpu)
    if on_cpu:
        made.matchers.offers_drafts = False  # type: ignore[union-attr]
    if crowd == "a row's tokens together":
        made.most_alone = 0  # type: ignore[attr-defined]
    engine = EngineCore(settings, RunnerExecutor(made))
    heard = Heard(TARGET, len(requests()[TARGET].prompt_token_ids) // 4)
    if hostile is not None:
        use(engine.scheduler, hostile, lambda table: partial(oracle, plain().tokens, table), VOCAB_SIZE)
    added, step = [requests()[number] for number in numbers], 0
    while added or engine.has_work:
        inbox: list[tuple[int, EngineInput]] = [(0, message) for message in added[:3]]
        added, step = added[3:], step + 1
        if crowd == "aborted" and step in ABORTED:
            inbox.append((0, Abort(pack_numbers([ABORTED[step]]))))
        heard.take(engine.step(inbox, 0))
        engine.scheduler.check_integrity()
    return heard, engine


@cache
def plain() -> Heard:
    """What the clients are told by the CPU path without drafts."""
    return run(config(None, 1), on_cpu=True)[0]


def check(got: Heard) -> None:
    """Compare with plain(), as far as an aborted request came."""
    wanted = plain()
    for key, finish in got.finish.items():
        tokens = got.tokens.get(key, [])
        if finish is FinishReason.ABORT:
            assert tokens == wanted.tokens[key][: len(tokens)]
        else:
            assert (key, finish, tokens) == (key, wanted.finish[key], wanted.tokens[key])
    for choice, logprobs in got.logprobs.items():
        theirs = wanted.logprobs[choice]
        for mine, other in zip(logprobs.prompt + logprobs.output, theirs.prompt + theirs.output, strict=True):
            assert (mine.rank, mine.token_ids.tolist()) == (other.rank, other.token_ids.tolist())
            np.testing.assert_allclose(mine.values, other.values, atol=1e-4)


#: Every crowd with one source of drafts at one depth; others are the soak's.
CASES = (
    ("roomy", "right", 2),
    ("preempted", "random", 1),
    ("swapped", "long", 2),
    ("in small chunks", "suffix", 1),
    ("aborted", "random", 2),
    ("a row's tokens together", "ngram", 1),
)
SOAK = [
    pytest.param(*case, marks=pytest.mark.soak)
    for index, case in enumerate(product(CROWDED, ("ngram", "suffix", *KINDS), (1, 2)))
    if case not in CASES and index % 3 == 0
]


@pytest.mark.parametrize(("crowd", "source", "depth"), [*CASES, *SOAK])
def test_nothing_differs(crowd: str, source: str, depth: int) -> None:
    is_hostile = source in KINDS
    settings = config("ngram" if is_hostile else source, depth, **CROWDED[crowd])
    got, engine = run(settings, crowd, source if is_hostile else None)
    stats = engine.scheduler.stats
    assert stats.num_draft_tokens > 0
    if source in ("right", "long"):
        assert stats.num_accepted_tokens > stats.num_draft_tokens // 2
    assert (stats.num_preemptions > 0) == (crowd in ("preempted", "swapped"))
    assert got.finish.keys() == plain().finish.keys()
    assert (FinishReason.ABORT in got.finish.values()) == (crowd == "aborted")
    check(got)


@pytest.mark.parametrize("depth", [1, 2])
def test_forced_tokens_of_grammars_are_drafts_without_speculation(depth: int) -> None:
    got, engine = run(config(None, depth), numbers=(CONSTRAINED,))
    stats = engine.scheduler.stats
    assert stats.num_accepted_tokens > 4
    assert stats.num_steps < len(plain().tokens[CONSTRAINED, 0]) + depth
    check(got)


@pytest.fixture
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each duration is measured once, of steps of up to eight tokens, and however long that takes: the interpreter on a
    busy machine is slower than the patience for a GPU."""
    monkeypatch.setattr(step_durations, "_LARGEST", 8)
    monkeypatch.setattr(step_durations, "_SIZES_PATIENCE_NS", 10**12)
    for module in (step_durations, trial_loop):
        monkeypatch.setattr(module, "_NUM_ROUNDS", 1)


@pytest.mark.usefixtures("few_rounds")
def test_durations_of_steps_are_measured_for_the_rule() -> None:
    """Of as many tokens as the cache holds, also where not all of them may be alone. The tables are not to know."""
    made = runner(config("ngram", 1, num_blocks_override=2, block_size=4), on_cpu=False)
    assert isinstance(made, CudaModelRunner)
    made.most_alone = 2
    durations = made.measure_steps()
    assert len(durations) == 3, "1, 2 and 4 tokens in a block of 4"
    assert min(durations) > 0
    assert 1 <= len(made.measure_overlapping(durations)) <= 3, "as far as its patience goes"
    assert made.measure_loop() is not None
    assert not made.table.num_tokens.any()


@pytest.mark.usefixtures("few_rounds")
def test_trials_leave_nothing_behind() -> None:
    """Requests that come after them have the tokens of others, and no row has any."""
    settings = config("ngram", 2)
    made = runner(settings, on_cpu=False)
    assert isinstance(made, CudaModelRunner)
    made.measure_steps()
    assert made.measure_loop() is not None
    assert made._pending is None
    for one in ("num_tokens", "num_prompt_tokens", "num_computed_tokens", "num_blocks"):
        assert not getattr(made.table, one).any(), one
    for one in ("num_drawing", "num_reporting", "num_searching", "num_edited", "num_asking", "temperature"):
        assert not np.count_nonzero(getattr(made.sampling, one)), one
    check(run(settings, numbers=(0, 3), made=made)[0])
