"""What programs for transformers' tokenizers call, compared with transformers itself on the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from frontend.text.tokenizer import Tokenizer
from ipc.errors import InvalidRequestError
from ipc.files.model_files import read_tokenizer_files
from tests.programs.__main__ import write_model

TEXTS = ["the cat is", " two\n", "ünï </s> x", ""]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"  # noqa: E501
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]


@pytest.fixture(name="pair", scope="module")
def a_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Our tokenizer and transformers', of the same files."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return ours_of(folder), transformers.AutoTokenizer.from_pretrained(folder)


def ours_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_files(read_tokenizer_files(folder))


def test_calls_are_those_of_transformers(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.tokenize(text) == theirs.tokenize(text)
    assert ours(TEXTS, add_special_tokens=False).input_ids == theirs(TEXTS, add_special_tokens=False).input_ids
    assert ours(TEXTS).attention_mask == theirs(TEXTS).attention_mask
    assert list(ours(TEXTS, return_attention_mask=False)) == ["input_ids"]
    ids = ours(TEXTS).input_ids
    assert ours.batch_decode(ids) == theirs.batch_decode(ids)
    assert ours.decode(5) == theirs.decode(5)
    assert ours.get_vocab() == theirs.get_vocab()
    assert len(ours) == len(theirs)
    tokens = ["<s>", "a", "nothing of it"]
    assert ours.convert_tokens_to_ids(tokens)[:2] == theirs.convert_tokens_to_ids(tokens)[:2]
    assert ours.convert_tokens_to_ids(tokens[2]) is None
    assert ours.convert_ids_to_tokens([1, 40]) == theirs.convert_ids_to_tokens([1, 40])
    assert ours.convert_ids_to_tokens(1) == "<s>"
    assert set(ours.all_special_tokens) >= set(theirs.all_special_tokens) == {"<s>", "</s>"}
    assert ours.all_special_ids == [0, 1, 2]
    assert ours.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_chats_are_rendered_as_by_transformers(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    for options in ({"add_generation_prompt": True}, {}, {"continue_final_message": True}):
        expected = theirs.apply_chat_template(CHAT, tokenize=False, **options)
        assert ours.apply_chat_template(CHAT, tokenize=False, **options) == expected
        assert ours.decode(ours.apply_chat_template(CHAT, **options), skip_special_tokens=False) == expected
    assert ours.apply_chat_template(CHAT, tokenize=False, chat_template="{{ messages|length }}") == "2"
    assert ours.chat_template == TEMPLATE
    ours.chat_template = "{{ bos_token }}!"
    assert ours.apply_chat_template(CHAT, tokenize=False) == "<s>!"


def test_what_would_change_the_ids_is_refused(pair: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="this tokenizer has no padding, return_tensors"):
        pair[0]("a", padding=True, return_tensors="pt")
    with pytest.raises(AttributeError, match="token_type_ids"):
        pair[0]("a").token_type_ids  # noqa: B018


def test_options_of_a_chat_are_no_variables_of_its_template(pair: tuple[Tokenizer, Any]) -> None:
    ours = pair[0]
    ids = ours.apply_chat_template(CHAT, padding=False, truncation=None)
    assert ours.apply_chat_template(CHAT, return_dict=True) == {"input_ids": ids, "attention_mask": [1] * len(ids)}
    for option in ({"truncation": True, "max_length": 3}, {"padding": True}, {"return_tensors": "pt"}):
        with pytest.raises(InvalidRequestError, match=f"this tokenizer has no {', '.join(option)}"):
            ours.apply_chat_template(CHAT, **option)
