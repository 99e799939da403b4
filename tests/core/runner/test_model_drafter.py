"""A draft model changes no token; one that equals the target is right whenever it is asked, through prefix cache hits,
preemption and the ends of blocks.
"""

from typing import Any

import msgspec
import numpy as np
import pytest

from core.models.llama import Llama
from core.runner.drafter import merged
from core.runner.model_drafter import ModelDrafter
from core.scheduling.stats import SchedulerStats
from ipc.options.config import EngineConfig
from ipc.wire.messages import AddRequest
from kernels.elements import BFLOAT16, FLOAT32
from tests.core.runner.invariance import (
    KINDS,
    TINY,
    Heard,
    Recorder,
    drive,
    neighbours,
    random_model,
    recorded_engine,
    request,
    small_config,
    tiny_model,
)
from tests.core.runner.invariance_scenarios import PROMPT, Preempting, mixed
from tests.placed import PREFIX

NUM_DRAFTS = 4


class Counted(ModelDrafter):
    """Counts the tokens that the draft model computes."""

    num_computed = 0

    def _forward(self, rows: Any, tokens: Any, *rest: Any) -> Any:
        self.num_computed += len(tokens)
        return super()._forward(rows, tokens, *rest)


def drafting(draft: Llama) -> type[Recorder]:
    class Drafting(Recorder):
        drafter: Counted

        def __init__(self, model: Llama, config: EngineConfig, adapters: None = None) -> None:
            super().__init__(model, config, adapters)
            assert config.num_blocks_override is not None
            self.drafter = Counted(
                draft,
                num_rows=config.max_num_seqs,
                num_blocks=config.num_blocks_override,
                block_size=config.block_size,
                num_drafts=NUM_DRAFTS,
            )

    return Drafting


def heard(
    model: Llama, draft: Llama | None, added: list[tuple[int, AddRequest]], **settings: Any
) -> tuple[Heard, SchedulerStats, Recorder]:
    engine, recorder = recorded_engine(model, small_config(**settings), Recorder if draft is None else drafting(draft))
    return drive(engine, recorder, list(added)), engine.scheduler.stats, recorder


CROWD = neighbours(8, 3, 60, 50)


@pytest.mark.parametrize("num_blocks", [400, 22])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_model_guesses_itself_right_at_every_temperature(dtype: Any, num_blocks: int) -> None:
    """With 22 blocks among preemptions; budget 30 cuts prompts into chunks."""
    model = tiny_model(dtype, "local and global")
    plain, plain_stats, _ = heard(model, None, CROWD, num_blocks=num_blocks, budget=30)
    got, stats, _ = heard(model, model, CROWD, num_blocks=num_blocks, budget=30)
    assert got.tokens == plain.tokens
    assert got.finish == plain.finish
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 40
    assert (stats.num_preemptions > 0) == (num_blocks == 22)
    if num_blocks == 400:
        assert stats.num_draft_tokens > 120
        assert stats.num_steps < 0.6 * plain_stats.num_steps


@pytest.mark.parametrize("kind", ["plain", "sliding window", "untied head"])
def test_another_model_changes_no_token(kind: str) -> None:
    """Requests with all kinds of options; logits are compared by the recorder."""
    model, added = tiny_model(FLOAT32), mixed(CROWD)
    draft = random_model(msgspec.structs.replace(KINDS[kind], num_hidden_layers=1, hidden_size=64), FLOAT32)
    plain, _, plain_recorder = heard(model, None, added, num_blocks=40, budget=50)
    got, stats, recorder = heard(model, draft, added, num_blocks=40, budget=50)
    assert got.tokens == plain.tokens
    assert got.finish == plain.finish
    assert recorder.logits.keys() == plain_recorder.logits.keys()
    for key, logits in plain_recorder.logits.items():
        assert np.array_equal(recorder.logits[key].view(np.int32), logits.view(np.int32)), key
    assert stats.num_draft_tokens > stats.num_accepted_tokens


def test_what_the_prefix_cache_holds_is_not_computed_again() -> None:
    model = tiny_model(FLOAT32)
    engine, recorder = recorded_engine(model, small_config(), drafting(model))
    assert isinstance(recorder.drafter, Counted)
    computed = []
    for number in (1, 2):
        before = recorder.drafter.num_computed
        drive(engine, recorder, [request(number, PROMPT[:200], 24, 0.7)])
        computed.append(recorder.drafter.num_computed - before)
    assert engine.scheduler.stats.prefix_cache_hits == 192
    assert computed[0] >= 200
    assert computed[1] < 70
    assert engine.scheduler.stats.num_accepted_tokens == engine.scheduler.stats.num_draft_tokens > 25


@pytest.mark.parametrize("step", [2, 3, 4, 6])
def test_preempted_after_any_step(step: int) -> None:
    """The request begins again in other blocks; what the draft model knew of the old ones is gone."""
    model = tiny_model(FLOAT32)
    engine, recorder = recorded_engine(model, small_config(num_blocks=40, budget=64), drafting(model))
    target = request(1000, PROMPT[:120], 40, 0.8)
    got = drive(engine, recorder, [target], Preempting({step}, forgets=step % 2 == 0))
    plain, _, _ = heard(model, None, [target])
    assert got.tokens == plain.tokens
    assert recorder.num_starts == 2
    assert engine.scheduler.stats.num_accepted_tokens == engine.scheduler.stats.num_draft_tokens > 20


def test_a_draft_model_of_fewer_positions_stops_there() -> None:
    model = tiny_model(FLOAT32)
    short = random_model(msgspec.structs.replace(TINY, max_position_embeddings=50), FLOAT32)
    added = [request(1, PROMPT[:30], 60, 0.5)]
    got, stats, _ = heard(model, short, added)
    assert got.tokens == heard(model, None, added)[0].tokens
    assert 10 < stats.num_draft_tokens == stats.num_accepted_tokens <= 21


def test_drafts_that_no_plan_takes_are_made_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(FLOAT32)
    monkeypatch.setattr(f"{PREFIX}core.scheduling.draft_rule.DraftRule.may_pay", lambda *_: False)
    _, stats, recorder = heard(model, model, [request(1, PROMPT[:30], 150, 0.5)])
    assert stats.num_drafts == 0
    assert isinstance(recorder.drafter, Counted)
    assert recorder.drafter.num_computed < 30 + 150 + 12 * NUM_DRAFTS  # not 150 * NUM_DRAFTS


def test_forced_tokens_come_first() -> None:
    counts, tokens = merged(
        np.array([2, 0, 0, 1], np.int32),
        np.array([1, 2, 3], np.int32),
        np.array([1, 2, 0, 3], np.int32),
        np.array([9, 8, 7, 6, 5, 4], np.int32),
    )
    assert counts.tolist() == [2, 2, 0, 1]
    assert tokens.tolist() == [1, 2, 8, 7, 3]
