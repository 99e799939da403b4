"""Models with recurrent layers on a GPU: the tokens of the C kernels; no other request or draft changes a bit."""

import json
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.engine import EngineCore
from core.executors.cuda import CudaExecutor
from core.executors.local import LocalExecutor
from core.process.resolve import resolve, resolve_costs
from core.runner.draft_pause import DraftPause
from core.runner.state_rows import RowStates
from core.scheduling.stats import SchedulerStats
from ipc.options.config import EngineConfig
from ipc.options.speculation import SpeculativeConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest
from tests.core.executors.test_cuda_executor import Answers
from tests.core.executors.test_cuda_speculation import oracle
from tests.core.hostile_drafts import KINDS, use
from tests.core.process.tiny_lfm2 import lfm2_folder
from tests.core.workers.part_answers import CONVOLUTIONS, HYBRID, MODEL, STATE_SPACE
from tests.triton_device import ANYWHERE

pytestmark = ANYWHERE

BEGIN = list(range(5, 25))
PROMPTS = [[*BEGIN, 7, 8], list(range(40, 54)), [*BEGIN, 7, 8, 9, 30]]
SIZES: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1, "max_num_seqs": 2}
SIZES |= {"max_num_batched_tokens": 13, "block_size": 8, "max_model_len": 40, "kv_cache_memory_bytes": 1 << 20}


@pytest.fixture(scope="module", name="model")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(lfm2_folder(tmp_path_factory.mktemp("lfm2")))


class Engine:
    def __init__(self, config: EngineConfig) -> None:
        self.executor = CudaExecutor(config) if config.device == "cuda" else LocalExecutor(config)
        info, blocks_in = self.executor.info, self.executor.determine_num_available_blocks
        resolved = resolve(config, info, blocks_in, total_memory_bytes=1 << 34, num_cpus=1)
        self.executor.initialize_cache(resolved)
        resolved = resolve_costs(resolved, config, self.executor.measure_costs, self.executor.measure_steps)
        self.config, self.core = resolved, EngineCore(resolved, self.executor)

    def run(self, which: list[int], max_tokens: int = 4, prompts: Sequence[Sequence[int]] = PROMPTS) -> Answers:
        """Of some of the prompts, at the same time."""
        found, inbox = Answers(len(PROMPTS)), list[Any]()
        for number in which:
            params = SamplingParams(temperature=0.9, seed=number, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
            inbox.append((0, AddRequest(number, np.array(prompts[number], "<i4").tobytes(), params, number)))
        found.follow(self.core, inbox)
        return found


def of(answers: Answers, number: int) -> Any:
    return answers.tokens[number], {key: one for key, one in answers.logprobs.items() if key[0] == number}


def test_tokens_alone_in_company_preempted_and_from_kept_states(model: str) -> None:
    config = EngineConfig(model=model, device="cuda", **SIZES)
    engine = Engine(config)
    together = engine.run([0, 1, 2])
    again = engine.run([2])  # it starts with a state of the first run
    assert engine.core.scheduler.stats.prefix_cache_hits > 0
    assert of(again, 2) == of(together, 2)
    alone = Engine(EngineConfig(model=model, device="cuda", enable_prefix_caching=False, **SIZES))
    for number in range(2):
        assert of(alone.run([number]), number) == of(together, number)
    few = EngineConfig(model=model, device="cuda", num_blocks_override=6, **SIZES)
    preempted = Engine(few)
    assert preempted.run([0, 1, 2]).logprobs == together.logprobs
    assert preempted.core.scheduler.stats.num_preemptions > 0
    by_cpu = Engine(EngineConfig(model=model, **SIZES)).run([0, 1, 2])
    assert by_cpu.tokens == together.tokens
    for key, entries in by_cpu.logprobs.items():
        got = [value for _, value in together.logprobs[key]]
        np.testing.assert_allclose(got, [value for _, value in entries], rtol=0, atol=1e-4)


def test_states_of_swapped_requests_come_back_from_the_host(model: str) -> None:
    options: dict[str, Any] = {"enable_prefix_caching": False, "num_blocks_override": 6, "preemption_mode": "swap"}
    engine = Engine(
        EngineConfig(model=model, device="cuda", num_swap_blocks=12, async_scheduling=False, **{**SIZES, **options})
    )
    states = engine.executor.runner.states
    assert states is not None
    on_host = states._swapped
    assert on_host is not None
    on_host.fill_(np.nan)
    swapped = engine.run([0, 1])
    stats = engine.core.scheduler.stats
    assert stats.num_swapped_in_blocks > 0
    assert stats.num_recomputed_tokens == 0
    assert np.isfinite(on_host.numpy()[0]).all()
    plain = Engine(EngineConfig(model=model, device="cuda", enable_prefix_caching=False, **SIZES))
    assert swapped.logprobs == plain.run([0, 1]).logprobs


# --- drafts -------------------------------------------------------------------------------------------------------


NUM_TOKENS, VOCAB = 7, 64
TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "vocab_size": VOCAB}
DELTA: dict[str, Any] = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "mtp_num_hidden_layers": 1}
SPACE: dict[str, Any] = {"mamba_n_heads": 2, "shared_intermediate_size": 32, "layer_types": ["mamba", "attention"]}
#: One layer of each kind, and one that attends.
KINDS_OF_LAYERS: dict[str, dict[str, Any]] = {
    "short convolution": {**CONVOLUTIONS, **TINY, "layer_types": ["conv", "full_attention"]},
    "gated delta": {**HYBRID, **TINY, **DELTA},
    "state space": {**STATE_SPACE, **TINY, **SPACE},
}
SHORT: dict[str, Any] = {"num_blocks_override": 7}
CROWDED: dict[str, dict[str, Any]] = {
    "roomy": {},
    "preempted": {**SHORT, "preemption_mode": "recompute"},
    "swapped": {**SHORT, "preemption_mode": "swap", "num_swap_blocks": 16},
    "a row's tokens together": {},
}
ASKED = [[5, 6, 7, 5, 6, 7, 5], [9, 8, 9, 8], [7, 7, 7, 3]]


