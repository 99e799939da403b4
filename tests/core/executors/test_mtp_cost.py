"""What drafts of a layer for multi-token prediction cost and gain, counted: steps, drafts, readings of the layer.

Time is made of these counts and of durations in which a step of a few tokens takes about as long as one of one token.
So no clock matters.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from core.engine import EngineCore
from core.execution.plan import SchedulerOutput
from core.executors.local import LocalExecutor
from core.models.draft_head import DraftHead
from tests.core.driving import Inbox, add_message
from tests.core.executors.test_draft_head import config_of
from tests.core.mtp_models import FAMILIES, MtpModel

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

MS = 1_000_000  # ns
#: Steps of 1, 2, 4, ... 128 tokens; and a reading of the layer and of the head: a sixteenth of a step, as where a model
#: has 32 layers and a head of the size of two.
STEP_NS = (10 * MS, 10_300_000, 10_900_000, 12 * MS, 14 * MS, 18 * MS, 26 * MS, 42 * MS)
READING_NS = STEP_NS[0] // 16
NUM_TOKENS = 500


class Counted(LocalExecutor):
    """An executor whose steps are counted, and the readings of its head."""

    num_ns = 0

    def execute(self, plan: SchedulerOutput) -> Any:
        self.num_ns += int(np.interp(plan.num_tokens, 2 ** np.arange(len(STEP_NS)), STEP_NS))
        return super().execute(plan)


def duration(
    folder: str, method: str | None, num_drafts: int, patch: pytest.MonkeyPatch, **options: Any
) -> tuple[int, Any, list[int]]:
    """Return what a request's tokens after the first take in ns, the statistics and the tokens."""
    options = {"max_model_len": 700, "kv_cache_memory_bytes": 1 << 22, **options}
    config = config_of(folder, method, num_drafts=num_drafts, **options)
    if (drafts := config.speculative_config) is not None:
        drafts = msgspec.structs.replace(drafts, step_ns=STEP_NS, draft_ns=num_drafts * READING_NS)
        config = msgspec.structs.replace(config, speculative_config=drafts)
    executor = Counted(config)
    executor.initialize_cache(config)
    for name in ("forward", "store"):
        right = getattr(DraftHead, name)

        def read(self: DraftHead, *arguments: Any, _right: Any = right) -> Any:
            executor.num_ns += READING_NS
            return _right(self, *arguments)

        patch.setattr(DraftHead, name, read)
    engine, inbox = EngineCore(config, executor), Inbox()
    message = add_message(1, np.random.default_rng(1).integers(3, 300, 20).tolist(), NUM_TOKENS)
    received, added = inbox.expect(0, message), [(0, message)]
    while added or engine.has_work:
        inbox.take(engine.step(added, 0))
        if added:
            executor.num_ns = 0
        added = []
    patch.undo()
    return executor.num_ns, engine.scheduler.stats, received.tokens


@pytest.mark.parametrize(
    ("family", "num_drafts", "options"),
    [
        ("qwen3.5", 1, {}),
        ("qwen3.5", 3, {}),
        ("deepseek-v3", 3, {}),
        ("qwen3.5", 1, {"kv_dir": "given", "num_host_blocks": 40}),  # whole blocks must have K and V at once
    ],
)
def test_a_layer_that_is_never_right_costs_little(
    family: str, num_drafts: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = MtpModel(FAMILIES[family]).write(tmp_path)
    plain, _, tokens = duration(folder, None, 1, monkeypatch)
    drafting, stats, same = duration(folder, "mtp", num_drafts, monkeypatch, **options)
    assert same == tokens
    assert stats.num_accepted_tokens <= 0.1 * stats.num_draft_tokens
    assert plain >= 0.98 * drafting, (plain / drafting, stats.num_draft_tokens)


def test_a_layer_that_is_right_in_seven_of_ten_places_pays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MtpModel(FAMILIES["qwen3.5"], 0.01).write(tmp_path)
    plain, _, tokens = duration(folder, None, 1, monkeypatch)
    drafting, stats, same = duration(folder, "mtp", 3, monkeypatch)
    assert same == tokens
    offered, right = stats.num_draft_tokens, stats.num_accepted_tokens
    assert plain >= 1.6 * drafting, (plain / drafting, right / offered)
