"""SentencePiece vocabularies of GGUF files, against SentencePiece's rule written out and against transformers."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from frontend.text.tokenizer import Tokenizer
from ipc.errors import ModelFileError, UnsupportedModelError
from ipc.files.gguf_vocabulary import build_gguf_tokenizer, merges_of_scores
from tests.frontend.text.sentencepiece_vocabulary import TRAINING_TEXT, greedy_merge, sentencepiece_metadata

METADATA = sentencepiece_metadata()
TOKENIZER = Tokenizer(build_gguf_tokenizer(METADATA), bos_token_id=1, eos_token_ids=[2])
#: Letters of the training text and others, the ▁ itself, characters of 2, 3 and 4 bytes that are no token.
_TEXTS = st.text(
    st.sampled_from("abcdefhlotuvwx ▁ \n\t123,.'éö你好ไ👋🏽\u0301\0") | st.characters(exclude_categories=["Cs"]),
    max_size=40,
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(_TEXTS)
@example("the the  the   the    the")
@example("abcabcabcabababababaaaaaaaaaaaaaaaaa")
def test_ids_equal_the_greedy_merge_and_decode_to_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert ids == greedy_merge(text, METADATA)
    assert TOKENIZER.decode(ids) == text.replace("▁", " ")


def test_long_words_are_used() -> None:
    ids = TOKENIZER.encode(TRAINING_TEXT[0])
    assert len(ids) < len(TRAINING_TEXT[0]) / 2
    assert ids == [1, *greedy_merge(TRAINING_TEXT[0], METADATA)]


@pytest.mark.parametrize("text", [*TRAINING_TEXT, "", " ", "  x", "👋🏽 \x00 ไทย", "a<s>b", "a </s> <think> b"])
def test_ids_equal_transformers(text: str) -> None:
    """Its builder for phi3 is the one that has Llama 2's own normalizer."""
    from transformers.integrations.gguf import convert_gguf_tokenizer

    names = {"tokens": "tokens", "scores": "scores", "token_type": "token_type", "unknown_token_id": "unk_token_id"}
    fields: dict[str, Any] = {ours: METADATA[f"tokenizer.ggml.{key}"] for key, ours in names.items()}
    oracle, _ = convert_gguf_tokenizer("phi3", {"tokenizer_type": "llama", **fields})
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert ids == oracle.encode(text, add_special_tokens=False).ids


def test_special_and_user_defined_tokens() -> None:
    think = METADATA["tokenizer.ggml.tokens"].index("<think>")
    ids = TOKENIZER.encode("the<s>the<think> fox</s>")
    assert [token for token in ids if token in (1, 2, think)] == [1, 1, think, 2]
    # Each stretch of text begins as if after a space.
    assert ids[1:] == [*greedy_merge("the", METADATA), 1, *greedy_merge("the", METADATA), think,
                       *greedy_merge(" fox", METADATA), 2]  # fmt: skip
    assert TOKENIZER.special_token_ids == {0, 1, 2}
    assert "<think>" in TOKENIZER.decode(ids, skip_special_tokens=True)
    assert "<s>" not in TOKENIZER.decode(ids, skip_special_tokens=True)


def test_byte_names_in_the_text_are_text() -> None:
    ids = TOKENIZER.encode("<0x41>", add_special_tokens=False)
    assert METADATA["tokenizer.ggml.tokens"].index("<0x41>") not in ids
    assert TOKENIZER.decode(ids) == "<0x41>"


def test_without_a_space_prefix() -> None:
    """Gemma's kind: no prefix, and runs of spaces are user-defined tokens, which llama.cpp writes with plain spaces."""
    tokens = [*METADATA["tokenizer.ggml.tokens"], "   "]
    metadata = sentencepiece_metadata(
        tokens=tokens,
        scores=[*METADATA["tokenizer.ggml.scores"], -1000.0],
        token_type=[*METADATA["tokenizer.ggml.token_type"], 4],
        add_space_prefix=False,
    )
    tokenizer = Tokenizer(build_gguf_tokenizer(metadata))
    for text in ("the fox", " the fox", "<s>the"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode("the fox", add_special_tokens=False) == greedy_merge("the fox", metadata)
    spaces = tokenizer.encode("a   b")
    assert spaces[2] == len(tokens) - 1
    assert tokenizer.decode(spaces, skip_special_tokens=True) == "a   b"


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
    ],
)
def test_bos_and_eos(changes: dict[str, Any], before: list[int], after: list[int]) -> None:
    hf = build_gguf_tokenizer(sentencepiece_metadata(**changes))
    middle = greedy_merge("the fox", METADATA)
    assert hf.encode("the fox").ids == [*before, *middle, *after]
    assert hf.encode("the fox", add_special_tokens=False).ids == middle