def drafts(method: str = "ngram", **options: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, num_speculative_tokens=3, step_ns=(10**6,) * 8, **options)


def write(folder: Path, settings: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="module", name="folders")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {kind: write(tmp_path_factory.mktemp("tiny"), settings) for kind, settings in KINDS_OF_LAYERS.items()}


def engine_of(folder: str, speculative: SpeculativeConfig | None, **options: Any) -> Engine:
    given = {**SIZES, "max_num_seqs": 3, "block_size": 4, "max_model_len": 20, "logprobs_mode": "raw_logits", **options}
    return Engine(EngineConfig(model=folder, device="cuda", speculative_config=speculative, **given))


@pytest.fixture(scope="module", name="plain")
def without_drafts(folders: dict[str, str]) -> Any:
    """Return the answers to all prompts without drafts, by the kind of a model's recurrent layers."""
    known: dict[str, Answers] = {}

    def of_kind(kind: str) -> Answers:
        if kind not in known:
            known[kind] = engine_of(folders[kind], None).run([0, 1, 2], NUM_TOKENS, ASKED)
        return known[kind]

    return of_kind


def run_hostile(engine: Engine, source: str, right: Answers) -> Answers:
    """Run all prompts with drafts of a hostile source that knows the right tokens."""
    streams = {(number, 0): tokens for number, tokens in enumerate(right.tokens)}
    use(engine.core.scheduler, source, lambda table: partial(oracle, streams, table), VOCAB)
    return engine.run([0, 1, 2], NUM_TOKENS, ASKED)


#: Each kind of layer with a source of drafts, a crowd and a depth; others are the soak's.
CASES = (
    ("short convolution", "right", "roomy", 2),
    ("gated delta", "random", "swapped", 1),
    ("state space", "random", "preempted", 2),
)
SOAK = [
    pytest.param(*case, marks=pytest.mark.soak)
    for case in product(KINDS_OF_LAYERS, KINDS, CROWDED, (1, 2))
    if case not in CASES
]


@pytest.mark.parametrize(("kind", "source", "crowd", "depth"), [*CASES, *SOAK])
def test_drafts_change_no_bit_of_a_logit(
    folders: dict[str, str], plain: Any, kind: str, source: str, crowd: str, depth: int
) -> None:
    engine = engine_of(folders[kind], drafts(), async_scheduling=depth == 2, **CROWDED[crowd])
    if crowd == "a row's tokens together":
        engine.executor.runner.most_alone = 0  # type: ignore[attr-defined]
    got = run_hostile(engine, source, plain(kind))
    assert (got.tokens, got.logprobs) == (plain(kind).tokens, plain(kind).logprobs)
    stats: SchedulerStats = engine.core.scheduler.stats
    assert stats.num_draft_tokens > 2
    assert (stats.num_accepted_tokens > 0) == (source != "wrong")
    assert (stats.num_preemptions > 0) == ("preempted" in crowd or "swapped" in crowd)
    states = engine.executor.runner.states
    assert states is not None
    spare = states.trial_saves(states.num_spare + 1)
    assert spare is not None
    assert len({*states.places.tolist(), *spare[:-1].tolist()}) == len(states.states), "no slot is lost"


def test_a_state_after_a_wrong_draft_is_noticed(
    folders: dict[str, str], plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RowStates.accept

    def accept(self: RowStates, drafted: Any, counts: Any, live: Any = None) -> None:
        """Keep the state after the step's last draft."""
        right(self, drafted, counts, np.zeros(int(drafted.in_plan.max(initial=-1)) + 1, np.bool_))

    monkeypatch.setattr(RowStates, "accept", accept)
    engine = engine_of(folders["short convolution"], drafts())
    assert run_hostile(engine, "random", plain("short convolution")).logprobs != plain("short convolution").logprobs


@pytest.mark.parametrize(
    "method", ["mtp", *(pytest.param(one, marks=pytest.mark.soak) for one in ("draft_model", "ngram", "suffix"))]
)
def test_drafts_of_each_method(
    folders: dict[str, str], plain: Any, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftPause, "begins", lambda *_: False)
    given: dict[str, Any] = {"prompt_lookup_min": 1} if method == "ngram" else {}
    if method == "draft_model":
        given["model"] = write(tmp_path, {**MODEL, **TINY, "num_hidden_layers": 1})
    engine = engine_of(folders["gated delta"], drafts(method, **given), **CROWDED["swapped"])
    got = engine.run([0, 1, 2], NUM_TOKENS, ASKED)
    assert (got.tokens, got.logprobs) == (plain("gated delta").tokens, plain("gated delta").logprobs)
    assert engine.core.scheduler.stats.num_draft_tokens > 1


def test_the_costs_of_drafts_are_measured_with_states(folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial step stores the states that a step with drafts stores."""
    from core.runner import step_durations, trial_loop

    monkeypatch.setattr(step_durations, "_LARGEST", 2)
    for module in (step_durations, trial_loop):
        monkeypatch.setattr(module, "_NUM_ROUNDS", 1)
    measured = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    engine = engine_of(folders["short convolution"], measured, num_blocks_override=6, max_num_seqs=1)
    settings = engine.config.speculative_config
    assert settings is not None
    assert min(settings.step_ns + settings.alone_ns) > 0
