"""A draft head changes no bit of a request, on every variant of the kernels, among choices, preemptions and chunks."""

from typing import Any

import msgspec
import numpy as np
import pytest

from core.execution.plan import SchedulerOutput
from core.model_files.tensors.weight_shapes import layer_shapes
from core.models.draft_head import DraftHead, Eagle3Parts, HeadConfig, HeadWeights, head_shapes
from core.models.llama import Llama
from core.runner.head_drafter import HeadDrafter
from ipc.options.config import EngineConfig
from kernels.cpu.build import usable_variants
from kernels.cpu.library import load_cpu_library
from tests.core.draft_heads import random_weights
from tests.core.runner.invariance import (
    DTYPES,
    KINDS,
    TINY,
    Recorder,
    bits,
    drive,
    neighbours,
    random_model,
    recorded_engine,
    small_config,
    tiny_model,
)
from tests.core.runner.invariance_scenarios import mixed
from tests.in_turn import in_turn

CROWD = mixed(neighbours(8, 3, 60, 40))


def random_head(target: Llama) -> DraftHead:
    """An EAGLE-3 head that reads what two layers give, and guesses every third token."""
    own = msgspec.structs.replace(TINY, num_hidden_layers=1, hidden_act=target.config.hidden_act)
    eagle3 = Eagle3Parts(draft_vocab_size=166, has_embeddings=False)
    config = HeadConfig(layer=own, taps=(1, 3), tap_width=own.hidden_size, eagle3=eagle3)
    weights = random_weights(head_shapes(config, layer_shapes(own)), 4)
    return DraftHead(config, HeadWeights(weights.items(), 3 * np.arange(166)), target)


class Counted(HeadDrafter):
    num_offered = num_copied = 0

    def apply(self, plan: SchedulerOutput) -> None:
        super().apply(plan)
        self.num_copied += len(plan.copied_blocks)

    def propose(self, *args: Any) -> Any:
        found = super().propose(*args)
        self.num_offered += len(found[1])
        return found


def drafting(head: DraftHead) -> type[Recorder]:
    class Drafting(Recorder):
        def __init__(self, model: Llama, config: EngineConfig, adapters: None = None) -> None:
            super().__init__(model, config, adapters)
            assert config.num_blocks_override is not None
            sizes = {"num_rows": config.max_num_seqs, "num_blocks": config.num_blocks_override}
            self.drafter = Counted(head, **sizes, block_size=config.block_size, num_drafts=3)

    return Drafting


@pytest.mark.parametrize(("variant", "dtype"), in_turn(usable_variants(), DTYPES))
def test_no_bit_differs(dtype: str, variant: str) -> None:
    blocks = {"float32": 400, "bfloat16": 22}[dtype]  # with 22 among preemptions
    plain_engine, plain = recorded_engine(
        tiny_model(DTYPES[dtype], "local and global", variant), small_config(budget=50, num_blocks=blocks)
    )
    expected = drive(plain_engine, plain, list(CROWD))
    model = random_model(KINDS["local and global"], DTYPES[dtype], variant)
    engine, recorder = recorded_engine(model, small_config(budget=50, num_blocks=blocks), drafting(random_head(model)))
    got = drive(engine, recorder, list(CROWD))
    assert got.tokens == expected.tokens
    assert got.finish == expected.finish
    assert recorder.logits.keys() == plain.logits.keys()
    for key, logits in plain.logits.items():
        assert np.array_equal(bits(recorder.logits[key]), bits(logits)), key
    stats, drafter = engine.scheduler.stats, recorder.drafter
    assert isinstance(drafter, Counted)
    assert drafter.num_offered >= stats.num_draft_tokens > 20
    assert drafter.num_copied > 0
    assert (stats.num_preemptions > 0) == (blocks == 22)
    load_cpu_library(variant).stop_threads()
