"""Structured outputs in the model runner: constrained rows change no bit of their neighbours, a request's tokens do not
depend on its neighbours, and forced tokens as drafts change none."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from core.engine import EngineCore
from core.execution.executor import FinishedStep, ModelInfo
from core.execution.plan import SchedulerOutput
from core.grammars.matchers import RowMatchers
from core.runner.model_runner import ModelRunner
from core.sampling.structured_outputs import StructuredOutputs
from ipc.params.sampling_params import SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.wire.messages import AddRequest, FinishReason, Outputs, RequestFailed
from kernels.cpu.build import usable_variants
from kernels.elements import FLOAT32
from tests.core.driving import small_config
from tests.core.runner.invariance import TINY, tiny_model
from tests.grammar_vocabulary import EOS, make_grammars, schema, structured, text_of

GRAMMARS = make_grammars(TINY.vocab_size)
SCHEMA = schema(name={"type": "string", "maxLength": 6}, age={"type": "integer", "minimum": 0, "maximum": 99})
KINDS = [
    structured(json=SCHEMA, disable_any_whitespace=True),
    structured(regex="[a-e]{3,9}(00)?"),
    structured(choice=["yes", "no", "perhaps"]),
    structured(json=SCHEMA),
]
MAX_LEN = 160


class Executor:
    """A model runner as the executor of an engine."""

    def __init__(self, config: Any, variant: str | None) -> None:
        model = tiny_model(FLOAT32, variant=variant)
        self.info = ModelInfo("tiny", "00", "float32", TINY.vocab_size, MAX_LEN, (EOS,), "L2")
        self.runner = ModelRunner(
            model,
            num_rows=config.max_num_seqs,
            num_blocks=config.num_blocks_override,
            block_size=config.block_size,
            eos_token_ids=(EOS,),
            num_swap_blocks=config.num_swap_blocks,
            grammars=GRAMMARS,
        )

    def execute(self, plan: SchedulerOutput) -> FinishedStep:
        return FinishedStep(self.runner.execute(plan))


Heard = dict[int, tuple[list[int], FinishReason | None, bytes]]  # tokens, finish, log probabilities


def run(
    messages: Sequence[AddRequest], *, drafts: bool = True, variant: str | None = None, **options: Any
) -> tuple[Heard, EngineCore]:
    """What the clients get. Two requests arrive in a step."""
    config = small_config(**{"num_blocks": 300, "block_size": 8, "max_model_len": MAX_LEN, **options})
    executor = Executor(config, variant)
    executor.runner.matchers.offers_drafts = drafts  # type: ignore[union-attr]
    engine, heard, pending = EngineCore(config, executor), Heard(), list(messages)  # type: ignore[arg-type]
    while pending or engine.has_work:
        inbox, pending = pending[:2], pending[2:]
        for _, reply in engine.step([(0, message) for message in inbox], 0):
            assert not isinstance(reply, RequestFailed), reply
            if isinstance(reply, Outputs):
                _take(heard, reply)
        engine.scheduler.check_integrity()
    return heard, engine


def _take(heard: Heard, reply: Outputs) -> None:
    tokens = np.frombuffer(reply.tokens, "<i4").tolist()
    rows = zip(np.frombuffer(reply.numbers, "<u4").tolist(), np.frombuffer(reply.counts, "<u2").tolist(), strict=True)
    for row, (number, count) in enumerate(rows):
        before, _, values = heard.get(number, ([], None, b""))
        finish = FinishReason(reply.finish[row]) if reply.finish else None
        heard[number] = before + tokens[:count], finish or None, values
        tokens = tokens[count:]
    if reply.logprobs is not None:
        ends = np.frombuffer(reply.logprobs.counts, "<u4").cumsum() * 4
        for number, begin, end in zip(
            np.frombuffer(reply.logprobs.numbers, "<u4").tolist(), [0, *ends], ends, strict=False
        ):
            before, finish, values = heard[number]
            heard[number] = before, finish, values + reply.logprobs.values[begin:end]


def request(number: int, constraint: StructuredOutputsParams | None, **options: Any) -> AddRequest:
    params = SamplingParams(
        structured_outputs=constraint, ignore_eos=constraint is None, **{"logprobs": 2, "max_tokens": 40, **options}
    )
    prompt = np.random.default_rng(number).integers(0, 500, 5 + number % 20, np.int32)
    return AddRequest(number, prompt.tobytes(), params, seed=number * 31)


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.0, "bad_words_token_ids": [[3], [97, 98]], "logit_bias": {100: 3.0}},
    {"temperature": 1.2, "top_k": 20, "min_tokens": 2},
]
MESSAGES = [
    request(number, None if number % 3 == 2 else KINDS[number % 4], **OPTIONS[number % 5]) for number in range(18)
]


@pytest.fixture(scope="module")
def together() -> Heard:
    return run(MESSAGES)[0]


def test_outputs_are_what_the_grammars_say(together: Heard) -> None:
    for message in MESSAGES:
        constraint = message.params.structured_outputs
        tokens, finish, _ = together[message.number]
        if constraint is not None and finish is FinishReason.STOP and constraint.kind == "json":
            jsonschema.validate(json.loads(text_of(tokens)), json.loads(SCHEMA))
    ended = [
        finish for message in MESSAGES if message.params.structured_outputs for finish in [together[message.number][1]]
    ]
    assert ended.count(FinishReason.STOP) > 8


@pytest.mark.parametrize(
    "options",
    [
        {"drafts": False},
        {"num_blocks": 40},
        {"num_blocks": 40, "preemption_mode": "swap", "num_swap_blocks": 60},
        {"num_blocks": 40, "drafts": False, "budget": 16},
        *({"variant": variant} for variant in usable_variants()[1:]),
    ],
    ids=str,
)
def test_tokens_and_log_probabilities_do_not_depend_on_the_way(together: Heard, options: dict[str, Any]) -> None:
    variant = options.get("variant")
    expected = together if variant is None else run(MESSAGES, drafts=False, variant=variant)[0]
    heard, engine = run(MESSAGES, **options)
    assert heard == expected
    if "num_blocks" in options:
        assert engine.scheduler.stats.num_preemptions > 0
    assert bool(engine.scheduler.stats.num_drafts) is options.get("drafts", True)


def test_alone_or_beside_others(together: Heard) -> None:
    for message in MESSAGES:
        assert run([message])[0] == {message.number: together[message.number]}


def test_neighbours_bits_are_those_beside_free_requests(together: Heard) -> None:
    """The same requests, but none of them is constrained."""
    free = [request(number, None, **OPTIONS[number % 5]) for number in range(18)]
    heard = run(free)[0]
    for number in range(2, 18, 3):
        assert heard[number] == together[number]


def test_forced_tokens_save_steps() -> None:
    message = request(0, KINDS[0], temperature=0.0)
    with_drafts, without = (run([message], drafts=drafts)[1].scheduler.stats for drafts in (True, False))
    assert with_drafts.num_generation_tokens == without.num_generation_tokens
    assert with_drafts.num_steps < without.num_steps


@pytest.mark.parametrize("variant", usable_variants())
def test_rows_that_have_their_unedited_token_need_no_mask(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """Greedy and drawn, their tokens are those of whole masks, and so are those of all rows beside them."""
    free, plain = structured(regex=r"[\x00-\x7f]*"), [{"temperature": one} for one in (0.0, 1.0, 0.3, 1.7)]
    options = [*plain * 4, *OPTIONS, {"temperature": 0.0, "logprobs": 1}, {"temperature": 1.0, "logprobs": 1}]
    messages = [
        request(number, None if number % 5 == 4 else [free, *KINDS][number % 4], **{"logprobs": None, **one})
        for number, one in enumerate(options)
    ]
    take, answers = RowMatchers.take, Counter[bool]()

    def noted(matchers: RowMatchers, rows: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
        refused, closed = take(matchers, rows, tokens)
        answers[False] += len(refused)
        answers[True] += int(matchers.is_constrained[rows].sum()) - len(refused) - len(closed)
        return refused, closed

    monkeypatch.setattr(RowMatchers, "take", noted)
    for drafts in (True, False):
        got = run(messages, drafts=drafts, variant=variant)[0]
        with monkeypatch.context() as patch:
            patch.setattr(StructuredOutputs, "asks_first", False)
            num_asked = answers.total()
            assert run(messages, drafts=drafts, variant=variant)[0] == got
            assert answers.total() == num_asked
    assert min(answers[True], answers[False]) > 70, answers