def test_scores_and_not_ids_decide() -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "ab", "bc"]
    types = [2, 3, 3, 1, 1, 1, 1, 1, 1]
    for scores, expected in (([-1.0, -2.0], [3, 7, 6]), ([-2.0, -1.0], [3, 4, 8]), ([-1.0, -1.0], [3, 7, 6])):
        metadata = sentencepiece_metadata(tokens=tokens, token_type=types, scores=[0.0] * 7 + scores)
        assert build_gguf_tokenizer(metadata).encode("abc", add_special_tokens=False).ids == expected


def test_merges_of_the_file_come_before_its_scores() -> None:
    """Files made from a tokenizer.json, with one score for all tokens or none."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "ab", "bc"]
    types = [2, 3, 3, 1, 1, 1, 1, 1, 1]
    for scores in (None, [-1000.0] * 9):
        for merges, expected in ((["b c", "a b"], [3, 4, 8]), (["a b", "b c"], [3, 7, 6]), ([], [3, 4, 5, 6])):
            metadata = sentencepiece_metadata(tokens=tokens, token_type=types, scores=scores, merges=merges)
            assert build_gguf_tokenizer(metadata).encode("abc", add_special_tokens=False).ids == expected


def test_a_character_without_bytes_is_unknown() -> None:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a"]
    metadata = sentencepiece_metadata(tokens=tokens, token_type=[2, 3, 3, 1, 1], scores=[0.0] * 5)
    assert build_gguf_tokenizer(metadata).encode("aé你a").ids == [1, 3, 4, 0, 4]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"merges": ["the x"]}, ModelFileError, r"merges\[0\] is 'the x'"),
        ({"scores": None}, ModelFileError, "scores must be a list"),
        ({"scores": [0.0]}, ModelFileError, "scores has 1 entries for"),
        ({"scores": ["x"]}, ModelFileError, "only float"),
        ({"token_type": [1]}, ModelFileError, "token_type has 1 entries for"),
        ({"unknown_token_id": 10**6}, ModelFileError, "unknown_token_id is 1000000"),
        ({"bos_token_id": None}, ModelFileError, "BOS is to be added but tokenizer.ggml.bos_token_id is missing"),
        ({"add_eos_token": True, "eos_token_id": None}, ModelFileError, "EOS is to be added"),
        ({"add_space_prefix": 1}, ModelFileError, "add_space_prefix must be true or false"),
        ({"remove_extra_whitespaces": True}, UnsupportedModelError, "remove_extra_whitespaces"),
        ({"precompiled_charsmap": [1]}, UnsupportedModelError, "precompiled_charsmap"),
    ],
)
def test_bad_vocabulary(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        build_gguf_tokenizer(sentencepiece_metadata(**changes))
    assert caught.type is error


@pytest.mark.parametrize(
    "text", [*TRAINING_TEXT, "", " ", "  x", "a\n\nb", "👋🏽 \x00 ไทย", "a<s>b", "a </s> <think> b"]
)
def test_a_vocabulary_of_gemma_4_has_merges_and_adds_no_space(text: str) -> None:
    """As transformers' tokenizer of Gemma, which splits nothing before the merges."""
    import transformers

    tokens, types = METADATA["tokenizer.ggml.tokens"], METADATA["tokenizer.ggml.token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = merges_of_scores(vocabulary, METADATA["tokenizer.ggml.scores"], types)
    own = {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
    names = {"unk_token": tokens[0], "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    oracle = transformers.GemmaTokenizer(vocab=vocabulary, merges=merges, **names)
    oracle.add_tokens("<think>")
    tokenizer = Tokenizer(build_gguf_tokenizer({**METADATA, **own}), bos_token_id=1, eos_token_ids=[2])
    ids = oracle.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text) == [1, *ids]
    assert tokenizer.decode(ids) == oracle.decode(ids)


def test_a_vocabulary_of_gemma_4_without_merges_is_refused() -> None:
    metadata = {**METADATA, "tokenizer.ggml.model": "gemma4"}
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.merges must be a list"):
        build_gguf_tokenizer(metadata)
