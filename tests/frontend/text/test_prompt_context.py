"""An output's text continues its prompt's, as decoding both at once does, for every kind of tokenizer."""

# ruff: noqa: RUF001 - the texts are meant to be unusual

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from frontend.client.progress import Progress
from frontend.client.received_logprobs import PositionLogprobs, ReceivedLogprobs
from frontend.results.outputs import TokenLogprobs
from frontend.results.request_state import RequestState
from frontend.text.detokenizer import Detokenizer
from frontend.text.prompt_context import CONTEXT_TOKENS, prompt_context
from frontend.text.prompts import Prompt
from frontend.text.tokenizer import Tokenizer
from ipc.params.sampling_params import RequestOutputKind, SamplingParams
from ipc.wire.messages import FinishReason
from tests.frontend.text.text_kinds import KINDS, tokenizer_of

TEXTS = ["the fox does it", "Hello, world! it's  the   dog", "naïve café 你好，世界 👋🏽 the 👋", "the\nfox\n\n the"]
CHUNKS = (1, 2, 5, 1000)


def behind(all_text: str, prompt_text: str) -> str:
    """What the text of all tokens has more than the prompt's; a U+FFFD that becomes a character is no part of it."""
    shared = max(size for size in range(len(prompt_text) + 1) if all_text.startswith(prompt_text[:size]))
    return all_text[shared:]


def finished(tokenizer: Tokenizer, prompt: list[int], skip: bool) -> str:
    """The prompt's text. In a run of byte-fallback tokens an unfinished character spoils the others: it is left out."""
    text = tokenizer.decode(prompt, skip_special_tokens=skip)
    while tokenizer.has_byte_fallback and text.endswith("\ufffd"):
        prompt = prompt[:-1]
        text = tokenizer.decode(prompt, skip_special_tokens=skip)
    return text


def streamed(tokenizer: Tokenizer, prompt: list[int], output: list[int], size: int, *, skip: bool = True) -> str:
    """Checks too that what was shown is never taken back."""
    context = prompt_context(tokenizer, prompt, skip)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, context=context)
    text = ""
    for start in range(0, len(output), size):
        detokenizer.update(output[start : start + size])
        text += detokenizer.delta()
        assert detokenizer.text == text
    detokenizer.finish()
    return text + detokenizer.delta()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_prompt_and_output_are_one_text(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    num_whole = 0
    for cut in range(len(ids) + 1):
        prompt, output = ids[:cut], ids[cut:]
        for skip in (True, False):
            expected = tokenizer.decode(ids, skip_special_tokens=skip)
            before = tokenizer.decode(prompt, skip_special_tokens=skip)
            for size in CHUNKS:
                shown = streamed(tokenizer, prompt, output, size, skip=skip)
                assert shown == behind(expected, finished(tokenizer, prompt, skip)), (cut, size)
            if expected.startswith(before):
                num_whole += 1
                assert before + shown == expected
    assert num_whole >= len(text.split())


@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens(kind: str) -> None:
    """Special tokens, bytes that make no character and ids that do not exist, on both sides of the border."""
    tokenizer = tokenizer_of(kind)
    rng = random.Random(kind)
    pieces = [i for i in range(tokenizer.vocab_size) if len(tokenizer.hf.id_to_token(i) or "") in (1, 6)]
    for _ in range(300):
        ids = [rng.choice(pieces) if rng.random() < 0.6 else rng.randrange(tokenizer.vocab_size + 2) for _ in range(20)]
        cut, skip, size = rng.randrange(20), rng.random() < 0.5, rng.choice(CHUNKS)
        whole, before = (tokenizer.decode(part, skip_special_tokens=skip) for part in (ids, ids[:cut]))
        shown = streamed(tokenizer, ids[:cut], ids[cut:], size, skip=skip)
        if whole.startswith(before):
            assert before + shown == whole, (ids, cut)
        else:
            assert whole.endswith(shown), (ids, cut)


def test_equals_transformers() -> None:
    from transformers import PreTrainedTokenizerFast

    for tokenizer in map(tokenizer_of, KINDS):
        oracle = PreTrainedTokenizerFast(tokenizer_object=tokenizer.hf, clean_up_tokenization_spaces=False)
        ids = tokenizer.encode("Hello the fox does it")
        for cut in range(1, len(ids)):
            shown = streamed(tokenizer, ids[:cut], ids[cut:], 1)
            assert oracle.decode(ids[:cut], skip_special_tokens=True) + shown == oracle.decode(
                ids, skip_special_tokens=True
            )


def progress(ids: Sequence[int], logprobs: ReceivedLogprobs | None = None) -> Progress:
    column = np.array(ids, np.int32)
    return Progress(column, FinishReason.LENGTH, None, 0, 1.0, 2.0, 5.0, 6.0, None, logprobs)


def received(prompt: list[int], output: list[int]) -> ReceivedLogprobs:
    logprobs = ReceivedLogprobs(len(prompt))
    for position, token in enumerate([*prompt, *output][1:], start=1):
        logprobs.add(position, PositionLogprobs(1, np.array([token], np.int32), np.zeros(1, np.float32)))
    return logprobs


def token_texts(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs | None] | None) -> str:
    """Those of the tokens that stand there, without special ones, one after the other."""
    firsts = [next(iter(entry.items())) for entry in logprobs or () if entry]
    return "".join(one.decoded_token or "" for token, one in firsts if token not in tokenizer.special_token_ids)


