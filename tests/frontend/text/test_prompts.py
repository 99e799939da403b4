"""Prompt forms to token ids, and what is said about the wrong ones."""

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from frontend.text.prompts import Prompt, read_prompts, split_prompts
from frontend.text.tokenizer import Tokenizer
from ipc.errors import InvalidRequestError, UnsupportedParameterError


@pytest.fixture(scope="module")
def tokenizer():
    hf = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "?": 3}, unk_token="?"))
    hf.pre_tokenizer = pre_tokenizers.Whitespace()
    hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return Tokenizer(hf, bos_token_id=0)


def read(*prompts, tokenizer=None, vocab_size=10, max_model_len=8, **arguments):
    return read_prompts(prompts, tokenizer, vocab_size=vocab_size, max_model_len=max_model_len, **arguments)


def test_every_form(tokenizer):
    assert read("a b", [1, 2], {"prompt": "b"}, {"prompt_token_ids": (3,), "cache_salt": "x"}, tokenizer=tokenizer) == [
        Prompt("a b", [0, 1, 2]),
        Prompt(None, [1, 2]),
        Prompt("b", [0, 2]),
        Prompt(None, [3], "x"),
    ]


def test_a_text_beside_its_ids_is_not_encoded():
    assert read({"prompt": "shown", "prompt_token_ids": [4], "multi_modal_data": None}) == [Prompt("shown", [4])]


def test_a_rendered_template_brings_its_own_special_tokens(tokenizer):
    assert read("a", tokenizer=tokenizer, add_special_tokens=False) == [Prompt("a", [1])]


def test_numpy_ids_are_ids():
    (prompt,) = read(np.array([1, 2], np.int32))
    assert prompt.token_ids == [1, 2]
    assert read([np.int64(3), 4]) == [Prompt(None, [3, 4])]
    assert {type(token) for token in read([np.int64(3), 4])[0].token_ids} == {int}


def test_one_prompt_or_many():
    assert split_prompts("a") == ["a"]
    assert split_prompts({"prompt": "a"}) == [{"prompt": "a"}]
    assert split_prompts([1, 2]) == [[1, 2]]
    assert split_prompts([[1, 2], [3]]) == [[1, 2], [3]]
    assert split_prompts(("a", {"prompt": "b"})) == ["a", {"prompt": "b"}]
    assert split_prompts([]) == []
    (one,) = split_prompts(np.array([1, 2]))
    assert one.tolist() == [1, 2]


@pytest.mark.parametrize("prompts", [None, 5, b"bytes", {1, 2}])
def test_what_is_no_prompt(prompts):
    with pytest.raises(InvalidRequestError, match="prompts must be one or a list of: a str, a list of token ids"):
        split_prompts(prompts)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ([], "the prompt cannot be empty; a prompt needs at least one token"),
        ([1, "2"], "token ids must be ints; at index 1 is '2'"),
        ([1.0, 2], r"token ids must be ints; at index 0 is 1\.0"),
        ([True, 2], "token ids must be ints; at index 0 is True"),
        ([3, -1], "token id -1 at index 1 is out of vocabulary; known are 0 to 9"),
        ([10], "token id 10 at index 0 is out of vocabulary; known are 0 to 9"),
        ([2**70], "out of vocabulary"),
        ([1] * 8, "the prompt has 8 tokens; at most 7 fit: the maximum context length is 8 tokens.*max_model_len=8"),
        ("text", "this engine has no tokenizer: give token ids"),
        ({"prompt_token_id": [1]}, "unknown key 'prompt_token_id'; did you mean 'prompt_token_ids'"),
        ({}, "'prompt' or 'prompt_token_ids' is missing"),
        ({"prompt": 5}, "'prompt' must be a str, got int"),
        ({"prompt_token_ids": [1], "cache_salt": 5}, "'cache_salt' must be a str, got int"),
        ({"prompt_token_ids": "12"}, "must be a str, a list of token ids.*; got str"),
        (None, "must be a str, a list of token ids.*; got None"),
        (np.zeros((2, 2), np.int32), "got ndarray"),
    ],
)
def test_a_wrong_prompt_is_named(prompt, text):
    with pytest.raises(InvalidRequestError, match=text):
        read(prompt)


@pytest.mark.parametrize(
    ("salt", "text"),
    [("a" * 1025, "'cache_salt' has 1025 characters; at most 1024 are"), ("\udcff", "must be valid Unicode")],
)
def test_a_salt_that_cannot_be_sent(salt, text):
    assert read({"prompt_token_ids": [1], "cache_salt": "a" * 1024})
    with pytest.raises(InvalidRequestError, match=text):
        read({"prompt_token_ids": [1], "cache_salt": salt})


def test_a_tokenizer_that_knows_more_tokens_than_the_model(tokenizer):
    with pytest.raises(InvalidRequestError, match="token id 2 at index 2 is out of vocabulary; known are 0 to 1"):
        read("a b", tokenizer=tokenizer, vocab_size=2)


def test_the_wrong_one_of_many_is_numbered():
    with pytest.raises(InvalidRequestError, match=r"the prompt cannot be empty \(prompt 1 of 3\)"):
        read([1], [], [2])


def test_an_empty_text_without_special_tokens_is_empty(tokenizer):
    with pytest.raises(InvalidRequestError, match="empty"):
        read("", tokenizer=tokenizer, add_special_tokens=False)


def test_what_vllm_takes_and_this_does_not():
    with pytest.raises(UnsupportedParameterError, match="'encoder_prompt' is not supported"):
        read({"prompt": "a", "encoder_prompt": object()})


def test_truncation_keeps_the_end(tokenizer):
    prompts = ("a b", [1, 2, 3], list(range(9)), [1])
    read_back = read(*prompts, tokenizer=tokenizer, truncation=[2, None, -1, 5])
    assert [prompt.token_ids for prompt in read_back] == [[1, 2], [1, 2, 3], [2, 3, 4, 5, 6, 7, 8], [1]]
