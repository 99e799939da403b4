"""speculative_config with a draft model, from the config to the tokens, on the local executor."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.engine import EngineCore
from core.executors.local import LocalExecutor
from core.process.resolve import resolve_costs
from core.scheduling.stats import SchedulerStats
from ipc.errors import ConfigError
from ipc.options.given_options import config_from_options
from ipc.options.resolved import ResolvedConfig
from ipc.options.speculation import SpeculativeConfig
from tests.core.driving import Inbox, add_message
from tests.resolved import resolved_config
from tools.lab.bench.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return str(folder)


def config_of(model: str, draft: str | None, **options: object) -> ResolvedConfig:
    speculative = None
    if draft is not None:
        settings: dict[str, Any] = {"model": draft, "num_speculative_tokens": 4, "step_ns": (10**6,) * 8}
        speculative = SpeculativeConfig(method="draft_model", **settings)
    config = resolved_config(
        executor="local",
        model=model,
        dtype="float32",
        max_model_len=120,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        block_size=8,
        num_blocks_override=24,
        speculative_config=speculative,
    )
    return msgspec.structs.replace(config, **options)


EDITS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "temperature": 0.7},
    {"presence_penalty": 1.5, "frequency_penalty": 0.8},
    {"logit_bias": {5: 4.0, 9: -100.0}, "temperature": 1.0},
    {"bad_words_token_ids": [[4], [7, 8], [9, 10, 11]]},
    {"min_tokens": 12, "ignore_eos": False, "temperature": 1.0},
    {"allowed_token_ids": list(range(3, 400)), "top_k": 9, "temperature": 1.0},
]


def run(
    config: ResolvedConfig, edits: list[dict[str, Any]] | None = None
) -> tuple[dict[int, list[int]], SchedulerStats]:
    executor = LocalExecutor(config)
    executor.initialize_cache(config)
    engine = EngineCore(resolve_costs(config, config, executor.measure_costs, executor.measure_steps), executor)
    inbox = Inbox()
    options = edits or [{}]
    prompts = [range(n % 3, n % 3 + 10 + n) for n in range(12)]
    messages = [
        add_message(n, prompt, 30, **{"temperature": n % 3 / 2, "seed": n, **options[n % len(options)]})
        for n, prompt in enumerate(prompts)
    ]
    for message in messages:
        inbox.expect(0, message)
    added = [(0, message) for message in messages]
    while added or engine.has_work:
        inbox.take(engine.step(added, 0))
        engine.scheduler.check_integrity()
        added = []
    return {number: one.tokens for (_, number), one in inbox.received.items()}, engine.scheduler.stats


@pytest.mark.parametrize(
    "options", [{}, {"preemption_mode": "swap", "num_swap_blocks": 30}, {"num_blocks_override": 200}], ids=str
)
def test_a_model_as_its_own_draft_model_is_always_right(model: str, options: dict[str, object]) -> None:
    plain, _ = run(config_of(model, None, **options))
    got, stats = run(config_of(model, model, **options))
    assert got == plain
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 30
    assert (stats.num_preemptions > 0) == ("num_blocks_override" not in options)


def test_drafts_are_drawn_with_the_options_that_edit_logits(model: str) -> None:
    """Penalties count the drafts before a draft, and so on: the model is right about itself with all of them."""
    plain, _ = run(config_of(model, None, num_blocks_override=200), EDITS)
    got, stats = run(config_of(model, model, num_blocks_override=200), EDITS)
    assert got == plain
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 30


def test_it_takes_memory_and_time_of_its_own(model: str) -> None:
    alone, drafting = (LocalExecutor(config_of(model, draft)) for draft in (None, model))
    blocks = [executor.determine_num_available_blocks(1 << 24, 8) for executor in (alone, drafting)]
    assert blocks[0] == 2 * blocks[1] + 8  # a spare block for each of 8 rows, for drafts behind its own blocks
    assert drafting.determine_num_available_blocks(1, 8) == 0
    config = config_of(model, model)
    for executor in (alone, drafting):
        executor.initialize_cache(config)
    assert alone.measure_steps().draft_ns == 0
    assert drafting.measure_steps().draft_ns > 0


def test_another_vocabulary_is_an_error(model: str, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    settings = msgspec.json.decode((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({**settings, "vocab_size": settings["vocab_size"] - 8}))
    with pytest.raises(ConfigError, match="use one with the same vocabulary"):
        LocalExecutor(config_of(model, str(tmp_path), load_format="dummy"))


def test_only_models_have_draft_models(model: str) -> None:
    with pytest.raises(ConfigError, match="'fake' has no draft model"):
        config_from_options(executor="fake", speculative_config={"method": "draft_model", "model": model})
