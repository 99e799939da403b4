"""A runner whose steps sample behind drafts, right ones and wrong ones: streams are those of one token a step."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from core.engine import EngineCore
from core.execution.plan import ModelRunnerOutput, SchedulerOutput
from core.models.step import ONCE
from core.runner.accepted import accepted
from core.runner.step_inputs import StepInputs
from ipc.config import EngineConfig
from ipc.messages import AddRequest, FinishReason, Outputs
from tests.core.driving import add_message, small_config
from tests.core.runner.invariance import Recorder, RecordingExecutor, tiny_model
from tests.core.scheduling.test_token_counts_of_results import int32s
from tests.core.test_several_tokens import Found, take_logprobs, take_rows


class Drafting(Recorder):
    """Each row that samples gets as many drafts as its last block has room for: its plain stream's tokens, one in four
    of them wrong. Its drafts are computed by the step and forgotten: the plan knows nothing of them."""

    plain: dict[int, list[int]]  # by seed
    num_accepted = 0
    num_drafts = 0

    def prepare(self, plan: SchedulerOutput) -> StepInputs:
        inputs = self._inputs(plan)
        table, rng = self.table, np.random.default_rng(plan.step)
        runs, logits_rows, sample_rows, offsets = [], list[int](), list[int](), list[int]()
        end = 0
        for index, row in enumerate(inputs.rows.tolist()):
            known, count = int(inputs.context_lens[index]), int(inputs.num_tokens[index])
            drafts = self._drafts(row, known, rng) if inputs.samples[index] else []
            positions = np.arange(known - count, known + len(drafts))
            runs.append((row, positions))
            end += len(positions)
            if inputs.samples[index]:
                logits_rows += range(end - len(drafts) - 1, end)
                sample_rows += [index] * (len(drafts) + 1)
                offsets += range(len(drafts) + 1)
        rows = np.concatenate([np.full(len(positions), row) for row, positions in runs])
        places = np.concatenate([positions for _, positions in runs])
        slots = table.blocks.get(rows, places // self.block_size) * np.int64(self.block_size) + places % self.block_size
        counts = np.array([len(positions) for _, positions in runs])
        return inputs._replace(
            token_ids=torch.from_numpy(table.tokens.get(rows, places).astype(np.int64)),
            positions=torch.from_numpy(places),
            slots=torch.from_numpy(slots),
            num_tokens=counts,
            context_lens=inputs.context_lens + counts - inputs.num_tokens,
            num_samples=len(offsets),
            logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
            generation=ONCE,
            sample_rows=np.array(sample_rows, np.int64) if offsets else None,
            sample_offsets=np.array(offsets, np.int64) if offsets else None,
        )

    def _drafts(self, row: int, known: int, rng: np.random.Generator) -> list[int]:
        position = known - int(self.table.num_prompt_tokens[row])
        room = int(self.table.num_blocks[row]) * self.block_size - known
        drafts = self.plain[int(self.sampling.seed[row])][position : position + min(room, 5)]
        drafts = [token if rng.random() < 0.75 else 3 for token in drafts]
        if drafts:
            self.table.write_drafts(np.array([row]), int32s(*drafts), np.array([len(drafts)]))
        self.num_drafts += len(drafts)
        return drafts

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(plan)
        if output.counts is not None:
            self.num_accepted += int(np.maximum(output.counts - 1, 0).sum())
        return output


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.8, "top_k": 9, "min_tokens": 12, "stop_token_ids": list(range(0, 60, 3))},
    {"temperature": 0.0, "presence_penalty": 1.1, "logprobs": 1, "prompt_logprobs": 1},
    {"temperature": 0.0, "logit_bias": {3: 2.0, 9: 1.0}, "bad_words_token_ids": [[3, 9], [9, 3], [5]]},
]


def messages() -> list[AddRequest]:
    return [
        add_message(seed, [(7 * seed + place) % 60 for place in range(9 + seed)], 30, seed=seed, **OPTIONS[seed % 6])
        for seed in range(12)
    ]


def run(
    config: EngineConfig, dtype: torch.dtype, plain: dict[int, list[int]] | None
) -> tuple[Found, Recorder, EngineCore]:
    kind = Recorder if plain is None else Drafting
    recorder = kind(tiny_model(dtype), config)
    if isinstance(recorder, Drafting):
        recorder.plain = plain or {}
    engine = EngineCore(config, RecordingExecutor(recorder))
    recorder.scheduler = engine.scheduler
    found, pending = Found(), messages()
    while pending or engine.has_work:
        replies = engine.step([(0, message) for message in pending[:2]], 0)
        engine.scheduler.check_integrity()
        pending = pending[2:]
        for _, reply in replies:
            assert isinstance(reply, Outputs), reply
            take_rows(reply, found)
            take_logprobs(reply, found)
    for key, entries in found.items():
        if key[2] == "logprobs":  # those of a prompt are said again where its request was preempted
            found[key] = sorted(set(entries))
    return found, recorder, engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_streams_are_those_of_one_token_a_step(mode: str, dtype: torch.dtype) -> None:
    """Tokens, ends and log probabilities, bit for bit, beside rows with other options and among preemptions."""
    torch.set_num_threads(1)
    config = msgspec.structs.replace(
        small_config(24, 8, max_num_seqs=6, budget=40, max_model_len=80), logprobs_mode=mode
    )
    expected, _, one = run(config, dtype, None)
    plain = {
        key[0]: [entry for entry in entries if isinstance(entry, int)]
        for key, entries in expected.items()
        if key[2] == "row"
    }
    found, recorder, engine = run(config, dtype, plain)
    assert found == expected
    assert isinstance(recorder, Drafting)
    assert 100 < recorder.num_accepted < recorder.num_drafts - 50
    assert engine.scheduler.stats.num_steps < one.scheduler.stats.num_steps
    assert {entries[-1][0] for key, entries in found.items() if key[2] == "row"} == {
        FinishReason.LENGTH,
        FinishReason.STOP,
    }


def test_accepted_are_the_samples_up_to_the_first_wrong_draft() -> None:
    runner = Drafting(tiny_model(torch.float32), small_config(24, 8))
    table = runner.table
    for row in range(5):
        table.append_tokens(np.array([row]), int32s(40))
    rows = np.array([0, 0, 0, 1, 2, 2, 2, 3, 3, 4, 4])
    table.write_drafts(np.array([0, 2, 3, 4]), int32s(7, 8, 7, 8, 7, 7), np.array([2, 2, 1, 1]))
    offsets = np.array([0, 1, 2, 0, 0, 1, 2, 0, 1, 0, 1])
    sampled = int32s(7, 8, 9, 5, 7, 1, 2, 7, -1, -1, 7)
    kept = accepted(rows, offsets, sampled, table)
    assert kept.tolist() == [True, True, True, True, True, True, False, True, False, True, False]
