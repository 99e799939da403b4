"""RequestState: what each output kind shows, where texts end, and why."""

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from frontend.client.progress import Progress
from frontend.client.received_logprobs import PositionLogprobs, ReceivedLogprobs
from frontend.results.completion_state import needs_every_token
from frontend.results.outputs import Logprob
from frontend.results.request_state import RequestState
from frontend.text.prompts import Prompt
from frontend.text.tokenizer import Tokenizer
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.wire.messages import FinishReason

WORDS = ["</s>", "a", "b", "c", "d", "e"]
CUMULATIVE, DELTA, FINAL = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def tokenizer():
    hf = tokenizers.Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="a"))
    hf.decoder = decoders.Fuse()
    hf.add_special_tokens(["</s>"])
    return Tokenizer(hf, eos_token_ids=[0])


def progress(ids, finish=FinishReason.NONE, stop_token=None):
    return Progress(np.array(ids, np.int32), finish, stop_token, 2, 1.0, 2.0, 5.0, 6.0 if finish else 0.0, None)


def state_for(tokenizer, **parameters):
    return RequestState("id", 0, Prompt("p", [1]), SamplingParams(max_tokens=None, **parameters), tokenizer=tokenizer)


def play(state, *steps):
    """(text, token ids, finish reason, stop reason) of each output."""
    outputs = [state.update(progress(*step)) for step in steps]
    return [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason)
        for output in outputs
        if output is not None
        for one in output.outputs
    ]


def test_cumulative_shows_all_so_far(tokenizer):
    steps = play(state_for(tokenizer), ([1],), ([],), ([2, 3],), ([4], FinishReason.LENGTH))
    assert steps == [
        ("a", [1], None, None),
        ("abc", [1, 2, 3], None, None),
        ("abcd", [1, 2, 3, 4], "length", None),
    ]


def test_delta_shows_what_is_new(tokenizer):
    steps = play(state_for(tokenizer, output_kind=DELTA), ([1],), ([2, 3],), ([0], FinishReason.STOP))
    assert steps == [("a", [1], None, None), ("bc", [2, 3], None, None), ("", [0], "stop", None)]


def test_final_only_shows_the_end(tokenizer):
    state = state_for(tokenizer, output_kind=FINAL)
    assert play(state, ([1],), ([2, 0], FinishReason.STOP)) == [("ab", [1, 2, 0], "stop", None)]
    assert state.finished


@pytest.mark.parametrize("kind", [CUMULATIVE, FINAL])
def test_a_stop_token_ends_the_ids_but_not_the_text(tokenizer, kind):
    step = ([1, 3], FinishReason.STOP, 3)
    assert play(state_for(tokenizer, output_kind=kind), step) == [("a", [1, 3], "stop", 3)]
    shown = state_for(tokenizer, output_kind=kind, include_stop_str_in_output=True)
    assert play(shown, step) == [("ac", [1, 3], "stop", 3)]


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL])
def test_a_stop_string_ends_the_request_here(tokenizer, kind):
    state = state_for(tokenizer, output_kind=kind, stop="cd")
    assert play(state, ([1, 2, 3, 4, 5, 5],)) == [("ab", [1, 2, 3, 4], "stop", "cd")]
    assert state.finished
    assert state.completions[0].num_tokens == 6


def test_what_may_begin_a_stop_string_waits(tokenizer):
    state = state_for(tokenizer, output_kind=DELTA, stop=["cd"])
    assert play(state, ([1, 3],), ([5],), ([3],), ([1], FinishReason.LENGTH)) == [
        ("a", [1, 3], None, None),
        ("c", [5], None, None),
        ("e", [3], None, None),
        ("ca", [1], "length", None),
    ]


def test_an_aborted_request_says_so(tokenizer):
    assert play(state_for(tokenizer), ([1], FinishReason.ABORT)) == [("a", [1], "abort", None)]


def test_no_text_without_tokenizer_or_by_request(tokenizer):
    for state in (state_for(None), state_for(tokenizer, detokenize=False), state_for(None, output_kind=FINAL)):
        assert play(state, ([1, 2], FinishReason.LENGTH)) == [("", [1, 2], "length", None)]


def test_the_rest_of_the_output(tokenizer):
    output = state_for(tokenizer).update(progress([1, 2, 3], FinishReason.LENGTH))
    assert (output.request_id, output.prompt, output.prompt_token_ids, output.finished) == ("id", "p", [1], True)
    assert (output.num_cached_tokens, output.metrics.ttft, output.metrics.tpot) == (2, 1.0, 1.5)
    assert (output.metrics.arrival_time, output.metrics.finished_time) == (1.0, 6.0)


def test_outputs_do_not_share_their_lists(tokenizer):
    state = state_for(tokenizer)
    first = state.update(progress([1]))
    state.update(progress([2]))
    assert first.outputs[0].token_ids == [1]


def test_only_the_end_matters_where_nothing_is_shown_before():
    assert not needs_every_token(SamplingParams(output_kind=FINAL))
    assert needs_every_token(SamplingParams(output_kind=FINAL, stop="x"))
    assert needs_every_token(SamplingParams())


