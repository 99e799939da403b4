"""speculative_config with EAGLE-3 heads and layers for multi-token prediction, from files to tokens, on the local
executor: no token changes, drafts are those of a plain reference, and a head that knows its model is always right.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.engine import EngineCore
from core.execution.plan import SchedulerOutput
from core.executors.local import LocalExecutor
from core.models.draft_head import DraftHead
from core.process.resolve import resolve_costs
from core.runner.assistant_drafter import AssistantDrafter
from core.runner.draft_pause import DraftPause
from core.runner.drafter import RanStep
from core.runner.head_drafter import HeadDrafter
from core.scheduling.stats import SchedulerStats
from ipc.errors import ConfigError, ModelFileError, UnsupportedModelError
from ipc.options.given_options import config_from_options
from ipc.options.resolved import ResolvedConfig
from ipc.options.speculation import SpeculativeConfig
from tests.core.draft_heads import (
    EAGLE3,
    HIDDEN,
    LAYERS,
    LLAMA,
    MIMO,
    VOCAB,
    Reference,
    eagle3_shapes,
    model_shapes,
    random_weights,
    write,
    write_eagle3,
)
from tests.core.driving import Inbox, add_message
from tests.resolved import resolved_config

#: What a head may differ in; the taps that each has.
HEADS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "its own choice of layers": ({}, (2, 3, 3)),
    "embeddings and norms of its own": (
        {"norm_before_fc": True, "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 4, 6]},
        (2, 4, 6),
    ),
    "layers by their output": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}}, (2, 3, 6)),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("llama"), LLAMA, random_weights(model_shapes(LLAMA), 1))


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("mimo"), MIMO, random_weights(model_shapes(MIMO), 1))


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_eagle3(tmp_path_factory.mktemp("eagle3"))


def config_of(model: str, method: str | None, head: str | None = None, **options: Any) -> ResolvedConfig:
    num_drafts = options.pop("num_drafts", 3)
    settings: dict[str, Any] = {"model": head, "num_speculative_tokens": num_drafts, "step_ns": (10**6,) * 8}
    config = resolved_config(
        executor="local",
        model=model,
        dtype="float32",
        max_model_len=120,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        block_size=8,
        num_blocks_override=200,
        speculative_config=None if method is None else SpeculativeConfig(method=method, **settings),
    )
    return msgspec.structs.replace(config, **options)


class NoPause(DraftPause):
    def begins(self, plan: SchedulerOutput) -> bool:
        return False


class Pausing(DraftPause):
    """Makes drafts in every seventh step."""

    _count = 0

    def begins(self, plan: SchedulerOutput) -> bool:
        self._count += 1
        return self._count % 7 > 0


def listen(drafter: Any, pause: type[DraftPause]) -> list[tuple[list[int], list[int]]]:
    """Let it make drafts in each step but in pauses; return a list of each row's tokens and the drafts after them."""
    heard: list[tuple[list[int], list[int]]] = []
    propose, drafter._pause = drafter.propose, pause()

    def hearing(step: RanStep, table: Any, sampling: Any) -> Any:
        counts, token_ids = propose(step, table, sampling)
        drafts = iter(token_ids.tolist())
        assert step.states is not None
        for row, count in zip(step.states.rows.tolist(), counts.tolist(), strict=True):
            if count:
                tokens = table.tokens.get(np.full(table.num_tokens[row], row), np.arange(table.num_tokens[row]))
                heard.append((tokens.tolist(), [next(drafts) for _ in range(count)]))
        return counts, token_ids

    drafter.propose = hearing
    return heard


