"""Structured outputs through the whole engine core, with the fake executor, whose tokens a grammar may choose from.

The fake executor chooses from the allowed tokens by a function of all ids before. So what a request gets must be the
same whatever happens to it on its way, and whoever is beside it.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest

from core.engine import EngineCore
from core.executors.fake import create
from core.executors.fake_options import with_fake_options
from core.inputs import EngineInput, HoldClient, ReleaseClient
from ipc.options.speculation import SpeculativeConfig
from ipc.params.sampling_params import SamplingParams
from ipc.params.structured_outputs import StructuredOutputsParams
from ipc.wire.messages import Abort, AddRequest, ErrorCode, FinishReason, Outputs
from tests.columns import pack_numbers
from tests.core.driving import Inbox, Received, small_config
from tests.core.hostile_drafts import use
from tests.fake_options import fake_options
from tests.grammar_vocabulary import EOS, VOCAB_SIZE, schema, structured, text_of, tokenizer_files

MAX_LEN = 120
SCHEMA = schema(name={"type": "string", "maxLength": 6}, age={"type": "integer", "minimum": 0, "maximum": 99})
CALL = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "json_schema", "json_schema": {"enum": ["yes", "no"]}},
    "end": "</call>",
}
CALLS = {"type": "triggered_tags", "triggers": ["<"], "tags": [CALL]}
KINDS = [
    structured(json=SCHEMA, disable_any_whitespace=True),
    structured(regex="[a-e]{3,9}(00)?"),
    structured(choice=["yes", "no", "perhaps"]),
    structured(grammar='root ::= "<" [a-z]{2,5} ">"'),
    structured(json={"type": "array", "items": {"enum": [True, None]}, "maxItems": 3}, whitespace_pattern=" ?"),
    structured(structural_tag={"format": {**CALLS, "at_least_one": True, "stop_after_first": True}}),
    structured(structural_tag={"format": {**CALL, "content": {"type": "any_text", "max_chars": 6}}}),
]


def add(
    number: int,
    constraint: StructuredOutputsParams | None,
    *,
    delivered: Sequence[int] = (),
    n: int = 1,
    **options: Any,
) -> AddRequest:
    params = SamplingParams(
        structured_outputs=constraint, ignore_eos=constraint is None, n=n, **{"max_tokens": 60, **options}
    )
    column = [np.array(delivered, "<i4").tobytes()] if len(delivered) else []
    prompt = np.array([number % 250, 7, 9, number % 11], "<i4").tobytes()
    return AddRequest(number, prompt, params, number * 977, delivered=column)


def messages(count: int) -> list[AddRequest]:
    """Every third request is free."""
    kinds = [None if number % 3 == 2 else KINDS[number % len(KINDS)] for number in range(count)]
    return [add(number, kind, temperature=number % 2) for number, kind in enumerate(kinds)]


class Runs:
    """An engine core and its client."""

    def __init__(self, **options: Any) -> None:
        config = small_config(**{"max_model_len": MAX_LEN, **options})
        config = with_fake_options(config, eos_token_id=EOS, vocab_size=VOCAB_SIZE)
        executor = create(config)
        executor.grammars.use_files(tokenizer_files())
        executor.initialize_cache(config)
        self.engine, self.inbox = EngineCore(config, executor), Inbox()

    def step(self, inputs: Sequence[EngineInput] = ()) -> None:
        for message in inputs:
            if isinstance(message, AddRequest):
                self.inbox.expect(0, message)
        self.inbox.take(self.engine.step([(0, message) for message in inputs], 0))
        self.engine.scheduler.check_integrity()

    def drain(self) -> dict[int, Received]:
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step()
        return {number: received for (_, number), received in self.inbox.received.items()}


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def run(added: Sequence[AddRequest], **options: Any) -> dict[int, Received]:
    """Two requests arrive in a step."""
    runs = Runs(**options)
    for at in range(0, len(added), 2):
        runs.step(added[at : at + 2])
    return runs.drain()


def check(constraint: StructuredOutputsParams, received: Received) -> None:
    """The output is whole, and what the constraint says."""
    assert received.finish is FinishReason.STOP, received
    assert received.tokens[-1] == EOS
    text = text_of(received.tokens)
    match constraint.kind:
        case "json":
            jsonschema.validate(json.loads(text), json.loads(str(constraint.json)))
        case "regex":
            assert re.fullmatch(constraint.regex or "", text)
        case "choice":
            assert text in (constraint.choice or ())
        case "structural_tag":
            content = '"(yes|no)"' if "triggered" in str(constraint.structural_tag) else "(?s:.{0,6})"
            assert re.fullmatch(f"<call>{content}</call>", text)
        case _:
            assert re.fullmatch("<[a-z]{2,5}>", text)


ADDED = messages(24)


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    """What each request gets when it is the only one."""
    return {message.number: run([message])[message.number].tokens for message in ADDED}


def test_every_output_is_what_its_grammar_says_and_there_are_several(alone: dict[int, list[int]]) -> None:
    received = run(ADDED)
    for message in ADDED:
        if message.params.structured_outputs is not None:
            check(message.params.structured_outputs, received[message.number])
    assert len({text_of(tokens) for tokens in alone.values()}) > 12


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"depth": 2},
        {"num_blocks": 40},  # preempted, and computed again
        {"num_blocks": 40, "preemption_mode": "swap", "num_swap_blocks": 60},
        {"num_blocks": 40, "depth": 2},
        {"speculative_config": SpeculativeConfig(method="ngram", prompt_lookup_min=1)},
        {"speculative_config": SpeculativeConfig(method="suffix"), "num_blocks": 40, "depth": 2},
        {"executor_options": fake_options(tokens_per_step=5)},
        {"executor_options": fake_options(tokens_per_step=5), "depth": 2, "num_blocks": 40},
        {"enable_chunked_prefill": False},
    ],
    ids=str,
)
def test_a_request_gets_the_same_whatever_happens(alone: dict[int, list[int]], options: dict[str, Any]) -> None:
    received = run(ADDED, **options)
    assert {number: one.tokens for number, one in received.items()} == alone


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["wrong", "random", "long"])
def test_drafts_that_no_grammar_allows_change_nothing(alone: dict[int, list[int]], kind: str, depth: int) -> None:
    """Most drafts are refused by the grammar; forced tokens are drafts beside them."""
    runs = Runs(depth=depth, speculative_config=SpeculativeConfig(method="ngram"))
    use(runs.engine.scheduler, kind, lambda table: lambda row, count: alone[int(table.number[row])][:count], VOCAB_SIZE)
    for at in range(0, len(ADDED), 2):
        runs.step(ADDED[at : at + 2])
    assert {number: received.tokens for number, received in runs.drain().items()} == alone
    assert runs.engine.scheduler.stats.num_draft_tokens > 100


def test_preemption_happens_in_these_runs() -> None:
    runs = Runs(num_blocks=40)
    runs.step(ADDED)
    runs.drain()
    assert runs.engine.scheduler.stats.num_preemptions > 3


def test_held_and_released_requests_go_on_in_their_grammars(alone: dict[int, list[int]]) -> None:
    runs = Runs()
    runs.step(ADDED[:8])
    for _ in range(3):
        runs.step()
        runs.step([HoldClient()])
        runs.step([ReleaseClient()])
    received = runs.drain()
    assert {number: one.tokens for number, one in received.items()} == {n: alone[n] for n in range(8)}


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_a_request_resumes_behind_what_was_delivered(alone: dict[int, list[int]], number: int) -> None:
    whole, message = alone[number], ADDED[number]
    for count in range(1, len(whole)):
        params = message.params
        again = AddRequest(
            number, message.prompt_token_ids, params, message.seed, delivered=[np.array(whole[:count], "<i4").tobytes()]
        )
        assert run([again])[number].tokens == whole


def test_choices_have_matchers_of_their_own() -> None:
    message = add(5, KINDS[0], n=4, temperature=1.0)
    runs, tokens = Runs(), [list[int](), list[int](), list[int](), list[int]()]
    inbox: list[tuple[int, EngineInput]] = [(0, message)]
    for _ in range(200):
        for _, reply in runs.engine.step(inbox, 0):
            assert isinstance(reply, Outputs)
            choices = np.frombuffer(reply.choices, "<u2") if reply.choices else np.zeros(len(reply.counts) // 2, int)
            given = np.frombuffer(reply.tokens, "<i4").tolist()
            for choice, count in zip(choices.tolist(), np.frombuffer(reply.counts, "<u2").tolist(), strict=True):
                tokens[choice] += given[:count]
                given = given[count:]
        inbox = []
    texts = [text_of(each) for each in tokens]
    for text in texts:
        jsonschema.validate(json.loads(text), json.loads(SCHEMA))
    assert len(set(texts)) == 4


def test_a_search_keeps_to_its_grammar() -> None:
    """Also with a vocabulary that has fewer tokens than the model has ids."""
    searching = {"use_beam_search": True, "best_of": 3, "temperature": 0}
    received = run([add(1, structured(regex="[a-c]{4}"), n=2, **searching)])
    assert all(re.fullmatch("[a-c]{4}", text_of(received[1 + choice].tokens)) for choice in range(2))


@pytest.mark.parametrize(
    "options", [{}, {"depth": 2}, {"executor_options": fake_options(tokens_per_step=3)}, {"num_blocks": 40}]
)
def test_structural_tags_beside_other_kinds(alone: dict[int, list[int]], options: dict[str, Any]) -> None:
    """Free text that ends with a mark, forced text behind it, and JSON; the neighbours get the same tokens as ever."""
    value = {"type": "json_schema", "json_schema": {"enum": ["yes", "no"]}}
    tag = {"type": "tag", "begin": "<call>", "content": value, "end": "</call>"}
    calls = {"type": "triggered_tags", "triggers": ["<"], "tags": [tag], "stop_after_first": True, "at_least_one": True}
    free = {**tag, "content": {"type": "any_text", "max_chars": 6}}
    tags = [add(50 + index, structured(structural_tag={"format": one})) for index, one in enumerate((calls, free))]
    received = run([tags[0], *ADDED[:6], tags[1], *ADDED[6:12]], **options)
    for number, content in ((50, '"(yes|no)"'), (51, "(?s:.{0,6})")):
        assert received[number].finish is FinishReason.STOP
        assert re.fullmatch(f"<call>{content}</call>", text_of(received[number].tokens))
    assert {number: received[number].tokens for number in range(12)} == {number: alone[number] for number in range(12)}


def test_options_that_contradict_the_grammar_fail_the_request_alone(alone: dict[int, list[int]]) -> None:
    longer = add(50, structured(choice=["no"]), min_tokens=9)
    for options in ({}, {"depth": 2}, {"executor_options": fake_options(tokens_per_step=3)}):
        received = run([*ADDED[:6], longer, *ADDED[6:12]], **options)
        text = next(one for number, one in received.items() if number == 50)
        if text.failed is not None:
            assert text.failed.code is ErrorCode.INVALID_ARGUMENT
        assert {number: received[number].tokens for number in range(12)} == {n: alone[n] for n in range(12)}


def test_a_delivered_output_that_the_grammar_refuses_fails_alone(alone: dict[int, list[int]]) -> None:
    wrong = add(50, KINDS[1], delivered=[1, 2, 3])
    received = run([*ADDED[:3], wrong, *ADDED[3:6]])
    failed = received[50].failed
    assert failed is not None
    assert failed.message.startswith("structured_outputs: ")
    assert {number: received[number].tokens for number in range(6)} == {n: alone[n] for n in range(6)}


def test_a_grammar_that_cannot_be_compiled_fails_alone_where_nothing_has_refused_it() -> None:
    """A replay has no preparation."""
    received = run([ADDED[0], add(50, structured(regex="(")), ADDED[1]])
    failed = received[50].failed
    assert failed is not None
    assert "unclosed group" in failed.message
    check(KINDS[0], received[0])


def test_it_ends_by_length_and_by_stop_tokens() -> None:
    message = add(1, KINDS[0], max_tokens=3)
    assert run([message])[1].finish is FinishReason.LENGTH
    free = run([add(1, KINDS[1])])[1].tokens
    stopped = run([add(1, KINDS[1], stop_token_ids=[free[1]])])[1]
    assert (stopped.tokens, stopped.finish, stopped.stop_token) == (free[:2], FinishReason.STOP, free[1])


def test_an_abort_frees_the_row_for_another_grammar() -> None:
    runs = Runs(max_num_seqs=1)
    runs.step([add(1, KINDS[0], max_tokens=None)])
    runs.step()
    runs.step([Abort(pack_numbers([1])), add(2, KINDS[2])])
    received = runs.drain()
    assert received[1].finish is FinishReason.ABORT
    check(KINDS[2], received[2])