def with_logprobs(state, *steps):
    """(token ids with logprobs, cumulative, prompt_logprobs) of each output; values are -1/4 a token."""
    received = ReceivedLogprobs(2)
    received.add(1, PositionLogprobs(1, np.array([3], np.int32), np.array([-2.0], np.float32)))
    shown, position = [], 2
    for ids, finish in steps:
        for token in ids:
            received.add(position, PositionLogprobs(2, np.array([token, 5], np.int32), np.array([-0.25, -0.125])))
            position += 1
        output = state.update(progress(ids, finish)._replace(logprobs=received))
        one = output.outputs[0]
        assert [next(iter(place)) for place in one.logprobs] == one.token_ids
        shown.append((one.token_ids, one.cumulative_logprob, output.prompt_logprobs))
    return shown


def test_logprobs_of_each_output_kind(tokenizer):
    steps = ([1], FinishReason.NONE), ([2, 3], FinishReason.LENGTH)
    prompt = [None, {3: Logprob(-2.0, 1, "c")}]
    options = {"logprobs": 1, "prompt_logprobs": 0}
    assert with_logprobs(state_for(tokenizer, output_kind=DELTA, **options), *steps) == [
        ([1], -0.25, prompt),
        ([2, 3], -0.75, None),
    ]
    assert with_logprobs(state_for(tokenizer, **options), *steps) == [
        ([1], -0.25, prompt),
        ([1, 2, 3], -0.75, prompt),
    ]


def shown(output):
    """(choice, text, token ids, finish reason) of each completion; None for no output."""
    return output and [(one.index, one.text, one.token_ids, one.finish_reason) for one in output.outputs]


def test_choices_of_each_output_kind(tokenizer):
    states = {kind: state_for(tokenizer, output_kind=kind, n=2) for kind in (CUMULATIVE, DELTA, FINAL)}
    both = {kind: shown(state.update(progress([1]), progress([]))) for kind, state in states.items()}
    assert both == {CUMULATIVE: [(0, "a", [1], None), (1, "", [], None)], DELTA: [(0, "a", [1], None)], FINAL: None}
    one_ends = progress([2, 3], FinishReason.LENGTH), progress([4])
    both = {kind: shown(state.update(*one_ends)) for kind, state in states.items()}
    assert both == {
        CUMULATIVE: [(0, "abc", [1, 2, 3], "length"), (1, "d", [4], None)],
        DELTA: [(0, "bc", [2, 3], "length"), (1, "d", [4], None)],
        FINAL: None,
    }
    assert {tuple(state.wanted) for state in states.values()} == {((1, 1),)}
    both = {kind: shown(state.update(progress([5, 0], FinishReason.STOP))) for kind, state in states.items()}
    everything = [(0, "abc", [1, 2, 3], "length"), (1, "de", [4, 5, 0], "stop")]
    assert both == {CUMULATIVE: everything, DELTA: [(1, "e", [5, 0], "stop")], FINAL: everything}
    assert all(state.finished for state in states.values())


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "abc")])
def test_a_stop_string_ends_one_choice(tokenizer, include, text):
    state = state_for(tokenizer, n=2, stop="bc", include_stop_str_in_output=include)
    output = state.update(progress([1, 2, 3, 4]), progress([2]))
    assert shown(output)[0] == (0, text, [1, 2, 3], "stop")
    assert (output.finished, output.outputs[0].stop_reason, state.wanted) == (False, "bc", [(1, 1)])
    assert (state.take_stopped(), state.take_stopped()) == ([0], [])
    output = state.update(progress([4, 0], FinishReason.STOP))
    assert shown(output) == [(0, text, [1, 2, 3], "stop"), (1, "bd", [2, 4, 0], "stop")]
    assert state.take_stopped() == []


def test_special_tokens_of_choices(tokenizer):
    for skip, texts in ((True, ["a", "b"]), (False, ["</s>a", "b</s>"])):
        state = state_for(tokenizer, n=2, skip_special_tokens=skip, output_kind=FINAL)
        ends = progress([0, 1], FinishReason.LENGTH), progress([2, 0], FinishReason.LENGTH)
        assert [one.text for one in state.update(*ends).outputs] == texts


@pytest.mark.parametrize(
    ("token", "expected"),
    [(0, None), (4, 4)],  # the tokenizer's own EOS; another end token of the model's files
)
def test_a_further_end_token_is_the_stop_reason(tokenizer, token, expected):
    """The engine reports the request's stop tokens only, and ends a request at all end tokens of the model's files."""
    two_ends = Tokenizer(tokenizer.hf, eos_token_ids=[0, 4])
    for kind in (CUMULATIVE, FINAL):
        (*_, last) = play(state_for(two_ends, output_kind=kind), ([1, token], FinishReason.STOP))
        assert last == ("a", [1, token], "stop", expected)
    (*_, asked) = play(state_for(two_ends), ([1, 5], FinishReason.STOP, 5))
    assert asked[3] == 5