@pytest.mark.parametrize("output_kind", list(RequestOutputKind))
@pytest.mark.parametrize("kind", KINDS)
def test_requests_of_every_output_kind(kind: str, output_kind: RequestOutputKind) -> None:
    """Both choices of a request; the prompt as token ids; the tokens' texts one after the other are the text."""
    tokenizer = tokenizer_of(kind)
    shown_text = partial(tokenizer.decode, skip_special_tokens=True)
    prompt = tokenizer.encode("the cat")
    outputs = [tokenizer.encode(text, add_special_tokens=False) for text in ("the is is", "é👋")]
    outputs[1].pop()
    params = SamplingParams(max_tokens=None, n=2, logprobs=0, prompt_logprobs=0, output_kind=output_kind)
    state = RequestState("id", 0, Prompt(None, prompt), params, tokenizer=tokenizer)
    shown = state.update(*(progress(output, received(prompt, output)) for output in outputs))
    assert shown is not None
    for output, completion in zip(outputs, shown.outputs, strict=True):
        expected = behind(shown_text(prompt + output), shown_text(prompt))
        assert completion.text == expected
        assert token_texts(tokenizer, completion.logprobs) == expected.rstrip("\ufffd")
    assert shown_text(prompt[:1]) + token_texts(tokenizer, shown.prompt_logprobs) == shown_text(prompt)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_that_begins_with_the_first_space(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("the cat is on")
    cut = next(i for i in range(len(ids)) if tokenizer.decode(ids[: i + 1], skip_special_tokens=True) == "the cat") + 1
    params = SamplingParams(max_tokens=None, stop=[" is"], output_kind=RequestOutputKind.FINAL_ONLY)
    state = RequestState("id", 0, Prompt("the cat", ids[:cut]), params, tokenizer=tokenizer)
    shown = state.update(progress(ids[cut:])._replace(finish=FinishReason.NONE))
    assert shown is not None
    assert (shown.outputs[0].text, shown.outputs[0].stop_reason) == ("", " is")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_is_not_looked_for_in_the_prompt(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    prompt, output = tokenizer.encode("the the"), tokenizer.encode(" the fox", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, stop=["the the"], context=prompt_context(tokenizer, prompt, True))
    detokenizer.update(output)
    detokenizer.finish()
    assert detokenizer.stop_string is None


def _byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return [next(i for i in range(tokenizer.vocab_size) if tokenizer.bytes_of(i) == bytes([byte])) for byte in data]


@pytest.mark.parametrize("kind", ["byte level", "byte level in a sequence", "llama 2", "gguf llama", "gguf gemma"])
def test_a_character_that_the_prompt_begins_and_the_output_ends(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for num_prompt_bytes in (1, 2, 3):
        word = tokenizer.encode("the", add_special_tokens=False)
        ids = [*word, *_byte_ids(tokenizer, "👋".encode()), *word]
        cut = len(word) + num_prompt_bytes
        for size in CHUNKS:
            assert streamed(tokenizer, ids[:cut], ids[cut:], size) == "👋" + behind(tokenizer.decode(word * 2), "the")
            # What the output does not complete stays the prompt's.
            before, whole = tokenizer.decode(ids[:cut]), tokenizer.decode([*ids[:cut], *word])
            assert before + streamed(tokenizer, ids[:cut], word, size) == whole
            assert streamed(tokenizer, ids[:cut], [], size) == ""


@pytest.mark.parametrize("kind", ["llama 2", "gguf llama", "gguf gemma"])
def test_a_run_of_bytes_over_the_border(kind: str) -> None:
    """The run is decoded as a whole: bad bytes in the output take no character of the prompt back."""
    tokenizer = tokenizer_of(kind)
    word = tokenizer.encode("the", add_special_tokens=False)
    run = _byte_ids(tokenizer, ("👋" * 10).encode())
    assert len(run) > CONTEXT_TOKENS
    behind_run = behind(tokenizer.decode(word * 2), "the")
    for num_prompt_bytes in range(len(run)):
        prompt, rest = [*word, *run[:num_prompt_bytes]], run[num_prompt_bytes:]
        for size in CHUNKS:
            expected = "👋" * (10 - num_prompt_bytes // 4) + behind_run
            assert streamed(tokenizer, prompt, [*rest, *word], size) == expected
            bad = _byte_ids(tokenizer, b"\xff\xff")
            assert streamed(tokenizer, prompt, [*bad, *word], size) == "\ufffd\ufffd" + behind_run
    # Bytes that were bad before the border stay so behind it.
    doomed = [*word, *_byte_ids(tokenizer, b"\xffa\xf0\x9f")]
    ids = [*doomed, *_byte_ids(tokenizer, b"\x91\x8b"), *word]
    assert tokenizer.decode(doomed) + streamed(tokenizer, doomed, ids[len(doomed) :], 1) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_without_text(kind: str) -> None:
    """The output is then the beginning of the text, unless the special tokens are a part of it."""
    tokenizer = tokenizer_of(kind)
    output = tokenizer.encode("the fox", add_special_tokens=False)
    special = min(tokenizer.special_token_ids)
    for prompt in ([], [special], [special] * 40, [10**6]):
        assert streamed(tokenizer, prompt, output, 1) == tokenizer.decode(output)
        whole, before = (tokenizer.decode(ids, skip_special_tokens=False) for ids in ([*prompt, *output], prompt))
        assert before + streamed(tokenizer, prompt, output, 1, skip=False) == whole
    # Special tokens at the prompt's end do not hide the word before them.
    word = tokenizer.encode("the", add_special_tokens=False)
    assert streamed(tokenizer, [*word, special], output, 1) == streamed(tokenizer, word, output, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_prompt_costs_no_more(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode("the fox does it " * 1000)
    assert 0 < len(prompt_context(tokenizer, prompt, True)) <= CONTEXT_TOKENS