def run(
    config: ResolvedConfig,
    edits: list[dict[str, Any]] | None = None,
    num_requests: int = 10,
    pause: type[DraftPause] = NoPause,
    make: Callable[[ResolvedConfig], Any] = LocalExecutor,
    num_tokens: int = 30,
) -> tuple[dict[tuple[int, int], list[int]], SchedulerStats, list[tuple[list[int], list[int]]]]:
    executor = make(config)
    executor.initialize_cache(config)
    drafter = executor.runner.drafter
    heard = listen(drafter, pause) if isinstance(drafter, HeadDrafter | AssistantDrafter) else []
    engine = EngineCore(resolve_costs(config, config, executor.measure_costs, executor.measure_steps), executor)
    inbox = Inbox()
    options = edits or [{}]
    rng = np.random.default_rng(4)
    messages = [
        add_message(
            n,
            rng.integers(1, VOCAB, 5 + 9 * (n % 7)).tolist(),
            num_tokens,
            **{"temperature": (n % 3) / 2, "seed": n, **options[n % len(options)]},
        )
        for n in range(num_requests)
    ]
    for message in messages:
        inbox.expect(0, message)
    added = [(0, message) for message in messages]
    while added or engine.has_work:
        inbox.take(engine.step(added, 0))
        engine.scheduler.check_integrity()
        added = []
    return {key: one.tokens for key, one in inbox.received.items()}, engine.scheduler.stats, heard


GREEDY = [{"temperature": 0.0}]
#: Short of blocks: preempted, swapped out and in; or cut into chunks with blocks shared by choices.
CROWDED: dict[str, dict[str, Any]] = {
    "preempted": {"num_blocks_override": 30, "preemption_mode": "recompute"},
    "swapped": {"num_blocks_override": 30, "preemption_mode": "swap", "num_swap_blocks": 40},
    "in small chunks": {"max_num_batched_tokens": 16},
}


@pytest.mark.parametrize("head", HEADS)
def test_drafts_of_eagle3_are_those_of_the_reference(llama: str, head: str, tmp_path: Path) -> None:
    settings, taps = HEADS[head]
    folder = write_eagle3(tmp_path, {**EAGLE3, **settings}, has_embeddings="embeddings" in head)
    _, stats, heard = run(config_of(llama, "eagle3", folder), GREEDY)
    reference = Reference(Path(llama), tmp_path, taps)
    for tokens, drafts in heard[::4]:
        reference.check(tokens, drafts)
    assert len(heard) > 200
    assert stats.num_draft_tokens > 20


@pytest.mark.parametrize("crowd", CROWDED)
def test_drafts_are_those_of_the_reference_whatever_comes_between(mimo: str, crowd: str) -> None:
    config = config_of(mimo, "mtp", **CROWDED[crowd])
    _, stats, heard = run(config, GREEDY)
    reference = Reference(Path(mimo), None, ())
    for tokens, drafts in heard[::4]:
        reference.check(tokens, drafts)
    assert len(heard) > 200
    assert (stats.num_preemptions > 0) == ("chunks" not in crowd)


@pytest.mark.parametrize(
    "crowd", [pytest.param(crowd, marks=[] if crowd == "swapped" else pytest.mark.soak) for crowd in CROWDED]
)
def test_drafts_after_a_pause_are_those_of_the_reference(mimo: str, crowd: str) -> None:
    """K and V of the tokens between are computed together: the head is read more rarely."""
    number, right = [0], DraftHead.store

    def counted(self: DraftHead, *args: Any) -> None:
        number[0] += 1
        right(self, *args)

    config = config_of(mimo, "mtp", **CROWDED[crowd])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftHead, "store", counted)
        _, stats, heard = run(config, GREEDY, pause=Pausing)
    reference = Reference(Path(mimo), None, ())
    for tokens, drafts in heard[::2]:
        reference.check(tokens, drafts)
    assert len(heard) > 20
    assert number[0] < stats.num_steps // 2


EDITS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4, "temperature": 0.7},
    {"presence_penalty": 1.5, "frequency_penalty": 0.8, "logprobs": 2},
    {"logit_bias": {5: 4.0, 9: -100.0}, "temperature": 1.0},
    {"bad_words_token_ids": [[4], [7, 8], [9, 10, 11]], "temperature": 0.5},
    {"min_tokens": 12, "ignore_eos": False, "temperature": 1.0, "prompt_logprobs": 1},
    {"allowed_token_ids": list(range(3, 200)), "top_k": 9, "temperature": 1.0},
]


