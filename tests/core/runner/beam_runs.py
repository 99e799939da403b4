"""Beam searches of the model runner on a tiny model that transformers has too: what the test files of them share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.engine import EngineCore
from core.execution.executor import FinishedStep, ModelInfo
from core.execution.plan import SchedulerOutput
from core.execution.state_slots import num_states
from core.grammars.grammars import Grammars
from core.model_files.model_config import read_model_config
from core.model_files.tensors.weights import load_weights
from core.models.llama import Llama
from core.runner.model_runner import ModelRunner
from core.runner.state_rows import RowStates
from frontend.client.received_logprobs import PositionLogprobs, logprob_columns_of
from ipc.options.config import EngineConfig
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import AddRequest, FinishReason, Outputs, RequestFailed
from kernels.cpu.library import load_cpu_library
from kernels.elements import FLOAT32
from tests.core.driving import small_config

MAX_TOKENS = 20


@lru_cache(2)
def reference(folder: Path, vocab_size: int, eos: tuple[int, ...]) -> Any:
    """A model of transformers with random weights, and its files in the folder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=list(eos),
        pad_token_id=0,
        initializer_range=0.25,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


@lru_cache(2)
def our_model(folder: Path) -> Llama:
    config = read_model_config(folder)
    return Llama(config, load_weights(folder, config, FLOAT32), FLOAT32, library=load_cpu_library(None))


class Executor:
    """Runs plans with a ModelRunner of the C kernels."""

    def __init__(self, model: Llama, config: EngineConfig, grammars: Grammars | None) -> None:
        assert config.num_blocks_override is not None
        state_bytes = 4 * model.config.state_size
        eos = model.eos_token_ids
        self.info = ModelInfo("tiny", "", "float32", model.vocab_size, 256, eos, "L2", state_bytes=state_bytes)
        states = model.allocate_states(num_states(config, state_bytes))
        self._runner = ModelRunner(
            model,
            num_rows=config.max_num_seqs,
            num_blocks=config.num_blocks_override,
            block_size=config.block_size,
            eos_token_ids=model.eos_token_ids,
            grammars=grammars,
            states=None if states is None else RowStates(states),
        )

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        return FinishedStep(self._runner.execute(plan))


@dataclass
class Heard:
    """What a client has of one sequence."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)  # by position

    @property
    def values(self) -> list[float]:
        """The log probabilities of its tokens."""
        return [float(one.values[0]) for _, one in sorted(self.logprobs.items())][-len(self.tokens) :]


Sequences = dict[tuple[int, int], Heard]


def run(
    folder: Path, messages: Sequence[AddRequest], grammars: Grammars | None = None, **options: Any
) -> tuple[Sequences, EngineCore]:
    """Return the sequences by (number, choice). An AssertionError says why a request failed."""
    config = small_config(**{"num_blocks": 900, "max_num_seqs": 64, "budget": 256, "max_model_len": 120, **options})
    core = EngineCore(config, Executor(our_model(folder), config, grammars))  # type: ignore[arg-type]
    heard = Sequences()
    inbox = [(0, message) for message in messages]
    while inbox or core.has_work:
        for _, reply in core.step(inbox, 0):
            assert not isinstance(reply, RequestFailed), reply.message
            assert isinstance(reply, Outputs), reply
            _take(heard, reply)
        core.scheduler.check_integrity()
        inbox = []
    return heard, core


def _take(heard: Sequences, reply: Outputs) -> None:
    numbers, ids = np.frombuffer(reply.numbers, "<u4").tolist(), np.frombuffer(reply.tokens, "<i4").tolist()
    choices = np.frombuffer(reply.choices, "<u2").tolist() if reply.choices else [0] * len(numbers)
    for row, count in enumerate(np.frombuffer(reply.counts, "<u2").tolist()):
        one = heard.setdefault((numbers[row], choices[row]), Heard())
        one.tokens += ids[:count]
        one.finish = (FinishReason(reply.finish[row]) if reply.finish else None) or one.finish
        ids = ids[count:]
    if reply.logprobs is not None:
        for number, choice, position, one_position in logprob_columns_of(reply.logprobs).split():
            heard.setdefault((number, choice), Heard()).logprobs[position] = one_position


def message(number: int, prompt: Sequence[int], beams: int, **options: Any) -> AddRequest:
    wanted = {"n": beams, "temperature": 0, "max_tokens": MAX_TOKENS, "logprobs": 0, **options}
    params = SamplingParams(use_beam_search=True, **wanted)  # type: ignore[arg-type]
    return AddRequest(number, np.array(prompt, "<i4").tobytes(), params, number)
