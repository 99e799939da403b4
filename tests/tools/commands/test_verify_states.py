"""`engine-core verify` of answers of a model with recurrent layers."""

from pathlib import Path
from typing import Any

import pytest

from core.execution.plan import SchedulerOutput
from core.scheduling.scheduler import Scheduler
from frontend.llm import LLM
from ipc.options.given_options import config_from_options
from ipc.params.sampling_params import SamplingParams
from tests.core.driving import add_message
from tests.core.process.tiny_lfm2 import lfm2_folder
from tools.commands.verify.local_engine import Outcome
from tools.commands.verify.verifier import Answer, Claim, Verifier

SIZES: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "threads": 1, "max_model_len": 32}
LENGTH = 12
PROMPTS = [[number, 5, 6, 7, 8] for number in range(20, 36)]


def test_rows_that_are_computed_again_have_no_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the step that computes a preempted row's tokens again, the prefix cache may take a state of it."""
    model = str(lfm2_folder(tmp_path))
    sampled: dict[str, Any] = {"temperature": 1.0, "max_tokens": LENGTH, "ignore_eos": True}
    with LLM(model, **SIZES) as llm:
        prompts: list[Any] = [{"prompt_token_ids": one} for one in PROMPTS]
        given = [SamplingParams(seed=seed, **sampled) for seed in range(len(PROMPTS))]
        outputs = llm.generate(prompts, given, use_tqdm=False)
    claims = [
        Claim(add_message(seed, prompt, LENGTH, seed=seed, temperature=1.0), [Answer(output.outputs[0].token_ids)])
        for seed, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True))
    ]
    plans, schedule = list[SchedulerOutput](), Scheduler.schedule

    def noted(self: Scheduler, now_ns: int) -> SchedulerOutput:
        plans.append(schedule(self, now_ns))
        return plans[-1]

    monkeypatch.setattr(Scheduler, "schedule", noted)
    verifier = Verifier(config_from_options(model=model, **SIZES, block_size=4, num_blocks_override=18))
    try:
        assert verifier.verify(claims) == [Outcome()] * len(claims)
    finally:
        verifier.close()
    guessed = [plan for plan in plans if len(plan.num_draft_tokens)]
    known = [plan.num_scheduled_tokens - plan.num_draft_tokens for plan in guessed]
    for plan, counts in zip(guessed, known, strict=True):
        assert not plan.num_draft_tokens[counts > 1].any(), (counts, plan.num_draft_tokens)
    assert max(counts.max() for counts in known) > len(PROMPTS[0]), "no answer was computed again next to drafts"