@pytest.mark.parametrize("crowd", ["preempted", "swapped", "in small chunks"])
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_no_token_changes(llama: str, mimo: str, eagle3: str, method: str, crowd: str) -> None:
    model, head = (llama, eagle3) if method == "eagle3" else (mimo, None)
    options = CROWDED[crowd]
    plain, _, _ = run(config_of(model, None, **options), EDITS, 14)
    got, stats, heard = run(config_of(model, method, head, **options), EDITS, 14)
    assert got == plain
    assert stats.num_draft_tokens > 5
    assert heard


def knowing_model(settings: dict[str, Any]) -> dict[str, Any]:
    """A model whose next token is a function of the last one: its layers add nothing. Embeddings have equal lengths."""
    weights = random_weights(model_shapes(settings), 1)
    embeddings = np.sign(weights["model.embed_tokens.weight"])
    embeddings[:, 0] = 3
    weights["model.embed_tokens.weight"] = embeddings
    for name, numbers in weights.items():
        if ("o_proj" in name or "down_proj" in name) and "weight" in name:
            numbers[:] = 0
        elif numbers.ndim == 1:
            numbers[:] = 0 if name.endswith(".bias") else 1
    return weights


def test_a_layer_that_knows_its_model_is_always_right(tmp_path: Path) -> None:
    weights = knowing_model(MIMO)
    projection = np.zeros((HIDDEN, 2 * HIDDEN), np.float32)
    projection[:, HIDDEN:] = np.eye(HIDDEN)  # it reads the token, and not the hidden state
    weights["model.mtp_layers.0.input_proj.weight"] = projection
    model = write(tmp_path, MIMO, weights)
    plain, plain_stats, _ = run(config_of(model, None))
    got, stats, _ = run(config_of(model, "mtp"))
    assert got == plain
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 150
    assert stats.num_steps < 0.5 * plain_stats.num_steps


def test_a_head_that_knows_its_model_is_always_right(tmp_path: Path) -> None:
    """Its attention sees its own place only, where the token is: scores fall with the distance."""
    weights = knowing_model(LLAMA)
    model = write(tmp_path / "model", LLAMA, weights)
    settings = {**EAGLE3, "num_key_value_heads": 4, "draft_vocab_size": VOCAB}
    head = random_weights(eagle3_shapes(settings), 2)
    for numbers in head.values():
        numbers[:] = 1 if numbers.ndim == 1 else 0
    for name in "qk":
        head[f"midlayer.self_attn.{name}_proj.weight"].reshape(4, 2, 8, -1)[:, 0, :, 0] = 20
    head["midlayer.self_attn.v_proj.weight"][:] = np.concatenate(
        (np.eye(HIDDEN), -np.eye(HIDDEN)), 1
    )  # without the state
    head["midlayer.self_attn.o_proj.weight"][:] = np.eye(HIDDEN)
    d2t = VOCAB - 1 - 2 * np.arange(VOCAB)  # the head has the tokens in the opposite order
    head["lm_head.weight"] = weights["lm_head.weight"][::-1].copy()
    folder = write(tmp_path / "head", settings, {**head, "d2t": d2t})
    plain, plain_stats, _ = run(config_of(model, None))
    got, stats, _ = run(config_of(model, "eagle3", folder))
    assert got == plain
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 150
    assert stats.num_steps < 0.5 * plain_stats.num_steps


def test_it_takes_memory_and_time_of_its_own(llama: str, eagle3: str) -> None:
    alone, drafting = (LocalExecutor(config_of(llama, *method)) for method in ((None,), ("eagle3", eagle3)))
    own = 8 * 8 * 2 * 2 * 16 * 4  # a spare block for each of 8 rows, of 8 tokens, K and V of 2 heads of 16 floats
    blocks = [executor.determine_num_available_blocks((1 << 22) + own, 8) for executor in (alone, drafting)]
    assert blocks[1] == (1 << 22) // ((LAYERS + 1) * 8 * 2 * 2 * 16 * 4)
    assert blocks[1] < blocks[0]
    for executor in (alone, drafting):
        executor.initialize_cache(config_of(llama, None))
    assert alone.measure_steps().draft_ns == 0


