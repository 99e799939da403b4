"""Beam search with a model: transformers' sequences and scores, and the same bits in any company."""

import itertools
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.engine import EngineCore
from core.execution.executor import FinishedStep, ModelInfo
from core.execution.plan import SchedulerOutput
from core.model_files.model_config import read_model_config
from core.model_files.weights import load_weights
from core.models.llama import Llama
from core.runner.model_runner import ModelRunner
from frontend.client.received_logprobs import logprob_columns_of
from ipc.config import EngineConfig
from ipc.messages import AddRequest, Outputs
from ipc.sampling_params import SamplingParams
from kernels.cpu.library import load_cpu_library
from kernels.elements import FLOAT32
from tests.core.driving import small_config

VOCAB_SIZE = 60
EOS = (2, 7)
MAX_TOKENS = 20
PROMPTS = [np.random.default_rng(0).integers(8, VOCAB_SIZE, length).tolist() for length in (5, 17, 33)]

#: beams, length_penalty, early_stopping, repetition_penalty, stop_token_ids
EVERY = list(itertools.product((2, 4, 8), (-1.0, 0.0, 1.0, 2.0), (True, False, "never"), (1.0, 1.3), ((), (11,))))


@lru_cache(1)
def reference(folder: Path) -> Any:
    """A model of transformers with random weights, and its files in the folder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=list(EOS),
        pad_token_id=0,
        initializer_range=0.25,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


class Executor:
    """Runs plans with a ModelRunner of the C kernels."""

    def __init__(self, model: Llama, config: EngineConfig) -> None:
        assert config.num_blocks_override is not None
        self.info = ModelInfo("tiny", "", "float32", VOCAB_SIZE, 256, EOS, "L2")
        self._runner = ModelRunner(
            model,
            num_rows=config.max_num_seqs,
            num_blocks=config.num_blocks_override,
            block_size=config.block_size,
            eos_token_ids=EOS,
        )

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        return FinishedStep(self._runner.execute(plan))


@lru_cache(1)
def our_model(folder: Path) -> Llama:
    reference(folder)
    config = read_model_config(folder)
    return Llama(config, load_weights(folder, config, FLOAT32), FLOAT32, library=load_cpu_library(None))


Sequences = dict[tuple[int, int], tuple[list[int], list[float]]]


def run(folder: Path, messages: list[AddRequest], **options: Any) -> tuple[Sequences, EngineCore]:
    """Return the tokens and log probabilities by (number, choice)."""
    config = small_config(**{"num_blocks": 900, "max_num_seqs": 64, "budget": 256, "max_model_len": 120, **options})
    core = EngineCore(config, Executor(our_model(folder), config))  # type: ignore[arg-type]
    tokens, values = dict[tuple[int, int], list[int]](), dict[tuple[int, int], list[float]]()
    inbox = [(0, message) for message in messages]
    while inbox or core.has_work:
        for _, reply in core.step(inbox, 0):
            assert isinstance(reply, Outputs), reply
            columns = [np.frombuffer(getattr(reply, name), "<u4").tolist() for name in ("numbers", "positions")]
            choices = np.frombuffer(reply.choices, "<u2").tolist() if reply.choices else [0] * len(columns[0])
            counts, ids = np.frombuffer(reply.counts, "<u2").tolist(), np.frombuffer(reply.tokens, "<i4").tolist()
            for number, choice, count in zip(columns[0], choices, counts, strict=True):
                tokens.setdefault((number, choice), []).extend(ids[:count])
                ids = ids[count:]
            if reply.logprobs is not None:
                for number, choice, _, one in logprob_columns_of(reply.logprobs).split():
                    values.setdefault((number, choice), []).append(float(one.values[0]))
        core.scheduler.check_integrity()
        inbox = []
    return {key: (ids, values[key]) for key, ids in tokens.items()}, core


def message(number: int, prompt: list[int], beams: int, **options: Any) -> AddRequest:
    params = SamplingParams(use_beam_search=True, n=beams, temperature=0, max_tokens=MAX_TOKENS, logprobs=0, **options)
    return AddRequest(number, np.array(prompt, "<i4").tobytes(), params, number)


def check(folder: Path, cases: list[Any]) -> None:
    """All cases run in one engine at once; each equals transformers' search alone."""
    torch, model = pytest.importorskip("torch"), reference(folder)
    runs = [(case, prompt) for case in cases for prompt in PROMPTS]
    messages = [
        message(
            number,
            prompt,
            beams,
            length_penalty=penalty,
            early_stopping=early,
            repetition_penalty=repetition,
            stop_token_ids=list(stops),
        )
        for number, ((beams, penalty, early, repetition, stops), prompt) in enumerate(runs)
    ]
    found, _ = run(folder, messages)
    for number, ((beams, penalty, early, repetition, stops), prompt) in enumerate(runs):
        options = {} if repetition == 1 else {"repetition_penalty": repetition}
        with torch.no_grad():
            wanted = model.generate(
                torch.tensor([prompt]),
                num_beams=beams,
                num_return_sequences=beams,
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                length_penalty=penalty,
                early_stopping=early,
                eos_token_id=[*EOS, *stops],
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
        for choice in range(beams):
            tokens, values = found[number, choice]
            sequence = wanted.sequences[choice, len(prompt) :].tolist()
            assert sequence[: len(tokens)] == tokens, (runs[number], choice)
            assert set(sequence[len(tokens) :]) <= {EOS[0]}  # what transformers fills up with
            score = sum(values) / len(tokens) ** penalty
            assert abs(score - wanted.sequences_scores[choice].item()) < 1e-4 * max(1, abs(score))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beams")


def test_sequences_and_scores_are_those_of_transformers(folder: Path) -> None:
    check(folder, EVERY[::29])


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak_sequences_and_scores_are_those_of_transformers(folder: Path) -> None:
    check(folder, EVERY)


def test_one_beam_is_greedy_decoding(folder: Path) -> None:
    prompt = np.array(PROMPTS[1], "<i4").tobytes()
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0)
    found, _ = run(folder, [message(0, PROMPTS[1], 1), AddRequest(1, prompt, greedy, 1)])
    assert found[0, 0][0] == found[1, 0][0]
    assert np.allclose(found[0, 0][1], found[1, 0][1], atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_caching": False},
        {"num_blocks": 75, "preemption_mode": "recompute"},
        {"num_blocks": 75, "preemption_mode": "swap", "prefix_caching": False},
        {"depth": 2, "block_size": 1, "num_blocks": 3600},
        {"budget": 24, "max_num_seqs": 20},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_company(folder: Path, options: dict[str, Any]) -> None:
    """Equal log probabilities, bit for bit, alone and beside other searches that take the blocks."""
    messages = [
        message(n, PROMPTS[n % 3], 4 + n % 3, repetition_penalty=1.2, bad_words_token_ids=[[9, 10]]) for n in range(6)
    ]
    alone = [run(folder, [one])[0] for one in messages]
    together, core = run(folder, messages, **options)
    for one in alone:
        for key, sequence in one.items():
            assert together[key] == sequence
    assert (core.scheduler.stats.num_preemptions > 0) == (options.get("num_blocks") == 75)


def test_a_temperature_divides_logits(folder: Path) -> None:
    hot, _ = run(folder, [message(0, PROMPTS[0], 4)])
    params = SamplingParams(use_beam_search=True, n=4, temperature=3.0, max_tokens=MAX_TOKENS, logprobs=0)
    other, _ = run(folder, [AddRequest(0, np.array(PROMPTS[0], "<i4").tobytes(), params, 0)])
    assert other != hot
    assert all(value <= 0 for _, values in other.values() for value in values)
