"""The text of each token where it stands, for vocabularies of bytes and those that fall back to bytes."""

from itertools import pairwise

import numpy as np
import pytest

from frontend.client.progress import Progress
from frontend.client.received_logprobs import PositionLogprobs, ReceivedLogprobs
from frontend.results.completion_state import CompletionState
from frontend.results.request_state import RequestState
from frontend.text.prompts import Prompt
from frontend.text.token_texts import TokenTexts
from frontend.text.tokenizer import Tokenizer
from ipc.files.gguf_vocabulary import build_gguf_tokenizer
from ipc.files.model_files import read_tokenizer_files, resolve_model
from ipc.params.sampling_params import SamplingParams
from ipc.wire.messages import FinishReason
from tests.frontend.text.sentencepiece_vocabulary import sentencepiece_metadata
from tests.frontend.text.test_detokenizer import TEXTS, _byte_level_in_a_sequence, _llama, _words

MAKERS = {
    "demo": lambda: Tokenizer.from_files(read_tokenizer_files(resolve_model(None))),
    "byte level in a sequence": _byte_level_in_a_sequence,
    "llama": _llama,
    "gemma": lambda: Tokenizer(build_gguf_tokenizer(sentencepiece_metadata(add_space_prefix=False))),
}
KINDS = {name: make() for name, make in MAKERS.items()}
#: Texts without a U+FFFD of their own, which the reference below could not tell.
PLAIN = [text for text in TEXTS if "\ufffd" not in text]


def encode(kind: str, text: str) -> list[int]:
    tokenizer = KINDS[kind]
    if kind != "byte level in a sequence":
        return tokenizer.encode(text, add_special_tokens=False)
    byte_ids = {tokenizer.bytes_of(token): token for token in range(256)}
    return [byte_ids[bytes([byte])] for byte in text.encode()]


def byte(kind: str, value: int) -> int:
    tokenizer = KINDS[kind]
    return next(token for token in range(tokenizer.vocab_size) if tokenizer.bytes_of(token) == bytes([value]))


def settled_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The text without its unfinished last character. Of bytes that stand for themselves a run is decoded as a whole,
    so tokens are left out until nothing is unfinished; of others the end is cut off."""
    if not tokenizer.has_byte_fallback:
        return tokenizer.decode(ids, skip_special_tokens=False).rstrip("\ufffd")
    shorter = (tokenizer.decode(ids[: len(ids) - out], skip_special_tokens=False) for out in range(4))
    return next(text for text in shorter if not text.endswith("\ufffd"))


@pytest.mark.parametrize("text", PLAIN)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_what_each_token_adds(kind: str, text: str) -> None:
    """Reference: how much longer each token makes the settled text of all before it."""
    tokenizer = KINDS[kind]
    ids = encode(kind, text)
    settled = [settled_text(tokenizer, ids[:end]) for end in range(len(ids) + 1)]
    texts = TokenTexts(tokenizer, skip_special_tokens=False)
    shown = [texts.take([token])[0] for token in ids]
    assert shown == [after[len(before) :] for before, after in pairwise(settled)]
    assert "" in shown or text == PLAIN[0] or kind in ("demo", "gemma")


@pytest.mark.parametrize("kind", KINDS)
def test_every_part_of_every_length(kind: str) -> None:
    texts = TokenTexts(KINDS[kind])
    for character in "é你👋\ufffd":
        parts = [texts.take([byte(kind, value)])[0] for value in character.encode()]
        assert parts == [""] * (len(parts) - 1) + [character]


@pytest.mark.parametrize("kind", KINDS)
def test_others_are_shown_as_they_would_follow_and_change_nothing(kind: str) -> None:
    first, second, third, last = (byte(kind, value) for value in "👋".encode())
    (other,) = (byte(kind, value) for value in (0x8C,))
    (word,) = encode(kind, "a")[-1:]
    texts = TokenTexts(KINDS[kind], True, [word, first, second, third])
    assert texts.take([first, last, other, word, first]) == ["", "👋", "\U0001f44c", "a", ""]
    assert texts.take([second, last]) == ["", ""]  # the last completes nothing: two bytes are missing
    assert texts.take([third, last]) == ["", ""]
    assert texts.take([word, last]) == ["a", "👋"]
    assert texts.take([last, word]) == ["", "a"]  # after a whole character: no part of one


def test_a_token_of_several_bytes_shows_its_whole_characters() -> None:
    tokenizer = KINDS["demo"]
    parts = [token for token in range(tokenizer.vocab_size) if (tokenizer.bytes_of(token) or b"") == b" \xf0\x9f"]
    (token,) = parts
    assert tokenizer.decode_batch([[token]]) == [" \ufffd"]
    texts = TokenTexts(tokenizer)
    assert texts.take([token]) == [" "]
    assert texts.take(encode("demo", "a")) == ["a"]


def test_other_vocabularies_keep_their_own() -> None:
    tokenizer = _words(None)
    token = tokenizer.hf.token_to_id("\ufffd")
    assert tokenizer.bytes_of(token) is tokenizer.bytes_of(10**6) is None
    assert TokenTexts(tokenizer).take([token, 2]) == ["\ufffd", "hello"]
    assert TokenTexts(tokenizer, True, [token, token]).take([token, 2]) == [" \ufffd", " hello"]


def one(*ids: int) -> PositionLogprobs:
    return PositionLogprobs(1, np.array(ids, np.int32), np.zeros(len(ids), np.float32))


def progress(ids: list[int], logprobs: ReceivedLogprobs) -> Progress:
    return Progress(np.array(ids, np.int32), FinishReason.NONE, None, 0, 1.0, 2.0, 5.0, 0.0, None, logprobs)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_output_are_one_sequence(kind: str) -> None:
    """A character that begins in the prompt and ends in the output, over several updates."""
    parts = [byte(kind, value) for value in "👋".encode()]
    params = SamplingParams(max_tokens=None, logprobs=1, prompt_logprobs=0)
    state = RequestState("id", 0, Prompt(None, parts[:2]), params, tokenizer=KINDS[kind])
    received = ReceivedLogprobs(2)
    received.add(1, one(parts[1]))
    received.add(2, one(parts[2], parts[1]))
    state.update(progress(parts[2:3], received))
    received.add(3, one(parts[3], parts[0]))
    output = state.update(progress(parts[3:], received))
    assert output is not None
    shown = [
        [[value.decoded_token for value in entry.values()] for entry in entries or () if entry]
        for entries in (output.prompt_logprobs, output.outputs[0].logprobs)
    ]
    assert shown == [[[""]], [["", ""], ["👋", ""]]]


def test_without_text_there_is_none() -> None:
    params = SamplingParams(max_tokens=None, logprobs=0, detokenize=False)
    received = ReceivedLogprobs(0)
    received.add(0, one(5))
    state = CompletionState(0, params, KINDS["demo"])
    state.update(progress([5], received))
    assert [entry[5].decoded_token for entry in state.output().logprobs or []] == [None]