def test_a_head_stops_at_the_end_of_its_positions(llama: str, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path, {**EAGLE3, "max_position_embeddings": 40})
    plain, _, _ = run(config_of(llama, None), GREEDY)
    got, _, heard = run(config_of(llama, "eagle3", folder), GREEDY)
    assert got == plain
    assert max(len(tokens) + len(drafts) for tokens, drafts in heard) == 42  # the last place of its K and V is 39


def test_made_up_weights(llama: str, eagle3: str, mimo: str) -> None:
    for model, method, head in ((llama, "eagle3", eagle3), (mimo, "mtp", None)):
        plain, _, _ = run(config_of(model, None, load_format="dummy"), num_requests=3)
        assert run(config_of(model, method, head, load_format="dummy"), num_requests=3)[0] == plain


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"vocab_size": 304}, ConfigError, "for a model with 304 tokens, but the model has 300"),
        ({"hidden_size": 32}, ConfigError, "reads hidden states of 32 numbers, but the model's have 64"),
        ({"target_hidden_size": 128}, ConfigError, "reads hidden states of 128 numbers"),
        ({"num_hidden_layers": 2}, UnsupportedModelError, "num_hidden_layers=2 is not supported; heads of 1 layer are"),
        ({"architectures": ["Qwen3ForCausalLM"]}, UnsupportedModelError, "of EAGLE-3 heads LlamaForCausalLM, "),
        ({"norm_output": True}, UnsupportedModelError, "norm_output=True is not supported; only False is"),
        ({"draft_vocab_size": -1}, ModelFileError, "draft_vocab_size must be an integer of at least 1; got -1"),
        ({"draft_vocab_size": 121}, ModelFileError, r"lm_head.weight has shape \(120, 64\); the config says \(121"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}, ModelFileError, r"are \[2, 4, 7\], but the model has 6"),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, ModelFileError, "must be a list of integers; got '2'"),
    ],
    ids=str,
)
def test_heads_that_do_not_fit(llama: str, tmp_path: Path, settings: Any, error: Any, match: str) -> None:
    folder = write_eagle3(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**EAGLE3, **settings}))
    with pytest.raises(error, match=match):
        LocalExecutor(config_of(llama, "eagle3", folder))


@pytest.mark.parametrize(
    ("tensors", "error", "match"),
    [
        ({"d2t": None}, ModelFileError, "tensor d2t is missing; the head predicts 120 of 300 tokens"),
        ({"d2t": np.zeros(119, np.int64)}, ModelFileError, "d2t has 119 numbers; the config says 120"),
        ({"d2t": np.full(120, 181)}, ModelFileError, "d2t names a token twice, or one outside the 300"),
        ({"d2t": -np.arange(120)}, ModelFileError, "d2t names a token twice, or one outside the 300"),
        ({"d2t": np.zeros(120, np.float32)}, UnsupportedModelError, "d2t has type F32; supported are I64, I32"),
        ({"fc.weight": None}, ModelFileError, "tensor fc.weight is missing"),
        ({"more.weight": np.zeros(1, np.float32)}, UnsupportedModelError, "unexpected tensor 'more.weight'"),
    ],
    ids=["no d2t", "short d2t", "d2t beyond", "d2t twice", "d2t of floats", "no fc", "more"],
)
def test_weights_that_do_not_fit(llama: str, tmp_path: Path, tensors: Any, error: Any, match: str) -> None:
    weights = {**random_weights(eagle3_shapes(EAGLE3), 2), "d2t": np.zeros(120, np.int64), **tensors}
    folder = write(tmp_path, EAGLE3, {name: array for name, array in weights.items() if array is not None})
    with pytest.raises(error, match=match):
        LocalExecutor(config_of(llama, "eagle3", folder))


def test_models_that_do_not_fit(llama: str, eagle3: str) -> None:
    with pytest.raises(ConfigError, match=r"no multi-token prediction layer; .*MiMoForCausalLM"):
        LocalExecutor(config_of(llama, "mtp"))
    with pytest.raises(ConfigError, match="method 'eagle3' needs the C kernels"):
        LocalExecutor(config_of(llama, "eagle3", eagle3, cpu_kernels="torch"))
    with pytest.raises(ConfigError, match="'fake' has no draft model"):
        config_from_options(executor="fake", speculative_config={"method": "mtp"})
